"""Text of the environment never becomes a control token, and harmless text is encoded as ever."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

from rlkit.chat.templates import PLACEHOLDER, ControlText
from rlkit.errors import DataError
from tests.chat.build import ADDED, QWEN3, SPECIAL, every_tokenizer, tokenizer, wrapped
from tests.each import for_each
from tests.properties import examples

BITS = ["<|im_", "end|>", "<", "|>", "<|", " ", "\n", "im_end", "\ud800", "\U000f0010", PLACEHOLDER]
pieces = st.sampled_from([*SPECIAL, *ADDED]) | st.sampled_from(BITS) | st.text(max_size=6)
hostile = st.lists(pieces, max_size=8).map("".join)
harmless = st.text(
    st.characters(exclude_characters="<>[]|\U000f0010\U000f0011", exclude_categories=["Cs"]), max_size=40
)


QWEN = tokenizer("qwen3")


class Bare:
    """A tokenizer with the protocol's methods and no more."""

    def __init__(self, inner):
        self.encode, self.decode, self.eos_ids = inner.encode, inner.decode, inner.eos_ids
        self.vocab_size, self.chat_template = inner.vocab_size, inner.chat_template


REAL = [t for name, t in every_tokenizer().items() if name in ("qwen3", "toy", "smollm2")]
CONTROLS = [(ControlText(t, QWEN3), t) for t in (*REAL, Bare(QWEN))]


@given(hostile, hostile, st.sampled_from(["", " ", "x"]))
@examples(300)
def test_no_special_token_comes_from_contents(first, second, between):
    """Neither from one content nor from two that a template puts together, whatever it strips."""
    for control, t in CONTROLS:
        for strip in (str, str.strip, str.rstrip):
            ids = control.encode(strip(control.mark(first)) + between + strip(control.mark(second)))
            assert not np.isin(ids, control.special_ids).any()
        assert "\U000f0010" not in t.decode(ids, skip_special=False)


@given(hostile)
@examples(200)
def test_the_text_arrives(text):
    """What is decoded is what was written, but for surrogates and our own two marks."""
    for control, t in CONTROLS:
        expected = "".join("\ufffd" if c in "\U000f0010\U000f0011" or "\ud800" <= c <= "\udfff" else c for c in text)
        if t.vocab_size > 1000:  # the real vocabulary lacks the bytes of some rare characters
            expected = t.decode(t.encode(expected), skip_special=False)
        assert t.decode(control.encode(control.mark(text)), skip_special=False) == expected


@given(harmless)
@examples(200)
def test_harmless_text_has_its_usual_tokens(text):
    for control, t in CONTROLS:
        assert control.mark(text) == text
        assert control.encode(control.mark(text)).tolist() == t.encode(text, special=True).tolist()


def test_template_tokens_in_text_of_the_environment():
    """<tool_call> is not special, but it is the template's: the environment cannot write it, program and policy can."""
    token = QWEN.hf.convert_tokens_to_ids("<tool_call>")
    control, plain = ControlText(QWEN, QWEN3), ControlText(QWEN, None)
    assert token not in control.encode(control.mark("a <tool_call> b"))
    assert token in control.encode(control.mark("a <tool_call> b", foreign=False))
    assert token in plain.encode(plain.mark("a <tool_call> b"))


@for_each("text", ["<|im_end|>", "</think>"])
def test_two_contents_do_not_make_one_token(text):
    """Wherever a control token is cut in two, and whatever the template trims at the cut."""
    control = ControlText(QWEN, QWEN3)
    for i in range(1, len(text)):
        first, second = control.mark(f"a {text[:i]} \n"), control.mark(text[i:])
        assert QWEN.hf.convert_tokens_to_ids(text) not in control.encode(first.rstrip() + second), text[:i]


def test_special_tokens_of_the_template_stay():
    control = ControlText(QWEN, QWEN3)
    text = f"<|im_start|>user\n{control.mark('<|im_end|>')}<|im_end|>"
    assert np.isin(control.encode(text), control.special_ids).sum() == 2


def test_overlapping_texts_are_all_cut():
    """Of "aba" and "bab", "abab" holds both; the second must not survive the first one's cut."""

    class Letters:
        eos_ids, vocab_size, chat_template = (3,), 4, None
        added_tokens = {"aba": True, "bab": True, "Z": True}

        def encode(self, text, *, special=False):
            ids = []
            while text:
                hit = next((i for i, s in enumerate(["aba", "bab", "Z"]) if special and text.startswith(s)), None)
                ids.append(100 + ord(text[0]) if hit is None else hit)
                text = text[1:] if hit is None else text[len(["aba", "bab", "Z"][hit]) :]
            return np.array(ids, np.int64)

    control = ControlText(Letters(), None)
    assert control.encode(control.mark("ababab")).min() > 3
    assert control.encode(control.mark("aZb")).min() > 3  # one character cannot be cut, so it is replaced
    assert control.encode("abab").min() == 0


def test_a_normaliser_cannot_make_control_tokens():
    """A tokenizer that folds wide characters would read "<|im_end|>" in full-width brackets."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|im_end|>", normalized=True, special=True)])
    t = wrapped(inner, {"eos_token": AddedToken("<|im_end|>", normalized=True)}, None, ["<|im_end|>"])
    assert 256 in t.encode("\uff1c|im_end|\uff1e", special=True)  # the danger is real
    control = ControlText(t, None)
    assert 256 not in control.encode(control.mark("a \uff1c|im_end|\uff1e b"))
    ids = control.encode(control.mark("\uff1c|im_end|\uff1e") + "<|im_end|>")
    assert np.flatnonzero(ids == 256).tolist() == [ids.size - 1]


def test_a_tokenizer_that_puts_a_blank_first():
    """Only the first text of a prompt gets it, as in one encoding of the whole."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate([*"▁ab\n", "▁a", "<unk>"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))  # noqa: S106
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    control = ControlText(wrapped(inner, {}, None, ["<unk>"]), None)
    whole = control.encode("b\naab")
    parts = np.concatenate([control.encode("b\n"), control.encode("aab", first=False)])
    assert whole.tolist() == parts.tolist()
    assert control.encode("ab").tolist() != control.encode("ab", first=False).tolist()


def test_values_are_marked_wherever_they_stand():
    control = ControlText(QWEN, QWEN3)
    value = {"role": "user", "n": [1, 2.5, None, True, np.int64(3)], "args": {"<|im_end|>": ("<|im_end|>", "ok")}}
    marked = control.mark(value)
    assert marked["n"] == [1, 2.5, None, True, 3]
    assert "<|im_end|>" not in repr(marked)
    assert value["args"]["<|im_end|>"][1] == "ok"  # the caller's value is not changed
    deep = []
    for _ in range(100):
        deep = [deep]
    for wrong, message in (({"a": [1, object()]}, r"message\['a'\]\[1\]: got .*object"), (deep, "nested more than 64")):
        with pytest.raises(DataError, match=message):
            control.mark(wrong)


def test_threads_do_not_change_each_others_tokens():
    """Whether special tokens are split is a state of the tokenizer; calls with and without must not mix."""
    text = "<|im_end|> what is the user's answer <|im_start|>" * 5
    expected = {special: QWEN.encode(text, special=special).tolist() for special in (False, True)}

    def encode(special):
        return all(QWEN.encode(text, special=special).tolist() == expected[special] for _ in range(60))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(encode, (True, False, True, False)))
    finally:
        sys.setswitchinterval(interval)
