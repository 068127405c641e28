"""The path of GPUs on the device "meta": nothing waits, nothing mixes devices, and a layer is few launches."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.training import _attention  # noqa: E402
from tests.backends.local import meta  # noqa: E402
from tests.models.build import build  # noqa: E402


@pytest.fixture
def masked(monkeypatch):
    """Kernels that are one launch on a GPU are one here; attention over trees is masked."""
    meta.with_kernels(monkeypatch)
    monkeypatch.setattr(_attention, "_flex_works", lambda *_: False)


def layers(make, model, other):
    """Launches of one layer, from models of two and of three layers."""
    few, more = Counter(make(model)), Counter(make(other))
    return sum(more.values()) - sum(few.values()), more - few


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Qwen3 of two and of three layers."""
    folder = tmp_path_factory.mktemp("models")
    return [str(build("qwen3", folder / str(n), layers=n)) for n in (2, 3)]


@pytest.mark.parametrize(("merge", "budget"), [(True, 32), (False, 44)])
def test_decoding_is_few_launches(models, masked, merge, budget):
    """Norms, products, rotation, the KV cache, attention, the gated unit: of one layer, with adapters and without."""
    number, kinds = layers(lambda model: meta.decode(meta.meta_base(model), meta.Watch(), merge=merge), *models)
    assert number <= budget, kinds


def test_training_is_few_launches(models, masked):
    """Forward and backward with adapters, of one layer."""
    number, kinds = layers(lambda model: meta.train(meta.meta_training(model), meta.Watch()), *models)
    assert number <= 180, kinds


def test_what_waits_or_mixes_devices_is_refused():
    """The watch bites: reading a number, looking for places, a tensor of the CPU beside one of the device."""
    x = torch.zeros(3, device=meta.META)
    for wrong in (lambda: x.add(torch.zeros(3)), lambda: x.cpu(), lambda: x.sum().item()):
        with pytest.raises((AssertionError, RuntimeError)), meta.Watch():
            wrong()
    with meta.Watch() as watch:
        (x + 1).view(3, 1).expand(3, 2).mul(torch.tensor(2.0))
    assert watch.names == ["add", "mul"]
