"""Text that cannot become control tokens.

A chat template writes control tokens (``<|im_end|>``) as text, and so can an environment, a user or a tool. Both come
out of the template as one string, so the difference has to travel inside it: contents are marked before they are
rendered. A marked string has an invisible separator behind the first character of each control token's text; it ends a
piece of text when the rendering is encoded, and control tokens do not grow across pieces. Text without such strings is
not changed at all, so its tokens are those of the plain rendering.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar, cast

import numpy as np

from rlkit import _check
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import DataError

__all__ = ["CUT", "PLACEHOLDER", "ControlText"]

CUT = "\U000f0010"  # private-use characters: they mean nothing to any model
PLACEHOLDER = "\U000f0011"
_FOREIGN = re.compile(f"[{CUT}{PLACEHOLDER}\ud800-\udfff]")  # ours, and surrogates, which are not text
_DEPTH = 64
_Json = TypeVar("_Json")


class ControlText:
    """Marks texts, and encodes what a template made of them.

    Args:
        tokenizer: rlkit's protocol. Its optional attribute ``added_tokens`` (text -> whether it is special) says which
            texts are tokens of their own; without it the vocabulary is searched once.
        template: the template's text, or None. Tokens that are not special but stand in it, ``<tool_call>`` say, are
            control tokens too when an environment writes them.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        added: Mapping[str, bool] | None = getattr(tokenizer, "added_tokens", None)
        if added is None:
            added = _special_by_search(tokenizer)
        special = [text for text, is_special in added.items() if is_special and text.strip()]
        written = [text for text in added if text in (template or "") and len(text.strip()) > 2]
        self._special = _pattern(special)
        self._all = _pattern([*special, *written])
        self._edges = {text[:i] for text in (*special, *written) for i in range(1, len(text))}
        self._longest = max(map(len, self._edges), default=0)
        self._ids = {text: self._single(text) for text in special}
        self._special_ids = np.array(sorted(i for i in self._ids.values() if i is not None), np.int64)
        self._leads = _adds_a_prefix(tokenizer)

    @property
    def special_ids(self) -> np.ndarray:
        """int64 [K], sorted: the ids of the special tokens."""
        return self._special_ids

    def mark(self, value: _Json, *, foreign: bool = True, where: str = "message") -> _Json:
        """Return ``value`` with every string in it marked: a string, or what JSON knows.

        Args:
            value: is not changed.
            foreign: from an environment. Otherwise (the program's or the policy's own text) only the special tokens
                are control tokens.
            where: what an error names.

        Raises:
            DataError: something that is not JSON, or nested more than 64 deep.
        """
        return cast("_Json", self._marked(value, self._all if foreign else self._special, where, 0))

    def encode(self, text: str, *, first: bool = True) -> np.ndarray:
        """Encode ``text``, a rendering of marked texts: int64 [T]; ``first``: nothing stands before it."""
        ids: list[np.ndarray] = []
        for piece in text.split(CUT):
            if piece:
                ids.append(self._piece(piece, first=first))
                first = False
        return np.concatenate(ids) if ids else np.zeros(0, np.int64)

    def _marked(self, value: object, pattern: re.Pattern[str] | None, where: str, depth: int) -> object:
        if isinstance(value, str):
            return self._marked_text(str(value), pattern)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, (np.number, np.bool_)):
            return value.item()
        if depth >= _DEPTH:
            raise DataError(where, f"is nested more than {_DEPTH} deep", "a flatter value")
        if isinstance(value, Mapping):
            items = ((self._marked(str(k), pattern, where, 0), v) for k, v in value.items())
            return {k: self._marked(v, pattern, f"{where}[{k!r}]", depth + 1) for k, v in items}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, pattern, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        raise DataError(where, f"got {_check.shown(value)}", "text, or what JSON can hold")

    def _marked_text(self, text: str, pattern: re.Pattern[str] | None) -> str:
        text = _FOREIGN.sub("\ufffd", text)
        if pattern is None:
            return text
        parts, start = [], 0
        while match := pattern.search(text, start):  # from inside the match on: the next may overlap it
            plain = text[start : match.start() + 1]
            parts.append(plain if len(match[0]) > 1 else plain[:-1] + "\ufffd")  # one character cannot be cut
            start = match.start() + 1
        text = CUT.join([*parts, text[start:]])
        body = text.rstrip()  # the template may trim, and then put something directly behind
        if any(body[-n:] in self._edges for n in range(1, min(self._longest, len(body)) + 1)):
            text = body + CUT + text[len(body) :]
        return text

    def _piece(self, text: str, *, first: bool) -> np.ndarray:
        ids = self._plain(text, special=True, first=first)
        if self._special is None:
            return ids
        matches = list(self._special.finditer(text))
        if np.isin(ids, self._special_ids).sum() == len(matches):
            return ids
        # The tokenizer saw a control token where the text has none, by normalising it. Only exact texts count.
        out, start = [], 0
        for match in matches:
            out.append(self._plain(text[start : match.start()], special=False, first=first and not start))
            token = self._ids[match[0]]
            out.append(np.zeros(0, np.int64) if token is None else np.array([token], np.int64))
            start = match.end()
        out.append(self._plain(text[start:], special=False, first=first and not start))
        return np.concatenate(out)

    def _plain(self, text: str, *, special: bool, first: bool) -> np.ndarray:
        if not text:
            return np.zeros(0, np.int64)
        if self._leads is None or first:
            return self._tokenizer.encode(text, special=special)
        ids = self._tokenizer.encode("\n" + text, special=special)  # what is put in front of a text stays there
        n = self._leads.size
        if ids.size >= n and (ids[:n] == self._leads).all():
            return ids[n:]
        return self._tokenizer.encode(text, special=special)

    def _single(self, text: str) -> int | None:
        ids = self._tokenizer.encode(text, special=True)
        return int(ids[0]) if ids.size == 1 else None


def _pattern(texts: list[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of ``texts``, the longest first."""
    ordered = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _special_by_search(tokenizer: Tokenizer) -> dict[str, bool]:
    """Return the texts of the ids that ``skip_special`` leaves out."""
    special = {}
    for i in range(tokenizer.vocab_size):
        if not tokenizer.decode([i], skip_special=True) and (text := tokenizer.decode([i], skip_special=False)):
            special[text] = True
    return special


def _adds_a_prefix(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the ids of a line break if the tokenizer puts something (a blank) in front of every text; else None."""
    line, word, both = (tokenizer.encode(text) for text in ("\n", "a", "\na"))
    return None if np.array_equal(np.concatenate([line, word]), both) else line
