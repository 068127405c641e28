"""The path of GPUs on the device "meta": nothing waits, nothing mixes devices, and a layer is few launches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.model.forward import LlamaForward  # noqa: E402
from rlkit.backends.local.sampling.kv_attention import CachedTokens  # noqa: E402
from rlkit.backends.local.sampling.kv_cache import KVCache  # noqa: E402
from rlkit.backends.local.training import flex_attention  # noqa: E402
from rlkit.backends.local.training.micro_batches import pack  # noqa: E402
from tests.backends.local import meta  # noqa: E402


def adapter_of(base, rank=4, device=meta.META):
    """An adapter on all products of the layers and the head."""
    pairs = {}
    for name, module in base.model.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            out, width = module.weight.shape
            pairs[name] = (
                torch.empty(rank, width, device=device, requires_grad=True),
                torch.empty(out, rank, device=device, requires_grad=True),
            )
    return pairs


def decoded(base, *, merge):
    """Operations of one decoding step of 3 rows."""
    forward, cache = LlamaForward(base), KVCache()
    forward.load(adapter_of(base), 0.5, merge=merge)
    cache.reserve(3, 40)
    tokens, positions = (torch.zeros(3, 1, dtype=torch.int64, device=meta.META) for _ in range(2))
    index = torch.arange(3, device=meta.META)
    with torch.no_grad():
        for watch in (None, meta.Watch()):  # keys and values get their memory in the first
            with watch or torch.no_grad():
                mask = cache.at(0, positions, 40)
                forward.logits(CachedTokens(tokens, positions, mask, cache, index))
    return watch.launched


def trained(base):
    """Operations of the forward and backward pass of a micro-batch, which is a tree."""
    forward = LlamaForward(base, adapter_of(base), 0.5)
    forward.prepare()
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 200, 10)
    data = [rlkit.Datum.supervised(prompt, rng.integers(3, 200, 5)) for _ in range(3)]
    (batch,) = pack(data, 1024)
    ids = torch.zeros(batch.index.size, dtype=torch.int64, device=meta.META)
    with meta.Watch() as watch:
        out = forward.outputs(batch, {"logprobs": ids}, None)["logprobs"]
        out.backward(torch.empty_like(out))
    return watch.launched


@pytest.fixture
def masked(monkeypatch):
    """Kernels that are one launch on a GPU are one here; attention over trees is masked."""
    meta.with_kernels(monkeypatch)
    monkeypatch.setattr(flex_attention, "_flex_works", lambda *_: False)


def layers(make, base, other):
    """Launches of one layer, from models of two and of three layers."""
    few, more = Counter(make(base)), Counter(make(other))
    return sum(more.values()) - sum(few.values()), more - few


@pytest.fixture(scope="module")
def bases(tiny, tmp_path_factory):
    """Qwen3 of two and of three layers."""
    import transformers

    folder = tmp_path_factory.mktemp("three")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny("qwen3"))
    config = model.config
    config.num_hidden_layers = 3
    config.layer_types = ["full_attention"] * 3
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny("qwen3")).save_pretrained(folder)
    return meta.meta_base(tiny("qwen3")), meta.meta_base(str(folder))


@pytest.mark.parametrize(("merge", "budget"), [(True, 18), (False, 26)])
def test_decoding_is_few_launches(bases, masked, merge, budget):
    """Norms, products, rotation, the KV cache, attention, the gated unit: of one layer, with adapters and without."""
    number, kinds = layers(lambda base: decoded(base, merge=merge), *bases)
    assert number <= budget, kinds


def test_training_is_few_launches(bases, masked):
    """Forward and backward with adapters, of one layer."""
    number, kinds = layers(trained, *bases)
    assert number <= 120, kinds
