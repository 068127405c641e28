"""What each extra promises, used: ``python -P programs.py NAME`` in an environment with that extra alone.

A function is named after its extra and imports what it needs; any exception is a promise that was not kept.
``core`` is the wheel without an extra.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def core():
    """The toy samples, a run is written and shown; what is missing is named with what to install."""
    assert importlib.util.find_spec("torch") is None, "an environment with torch shows nothing"
    import numpy as np

    import rlkit
    from rlkit.advantages import grpo

    assert np.allclose(grpo([1.0, 0.0], scale="none"), [0.5, -0.5])
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        (sample,) = sampler.sample(list(b"Call "), rlkit.SamplingParams(max_tokens=4)).result()
        assert np.isfinite(sample.logprobs).all()
    for attempt, missing in (
        (lambda: rlkit.connect("local", model="x"), "torch"),
        (trained, "torch"),
        (played, "jinja2"),
        (lambda: rlkit.Run("run", seed=0).report(), "jinja2"),
    ):
        message = refused(attempt)
        assert missing in message, message
        assert "pip install" in message, message
    done = subprocess.run(["rlkit", "doctor", "--offline"], capture_output=True, text=True, check=True)
    assert "torch" in done.stdout


def torch():
    """The toy learns."""
    trained()


def local():
    """A small random model samples, learns, is saved, and is read again; its chat template renders."""
    import rlkit

    policy = rlkit.connect("local", model=str(model()), lora=rlkit.Lora(rank=4), seed=0)
    prompt = policy.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    step(policy, prompt)
    path = policy.save("state").result()
    policy.close()
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model()), path)


def gguf():
    """The package that reads the model file; converting one needs ``local`` too, and says so."""
    import gguf as package

    assert package.GGUFReader
    import rlkit

    message = refused(lambda: rlkit.connect("local", model="smollm2-135m-instruct"))
    assert "pip install" in message, message


def chat():
    """A conversation by a template."""
    from rlkit.backends.toy import ByteTokenizer
    from rlkit.chat import Chat

    chat = Chat(ByteTokenizer())
    assert chat.start([{"role": "user", "content": "Hi"}])


def renderers():
    """A conversation and a tool call by a family's renderer, without torch and transformers."""
    import re

    import numpy as np

    import rlkit.tools
    from rlkit.chat import Chat

    names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    names += ["<tool_response>", "</tool_response>"]

    class Bytes:
        eos_ids, vocab_size, chat_template = (257,), 256 + len(names), None
        added_tokens = dict.fromkeys(names, True)

        def encode(self, text, *, special=False):
            parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if special else [text]
            return np.array(
                [i for p in parts for i in ([256 + names.index(p)] if p in names else p.encode())], np.int64
            )

        def decode(self, tokens, skip_special=True):
            texts = [bytes([i]) if i < 256 else b"" if skip_special else names[i - 256].encode() for i in tokens]
            return b"".join(texts).decode("utf-8", "replace")

    chat = Chat(Bytes(), renderer="qwen3")
    conversation = chat.start("1 + 1?<|im_end|>")
    assert (conversation.prompt == 257).sum() == 1
    call = chat.tokenizer.encode('<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>', special=True)
    action = chat.action(call, prompt=conversation.prompt)
    assert [call.name for call in action.parsed.calls] == ["f"]
    conversation.add(action, [rlkit.tools.tool_message(action.parsed.calls[0], "2")])
    assert conversation.extends


def math():
    """Two writings of one number."""
    from rlkit.answers import math_equal

    assert math_equal("0.5", r"\frac{1}{2}")
    assert not math_equal("0.5", r"\frac{1}{3}")


def rollouts():
    """Episodes with a progress bar."""
    played(progress=True)


def tools():
    """A function as a tool, whose arguments are checked."""
    from rlkit.tools import parse, schema

    def add(x: int) -> int:
        """Adds."""
        return x

    text = '<tool_call>{"name": "add", "arguments": {"x": "1"}}</tool_call>'
    assert "not of type 'integer'" in parse(text, tools=[schema(add)]).errors[0].problem


def gateway():
    """The endpoints answer on a socket."""
    import httpx

    from rlkit.gateway import GatewayError
    from rlkit.gateway._app import Server

    class Closed:
        """Lets nobody in."""

        model = "policy"

        def admit(self, session, key):
            raise GatewayError(401, f"no session {session}, {key}", code="invalid_api_key")

    with Server(Closed()) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        answer = httpx.get(f"{server.url}/s/x/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def serve():
    """A client of the Tinker API learns on ``rlkit serve``; one of OpenAI's API lists the model of another."""
    import re

    import httpx

    import rlkit
    from rlkit.backends.toy import ByteTokenizer

    for more in ([], ["--openai"]):
        command = ["rlkit", "serve", "--backend", "toy", "--port", "0", *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                url = re.search(r"http://\S+", server.stdout.readline())[0]
                if more:
                    assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "toy"
                    continue
                client = {"base_url": url, "api_key": "tml-local", "tokenizer": ByteTokenizer()}
                with rlkit.connect("tinker", model="toy", seed=0, **client) as policy:
                    step(policy, policy.tokenizer.encode("Call "))
            finally:
                server.terminate()
                assert server.wait(30) == 0


def vllm():
    """A server with vLLM's endpoints is asked, without torch."""
    import http.server
    import json
    import threading

    import rlkit
    from rlkit.backends.vllm import open_sampler

    own = rlkit.sampler("toy").tokenizer  # a folder of transformers' would want transformers

    class Server(http.server.BaseHTTPRequestHandler):
        """Serves one model that always says the same."""

        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._answer({"data": [{"id": "m", "max_model_len": 8}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, logprob = body["prompt"], 0.0 if body.get("top_k") == 1 else -1.0
            ids = own.encode(prompt).tolist() if isinstance(prompt, str) else prompt
            choice = {"index": 0, "prompt_token_ids": ids, "token_ids": [5], "finish_reason": "length"}
            self._answer({"choices": [{**choice, "logprobs": {"token_logprobs": [logprob]}}]})

        def _answer(self, value):
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with open_sampler(f"http://127.0.0.1:{server.server_port}", tokenizer=own) as sampler:
            (sample,) = sampler.sample([1, 2], rlkit.SamplingParams(max_tokens=1)).result(60)
        server.shutdown()
    assert sample.tokens.tolist() == [5]
    assert sample.logprobs.tolist() == [-1.0]


def tinker():
    """Samples, learns by a hosted loss and saves on a server of the API, without torch."""
    assert importlib.util.find_spec("torch") is None, "an environment with torch shows nothing"
    import rlkit

    policy = rlkit.connect("tinker", model="toy", seed=0, tokenizer=tokenizer())  # the server names one on a hub
    prompt = policy.tokenizer.encode("Call ")
    step(policy, prompt)
    assert policy.save("state").result().startswith("tinker://")
    policy.close()


def reasoning_gym():
    """A problem, and its score."""
    from rlkit.envs import Action
    from rlkit.envs import reasoning_gym as tasks

    env = tasks("chain_sum", size=3, min_terms=2, max_terms=2, min_digits=1, max_digits=1)[0].make()
    assert env.reset(0).endswith("=")
    assert 0.0 <= env.step(Action("7")).reward <= 1.0


def ray():
    """Environments in a worker process."""
    import os

    import rlkit
    from rlkit.envs import StepResult
    from rlkit.rollouts import Ray, rollout_sync

    class Process:
        def reset(self, seed):
            return "Where?"

        def step(self, action):
            return StepResult(reward=float(os.getpid()), terminated=True)

        def close(self):
            pass

    sampler = rlkit.connect("toy", seed=0).sampler().result()
    options = {"n": 2, "params": rlkit.SamplingParams(max_tokens=2)}
    (group,) = rollout_sync(sampler, Process, executor=Ray(workers=1), **options)
    assert os.getpid() not in {trajectory.reward for trajectory in group.trajectories}


def mcp():
    """A server of this process, and one in a process of its own, whose tool is called."""
    import asyncio

    from mcp.server import MCPServer

    from rlkit.envs import Action
    from rlkit.envs import mcp as questions
    from rlkit.envs.calling import GuardedEnv

    def add(x: int, y: int) -> int:
        """Adds."""
        return x + y

    server = MCPServer("sums")
    server.tool()(add)
    program = "from mcp.server import MCPServer\nserver = MCPServer('sums')\n@server.tool()\n"
    program += "def add(x: int, y: int) -> int:\n    return x + y\nserver.run('stdio')"

    async def scene(place):
        tasks = questions(place, ["7 + 8?"], lambda text, calls: float(calls[0][1] == "15"))
        env = await GuardedEnv.open(tasks[0], timeout=60)
        try:
            await env.reset(0, timeout=60)
            call = '<tool_call>{"name": "add", "arguments": {"x": 7, "y": 8}}</tool_call>'
            assert (await env.step(Action(call), timeout=60)).observation[0]["content"] == "15"
            assert (await env.step(Action("15"), timeout=60)).reward == 1.0
        finally:
            assert await env.close(timeout=60) is None

    for place in (server, [sys.executable, "-c", program]):
        asyncio.run(scene(place))


def openenv():
    """A server that is not there is named; what a server needs is not needed here."""
    from rlkit.envs import openenv as served

    assert importlib.util.find_spec("openenv") is None
    assert "Connection refused" in refused(lambda: served("http://127.0.0.1:9"))


def gem():
    """A game of one turn."""
    from rlkit.envs import Action
    from rlkit.envs import gem as games

    env = games("game:GuessTheNumber-v0-easy")[0].make()
    assert env.reset(0)
    env.step(Action(r"\boxed{3}"))
    env.close()


def openreward():
    """A session of a server that runs here."""
    import asyncio

    from rlkit.envs import openreward as tasks

    server = Path(os.environ["RLKIT_OPENREWARD_SERVER"])
    environment = os.environ | {"OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    with subprocess.Popen([sys.executable, server], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            port = process.stdout.readline().strip()
            found = tasks("sums", base_url=f"http://127.0.0.1:{port}")

            async def first():
                env = found[0].make()
                try:
                    return await env.reset(0)
                finally:
                    await env.close()

            assert "Add these" in str(asyncio.run(first()))
        finally:
            process.terminate()
            process.stdout.read()


def gymnasium():
    """An environment of the package's own, and what it is told."""
    import gymnasium as package

    from rlkit.envs import Action
    from rlkit.envs import gymnasium as tasks

    found = tasks(lambda: package.make("FrozenLake-v1"), action=int, text=str)
    env = found[0].make()
    env.reset(0)
    env.step(Action("1"))
    env.close()


def config():
    """Settings from YAML and the command line."""
    import attrs

    import rlkit.config

    @attrs.frozen
    class Settings:
        steps: int = 3
        name: str = "a"

    Path("settings.yaml").write_text("name: b\n")
    assert rlkit.config.load(Settings, "settings.yaml", overrides=["steps=5"]) == Settings(5, "b")


def report():
    """A run as a page."""
    import rlkit

    with rlkit.Run("run", seed=0) as run:
        run.log({"train/loss": 0.5})
        page = run.report()
    assert page.stat().st_size > 10_000


def wandb():
    """A tracker opens, is told a number, and closes."""
    tracked("wandb", "rlkit-tests", folder=".", mode="offline")


def tensorboard():
    """A tracker opens, is told a number, and closes."""
    tracked("tensorboard", "events")


def trackio():
    """A tracker opens, is told a number, and closes."""
    tracked("trackio", "rlkit-tests")


def mlflow():
    """A tracker opens, is told a number, and closes."""
    tracked("mlflow", "rlkit-tests", uri=f"sqlite:///{Path('store.db').resolve()}")


def examples():
    """The quickstart on the toy."""
    script = os.environ["RLKIT_QUICKSTART"]
    small = ["--backend", "toy", "--steps", "2", "--prompts", "2", "--samples", "2", "--eval-size", "4"]
    subprocess.run([sys.executable, "-P", script, *small], check=True, stdout=subprocess.DEVNULL)
    assert Path("runs/quickstart/report.html").exists()


# What several of them do


def played(**options):
    """Episodes on the toy, by its sampler alone."""
    import rlkit
    from rlkit.envs import StepResult
    from rlkit.rollouts import rollout_sync

    class Digits:
        def reset(self, seed):
            return "Call "

        def step(self, action):
            return StepResult(reward=float("7" in action), terminated=True)

        def close(self): ...

    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        (group,) = rollout_sync(sampler, Digits, n=4, params=rlkit.SamplingParams(max_tokens=4), **options)
    assert len(group.trajectories) == 4


def trained():
    """A step on the toy."""
    import rlkit

    with rlkit.connect("toy", seed=0) as policy:
        step(policy, policy.tokenizer.encode("Call "))


def step(policy, prompt):
    """Samples, one step of GRPO, and a sample of the policy after it."""
    import rlkit
    from rlkit.advantages import grpo

    params = rlkit.SamplingParams(max_tokens=4)
    with policy.sampler().result() as sampler:
        samples = sampler.sample(prompt, params, n=4).result()
    data = [sample.datum(a) for sample, a in zip(samples, grpo([1.0, 0.0, 0.0, 1.0]), strict=True)]
    loss = policy.forward_backward(data, "ppo")
    policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
    assert "loss:sum" in loss.result().metrics
    with policy.sampler().result() as sampler:
        assert sampler.sample(prompt, params, n=1).result()[0].version == 1


def refused(attempt):
    """The message of the error of rlkit that ``attempt`` raises."""
    import rlkit

    try:
        attempt()
    except rlkit.RlkitError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def tracked(name, *args, **options):
    """Opens, logs, closes."""
    from rlkit.tracking import MultiTracker, registry

    with MultiTracker([registry[name](*args, config={"lr": 1e-4}, **options)], timeout=120.0) as several:
        several.log({"train/loss": 0.5}, 0)
    assert several.metrics == {}, several.metrics


def model():
    """The folder of a random model of two layers, and a tokenizer of bytes."""
    folder = tokenizer()
    if (folder / "config.json").exists():
        return folder
    import transformers as tf

    size = len(tf.AutoTokenizer.from_pretrained(folder))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": size, "eos_token_id": size - 1, "pad_token_id": size - 1, "max_position_embeddings": 1024}
    tf.LlamaForCausalLM(tf.LlamaConfig(**shape, **ids)).save_pretrained(folder)
    return folder


def tokenizer():
    """The folder of a tokenizer of bytes."""
    folder = Path("a-model").resolve()  # in this program's folder, which check.py removes
    if folder.exists():
        return folder
    import tokenizers
    import transformers as tf

    vocabulary = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    bare = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    made = tf.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>", pad_token="<end>")  # noqa: S106
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    made.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    with contextlib.chdir(tempfile.mkdtemp(dir=Path.cwd())):
        globals()[sys.argv[1].replace("-", "_")]()
