"""Logprobs whose backward pass needs no logits: value and gradients are those of autograd, at any temperature."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rlkit.backends.local.model import output_head as module  # noqa: E402

N, HIDDEN, V, RANK = 11, 6, 17, 3


@pytest.mark.parametrize("kept", [0, 2**26])
@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("warm", [True, False])
def test_gradients(monkeypatch, kept, chunk, adapter, warm):
    """Whether probabilities are kept or computed again, in one chunk or three, with an adapter and a temperature."""
    monkeypatch.setattr(module, "KEPT", kept)
    monkeypatch.setattr(module, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    weight, hidden, grad = random(V, HIDDEN), random(N, HIDDEN), random(N)
    pair = (random(RANK, HIDDEN), random(V, RANK)) if adapter else None
    ids = torch.randint(0, V, (N,), generator=generator)
    temperatures = torch.rand(N, generator=generator) + 0.5 if warm else None

    def gradients(compute, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, *(pair or ()))]
        found = compute(*leaves)
        return [found.detach(), *torch.autograd.grad(found, leaves, grad.to(dtype))]

    def plain(x, a=None, b=None):
        logits = x @ weight.double().t()
        if a is not None:
            logits = logits + 0.5 * (x @ a.t()) @ b.t()
        if temperatures is not None:
            logits = logits / temperatures.double()[:, None]
        return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]

    def ours(x, *adapted):
        return module.Unembedding(weight, adapted or None, 0.5).logprobs(x, ids, temperatures)

    for found, expected in zip(gradients(ours, torch.float32), gradients(plain, torch.float64), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
