"""What a type checker makes of a user's program: right lines pass, and every wrong one is found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

import rlkit
from rlkit.backends import options, registry

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def mypy(file):
    """The numbers of the lines that mypy has something against, with what it says."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = re.findall(rf"{file.name}:(\d+): error: (.*)", done.stdout)
    return {int(number): text for number, text in lines}


def pyright(file):
    """The same of pyright, as editors run it."""
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    entries = json.loads(done.stdout)["generalDiagnostics"]
    return {entry["range"]["start"]["line"] + 1: entry["message"] for entry in entries}


@pytest.mark.timeout(900)  # without a cache mypy reads all of rlkit and numpy
@pytest.mark.parametrize("found", [mypy, pyright], ids=lambda checker: checker.__name__)
def test_right_lines_pass_and_wrong_ones_are_found(found):
    """A checker says nothing of the right lines (their types are asserted there), and something of each wrong one."""
    right, wrong = HERE / "right_lines.py", HERE / "wrong_lines.py"
    assert (
        sum(bool(re.match(r"\s*(assert_type|rlkit|\w+: |\w+ = )", line)) for line in right.read_text().splitlines())
        >= 60
    )
    assert found(right) == {}
    marked = {i for i, line in enumerate(wrong.read_text().splitlines(), 1) if "# wrong" in line}
    assert len(marked) >= 60
    assert set(found(wrong)) == marked


@pytest.mark.parametrize(
    ("name", "listed"),
    [("toy", options.ToyKwargs), ("local", options.LocalKwargs), ("tinker", options.TinkerKwargs)],
)
def test_the_options_for_checkers_are_those_that_there_are(name, listed):
    """Each backend's options are typed as its class has them, and `help` names every one."""
    import inspect

    backend = registry.resolve(name)
    parameters = inspect.signature(backend).parameters
    assert set(parameters) == set(listed.__annotations__)
    text = backend.__init__.__doc__ if name == "local" else rlkit.connect.__doc__
    for option in parameters:
        assert re.search(rf"\b{option}\b", text), option


@pytest.mark.parametrize(
    ("kind", "listed"), [(options.LocalOptions, options.LocalKwargs), (options.ModelOptions, options.ModelKwargs)]
)
def test_the_keywords_of_the_local_backend_are_its_options(kind, listed):
    """In name and type, and each is described; the class checks them, and the keywords are what checkers read."""
    fields = {field.name: field.type for field in attrs.fields(kind)}
    assert {name: hint.__forward_arg__ for name, hint in listed.__annotations__.items()} == fields
    assert list(options.describe(kind)) == list(fields)
