"""The page of a run, or of several: curves, settings and trajectories in one HTML file that needs no server.

Charts and settings enter the page as Jinja2 escapes them. Trajectories are packed in parts, which the page's script
unpacks on demand, and in an index, from which it makes the list.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rlkit import _check, storage
from rlkit._files import from_json, plain, replace_file
from rlkit._runtime import VERSION, missing
from rlkit._secrets import mask, redact
from rlkit.backends.protocol import Tokenizer
from rlkit.config import flatten
from rlkit.errors import CheckpointError, DataError
from rlkit.metrics.names import general, reduction, split_name
from rlkit.tracking.jsonl import TRAJECTORIES, MetricsRow, read_metrics
from rlkit.trajectory import Group, Trajectory, Turn

__all__ = ["write"]

_MOST_POINTS = 1200  # of a curve
_PART_SIZE = 400_000  # characters of JSON, about: unpacked in a few hundredths of a second
_UNCLEAR = "\ufffd"  # the text of bytes that are a part of a character
_LONGEST = 12  # tokens that are decoded together; page.js has the same number
_COLUMNS = (
    *("run", "step", "env", "item", "reward", "turns", "tokens", "ended", "advantage", "gap"),
    *("group", "part", "place", "question", "answer"),
)


def write(
    folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    max_groups: int = 20_000,
) -> Path:
    """Write a run, or several on one page, as one HTML file, and return its path.

    Args:
        folder: the run's, with ``metrics.jsonl``, ``trajectories.jsonl`` or ``config.json``; or a sequence of folders,
            whose curves are drawn in the same charts.
        out: the file; None: ``report.html`` in the (first) folder. It is written next to it and renamed into place.
        tokenizer: shows tokens as text; None: as ids. Messages are text in either case.
        max_groups: of a run with more, groups evenly spaced over it are shown, and the page says so; of several runs
            each has an equal share. >= 1.

    Raises:
        ConfigError: an argument is not valid.
        CheckpointError: a folder is not a run's, or the page cannot be written.
        MissingPackageError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise missing("rlkit.report", "jinja2", "report") from error
    folders = list(folder) if isinstance(folder, Sequence) and not isinstance(folder, str) else [folder]
    valid = folders and all(isinstance(each, (str, os.PathLike)) and str(each) for each in folders)
    _check.require(valid, "folder", folder, "the path of a run's folder, or a sequence of them")
    _check.require(out is None or (isinstance(out, (str, os.PathLike)) and str(out)), "out", out, "the path of a file")
    _check.integer("max_groups", max_groups, low=1)
    _check.require(tokenizer is None or hasattr(tokenizer, "decode"), "tokenizer", tokenizer, "policy.tokenizer")
    paths = [Path(each) for each in folders]
    path = paths[0] / "report.html" if out is None else Path(out)
    names = [redact(each.resolve().name) for each in paths]
    if len(set(names)) < len(names):
        names = [redact(str(each)) for each in paths]
    metrics = [read_metrics(each) for each in paths]
    trajectories = _Trajectories(tokenizer)
    style, script = _join_assets("uplot.min.css", "page.css"), _join_assets("uplot.min.js", "page.js")
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    pieces = environment.from_string(_join_assets("page.html.j2")).generate(
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        facts=[_describe_run(rows) for rows in metrics],
        names=names,
        version=VERSION,
        about={"runs": names, "charts": _make_charts(metrics)},
        settings=[(file, _compare(paths, file)) for file in ("config.json", "run.json")],
        parts=trajectories.read(zip(names, paths, strict=True), max(1, max_groups // len(paths))),
        index=trajectories.pack_index,
    )
    try:
        with replace_file(path) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(pieces)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    return path


def _describe_run(rows: Sequence[MetricsRow]) -> str:
    """Return how many steps a run made, and how long that took; later evaluations of its checkpoints are no part."""
    evaluation = ("eval/", "time/eval")
    own = [row for row in rows if not all(name.startswith(evaluation) for name in row["metrics"])] or rows
    seconds = max((row["time"] for row in own), default=0.0) - min((row["time"] for row in own), default=0.0)
    length = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
    return f"{max((row['step'] for row in own), default=-1) + 1} steps in {length}"


def _compare(paths: Iterable[Path], name: str) -> dict[str, list[str]]:
    """Return key -> its value in each run, of a JSON file that a run may have; secrets are masked."""
    tables: list[dict[str, str]] = []
    for path in paths:
        try:
            content = json.loads((path / name).read_text("utf-8")) if (path / name).is_file() else {}
            tables.append(dict(flatten(plain(mask(content)))))
        except (OSError, ValueError, RecursionError):
            tables.append({})
    return {key: [table.get(key, "") for table in tables] for table in tables for key in table}


def _make_charts(runs: Iterable[Iterable[MetricsRow]]) -> dict[str, dict[str, Any]]:
    """Return name -> chart of each metric, with a curve for each environment and run."""
    points: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for run, rows in enumerate(runs):
        for row in rows:
            for name, value in row["metrics"].items():
                points[name, run][row["step"]] = value  # the last value of a step counts
    charts: dict[str, dict[str, Any]] = {}
    for (name, run), values in points.items():
        title, env, end = _split(name)
        chart = charts.setdefault(title, {"reduction": reduction(name), "curves": [], "wrong": []})
        finite = _thin([(step, value) for step, value in sorted(values.items()) if math.isfinite(value)])
        chart["wrong"] += [step for step, value in values.items() if not math.isfinite(value)]
        x, y = [step for step, _ in finite], [float(f"{value:.6g}") for _, value in finite]
        chart["curves"].append({"env": env, "end": end, "run": run, "x": x, "y": y})
    return charts


def _split(name: str) -> tuple[str, str, str]:
    """Return a metric's name without its environment, that, and which end of an interval it is, in the mean's chart.

    >>> _split("env/sums/reward"), _split("eval/sums/low"), _split("train/loss")
    (('env/*/reward', 'sums', ''), ('eval/*/mean', 'sums', 'low'), ('train/loss', '', ''))
    """
    kind, env, what = split_name(name) or ("", "", "")
    interval = kind == "eval" and what in ("low", "high")
    return ("eval/*/mean", env, what) if interval else (general(name), env, "")


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most ``_MOST_POINTS``: the lowest and the highest of each stretch, and both ends.

    >>> len(_thin([(i, float(i % 7)) for i in range(100_000)])) <= _MOST_POINTS
    True
    """
    if len(points) <= _MOST_POINTS:
        return points
    kept, count = {points[0], points[-1]}, _MOST_POINTS // 2 - 1
    for i in range(count):
        stretch = points[i * len(points) // count : (i + 1) * len(points) // count]
        kept |= {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
    return sorted(kept)


class _Trajectories:
    """A reader of trajectories, which packs them in parts and keeps an index of all."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._decode: Any = getattr(tokenizer, "decode", None)
        self._texts: dict[str, str] = {}  # of tokens, by id; of tokens with parts of a character, by ids with commas
        self._rows: list[tuple[object, ...]] = []
        self._counts = {"groups": 0, "total": 0, "unread": 0}
        self._part: list[dict[str, Any]] = []
        self._parts = self._size = 0

    def read(self, runs: Iterable[tuple[str, Path]], most: int) -> Iterator[str]:
        """Yield the packed parts, of at most ``most`` groups of each run (its name and its folder)."""
        for run, folder in runs:
            for group, record in self._read_groups(folder / TRAJECTORIES, most):
                for trajectory, raw in zip(group.trajectories, record["trajectories"], strict=True):
                    self._add(run, trajectory, raw, group)
                if self._size >= _PART_SIZE:
                    yield self._pack_part()
        yield self._pack_part()

    def pack_index(self) -> str:
        """Return the packed index: columns with an entry for each trajectory, texts of tokens, and counts."""
        columns = {name: [row[i] for row in self._rows] for i, name in enumerate(_COLUMNS)}
        return _pack({"columns": columns, "texts": self._texts, **self._counts})

    def _pack_part(self) -> str:
        part, self._part, self._size = self._part, [], 0
        self._parts += 1
        return _pack(part)

    def _read_groups(self, path: Path, most: int) -> Iterator[tuple[Group, dict[str, Any]]]:
        """Yield groups evenly spaced over the file, with their lines' records; lines without one are counted."""
        if not path.is_file():
            return
        with path.open("rb") as file:
            total = sum(1 for line in file if line.strip())
            self._counts["total"] += total
            file.seek(0)
            for number, line in enumerate(line for line in file if line.strip()):
                if number * most // total == (number - 1) * most // total:
                    continue
                try:
                    record = json.loads(line)
                    group = storage.from_record(record, where=str(path))
                except (ValueError, RecursionError, DataError):
                    self._counts["unread"] += 1
                    continue
                self._counts["groups"] += 1
                yield group, record

    def _add(self, run: str, trajectory: Trajectory, raw: Mapping[str, Any], group: Group) -> None:
        """Add a trajectory to the index and to the part; ``raw`` is its record in the file."""
        count, turns = trajectory.token_count, trajectory.turns
        advantages = _read_values(raw.get("advantages"), count)
        trainer = _read_values(raw.get("trainer_logprobs"), count)
        sampled = np.concatenate([np.zeros(0), *(turn.logprobs for turn in turns)])
        gaps = trainer - sampled if trainer.ndim else None
        oldest = trajectory.version
        newest = max((int(turn.sample.token_versions.max(initial=0)) for turn in turns), default=oldest)
        record: Any = {
            "messages": [_read_message(message) for message in trajectory.messages],
            "env": trajectory.env,
            "ended": trajectory.ended or "ended",
            "tags": trajectory.tags,
            "metrics": trajectory.metrics,
            "failures": [f"{failure.kind}: {failure.message}" for failure in group.failures],
        }
        record = plain(mask(record))
        record |= {
            "seed": trajectory.seed,
            "version": str(oldest) if oldest == newest else f"{oldest} to {newest}",
            "turns": [self._read_turn(*pair) for pair in zip(turns, raw["turns"], strict=True)],
            "advantages": _scale(advantages),
            "trainer": None if gaps is None else _scale(trainer),
        }
        said = [message["content"] for message in record["messages"] if message.get("role") == "assistant"]
        asked = list(itertools.takewhile(lambda message: message.get("role") != "assistant", record["messages"]))
        row: tuple[object, ...] = (
            *(run, group.step, record["env"], trajectory.index, _round(trajectory.reward), len(turns), count),
            record["ended"] + ", cut at max_tokens" * any(turn.stop_reason == "length" for turn in turns),
            _round(advantages.mean()) if advantages.size else None,
            None if gaps is None else _round(np.abs(gaps[np.isfinite(gaps)]).max(initial=0)),
            *(self._counts["groups"], self._parts, len(self._part)),
            " ".join(asked[-1]["content"][-300:].split())[-52:] if asked else "",  # ends of questions differ
            " ".join(said[-1][:600].split())[:110] if said else "",
        )
        self._rows.append(row)
        self._part.append(record)
        self._size += 300 + 12 * count + sum(len(message["content"]) for message in record["messages"])

    def _read_turn(self, turn: Turn, raw: Mapping[str, Any]) -> dict[str, object]:
        """Return a turn: the number of the prompt's tokens that were there before, those added, and those sampled."""
        prompt: dict[str, Any] = raw["prompt"]
        tokens = turn.tokens.tolist()
        if self._decode is not None:
            self._add_texts(prompt["added"])
            self._add_texts(tokens)
        versions = None if turn.sample.versions is None else turn.sample.versions.tolist()
        about: dict[str, object] = {
            "reward": _round(turn.reward),
            "temperature": turn.sample.temperature,
            "stop": turn.stop_reason,
        }
        numbers = {"tokens": tokens, "logprobs": _scale(turn.logprobs), "versions": versions}
        return about | numbers | prompt | {"metrics": dict(turn.metrics)}

    def _add_texts(self, tokens: Sequence[int]) -> None:
        """Add the texts of tokens; those that hold a part of a character are decoded together, too."""
        for token in set(tokens):
            if str(token) not in self._texts:
                self._texts[str(token)] = self._decode([token], skip_special=False)
        for unclear, run in itertools.groupby(tokens, lambda token: _UNCLEAR in self._texts[str(token)]):
            while unclear and len(piece := list(itertools.islice(run, _LONGEST))) > 1:
                self._texts[",".join(map(str, piece))] = self._decode(piece, skip_special=False)


def _read_message(message: Mapping[str, object]) -> dict[str, Any]:
    """Return role, name, content as text, and tool calls."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "\n".join(str(part.get("text", part) if isinstance(part, Mapping) else part) for part in content)
    shown: dict[str, Any] = {key: message[key] for key in ("role", "name") if isinstance(message.get(key), str)}
    return shown | {"content": "" if content is None else str(content), "calls": message.get("tool_calls") or []}


def _read_values(value: object, count: int) -> np.ndarray:
    """Return one number for each of ``count`` tokens, or one for all; NaN where there is none, or another number."""
    if isinstance(value, list) and len(value) == count:
        return np.array([from_json(each) for each in value], dtype=np.float64)
    return np.array(from_json(value), dtype=np.float64)


def _scale(numbers: np.ndarray) -> object:
    """Return numbers in thousandths, which are short; None where they are not finite."""
    whole = [round(1000 * x) if math.isfinite(x) else None for x in numbers.ravel().tolist()]
    return whole if numbers.ndim else whole[0]


def _round(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _pack(value: object) -> str:
    """Return ``value`` as JSON, gzip and base64: letters, digits, "+", "/" and "=", none of which is markup."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(text, 6, mtime=0)).decode()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _join_assets(*names: str) -> str:
    folder = files("rlkit.report").joinpath("assets")
    return "\n".join(folder.joinpath(name).read_text("utf-8").replace("\r\n", "\n").strip() for name in names)
