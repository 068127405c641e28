"""The Tinker backend conforms, over the real SDK and a service in this process, and learns as the local backend."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit.advantages import grpo
from rlkit.losses import with_kl
from rlkit.testing import BackendConformance, FakeTinker
from tests.backends.tinker.conftest import connect

pytest.importorskip("tinker", reason="needs the extra tinker")
LORA = rlkit.Lora(rank=4, seed=1, train_unembed=True)  # as Tinker has it; the model ties its head


class TestTinker(BackendConformance):
    recovers = False
    tempered = False
    offers = ()

    @pytest.fixture(autouse=True)
    def _service(self):
        from rlkit.server._models import toy_models

        with FakeTinker(seed=0, models=toy_models(max_length=128)) as self.fake:
            yield

    def make(self, folder, **options):
        return connect(self.fake, **{"seed": None, **options})


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
            rewards.append([float(np.mean(s.tokens % 3 == 0)) for s in samples])
            for sample, a in zip(samples, grpo(np.array(rewards[-1])), strict=True):
                lp = reference.logprobs(np.concatenate([sample.prompt, sample.tokens])).result()
                data.append(sample.datum(a, reference_logprobs=lp, weights=1 / 24))
        fb = policy.forward_backward(data, loss)
        norm = policy.optim_step(rlkit.Adam(learning_rate=3e-3, grad_clip_norm=1.0)).result()["grad_norm:mean"]
        tokens = np.concatenate([s.tokens for g in groups for s in g.result()])
        seen.append((fb.result().metrics["loss:sum"], norm, np.mean(rewards), fb.result().selected, tokens))
    return seen


@pytest.mark.parametrize("loss", ["ppo", "topr", with_kl("ppo", 0.05)], ids=["ppo", "topr", "with_kl"])
def test_the_curve_is_the_local_one(tiny, tmp_path, loss):
    options = {"model": tiny("llama"), "seed": 0, "folder": tmp_path}
    with rlkit.connect("local", lora=LORA, **options) as local:
        ours = loop(local, loss)

    def models(**others):
        return rlkit.connect("local", **options, **others)

    with FakeTinker(seed=0, models=models, names=("m",)) as fake, connect(fake, model="m", lora=LORA) as policy:
        theirs = loop(policy, loss)
    for a, b in zip(ours, theirs, strict=True):
        assert a[4].tolist() == b[4].tolist()
        assert max(np.abs(x - y).max() for x, y in zip(a[3], b[3], strict=True)) < 1e-5
        assert a[:3] == pytest.approx(b[:3], rel=1e-4, abs=1e-6)
    assert ours[-1][2] != ours[0][2]
