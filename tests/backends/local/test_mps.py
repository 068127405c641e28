"""What the GPU of a Mac lacks is not asked of it, above all float64: played by "meta", and a mode that refuses it."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rlkit.backends import _drawing  # noqa: E402
from rlkit.backends.local.model.base import load_base  # noqa: E402
from rlkit.backends.local.model.probe import logits_at  # noqa: E402
from rlkit.backends.local.training import _attention  # noqa: E402
from rlkit.backends.local.training.micro_batches import pack  # noqa: E402
from tests.backends.local import meta  # noqa: E402
from tests.models.build import build  # noqa: E402

MPS = torch.device("mps", 0)


class NoFloat64(TorchDispatchMode):
    """Refuses every operation that gives float64."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                raise TypeError(f"{operation} gives float64, which MPS does not have")
        return out


class OnMps:
    """Logits of a device that is not there: all that may be asked of them is to come to the CPU."""

    def __init__(self, values):
        self.device, self._values = MPS, values

    def float(self):
        return self

    def cpu(self):
        return self._values


def test_the_mode_bites():
    """As a Mac would."""
    with pytest.raises(TypeError, match="float64"), NoFloat64():
        torch.zeros(3).double()


@pytest.mark.parametrize("merge", [True, False])
def test_layers_are_computed_without_float64(tmp_path, monkeypatch, merge):
    """Decoding and training through the path of devices other than CPUs."""
    meta.with_kernels(monkeypatch)
    monkeypatch.setattr(_attention, "_flex_works", lambda *_: False)
    model = str(build("qwen3", tmp_path / "model"))
    base, forward = meta.meta_base(model, "float32"), meta.meta_training(model, "float32")
    with NoFloat64():
        assert meta.decode(base, meta.Watch(), merge=merge)
        assert meta.train(forward, meta.Watch())


def test_a_step_of_the_optimizer_needs_no_float64(tiny):
    """Nor does what is computed before it, here in the thread that the mode watches."""
    base = load_base(tiny("llama"), "float32", "cpu")
    with NoFloat64():
        logits_at(base.model, base.text[None], np.arange(base.text.size))
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], fused=True)
        weight.grad = torch.ones(3)
        torch.nn.utils.clip_grads_with_norm_([weight], 1.0, torch.nn.utils.get_total_norm([weight.grad]))
        optimizer.step()


def test_tokens_are_drawn_on_the_cpu():
    """Where mass is added up in float64, so that the same tokens come out as on a CPU."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    params = [rlkit.SamplingParams(max_tokens=1, **x) for x in ({}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0})]
    uniforms = np.random.default_rng(0).random(4)
    expected = _drawing.draw(logits, params, uniforms)
    for found, right in zip(_drawing.draw(OnMps(logits), params, uniforms), expected, strict=True):
        assert np.array_equal(found, right)


def test_no_compiled_attention_is_tried(monkeypatch):
    """Masked attention is taken at once, without a warning."""

    def tried(*_):
        raise AssertionError("a compiler was asked")

    monkeypatch.setattr(_attention, "_flex_works", tried)
    monkeypatch.setattr(_attention, "to_device", lambda array, _: torch.from_numpy(array))
    (batch,) = pack([rlkit.Datum.supervised([3, 4], [5])], 10)
    found = _attention.gpu_attention(batch.runs, 4, 2, 16, torch.float32, MPS)
    assert isinstance(found, _attention.MaskedAttention)
