"""vLLM itself, where RLKIT_VLLM_PYTHON names an interpreter that has it; RLKIT_VLLM_ENVIRONMENT may give it variables.

RLKIT_VLLM_PYTHON=/path/bin/python python -m pytest tests/backends/vllm/test_real.py
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import shlex
import signal
import threading
import time

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.backends.vllm import Vllm
from rlkit.backends.vllm._client import VllmClient, submit
from rlkit.backends.vllm._engine import Server
from rlkit.backends.vllm.settings import prepare_server
from rlkit.testing.conformance import SamplingTests, ScoreTests

httpx = pytest.importorskip("httpx")
pytest.importorskip("peft")

PYTHON = os.environ.get("RLKIT_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="RLKIT_VLLM_PYTHON names no interpreter with vllm"),
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # of peft in the stand-in
]
LORA = rlkit.Lora(rank=4, train_unembed=False)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT = np.arange(3, 40)


def started(**options):
    more = dict(pair.split("=", 1) for pair in shlex.split(os.environ.get("RLKIT_VLLM_ENVIRONMENT", "")))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **more}
    arguments = ["--enforce-eager", "--max-num-seqs", "512", "--block-size", "32"]
    return Vllm(python=PYTHON, arguments=arguments, environment=environment, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with heads as wide as vLLM's kernels want them."""
    import torch
    import transformers as tf

    from tests.models.build import tokenizer

    folder = tmp_path_factory.mktemp("model")
    size = tokenizer(folder)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 128, "vocab_size": size}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2}
        made = tf.LlamaForCausalLM(tf.LlamaConfig(**shape, **ids, tie_word_embeddings=True))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    made.save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def serving(model, *arguments):
    """A server as ``connect`` starts it, with more arguments and no key: its URL and its process."""
    from tests.backends.vllm.standin import described

    settings = started()
    settings = attrs.evolve(settings, arguments=[*settings.arguments, *arguments])
    program, url, _ = prepare_server(settings, described(model, LORA, MODULES), grace=10.0)
    del program._environment["VLLM_API_KEY"]
    client = VllmClient(url)
    ended = program.start()
    try:
        submit(Server(client, ended).wait_until_ready(900.0)).result()
        yield url, program._process
    finally:
        submit(client.close()).result()
        program.kill()
        concurrent.futures.wait([ended])


@pytest.fixture(scope="module")
def url(model):
    """One server for the suite."""
    with serving(model) as (url, _):
        yield url


class TestVllm(SamplingTests, ScoreTests):
    """All that a sampler is held to, as far as vLLM has it."""

    exact = False
    skips = {
        "test_top_logprobs_are_the_largest": "no TargetLogprobs: vLLM scores no alternatives that are given to it",
        "test_targets_of_minus_one_are_none": "no TargetLogprobs",
        "test_bad_targets_are_refused": "no TargetLogprobs",
        "test_a_teacher_of_the_top_k_is_imitated": "no TargetLogprobs",
        "test_snapshots_never_change": "its numbers are not the same to the bit, whatever is computed beside them",
        "test_base_is_never_written": "its numbers are not the same to the bit, whatever is computed beside them",
    }

    @pytest.fixture(autouse=True)
    def _server(self, url, model):
        self.url, self.model = url, model

    def make(self, folder, **options):
        options = {"device": "cpu", "lora": LORA, "folder": folder, **options}
        return rlkit.connect("local", model=self.model, sampler=self.url, **options)

    @pytest.mark.parametrize("temperature", [0.7, 1.3])
    def test_sampler_and_trainer_agree(self, policy, temperature):
        """As the suite has it, but that texts are scored at temperature 1 alone."""
        samples = self.samples(policy, temperature=temperature)
        trained = self.logprobs(policy, [s.datum(0.0) for s in samples])
        assert max(np.abs(s.logprobs - t).max() for s, t in zip(samples, trained, strict=True)) < self.tolerance
        with pytest.raises(rlkit.UnsupportedError, match="temperature 1 only"):
            policy.sampler().result().logprobs([1, 2], temperature=temperature)


def step(policy):
    policy.forward_backward([rlkit.Datum.supervised([5, 6], [7, 8, 9])], "cross_entropy")
    policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()


def test_a_group_computes_its_prompt_once(url, model):
    """The samples of one request share it, as do later requests."""
    prompt = np.arange(3, 3 + 96)
    params = rlkit.SamplingParams(max_tokens=4, stop=())

    def count(what):
        text = httpx.get(f"{url}/metrics", timeout=30.0).text
        return sum(float(each) for each in re.findall(rf"^vllm:{what}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE))

    with rlkit.sampler(url, tokenizer=model, seed=0) as sampler:
        before = count("prefix_cache_queries"), count("prefix_cache_hits")
        assert len(sampler.sample(prompt, params, n=8).result()) == 8
        queries, hits = (count(f"prefix_cache_{x}") - y for x, y in zip(("queries", "hits"), before, strict=True))
    assert queries == 8 * 96
    assert hits >= 7 * 64


def test_a_server_without_a_trainer(url, model):
    """It names its model's folder; it is evaluated, and a gateway over it gives the same numbers."""
    from rlkit.envs import function
    from rlkit.evaluation import evaluate_sync
    from rlkit.gateway import Gateway

    params = rlkit.SamplingParams(max_tokens=4, stop=())
    with rlkit.sampler(url, seed=0) as sampler, Gateway(sampler, open=True, key="k") as gateway:
        tasks = function([{"prompt": "ab", "answer": "c"}], lambda text, answer: float(answer in text), name="letters")
        assert evaluate_sync(sampler, tasks, n=2, params=params, progress=False).scores["letters"].episodes == 2
        with rlkit.sampler(gateway.url, tokenizer=sampler.tokenizer, key="k") as again:
            assert np.abs(again.logprobs(TEXT).result() - sampler.logprobs(TEXT).result()).max() < 1e-4
            ids, _ = again.top_logprobs(TEXT, 3).result()
            assert ids.tolist() == sampler.top_logprobs(TEXT, 3).result()[0].tolist()


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        (
            rlkit.Lora(rank=16, train_unembed=False),
            "rank 16 is greater than max_lora_rank 8.*--max-lora-rank of",
        ),
        (rlkit.Lora(rank=4, train_unembed=True), r"does not support adapters on the output head.*train_unembed=False"),
        (rlkit.Lora(rank=4, target_modules=("embed_tokens",)), "expected linear modules"),
    ],
)
def test_what_it_cannot_serve_is_refused_at_connect(url, model, tmp_path, lora, sentence):
    """With the remedy."""
    with pytest.raises(rlkit.ConfigError, match=sentence):
        rlkit.connect("local", model=model, lora=lora, device="cpu", sampler=url, folder=tmp_path)


def test_a_folder_that_it_does_not_see_is_named(url, model, tmp_path, monkeypatch):
    """As where it runs on another machine."""
    from rlkit.backends.samplers import LoraAdapter

    monkeypatch.setattr(LoraAdapter, "save", lambda adapter, folder: None)
    with pytest.raises(rlkit.ConfigError, match=r"No adapter found.*see the folder of adapters \(Vllm\(folder=\)"):
        rlkit.connect("local", model=model, lora=LORA, device="cpu", sampler=url, folder=tmp_path)


def test_another_tokenizer_is_named(url, model):
    """By the tokens that it makes of a text."""
    import transformers as tf

    other = tf.AutoTokenizer.from_pretrained(model)
    other.add_tokens(["Hello"])
    with pytest.raises(rlkit.ConfigError, match="another tokenizer: in 'Hello"):
        rlkit.sampler(url, tokenizer=other)


def test_raw_logprobs_are_named(model, tmp_path):
    """Of a server that was started without processed_logprobs."""
    with serving(model, "--logprobs-mode", "raw_logprobs") as (url, _):
        with pytest.raises(rlkit.BackendError, match=r"top_k=1 .*--logprobs-mode processed_logprobs"):
            rlkit.sampler(url)
        with pytest.raises(rlkit.BackendError, match=r"sampled at temperature 0.7 differ by .*processed_logprobs"):
            rlkit.connect("local", model=model, lora=LORA, device="cpu", sampler=url, folder=tmp_path)


def test_a_server_that_is_killed_is_left_for_another(model, tmp_path):
    """Its requests move there, and later policies are sampled there."""
    from tests.backends.vllm.standin import Http, Standin

    params = rlkit.SamplingParams(max_tokens=4, stop=())
    with serving(model) as (url, process), Http(Standin(model)) as second:
        thread = threading.Thread(target=second.serve_forever, daemon=True)
        thread.start()
        sampler = Vllm(urls=[url, second.url], deadline=30.0)
        try:
            with rlkit.connect(
                "local", model=model, lora=LORA, device="cpu", sampler=sampler, folder=tmp_path
            ) as policy:
                step(policy)
                frozen = policy.sampler().result()
                futures = [frozen.sample(TEXT, params, seed=i) for i in range(4)]
                os.killpg(process.pid, signal.SIGKILL)
                samples = [future.result()[0] for future in futures]
                step(policy)
                samples += policy.sampler().result().sample(TEXT, params).result()
                assert [sample.version for sample in samples] == [1, 1, 1, 1, 2]
                trained = policy.forward([samples[-1].datum(0.0)]).result().selected[0]
                assert np.abs(trained - samples[-1].logprobs).max() < 1e-4
        finally:
            second.shutdown()
            thread.join()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_logprobs_are_the_trainers(model, tmp_path, dtype, tolerance):
    """On average in bfloat16, of four versions; killed in mid-batch, the server is an error at once."""
    options = {"lora": LORA, "seed": 0, "device": "cpu", "folder": tmp_path, "dtype": dtype}
    with rlkit.connect("local", model=model, sampler=started(), **options) as policy:
        datum = rlkit.Datum.supervised(TEXT[:1], TEXT[1:])
        for version in range(4):
            sampler = policy.sampler().result()
            assert sampler.version == version
            off = np.abs(sampler.logprobs(TEXT).result()[1:] - policy.forward([datum]).result().selected[0])
            assert (off.max() if dtype == "float32" else off.mean()) < tolerance
            step(policy)
        params = rlkit.SamplingParams(max_tokens=64, stop=())
        group = policy._engine._program._process.pid
        os.killpg(group, signal.SIGSTOP)  # it is to answer none of them
        futures = [sampler.sample(TEXT, params, n=2, seed=i) for i in range(4)]
        time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
        for future in futures:
            with pytest.raises(rlkit.BackendError, match="the server was killed by SIGKILL"):
                future.result()


def test_a_dropped_adapter_is_named(model, url, tmp_path, monkeypatch):
    """The server says that it loaded the adapter, and has another file."""
    from rlkit.backends.samplers import LoraAdapter

    options = {"lora": LORA, "seed": 0, "device": "cpu", "folder": tmp_path}
    with rlkit.connect("local", model=model, sampler=url, **options) as policy:
        step(policy)
        save = LoraAdapter.save

        def zeros(adapter, folder):
            save(LoraAdapter({name: x * 0 for name, x in adapter.tensors.items()}, adapter.config), folder)

        with monkeypatch.context() as patch:
            patch.setattr(LoraAdapter, "save", zeros)
            with pytest.raises(rlkit.BackendError, match="the server does not use the adapter"):
                policy.sampler().result()

        def louder(adapter, folder):
            save(
                LoraAdapter(adapter.tensors, {**adapter.config, "lora_alpha": 4 * adapter.config["lora_alpha"]}), folder
            )

        with monkeypatch.context() as patch:
            patch.setattr(LoraAdapter, "save", louder)
            with pytest.raises(rlkit.BackendError, match="or the adapter's scale differ"):
                policy.sampler().result()
        assert policy.sampler().result().version == 1
