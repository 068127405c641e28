"""Tokens as text, one by one: what is joined is the whole, whatever was sampled."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlkit.backends.toy import ByteTokenizer
from rlkit.gateway._logprobs import decode_each, find_matched_stop, to_json_logprob
from rlkit.gateway._responses import count_reasoning
from rlkit.gateway._types import Choice
from rlkit.types import Sample

BYTES = ByteTokenizer()


class Words:
    """A tokenizer that drops the space of a first token, as those of SentencePiece do."""

    words = ("▁Once", "▁upon", "▁a", "▁time", "s", "▁", "é")

    def decode(self, tokens, skip_special=True):
        return "".join(self.words[token] for token in tokens).replace("▁", " ").removeprefix(" ")


def choice(tokens, text, **fields):
    sample = Sample([1], tokens, [-1.0] * len(tokens))
    return Choice(sample, text, **{"content": text, **fields})


@given(st.text(max_size=200))
def test_texts_are_spelled_exactly(text):
    tokens = np.array([*text.encode(), 257], np.int64)
    spelled = decode_each(BYTES, tokens)
    assert "".join(spelled) == text + "<|im_end|>"
    assert all(piece.encode() for piece in spelled if piece)
    assert decode_each(BYTES, np.array([97, 0xC3])) == ["a", "\ufffd"]  # a character that stays incomplete


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_spaces_of_first_tokens_are_not_lost(tokens):
    assert "".join(decode_each(Words(), np.array(tokens))) == Words().decode(tokens)


def test_cost_grows_with_the_length():
    """Garbage that never ends in a whole character is not decoded again and again."""
    asked = []

    class Counting(ByteTokenizer):
        def decode(self, tokens, skip_special=True):
            asked.append(len(tokens))
            return super().decode(tokens, skip_special)

    decode_each(Counting(), np.full(2000, 0xE2))
    assert sum(asked) < 2000 * 40


def test_what_ended_a_choice():
    for tokens, text, stops, expected in (
        (b"one two", "one ", ("x", "two"), "two"),
        (b"one two", "one two", ("x",), None),
        (b"one", "Say: one", ("one",), None),  # a prefill is in the text, and not in the tokens
        (b"one.", "Say: one", ("e", "."), "."),
        ([*b"one", 257], "one", ("<|im_end|>",), "<|im_end|>"),
        ([*b"one", 7], "one", (5, 7), 7),
        (b"", "", ("x",), None),
    ):
        assert find_matched_stop(choice(list(tokens), text), BYTES, stops) == expected, (tokens, stops)


def test_a_probability_of_zero_is_written_as_json():
    assert [to_json_logprob(x) for x in (-np.inf, np.nan, -1e5, -1.5)] == [-9999.0, -9999.0, -9999.0, -1.5]


def test_reasoning_is_counted_to_its_end():
    said = choice([*"<think>é!</think>4".encode()], "<think>é!</think>4", content="4", reasoning="é!")
    assert count_reasoning(said, BYTES) == len("<think>é!".encode())
    assert count_reasoning(choice([65], "A"), BYTES) == 0
