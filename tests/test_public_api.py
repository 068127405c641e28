"""What a user imports: it is light, it exists, and it is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from tests.each import for_each
from tests.without import printed

HEAVY = ("torch", "transformers", "peft", "accelerate", "tinker", "reasoning_gym", "matplotlib", "rich", "pytest")
PROBE = f"""
import sys, time
start = time.process_time()
import rlkit
spent = time.process_time() - start
import json
print(json.dumps([spent, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def probe():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def modules():
    """All of rlkit's modules; names that begin with an underscore are private."""
    names = [module.name for module in pkgutil.walk_packages(rlkit.__path__, "rlkit.")]
    return ["rlkit", *(name for name in names if not any(part.startswith("_") for part in name.split(".")))]


def test_import_is_light():
    """`import rlkit` loads no heavy package and takes under half a second of processor time."""
    times, loaded = zip(*[probe() for _ in range(3)], strict=True)
    assert loaded == ([], [], [])
    assert min(times) < 0.5


def test_submodules_are_imported_on_first_use():
    done = (
        "import rlkit, sys; rlkit.advantages.grpo; assert 'torch' not in sys.modules; print(rlkit.losses.ppo.__name__)"
    )
    found = subprocess.run([sys.executable, "-c", done], capture_output=True, text=True, check=True)
    assert found.stdout == "ppo\n"


def test_tab_completion_shows_the_library():
    """`dir(rlkit)` lists every public module and name, and nothing else."""
    shown = set(dir(rlkit))
    found = {module.name for module in pkgutil.iter_modules(rlkit.__path__) if not module.name.startswith("_")}
    assert shown == {*rlkit.__all__, *found, "Run", "critic", "evaluate", "rollout", "serve"}
    for name in shown:
        assert getattr(rlkit, name) is not None


def test_every_module_is_there_without_an_import_of_its_own():
    """`rlkit.config`, `rlkit.recipes` and `rlkit.server` are imported when they are first named."""
    program = "import rlkit; print(*[f.__name__ for f in (rlkit.config.load, rlkit.recipes.load, rlkit.server.serve)])"
    assert printed([], program) == "load load serve\n"


def test_checkers_see_what_there_is():
    """What the top level imports for type checkers is what it imports on first use."""
    tree = ast.parse(Path(rlkit.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    named = {alias.asname for node in guard.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named == set(dir(rlkit)) - set(rlkit.__all__)


def test_testing_needs_no_pytest():
    """FakeTinker and faults are there without pytest; only the conformance suite needs it."""
    program = """
from rlkit.testing import Fault, FakeTinker
import rlkit.testing
assert "BackendConformance" in dir(rlkit.testing)
try:
    rlkit.testing.BackendConformance
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert printed(["pytest", "_pytest", "hypothesis"], program) == "pytest\n"


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rlkit.nothing


@for_each("name", modules())
def test_public_names_exist_and_are_documented(name):
    """What a module lists in `__all__` is there, is listed once, and its functions and classes say what they are."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names))
    for public in names:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{public} has no docstring"
            assert not (value.__doc__ or "").startswith(f"{public}("), f"{name}.{public} has a generated docstring"


@for_each("name", [name for name in rlkit.__all__ if inspect.isclass(getattr(rlkit, name))])
def test_public_methods_are_documented(name):
    """Methods and properties of what the top level offers say what they are, themselves or in what they override."""
    value = getattr(rlkit, name)
    for attribute, member in vars(value).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not attribute.startswith("_") and inspect.isfunction(function):
            assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute} has no docstring"


def test_the_concepts_are_at_the_top():
    """The top level offers the five concepts and the errors."""
    for name in ("Datum", "Future", "connect", "sampler", "Adam", "Lora", "SamplingParams", "Sample", "RlkitError"):
        assert name in rlkit.__all__
