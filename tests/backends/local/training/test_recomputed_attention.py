"""Attention that is computed again in the backward pass: what the library's own attention gives, with less kept."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from tests.backends.local import white_box
from tests.models.families import FAMILIES
from tests.models.family import build

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.attention import tree as recomputed  # noqa: E402
from rlkit.backends.local.attention.tree import Window, narrowed  # noqa: E402


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 7, "masked"])
def test_it_is_the_attention_of_its_definition(softcap, has_sinks, window, monkeypatch):
    """Output and all gradients, in float64, a few queries at a time."""
    monkeypatch.setattr(recomputed, "RECOMPUTED_QUERIES", 8)
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v, sinks = random(2, 6, 21, 8), random(2, 2, 21, 8), random(2, 2, 21, 8), random(6)
    positions = torch.arange(21)
    seen = (positions <= positions[:, None])[None, None].expand(2, 1, -1, -1)
    mask = None if window is None else seen
    if window == 7:
        seen = mask = narrowed(seen, Window(7), positions.expand(2, -1))
    given = {"scaling": 0.3, "softcap": softcap, "s_aux": sinks if has_sinks else None}
    found, _ = recomputed.recomputed_attention(None, q, k, v, mask, **given)

    keys, values = (x.repeat_interleave(3, dim=1) for x in (k, v))
    scores = 0.3 * q @ keys.transpose(-1, -2)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    exps = scores.exp() * seen
    total = exps.sum(-1, keepdim=True) + (sinks.exp().view(1, 6, 1, 1) if has_sinks else 0.0)
    expected = (exps / total @ values).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-12)
    leaves, above = [q, k, v, *([sinks] if has_sinks else [])], torch.randn_like(expected)
    both = (torch.autograd.grad(out, leaves, above) for out in (found, expected))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*both, strict=True))


@pytest.mark.filterwarnings("ignore:.*its experts get no adapter")
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_trees_of_models_without_a_kernel(name, tmp_path, monkeypatch):
    """The gradient of a group is that of rows by the library's own attention; each block is computed twice."""
    monkeypatch.setattr(recomputed, "RECOMPUTED_QUERIES", 64)
    attend, blocks = recomputed._attend, []
    monkeypatch.setattr(recomputed, "_attend", lambda q, *others: blocks.append(q.shape[2]) or attend(q, *others))
    options = {"lora": rlkit.Lora(rank=4, train_unembed=True), "seed": 0, "device": "cpu", "micro_batch_tokens": 1000}
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 290, 40)
    data = [rlkit.Datum.supervised(prompt, rng.integers(3, 290, 30)) for _ in range(8)]
    with rlkit.connect("local", model=build(FAMILIES[name], tmp_path), **options) as policy:
        for parameter in white_box.parameters(policy).values():
            parameter.data.add_(torch.from_numpy(0.02 * rng.standard_normal(parameter.shape)).to(parameter))
        blocks.clear()  # of the probe
        tree = _gradient(policy, data)
        assert len(blocks) == 2 * 2 * 5  # layers, and blocks of 40 + 8 * 29 tokens
        white_box.trained(policy).config._attn_implementation = "eager"
        *_, rows = (_gradient(policy, data) for _ in white_box.forwards(policy))
        assert len(blocks) == 20
        assert (tree - rows).norm() < 1e-5 * rows.norm()


def _gradient(policy, data):
    policy.forward_backward(data, "cross_entropy").result()
    gradient = torch.cat([p.grad.flatten() for p in white_box.parameters(policy).values()])
    policy.discard().result()
    return gradient
