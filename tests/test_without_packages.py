"""rlkit where packages are missing: what works, and how the rest is refused. Each program runs without them."""

from __future__ import annotations

import json
import re

import pytest

import rlkit
from tests.without import printed

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "safetensors",
    "accelerate",
    "tinker",
    "pytest",
    "stamina",
    "rich",
)
TOY = """
import json, rlkit
policy = rlkit.connect("toy", seed=0)
sampler = policy.sampler().result()
samples = sampler.sample([72, 105], rlkit.SamplingParams(max_tokens=8), n=3).result()
data = [sample.datum(1.0) for sample in samples]
logprobs = [x.tolist() for x in policy.forward(data).result().selected]
print(json.dumps([[sample.tokens.tolist() for sample in samples], logprobs]))
"""


def test_the_toy_samples_alike():
    """With numpy and attrs alone the toy connects, samples and scores, bit for bit as in a full install."""
    without_any = json.loads(printed(HEAVY, TOY))
    assert without_any == json.loads(printed([], TOY))
    assert sum(map(len, without_any[0])) > 3


REFUSED = """
import rlkit
def refused(call):
    try:
        call()
    except rlkit.ConfigError as error:
        print(type(error).__name__, str(error))
    else:
        raise SystemExit("accepted")
"""
CALLS = """
policy = rlkit.connect("toy", seed=0)
data = [rlkit.Sample([65], [66], [-1.0]).datum(1.0)]
refused(lambda: policy.forward_backward(data, "ppo"))
refused(lambda: policy.forward_backward(data, lambda logprobs: logprobs.sum()))
refused(lambda: rlkit.connect("local", model="x"))
refused(lambda: rlkit.sampler("local", model="x"))
refused(lambda: rlkit.critic("local", tokenizer=policy.tokenizer, model="x"))
refused(lambda: rlkit.serve("toy"))
refused(lambda: rlkit.losses.prepare("ppo"))
assert policy.sampler().result().sample([65], rlkit.SamplingParams()).result()
"""


def test_what_needs_torch_says_so_at_the_call():
    """Each is refused before any work, by name, with a command that installs what is missing; the policy goes on."""
    lines = printed(HEAVY, REFUSED + CALLS).splitlines()
    assert len(lines) == 7
    for line in lines:
        assert re.match(r"MissingPackageError .* needs (torch|transformers|peft|tinker): pip install .*\[", line), line
    for line in (lines[0], lines[1], lines[-1]):
        assert re.match(r"MissingPackageError rlkit.losses needs torch: pip install .*\[torch\]", line), line


# Without these packages a program prints these beginnings of errors, after what works has worked.
PARTS = [
    (["jsonschema"], ["checking arguments .* needs jsonschema: pip install .*tools\\]"], """
import rlkit.tools as tools
text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
assert tools.parse(text).calls[0].name == "f"
refused(lambda: tools.parse(text, tools=[{"name": "f", "parameters": {"type": "object"}}]))
"""),
    (["renderers"], ["Chat.renderer needs renderers: pip install .*renderers\\]"], """
from rlkit.chat import Chat
tokenizer = rlkit.connect("toy").tokenizer
assert Chat(tokenizer).renderer is None
refused(lambda: Chat(tokenizer, renderer="qwen3"))
"""),
    (
        ["starlette", "uvicorn", "jsonschema"],
        [rf"Gateway.{name} needs starlette, .*: pip install .*gateway\]" for name in ("url", "client")],
        """
import asyncio
from rlkit.gateway import Gateway, Request
tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
with Gateway(rlkit.connect("toy", seed=0).sampler().result()) as gateway, gateway.session() as session:
    assert asyncio.run(session.answer(Request(messages=[{"role": "user", "content": "Hi"}], tools=tools))).choices
    refused(lambda: session.base_url)
    refused(session.client)
"""),
    *[
        ([package], [rf"rlkit.server needs {package}: pip install .*serve\]"] * 2, """
import rlkit.testing
refused(lambda: rlkit.serve("toy"))
refused(lambda: rlkit.testing.FakeTinker())
""")
        for package in ("uvicorn", "starlette", "tinker")
    ],
]  # fmt: skip


@pytest.mark.parametrize(("missing", "messages", "program"), PARTS, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_a_part_names_what_it_lacks(missing, messages, program):
    """Tools, a named renderer, the gateway's HTTP and the server, each before any work; what needs less works."""
    lines = printed(missing, REFUSED + program).splitlines()
    assert len(lines) == len(messages)
    for message, line in zip(messages, lines, strict=True):
        assert re.match(f"MissingPackageError {message}", line), line


def test_a_foreign_error_is_not_taken_for_a_missing_package(monkeypatch):
    """A backend of a package whose own import fails raises that import's error."""
    monkeypatch.setitem(rlkit.backends.registry, "theirs", "nothing_of_that_name:Backend")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name") as caught:
        rlkit.connect("theirs")
    assert not isinstance(caught.value, rlkit.ConfigError)
