"""What a type checker makes of a user's program: right lines pass, and every wrong one is found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from rlkit.backends import registry

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
    assert found(right) == {}
    marked = {i for i, line in enumerate(wrong.read_text().splitlines(), 1) if "# wrong" in line}
    assert len(marked) > 30
    assert set(found(wrong)) == marked


@pytest.mark.parametrize("name", ["toy", "local", "tinker"])
def test_help_names_every_option(name):
    """Signatures made at run time have no checker: what ``help`` says is what a user reads."""
    import inspect

    backend = registry.resolve(name)
    text = backend.__init__.__doc__ if name == "local" else rlkit.connect.__doc__
    missing = [option for option in inspect.signature(backend).parameters if not re.search(rf"\b{option}\b", text)]
    assert missing == []
