"""Sessions with models whose turns the package ``renderers`` writes and reads: every family of it."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("renderers")

import rlkit
from rlkit.gateway import Gateway
from rlkit.trajectory import datums
from tests.chat.test_rendering import KINDS, SCHEMAS, TURN, chat_of, written
from tests.gateway.parts import ask, said, short, user


class Writes:
    """Answers with the tokens that it is told to sample next."""

    max_length, version = 10**6, 0

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.next = np.zeros(0, np.int64)

    def sample(self, prompt, params, *, n=1, seed=None):
        logprobs = -0.001 * np.arange(1, self.next.size + 1)
        return rlkit.Future.of([rlkit.Sample(prompt, self.next, logprobs, "stop", **params.sampling_options)] * n)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_and_reasoning_are_told_apart_and_the_conversation_goes_on(kind):
    chat = chat_of(kind, system="Be brief.", history="append")
    sampler = Writes(chat.tokenizer)
    messages = [user("7 + 0?")]
    head, turn = written(chat, chat.start(messages, SCHEMAS), TURN)
    sampler.next = turn

    with Gateway(sampler, chat=chat) as gateway, gateway.session() as session:
        choice = ask(session, messages, tools=SCHEMAS, sampling=short(64)).choices[0]
        first = session.turns[0].sample
        if not np.array_equal(first.prompt, head):
            pytest.skip("its prompt ends inside of what it writes; see test_a_call_goes_round")
        assert [(call.name, dict(call.arguments)) for call in choice.calls] == [("add", {"x": 7, "note": "a"})]
        assert choice.finish == "tool_calls"
        assert choice.content.strip() == ("" if kind == "llama-3" else "Let me see.")
        messages += [said(choice), {"role": "tool", "name": "add", "tool_call_id": choice.calls[0].id, "content": "7"}]
        ask(session, messages, tools=SCHEMAS, sampling=short(64))
        if kind != "deepseek-r1":  # had thought in its prompt, and not closed it
            assert len(session.branches) == 1
            assert np.array_equal(session.turns[1].sample.prompt[: head.size + turn.size], session.turns[0].tokens)
            (datum,) = datums(session.trajectory(1.0), 1.0)
            assert int(datum.mask.sum()) == 2 * turn.size
        assert session.metrics["rewritten"] == 0
