"""The input and the output of a harness."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from rlkit.errors import ConfigError, EnvError

__all__ = ["Call", "Harness", "Json", "Score", "listed", "mapping", "number", "options", "parsed", "taken", "whole"]

Json: TypeAlias = Mapping[str, object]


@attrs.frozen
class Score:
    """One number that a harness gave.

    Attributes:
        task: as the harness names it; "task/scorer" if a task has scorers.
        metric: such as "acc" or "accuracy".
        value: of the metric.
        stderr: its standard error; None if the harness gave none.
        samples: how many questions it is computed from; None if the harness did not report it.
    """

    task: str
    metric: str
    value: float
    stderr: float | None = None
    samples: int | None = None

    @property
    def name(self) -> str:
        """The metric's name in a run."""
        return f"eval/{self.task}/{self.metric}"


@attrs.frozen
class Call:
    """The arguments of a harness's run.

    Attributes:
        url: of the gateway, without /v1.
        key: the API key that it must use.
        model: the policy's name there.
        tasks: as the harness names them.
        arguments: options of the harness's own command line, without dashes, in order.
        folder: an empty one, for what it writes.
        max_length: longest prompt and completion, in tokens.
        tokenizer: a folder or hub id that transformers loads the policy's tokenizer from; None: not available.
    """

    url: str
    key: str
    model: str
    tasks: Sequence[str]
    arguments: Sequence[tuple[str, str]]
    folder: Path
    max_length: int
    tokenizer: str | None = None


@attrs.frozen
class Harness:
    """A harness that is installed as a Python package.

    Attributes:
        name: on rlkit's command line.
        distribution: its name as a Python distribution.
        install: the argument of pip.
        command: call -> arguments of the interpreter.
        environment: call -> environment variables besides those of this process.
        read: folder -> scores; raises EnvError where there are none.
    """

    name: str
    distribution: str
    install: str
    command: Callable[[Call], list[str]]
    environment: Callable[[Call], Mapping[str, str]]
    read: Callable[[Path], list[Score]]


def taken(arguments: Sequence[tuple[str, str]], ours: Mapping[str, str]) -> None:
    """Raise ConfigError for an option that rlkit sets itself; ``ours`` names the replacement."""
    for name, value in arguments:
        if name in ours:
            raise ConfigError(f"argument {name}={value}", "rlkit sets it", ours[name])


def parsed(path: Path) -> Json:
    """Return the JSON object in a file that a harness wrote.

    Raises:
        EnvError: it cannot be read, or is not a JSON object.
    """
    try:
        return mapping(json.loads(path.read_text("utf-8")), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise EnvError(f"{path}: is not valid JSON: {error}") from error


def mapping(value: object, where: str) -> Json:
    """Return the value where it is a JSON object; raise EnvError otherwise."""
    if not isinstance(value, dict):
        raise EnvError(where, f"is {type(value).__name__}", "a JSON object")
    return value


def listed(value: object, where: str) -> Sequence[object]:
    """Return the value where it is a JSON list; raise EnvError otherwise."""
    if not isinstance(value, list):
        raise EnvError(where, f"is {type(value).__name__}", "a JSON list")
    return value


def options(arguments: Iterable[tuple[str, str]]) -> list[str]:
    """Return options as words of a command line: "true" gives the option alone, "false" none."""
    return [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in arguments if value != "false"]


def whole(value: object) -> int | None:
    """Return a number without what follows its point; None where there is none."""
    count = number(value)
    return None if count is None else int(count)


def number(value: object) -> float | None:
    """Return the value where it is a finite number, else None: harnesses write "N/A" and NaN for missing values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
