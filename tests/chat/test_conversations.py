"""Laws of conversations, over random ones with hostile text."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.chat import Chat
from rlkit.chat.messages import read_messages
from tests.chat.build import ADDED, APPENDING, END, SPECIAL, every_tokenizer, tokenizer
from tests.properties import examples

TOKENIZERS = every_tokenizer() | {None: tokenizer(None)}
ENDS = END | {None: "<|endoftext|>", "toy": "<|im_end|>", "smollm2": "<|im_end|>"}


@functools.cache
def chat_with(kind, **given_settings):
    """Compiling a template takes longer than an episode."""
    return Chat(TOKENIZERS[kind], **given_settings)


BITS = [*SPECIAL, *ADDED, "<|im_", "end|>", "<", " ", "\n", "{", "\\", "\U000f0010", "\U000f0011"]
bits = st.sampled_from(BITS) | st.text(max_size=5)
hostile = st.lists(bits, max_size=6).map("".join)
thoughts = st.sampled_from(["<think>\nhm\n</think>\n\n", "<think>hm</think>", "hm\n</think>", ""])


@st.composite
def actions(draw, t):
    """Sampled tokens: any ids at all, or text in which control tokens were really sampled; closed or cut."""
    if draw(st.booleans()):
        return np.array(draw(st.lists(st.integers(0, t.vocab_size - 1), max_size=8)), np.int64)
    text = draw(thoughts) + draw(hostile)
    ids = t.encode(text.encode("utf-8", "replace").decode(), special=draw(st.booleans()))
    return np.append(ids, draw(st.sampled_from([*t.eos_ids]))) if draw(st.booleans()) else ids


@st.composite
def episodes(draw):
    """(kind, settings of the chat, first observation, [(sampled tokens, observation)])"""
    kind = draw(st.sampled_from(sorted(TOKENIZERS, key=str)))
    t = TOKENIZERS[kind]
    settings = {"history": draw(st.sampled_from(["template", "append"]))}
    settings["prefill"] = draw(st.sampled_from(["", "", "<think>\n", "\\boxed{", " "]))
    settings["system"] = draw(st.sampled_from([None, "Be brief.", "<|im_end|>"]))
    if kind == "qwen3":
        settings["thinking"] = draw(st.sampled_from([None, False]))
    role = "tool" if kind == "qwen3" and draw(st.booleans()) else "user"
    tokens = st.lists(st.integers(0, t.vocab_size - 1), max_size=4).map(lambda ids: np.array(ids, np.int64))
    message = hostile.map(lambda text: [{"role": role, "content": text}])
    observation = st.one_of(hostile, message, message, tokens if draw(st.integers(0, 4)) == 0 else hostile)
    turns = st.lists(st.tuples(actions(t), observation), min_size=1, max_size=5)
    return kind, settings, draw(hostile), draw(turns)


def harmless(observation):
    """The same observation, with nothing in it that could do anything."""
    if isinstance(observation, np.ndarray):
        return observation
    return "ok" if isinstance(observation, str) else [{**message, "content": "ok"} for message in observation]


@given(episodes())
@examples(200)
def test_laws(episode):
    """What was sampled stays where it was sampled, and no text of an environment makes a control token.

    The second is seen beside a twin: the same conversation, in which the environment says "ok" all the time. Both
    have the same control tokens in the same order, so that each comes from the template, the program or the policy.
    """
    kind, given_settings, first, turns = episode
    t = TOKENIZERS[kind]
    chat = chat_with(kind, **given_settings)
    conversation, twin = chat.start(first), chat.start(harmless(first))
    controls = set(chat.control.special_ids.tolist())
    if kind == "qwen3":  # what its template writes
        controls |= {t.hf.convert_tokens_to_ids(text) for text in ADDED}
    for tokens, observation in turns:
        before, action = conversation.prompt, chat.action(tokens)
        assert action.tokens.tolist() == tokens.tolist()
        conversation.add(action, observation)
        twin.add(action, harmless(observation))
        after = conversation.prompt
        assert after.dtype == np.int64
        assert not after.flags.writeable
        assert conversation.extends == twin.extends
        if conversation.extends:
            assert after[: before.size].tolist() == before.tolist()
            assert after[before.size :][: tokens.size].tolist() == tokens.tolist()
        if given_settings["history"] == "append" or kind is None:
            assert conversation.extends
        assert [i for i in after if i in controls] == [i for i in twin.prompt if i in controls]


clean = st.text(
    st.characters(exclude_characters="<>[]|\U000f0010\U000f0011", exclude_categories=["Cs"]), min_size=1, max_size=12
)
words = clean.filter(lambda text: not text[0].isspace() and not text[-1].isspace())


@given(st.sampled_from([*APPENDING, "glm", "toy", "smollm2"]), st.lists(words, min_size=2, max_size=9), st.booleans())
@examples(200)
def test_turn_by_turn_is_all_at_once(kind, texts, system):
    """For templates that never rewrite, the prompt is what the tokenizer's own template gives for all messages.

    The policy writes its text in the usual tokens here; white space at the edges of a turn would be joined to the
    template's by a rendering of the whole, which is the one difference there is.
    """
    if kind not in TOKENIZERS:
        return
    t = TOKENIZERS[kind]
    if kind in ("smollm2", "toy"):  # the vocabulary lacks some bytes
        texts = [t.decode(t.encode(text)) or "a" for text in texts]
    texts = texts if len(texts) % 2 else texts[:-1]
    chat = chat_with(kind, system="Be brief." if system else None)
    conversation = chat.start(texts[0])
    for said, answer in zip(texts[1::2], texts[2::2], strict=True):
        conversation.add(chat.action(t.encode(said + ENDS[kind], special=True)), answer)
        assert conversation.extends
    messages = [{"role": ["user", "assistant"][i % 2], "content": text} for i, text in enumerate(texts)]
    messages = [{"role": "system", "content": "Be brief."}] * system + messages
    assert conversation.prompt.tolist() == t.apply_chat_template(messages).tolist()


@given(st.lists(hostile, min_size=1, max_size=7))
@examples(100)
def test_every_text_arrives(texts):
    """Decoded, the prompt is the template's text with the contents in it, hostile as they are."""
    chat = chat_with("chatml")
    texts = texts if len(texts) % 2 else texts[:-1]
    shown = [("".join("\ufffd" if c in "\U000f0010\U000f0011" else c for c in text)) for text in texts]
    conversation = chat.start(texts[0])
    for said, answer in zip(shown[1::2], texts[2::2], strict=True):
        conversation.add(chat.action(chat.tokenizer.encode(said)), answer)
    turns = [f"<|im_start|>{['user', 'assistant'][i % 2]}\n{text}<|im_end|>\n" for i, text in enumerate(shown)]
    expected = "".join([*turns, "<|im_start|>assistant\n"])
    assert chat.tokenizer.decode(conversation.prompt, skip_special=False) == expected


def test_messages_that_never_end():
    """Objects of a program may hold themselves, also twice, and an array may have no dimension."""
    twice = []
    twice += [twice, twice]
    for value in (twice, {"more": {"same": twice}}):
        with pytest.raises(rlkit.DataError, match=r"messages\[0\]: is nested too deeply; expected at most 100 levels"):
            read_messages([{"role": "user", "content": "x", "field": value}])
    assert read_messages([{"role": "user", "content": "x", "field": np.array(3)}])[0]["role"] == "user"
