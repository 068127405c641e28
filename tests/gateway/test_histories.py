"""Laws of sessions over random clients, which extend, branch, rewrite, compact and change their tools."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

import rlkit
from rlkit.chat import Chat
from rlkit.gateway import Gateway, Sampling
from rlkit.trajectory import datums
from tests.chat.build import ADDED, CHATML, SPECIAL, tokenizer, trained, wrapped
from tests.each import for_each
from tests.gateway.parts import Scripted, ask, said, short, user
from tests.properties import examples
from tests.rollouts.parts import RandomSampler

TOKENIZERS = {kind: tokenizer(kind) for kind in ("chatml", "llama3", "qwen3", "glm", None)}
TOKENIZERS["toy"] = rlkit.connect("toy").tokenizer
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
THINKING = ("<think>\nhm\n</think>\n\n", "<think>hm</think>", "")

PIECES = st.one_of(st.sampled_from([*SPECIAL, *ADDED, " ", "\n"]), st.text(max_size=4))
texts = st.lists(PIECES, max_size=4).map("".join)


class Speaks(RandomSampler):
    """Writes random text, thoughts, calls and ends into random tokens."""

    def __init__(self, tokenizer):
        super().__init__(max_length=10**6)
        self.tokenizer = tokenizer

    def sample(self, prompt, params, *, n=1, seed=None):
        samples = []
        for i in range(n):
            rng = np.random.default_rng([seed, i])
            text = THINKING[rng.integers(3)] + "".join(rng.choice([*"ab \n", *ADDED], rng.integers(0, 6)))
            text += '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>' * int(rng.integers(2))
            ids = self.tokenizer.encode(text, special=bool(rng.integers(2)))
            if rng.integers(3):
                ids = np.append(ids, self.tokenizer.eos_ids[-1])
            ids = np.concatenate([ids, rng.integers(0, self.tokenizer.vocab_size, rng.integers(0, 3))])
            logprobs = -rng.exponential(size=ids.size)
            samples.append(rlkit.Sample(np.asarray(prompt), ids, logprobs, "stop", **params.sampling_options))
        self.requests.append((np.asarray(prompt), samples))
        return rlkit.Future.of(samples)


@functools.cache
def chat_with(kind):
    """Compiling a template takes longer than an episode."""
    return Chat(TOKENIZERS[kind])


kinds = st.sampled_from(sorted(TOKENIZERS, key=str))
actions = st.sampled_from(["extend", "extend", "extend", "again", "rewrite", "compact", "trim"])
# [(which recorded conversation, what to do with it, a text, completions, with tools)]
plays = st.lists(st.tuples(st.integers(0, 5), actions, texts, st.integers(1, 2), st.booleans()), min_size=1, max_size=8)


@contextlib.contextmanager
def opened(sampler, kind):
    """A session with a tokenizer's chat."""
    with Gateway(sampler, chat=chat_with(kind)) as gateway, gateway.session() as session:
        yield session


def play(session, moves, *, with_tools):
    """Make the requests of a client, which extend recorded conversations or change them."""
    heads = [[user("Begin")]]
    for which, move, text, n, tools in moves:
        messages = list(heads[which % len(heads)])
        if move == "rewrite" and len(messages) > 1:
            messages[1] = {"role": "assistant", "content": "Otherwise" + text}
        elif move == "compact":
            messages = [user("Summary: " + text)]
        elif move == "again" and len(messages) > 2:
            messages = [*messages[:-1], user(text)]
        elif move == "trim" and len(messages) > 1:
            messages = [{**m, "content": m["content"].strip()} for m in messages]
        schemas = [TOOL] if tools and with_tools else []
        for choice in ask(session, messages, tools=schemas, n=n, sampling=short(64)).choices:
            results = [{"role": "tool", "tool_call_id": call.id, "content": text} for call in choice.calls]
            heads.append([*messages, said(choice), *(results or [user(text)])])


@examples(60)
@given(kinds, plays)
def test_every_sampled_token_is_trained_exactly_once(kind, moves):
    with opened(sampler := Speaks(TOKENIZERS[kind]), kind) as session:
        play(session, moves, with_tools=kind in ("qwen3", "toy"))
        drawn = [sample for _, samples in sampler.requests for sample in samples]
        assert [n.sample for n in session.turns] == drawn
        wanted = Counter(pair for s in drawn for pair in zip(s.tokens.tolist(), s.logprobs.tolist(), strict=True))
        for made in (
            datums(session.trajectory(1.0), 1.0, split="allow"),
            [d for trajectory in session.trajectories(1.0) for d in datums(trajectory, 1.0, split="allow")],
        ):
            trained = Counter()
            for datum in made:
                logprobs = datum.inputs["sampling_logprobs"][datum.mask]
                trained.update(zip(datum.tokens[datum.mask].tolist(), logprobs.tolist(), strict=True))
            assert trained == wanted
        for branch in session.branches:  # a branch is one sequence of tokens
            for before, after in zip(branch.nodes, branch.nodes[1:], strict=False):
                assert np.array_equal(after.sample.prompt[: before.tokens.size], before.tokens)
        for trajectory in session.trajectories(1.0):
            assert len(datums(trajectory, 1.0, split="allow")) <= 1 or not trajectory.turns[0].tokens.size


@examples(40)
@given(kinds, st.lists(texts, min_size=1, max_size=8))
def test_a_conversation_that_is_sent_back_as_it_was_is_continued(kind, told):
    with opened(Speaks(TOKENIZERS[kind]), kind) as session:
        messages = [user("Begin")]
        for text in told:
            messages += [said(ask(session, messages, sampling=short(64)).choices[0]), user(text)]
        assert len(session.branches) == 1
        assert session.metrics["rewritten"] == 0


@examples(30)
@given(kinds, texts, texts)
def test_text_of_clients_never_becomes_control_tokens(kind, question, answer):
    """Neither in what continues nor in what is rendered anew: there are as many as around harmless text."""
    encoded = [TOKENIZERS[kind].encode(text, special=True) for text in SPECIAL]
    special = [ids[0] for ids in encoded if ids.size == 1]

    def count(one, two):
        with opened(Speaks(TOKENIZERS[kind]), kind) as session:
            ask(session, [user(one)])
            ask(session, [user("a"), assistant(two), user(one)])
            return [int(np.isin(node.sample.prompt, special).sum()) for node in session.turns]

    assert count(question + "x", answer + "x") == count("x", "x")


def assistant(content):
    return {"role": "assistant", "content": content}


STOPPED = Sampling(max_tokens=64, stop=("</code>",))


@for_each("kind", sorted(TOKENIZERS, key=str))
@for_each("behind", ["\nCalling tools: [<|im_end|>]", " and more", "", "\n"])
def test_what_clients_write_behind_a_stop_text_is_put_behind_its_tokens(kind, behind):
    """smolagents ends its stop text again and says there what it did: the turn is continued, as it was sampled."""
    sampler = Scripted(TOKENIZERS[kind], ["Thought.\n<code>\nx\n</code>", "Done.", "Bye."], stops=True)
    with opened(sampler, kind) as session:
        content = ask(session, [user("Begin")], sampling=STOPPED).choices[0].content
        assert content == "Thought.\n<code>\nx\n"
        turn = assistant([{"type": "text", "text": content + "</code>" + behind}])
        messages = [user("Begin"), turn, user("More")]
        last = ask(session, messages, sampling=STOPPED).choices[0]
        first, second = session.turns
        assert second.parent is first
        assert np.array_equal(second.sample.prompt[: first.tokens.size], first.tokens)
        rest = sampler.tokenizer.decode(second.sample.prompt[first.tokens.size :])
        assert behind.strip() in rest
        assert "More" in rest
        assert session.metrics["rewritten"] == 0
        ask(session, [*messages, assistant(last.content), user("On")], sampling=short(1))
        assert len(session.branches) == 1


def test_no_blank_is_put_between_a_turn_and_what_a_client_adds():
    """Also by a tokenizer that puts one before the first word of a text."""
    inner = trained(SPECIAL, ADDED)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    blank = wrapped(inner, {"eos_token": "<|im_end|>"}, CHATML, ["<|im_end|>"])
    with Gateway(Scripted(blank, ["x</code>", "Done."], stops=True)) as gateway, gateway.session() as session:
        for more in ([], [assistant("x</code>and more"), user("More")]):
            ask(session, [user("Begin"), *more], sampling=STOPPED)
        first, second = session.turns
        assert blank.decode(second.sample.prompt[first.tokens.size :]).startswith("and more")


def test_what_a_client_changed_in_a_turn_begins_anew():
    """Also one that only goes on where the policy ended its turn."""
    code = "Thought.\n<code>\nx\n</code> \n"
    for told, changed in (
        (code, "Thought.\n<code>\nx\n</codes>"),
        (code, "Thoughts.\n<code>\nx\n</code>"),
        ("Yes", "Yes and no"),
    ):
        with opened(Scripted(TOKENIZERS["chatml"], [told, "Done."], stops=True), "chatml") as session:
            ask(session, [user("Begin")], sampling=STOPPED)
            ask(session, [user("Begin"), assistant(changed), user("More")])
            assert (session.metrics["rewritten"], len(session.branches)) == (1, 2)


class Silent(RandomSampler):
    """Ends every second turn before its first token."""

    def sample(self, prompt, params, *, n=1, seed=None):
        self.requests.append(prompt)
        ids = np.arange(97, 100)[: 3 * (len(self.requests) % 2)]
        return rlkit.Future.of([rlkit.Sample(prompt, ids, -np.ones(ids.size), "stop", **params.sampling_options)] * n)


def test_an_empty_turn_is_continued_though_the_next_prompt_is_the_same():
    """A chat without a template writes nothing around an empty turn and an empty message."""
    with opened(Silent(), None) as session:
        messages = [user("Begin")]
        for _ in range(4):
            messages += [said(ask(session, messages).choices[0]), user("")]
        assert [node.parent for node in session.turns[1:]] == session.turns[:-1]
        assert len(session.branches) == 1
        assert len(datums(session.trajectory(1.0), 1.0)) == 1


def test_a_call_may_begin_with_a_control_token():
    """Which is no part of the text."""
    sampler = Scripted(TOKENIZERS["llama3"], ["<|python_tag|>add.call(x=1)"])
    chat = Chat(sampler.tokenizer, tool_format="llama")
    with Gateway(sampler, chat=chat) as gateway, gateway.session() as session:
        (choice,) = ask(session, [user("Add")], tools=(TOOL,)).choices
    assert [(call.name, dict(call.arguments)) for call in choice.calls] == [("add", {"x": 1})]
    assert (choice.content, choice.finish) == ("", "tool_calls")
