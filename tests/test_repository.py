"""Rules that hold for every file: nothing that runs code from data, documentation that compiles."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("rlkit", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "marshal.loads",
    "os.system",
    "numpy.load",  # without allow_pickle=False, see below
}
FORBIDDEN_ARGUMENTS = {"trust_remote_code": True, "shell": True, "allow_pickle": True, "weights_only": False}
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def dotted(node):
    """`a.b.c` of a name or attribute, with `np` written out."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join(["numpy" if node.id == "np" else node.id, *reversed(parts)])


def problems(source, name="<text>"):
    """What in ``source`` could run code that comes with data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"{where}: import {x}" for x in names if x.split(".")[0] in FORBIDDEN_IMPORTS]
        if isinstance(node, ast.ImportFrom):
            called = {f"{node.module}.{alias.name}" for alias in node.names}
            found += [f"{where}: from-import of {x}" for x in called & FORBIDDEN_CALLS]
        if not isinstance(node, ast.Call):
            continue
        constants = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        call = dotted(node.func)
        safe_load = call == "numpy.load" and constants.get("allow_pickle") is False
        if call in FORBIDDEN_CALLS and not safe_load:
            found.append(f"{where}: {call}()")
        found += [f"{where}: {k}={v}" for k, v in FORBIDDEN_ARGUMENTS.items() if constants.get(k) is v]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_comes_from_data(path):
    assert problems(path.read_text("utf-8"), str(path.relative_to(ROOT))) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)",
        "x = pickle.loads(b)",
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "yaml.load(text)",
        "eval('1')",
        "exec(code)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run('ls', shell=True)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "numpy.load(f, allow_pickle=flag)",
    ],
)
def test_the_check_finds_it(source):
    assert problems(source)


@pytest.mark.parametrize(
    "source", ["np.load(f, allow_pickle=False)", "model.eval()", "json.loads(text)", "re.compile('x')"]
)
def test_the_check_leaves_the_rest(source):
    assert problems(source) == []


def python_blocks(path):
    """(first line, text) of the fenced blocks marked python."""
    text = path.read_text("utf-8")
    for match in re.finditer(r"^```python[^\n]*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)) + 1, match[1]


PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_in_pages_compiles(path):
    for line, block in python_blocks(path):
        compile("\n" * (line - 1) + block, str(path), "exec")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    """Relative links name files that exist."""
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8")):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_requirement_is_pinned():
    """constraints.txt names every package of the extras that the README's commands install."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = re.findall(r"^([A-Za-z0-9_.-]+)==\S+$", (ROOT / "constraints.txt").read_text("utf-8"), flags=re.MULTILINE)
    canonical = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    extras = project["optional-dependencies"]
    assert all(one.startswith("rlkit-lm[") for one in (*extras["all"], *extras["examples"]))
    installed = {"test", *re.findall(r"[\w-]+(?=[,\]])", " ".join(extras["all"] + extras["examples"]))}
    assert installed <= extras.keys()
    wanted = list(project["dependencies"])
    for extra in installed - {"examples"}:
        wanted += extras[extra]
    assert len(wanted) > 20
    for requirement in wanted:
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)[0]
        assert re.sub(r"[-_.]+", "-", name).lower() in canonical, requirement


LONGEST = 350  # lines of a file of rlkit; one idea is shorter


def test_words():
    """One spelling."""
    wrong = {r"\bcan not\b": "cannot"}
    for path in [*SOURCES, *PAGES]:
        for pattern, right in wrong.items():
            match = re.search(pattern, path.read_text("utf-8"))
            assert match is None, f"{path}: {match[0]!r}; write {right!r}"


def test_files_are_short():
    for path in SOURCES:
        if path.is_relative_to(ROOT / "rlkit"):
            lines = len(path.read_text("utf-8").splitlines())
            assert lines <= LONGEST, (
                f"{path.relative_to(ROOT)} has {lines} lines; {LONGEST} at most: which ideas are in it?"
            )


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_what_make_and_ci_name_is_there():
    """Paths of tests in the Makefile's commands, and agents in those of CI."""
    targets = ["test", "test-server", "test-vllm", "test-processors", "test-install", "test-agents"]
    targets += ["test-environments"]
    said = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {word.partition("::")[0] for word in said.split() if word.startswith("tests/")}
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    from tests.agents.cases import CASES

    clients = {case.name.partition("/")[0] for case in CASES}
    (named,) = re.findall(r'make test-agents ARGS="([^"]*)"', (ROOT / ".ci" / "run").read_text("utf-8"))
    assert set(named.split()) <= clients
