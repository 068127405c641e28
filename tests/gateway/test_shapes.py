"""What is written has the shape that the SDKs' models of the APIs' documents ask for: every field, in its type."""

from __future__ import annotations

import asyncio
import json

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.fake import Says

HI = [{"role": "user", "content": "Hi"}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
CLAUDE_TOOLS = [{"name": "add", "input_schema": {"type": "object"}}]
CASES = [
    (
        "/v1/chat/completions",
        {"messages": HI, "logprobs": True, "top_logprobs": 2, "n": 2},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    ("/v1/chat/completions", {"messages": HI, "tools": CHAT_TOOLS}, ChatCompletion, ChatCompletionChunk),
    ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2}, Completion, Completion),
    ("/v1/responses", {"input": "Hi", "tools": TOOLS}, Response, ResponseStreamEvent),
    ("/v1/messages", {"messages": HI, "max_tokens": 9, "tools": CLAUDE_TOOLS}, Message, RawMessageStreamEvent),
]
SAYS = {
    "text": Says("Wörld"),
    "cut": Says("Wör", length=True),
    "call": Says("So", reasoning="Hm", calls=[("add", {"x": 1}), ("add", {})]),
    "nothing": Says(""),
}


def check(model, value, path):
    """Validate, and see that no field of the API was written that it does not have."""
    if path == "/v1/completions" and "choices" in value:  # its model knows no null in a stream, which the API sends
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    read = TypeAdapter(model).validate_python(value)
    assert json.loads(read.model_dump_json(exclude_unset=True)) == value


@pytest.mark.parametrize("said", SAYS)
@pytest.mark.parametrize(("path", "body", "whole", "event"), CASES)
def test_shapes(http, service, path, body, whole, event, said):
    service.says = [SAYS[said]]
    body = {"model": "m", **body}
    check(whole, asyncio.run(http.post(path, json=body)).json(), path)
    text = asyncio.run(http.post(path, json={**body, "stream": True})).text
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]
    events = [(block.get("event"), json.loads(block["data"])) for block in blocks if block["data"] != "[DONE]"]
    for name, data in events:
        assert name is None or name == data["type"]
        if data.get("type") != "ping":  # which the SDK's models leave out
            check(event, data, path)


def test_models_and_counts(http):
    check(Model, asyncio.run(http.get("/v1/models/policy")).json(), "")
    check(ModelInfo, asyncio.run(http.get("/v1/models/policy", headers={"anthropic-version": "2023-06-01"})).json(), "")
    counted = asyncio.run(http.post("/v1/messages/count_tokens", json={"messages": HI})).json()
    check(MessageTokensCount, counted, "")
