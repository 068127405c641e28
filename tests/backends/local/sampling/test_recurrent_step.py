"""One token of a recurrent layer: the numbers of transformers' reference, written in place."""

from __future__ import annotations

import pytest

from tests.models.families import FAMILIES
from tests.models.family import build

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen  # noqa: E402

from rlkit.backends.local.model.base import load_base  # noqa: E402
from rlkit.backends.local.sampling._library import LibraryBatching, gated_delta_step  # noqa: E402


@torch.no_grad()
@pytest.mark.parametrize(("rows", "keys", "heads"), [(1, 1, 1), (5, 2, 2), (3, 2, 6)])
def test_gated_delta_step(rows, keys, heads):
    """Step by step it is the reference, with heads that share a key too."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(rows, heads, 8, 12, generator=generator)
    expected = state.clone()
    for _ in range(6):
        q, k = (torch.randn(rows, 1, keys, 8, generator=generator) for _ in range(2))
        v = torch.randn(rows, 1, heads, 12, generator=generator)
        g, beta = -torch.rand(rows, 1, heads, generator=generator), torch.rand(rows, 1, heads, generator=generator)
        out, after = gated_delta_step(q, k, v, g, beta, state)
        reference, expected = qwen.torch_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=expected, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert after is state
        assert torch.allclose(out, reference, atol=1e-5)
        assert torch.allclose(state, expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"])
def test_modules_take_it(kind, tmp_path, monkeypatch):
    """Decoding reads a state in place of the reference; the library's own functions stay as they are."""
    base = load_base(str(build(FAMILIES[kind], tmp_path)), "float32", "cpu")
    module = next(m for m in base.model.modules() if "GatedDeltaNet" in type(m).__name__)
    names = type(module).forward.__wrapped__.__globals__
    before = dict(names)
    decoder = LibraryBatching(base, 0, merge=False)
    cache = decoder.new_cache()
    decoder.decode(cache, base.probe.tokens[None, :5])
    monkeypatch.setitem(names, "torch_recurrent_gated_delta_rule", None)  # which is not what is called
    decoder.decode(cache, base.probe.tokens[None, 5:6])
    monkeypatch.undo()
    assert names == before
