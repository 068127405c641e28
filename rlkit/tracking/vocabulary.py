"""The texts of tokens that a run has seen, so that its page can show them without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rlkit import _check
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import ConfigError
from rlkit.tracking.lines import append, lines
from rlkit.trajectory import Group

__all__ = ["Vocabulary", "read_vocabulary", "runs"]

_UNCLEAR = "\ufffd"  # what decoding gives for bytes that are a part of a character
_LONGEST = 12  # tokens of a run that are decoded together


class Vocabulary:
    """Keeps token id -> text in a file, a line for each addition, in the order in which they are first seen.

    Tokens that hold a part of a character have no text of their own; runs of them are kept together, under their ids
    joined by commas.

    Args:
        path: the file; None: in memory only.
        tokenizer: anything with ``decode(tokens, skip_special=...)``.

    Raises:
        ConfigError: the tokenizer cannot decode.

    >>> import rlkit
    >>> from rlkit.trajectory import Trajectory, Turn
    >>> tokens = "né".encode()  # three bytes, which are the toy's tokens
    >>> group = Group([Trajectory([Turn(rlkit.Sample([65], list(tokens), [-1.0] * 3))])])
    >>> Vocabulary(None, rlkit.connect("toy").tokenizer).add([group])
    {'65': 'A', '110': 'n', '195': '\ufffd', '169': '\ufffd', '195,169': 'é'}
    """

    def __init__(self, path: Path | None, tokenizer: Tokenizer) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise ConfigError("tokenizer", f"got {_check.shown(tokenizer)}", "the policy's: policy.tokenizer")
        self._path = path
        self._tokenizer = tokenizer
        self._texts: dict[str, str] = {} if path is None else read_vocabulary(path)

    def add(self, groups: Iterable[Group]) -> dict[str, str]:
        """Return what these groups bring that was not known."""
        new: dict[str, str] = {}
        for group in groups:
            for trajectory in group.trajectories:
                before = np.zeros(0, np.int64)
                for turn in trajectory.turns:
                    whole = np.concatenate([turn.prompt, turn.tokens])
                    known = before.size if np.array_equal(whole[: before.size], before) else 0
                    self._add(whole[known:].tolist(), new)
                    before = whole
        if new and self._path is not None:
            append(self._path, [{"texts": new}])
        self._texts |= new
        return new

    def _add(self, tokens: list[int], new: dict[str, str]) -> None:
        for token in dict.fromkeys(tokens):
            if str(token) not in self._texts and str(token) not in new:
                new[str(token)] = self._tokenizer.decode([token], skip_special=False)
        unclear = {t for t in set(tokens) if _UNCLEAR in (new.get(str(t)) or self._texts.get(str(t), ""))}
        for run in runs(tokens, unclear) if unclear else ():
            key = ",".join(map(str, run))
            if len(run) > 1 and key not in self._texts and key not in new:
                text = self._tokenizer.decode(run, skip_special=False)
                if _UNCLEAR not in text:
                    new[key] = text


def runs(tokens: list[int], unclear: set[int]) -> Iterable[list[int]]:
    """Return the unbroken runs of tokens that are in ``unclear``, cut where they are long.

    >>> list(runs([1, 9, 8, 1, 9], {8, 9}))
    [[9, 8], [9]]
    """
    run: list[int] = []
    for token in tokens:
        if token in unclear and len(run) < _LONGEST:
            run.append(token)
            continue
        if run:
            yield run
        run = [token] if token in unclear else []
    if run:
        yield run


def read_vocabulary(path: Path) -> dict[str, str]:
    """Return the texts in a file that ``Vocabulary`` wrote; {} where there is none."""
    vocabulary: dict[str, str] = {}
    for record in lines(path):
        texts = record.get("texts")
        if isinstance(texts, dict):
            vocabulary |= {key: text for key, text in texts.items() if isinstance(text, str)}
    return vocabulary
