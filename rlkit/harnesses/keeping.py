"""What a harness said, in a run's folder: ``harness/<harness>-step-<step>-<hex>/scores.json``, beside its own files."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from rlkit._disk import replacing
from rlkit._secrets import redact
from rlkit.errors import CheckpointError, EnvError
from rlkit.harnesses.types import Score, listed, mapping, number, parsed

__all__ = ["Result", "keep", "make", "new_folder", "results"]

FOLDER, FILE = "harness", "scores.json"


@attrs.frozen
class Result:
    """What a harness said about a policy.

    Attributes:
        harness, version: its name and which one was installed.
        step: of the checkpoint; 0 for what is no run's.
        time: when it began, in seconds since 1970.
        seconds: that it took.
        arguments: of its own command line, as they were given.
        scores: what it said.
        folder: what it wrote, and all that it printed (output.log).
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
    """Return the path of a new folder for what a harness writes, within that of a run."""
    return Path(folder).absolute() / FOLDER / f"{harness}-step-{step:08d}-{secrets.token_hex(4)}"


def make(folder: Path) -> None:
    """Make a folder.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)  # as the run's own files, its owner's alone
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made: {error}") from error


def keep(result: Result) -> Path:
    """Write the scores into the result's folder, and return the file.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = result.folder / FILE
    content = {
        "harness": result.harness,
        "version": result.version,
        "step": result.step,
        "time": result.time,
        "seconds": result.seconds,
        "arguments": [redact(f"{name}={value}") for name, value in result.arguments],
        "scores": [attrs.asdict(score) for score in result.scores],
    }
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    return path


def results(folder: str | os.PathLike[str]) -> list[Result]:
    """Return what harnesses said about a run, oldest first; files that cannot be read are left out."""
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
        value, samples = number(of.get("value")), number(of.get("samples"))
        if value is not None:
            count = None if samples is None else int(samples)
            scores.append(Score(str(of.get("task")), str(of.get("metric")), value, number(of.get("stderr")), count))
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
