"""The page itself: one file that asks nobody for anything, and in which nothing that a model wrote can run."""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import attrs

import rlkit
from rlkit import _check
from rlkit._disk import replacing
from rlkit._secrets import redact
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import CheckpointError
from rlkit.harnesses import Result
from rlkit.report import curves
from rlkit.report.episodes import Episodes, chosen, texts
from rlkit.report.packing import packed
from rlkit.report.reading import RunFolder
from rlkit.tracking.jsonl import MetricsRow

__all__ = ["write"]

_SCRIPTS = (
    "uplot.min.js",
    "dom.js",
    "data.js",
    "charts.js",
    "tokens.js",
    "filters.js",
    "browser.js",
    "detail.js",
    "main.js",
)
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
        out: the file; None: ``report.html`` in the folder. It is written beside and renamed into place.
        tokenizer: to show tokens as text where the run did not keep their texts; None: as far as it did.
        max_trajectories: of a run with more, groups evenly spaced over it are shown, and the page says so; >= 1.
        max_bytes: likewise, of the lines in ``trajectories.jsonl``; >= 1.

    Raises:
        ConfigError: an argument is not what it should be.
        CheckpointError: the folder is no run's, or the page cannot be written.
    """
    run = RunFolder(folder)
    _check.integer("max_trajectories", max_trajectories, low=1)
    _check.integer("max_bytes", max_bytes, low=1)
    _check.require(out is None or (isinstance(out, (str, os.PathLike)) and str(out)), "out", out, "the path of a file")
    path = run.path / "report.html" if out is None else Path(out)
    vocabulary = run.vocabulary()
    episodes = Episodes()
    sizes = run.sizes()
    wanted = chosen(sizes, max_trajectories, max_bytes)
    known = None
    if tokenizer is not None:
        from rlkit.tracking.vocabulary import Vocabulary

        known = Vocabulary(None, tokenizer)
    for group, extras in run.groups(wanted):
        episodes.add(group, extras)
        if known is not None:
            vocabulary |= known.add([group])
    episodes.finish()
    judged = run.results()
    # a run that went on from a checkpoint has dropped the lines behind it, but not the scores
    rows: list[MetricsRow] = [{"step": each.step, "time": each.time, "metrics": each.metrics} for each in judged[::-1]]
    table = curves.table([*rows, *run.metrics()])
    about = {
        "name": redact(run.name),
        "rlkit": rlkit.__version__,
        "steps": table.last + 1,
        "seconds": table.seconds,
        "panels": curves.panels(table),
        "counters": curves.counters(table),
        "benchmarks": [row for each in judged for row in _benchmarks(each)],
        "config": run.config(),
        "surroundings": run.surroundings(),
        "index": episodes.index,
        "environments": episodes.environments,
        "endings": episodes.endings,
        "total": sum(n for n, _ in sizes),
        "unread": run.unread,
        "texts": texts(vocabulary, episodes.tokens),
    }
    try:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(_pieces(redact(run.name), about, episodes.parts))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    return path


def _benchmarks(result: Result) -> Iterator[dict[str, object]]:
    """Yield the rows of the page's table of a harness's scores."""
    for score in result.scores:
        about = {"step": result.step, "harness": f"{result.harness} {result.version}"}
        yield about | attrs.asdict(score)


def _pieces(name: str, about: dict[str, object], parts: list[str]) -> Iterator[str]:
    """Yield the page's text. What comes from the run is escaped (its name) or packed, so that it is only data."""
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
