"""Saved policies to sample from cost what their adapters do, and so many are kept."""

from __future__ import annotations

import functools
import gc
import threading

import torch

import rlkit
from rlkit.backends.toy import ToyBackend
from rlkit.testing import FakeTinker
from tests.server.sdk import datum, prompt, tinker, types

PARAMS = types.SamplingParams(max_tokens=3, seed=1, stop=[])


def draw(sampler):
    return sampler.sample(prompt([65]), 1, PARAMS).result().sequences[0].tokens


def live_bytes():
    """Return the bytes of all live tensors, counting shared memory once."""
    gc.collect()
    return sum(
        {
            x.data_ptr(): x.nbytes
            for x in gc.get_objects()
            if issubclass(type(x), torch.Tensor) and x.layout is torch.strided
        }.values()
    )


def test_saved_samplers(tiny, tmp_path):
    """Each is the policy that was saved, and costs less than two adapters, and not a thread more, however many."""
    model, used, threads, scores = tiny("llama"), [], [], set()
    with rlkit.serve("local", model=model, names=["it"], folder=tmp_path, seed=0) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        training = service.create_lora_training_client("it", rank=64).result()
        for step in range(8):
            training.forward_backward([datum([5, 6, 7, 8], weights=1.0)], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.001)).result()
            path = training.save_weights_for_sampler(f"step-{step}").result().path
            sampler = service.create_sampling_client(model_path=path).result()
            frozen = training.save_weights_and_get_sampling_client().result() if step == 0 else sampler
            found = [x.compute_logprobs(prompt([5, 6, 7, 8])).result() for x in (sampler, frozen)]
            assert found[0] == found[1]
            assert draw(sampler) == draw(frozen)
            scores.add(sum(found[0][1:]))
            if step in (1, 7):
                used.append(live_bytes())
                threads.append(sum(thread.name == "rlkit-local" for thread in threading.enumerate()))
        state, snapshot = (
            server.service.saved.find(path),
            server.service.samplers[sampler._sampling_session_id].snapshot,
        )
        service.close("success").result()
        adapter, saved = snapshot.sampler.nbytes, snapshot.owner.saved_sampler(state.handle).result()
        assert (saved.nbytes, saved.version) == (adapter, 8)
        saved.close()
        assert saved.nbytes == 0
        assert 0.5 * adapter < (used[1] - used[0]) / 6 < 2 * adapter, (used, adapter)
        assert threads == [2, 2]  # the base's, and the policy's
        assert len(scores) == 8  # each is its own step's policy


def test_backends_that_need_a_trainer_for_each(tmp_path):
    """It is made when its state is first sampled from, and as long as it is kept it is the only one."""

    made = []

    class Plain(ToyBackend):
        saved_sampler = None

        def __init__(self, **options):
            made.append(self)
            super().__init__(**options)

    with FakeTinker(models=functools.partial(Plain, folder=tmp_path), max_samplers=4) as fake:
        client = fake.service_client()
        training = client.create_lora_training_client("toy").result()
        for k in range(7):
            path = training.save_weights_for_sampler(f"s{k}").result().path
            sampler = client.create_sampling_client(model_path=path).result()
            assert draw(sampler) == draw(sampler)
        assert len(made) == 2 + 7
        assert [s.snapshot is not None for s in fake.service.samplers.values()] == [False] * 3 + [True] * 4
