"""Trajectories in the form of the page: an index of all, and the rest packed in parts."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlkit._files import from_json, plain
from rlkit._secrets import redact
from rlkit.tracking import mask
from rlkit.trajectory import Group, Trajectory

__all__ = ["Episodes", "chosen", "packed", "unpacked"]


def packed(value: object) -> str:
    """Return ``value`` as JSON, gzip and base64: letters, digits, "+", "/" and "=" only.

    Non-finite numbers, which a damaged or an old file may hold, become text: one number never breaks a page.

    >>> unpacked(packed({"text": "</script>"}))
    {'text': '</script>'}
    """
    dumps = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    try:
        text = dumps(value)
    except (ValueError, TypeError):  # seldom, and it takes a copy
        text = dumps(plain(value))
    data = text.encode("utf-8", errors="backslashreplace")  # a lone surrogate is not text
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def unpacked(text: str) -> object:
    """Return the value that ``packed`` got."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


_Record: TypeAlias = dict[str, Any]  # a trajectory or a message in the form of the page, which reads it as JSON
PART_SIZE = 400_000  # characters of JSON, about: unpacked in a few hundredths of a second
SNIPPET = 110
QUESTION = 52  # its end, which differs more often than its beginning
_SCALE = 1000  # numbers per token are kept to a thousandth, as integers


def chosen(sizes: Sequence[tuple[int, int]], most: int, most_bytes: int) -> frozenset[int] | None:
    """Return which lines to show: None for all, else some, evenly spaced, so that both limits hold.

    Args:
        sizes: (trajectories, bytes) of each line.
        most: trajectories.
        most_bytes: of lines.

    >>> chosen([(8, 100)] * 4, 100, 1000) is None
    True
    >>> sorted(chosen([(8, 100)] * 4, 16, 1000))
    [0, 2]
    """
    count, size = sum(n for n, _ in sizes), sum(b for _, b in sizes)
    if count <= most and size <= most_bytes:
        return None
    share = min(most / max(1, count), most_bytes / max(1, size))
    lines = max(1, int(len(sizes) * share))
    return frozenset(i * len(sizes) // lines for i in range(lines))


class Episodes:
    """A builder of the page's index and its packed parts from groups.

    Attributes:
        index: column name -> one entry per trajectory.
        parts: text of each part, as ``packed`` makes it.
        tokens: ids that occur.
    """

    def __init__(self) -> None:
        self.index: dict[str, list[object]] = {name: [] for name in _COLUMNS}
        self.environments: list[str] = []
        self.endings: list[str] = []
        self.parts: list[str] = []
        self.tokens: set[int] = set()
        self._waiting: list[dict[str, object]] = []
        self._size = 0
        self._group = 0

    def add(self, group: Group, extras: Mapping[str, Sequence[object]]) -> None:
        """Add a group, with the values of its tokens: name -> one entry per trajectory."""
        for member, trajectory in enumerate(group.trajectories):
            advantage = _numbers(extras, "advantages", member)
            trainer = _numbers(extras, "trainer_logprobs", member)
            gaps = _gaps(trajectory, trainer)
            record = _record(trajectory, group, member, redact)
            record |= {"advantages": _scaled(advantage), "trainer": _scaled(trainer)}
            for turn in record["turns"]:
                self.tokens.update(turn["a"])
                self.tokens.update(turn["t"])
            row = (
                group.step,
                _place(self.environments, redact(trajectory.env)),
                -1 if trajectory.index is None else trajectory.index,
                _finite(trajectory.reward),
                len(trajectory.turns),
                trajectory.token_count,
                _place(self.endings, redact(trajectory.ended)),
                _finite(float(np.mean(advantage))) if advantage is not None and np.size(advantage) else None,
                _finite(float(np.abs(gaps).max())) if gaps is not None and gaps.size else None,
                self._group,
                len(self.parts),
                len(self._waiting),
                int(any(turn.stop_reason == "length" for turn in trajectory.turns)),
                _question(record),
                _snippet(record),
            )
            for name, value in zip(_COLUMNS, row, strict=True):
                self.index[name].append(value)
            self._waiting.append(record)
            self._size += _length(record)
            if self._size >= PART_SIZE:
                self._pack()
        self._group += 1

    def finish(self) -> None:
        """Pack the pending trajectories."""
        if self._waiting:
            self._pack()

    def _pack(self) -> None:
        self.parts.append(packed(self._waiting))
        self._waiting, self._size = [], 0


_COLUMNS = (
    *("step", "env", "item", "reward", "turns", "tokens", "ended", "advantage", "gap", "group", "part", "place"),
    *("cut", "question", "snippet"),
)


def _record(trajectory: Trajectory, group: Group, member: int, redact: Callable[[str], str]) -> _Record:
    return {
        "number": group.number,
        "member": member,
        "seed": trajectory.seed,
        "version": trajectory.version,
        "newest": max((int(turn.sample.token_versions.max(initial=0)) for turn in trajectory.turns), default=0),
        "terminated": trajectory.terminated,
        "tags": mask(trajectory.tags),
        "metrics": dict(trajectory.metrics),
        "messages": [_message(message, redact) for message in trajectory.messages],
        "turns": list(_turns(trajectory)),
    }


def _turns(trajectory: Trajectory) -> Iterator[dict[str, object]]:
    """Return each turn: k tokens of the prompt as before, a added, t chosen, their logprobs l, versions v if mixed."""
    before = np.zeros(0, np.int64)
    for turn in trajectory.turns:
        size = min(before.size, turn.prompt.size)
        different = np.flatnonzero(before[:size] != turn.prompt[:size])
        common = int(different[0]) if different.size else size
        drawn = {} if turn.sample.versions is None else {"v": turn.sample.versions.tolist()}
        yield {
            "k": common,
            "a": turn.prompt[common:].tolist(),
            "t": turn.tokens.tolist(),
            "l": _scaled(turn.logprobs),
            "r": _finite(turn.reward),
            "stop": turn.stop_reason,
            "temperature": turn.sample.temperature,
            "m": dict(turn.metrics),
            **drawn,
        }
        before = np.concatenate([turn.prompt, turn.tokens])


def _message(message: Mapping[str, object], redact: Callable[[str], str]) -> _Record:
    """Return role, content and tool calls as text; content may be a list of parts."""
    shown = {key: message[key] for key in ("role", "name") if isinstance(message.get(key), str)}
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "\n".join(str(part.get("text", part) if isinstance(part, Mapping) else part) for part in content)
    shown["content"] = redact("" if content is None else str(content))
    if message.get("tool_calls"):
        shown["calls"] = mask(message["tool_calls"])
    return shown


def _numbers(extras: Mapping[str, Sequence[object]], name: str, member: int) -> np.ndarray | None:
    entries = extras.get(name)
    if entries is None:
        return None
    entry = entries[member]
    read = [from_json(x) for x in entry] if isinstance(entry, list) else from_json(entry)
    return np.asarray(np.array(read, dtype=np.float64))  # None becomes NaN


def _gaps(trajectory: Trajectory, trainer: np.ndarray | None) -> np.ndarray | None:
    if trainer is None or trainer.shape != (trajectory.token_count,) or not trajectory.token_count:
        return None
    gaps = trainer - np.concatenate([turn.logprobs for turn in trajectory.turns])
    return np.asarray(gaps[np.isfinite(gaps)])


def _scaled(numbers: np.ndarray | None) -> object:
    """Return a number in thousandths; None if it is not finite."""
    if numbers is None:
        return None
    if numbers.ndim == 0:
        value = float(numbers)
        return round(value * _SCALE) if math.isfinite(value) else None
    clipped = np.clip(numbers.astype(np.float64) * _SCALE, -1e9, 1e9)
    if np.isfinite(clipped).all():
        return np.rint(clipped).astype(np.int64).tolist()
    return [round(x) if math.isfinite(x) else None for x in clipped.tolist()]


def _snippet(record: _Record) -> str:
    """Return the beginning of the policy's last text."""
    said = [m["content"] for m in record["messages"] if m.get("role") == "assistant" and m["content"].strip()]
    return " ".join(said[-1].split())[:SNIPPET] if said else ""


def _question(record: _Record) -> str:
    """Return the end of the policy's first prompt."""
    told = ""
    for message in record["messages"]:
        if message.get("role") == "assistant":
            break
        told = message["content"]
    words = " ".join(told.split())
    return words if len(words) <= QUESTION else f"\u2026{words[-QUESTION:]}"


def _length(record: _Record) -> int:
    """Estimate the length of its JSON."""
    texts = sum(len(message["content"]) for message in record["messages"])
    numbers = sum(len(turn["a"]) + 2 * len(turn["t"]) for turn in record["turns"])
    return 300 + texts + 6 * numbers


def _place(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
