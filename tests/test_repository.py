"""Rules that hold for every file: nothing that runs code from data, documentation that compiles."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import affected, slow
from tests.each import for_each

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
    "torch.hub.load",
}
FORBIDDEN_ARGUMENTS = {"shell": True, "allow_pickle": True, "weights_only": False}
LOADERS = {"from_pretrained", "from_config", "load_dataset", "load_dataset_builder", "pipeline"}  # of any library
REFERENCES = LOADERS - {"pipeline"}
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


def is_partial(call):
    return dotted(call.func).rpartition(".")[2] == "partial"


def problems(source, name="<text>"):
    """What in ``source`` could run code that comes with data."""
    found = []
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {id(x) for node in calls for x in (node.func, *(node.args[:1] if is_partial(node) else ()))}
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and node.attr in REFERENCES and id(node) not in called:
            found.append(f"{where}: {node.attr} under another name")
        if isinstance(node, ast.ImportFrom):
            found += [
                f"{where}: import of {x.name} as {x.asname}" for x in node.names if x.name in LOADERS and x.asname
            ]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"{where}: import {x}" for x in names if x.split(".")[0] in FORBIDDEN_IMPORTS]
        if isinstance(node, ast.ImportFrom):
            imported = {f"{node.module}.{alias.name}" for alias in node.names}
            found += [f"{where}: from-import of {x}" for x in imported & FORBIDDEN_CALLS]
        if isinstance(node, ast.Constant) and node.value == "--trust-remote-code":
            found.append(f"{where}: {node.value}")
        if not isinstance(node, ast.Call):
            continue
        constants = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        call = dotted(node.func)
        name_called = node.func.attr if isinstance(node.func, ast.Attribute) else call
        # Left out, the libraries ask on stdin, and run the code at a "y".
        partial = is_partial(node) and {getattr(x, "attr", getattr(x, "id", "")) for x in node.args[:1]} & LOADERS
        by_name = name_called == "getattr" and any(getattr(x, "value", "") in REFERENCES for x in node.args)
        trusting = name_called in LOADERS or any(k.arg == "trust_remote_code" for k in node.keywords)
        trusting = bool(trusting or partial or by_name)
        if trusting and constants.get("trust_remote_code") is not False:
            found.append(f"{where}: {name_called}() without trust_remote_code=False")
        safe_load = call == "numpy.load" and constants.get("allow_pickle") is False
        if call in FORBIDDEN_CALLS and not safe_load:
            found.append(f"{where}: {call}()")
        found += [f"{where}: {k}={v}" for k, v in FORBIDDEN_ARGUMENTS.items() if constants.get(k) is v]
    return found


@for_each("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_comes_from_data(path):
    assert problems(path.read_text("utf-8"), str(path.relative_to(ROOT))) == []


def test_models_in_pages_are_read_without_their_code():
    """What readers copy from a page asks nobody on stdin."""
    for path in PAGES:
        for _, block in python_blocks(path):
            assert [x for x in problems(block, str(path)) if "trust_remote_code" in x] == []


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
        "AutoModel.from_pretrained(name)",
        "getattr(transformers, kind).from_pretrained(name, **options)",
        "AutoModel.from_config(config, trust_remote_code=given)",
        "functools.partial(AutoModel.from_pretrained, revision=x)",
        "load = AutoModel.from_pretrained",
        "list(map(AutoModel.from_pretrained, names))",
        "getattr(AutoModel, 'from_pretrained')(name)",
        "from datasets import load_dataset as load",
        "load_dataset(name)",
        "LLM(model, trust_remote_code=None)",
        "command = ['vllm', 'serve', '--trust-remote-code']",
        "subprocess.run('ls', shell=True)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "numpy.load(f, allow_pickle=flag)",
    ],
)
def test_the_check_finds_it(source):
    assert problems(source)


@pytest.mark.parametrize(
    "source",
    [
        "np.load(f, allow_pickle=False)",
        "AutoModel.from_pretrained(name, trust_remote_code=False)",
        "functools.partial(AutoModel.from_pretrained, trust_remote_code=False)",
        "from datasets import load_dataset",
        "model.eval()",
        "json.loads(text)",
        "re.compile('x')",
    ],
)
def test_the_check_leaves_the_rest(source):
    assert problems(source) == []


BROAD = {"Exception", "BaseException", "RuntimeError", "AttributeError", "AssertionError", "NotImplementedError"}
QUIET = {  # in backends, losses and critics: who catches what a bug raises and does not name it, and why that is right
    ("backends/local/distributed/follower.py", "_follow_until_end"): "the process ends with it",
    ("backends/local/distributed/world.py", "release_all"): "the others are gone, or never came",
    ("backends/local/distributed/shard.py", "_return_freed_memory"): "where the system can",
    ("backends/local/model/memory.py", "return_freed"): "where the system can",
    ("backends/local/model/hub.py", "_complete"): "a file that cannot be read is made again",
    ("backends/local/model/hub.py", "announces_tied"): "loading it says what is wrong",
}


def quiet_handlers(source):
    """(line, function) of what catches one of BROAD, or a named list, and neither raises again nor uses the error."""
    if not re.search(rf"^ *except:|\b(except|suppress)\b.*\b({'|'.join(BROAD)}|[A-Z_]+)\b", source, re.MULTILINE):
        return []  # without the time that a tree takes
    nodes = list(ast.walk(ast.parse(source)))
    functions = [x for x in nodes if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef))]

    def broad(nodes):
        names = {x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name)}
        return any(name in BROAD or name.isupper() for name in names)

    def is_quiet(node):
        if isinstance(node, ast.Call):
            return dotted(node.func).rpartition(".")[2] == "suppress" and broad(node.args)
        if not isinstance(node, ast.ExceptHandler) or (node.type is not None and not broad([node.type])):
            return False
        inner = [x for each in node.body for x in ast.walk(each)]
        return not any(isinstance(x, ast.Raise) or getattr(x, "id", None) == (node.name or "") for x in inner)

    lines = [node.lineno for node in nodes if is_quiet(node)]
    around = [[x.name for x in functions if x.lineno <= line <= x.end_lineno] for line in lines]
    return [(line, names[-1] if names else "") for line, names in zip(lines, around, strict=True)]


def test_bugs_of_fast_paths_are_not_swallowed():
    """Whoever adds one that catches everything in silence says here why a bug of rlkit's would not hide in it."""
    package = ROOT / "rlkit"
    found = [
        (str(path.relative_to(package)), function, line)
        for room in ("backends", "losses", "critics")
        for path in (package / room).rglob("*.py")
        for line, function in quiet_handlers(path.read_text("utf-8"))
    ]
    assert [x for x in found if not {(x[0], x[1]), (x[0], "*")} & QUIET.keys()] == []
    there = {(file, function) for file, function, _ in found} | {(file, "*") for file, _, _ in found}
    assert QUIET.keys() <= there
    said = "try:\n    fast()\nexcept {}:\n    {}"
    with_suppress = "with suppress(ValueError, RuntimeError):\n    fast()"
    for source in (said.format("Exception", "return"), said.format("FAILURES", "pass"), with_suppress):
        assert quiet_handlers(source)
    assert not quiet_handlers(said.format("Exception as error", "warn(error)"))
    assert not quiet_handlers(said.format("ValueError", "pass"))


def python_blocks(path):
    """(first line, text) of the fenced blocks marked python."""
    text = path.read_text("utf-8")
    for match in re.finditer(r"^```python[^\n]*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)) + 1, match[1]


PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


@for_each("path", PAGES, ids=lambda path: path.name)
def test_code_in_pages_compiles(path):
    for line, block in python_blocks(path):
        compile("\n" * (line - 1) + block, str(path), "exec")


@for_each("path", PAGES, ids=lambda path: path.name)
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
    assert all(one.startswith("rlkit-lm[") for one in extras["all"])
    installed = {"test", *re.findall(r"[\w-]+(?=[,\]])", " ".join(extras["all"] + extras["examples"]))}
    assert installed <= extras.keys()
    wanted = project["dependencies"] + [one for one in extras["examples"] if not one.startswith("rlkit-lm[")]
    for extra in installed - {"examples"}:
        wanted += extras[extra]
    assert len(wanted) > 20
    for requirement in wanted:
        name = re.match(r"[A-Za-z0-9_.-]+", requirement)[0]
        assert re.sub(r"[-_.]+", "-", name).lower() in canonical, requirement


def test_words():
    """One spelling."""
    wrong = {r"\bcan not\b": "cannot"}
    for path in [*SOURCES, *PAGES]:
        for pattern, right in wrong.items():
            match = re.search(pattern, path.read_text("utf-8"))
            assert match is None, f"{path}: {match[0]!r}; write {right!r}"


MANNERS = {  # in prose: what is wrong -> what to write instead
    r"\bbehind\b": "after, or the subject that does it",
    r"\bbeside\b": "in addition to, with, or next to",
    r"\bof (?:its|their|one's) own\b": "separate, its",
    r"\b(?:go|goes|going|gone|went) on\b": "continue, resume",
    r"\bstands?\b": "is, has",
    r"\balike\b": "equal, the same",
    r"\bnobody\b|\bsomebody\b": "the subject",
    r"\banew\b": "again",
    r"\bso many\b": "the number",
    r"\bwhat there is\b|\bthere is not\b|\bwhere there (?:is|are)\b|\bwhich there\b": "a noun, or a clause with if",
    r"\bthere (?:is|are) no (?:such|way|need)\b": "a sentence with a subject",
    r"\bas (?:it|they) (?:stands?|comes?)\b": "unchanged",
    r"\btold in words\b|\brefused in words\b|\bsees? to (?:it|that|them)\b|\bnot to be had\b": "a verb",
}


def prose(path):
    """The text of a page without code, generated tables and headings; of a program its docstrings and comments."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        nodes = [
            x
            for x in ast.walk(ast.parse(text))
            if isinstance(x, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        comments = re.findall(r"(?:^|  )# (.*)$", text, re.MULTILINE)
        return "\n".join([ast.get_docstring(x) or "" for x in nodes] + comments)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (?!end).*?<!-- end.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"^#.*$|\(#[\w-]+\)|\([\w./-]+#[\w-]+\)", "", text, flags=re.MULTILINE)


def test_pages_and_examples_are_plain():
    """No page, changelog or example has a phrase of the list; generated pages have their words from the code."""
    pages = [path for path in PAGES if path.name != "moved.md"]
    pages += [ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *(ROOT / "examples").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}; write {right}"
        for path in pages
        for pattern, right in MANNERS.items()
        for match in re.finditer(pattern, prose(path))
    ]
    assert not found, "\n".join(found)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_what_make_and_ci_name_is_there():
    """Paths of tests in the Makefile's commands, targets of make in those of CI, and agents."""
    jobs = [ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml")]
    commands = [line for path in jobs for line in re.findall(r"\bmake [^\n]*", path.read_text("utf-8"))]
    targets = {line.split()[1] for line in commands}
    assert {"test", "demo", "test-slow"} <= targets
    said = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {word.partition("::")[0] for word in said.split() if word.startswith("tests/")}
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    from tests.agents.cases import CASES

    clients = {case.name.partition("/")[0] for case in CASES}
    (named,) = re.findall(r'make test-agents ARGS="([^"]*)"', "\n".join(commands))
    assert set(named.split()) <= clients


def test_slow_tests_exist():
    """Every line of tests/slow.txt names a file, and a test or a class of tests in it."""
    unknown = []
    for line in slow.read_list():
        path, _, test = slow.without_case(line).partition("::")
        source = (ROOT / path).read_text("utf-8") if (ROOT / path).is_file() else ""
        name = test.partition("::")[0]  # of a class, whose tests may be inherited
        if not source or not ("." in name or re.search(rf"^ *((async )?def |class )?{name}\b", source, re.MULTILINE)):
            unknown.append(line)
    assert unknown == []


def test_a_change_touches_the_tests_that_reach_it():
    """By an import, by what the package re-exports, and by a name of a registry."""
    for changed, test in {
        "rlkit/types.py": "tests/test_types.py",
        "rlkit/runs/run.py": "tests/test_quickstart.py",
        "rlkit/backends/toy.py": "tests/rollouts/test_rollout.py",
        "README.md": "tests/test_docs.py",
        "examples/quickstart.py": "tests/test_quickstart.py",
        "tests/gateway/conftest.py": "tests/gateway/test_dialects.py",
        ".ci/run": "tests/test_repository.py",
    }.items():
        assert test in affected.find_affected([changed]), changed
    assert "tests/backends/local/test_model.py" not in affected.find_affected(["rlkit/tracking/console.py"])


def test_paths_that_programs_and_pages_name_exist():
    """A benchmark that names files by a place where none is measures nothing; a reader finds nothing there."""
    folders = "(?:rlkit|tests|examples|benchmarks|docs)/"
    kinds = r"\.(?:py|md|toml|txt|json|yaml)"
    in_program = re.compile(rf"""["']({folders}[\w./*-]+{kinds})["']""")
    in_page = re.compile(rf"`({folders}[\w./*-]*(?:{kinds}|/))`")
    files = [(path, in_program) for name in ("benchmarks", "examples", "tests") for path in (ROOT / name).rglob("*.py")]
    files += [(path, in_page) for path in PAGES if path.name != "moved.md"]  # which names old places
    named = {(str(path), found) for path, place in files for found in place.findall(path.read_text("utf-8"))}
    assert len(named) > 100
    assert [x for x in sorted(named) if not any(ROOT.glob(x[1].replace("NAME", "*")))] == []


def names_of(module):
    """The text in which a module's names are defined, None where there is no such module."""
    place = ROOT.joinpath(*module.split("."))
    page = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return page.read_text("utf-8") if page.is_file() else None


def is_there(name):
    """Whether the module that a dotted name begins with has the next part of the name."""
    parts, module = name.split("."), "rlkit"
    while len(parts) > 1 and names_of(f"{module}.{parts[1]}") is not None:
        module, parts = f"{module}.{parts[1]}", parts[1:]
    return (
        len(parts) == 1
        or (module == "rlkit" and parts[1][0].isupper())
        or re.search(rf"\b{parts[1]}\b", names_of(module)) is not None
    )


def test_names_in_programs_and_pages_exist():
    """Programs that tests start hold them in strings, where no type checker looks."""
    files = [path for name in ("rlkit", "benchmarks", "examples", "tests") for path in (ROOT / name).rglob("*.py")]
    files += [path for path in PAGES if path.name != "moved.md"]
    imports = re.compile(r"from (rlkit[\w.]*) import \(?([\w, ]+)")
    named = {}
    for path in files:
        text = path.read_text("utf-8")
        found = {
            f"{module}.{x.split()[0]}" for module, names in imports.findall(text) for x in names.split(",") if x.strip()
        }
        found |= set(re.findall(r"\brlkit\.\w+\.\w+(?:\.\w+)*", text))
        named |= dict.fromkeys(found, path)
    assert len(named) > 1000
    lost = sorted(f"{name} {path}" for name, path in named.items() if not is_there(name))
    assert not lost, "\n".join(lost)


STILTED = (  # in messages: look twice, and say it plainly
    "which there is not", "nobody", "of its own", "said nothing", "without a word", "stands for one", "was given up",
    "goes with a", "are as they were", "does not say its", "put off", "puts it off", "sees to", "there is no such",
)  # fmt: skip


def test_messages_are_plain():
    """No message of an exception, warning or log call has a phrase of the list."""
    found = []
    for path in sorted((ROOT / "rlkit").rglob("*.py")):
        source = path.read_text("utf-8")
        if not any(x in source for x in STILTED):
            continue
        for node in ast.walk(ast.parse(source)):
            call = node.exc if isinstance(node, ast.Raise) else node
            name = dotted(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
            if not (isinstance(node, ast.Raise) or name in ("warn", "info", "warning", "error", "problem", "require")):
                continue
            for text in ast.walk(call or node):
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found += [f"{path}:{text.lineno}: {x!r}" for x in STILTED if x in text.value]
    assert found == []


def test_files_that_the_layout_names_exist():
    """Its tables name them from rlkit/, or from the local engine's folder."""
    page = (ROOT / "docs" / "layout.md").read_text("utf-8")
    rows = re.findall(r"`([\w/.]+\.(?:py|toml))`", "\n".join(x for x in page.splitlines() if x.startswith("|")))
    homes = (ROOT / "rlkit", ROOT / "rlkit/backends/local", ROOT / "rlkit/backends/local/model")
    assert [name for name in rows if not any((home / name).exists() for home in homes)] == []
    assert len(rows) > 20


def test_modules_that_moved_are_there():
    """The first column of docs/moved.md names modules of today."""
    rows = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "moved.md").read_text("utf-8"), flags=re.MULTILINE)
    places = {name: ROOT / "rlkit" / name.replace(".", "/") for name in rows}
    there = {name for name, path in places.items() if path.is_dir() or path.with_suffix(".py").exists()}
    assert places.keys() - there == set()
    assert len(rows) > 50
