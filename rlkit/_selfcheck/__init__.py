"""The self-check of a device: whether the local backend's numbers are right there, its speed and its memory."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rlkit._selfcheck import numbers, speed
from rlkit._selfcheck.numbers import KINDS, build, check_shape
from rlkit._selfcheck.report import Check, Report, machine, scrubbed
from rlkit._selfcheck.speed import of_a_layer
from rlkit.backends.early import device_of
from rlkit.backends.local.model.memory import default_dtype, free_bytes
from rlkit.backends.local.model.probe import note_tried, silence

__all__ = ["Check", "Report", "self_check"]

ROOM = 10 * 10**9  # free bytes of a GPU for the model of 0.6B


def self_check(
    device: str | None = None,
    *,
    shape: str | None = None,
    minutes: float = 10.0,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check the local backend on a device. Where all numbers are right, ``connect`` no longer warns of that device.

    Args:
        device: its name; None is a GPU where there is one.
        shape: of the model whose speed is measured, a key of ``models.SHAPES``; None: as large as the device allows.
        minutes: after which no further part is started.
        say: called with the name of the next part.

    Raises:
        ConfigError: no such device or shape.
    """
    place, began = device_of(device), time.monotonic()
    if shape is not None:
        check_shape(shape)
    else:
        shape = "0.6B" if place.type != "cpu" and (free_bytes(place) or 0) > ROOM else "tiny"
    report = Report(machine(place), shape)
    silence(place)

    def time_left() -> bool:
        return time.monotonic() - began < 60 * minutes

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, dtype in itertools.product(KINDS, dtypes(place)):
            of, where = f"{kind}, {dtype}", folder / f"{kind}-{dtype}"
            for comparison in numbers.COMPARISONS:
                about = comparison.title, comparison.otherwise, of
                if not time_left():
                    report.checks.append(Check(*about, None, None, "skipped: out of time"))
                    continue
                say(f"{of}: {comparison.title}")
                try:
                    if not where.exists():
                        build("tiny", where / "model", kind=kind)
                    value = comparison.distance(numbers.Setup(where / "model", where, str(place), dtype))
                    report.checks.append(Check(*about, value, comparison.bounds[dtype]))
                except Exception as error:  # noqa: BLE001  # a report says what failed, whatever it was
                    text = scrubbed(f"{type(error).__name__}: {error}")
                    report.checks.append(Check(*about, None, None, text, failed=True))
        parts: list[tuple[str, Callable[[], dict[str, object]]]] = [
            ("roofline", lambda: speed.roofline(place)),
            ("launches", lambda: of_a_layer(folder, place)),
            ("speed", lambda: speed.measured(build(shape, folder / "measured"), place, report.parts, time_left)),
        ]
        for title, part in parts:
            if not time_left():
                report.parts[title] = {"left out": "out of time"}
                continue
            say(title)
            try:
                report.parts[title] = part()
            except Exception as error:  # noqa: BLE001  # as above
                report.parts[title] = {"failed": scrubbed(f"{type(error).__name__}: {error}")}
    report.seconds = time.monotonic() - began
    if report.right:
        note_tried(place)
    return report


def dtypes(device: torch.device) -> list[str]:
    """Return the dtypes to check: without bfloat16 where the device only emulates it.

    >>> dtypes(torch.device("cpu")), dtypes(torch.device("mps"))
    (['float32', 'bfloat16'], ['float32'])
    """
    computes = device.type == "cpu" or default_dtype(device) == "bfloat16"
    return ["float32", "bfloat16"] if computes else ["float32"]
