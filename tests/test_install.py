"""Messages about a missing extra print a command that works for how rlkit was installed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit import _runtime
from tests.install import first_hour, programs

ROOT = Path(__file__).parents[1]


def test_the_command_that_installs_an_extra(monkeypatch, tmp_path):
    """A working tree is installed with -e again, spaces quoted; anything else by name."""
    monkeypatch.setattr(_runtime, "ROOT", tmp_path / "my tree")
    assert _runtime.command("a", "b") == "pip install 'rlkit-lm[a,b]'"
    (tmp_path / "my tree").mkdir()
    (tmp_path / "my tree" / "pyproject.toml").touch()
    assert _runtime.command("a") == f"pip install -e '{tmp_path}/my tree[a]'"


SOURCES = sorted([*(ROOT / "rlkit").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])


def texts(path):
    """(line, text) of the string constants that are no docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_message_names_a_distribution_that_is_nowhere():
    """No text of the code says ``pip install rlkit-lm`` by hand: it would work only where rlkit came from an index."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        if path.name != "_runtime.py"
        for line, text in texts(path)
        if re.search(r"rlkit-lm\[|pip install ['\"]?rlkit", text)
    ]
    assert found == []


def test_every_extra_that_is_named_exists():
    """``_runtime.command("...")`` everywhere in the code names extras of pyproject.toml."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "_runtime.command":
                named |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    assert len(named) > 6
    assert named <= extras.keys()


def test_rollouts_without_their_extra():
    """Without rich, episodes are played with defaults and with options; ``progress=True`` is refused."""
    program = """
import sys
sys.modules["rich"] = sys.modules["stamina"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("rich", "stamina") else find(name, *more)
import rlkit
from rlkit.rollouts import Plan, rollout_sync
Plan(), Plan(attempts=1, progress=False), Plan().with_options(n=2)
policy = rlkit.connect("toy", seed=0)
tasks = rlkit.envs.function([{"prompt": "a"}], lambda text: 1.0)
options = {"n": 2, "params": rlkit.SamplingParams(max_tokens=2)}
for more in ({}, {"attempts": 1, "progress": False}, {"attempts": 2}):
    assert len(rollout_sync(policy.sampler().result(), tasks, **options, **more)[0].trajectories) == 2
try:
    Plan(progress=True)
except rlkit.ConfigError as error:
    print(error)
"""
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"Plan.progress: needs rich, which is not installed: {_runtime.command('rollouts')}"


def install_lines():
    """(page, line) of every ``pip install`` of this package in the pages and in the examples' comments."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.yaml")]
    for page in pages:
        for line in page.read_text("utf-8").splitlines():
            if re.search(r"pip install [^`]*(\.|rlkit[\w-]*)\[[\w,-]+\]", line):
                yield page, line


def test_the_lines_of_the_pages_can_be_run():
    """Each names extras that exist and pins versions; gem, whose pins contradict constraints.txt, stands in none."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    lines = list(install_lines())
    assert len(lines) > 6
    for page, line in lines:
        named = set(re.search(r"\[([\w,-]+)\]", line)[1].split(","))
        assert named <= extras.keys(), f"{page.name}: {line}"
        assert "-e '.[" in line, f"{page.name}: {line}"
        assert "gem" not in named or "constraints" not in line, f"{page.name}: {line}"


def test_the_lines_with_torch_name_the_pinned_version():
    """One version in README, Makefile and constraints.txt, so that nothing later replaces the build that came first."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)[1]
    for page, count in (("README.md", 2), ("Makefile", 3)):
        assert re.findall(r"torch==(\S+)", (ROOT / page).read_text("utf-8")) == [pinned] * count, page


def test_every_extra_has_a_program():
    """tests/install: what each extra promises is used where it alone is installed."""
    from tests.install import check, programs

    for name in check.CHECKS.keys() - {"readme", "notebooks"}:
        assert callable(getattr(programs, name.replace("-", "_"))), name
    assert check.EXTRAS.keys() - check.CHECKS.keys() == check.NOT_ALONE


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("program", first_hour.PROGRAMS, ids=lambda program: program.__name__)
def test_first_hour(program, tmp_path, monkeypatch):
    """What a new user writes from the pages works; check.py runs the same on a real model in an empty environment."""
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    if program is first_hour.looked_at:
        pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    program(str(programs.model()))
