"""A trainer whose policy is sampled by servers with vLLM's endpoints, which misbehave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.backends.vllm import Vllm, settings
from rlkit.backends.vllm.settings import free_port, place_server, prepare_server

pytest.importorskip("httpx")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.backends.vllm.standin import Http, Standin, described
from tests.sockets import refusing_port

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers
LORA = rlkit.Lora(rank=4, train_unembed=False)
PARAMS = rlkit.SamplingParams(max_tokens=4, stop=())
TEXT = np.arange(3, 20)


@contextlib.contextmanager
def serving(http):
    with http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield http
        finally:
            http.standin.released.set()
            http.shutdown()
            thread.join()


@pytest.fixture
def server(tiny):
    with serving(Http(Standin(tiny("llama")))) as http:
        yield http


@contextlib.contextmanager
def connected(tiny, folder, sampler, **options):
    options = {"lora": LORA, "seed": 0, "device": "cpu", "folder": folder, **options}
    with rlkit.connect("local", **{"model": tiny("llama"), "sampler": sampler, **options}) as policy:
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
        samplers[-1] = policy.sampler().result()
        assert sorted(name[-1] for name in standin.loaded) == ["1", "2", "3", "4"]
        assert samplers[1].logprobs(TEXT).result().size == TEXT.size
        del samplers, sampler
        step(policy)
        policy.sampler().result()
        assert sorted(name[-1] for name in standin.loaded) == ["3", "4", "5"]  # 3 was held until 5 was there
        assert policy.base_sampler().result().sample(TEXT, PARAMS).result()
    assert not standin.loaded


def test_a_server_that_scores_without_the_adapter_is_warned_of(tiny, tmp_path, server):
    """Tell drawing from scoring by the logprobs alone, also without a trainer to compare with."""
    with connected(tiny, tmp_path, server.url) as policy:
        for _ in range(3):
            step(policy)
        sampler = policy.sampler().result()
        name = list(server.standin.loaded)[-1]
        with rlkit.sampler(server.url, tokenizer=policy.tokenizer, model=name):  # which warns of nothing
            pass
        server.standin.faults.add("headless")
        with (
            pytest.warns(UserWarning, match=r"nats on average: it scores without a part of the adapter"),
            rlkit.sampler(server.url, tokenizer=policy.tokenizer, model=name),
        ):
            pass
        with rlkit.sampler(server.url, tokenizer=policy.tokenizer):  # the base has no adapter to be left out
            pass
        server.standin.faults.clear()
        sampler.close()


def test_two_servers_share_the_requests(tiny, tmp_path, server):
    """Each has every version; the one with fewer requests gets the next."""
    with (
        serving(Http(Standin(tiny("llama")))) as other,
        connected(tiny, tmp_path, [server.url, other.url]) as policy,
    ):
        sampler = policy.sampler().result()
        for http in (server, other):
            http.standin.log.clear()
        for future in [sampler.sample(TEXT, PARAMS) for _ in range(6)]:
            future.result()
        counts = [http.standin.log.count("/v1/completions") for http in (server, other)]
    assert sum(counts) == 6
    assert min(counts) > 0


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_requests_move_to_another_server(tiny, tmp_path, server, fault):
    """At once where it died, after the deadline where it hangs; later policies are sampled, and it may come back."""
    with (
        serving(Http(Standin(tiny("llama")))) as other,
        connected(tiny, tmp_path, Vllm(urls=[other.url, server.url], deadline=10.0)) as policy,
    ):
        sampler = policy.sampler().result()
        wanted = [sampler.sample(TEXT, PARAMS, seed=i).result()[0].tokens.tolist() for i in range(4)]
        faults = {"hang"} if fault == "hangs" else {"break", "broken"}
        other.standin.faults |= faults
        futures = [sampler.sample(TEXT, PARAMS, seed=i) for i in range(4)]
        assert [future.result()[0].tokens.tolist() for future in futures] == wanted
        step(policy)
        second = policy.sampler().result()
        assert second.sample(TEXT, PARAMS).result()[0].version == 1
        assert all(name.endswith("0") for name in other.standin.loaded)
        other.standin.faults -= faults
        other.standin.released.set()
        server.standin.faults |= {"break", "broken"}
        (sample,) = second.sample(TEXT, PARAMS).result()
        trained = policy.forward([sample.datum(0.0)]).result().selected[0]
        assert np.abs(trained - sample.logprobs).max() < 1e-4
        other.standin.faults |= {"break", "broken"}
        with pytest.raises(rlkit.BackendError, match="the server cannot be reached"):
            sampler.sample(TEXT, PARAMS).result()


def test_a_server_that_hangs_holds_no_new_policy_up(tiny, tmp_path, server):
    """Where another one has it, and nobody has noticed before that one of them hangs."""
    with (
        serving(Http(Standin(tiny("llama")))) as other,
        connected(tiny, tmp_path, Vllm(urls=[other.url, server.url], deadline=10.0)) as policy,
    ):
        step(policy)
        other.standin.faults.add("hang")
        assert policy.sampler().result().sample(TEXT, PARAMS).result()[0].version == 1
        server.standin.faults.add("hang")
        step(policy)
        with pytest.raises(rlkit.BackendError, match="the server hangs"):
            policy.sampler().result()
        for http in (server, other):
            http.standin.released.set()


def test_a_server_that_comes_back_gets_its_adapter_again(tiny, tmp_path, server):
    """Once for all requests that miss it; one with other options, or another model, is not sampled."""
    standin = server.standin
    with connected(tiny, tmp_path, server.url) as policy:
        step(policy)
        sampler = policy.sampler().result()
        wanted = sampler.sample(TEXT, PARAMS, seed=3).result()[0]
        for fault in ((), ("break",)):  # noticed by what it lacks, and by a connection that breaks
            for name in list(standin.loaded):  # as a new process
                del standin.models[name], standin.loaded[name]
            standin.log.clear()
            standin.faults.update(fault)
            for future in [sampler.sample(TEXT, PARAMS, seed=3) for _ in range(4)]:
                (again,) = future.result()
                assert again.tokens.tolist() == wanted.tokens.tolist()
                assert np.abs(again.logprobs - wanted.logprobs).max() < 1e-5
            assert standin.log.count("/v1/load_lora_adapter") == 1
        standin.faults.update(["break", "raw"])
        with contextlib.suppress(rlkit.BackendError):  # whose connection broke
            sampler.sample(TEXT, PARAMS).result()
        with pytest.raises(rlkit.BackendError, match=r"came back: with top_k=1 .* not belong to the sampled"):
            sampler.sample(TEXT, PARAMS).result()
        standin.faults.clear()
        standin.models["base"].get_input_embeddings().weight.data.mul_(-1)
        with pytest.raises(rlkit.BackendError, match="came back: its logprobs differ from the trainer's by"):
            sampler.sample(TEXT, PARAMS).result()


@pytest.mark.parametrize(
    ("fault", "error", "sentence"),
    [
        ("drop", rlkit.BackendError, "equal the base model's: the server does not use the adapter"),
        ("scale", rlkit.BackendError, "nats on average: .* or the adapter's scale differ"),
        ("blind", rlkit.ConfigError, r"No adapter found for .*the folder of adapters \(Vllm\(folder=\)"),
        ("refuse", rlkit.ConfigError, "max_lora_rank 16.*--max-lora-rank of at least the policy's rank"),
        ("fixed", rlkit.ConfigError, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora"),
        ("raw", rlkit.BackendError, "--logprobs-mode processed_logprobs"),
        (
            "logits",
            rlkit.BackendError,
            "not a logprob, .* at most 0; .*--logprobs-mode processed_logprobs",
        ),
    ],
)
def test_an_untrained_policy_shows_what_a_server_lacks(tiny, tmp_path, server, fault, error, sentence):
    """At connect, by an adapter that is no policy, since a policy's own changes nothing yet."""
    server.standin.faults.add(fault)
    with pytest.raises(error, match=sentence), connected(tiny, tmp_path, server.url):
        pass
    assert not server.standin.loaded
    server.standin.faults.clear()
    with connected(tiny, tmp_path, server.url) as policy:
        datum = rlkit.Datum.supervised(TEXT[:1], TEXT[1:])
        trained = policy.forward([datum]).result().selected[0]
        base = policy.base_sampler().result().logprobs(TEXT).result()[1:]
        assert np.abs(trained - base).max() < 1e-5


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("drop", "equal the base model's: the server does not use the adapter"),
        ("stale", "equal version 1's: the server does not use the new adapter"),
        ("scale", "nats on average: .* or the adapter's scale differ"),
        ("temper", "nats on average: its base model, dtype"),
        ("raw", "sampled at temperature 0.7 differ by .*--logprobs-mode processed_logprobs"),
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


def test_a_live_sampler_switches_between_requests(tiny, tmp_path, server):
    with connected(tiny, tmp_path, server.url) as policy:
        live = policy.live_sampler().result()
        assert live.switches == "request"
        step(policy)
        assert live.update().result() == 1
        assert live.sample(TEXT, PARAMS, seed=0).result()[0].version == 1


def test_what_cannot_be_served_is_refused_at_connect(tiny, tmp_path, server):
    """With the remedy, before a server is started. The default adapter of a tied model can be served."""
    with connected(tiny, tmp_path, server.url, lora=None) as policy:
        policy.sampler().result()
    for options, what in (
        (
            {"lora": rlkit.Lora(train_unembed=True)},
            r"does not support adapters on the output head.*train_unembed=False",
        ),
        ({"lora": None, "model": tiny("qwen3")}, r"does not support adapters on the output head.*train_unembed=False"),
        ({"lora": rlkit.Lora(rank=600, train_unembed=False)}, "lora.rank.*at most 512"),
        ({"lora": rlkit.Lora(rank=4, target_modules=("lm_head",))}, "leave it out of target_modules"),
        ({"max_rows": 3}, "have no effect with sampler="),
    ):
        with pytest.raises(rlkit.ConfigError, match=what), connected(tiny, tmp_path, server.url, **options):
            pass
    with pytest.raises(rlkit.ConfigError, match="'vllm', a URL, or several"):
        rlkit.connect("local", model=tiny("llama"), sampler="sglang")
    server.standin.faults.add("tokenizer")
    with pytest.raises(rlkit.ConfigError, match="another tokenizer"), connected(tiny, tmp_path, server.url):
        pass


def test_urls_where_nobody_listens_are_named(tiny, tmp_path, server):
    """All of them, within seconds, with the reason and the command that starts a server."""
    with refusing_port() as first, refusing_port() as second:
        dead = [f"http://127.0.0.1:{port}" for port in (first, second)]
        began = time.monotonic()
        with pytest.raises(rlkit.BackendError) as raised, connected(tiny, tmp_path, [dead[0], server.url, dead[1]]):
            pass
    assert time.monotonic() - began < 45.0
    text = str(raised.value)
    assert text.startswith(f"connect(sampler): {dead[0]}/health: the server cannot be reached: ConnectError")
    command = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve"
    options = ("--max-lora-rank 8", "--no-enable-chunked-prefill", "--port PORT", "'vllm'", "start=SECONDS")
    for words in (dead[1], "waited 10 s", command, *options):
        assert words in text
    assert server.url not in text


def test_a_server_that_is_about_to_start_is_waited_for(tiny, tmp_path):
    """As long as ``start`` says, which is then the time of one that never comes, too."""
    url = f"http://127.0.0.1:{free_port()}"
    with (
        pytest.raises(rlkit.BackendError, match=r"cannot be reached.*waited 0\.5 s.*start=SECONDS"),
        connected(tiny, tmp_path, Vllm(urls=[url], start=0.5)),
    ):
        pass
    started = threading.Event()

    def start():
        time.sleep(1.5)
        with serving(Http(Standin(tiny("llama")), int(url.rpartition(":")[2]))):
            started.set()
            ended.wait(60)

    ended = threading.Event()
    thread = threading.Thread(target=start)
    thread.start()
    try:
        with connected(tiny, tmp_path, Vllm(urls=[url], start=60.0)) as policy:
            assert started.is_set()
            assert policy.sampler().result().sample(TEXT, PARAMS).result()
    finally:
        ended.set()
        thread.join()


def test_a_silent_server_is_told_from_none(tiny, tmp_path, server):
    """It accepts connections."""
    server.standin.faults.add("mute")
    with (
        pytest.raises(rlkit.BackendError, match=r"/health: no answer within 0\.5 s; the server hangs"),
        connected(tiny, tmp_path, Vllm(urls=[server.url], start=0.5)),
    ):
        pass


@pytest.mark.parametrize(
    ("fault", "error", "sentence"),
    [
        ("openai", rlkit.UnsupportedError, r"/v1/completions: answered without token ids; expected vLLM >= 0\.10\.2"),
        ("html", rlkit.BackendError, r"/v1/models: answered '<html>.*vLLM >= 0\.10\.2.*--openai"),
        ("locked", rlkit.BackendError, r"status 401: .*Unauthorized.*; its API key is set by .*key="),
        (
            "redirect",
            rlkit.BackendError,
            r"refused with status 307: https://elsewhere\.example/",
        ),
    ],
)
def test_a_server_of_another_kind_is_named(tiny, tmp_path, server, fault, error, sentence):
    """At once, with what is expected of one; also where it is only sampled."""
    server.standin.faults.add(fault)
    began = time.monotonic()
    with pytest.raises(error, match=sentence), connected(tiny, tmp_path, server.url):
        pass
    assert time.monotonic() - began < 45.0
    with pytest.raises(error, match=sentence):
        rlkit.sampler(server.url, tokenizer=tiny("llama"))


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("https://", r"connect\(sampler\): got 'https://' .*'vllm', a URL, or several"),
        ("http://127.0.0.1:port", r"connect\(sampler\): got 'http://127.0.0.1:port'"),
        ("vLLM", r"connect\(sampler\): got 'vLLM' .*'vllm', a URL"),
        ([], r"connect\(sampler\): got \[\] .*at least one URL"),
        ((), r"connect\(sampler\): got \(\) .*at least one URL"),
        (("vllm",), r"connect\(sampler\)\[0\]: got 'vllm' .*a URL"),
        (["http://127.0.0.1:8000", 3], r"connect\(sampler\)\[1\]: got 3 .*a URL"),
        (3, r"connect\(sampler\): got 3 .*a SamplingEngine \(or 'vllm', a URL, or several\)"),
        (b"http://127.0.0.1:8000", r"connect\(sampler\): got b'http.*'vllm', a URL, or several"),
        (np.zeros(2), r"connect\(sampler\): got .*'vllm', a URL, or several"),
    ],
)
def test_what_is_no_sampler_is_refused(sampler, words):
    """In the words of the call, before a model is looked for; the first call of a process looks for it earlier."""
    rlkit.backends.registry.resolve("local")
    with pytest.raises(rlkit.ConfigError, match=words):
        rlkit.connect("local", model="no-such-folder", lora=LORA, sampler=sampler)
    with pytest.raises(rlkit.ConfigError, match=r"open_sampler\(url\): got 'https://'"):
        rlkit.sampler("https://")
    with pytest.raises(
        rlkit.ConfigError, match=r"rlkit.sampler\(url\): no option 'tokeniser'; did you mean 'tokenizer'"
    ):
        rlkit.sampler("http://127.0.0.1:9", tokeniser=3)
    with pytest.raises(rlkit.ConfigError, match=r"Vllm\(urls\)\[0\]: got 'localhost:8000'"):
        Vllm(urls=["localhost:8000"])


def test_another_base_model_is_named(tiny, tmp_path, server):
    """At connect, where its tokenizer is the same."""
    server.standin.models["base"].get_input_embeddings().weight.data.mul_(-1)
    with (
        pytest.raises(rlkit.BackendError, match="its logprobs differ from the trainer's by .* its base model"),
        connected(tiny, tmp_path, server.url),
    ):
        pass


def test_a_refusal_is_the_futures_error(tiny, tmp_path, server):
    """In the server's words; the next call is served."""
    with connected(tiny, tmp_path, server.url) as policy:
        server.standin.faults.add("refuse")
        with pytest.raises(rlkit.ConfigError, match=r"status 500: .*LoRA rank 64 is greater.*the policy's rank"):
            policy.sampler().result()
        server.standin.faults.clear()
        assert policy.sampler().result().sample(TEXT, PARAMS).result()


def test_a_connection_that_breaks_is_asked_again(tiny, tmp_path, server):
    """Once; the same seed draws the same tokens."""
    with connected(tiny, tmp_path, server.url) as policy:
        sampler = policy.sampler().result()
        wanted = sampler.sample(TEXT, PARAMS, seed=3).result()[0].tokens.tolist()
        server.standin.faults.add("break")
        assert sampler.sample(TEXT, PARAMS, seed=3).result()[0].tokens.tolist() == wanted
        server.standin.faults |= {"break", "broken"}
        with pytest.raises(rlkit.BackendError, match="cannot be reached"):
            sampler.sample(TEXT, PARAMS).result()
        server.standin.faults.clear()
        assert sampler.sample(TEXT, PARAMS, seed=3).result()[0].tokens.tolist() == wanted


def test_an_adapter_that_is_there_already(tiny, tmp_path, server):
    """Since the answer did not come, or the URL is given twice: vLLM refuses to load it again."""
    with connected(tiny, tmp_path, [server.url, server.url]) as policy:
        step(policy)
        server.standin.faults.add("cut")
        sampler = policy.sampler().result()
        assert "cut" not in server.standin.faults
        assert sampler.sample(TEXT, PARAMS).result()[0].version == 1


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


def test_a_server_is_started_and_ended(tiny, tmp_path, python):
    """Killed in mid-batch it is an error with its status, at once; it ends with the backend otherwise."""
    for killed in (False, True):
        slow = Vllm(python=python, environment={"STANDIN_FAULTS": "slow"})
        with connected(tiny, tmp_path, slow) as policy:
            step(policy)
            sampler = policy.sampler().result()
            futures = [sampler.sample(TEXT, PARAMS, seed=i) for i in range(3)]
            pid = policy._engine._program._process.pid
            assert alive(pid)
            if killed:
                os.kill(pid, signal.SIGKILL)
            for future in futures:
                if killed:
                    with pytest.raises(rlkit.BackendError, match="the server was killed by SIGKILL"):
                        future.result()
                else:
                    (sample,) = future.result()
                    trained = policy.forward([sample.datum(0.0)]).result().selected[0]
                    assert np.abs(trained - sample.logprobs).max() < 1e-4
        assert not alive(pid)


def test_a_server_that_does_not_start_says_why(tiny, tmp_path, monkeypatch):
    """No interpreter, one that is not there, one without vllm, a model that vLLM does not have, one that is slow."""
    monkeypatch.delenv("RLKIT_VLLM_PYTHON", raising=False)
    program = tmp_path / "python"
    harmless = "echo 'WARNING: few files can cause errors like OSError'"
    unsupported = "echo \"ValueError: Model architectures ['X'] are not supported for now.\""
    for sampler, script, error, words in (
        ("vllm", None, rlkit.ConfigError, "RLKIT_VLLM_PYTHON"),
        (Vllm(python=program), None, rlkit.ConfigError, "no Python at"),
        (Vllm(python=sys.executable), None, rlkit.ConfigError, "ended with status 1: .*No module named 'vllm'"),
        (Vllm(python=program), f"{unsupported}; exit 1", rlkit.ConfigError, "not supported for now.*this process sam"),
        (
            Vllm(python=program),
            f"{harmless}; echo 'ValueError: no such flag'; echo 'RuntimeError: see above'; exit 7",
            rlkit.ConfigError,
            "ended with status 7: ValueError: no such flag; see Vllm's arguments=",
        ),
        (Vllm(python=program, start=0.5), "exec sleep 100", rlkit.BackendError, r"waited 0\.5 s"),
    ):
        if script is not None:
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
        with pytest.raises(error, match=words), connected(tiny, tmp_path, sampler):
            pass


class TestPlacement:
    """A server that shares a GPU of 80 GB, of which 60 are free, with the trainer. torch's answer is made up."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        import torch

        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 80 * 10**9))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def test_half_of_what_is_free(self, caplog):
        """It is passed on and logged; a trainer on a CPU leaves vLLM its default."""
        with caplog.at_level("INFO", "rlkit"):
            placed = place_server("cuda:1", None, None)
        assert placed == (["--gpu-memory-utilization", "0.37"], {"CUDA_VISIBLE_DEVICES": "1"})
        assert "may take 29.6 of 80.0 GB of cuda:1; 30.4 GB stay free" in caplog.text
        assert place_server("cpu", None, None) == ([], {})

    def test_the_trainers_gpu_by_its_own_name(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
        assert place_server("cuda:1", 0.5, None) == (
            ["--gpu-memory-utilization", "0.5"],
            {"CUDA_VISIBLE_DEVICES": "6"},
        )

    def test_other_gpus_are_whole(self):
        """Their memory is vLLM's to check."""
        assert place_server("cuda:0", None, "1") == ([], {"CUDA_VISIBLE_DEVICES": "1"})
        assert place_server("cuda:0", 0.95, "1")[0] == ["--gpu-memory-utilization", "0.95"]

    def test_more_than_is_free_is_refused(self):
        match = (
            r"Vllm\(memory\): is 0\.9, 72\.0 GB of cuda:0, where the trainer runs; expected at most 0\.75 \(60\.0 GB"
        )
        with pytest.raises(rlkit.ConfigError, match=match):
            place_server("cuda:0", 0.9, None)

    def test_bad_settings(self):
        for name, values in {
            "memory": (0.0, 1.1, "half"),
            "devices": (1, "1,"),
            "python": (5,),
            "arguments": (None, "-x"),
            "urls": (None,),
            "environment": ("x", {"A": 1}),
            "folder": (5,),
            "key": ("\n", "ü", "", 5),
        }.items():
            for value in values:
                with pytest.raises(rlkit.ConfigError, match=rf"Vllm\({name}\)"):
                    Vllm(**{name: value})
        own = {"memory": 0.5, "devices": "1", "python": "p", "arguments": ["-x"], "environment": {"A": "1"}}
        for name, value in own.items():
            with pytest.raises(rlkit.ConfigError, match=r"cannot be combined with urls="):
                Vllm(urls=["http://127.0.0.1:1"], **{name: value})
        for url in ("http://a?b", "http://a#b", "http://a b", "http://\0"):
            with pytest.raises(rlkit.ConfigError, match=r"Vllm\(urls\)\[0\]"):
                Vllm(urls=[url])

    def test_it_is_in_the_command(self, python, monkeypatch):
        """Before the user's own arguments, which win; the address comes last."""
        placed = lambda *asked: (["--placed", *map(str, asked)], {"PLACED": "1"})  # noqa: E731
        monkeypatch.setattr(settings, "place_server", placed)
        given = Vllm(python=python, arguments=["--enforce-eager"], memory=0.5, devices="1", environment={"MORE": "2"})
        program, url, key = prepare_server(given, described("m", LORA), grace=1.0)
        command, environment = program._arguments, program._environment
        at = command.index("--placed")
        port = url.removeprefix("http://127.0.0.1:")
        assert command[at + 1 :] == ["cpu", "0.5", "1", "--enforce-eager", "--host", "127.0.0.1", "--port", port]
        assert (environment["PLACED"], environment["MORE"], environment["VLLM_API_KEY"]) == ("1", "2", key)
        assert "VIRTUAL_ENV" not in environment
