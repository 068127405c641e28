"""The tokenizers of the toy and of transformers, and whether two of them read the same tokens."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np

from rlkit import _check, _runtime
from rlkit._check import TokenIds
from rlkit.backends.hub import hub_source
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import ConfigError, DataError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "BRINGS_CODE",
    "ByteTokenizer",
    "LocalTokenizer",
    "reason_of",
    "same_tokenizer",
    "source_of",
    "tokenizer_from",
]

_PROBES = (
    "Hello, world! 12345 + 67.89 = ?\n\tdef f(x):\n        return x  # comment\n",
    "Übergröße, naïve café — “quotes” … 你好世界 \U0001f600 Привет مرحبا <think>\\boxed{1}</think>",
)


def same_tokenizer(one: Tokenizer, two: Tokenizer, *, ends: bool = True) -> str:
    """Describe the difference of two tokenizers; "" where there is none.

    The comparison covers the encoding of some texts in several scripts, the end tokens, and the decoding of a thousand
    ids. It leaves out the sizes of vocabularies: models of one family pad theirs differently.

    Args:
        one, two: the tokenizers.
        ends: whether the end tokens have to be the same.

    >>> import rlkit
    >>> same_tokenizer(rlkit.connect("toy").tokenizer, rlkit.connect("toy").tokenizer)
    ''
    """
    for text in _PROBES:
        if one.encode(text).tolist() != two.encode(text).tolist():
            return "encodes texts differently"
    if ends and set(one.eos_ids) != set(two.eos_ids):
        return f"has the end tokens {sorted(two.eos_ids)}, not {sorted(one.eos_ids)}"
    for token in np.unique(np.linspace(0, min(one.vocab_size, two.vocab_size) - 1, 1000).astype(int)).tolist():
        if one.decode([token], skip_special=False) != two.decode([token], skip_special=False):
            return f"decodes token {token} to another text"
    return ""


BRINGS_CODE = "it brings its own code, which rlkit never runs; expected an architecture that is part of transformers"


_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CONTROL = re.compile("|".join(map(re.escape, _SPECIAL)).encode())


class ByteTokenizer:
    """UTF-8 bytes as tokens, and three special ones: <|im_start|> 256, <|im_end|> 257 (the end), <|endoftext|> 258."""

    vocab_size = 259
    eos_ids = (257,)
    chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    added_tokens = MappingProxyType(dict.fromkeys(_SPECIAL, True))
    named_tokens = MappingProxyType({"eos_token": "<|im_end|>"})

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return int64 [T]; special-token strings become control tokens only with ``special=True``."""
        _check.require(isinstance(text, str), "encode(text)", text, "a string")
        data = text.encode()
        ids = np.frombuffer(data, np.uint8).astype(np.int64)
        keep = np.ones(ids.size, np.bool_)
        for match in _CONTROL.finditer(data) if special else ():
            ids[match.start()] = 256 + _SPECIAL.index(match[0].decode())
            keep[match.start() + 1 : match.end()] = False
        return ids[keep]

    def decode(self, tokens: TokenIds, skip_special: bool = True) -> str:
        """Return the text of int [T]; bytes that are not UTF-8 become U+FFFD."""
        out = bytearray()
        for token in _check.token_ids("decode(tokens)", tokens, vocab_size=self.vocab_size):
            if token < 256:
                out.append(int(token))
            elif not skip_special:
                out += _SPECIAL[token - 256].encode()
        return out.decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **variables: object
    ) -> np.ndarray:
        """Return int64 [T]: each message between <|im_start|> and <|im_end|>, then the head of the assistant's."""
        if variables:
            raise ConfigError(f"apply_chat_template: the toy's template takes no variables; got {sorted(variables)}")
        checked = _check.messages("apply_chat_template(messages)", messages)
        ids: list[int] = []
        for message in checked:
            ids += [256, *f"{message['role']}\n{message['content']}".encode(), 257, *b"\n"]
        if add_generation_prompt:
            ids += [256, *b"assistant\n"]
        return np.array(ids, np.int64)


class LocalTokenizer:
    """A transformers tokenizer as a ``Tokenizer``.

    Attributes:
        hf: the tokenizer of transformers itself.
        vocab_size: rows of the model's embedding; ids are below it.
        eos_ids: every id that ends a turn of this model.
    """

    # Arguments of transformers besides the template's variables; truncation or a mask would change the result.
    _FIXED = frozenset(
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
        """Return the template's text, or None."""
        template: str | None = getattr(self.hf, "chat_template", None)
        return template

    @property
    def name(self) -> str:
        """Return where it was loaded from: a model's name, or a folder."""
        return str(getattr(self.hf, "name_or_path", ""))

    @property
    def added_tokens(self) -> dict[str, bool]:
        """Return the texts that were added as single tokens, and whether they are special (control tokens)."""
        return {token.content: bool(token.special) for token in self.hf.added_tokens_decoder.values()}

    @property
    def named_tokens(self) -> dict[str, str]:
        """Return the tokens that chat templates know by name: ``{"bos_token": ..., "eos_token": ...}``."""
        return {name: str(text) for name, text in self.hf.special_tokens_map.items() if isinstance(text, str)}

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return int64 [T]; nothing is added, and special-token strings are plain text unless ``special``."""
        _check.require(isinstance(text, str), "encode(text)", text, "a string")
        with self._turn:
            ids = self.hf(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
        return np.array(ids, np.int64)

    def decode(self, tokens: TokenIds, skip_special: bool = True) -> str:
        """Return the text of int [T]."""
        ids = _check.token_ids("decode(tokens)", tokens, vocab_size=self.vocab_size)
        with self._turn:
            options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
            return str(self.hf.decode(ids.tolist(), **options))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **variables: object
    ) -> np.ndarray:
        """Return int64 [T]: the messages as the model's template renders them.

        Args:
            messages: mappings with "role" and "content", as the template takes them.
            add_generation_prompt: end with the head of the assistant's message.
            variables: of the template, such as ``tools=`` or ``enable_thinking=``; ``chat_template=`` is another one.

        Raises:
            UnsupportedError: the tokenizer has no chat template.
            DataError: the template refuses the messages, or an operation that its sandbox forbids.
            ConfigError: an argument of transformers that decides on the form of the result, which is fixed here.
        """
        if self.chat_template is None and "chat_template" not in variables:
            raise UnsupportedError("the model's tokenizer has no chat template; encode the text yourself")
        if fixed := self._FIXED & variables.keys():
            raise ConfigError(
                f"apply_chat_template: no argument {min(fixed)!r}; it returns token ids, int64 [T], and passes other "
                "arguments to the template as variables"
            )
        messages = _check.messages("apply_chat_template(messages)", messages)
        options = {"tokenize": True, "return_dict": False, "add_generation_prompt": add_generation_prompt}
        try:
            with self._turn:
                ids = self.hf.apply_chat_template(messages, **options, **variables)
        except Exception as error:  # a template is a program of others
            what = f"the chat template refuses messages with the roles {_check.roles(messages)}"
            raise DataError(f"{what}: {type(error).__name__}: {error}") from error
        return np.array(ids, np.int64)


def reason_of(error: Exception) -> str:
    """Return why a library could not read the files of others, without its advice to trust the code in them."""
    return BRINGS_CODE if "trust_remote_code" in str(error) else f"{type(error).__name__}: {error}"


def source_of(tokenizer: Tokenizer) -> str | None:
    """Return the absolute folder, or the hub id, that a tokenizer was read from, or None."""
    name = str(getattr(getattr(tokenizer, "hf", None), "name_or_path", None) or "")
    return str(Path(name).absolute()) if name and Path(name).is_dir() else name or None


def tokenizer_from(given: str | os.PathLike[str] | Tokenizer | PreTrainedTokenizerBase) -> Tokenizer:
    """Return the tokenizer of a directory or a hub name, or the object itself if it is a tokenizer.

    Raises:
        ConfigError: it cannot be read.
        UnsupportedError: an object of another kind.
    """
    source: object = given
    if isinstance(given, (str, os.PathLike)):
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise ConfigError(f"tokenizer: reading one needs transformers: {_runtime.command('local')}") from error
        path = hub_source(os.fspath(given), "tokenizer", "tokenizer_config.json")
        try:
            source = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer: {given!s} holds none that can be loaded: {reason_of(error)}") from error
    if isinstance(source, Tokenizer):
        return source
    if hasattr(source, "chat_template") and callable(source):
        hf = cast("PreTrainedTokenizerBase", source)
        ends = hf.eos_token_id  # one, several or None
        return LocalTokenizer(hf, vocab_size=len(hf), eos_ids=[] if ends is None else np.ravel(ends).tolist())
    raise UnsupportedError("tokenizer: expected a directory, a hub name, a transformers tokenizer or rlkit's protocol")
