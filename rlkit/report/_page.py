"""The page itself: it reads a run's folder, and writes one file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs

from rlkit import _check, storage
from rlkit._files import plain, replace_file
from rlkit._runtime import VERSION
from rlkit._secrets import redact
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import CheckpointError, ConfigError, DataError
from rlkit.harnesses import Result, results
from rlkit.report import _curves
from rlkit.report.episodes import Episodes, chosen, packed
from rlkit.tracking import mask, read_metrics
from rlkit.tracking.jsonl import METRICS, TRAJECTORIES, MetricsRow
from rlkit.trajectory import Group

__all__ = ["RunFolder", "write"]


class RunFolder:
    """The files of a run, read on demand.

    Args:
        folder: with any of ``metrics.jsonl``, ``trajectories.jsonl`` and ``config.json``.

    Raises:
        ConfigError: it is not a path.
        CheckpointError: there is no such folder, or it holds none of these files.
    """

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise ConfigError("folder", f"got {_check.describe(folder)}", "the path of a run's folder")
        self.path = Path(folder)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder")
        names = (METRICS, TRAJECTORIES, "config.json")
        if not any((self.path / name).exists() for name in names):
            raise CheckpointError(f"{self.path}: is not a run's folder: it has none of {', '.join(names)}")
        self.unread = 0

    def config(self) -> object:
        """Return the settings, keys mask; {} if they are missing or cannot be read."""
        try:
            config = plain(mask(json.loads((self.path / "config.json").read_text("utf-8"))))
        except (OSError, ValueError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {"config": config}

    def settings(self) -> object:
        """Return the settings of its policies and of their last requests, keys mask; {} where unknown."""
        return self.facts("models")

    def facts(self, part: str) -> object:
        """Return the "machine" or the "models" of run.json, keys mask; {} where unknown."""
        path = self.path / "run.json"
        try:
            found = json.loads(path.read_text("utf-8"))[part] if path.is_file() else {}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return {}
        return plain(mask(found)) if isinstance(found, dict) else {}

    def sizes(self) -> list[tuple[int, int]]:
        """Return (trajectories, bytes) of each line of trajectories, without making objects of them."""
        path = self.path / TRAJECTORIES
        if not path.exists():
            return []
        try:
            with path.open("rb") as file:
                return [(line.count(b'"turns": ['), len(line)) for line in file]
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error

    def groups(self, wanted: frozenset[int] | None = None) -> Iterator[tuple[Group, dict[str, list[object]]]]:
        """Yield each group with the values of its tokens: name -> one entry per trajectory.

        Args:
            wanted: which lines of the file to read, counted from 0; None: all.
        """
        path = self.path / TRAJECTORIES
        self.unread = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file):
                    if not line.strip() or (wanted is not None and number not in wanted):
                        continue
                    group = _group(line, f"{path}:{number + 1}")
                    if group is None:
                        self.unread += 1
                    else:
                        yield group, _extras(group, json.loads(line))
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _group(line: bytes, where: str) -> Group | None:
    try:
        return storage.from_record(json.loads(line), where=where)
    except (ValueError, RecursionError, DataError):
        return None


def _extras(group: Group, record: Mapping[str, Any]) -> dict[str, list[object]]:
    """Return the values of tokens that fit them, from the group's line."""
    named = {}
    for name in ("advantages", "trainer_logprobs"):
        entries = [each.get(name) for each in record["trajectories"]]
        if entries and None not in entries and _fits(entries, group):
            named[name] = entries
    return named


def _fits(entries: list[object], group: Group) -> bool:
    return len(entries) == len(group) and all(
        not isinstance(e, list) or len(e) == t.token_count for e, t in zip(entries, group.trajectories, strict=True)
    )


_OWN = ("dom", "data", "charts", "tokens", "filters", "browser", "detail", "main")
_SCRIPTS = ("uplot.min.js", *(f"{name}.js" for name in _OWN))
_STYLES = ("uplot.min.css", "page.css")


def write(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    max_trajectories: int = 20_000,
    max_bytes: int = 500_000_000,
) -> Path:
    """Write a run as one HTML file, and return its path.

    Args:
        folder: the run's: ``metrics.jsonl``, ``trajectories.jsonl``, ``config.json``, or some of them.
        out: the file; None: ``report.html`` in the folder. It is written next to it and renamed into place.
        tokenizer: the policy's, to show tokens as text; None: their ids are shown.
        max_trajectories: of a run with more, groups evenly spaced over it are shown, and the page says so; >= 1.
        max_bytes: likewise, of the lines in ``trajectories.jsonl``; >= 1.

    Raises:
        ConfigError: an argument is not valid.
        CheckpointError: the folder is not a run's, or the page cannot be written.
    """
    run = RunFolder(folder)
    _check.integer("max_trajectories", max_trajectories, low=1)
    _check.integer("max_bytes", max_bytes, low=1)
    _check.require(out is None or (isinstance(out, (str, os.PathLike)) and str(out)), "out", out, "the path of a file")
    path = run.path / "report.html" if out is None else Path(out)
    episodes = Episodes()
    sizes = run.sizes()
    wanted = chosen(sizes, max_trajectories, max_bytes)
    for group, extras in run.groups(wanted):
        episodes.add(group, extras)
    episodes.finish()
    judged = results(run.path)
    # a resumed run has dropped the lines after its checkpoint, but not the scores
    rows: list[MetricsRow] = [{"step": each.step, "time": each.time, "metrics": each.metrics} for each in judged]
    table = _curves.table([*rows, *read_metrics(run.path)])
    name = redact(run.path.resolve().name)
    about = {
        "name": name,
        "rlkit": VERSION,
        "steps": table.last + 1,
        "seconds": table.seconds,
        "panels": _curves.panels(table),
        "counters": _curves.counters(table),
        "benchmarks": [row for each in reversed(judged) for row in _benchmarks(each)],
        "config": run.config(),
        "settings": run.settings(),
        "surroundings": run.facts("machine"),
        "index": episodes.index,
        "environments": episodes.environments,
        "endings": episodes.endings,
        "total": sum(n for n, _ in sizes),
        "unread": run.unread,
        "texts": {}
        if tokenizer is None
        else {str(t): tokenizer.decode([t], skip_special=False) for t in episodes.tokens},
    }
    try:
        with replace_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(_pieces(name, about, episodes.parts))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    return path


def _benchmarks(result: Result) -> Iterator[dict[str, object]]:
    """Yield the rows of the page's table of a harness's scores."""
    for score in result.scores:
        about = {"step": result.step, "harness": f"{result.harness} {result.version}"}
        yield about | attrs.asdict(score)


def _pieces(name: str, about: dict[str, object], parts: list[str]) -> Iterator[str]:
    """Yield the page's text. Data of the run are escaped (its name) or packed, so that they cannot act as markup."""
    script, style = (_joined(names) for names in (_SCRIPTS, _STYLES))
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    head = _asset("page.html")
    for key, value in {"POLICY": policy, "TITLE": html.escape(name)}.items():
        head = head.replace(f"@{key}@", value)
    before, _, after = head.partition("@STYLE@")
    yield f"{before}<style>{style}</style>"
    body, _, end = after.partition("@DATA@")
    yield body
    yield f'<script type="text/plain" id="about">{packed(about)}</script>\n'
    for i, part in enumerate(parts):
        yield f'<script type="text/plain" id="part-{i}">{part}</script>\n'
    yield f"<script>{script}</script>{end}"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(_asset(name).strip() for name in names)


def _asset(name: str) -> str:
    return files("rlkit.report").joinpath("assets", name).read_text("utf-8").replace("\r\n", "\n")
