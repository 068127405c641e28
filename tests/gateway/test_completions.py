"""Completions of texts and tokens, asked by OpenAI's SDK."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.fake import Says


def run(coroutine):
    return asyncio.run(coroutine)


def complete(client, **options):
    return run(client.completions.create(model="m", **options))


async def streamed(client, **options):
    return [chunk async for chunk in await client.completions.create(model="m", stream=True, **options)]


def test_a_text(client, service):
    got = complete(client, prompt="Once", stop=["\n"], seed=5)
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in got.choices] == [
        (0, "Hello there, Wörld!", "stop", None)
    ]
    assert got.object == "text_completion"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (4, 21, 25)
    request = service.requests[0]
    assert (request.text, request.prompt, request.sampling.max_tokens) == ("Once", None, 16)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts(client, service, prompt, expected):
    service.says = ["one", "two"]
    service.says = [Says(x) for x in service.says]
    got = complete(client, prompt=prompt, n=2)
    asked = [x.text if x.prompt is None else x.prompt.tolist() for x in service.requests]
    assert asked == expected
    assert [choice.index for choice in got.choices] == list(range(2 * len(expected)))
    assert {choice.text for choice in got.choices} == {"one", "two"}
    chunks = run(streamed(client, prompt=prompt, n=2))
    assert {c.choices[0].index for c in chunks} == set(range(2 * len(expected)))


def test_a_scored_prompt(client, service):
    """As lm-eval asks: the prompt's logprobs, with or without one token behind it."""
    service.says = [Says("x", length=True)]
    got = complete(client, prompt=[65, 195, 169], echo=True, logprobs=1, max_tokens=0)
    (choice,) = got.choices
    assert choice.text == "Aé"
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens == ["A", "", "é"]
    assert choice.logprobs.token_logprobs == [None, -0.125, -0.25]
    assert choice.logprobs.text_offset == [0, 1, 1]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1] == {"�": -0.125, "A": -0.25, "B": -1.5}  # the token itself is there
    assert got.usage.completion_tokens == 0
    got = complete(client, prompt="AB", echo=True, logprobs=1, max_tokens=1)
    assert got.choices[0].text == "ABx"
    assert got.choices[0].logprobs.token_logprobs == [None, -0.125, -0.125]
    assert got.choices[0].logprobs.top_logprobs[2] == {"x": -0.125, "!": -2.0}


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_says_the_same(client, service, echo):
    options = {"prompt": "Önce", "logprobs": 2, "echo": echo, "extra_body": {"return_token_ids": True}}
    (whole,) = complete(client, **options).choices
    chunks = run(streamed(client, **options, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.text
    for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [x for choice in choices if choice.logprobs for x in getattr(choice.logprobs, field)]
        assert joined == getattr(whole.logprobs, field)
    assert choices[0].prompt_token_ids == whole.prompt_token_ids == list("Önce".encode())
    assert [t for choice in choices for t in getattr(choice, "token_ids", None) or []] == whole.token_ids
    assert [choice.finish_reason for choice in choices[-2:]] == [None, "stop"]
    assert chunks[-1].usage.completion_tokens == 21


def test_the_prompt_s_logprobs_as_vllm_has_them(client):
    (choice,) = complete(client, prompt="AC", extra_body={"prompt_logprobs": 2}).choices
    assert choice.prompt_logprobs[0] is None
    assert choice.prompt_logprobs[1] == {
        "67": {"logprob": -0.125, "rank": None, "decoded_token": "C"},
        "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
        "66": {"logprob": -1.5, "rank": 2, "decoded_token": "B"},
    }
