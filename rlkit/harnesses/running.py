"""A harness against a policy: the gateway serves it on loopback, and the harness runs as a program of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from types import MappingProxyType

from rlkit import _check
from rlkit.backends.protocol import Sampler
from rlkit.backends.transformers_tokenizer import source_of
from rlkit.errors import ConfigError, EnvError, MissingPackageError, UnknownNameError
from rlkit.harnesses import process
from rlkit.harnesses.inspect_ai import INSPECT
from rlkit.harnesses.keeping import Result, keep, make, new_folder
from rlkit.harnesses.lm_eval import LM_EVAL
from rlkit.harnesses.types import Call

__all__ = ["HARNESSES", "evaluate", "installed"]

HARNESSES = MappingProxyType({harness.name: harness for harness in (LM_EVAL, INSPECT)})
_DAY = 86400.0
_ASKING = 60.0  # seconds that an interpreter may take to say what is installed
_SURROUNDINGS = {"PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
_KEY = "rlkit"  # clients insist on one; whoever can reach the gateway is on this machine


def evaluate(
    harness: str,
    sampler: Sampler,
    tasks: Sequence[str],
    *,
    folder: str | os.PathLike[str],
    arguments: Sequence[tuple[str, str]] = (),
    python: str | None = None,
    deadline: float = _DAY,
    step: int = 0,
    model: str = "policy",
) -> Result:
    """Run a harness on a policy, and return its scores, which are in the folder then.

    Args:
        harness: "lm-eval" or "inspect".
        sampler: the policy.
        tasks: as the harness names them, at least one.
        folder: of a run, or any; the harness's files and the scores get a folder of their own in ``folder/harness``.
        arguments: options of the harness's own command line, without dashes: ("limit", "10"); "true" gives the option
            alone.
        python: the interpreter of the environment that has the harness; None: this one.
        deadline: seconds for all of it, above 0.
        step: of the checkpoint, >= 0.
        model: the policy's name, as the harness is told.

    Raises:
        UnknownNameError: there is no such harness.
        ConfigError: an argument of the wrong type or out of range; an option that rlkit sets itself.
        MissingPackageError: the harness is not installed, or what the gateway needs is not.
        EnvError: the harness failed, or wrote no scores. EnvTimeout: it did not end within ``deadline``.
    """
    _check.require(not isinstance(tasks, str) and len(tasks) > 0 and all(tasks), "tasks", tasks, "names of tasks")
    _check.real("deadline", deadline, above=0.0)
    _check.integer("step", step, low=0)
    version = installed(harness, python)
    known, interpreter = HARNESSES[harness], python or sys.executable
    from rlkit.gateway import Gateway

    with Gateway(sampler, model=model, open=True) as gateway:
        place = new_folder(folder, harness, step)
        call = Call(
            url=gateway.url,
            key=_KEY,
            model=model,
            tasks=tuple(tasks),
            arguments=tuple(arguments),
            folder=place,
            max_length=sampler.max_length,
            tokenizer=source_of(sampler.tokenizer),
        )
        command = [interpreter, *known.command(call)]
        make(place)
        began, clock = time.time(), time.monotonic()
        process.run(
            harness,
            command,
            environment={**os.environ, **_SURROUNDINGS, **known.environment(call)},
            log=place / "output.log",
            deadline=deadline,
        )
        seconds = time.monotonic() - clock
    scores = known.read(place)
    result = Result(harness, version, step, began, seconds, scores, place, tuple(arguments))
    keep(result)
    return result


def installed(harness: str, python: str | None = None) -> str:
    """Return the version of a harness that an interpreter finds.

    Args:
        harness: its name in ``HARNESSES``.
        python: the interpreter; None: this one.

    Raises:
        UnknownNameError: there is no such harness.
        MissingPackageError: it is not installed; the message has the command that installs it.
        ConfigError: there is no such interpreter.
        EnvError: the interpreter did not answer.
    """
    if harness not in HARNESSES:
        raise UnknownNameError(f"there is no harness {harness!r}{_check.near(harness, HARNESSES)}")
    known, interpreter = HARNESSES[harness], python or sys.executable
    program = f"import importlib.metadata; print(importlib.metadata.version({known.distribution!r}))"
    try:
        done = subprocess.run(  # noqa: S603  # the user's own interpreter
            [interpreter, "-c", program], capture_output=True, text=True, timeout=_ASKING, check=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--python {interpreter}: cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise EnvError(f"--python {interpreter}: did not say within {_ASKING:g} s what is installed") from error
    if done.returncode == 0 and done.stdout.strip():
        return done.stdout.strip().splitlines()[-1][:100]
    packages = " ".join(shlex.quote(each) for each in known.install.split())
    how = f"{shlex.quote(interpreter)} -m pip install {packages}"
    other = "or name the interpreter of an environment that has it, with --python"
    raise MissingPackageError(f"{harness} is not installed for {interpreter}: {how}; {other}")
