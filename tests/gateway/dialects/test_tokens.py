"""vLLM's endpoints of tokens, asked by hand and by the client of the package renderers."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai
import pytest

from tests.each import for_each
from tests.gateway.dialects.fake import FakeService, Says


def run(coroutine):
    return asyncio.run(coroutine)


def generate(http, **more):
    body = {"model": "m", "token_ids": [72, 105], "sampling_params": {"logprobs": 1, "stop_token_ids": [257]}}
    got = run(http.post("/inference/v1/generate", json={**body, **more}))
    return got.json() if got.status_code == 200 else got


def test_tokens_in_tokens_out(http, service):
    service.says = [Says("Yö"), Says("No", length=True)]
    params = {"n": 2, "max_tokens": 7, "temperature": 0.5, "logprobs": 1, "stop_token_ids": [257]}
    got = generate(http, sampling_params=params, request_id="r1", return_token_ids=True)
    assert got["request_id"] == "r1"
    assert got["prompt_token_ids"] == [72, 105]
    assert [(c["index"], c["token_ids"], c["finish_reason"]) for c in got["choices"]] == [
        (0, [*"Yö".encode(), 257], "stop"),
        (1, [*b"No"], "length"),
    ]
    entry = {"token": "token_id:89", "token_id": 89, "logprob": -0.125, "bytes": None, "top_logprobs": []}
    assert got["choices"][0]["logprobs"]["content"][0] == entry
    assert got["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    request = service.requests[0]
    assert request.prompt.tolist() == [72, 105]
    assert (request.n, request.top_logprobs, request.draw.max_tokens, request.draw.stop) == (2, 0, 7, (257,))


def test_alternatives_and_the_prompt(http):
    got = generate(http, sampling_params={"logprobs": 2, "prompt_logprobs": 1})
    best = got["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [(each["token_id"], each["logprob"]) for each in best] == [(72, -0.125), (33, -2.0)]
    assert got["prompt_logprobs"][1]["105"]["logprob"] == -0.125


def test_as_text(http, service):
    service.says = [Says("aö")]
    (choice,) = generate(http, output_mode="text")["choices"]
    assert choice["text"] == "aö"
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["a", "", "ö", "<|im_end|>"]


@pytest.mark.parametrize("said", ["Hello there, Wörld, and everybody else!", "", "a"])
def test_a_stream_has_every_token_once(http, service, said):
    service.says = [Says(said)]
    (whole,) = generate(http)["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    body = {"token_ids": [72], "sampling_params": {"logprobs": 1}, **options}
    lines = run(http.post("/inference/v1/generate", json=body)).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line[6:]) for line in lines[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    assert [t for choice in choices for t in choice["token_ids"]] == whole["token_ids"]
    assert [e for choice in choices for e in choice["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert ["prompt_token_ids" in event for event in events] == [True] + [False] * (len(events) - 1)
    assert events[-1]["usage"]["completion_tokens"] == len(said.encode()) + 1


@for_each(
    ("param", "change"),
    [
        ("token_ids", {"token_ids": []}),
        ("token_ids[1]", {"token_ids": [1, -1]}),
        ("sampling_params", {"sampling_params": None}),
        ("sampling_params.max_tokens", {"sampling_params": {"max_tokens": 0}}),
        ("sampling_params.structured_outputs", {"sampling_params": {"structured_outputs": {"json": "{}"}}}),
        ("features", {"features": {"mm_hashes": {"image": ["a"]}}}),
        ("output_mode", {"output_mode": "audio"}),
    ],
)
def test_refusals_name_the_field(http, service, param, change):
    got = generate(http, **change)
    assert got.status_code == 400
    assert got.json()["error"]["param"] == param
    assert not service.requests


def test_tokenize(http, service):
    got = run(http.post("/tokenize", json={"prompt": "é<|im_end|>", "return_token_strs": True})).json()
    expected = {"count": 3, "max_model_len": 4096, "tokens": [195, 169, 257], "token_strs": ["", "é", "<|im_end|>"]}
    assert got == expected
    messages = [{"role": "user", "content": "Hi"}]
    got = run(http.post("/tokenize", json={"messages": messages})).json()
    assert got["tokens"] == service.tokenizer.apply_chat_template(messages).tolist()
    assert got["token_strs"] is None
    assert run(http.post("/tokenize", json={})).json()["error"]["param"] == "prompt"
    assert run(http.post("/detokenize", json={"tokens": got["tokens"]})).json()["prompt"].startswith("<|im_start|>user")
    assert run(http.post("/detokenize", json={"tokens": [5000]})).json()["error"]["param"] == "tokens[0]"


def test_what_a_tokenizer_s_clients_ask(http, service):
    got = run(http.get("/tokenizer_info")).json()
    assert (got["eos_token"], got["chat_template"]) == ("<|im_end|>", service.tokenizer.chat_template)


def test_the_client_of_renderers(service):
    """``renderers.client.generate``, as verifiers' train client calls it: context length, tokens, logprobs, calls."""
    client = pytest.importorskip("renderers.client")
    from renderers.base import ParsedResponse

    from rlkit.gateway.app import app

    class Bytes:
        """As much of a renderer as the client asks for."""

        supports_tools = True

        def get_stop_token_ids(self):
            return [257]

        def parse_response(self, tokens, **_):
            return ParsedResponse(content=bytes(t for t in tokens if t < 256).decode())

    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app(service)))
    asking = openai.AsyncOpenAI(base_url="http://127.0.0.1/s/s1/v1", api_key="any", http_client=transport)
    options = {"client": asking, "renderer": Bytes(), "messages": [], "model": "policy", "sampling_params": {}}
    service.says = [Says("Aö")]
    result = run(client.generate(**options, prompt_ids=[72, 105], extra_headers={"x-session-id": "e1"}))
    assert result["prompt_ids"] == [72, 105]
    assert result["completion_ids"] == [*"Aö".encode(), 257]
    assert result["completion_logprobs"] == [-0.125] * 4
    assert (result["content"], result["finish_reason"]) == ("Aö", "stop")
    with pytest.raises(client.OverlongPromptError):
        run(client.generate(**options, prompt_ids=[72] * (FakeService.max_length + 1)))
