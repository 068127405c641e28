from __future__ import annotations

import anthropic
import httpx2
import openai
import pytest

from rlkit.gateway._app import create_app
from tests.gateway.fake import FakeService


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def http(service):
    """A client without a socket."""
    transport = httpx2.ASGITransport(create_app(service))
    return httpx2.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers={"authorization": "Bearer sk-1"}
    )


@pytest.fixture
def client(service):
    """OpenAI's asynchronous SDK without a socket."""
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(create_app(service)))
    return openai.AsyncOpenAI(base_url="http://127.0.0.1/s/s1/v1", api_key="any", http_client=transport)


@pytest.fixture
def claude(service):
    """Anthropic's asynchronous SDK without a socket."""
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(create_app(service)))
    return anthropic.AsyncAnthropic(base_url="http://127.0.0.1/s/s1", api_key="any", http_client=transport)
