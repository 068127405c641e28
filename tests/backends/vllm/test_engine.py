"""A trainer whose policy is sampled by servers of vLLM's wire format, which misbehave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.backends.vllm import Vllm

pytest.importorskip("httpx")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.backends.vllm.standin import Http, Standin

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers
LORA = rlkit.Lora(rank=4, train_unembed=False)
PARAMS = rlkit.SamplingParams(max_tokens=4, stop=())
TEXT = np.arange(3, 20)


@pytest.fixture
def server(tiny):
    with Http(Standin(tiny("llama"))) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield http
        http.standin.released.set()
        http.shutdown()
        thread.join()


@contextlib.contextmanager
def connected(tiny, folder, sampler, **options):
    options = {"lora": LORA, "seed": 0, "device": "cpu", "folder": folder, **options}
    with rlkit.connect("local", model=tiny("llama"), sampler=sampler, **options) as policy:
        yield policy


def step(policy):
    policy.forward_backward([rlkit.Datum.supervised([5, 6], [7, 8, 9])], "cross_entropy")
    policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()


def eventually(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_is_trained_is_what_is_sampled(tiny, tmp_path, server):
    """After each step; two versions stay loaded, older ones as long as somebody samples from them."""
    standin = server.standin
    datum = rlkit.Datum.supervised(TEXT[:1], TEXT[1:])
    with connected(tiny, tmp_path, server.url) as policy:
        samplers = []
        for version in range(4):
            sampler = policy.sampler().result()
            trained = policy.forward([datum]).result().selected[0]
            assert np.abs(sampler.logprobs(TEXT).result()[1:] - trained).max() < 1e-4
            (sample,) = sampler.sample(TEXT, PARAMS, seed=version).result()
            again = policy.forward([sample.datum(0.0)]).result().selected[0]
            assert np.abs(again - sample.logprobs).max() < 1e-4
            assert (sample.version, sampler.version) == (version, version)
            samplers.append(sampler)
            step(policy)
        assert len(standin.loaded) == 4
        samplers[0].close()
        eventually(lambda: len(standin.loaded) == 3)
        assert samplers[1].logprobs(TEXT).result().size == TEXT.size
        del samplers, sampler
        eventually(lambda: len(standin.loaded) == 2)
        assert sorted(name[-1] for name in standin.loaded) == ["2", "3"]
        assert policy.base_sampler().result().sample(TEXT, PARAMS).result()


def test_two_servers_share_the_requests(tiny, tmp_path, server):
    """Each has every version; the one with fewer requests gets the next."""
    with Http(Standin(tiny("llama"))) as other:
        thread = threading.Thread(target=other.serve_forever, daemon=True)
        thread.start()
        with connected(tiny, tmp_path, [server.url, other.url]) as policy:
            sampler = policy.sampler().result()
            for http in (server, other):
                http.standin.log.clear()
            for future in [sampler.sample(TEXT, PARAMS) for _ in range(6)]:
                future.result()
            counts = [http.standin.log.count("/inference/v1/generate") for http in (server, other)]
        other.shutdown()
        thread.join()
    assert sum(counts) == 6
    assert min(counts) > 0


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("drop", "are the base model's: the adapter never arrived"),
        ("stale", "are those of version 1: the new adapter never arrived"),
        ("scale", "are those of 4 times the adapter: it has a wrong scale"),
        ("temper", "are tempered: those of logits divided by 1.3"),
        ("raw", "are those of temperature 1: .*--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_that_samples_another_policy_is_named(tiny, tmp_path, server, fault, sentence):
    """At the change of version, before anything was sampled; the trainer's weights stay what they are, to the bit."""
    datum = rlkit.Datum.supervised(TEXT[:1], TEXT[1:])
    with connected(tiny, tmp_path, server.url) as policy:
        step(policy)
        policy.sampler().result()
        step(policy)
        before = policy.forward([datum]).result().selected[0]
        server.standin.faults.add(fault)
        if fault == "stale":
            server.standin.loaded = {k: v for k, v in server.standin.loaded.items() if k.endswith("-1")}
        with pytest.raises(rlkit.BackendError, match=sentence):
            policy.sampler().result()
        server.standin.faults.clear()
        assert policy.forward([datum]).result().selected[0].tobytes() == before.tobytes()
        assert policy.sampler().result().version == 2


def test_what_cannot_be_served_is_refused_at_connect(tiny, tmp_path, server):
    """With the remedy, before a server is started."""
    for options, what in (
        ({"lora": None}, r"no adapter on the output head.*train_unembed=False"),
        ({"lora": rlkit.Lora(rank=600, train_unembed=False)}, "lora.rank.*at most 512"),
        ({"lora": rlkit.Lora(rank=4, target_modules=("lm_head",))}, "leave it out of target_modules"),
        ({"max_rows": 3}, "do nothing with sampler="),
    ):
        with pytest.raises(rlkit.ConfigError, match=what), connected(tiny, tmp_path, server.url, **options):
            pass
    with pytest.raises(rlkit.ConfigError, match="'vllm', a URL, or several"):
        rlkit.connect("local", model=tiny("llama"), sampler="sglang")
    server.standin.faults.add("tokenizer")
    with pytest.raises(rlkit.ConfigError, match="another tokenizer"), connected(tiny, tmp_path, server.url):
        pass


def test_another_base_model_is_named(tiny, tmp_path, server):
    """At connect, where its tokenizer is the same."""
    server.standin.models["base"].get_input_embeddings().weight.data.mul_(-1)
    with (
        pytest.raises(rlkit.BackendError, match="of the base model are .* off .*another base model"),
        connected(tiny, tmp_path, server.url),
    ):
        pass


def test_a_refusal_is_the_futures_error(tiny, tmp_path, server):
    """In the server's words; the next call is served."""
    with connected(tiny, tmp_path, server.url) as policy:
        server.standin.faults.add("refuse")
        with pytest.raises(rlkit.BackendError, match=r"status 500: LoRA rank 64 is greater"):
            policy.sampler().result()
        server.standin.faults.clear()
        assert policy.sampler().result().sample(TEXT, PARAMS).result()


def test_a_connection_that_breaks_is_asked_again(tiny, tmp_path, server):
    """Within bounds; the same seed draws the same tokens."""
    with connected(tiny, tmp_path, Vllm(urls=[server.url], restarts=1)) as policy:
        sampler = policy.sampler().result()
        wanted = sampler.sample(TEXT, PARAMS, seed=3).result()[0].tokens.tolist()
        server.standin.faults.add("break")
        assert sampler.sample(TEXT, PARAMS, seed=3).result()[0].tokens.tolist() == wanted
        server.standin.faults.add("break")
        with pytest.raises(rlkit.BackendError, match="as often as restarts= allows"):
            sampler.sample(TEXT, PARAMS).result()


def test_a_server_that_hangs_ends_in_a_typed_error(tiny, tmp_path, server):
    """After the deadline."""
    with connected(tiny, tmp_path, Vllm(urls=[server.url], deadline=10.0)) as policy:
        sampler = policy.sampler().result()
        server.standin.faults.add("hang")
        with pytest.raises(rlkit.errors.BackendTimeout, match="no answer within 10 s; the server hangs"):
            sampler.sample(TEXT, PARAMS).result()


# A server of its own.


@pytest.fixture
def python(tmp_path):
    """Stands where an environment's interpreter would: it starts the stand-in with vLLM's arguments."""
    script = tmp_path / "python"
    standin = Path(__file__).with_name("standin.py")
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{standin}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_server_is_started_and_outlives_its_death(tiny, tmp_path, python):
    """Killed in mid-batch it starts again, and all requests are answered; it ends with the backend."""
    with connected(tiny, tmp_path, Vllm(python=python, environment={"STANDIN_FAULTS": "slow"}, restarts=1)) as policy:
        step(policy)
        sampler = policy.sampler().result()
        (server,) = policy._engine.servers
        futures = [sampler.sample(TEXT, PARAMS, seed=i) for i in range(3)]
        first = server.pid
        time.sleep(0.5)
        os.kill(first, signal.SIGKILL)
        for future in futures:
            (sample,) = future.result()
            trained = policy.forward([sample.datum(0.0)]).result().selected[0]
            assert np.abs(trained - sample.logprobs).max() < 1e-4
        second = server.pid
        assert second != first
        assert not alive(first)
    assert not alive(second)


def test_a_server_that_does_not_start_says_why(tiny, tmp_path):
    """An interpreter without vllm, one that is not there, none at all, and a model that vLLM does not have."""
    script = tmp_path / "python"
    with pytest.raises(rlkit.ConfigError, match="no Python at"), connected(tiny, tmp_path, Vllm(python=str(script))):
        pass
    with pytest.raises(rlkit.ConfigError, match="has no vllm"), connected(tiny, tmp_path, Vllm(python=sys.executable)):
        pass
    script.write_text("#!/bin/sh\necho \"ValueError: Model architectures ['X'] are not supported for now.\"\nexit 1\n")
    script.chmod(0o755)
    with (
        pytest.raises(rlkit.ConfigError, match="not supported for now.*this process samples"),
        connected(tiny, tmp_path, Vllm(python=str(script))),
    ):
        pass
    script.write_text("#!/bin/sh\nexec sleep 100\n")
    with (
        pytest.raises(rlkit.errors.BackendTimeout, match=r"no server answered within 0\.5 s"),
        connected(tiny, tmp_path, Vllm(python=str(script), start=0.5)),
    ):
        pass


def test_no_interpreter_is_named(tiny, tmp_path, monkeypatch):
    """The message says how to make one."""
    monkeypatch.delenv("RLKIT_VLLM_PYTHON", raising=False)
    with pytest.raises(rlkit.ConfigError, match="RLKIT_VLLM_PYTHON"), connected(tiny, tmp_path, "vllm"):
        pass


def test_a_server_ends_when_its_parent_dies():
    """Also by SIGKILL, and with all that it started."""
    code = (
        "import sys, time\n"
        "from rlkit.backends.vllm.process import VllmProcess\n"
        "process = VllmProcess(['/bin/sh', '-c', 'sleep 300 & echo child $!; wait'], {})\n"
        "process.start()\n"
        "while not (process.pid and 'child' in process.log): time.sleep(0.01)\n"
        "print(process.pid, process.log.split()[-1], flush=True)\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        pids = [int(x) for x in parent.stdout.readline().split()]
        assert all(alive(pid) for pid in pids)
        parent.kill()
    eventually(lambda: not any(alive(pid) for pid in pids))
