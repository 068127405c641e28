"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from rlkit import _check
from rlkit._calls import hinted
from rlkit._forms import TokenIds
from rlkit.errors import ArgumentError

__all__ = ["ByteTokenizer"]

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@hinted("tokenizer")
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
        """int64 [T]; special-token strings become control tokens only with ``special=True``."""
        _check.require(isinstance(text, str), "encode(text)", text, "a string")
        ids: list[int] = []
        while text:
            cut = min((text.find(s) for s in _SPECIAL if special and s in text), default=len(text))
            ids += text[:cut].encode()
            text = text[cut:]
            for i, name in enumerate(_SPECIAL):
                if text.startswith(name):
                    ids.append(256 + i)
                    text = text[len(name) :]
                    break
        return np.array(ids, np.int64)

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
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: object
    ) -> np.ndarray:
        """int64 [T]: each message between <|im_start|> and <|im_end|>, then the head of the assistant's."""
        if variables:
            raise ArgumentError(f"apply_chat_template: the toy's template takes no variables; got {sorted(variables)}")
        checked = _check.messages("apply_chat_template(messages)", messages)
        start, end = [256], [257, 10]
        parts = [start + list(f"{m['role']}\n{m['content']}".encode()) + end for m in checked]
        if add_generation_prompt:
            parts.append([*start, *b"assistant\n"])
        return np.array([token for part in parts for token in part], np.int64)
