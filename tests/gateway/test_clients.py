"""Official SDKs and a real policy: what they are told, and what is recorded."""

from __future__ import annotations

import asyncio

import anthropic
import httpx
import numpy as np
import openai
import pytest

import rlkit
from rlkit.gateway import Gateway
from tests.each import for_each
from tests.gateway.conftest import HI
from tests.gateway.parts import Scripted


@pytest.fixture(scope="module")
def sampler():
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        yield sampler


@pytest.fixture
def gateway(sampler):
    params = rlkit.SamplingParams(max_tokens=24)
    with Gateway(sampler, params=params) as gateway:
        yield gateway


@for_each("stream", [False, True])
def test_chat_over_a_socket(gateway, stream):
    session = gateway.session(seed=1)
    client = openai.OpenAI(base_url=session.base_url, api_key="any")
    messages = list(HI)
    for turn in range(3):
        options = {"model": "m", "messages": messages, "logprobs": True, "extra_body": {"return_token_ids": True}}
        answer = client.chat.completions.create(**options, stream=stream)
        chunks = list(answer) if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        node = session.turns[turn]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        np.testing.assert_allclose([entry.logprob for entry in entries], node.sample.logprobs, atol=1e-6)
        tokens = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
        assert tokens == node.sample.tokens.tolist()
        assert chunks[0].prompt_token_ids == node.sample.prompt.tolist()
        said = [(choice.delta if stream else choice.message).content or "" for choice in choices]
        messages += [{"role": "assistant", "content": "".join(said)}, {"role": "user", "content": "More"}]
    assert len(session.branches) == 1
    assert session.metrics["turns"] == 3


def test_prompts_are_scored_as_the_sampler_scores_them(sampler):
    texts = ["One, two", "Ünlike"]
    options = {"model": "m", "prompt": texts, "echo": True, "logprobs": 1, "seed": 1, "temperature": 0}
    with Gateway(sampler, open=True) as gateway, openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as client:
        for max_tokens in (0, 1):
            answer = client.completions.create(**options, max_tokens=max_tokens)
            for text, choice in zip(texts, answer.choices, strict=True):
                tokens, logprobs = sampler.tokenizer.encode(text), choice.logprobs
                expected = sampler.logprobs(tokens).result()
                assert logprobs.token_logprobs[0] is None
                np.testing.assert_allclose(logprobs.token_logprobs[1 : tokens.size], expected[1:], atol=1e-6)
                assert len(logprobs.tokens) == tokens.size + max_tokens
                for logprob, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
                    assert 1 <= len(top) <= 2
                    assert logprob in top.values()


def test_messages_of_anthropic(gateway):
    session = gateway.session(seed=2)
    client = anthropic.Anthropic(base_url=session.root_url, api_key=session.api_key)
    messages = list(HI)
    for _ in range(2):
        counted = client.messages.count_tokens(model="m", messages=messages).input_tokens
        answer = client.messages.create(model="m", max_tokens=8, messages=messages)
        assert answer.usage.input_tokens == counted
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "More"}]
    assert len(session.branches) == 1
    assert [turn.sample.tokens.size for turn in session.turns] == [8, 8]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": "x" * 10**6}])


def test_responses_remember(gateway):
    session = gateway.session(seed=3)
    client = openai.OpenAI(base_url=session.base_url, api_key="any")
    first = client.responses.create(model="m", input="Hi", instructions="Be brief.")
    options = {"model": "m", "input": "More", "instructions": "Be brief.", "previous_response_id": first.id}
    events = list(client.responses.create(**options, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert len(session.branches) == 1
    assert events[-1].response.usage.output_tokens == session.turns[1].sample.tokens.size


@for_each("stream", [False, True])
def test_tokens_in_tokens_out(gateway, stream):
    """A client that keeps tokens itself: the next prompt begins with what was sampled, so it is the same branch."""
    session = gateway.session(seed=4)
    prompt = gateway.chat.start("Hi").prompt.tolist()
    ids = {"logprobs": 0, "extra_body": {"return_token_ids": True, "skip_special_tokens": False}}
    with openai.OpenAI(base_url=session.base_url, api_key="any") as client:
        for _ in range(2):
            answer = client.completions.create(model="m", prompt=prompt, max_tokens=8, **ids, stream=stream)
            choice = next(iter(answer)).choices[0] if stream else answer.choices[0]
            node = session.turns[-1]
            assert choice.token_ids == node.sample.tokens.tolist()
            assert choice.prompt_token_ids == prompt
            logprobs = np.array(choice.logprobs.token_logprobs, np.float32)
            assert np.array_equal(logprobs, node.sample.logprobs)
            assert stream or choice.finish_reason == node.sample.stop_reason
            prompt = [*prompt, *choice.token_ids, 10]
    assert len(session.branches) == 1


def test_what_a_sampler_would_draw_is_what_a_client_gets(sampler):
    """With the client's seed and settings, where the gateway has none: tokens, logprobs and ends, exactly."""
    prompt = sampler.tokenizer.encode("Say digits.")
    cases = [{"seed": 2**61 + 3, "n": 3}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8}, {"stop": ["e", "1"]}]
    cases += [{"stop_token_ids": [101, *sampler.tokenizer.eos_ids]}, {"ignore_eos": True, "max_tokens": 40}]
    with Gateway(sampler, open=True) as gateway, httpx.Client(base_url=gateway.url) as client:
        for case in cases:
            body = {"prompt": prompt.tolist(), "max_tokens": 200, "seed": 7, "logprobs": 0, "return_token_ids": True}
            answer = client.post("/v1/completions", json={**body, **case}).json()
            stop = () if "ignore_eos" in case else tuple(case.get("stop") or ()) or case.get("stop_token_ids")
            named = {name: case[name] for name in ("temperature", "top_p", "top_k", "max_tokens") if name in case}
            params = rlkit.SamplingParams(stop=stop, **{"max_tokens": 200, **named})
            drawn = sampler.sample(prompt, params, n=case.get("n", 1), seed=case.get("seed", 7)).result()
            for choice, sample in zip(answer["choices"], drawn, strict=True):
                assert (choice["token_ids"], choice["finish_reason"]) == (sample.tokens.tolist(), sample.stop_reason)
                logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
                assert np.array_equal(logprobs, sample.logprobs), case
        answer = client.post("/v1/completions", json={"prompt": "x", "min_p": 0.5})
        assert (answer.status_code, "no such option" in answer.text) == (400, True)


@for_each("stop", [None, "<|im_start|>b", "b", "a"])
def test_control_tokens_are_shown_on_request(stop):
    """All but the one that ended the completion, as vLLM has it; the ids are all of them anyway."""
    sampler = Scripted(rlkit.connect("toy").tokenizer, lambda _: "a<|im_start|>bc")
    with Gateway(sampler) as gateway, httpx.Client(base_url=gateway.session().base_url) as client:
        body = {"prompt": "x", "return_token_ids": True, "stop": stop}
        for skip, text in ((True, "abc"), (False, "a<|im_start|>bc")):
            (choice,) = client.post("completions", json={**body, "skip_special_tokens": skip}).json()["choices"]
            assert choice["text"] == text.partition(stop or "\n")[0]
            assert choice["token_ids"] == [97, 256, 98, 99, 257]


def test_anthropic_s_sdk_without_a_socket(gateway):
    session = gateway.session()
    options = {"api_key": session.api_key, "base_url": "http://127.0.0.1", "http_client": session.client("httpx2")}

    async def main():
        async with anthropic.AsyncAnthropic(**options) as sdk:
            return await sdk.messages.create(model="policy", max_tokens=8, messages=HI)

    assert asyncio.run(main()).role == "assistant"
    assert len(session.turns) == 1
    with pytest.raises(rlkit.ConfigError, match="package"):
        session.client("requests")
