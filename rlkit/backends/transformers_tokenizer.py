"""The model's own tokenizer, one text at a time, numpy out."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit import _check, _install
from rlkit._calls import hinted
from rlkit._forms import TokenIds
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import ArgumentError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LocalTokenizer", "source_of", "tokenizer_from"]


@hinted("tokenizer")
class LocalTokenizer:
    """A transformers tokenizer behind rlkit's protocol.

    Attributes:
        hf: the tokenizer of transformers itself.
        vocab_size: rows of the model's embedding; ids are below it.
        eos_ids: every id that ends a turn of this model.
    """

    # What transformers takes beside the template's variables; truncation or a mask would make something else of it.
    _GIVEN = frozenset(
        ("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation")
    ) | {"max_length", "tokenizer_kwargs"}

    def __init__(self, hf: PreTrainedTokenizerBase, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.hf = hf
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        # Whether special tokens are split is a setting of the tokenizer itself, changed between calls: two threads at
        # once would read each other's, or be refused.
        self._turn = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_turn"}  # as workers of a loader need it

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)
        self._turn = threading.Lock()

    @property
    def chat_template(self) -> str | None:
        """The template's text, or None."""
        template: str | None = getattr(self.hf, "chat_template", None)
        return template

    @property
    def name(self) -> str:
        """Where it was loaded from: a model's name, or a folder."""
        return str(getattr(self.hf, "name_or_path", ""))

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The texts that are tokens of their own, and whether they are special (control tokens)."""
        return {token.content: bool(token.special) for token in self.hf.added_tokens_decoder.values()}

    @property
    def named_tokens(self) -> dict[str, str]:
        """What chat templates know by name: ``{"bos_token": ..., "eos_token": ...}``."""
        return {name: str(text) for name, text in self.hf.special_tokens_map.items() if isinstance(text, str)}

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """int64 [T]; nothing is added, and special-token strings are plain text unless ``special``."""
        _check.require(isinstance(text, str), "encode(text)", text, "a string")
        with self._turn:
            ids = self.hf(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
        return np.array(ids, np.int64)

    def decode(self, tokens: TokenIds, skip_special: bool = True) -> str:
        """Return the text of int [T]."""
        ids = _check.token_ids("decode(tokens)", tokens, vocab_size=self.vocab_size)
        with self._turn:
            text: str = self.hf.decode(
                ids.tolist(), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: object
    ) -> np.ndarray:
        """int64 [T]: the messages as the model's template renders them.

        Args:
            messages: mappings with "role" and "content", as the template takes them.
            add_generation_prompt: end with the head of the assistant's message.
            variables: of the template, such as ``tools=`` or ``enable_thinking=``; ``chat_template=`` is another one.

        Raises:
            UnsupportedError: the tokenizer has no chat template.
            ArgumentError: an argument of transformers that decides on the form of the result, which is fixed here.
        """
        if self.chat_template is None and "chat_template" not in variables:
            raise UnsupportedError("the model's tokenizer has no chat template; encode the text that you want instead")
        taken = self._GIVEN & variables.keys()
        if taken:
            raise ArgumentError(
                f"apply_chat_template: no argument {min(taken)!r}; it gives the token ids, int64 [T], and the other "
                "arguments are variables of the template"
            )
        with self._turn:
            ids = self.hf.apply_chat_template(
                _check.messages("apply_chat_template(messages)", messages),
                tokenize=True,
                return_dict=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        return np.array(ids, np.int64)


def source_of(tokenizer: Tokenizer) -> str | None:
    """Return the absolute folder, or the hub id, that a tokenizer was read from; None: it was not read from any."""
    name = getattr(getattr(tokenizer, "hf", None), "name_or_path", None)
    if not name:
        return None
    return str(Path(name).absolute()) if Path(name).is_dir() else str(name)


def tokenizer_from(given: str | os.PathLike[str] | Tokenizer | PreTrainedTokenizerBase) -> Tokenizer:
    """Return the tokenizer of a directory, a hub name, or an object that is one.

    Raises:
        ConfigError: it cannot be read.
        UnsupportedError: an object of another kind.
    """
    source: Any = given
    if isinstance(given, (str, os.PathLike)):
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise ConfigError(f"tokenizer: reading one needs transformers: {_install.command('local')}") from error
        try:
            source = transformers.AutoTokenizer.from_pretrained(os.fspath(given))
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer: {given!s} holds none that can be read: {error}") from error
    if isinstance(source, Tokenizer):
        return source
    if hasattr(source, "chat_template") and callable(source):
        ends = source.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        return LocalTokenizer(source, vocab_size=len(source), eos_ids=ends)
    raise UnsupportedError("tokenizer: expected a directory, a hub name, a transformers tokenizer or rlkit's protocol")
