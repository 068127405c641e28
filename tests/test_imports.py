"""Packages stand on each other in one direction, lazy imports included."""

from __future__ import annotations

import ast
import functools
import graphlib
import itertools
import re
from collections import defaultdict
from pathlib import Path

import rlkit

ROOT = Path(rlkit.__file__).parent


def node(name):
    """The folder that a module lies in, or the file itself where that is directly in rlkit/."""
    path = ROOT.parent / name.replace(".", "/")
    while path != ROOT:
        if path.is_dir() or path.parent == ROOT:
            return ".".join(path.relative_to(ROOT.parent).parts)
        path = path.parent
    return "rlkit"


def is_type_checking(statement):
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def walk(tree):
    """Every node that runs: what stands under ``if TYPE_CHECKING`` does not."""
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from walk(other)
        else:
            yield child
            yield from walk(child)


def imported(source):
    """The names that a module's text imports, anywhere in it; ``rlkit.connect`` imports what ``connect`` lies in."""
    for statement in walk(ast.parse(source)):
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.split(".")[0] == "rlkit":
            for alias in statement.names:
                yield f"{statement.module}.{alias.name}" if statement.module != "rlkit" else public(alias.name)
        elif isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if alias.name.startswith("rlkit."))
        elif isinstance(statement, ast.Attribute) and getattr(statement.value, "id", None) == "rlkit":
            yield public(statement.attr)


@functools.cache
def imports_of(path):
    """The names that a module imports, read once for all tests here."""
    return tuple(imported(path.read_text("utf-8")))


def public(name):
    """The module that an attribute of ``rlkit`` is or lies in."""
    if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file():
        return f"rlkit.{name}"
    return getattr(getattr(rlkit, name), "__module__", "rlkit")


@functools.cache
def graph():
    edges = defaultdict(dict)
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        if path == ROOT / "__init__.py":
            continue  # the door, which opens on everything
        here = node(name.removesuffix(".__init__"))
        for other in imports_of(path):
            if (there := node(other)) not in (here, "rlkit"):
                edges[here].setdefault(there, name)
    return edges


def test_packages_have_an_order():
    """No package imports, now or later, one that stands on it."""
    edges = graph()
    assert len(edges) > 30
    try:
        order = list(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError as error:
        cycle = error.args[1][::-1]
        steps = [f"{a} imports {b} (in {edges[a][b]})" for a, b in itertools.pairwise(cycle)]
        raise AssertionError("\n".join(steps)) from None
    assert order.index("rlkit.types") < order.index("rlkit.backends") < order.index("rlkit.runs")


def test_floors_of_the_local_backend():
    """Products, attention and cache, model, training, sampling, several processes: none knows one above it.

    Sampling stands on training, since it scores texts as training packs them.
    """
    edges = {here: set(there) for here, there in graph().items() if here.startswith("rlkit.backends.local")}

    def floor(room):
        return 1 + max((floor(x) for x in edges[room] if x in edges), default=0)

    floors = {room.removeprefix("rlkit.backends.local"): floor(room) for room in edges}
    below = {".products": 1, ".attention": 2, ".cache": 2, ".model": 3, ".training": 4}
    assert floors == {**below, ".sampling": 5, "": 6, ".distributed": 7}


def test_the_local_backend_runs_without_its_extensions():
    """What one process needs imports neither vLLM's client nor several processes, which options name."""
    found = {}
    for path in sorted((ROOT / "backends" / "local").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        rooms = {node(other).removeprefix("rlkit.backends.") for other in imports_of(path)}
        if not name.startswith("rlkit.backends.local.distributed") and rooms & {"vllm", "local.distributed"}:
            found[name.removeprefix("rlkit.backends.local.")] = rooms & {"vllm", "local.distributed"}
    assert found == {}


def test_lazy_imports_count():
    """An import within a function, and an attribute of the package, are imports; one for type checkers is none."""
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from rlkit.runs import Run
def f():
    import rlkit
    from rlkit import advantages
    from rlkit.losses.prepare import prepare
    return rlkit.connect
"""
    assert {node(name) for name in imported(source)} == {"rlkit.advantages", "rlkit.losses", "rlkit.backends"}


def test_no_module_imports_the_whole():
    """Names come from the module that defines them: ``import rlkit`` inside rlkit would wait for all of it."""
    found = [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.rglob("*.py"))
        if re.search(r"^ *import rlkit$", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert found == []


def test_a_private_file_is_imported_by_its_own_room():
    """A file that begins with an underscore is private to its folder, and to the folders in it."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for other in imports_of(path):
            *folders, last = other.split(".")
            parts = (
                [*folders, last] if (ROOT.parent / "/".join([*folders, last])).with_suffix(".py").is_file() else folders
            )
            room = ".".join(parts[:-1])
            if parts and parts[-1].startswith("_") and not f"{module}.".startswith(f"{room}."):
                found.append(f"{module} imports {'.'.join(parts)}")
    assert found == []
