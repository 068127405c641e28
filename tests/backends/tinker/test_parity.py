"""One loop, on the local backend and through the service over a local backend: the same curve."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit.advantages import grpo
from rlkit.losses import with_kl
from rlkit.testing import FakeTinker
from tests.models.build import build

pytest.importorskip("tinker", reason="needs the extra tinker")
LORA = rlkit.Lora(rank=4, seed=1, train_unembed=True)  # as Tinker has it; the model ties its head


def loop(policy, loss, steps=10):
    """A user's loop: it does not know which backend it has. Returns everything that it saw."""
    prompts = [policy.tokenizer.encode(text) for text in ("hello 12", "abc")]
    params = rlkit.SamplingParams(max_tokens=6, stop=())
    seen = []
    reference = policy.base_sampler().result()
    for step in range(steps):
        sampler = policy.sampler().result()
        groups = [sampler.sample(p, params, n=4, seed=100 * step + k) for k, p in enumerate(prompts)]
        data, rewards = [], []
        for group in groups:
            samples = group.result()
            r = np.array([float(np.mean(s.tokens % 3 == 0)) for s in samples])
            rewards.append(r.mean())
            for sample, a in zip(samples, grpo(r), strict=True):
                lp = reference.logprobs(np.concatenate([sample.prompt, sample.tokens])).result()
                data.append(sample.datum(a, reference_logprobs=lp, weights=1 / 24))
        fb = policy.forward_backward(data, loss)
        op = policy.optim_step(rlkit.Adam(learning_rate=3e-3, grad_clip_norm=1.0))
        found = fb.result()
        tokens = np.concatenate([s.tokens for g in groups for s in g.result()])
        norm = op.result()["grad_norm:mean"]
        seen.append((found.metrics["loss:sum"], norm, np.mean(rewards), found.selected, tokens))
    return seen


@pytest.mark.parametrize("loss", ["ppo", "topr", with_kl("ppo", 0.05)], ids=["ppo", "topr", "with_kl"])
def test_the_curve_is_the_local_one(tmp_path, loss):
    model = str(build("llama", tmp_path / "model"))
    with rlkit.connect("local", model=model, lora=LORA, seed=0, folder=tmp_path) as local:
        ours = loop(local, loss)

    def models(**options):
        return rlkit.connect("local", model=model, seed=0, folder=tmp_path, **options)

    with FakeTinker(seed=0, models=models, names=("m",)) as fake:
        where = {"base_url": fake.base_url, "api_key": fake.api_key}
        with rlkit.connect("tinker", model="m", lora=LORA, seed=0, deadline=60.0, **where) as policy:
            theirs = loop(policy, loss)
    for a, b in zip(ours, theirs, strict=True):
        assert a[4].tolist() == b[4].tolist()
        assert max(np.abs(x - y).max() for x, y in zip(a[3], b[3], strict=True)) < 1e-5
        assert a[:3] == pytest.approx(b[:3], rel=1e-4, abs=1e-6)
    assert ours[-1][2] != ours[0][2]
