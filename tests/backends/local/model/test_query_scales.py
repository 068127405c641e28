"""Llama 4's scaled queries: by positions, behind the adapter, whether that is merged or not."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from tests.models.families import FAMILIES
from tests.models.family import build

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
from rlkit.backends.local.model.base import load_base  # noqa: E402
from rlkit.backends.local.model.forward import scale_queries_by_position  # noqa: E402


@pytest.fixture(scope="module")
def llama4(tmp_path_factory):
    return build(FAMILIES["llama4_text"], tmp_path_factory.mktemp("llama4"))


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_of_queries_are_scaled_too(llama4, tmp_path, merge):
    """The sampler gives what the trainer gives, in unequal rows, after a step that moves the adapters of queries."""
    lora = rlkit.Lora(rank=4, target_modules=("q_proj",))
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 60, n) for n in (70, 20, 41)]
    data = [rlkit.Datum.supervised(text[:2], text[2:]) for text in texts]
    with rlkit.connect("local", model=llama4, lora=lora, seed=0, device="cpu", merge=merge, folder=tmp_path) as policy:
        before = policy.forward(data).result().selected
        for _ in range(2):
            policy.forward_backward(data, "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        trained = policy.forward(data).result().selected
        sampler = policy.sampler().result()
        futures = [sampler.logprobs(text) for text in texts]
        for datum, own, first, future in zip(data, trained, before, futures, strict=True):
            assert np.abs(own - first).max() > 0.01
            np.testing.assert_allclose(datum.select(future.result()), own, atol=1e-4)


def test_the_scale_is_the_librarys(llama4):
    """One row from its beginning, where columns are positions; at later positions it is another."""
    base = load_base(str(llama4), "float32", "cpu")
    ours = base.tree()
    scale_queries_by_position(ours)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 60, (1, 60)))
    with torch.no_grad():
        expected = base.model(input_ids=tokens).logits
        assert torch.allclose(ours(input_ids=tokens).logits, expected, atol=1e-5)
        later = torch.arange(60)[None] + 20
        assert not torch.allclose(ours(input_ids=tokens, position_ids=later).logits, expected, atol=1e-2)
