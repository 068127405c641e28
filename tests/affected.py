"""Print the test files that a change touches: ``python -m tests.affected [BASE]``; ``make affected`` runs them.

A change is what differs from BASE (default: the last commit that main has, too), untracked files included. It touches
the test files that import a changed module, at any depth, also inside functions, through what ``rlkit`` re-exports
(``rlkit.Datum``), and by the name of a registry (``connect("toy")``); the tests in the mirror of its folder
(rlkit/runs/state.py: tests/runs); and, for an example and a file that is not a module (a template, golden values), the
tests that name it. It does not see what a test reaches by a name that it builds. ``make test-all`` does.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("rlkit", "tests", "examples", "benchmarks", "docs")
EVERYTHING = {"pyproject.toml", "constraints.txt", "Makefile", "tests/conftest.py", "tests/properties.py"}


def read_modules():
    """Return the path of every module, by dotted name."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def read_exports(modules):
    """Return what a name stands for: "rlkit.Datum" for rlkit.types, and "toy" for the module that a registry names."""
    root = ast.parse(modules["rlkit"].read_text("utf-8"))
    found = {
        f"rlkit.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for node in ast.walk(root)
        if isinstance(node, ast.ImportFrom) and node.module != "rlkit"
        for alias in node.names
    }
    for path in (ROOT / "rlkit").rglob("*.py"):
        found |= re.findall(r'(\w+)"?[=:] ?"(rlkit(?:\.\w+)+):\w+"', path.read_text("utf-8"))
    return found


def find_imports(name, path, modules, exports):
    """Return the modules that a module imports; of a test also those that its strings name, which programs import."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    named = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            named |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rlkit":
            named.add(f"rlkit.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not name.startswith("rlkit"):
            named |= {node.value, *re.findall(r"\b(?:rlkit|tests|examples)(?:\.\w+)+", node.value)}
    found = set()
    for each in named:
        each = exports.get(each, each)
        while each and each not in modules:  # a name of a module stands for the module
            each = each.rpartition(".")[0]
        found.add(each)
    return found - {"", name, "rlkit", "tests"}  # rlkit itself re-exports lazily: it leads to everything


@functools.cache
def read_graph():
    """Return the path of every module, and the modules that it imports."""
    modules = read_modules()
    exports = read_exports(modules)
    return modules, {name: find_imports(name, path, modules, exports) for name, path in modules.items()}


def find_affected(changed):
    """Return the paths that pytest is to run for these changed files."""
    if EVERYTHING & set(changed):
        return ["tests", "rlkit"]
    modules, imports = read_graph()
    names = {str(path.relative_to(ROOT)): name for name, path in modules.items()}
    reached = {names[each] for each in changed if each in names}
    for other in map(Path, (each for each in changed if each not in names or each.startswith("examples/"))):
        if other.suffix in (".md", ".yml") or other.parts[0] == ".ci":
            reached |= {"tests.test_docs", "tests.test_repository"}
        else:
            word = re.compile(rf"\b{re.escape(other.stem)}\b")
            reached |= {name for name, path in modules.items() if word.search(path.read_text("utf-8"))}
    while more := {name for name, found in imports.items() if found & reached} - reached:
        reached |= more
    tests = {path for name in reached if (path := modules[name]).name.startswith("test_")}
    for each in map(Path, changed):
        if each.name == "conftest.py":
            tests |= set((ROOT / each).parent.rglob("test_*.py"))
        if each.parts[0] == "rlkit":
            mirror = ROOT / "tests" / Path(*each.parts[1:-1])
            tests |= set(mirror.glob("test_*.py")) if len(each.parts) > 2 else set()
            tests |= {ROOT / each} if each.suffix == ".py" else set()  # its docstrings' examples
    return sorted(str(path.relative_to(ROOT)) for path in tests if path.exists())


def ask_git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")


def list_changes(base=None):
    """Return the paths that differ from ``base``, untracked ones included."""
    base = base or ask_git("merge-base", "main", "HEAD")[0]
    changed = ask_git("diff", "--name-only", base) + ask_git("ls-files", "--others", "--exclude-standard")
    return sorted(set(changed) - {""})


if __name__ == "__main__":
    print(*find_affected(list_changes(*sys.argv[1:])), sep="\n")
