"""Ends of completions, against a decoding of everything behind every token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.backends.requests import Stop
from rlkit.backends.toy import ByteTokenizer
from tests.properties import examples

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
decoders = tokenizers.decoders

from rlkit.backends.tokenizers import LocalTokenizer  # noqa: E402

WORDS = ["a", "b", "ab", " ", "  ", "\n", "\n\n", "é", "🙂", "</", "answer", ">", "##b", "▁a", "▁", "▁ab", "a</w>", "."]
STOPS = ["a", " ", "\n", "é", "🙂", "ab", " a", "a ", "a b", "</answer>", "\n\n", "bab"]


def tokenizer_of(kind):
    """Of every kind of decoder: bytes, words that bring their space, pieces that are joined, ends of words."""
    if kind == "bytes":
        return ByteTokenizer()
    pieces = ["<s>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    if kind == "byte_level":
        pieces = ["<s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa", "ĠĠ", "</", "ðŁĻ"]
    model = tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<s>")  # noqa: S106
    made = tokenizers.Tokenizer(model)
    made.decoder = {
        "byte_level": decoders.ByteLevel,
        "metaspace": lambda: decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        "word_piece": lambda: decoders.WordPiece(cleanup=False),
        "word_ends": decoders.BPEDecoder,
    }[kind]()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<s>")  # noqa: S106
    return LocalTokenizer(fast, vocab_size=len(pieces), eos_ids=(0,))


KINDS = {kind: tokenizer_of(kind) for kind in ("bytes", "byte_level", "metaspace", "word_piece", "word_ends")}


@given(
    kind=st.sampled_from(list(KINDS)),
    data=st.data(),
    stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
)
@examples(400)
def test_a_stop_string_ends_where_the_whole_text_first_has_it(kind, data, stop):
    """Whatever a tokenizer does with spaces and with bytes that are part of a character."""
    tokenizer = KINDS[kind]
    few = list("ab \n</answer>.é🙂".encode()) if kind == "bytes" else range(tokenizer.vocab_size)
    ids = data.draw(st.lists(st.sampled_from(few), min_size=1, max_size=30))
    stops = Stop(tuple(stop), tokenizer)
    for size in range(1, len(ids) + 1):
        text = tokenizer.decode(np.array(ids[:size]), skip_special=False)
        ends = ids[size - 1] in tokenizer.eos_ids or any(x in text for x in stop)
        assert stops(ids[:size]) == ends, text
        if ends:
            break


def ends_of(tokens, stop, tokenizer):
    """Return whether each token in turn ends the completion, by one ``Stop``."""
    stops = Stop((stop,), tokenizer)
    return [stops(list(tokens[:size])) for size in range(1, len(tokens) + 1)]


def test_tokens_that_complete_nothing_are_not_decoded_with_what_was_before():
    """Each is decoded once, by itself, for all requests of a tokenizer."""

    class Counting(ByteTokenizer):
        calls = 0

        def decode(self, tokens, skip_special=True):
            self.calls += 1
            return super().decode(tokens, skip_special)

    tokenizer, text = Counting(), b"hello world" * 20
    assert not any(any(ends_of(text, "xyz", tokenizer)) for _ in range(3))
    assert tokenizer.calls == len(set(text))


def test_a_tokenizer_without_hash_is_as_good():
    class Odd(ByteTokenizer):
        __hash__ = None

    assert ends_of(b"hello", "lo", Odd()) == [False] * 4 + [True]


def test_a_space_that_is_written_once_another_token_follows():
    """As the end of a word is, behind whatever is no part of it."""
    word, other = 257 + WORDS.index("a</w>"), 257 + WORDS.index(".")
    stops = Stop((" ",), KINDS["word_ends"])
    assert [stops(ids) for ids in ([word], [word, other], [other, other])] == [False, True, False]


def test_tokens_of_no_text_within_a_stop_string():
    """However many there are, as ids above a tokenizer's own in a padded vocabulary."""

    class Padded(ByteTokenizer):
        def decode(self, tokens, *, skip_special=True):
            return super().decode([token for token in tokens if token < 256], skip_special=skip_special)

    assert ends_of([*b"say A", *[300] * 50, *b"$"], "A$", Padded()) == [False] * 55 + [True]
