"""The changes that ``mutants.py`` makes to the syntax tree of a file."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from types import CodeType
from typing import Any

import attrs

ROOT = Path(__file__).parents[1]
COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.RShift: ast.LShift,
    ast.LShift: ast.RShift,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
PAIRS = "minimum maximum, min max, fmin fmax, argmin argmax, any all, sum mean, exp expm1, log log1p"
LIKE = 0.6  # from where on two names are alike enough to be mistaken for each other
TWINS = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), reversed(pair.split()))}


@attrs.frozen
class Mutant:
    """One change; ``place`` and ``choice`` say which. ``owner`` is the function that it stands in, "class" for the
    fields of one, and "" otherwise.
    """

    path: str
    line: int
    place: int
    choice: int
    kind: str
    before: str
    after: str
    owner: str


def changed(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """What may stand in the place of ``node``, each with the kind of mistake that it is."""
    return [*(("operator", new) for new in _operators(node)), *_slips(node)]


def _slips(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The mistakes of somebody who copies and edits."""
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg:
                yield "argument", ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :])
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("detach", "copy", "clone") and not node.args:
            yield node.func.attr, node.func.value
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and getattr(node, "twin", None):
        yield "name", ast.Name(node.twin, node.ctx)  # type: ignore[attr-defined]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        if isinstance(node.slice, ast.Name):
            yield "index", ast.Subscript(node.value, ast.Constant(0), node.ctx)
            yield "mask", node.value
        if isinstance(node.slice, ast.Slice) and (node.slice.lower is None) != (node.slice.upper is None):
            yield "slice", node.value


def _name_twins(tree: ast.AST) -> None:
    """Marks each name that a function reads with the one of its names that is most like it: low and high, a and b."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        arguments = function.args
        bound = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg != "self"]
        read = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
        bound += [n.id for n in read if isinstance(n.ctx, ast.Store) and n.id not in bound]
        for node in read:
            if node.id in bound and isinstance(node.ctx, ast.Load):
                others = [name for name in bound if name != node.id]
                alike = max(others, key=lambda other, name=node.id: _alike(name, other), default=None)
                if alike and _alike(node.id, alike) >= LIKE:
                    node.twin = alike  # type: ignore[attr-defined]


def _alike(a: str, b: str) -> float:
    """How alike two names are: 0 to 1; single letters are as like as any."""
    return LIKE if len(a) == len(b) == 1 else SequenceMatcher(None, a, b).ratio()


def _operators(node: ast.AST) -> list[ast.AST]:
    """The changes of the usual tools."""
    if isinstance(node, ast.Compare):
        return [
            ast.Compare(node.left, [*node.ops[:i], new(), *node.ops[i + 1 :]], node.comparators)
            for i, op in enumerate(node.ops)
            for new in COMPARISONS[type(op)]
        ]
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in OPERATORS:
        other = copy.copy(node)
        other.op = OPERATORS[type(node.op)]()
        return [other]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [ast.Constant(not node.value)]
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        less = node.value / 2 if isinstance(node.value, float) and node.value else node.value - 1
        return [ast.Constant(new) for new in (node.value + 1, less) if new != node.value]
    if isinstance(node, (ast.Break, ast.Continue)):
        return [ast.Continue() if isinstance(node, ast.Break) else ast.Break()]
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return [ast.Pass()]
    if isinstance(node, ast.Attribute) and node.attr in TWINS and not ast.unparse(node.value).endswith("rows"):
        return [ast.Attribute(node.value, TWINS[node.attr], node.ctx)]
    if isinstance(node, ast.Name) and node.id in TWINS and isinstance(node.ctx, ast.Load):
        return [ast.Name(TWINS[node.id], node.ctx)]
    return []


def walk(node: ast.AST, owner: str = "") -> Iterator[tuple[ast.AST, str, Callable[[ast.AST], None]]]:
    """Every node that may change, the function whose code it is part of, and how to replace it."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params") or isinstance(node, (ast.JoinedStr, ast.Global)):
            continue
        inside = owner
        if isinstance(node, ast.FunctionDef) and name == "body" and not owner:
            inside = getattr(node, "owner", node.name)
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST):
                continue
            if isinstance(node, ast.ClassDef):
                inside = "" if isinstance(child, ast.FunctionDef) else "class"
            if isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef):
                child.owner = f"{node.name}.{child.name}"  # type: ignore[attr-defined]

            def replace(new: ast.AST, name: str = name, value: Any = value, i: int = i) -> None:
                if isinstance(value, list):
                    value[i] = new
                else:
                    setattr(node, name, new)

            yield child, inside, replace
            yield from walk(child, inside)


def mutants(path: Path) -> Iterator[Mutant]:
    """All changes to a file."""
    tree = ast.parse(path.read_text())
    _name_twins(tree)
    for place, (node, owner, _) in enumerate(walk(tree)):
        for choice, (kind, new) in enumerate(changed(node)):
            before, after = (ast.unparse(ast.fix_missing_locations(copy.deepcopy(x))) for x in (node, new))
            name = str(path.relative_to(ROOT))
            yield Mutant(name, getattr(node, "lineno", 0), place, choice, kind, before, after, owner)


def compiled(mutant: Mutant) -> CodeType:
    """The code of the changed file."""
    path = ROOT / mutant.path
    tree = ast.parse(path.read_text())
    if mutant.place < 0:  # no change at all
        return compile(tree, str(path), "exec")
    _name_twins(tree)
    node, _, replace = next(found for i, found in enumerate(walk(tree)) if i == mutant.place)
    replace(ast.copy_location(changed(node)[mutant.choice][1], node))
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def changed_source(mutant: Mutant) -> bytes:
    """Return the text of the changed file: all else stays as it is written."""
    text = (ROOT / mutant.path).read_bytes()
    tree = ast.parse(text)
    _name_twins(tree)
    node: Any = next(found for i, (found, _, _) in enumerate(walk(tree)) if i == mutant.place)
    after = f"({mutant.after})" if isinstance(node, ast.expr) else mutant.after
    lines = text.splitlines(keepends=True)  # offsets count bytes
    head = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    tail = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return head + after.encode() + tail


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)
