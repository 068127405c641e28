"""Run a harness against a policy that the gateway serves, and keep its scores."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO

import attrs

from rlkit import _check, _orphans
from rlkit._files import replace_file
from rlkit._secrets import redact
from rlkit.backends.protocol import Sampler
from rlkit.backends.tokenizers import source_of
from rlkit.errors import CheckpointError, ConfigError, EnvError, EnvTimeout, MissingPackageError, UnknownNameError
from rlkit.harnesses._inspect_ai import INSPECT
from rlkit.harnesses._lm_eval import LM_EVAL
from rlkit.harnesses._types import Call, Score, listed, mapping, number, parsed, whole

__all__ = ["HARNESSES", "Result", "evaluate", "installed", "keep", "make", "new_folder", "results", "run"]

_GRACE = 5.0  # seconds between asking it to end and killing it
_TAIL = 4000  # characters of its output that a message may be made of


def run(name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path, deadline: float) -> None:
    """Run a program to its end. Its output is written to standard error and to ``log``.

    Args:
        name: for messages.
        command: the program and its arguments.
        environment: all its variables.
        log: a file.
        deadline: seconds.

    Raises:
        EnvError: it could not be started, or ended with another status than 0.
        EnvTimeout: it took longer.

    It has its own process group, which is ended with it: also at the deadline, on Ctrl-C, and when this program is
    killed.
    """
    with _sigterm_raises(), log.open("wb") as file:
        _orphans.prepare()
        try:
            process = subprocess.Popen(  # noqa: S603  # what the user asked for, without a shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"{name}: {command[0]} cannot be started: {error}") from error
        tail: deque[str] = deque(maxlen=_TAIL)
        assert process.stdout is not None  # noqa: S101  # it is a pipe
        copying = threading.Thread(target=_copy, args=(process.stdout, file, tail), daemon=True)
        try:  # from here on a signal finds what is to be ended
            _orphans.adopt(process.pid)
            copying.start()
            status = process.wait(deadline)
        except subprocess.TimeoutExpired as error:
            raise EnvTimeout(f"{name} did not end within {deadline:g} s; its output is in {log}") from error
        finally:
            _end(process)
            if copying.ident is not None:
                copying.join(_GRACE)
            if not copying.is_alive():  # else something that left the group holds the pipe
                process.stdout.close()
    if status:
        last = next((line for line in reversed("".join(tail).splitlines()) if line.strip()), "no output").strip()
        how = f"status {status}" if status > 0 else f"signal {-status}"
        raise EnvError(f"{name} ended with {how}: {last} (its full output is in {log})")


def _copy(source: IO[bytes], file: IO[bytes], tail: deque[str]) -> None:
    """Copy as it comes, progress bars too; a closed terminal does not block the program."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with contextlib.suppress(OSError, ValueError):  # closed, since something that it started holds the pipe
        while data := os.read(source.fileno(), 65536):
            file.write(data)
            file.flush()
            text = decoder.decode(data)
            tail.extend(text)
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text)
                sys.stderr.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the remaining processes of its group."""
    try:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    finally:
        _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        _orphans.release(process.pid)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):  # none is left
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the main thread, so that the program is ended; elsewhere, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raised(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, raised)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


HARNESSES = MappingProxyType({harness.name: harness for harness in (LM_EVAL, INSPECT)})
_DAY = 86400.0
_ASKING = 60.0  # seconds that an interpreter may take to say what is installed
_SURROUNDINGS = {"PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
_KEY = "rlkit"  # clients require a key; only this machine can reach the gateway


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
    """Run a harness on a policy, write its scores into the folder, and return them.

    Args:
        harness: "lm-eval" or "inspect".
        sampler: the policy.
        tasks: as the harness names them, at least one.
        folder: of a run, or any; the harness's files and the scores get their own folder in ``folder/harness``.
        arguments: options of the harness's own command line, without dashes: ("limit", "10"); "true" gives the option
            alone.
        python: the interpreter of the environment that has the harness; None: this one.
        deadline: seconds for all of it, above 0.
        step: of the checkpoint, >= 0.
        model: the policy's name for the harness.

    Raises:
        UnknownNameError: there is no such harness.
        ConfigError: an argument of the wrong type or out of range; an option that rlkit sets itself.
        MissingPackageError: the harness is not installed, or a package that the gateway needs is not.
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
        run(
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
    """Return the version of a harness that an interpreter has installed.

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
        raise UnknownNameError(f"unknown harness {harness!r}{_check.suggest(harness, HARNESSES)}")
    known, interpreter = HARNESSES[harness], python or sys.executable
    program = f"import importlib.metadata; print(importlib.metadata.version({known.distribution!r}))"
    try:
        done = subprocess.run(  # noqa: S603  # the user's own interpreter
            [interpreter, "-c", program], capture_output=True, text=True, timeout=_ASKING, check=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"python: {interpreter}: cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise EnvError(f"python: {interpreter}: did not report its packages within {_ASKING:g} s") from error
    if done.returncode == 0 and done.stdout.strip():
        return done.stdout.strip().splitlines()[-1][:100]
    packages = " ".join(shlex.quote(each) for each in known.install.split())
    how = f"{shlex.quote(interpreter)} -m pip install {packages}"
    other = "or set python= to the interpreter of an environment that has it"
    raise MissingPackageError(f"{harness} is not installed for {interpreter}: {how}; {other}")


FOLDER, FILE = "harness", "scores.json"


@attrs.frozen
class Result:
    """A harness's scores of a policy.

    Attributes:
        harness, version: its name and the installed version.
        step: of the checkpoint; 0 for a policy that is not a run's.
        time: its start, in seconds since 1970.
        seconds: its duration.
        arguments: of its own command line, as they were given.
        scores: its scores.
        folder: its files, and its whole output (output.log).
    """

    harness: str
    version: str
    step: int
    time: float
    seconds: float
    scores: Sequence[Score]
    folder: Path
    arguments: Sequence[tuple[str, str]] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """Names "eval/<task>/<metric>", and "eval/<task>/<metric>_stderr" where there is one."""
        numbers = {}
        for score in self.scores:
            numbers[score.name] = score.value
            if score.stderr is not None:
                numbers[f"{score.name}_stderr"] = score.stderr
        return numbers


def new_folder(folder: str | os.PathLike[str], harness: str, step: int) -> Path:
    """Return the path of a new folder for a harness's files, within that of a run."""
    return Path(folder).absolute() / FOLDER / f"{harness}-step-{step:08d}-{secrets.token_hex(4)}"


def make(folder: Path) -> None:
    """Make a folder.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)  # as the run's own files, readable by the owner alone
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made: {error}") from error


def keep(result: Result) -> Path:
    """Write the scores into the result's folder, and return the file.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = result.folder / FILE
    content = attrs.asdict(result, filter=lambda field, _: field.name != "folder")
    content["arguments"] = [redact(f"{name}={value}") for name, value in result.arguments]
    try:
        with replace_file(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    return path


def results(folder: str | os.PathLike[str]) -> list[Result]:
    """Return the results of harnesses on a run, oldest first; files that cannot be read are left out."""
    read = []
    for path in (Path(folder) / FOLDER).glob(f"*/{FILE}"):
        try:
            read.append(_read(path))
        except EnvError:
            continue
    return sorted(read, key=lambda result: (result.step, result.time))


def _read(path: Path) -> Result:
    content = parsed(path)
    scores = []
    for each in listed(content.get("scores"), f"{path}: scores"):
        of = mapping(each, f"{path}: scores")
        task, metric, value = str(of.get("task")), str(of.get("metric")), number(of.get("value"))
        if value is not None:
            scores.append(Score(task, metric, value, number(of.get("stderr")), whole(of.get("samples"))))
    arguments = [str(each).partition("=") for each in listed(content.get("arguments", []), f"{path}: arguments")]
    return Result(
        harness=str(content.get("harness")),
        version=str(content.get("version")),
        step=int(_number(content, "step", path)),
        time=_number(content, "time", path),
        seconds=_number(content, "seconds", path),
        scores=scores,
        folder=path.parent,
        arguments=[(name, value) for name, _, value in arguments],
    )


def _number(content: Mapping[str, object], name: str, path: Path) -> float:
    value = number(content.get(name))
    if value is None or value < 0:
        raise EnvError(f"{path}: {name}", f"is {content.get(name)!r}", "a number")
    return value
