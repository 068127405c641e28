"""Stages that begin with what other runs saved."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit.runs import Run
from tests.models.build import build

pytest.importorskip("torch")


@pytest.fixture(params=["toy", "local", "tinker"])
def options(request, tmp_path):
    if request.param == "toy":
        yield {"name": "toy"}
    elif request.param == "local":
        pytest.importorskip("peft")
        yield {"name": "local", "model": str(build("llama", tmp_path / "model")), "lora": rlkit.Lora(rank=4)}
    else:
        pytest.importorskip("tinker", reason="needs the extra tinker")
        from rlkit.testing import FakeTinker

        with FakeTinker(seed=0) as fake:
            yield {"name": "tinker", "model": "toy", "base_url": fake.base_url, "api_key": fake.api_key}


def test_stages(tmp_path, options):
    """A stage takes another's weights, with a fresh optimizer or its own, and is resumed as itself, reference too."""
    data = [rlkit.Datum.supervised([65], [66, 67])]

    def step(policy):
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        return policy.forward(data).result().selected[0]

    with Run(tmp_path / "sft", seed=1, trackers=()) as run:
        policy = run.connect(**options)
        for _ in run.steps(3):
            taught = step(policy)
            record = run.checkpoint(policy)
        further = step(policy)
    path = record.policy("policy")
    where = {name: value for name, value in options.items() if name not in ("lora", "model")}
    own = {name: value for name, value in where.items() if name != "name"}
    with rlkit.runs.sampler(tmp_path / "sft", **own) as newest, rlkit.runs.sampler(path, **own) as saved:
        assert np.allclose(saved.logprobs(data[0].tokens).result()[1:], taught, atol=1e-5)
        assert np.allclose(newest.logprobs(data[0].tokens).result()[1:], taught, atol=1e-5)
    Run(tmp_path / "empty", trackers=()).close()
    with pytest.raises(rlkit.CheckpointError, match="empty has no complete checkpoint with a 'policy'"):
        rlkit.runs.sampler(tmp_path / "empty", **own)
    with pytest.raises(rlkit.ConfigError, match=r"is the folder of a run; expected .* rlkit.runs.sampler opens"):
        rlkit.sampler(**where, path=str(tmp_path / "sft"))

    with Run(tmp_path / "further", seed=2, trackers=()) as run:
        policy = run.connect(**options, resume_from=path)
        assert policy.version == 3
        assert np.array_equal(step(policy), further)  # the optimizer's moments came with the weights

    for again in (False, True):  # the second time it goes on from its own
        with Run(tmp_path / "rl", seed=3, trackers=()) as run:
            policy = run.connect(**options, init_from=path)
            assert policy.version == (2 if again else 0)
            before = policy.forward(data).result().selected[0]
            assert np.array_equal(before, taught) == (not again)
            kept = run.value("reference", lambda p=policy: p.save("reference", sampler=True).result())
            with rlkit.sampler(**where, path=kept) as reference:
                assert np.allclose(reference.logprobs(data[0].tokens).result()[1:], taught, atol=1e-5)
            for _ in run.steps(2):
                moved = step(policy)
                if run.step == 0 and not again:
                    assert not np.array_equal(moved, further)  # its optimizer began anew
                run.checkpoint(policy)


def test_what_a_policy_can_take_comes_back(tmp_path):
    """The longest sequence is that of the policy, however it is opened; another one can be asked for."""
    with rlkit.Run(tmp_path, seed=0, trackers=()) as run:
        run.checkpoint(run.connect("toy", max_length=2048))
    with rlkit.Run(tmp_path, trackers=()) as run:
        assert run.connect("toy").max_length == 2048
    with rlkit.runs.sampler(tmp_path) as sampler, rlkit.runs.sampler(tmp_path, max_length=512) as short:
        prompt = [1] * 1500
        assert sampler.max_length == 2048
        assert sampler.sample(prompt, rlkit.SamplingParams(max_tokens=1), n=1).result()[0].prompt.size == 1500
        assert short.max_length == 512
    (saved,) = (tmp_path / "policies").iterdir()
    with rlkit.connect("toy", init_from=str(saved)) as begun:
        assert begun.max_length == 2048
