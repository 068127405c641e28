"""rlkit where packages are missing: what works, and how the rest is refused. Each program runs without them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import rlkit
from tests.without import printed, without

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


CALLS = """
import rlkit
from rlkit import advantages, losses
policy = rlkit.connect("toy", seed=0)
data = [rlkit.Sample([65], [66], [-1.0]).datum(1.0)]
def refused(call):
    try:
        call()
    except rlkit.ConfigError as error:
        print(type(error).__name__, str(error))
    else:
        raise SystemExit("accepted")
refused(lambda: policy.forward_backward(data, "ppo"))
refused(lambda: policy.forward_backward(data, lambda logprobs: logprobs.sum()))
refused(lambda: rlkit.connect("local", model="x"))
refused(lambda: rlkit.sampler("local", model="x"))
refused(lambda: rlkit.critic("local", tokenizer=policy.tokenizer, model="x"))
refused(lambda: rlkit.serve("toy"))
assert losses.prepare("ppo", {"clip_high_threshold": 1.28}).inputs == ("sampling_logprobs", "advantages")
refused(lambda: losses.prepare("ppo", {"clip_high_threshold": 0.28}).check_settings())
assert policy.sampler().result().sample([65], rlkit.SamplingParams()).result()
"""


def test_what_needs_torch_says_so_at_the_call():
    """Each is refused before any work, by name, with a command that installs what is missing; the policy goes on."""
    lines = printed(HEAVY, CALLS).splitlines()
    assert len(lines) == 7
    for line in lines[:-1]:
        assert re.match(r"MissingPackageError .* needs (torch|transformers|peft): pip install .*\[", line), line
    assert "write 1 - 0.2 and 1 + 0.2" in lines[-1]


def test_tools_need_jsonschema_for_schemas_alone():
    """Calls are read without it; checking their arguments names it before any text is looked at."""
    program = """
import rlkit.tools as tools
text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
assert tools.parse(text).calls[0].name == "f"
try:
    tools.parse(text, tools=[{"name": "f", "parameters": {"type": "object"}}])
except ModuleNotFoundError as error:
    print(error)
"""
    assert re.match(r"checking arguments .* needs jsonschema: pip install .*tools\]", printed(["jsonschema"], program))


def test_a_named_renderer_needs_its_package():
    """It says so; a model that is not named is rendered by its template, whether the package would know it or not."""
    program = """
import rlkit
from rlkit.chat import Chat
tokenizer = rlkit.connect("toy").tokenizer
type(tokenizer).name = "Qwen/Qwen3-8B"
assert Chat(tokenizer).renderer is None
try:
    Chat(tokenizer, renderer="qwen3")
except rlkit.ConfigError as error:
    print(error)
"""
    assert re.match(r"Chat.renderer needs renderers: pip install .*renderers\]", printed(["renderers"], program))


def test_a_gateway_needs_its_extra_for_http_alone():
    """Sessions answer without it; a URL or a client names what is missing."""
    program = """
import asyncio, rlkit
from rlkit.gateway import Gateway, Request
tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
with Gateway(rlkit.connect("toy", seed=0).sampler().result()) as gateway, gateway.session() as session:
    assert asyncio.run(session.answer(Request(messages=[{"role": "user", "content": "Hi"}], tools=tools))).choices
    for use in (lambda: session.base_url, session.client):
        try:
            use()
        except rlkit.ConfigError as error:
            print(error)
"""
    lines = printed(["starlette", "uvicorn", "jsonschema"], program).splitlines()
    assert len(lines) == 2
    for name, line in zip(("url", "client"), lines, strict=True):
        assert re.match(rf"Gateway.{name} needs starlette, .*: pip install .*gateway\]", line), line


def test_a_server_needs_its_extra():
    """Each package of it is named before a model is loaded."""
    program = """
import rlkit
from rlkit.server import serve
try:
    serve("toy")
except rlkit.ConfigError as error:
    print(error)
"""
    for package in ("uvicorn", "tinker"):
        assert re.match(rf"serve needs {package}: pip install .*serve\]", printed([package], program))


def test_fake_tinker_needs_no_listener():
    """It answers in this process, without what `rlkit serve` listens with."""
    pytest.importorskip("tinker")
    program = """
import rlkit.testing
with rlkit.testing.FakeTinker() as fake:
    policy = rlkit.connect("tinker", model="toy", base_url=fake.base_url, api_key=fake.api_key)
    sample, = policy.sampler().result().sample([72, 105], rlkit.SamplingParams(max_tokens=4)).result()
    policy.forward_backward([sample.datum(1.0)], "ppo")
    policy.optim_step(rlkit.Adam()).result()
    policy.close()
    print(fake.count("optim_step"))
"""
    assert printed(["starlette", "uvicorn", "h11"], program) == "1\n"


def test_a_foreign_error_is_not_taken_for_a_missing_package(monkeypatch):
    """A backend of a package whose own import fails raises that import's error."""
    monkeypatch.setitem(rlkit.backends.registry, "theirs", "nothing_of_that_name:Backend")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name") as caught:
        rlkit.connect("theirs")
    assert not isinstance(caught.value, rlkit.ConfigError)


CLIENT = """
import json, sys
import numpy as np
import rlkit
from rlkit.backends.toy import ByteTokenizer

assert "torch" not in sys.modules
url, folder = sys.argv[1:]
policy = rlkit.connect("tinker", model="toy", base_url=url, api_key="tml-local", tokenizer=folder, seed=0)
tokenizer = policy.tokenizer
assert tokenizer.decode(tokenizer.encode("hello")).strip() == "hello"
policy.close()
policy = rlkit.connect("tinker", model="toy", base_url=url, api_key="tml-local", tokenizer=ByteTokenizer(), seed=0)
samples = policy.sampler().result().sample([72, 105], rlkit.SamplingParams(max_tokens=4), n=2, seed=1).result()
data = [s.datum(a) for s, a in zip(samples, (1.0, -1.0))]
found = {}
for name in ("ppo", "importance_sampling", "cispo", "reinforce", "gspo", "topr"):
    out = policy.forward_backward(data, name)
    policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
    found[name] = out.result().metrics["loss:sum"]
supervised = [rlkit.Datum.supervised([65], [66, 67])]
policy.forward_backward(supervised, "cross_entropy")
policy.optim_step(rlkit.Adam()).result()
assert len(policy.forward(data).result().selected) == 2
refusals = []
for call in (
    lambda: policy.forward_backward(data, "sapo"),
    lambda: policy.forward_backward(data, "ppo", config={"dual_clip": 3.0}),
    lambda: policy.forward_backward(data, lambda logprobs: logprobs.sum()),
    lambda: policy.forward(data, "ppo"),
    lambda: policy.forward_backward(data, "ppo", config={"clip_high_threshold": 0.2}),
    lambda: policy.forward_backward([d.with_inputs(advantages=np.ones((len(d), 2))) for d in data], "ppo"),
    lambda: policy.forward_backward(data, "grpo"),
):
    try:
        call()
    except rlkit.RlkitError as error:
        refusals.append([type(error).__name__, str(error)])
path = policy.save("end").result()
assert path.startswith("tinker://")
assert "torch" not in sys.modules
print(json.dumps([found, refusals, policy.version]))
policy.close()
"""


@pytest.mark.timeout(600)
def test_tinker_needs_no_torch_for_hosted_losses(tiny, tmp_path):
    """A client without torch connects, reads a tokenizer, samples, trains with hosted losses and saves; a loss that
    would be computed here is refused at the call, and nothing is sent of it.
    """
    pytest.importorskip("tinker")
    command = [sys.executable, "-m", "rlkit.cli", "serve", "--backend", "toy", "--name", "toy", "--port", "0"]
    with subprocess.Popen(
        [*command, "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RLKIT_SERVER_KEY": ""},
    ) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline()).group()
            done = without(["torch", "pytest", "peft"], f"sys.argv[1:] = {[url, tiny('llama')]!r}\n" + CLIENT)
        finally:
            server.terminate()
            server.wait(30)
    assert done.returncode == 0, done.stderr
    found, refusals, version = json.loads(done.stdout.splitlines()[-1])
    assert version == 7
    assert all(np.isfinite(value) for value in found.values())
    kinds, texts = zip(*refusals, strict=True)
    assert kinds == ("MissingPackageError",) * 4 + ("ConfigError", "DataError", "UnknownNameError")
    for text in texts[:4]:
        assert "computed in this process" in text
        assert re.search(r"needs torch: pip install .*\[", text)
    assert "write 1 - 0.2 and 1 + 0.2" in texts[4]
    assert "one per token" in texts[5]
