"""Saved policies to sample from cost what their adapters do, and so many are kept."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.backends.protocol import SavedSamplers
from rlkit.testing import FakeTinker
from tests.server.sdk import datum, prompt

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

PARAMS = types.SamplingParams(max_tokens=3, seed=1, stop=[])


def resident():
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def local_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rlkit-local"]


@pytest.fixture(scope="module")
def wide(tiny, tmp_path_factory):
    """A model whose adapters of rank 128 are large beside the noise of a measurement: 16 MB each."""
    import torch
    import transformers as tf

    folder = tmp_path_factory.mktemp("wide")
    tf.AutoTokenizer.from_pretrained(tiny("llama")).save_pretrained(folder)
    config = tf.AutoConfig.from_pretrained(tiny("llama"))
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64}
    for name, value in shape.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tf.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_of_saved_samplers(wide, tmp_path):
    """Less than twice the adapter each, and not a thread more, for a loop that saves a sampler at every step."""
    with rlkit.serve("local", model=wide, names=["wide"], folder=tmp_path, seed=0) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        training = service.create_lora_training_client("wide", rank=128).result()
        data = [datum([5, 6, 7, 8], weights=1.0)]
        measured, texts = [], []
        for step in range(10):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.001)).result()
            path = training.save_weights_for_sampler(f"step-{step}").result().path
            sampler = service.create_sampling_client(model_path=path).result()
            scored = sampler.compute_logprobs(prompt([5, 6, 7, 8])).result()
            sampler.sample(prompt([5, 6]), 1, PARAMS).result()
            texts.append(sum(scored[1:]))
            gc.collect()
            measured.append((resident(), len(local_threads())))
            kept = server.service.samplers[sampler._sampling_session_id].snapshot
        adapter = kept.sampler.nbytes
        assert adapter > 10 * 2**20
        grown = (measured[-1][0] - measured[1][0]) / 8
        assert grown < 2 * adapter, (grown, adapter)
        assert measured[-1][1] == measured[1][1] == 2  # the base's, and the policy's
        assert len(set(texts)) == 10  # each is its own step's policy
        service.close("success").result()


@pytest.mark.parametrize("backend", ["toy", "local"])
def test_a_saved_sampler_is_the_policy_that_was_saved(backend, tiny, tmp_path):
    """Its samples and scores are those of a sampler that was taken then; training and closing do not touch it."""
    options = {"model": tiny("llama"), "device": "cpu"} if backend == "local" else {}
    data = [rlkit.Datum.supervised([5, 6], [7, 8, 9])]
    params = rlkit.SamplingParams(max_tokens=6, stop=())
    with rlkit.connect(backend, seed=0, folder=tmp_path, **options) as policy:
        assert isinstance(policy, SavedSamplers)
        for _ in range(2):
            policy.forward_backward(data, "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        then, path = policy.sampler().result(), policy.save("a", optimizer=False).result()
        with rlkit.connect(backend, seed=1, folder=tmp_path, **options) as other:
            saved = other.saved_sampler(path).result()
            assert saved.version == then.version == 2
            assert 0 < saved.nbytes == then.nbytes
            np.testing.assert_array_equal(
                saved.logprobs([5, 6, 7, 8, 9]).result(), then.logprobs([5, 6, 7, 8, 9]).result()
            )
            pair = [s.sample([5, 6], params, n=2, seed=3).result() for s in (saved, then)]
            for a, b in zip(*pair, strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
            assert other.version == 0
            with pytest.raises(rlkit.CheckpointError):
                other.saved_sampler(str(tmp_path / "nothing")).result()
            saved.close()
            assert saved.nbytes == 0


def test_another_models_adapter(tiny, tmp_path):
    """Is refused with the name that does not fit."""
    with rlkit.connect("local", model=tiny("qwen3"), device="cpu", folder=tmp_path, seed=0) as policy:
        path = policy.save("a").result()
    with (
        rlkit.connect("local", model=tiny("gpt2"), device="cpu", folder=tmp_path, seed=0) as other,
        pytest.raises(rlkit.CheckpointError, match="another model"),
    ):
        other.saved_sampler(path).result()


class Plain:
    """A backend that cannot sample from saved states beside its own."""

    made = 0

    def __init__(self, inner):
        Plain.made += 1
        self._inner = inner

    def __getattr__(self, name):
        if name == "saved_sampler":
            raise AttributeError(name)
        return getattr(self._inner, name)


def is_kept(fake):
    return [s.snapshot is not None for s in fake.service.samplers.values()]


def test_samplers_are_bounded():
    """Those that were used longest ago are dropped, whoever made them; saved ones are loaded again, the base stays."""
    with FakeTinker(max_samplers=3) as fake:
        clients = [fake.service_client() for _ in range(2)]
        training = clients[0].create_lora_training_client("toy").result()
        base = clients[0].create_sampling_client(base_model="toy").result()
        path = training.save_weights_for_sampler("a").result().path
        named = clients[1].create_sampling_client(model_path=path).result()
        reference = training.save_weights_and_get_sampling_client().result()
        expected = named.sample(prompt([65]), 1, PARAMS).result().sequences[0].tokens
        base.sample(prompt([65]), 1, PARAMS).result()
        others = []
        for _ in range(5):
            others.append(training.save_weights_and_get_sampling_client().result())
            reference.sample(prompt([65]), 1, PARAMS).result()
        assert len(fake.service.samplers) == 5  # three, and two that can be loaded again
        assert sum(is_kept(fake)) == 4  # of them the base
        assert named.sample(prompt([65]), 1, PARAMS).result().sequences[0].tokens == expected
        for sampler in (base, reference, others[-1]):
            sampler.sample(prompt([65]), 1, PARAMS).result()
        with pytest.raises(tinker.NotFoundError, match="was dropped.* save it under a name"):
            others[0].sample(prompt([65]), 1, PARAMS).result()


def test_backends_that_need_a_trainer_for_each(tmp_path):
    """It is made when its state is first sampled from, and as long as it is kept it is the only one."""
    Plain.made = 0
    with FakeTinker(models=lambda **o: Plain(rlkit.connect("toy", folder=tmp_path, **o)), max_samplers=4) as fake:
        client = fake.service_client()
        training = client.create_lora_training_client("toy").result()
        for k in range(7):
            path = training.save_weights_for_sampler(f"s{k}").result().path
            sampler = client.create_sampling_client(model_path=path).result()
            for _ in range(2):
                sampler.sample(prompt([65]), 1, PARAMS).result()
        assert Plain.made == 2 + 7
        assert is_kept(fake) == [False] * 3 + [True] * 4
