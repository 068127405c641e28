"""The example programs as modules and as scripts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.tracking import read_metrics

FOLDER = Path(__file__).parents[2] / "examples"


def load(name):
    """The program as a module ``example_<name>``."""
    known = f"example_{name}"
    spec = importlib.util.spec_from_file_location(known, FOLDER / f"{name}.py")
    module = sys.modules[known] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name, *arguments, code=0, **env):
    """What the program prints when it is run as a user runs it."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def refused(module, arguments, match):
    """The program ends with one sentence and a status that is not 0."""
    with pytest.raises(SystemExit, match=match) as found:
        module.main(arguments)
    assert isinstance(found.value.code, str), "a text is printed, and the status is 1"
    assert "\n" not in found.value.code.strip()


def curve(folder):
    """What was logged, without what depends on the clock and the place: (step, metrics) pairs."""
    skipped = ("time/", "tracking/", "upload/")
    rows = [(row["step"], row["metrics"]) for row in read_metrics(folder)]
    return [(step, {k: v for k, v in metrics.items() if not k.startswith(skipped)}) for step, metrics in rows]


def cut(monkeypatch, module, at, name="step"):
    """Has the program end, as by a crash, within its step number ``at``, after the optimizer's step."""

    class Stopped(Exception):
        pass

    whole = getattr(module, name)
    done = []

    def once(*arguments, **options):
        found = whole(*arguments, **options)
        done.append(1)
        if len(done) == at:
            raise Stopped
        return found

    monkeypatch.setattr(module, name, once)
    return Stopped
