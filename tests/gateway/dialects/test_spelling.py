"""Tokens as text in pieces: what is joined is the whole, whatever was sampled."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlkit.backends.toy import ByteTokenizer
from rlkit.gateway.dialects._logprobs import matched_stop, parts, pieces, reasoning_tokens, spell
from rlkit.gateway.types import Choice
from rlkit.tools import ToolCall
from rlkit.types import Sample
from tests.each import for_each
from tests.properties import examples

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
    spelled = spell(BYTES, tokens)
    assert "".join(spelled) == text + "<|im_end|>"
    assert all(piece.encode() for piece in spelled if piece)
    assert "".join(spell(BYTES, tokens, skip_special=True)) == text


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_spaces_of_first_tokens_are_not_lost(tokens):
    assert "".join(spell(Words(), np.array(tokens))) == Words().decode(tokens)


@examples(200)
@given(st.lists(st.integers(0, 258), max_size=300))
def test_any_tokens_make_parts_that_are_the_whole(tokens):
    """Also bytes that are no text, in any number: nothing is lost, and each token is in one part."""
    text = BYTES.decode(tokens)
    got = parts(choice(tokens, text), BYTES, ())
    assert "".join(part.text for part in got) == text
    assert [t for part in got for t in tokens[part.tokens]] == tokens
    assert len(got) <= 32


@given(st.text(max_size=80), st.text(max_size=80), st.lists(st.text(max_size=80), max_size=3))
def test_reasoning_content_and_calls_make_parts(reasoning, content, arguments):
    calls = [ToolCall("f", {}) for _ in arguments]
    tokens = [*f"<think>{reasoning}</think>{content}".encode(), 257]
    said = choice(tokens, BYTES.decode(tokens), content=content, reasoning=reasoning or None, calls=calls)
    got = parts(said, BYTES, arguments)
    assert "".join(part.text for part in got if part.kind == "reasoning") == reasoning
    assert "".join(part.text for part in got if part.kind == "content") == content
    for i, each in enumerate(arguments):
        assert "".join(part.text for part in got if (part.kind, part.call) == ("call", i)) == each
        assert any((part.kind, part.call) == ("call", i) for part in got)  # a call without arguments begins, too
    assert [t for part in got for t in tokens[part.tokens]] == tokens
    kinds = [(part.kind != "reasoning", part.kind == "call", part.call) for part in got]
    assert kinds == sorted(kinds)


@given(st.text(max_size=1000))
def test_pieces(text):
    got = pieces(text)
    assert "".join(got) == text
    assert len(got) <= 16
    assert all(got)


def test_parts_follow_the_tokens():
    """A character is not cut, and what a stop text cut off is not told."""
    said = choice([*"aéx".encode()], "aé")
    assert [(part.text, part.tokens.stop) for part in parts(said, BYTES, ())] == [("a", 1), ("", 2), ("é", 3), ("", 4)]


def test_cost_grows_with_the_length():
    """Garbage that never ends in a whole character is not decoded again and again."""
    asked = []

    class Counting(ByteTokenizer):
        def decode(self, tokens, skip_special=True):
            asked.append(len(tokens))
            return super().decode(tokens, skip_special)

    spell(Counting(), np.full(2000, 0xE2))
    assert sum(asked) < 2000 * 40


@for_each(
    ("tokens", "text", "stops", "expected"),
    [
        (b"one two", "one ", ("x", "two"), "two"),
        (b"one two", "one two", ("x",), None),
        (b"one", "Say: one", ("one",), None),  # a prefill is in the text, and not in the tokens
        (b"one.", "Say: one", ("e", "."), "."),
        ([*b"one", 257], "one", ("<|im_end|>",), "<|im_end|>"),
        ([*b"one", 7], "one", (5, 7), 7),
        (b"", "", ("x",), None),
    ],
)
def test_what_ended_a_choice(tokens, text, stops, expected):
    assert matched_stop(choice(list(tokens), text), BYTES, stops) == expected


def test_reasoning_is_counted_to_its_end():
    said = choice([*"<think>é!</think>4".encode()], "<think>é!</think>4", content="4", reasoning="é!")
    assert reasoning_tokens(said, BYTES) == len("<think>é!".encode())
    assert reasoning_tokens(choice([65], "A"), BYTES) == 0
