from __future__ import annotations

import asyncio

import anthropic
import httpx2
import openai
import pytest

from rlkit.gateway._app import create_app
from tests.gateway.fake import FakeService

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def http(service):
    """A client without a socket."""
    transport, headers = httpx2.ASGITransport(create_app(service)), {"authorization": "Bearer sk-1"}
    return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


@pytest.fixture
def client(http):
    """OpenAI's asynchronous SDK without a socket."""
    return openai.AsyncOpenAI(base_url="http://127.0.0.1/s/s1/v1", api_key="any", http_client=http)


@pytest.fixture
def claude(http):
    """Anthropic's asynchronous SDK without a socket."""
    return anthropic.AsyncAnthropic(base_url="http://127.0.0.1/s/s1", api_key="any", http_client=http)


@pytest.fixture
def ask(client, claude):
    """``ask(api, **options)``: what the API's SDK makes of the answer, with ``stream=True`` the events of one."""
    apis = {
        "chat": (client.chat.completions.create, {"messages": HI}),
        "text": (client.completions.create, {"prompt": "Hi"}),
        "items": (client.responses.create, {"input": "Hi"}),
        "claude": (claude.messages.create, {"messages": HI, "max_tokens": 64}),
    }

    def asked(api, *, stream=False, **options):
        create, body = apis[api]

        async def answer():
            got = await create(**{"model": "m", **body, **options}, stream=stream)
            return [event async for event in got] if stream else got

        return asyncio.run(answer())

    return asked
