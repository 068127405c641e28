"""Behind the API: a backend takes gradients where the loss has one, and gives all that it is asked for."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit.server import BackendModels
from rlkit.server._adapter import LossRow
from rlkit.server._losses import hosted

LOSSES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("cispo", {"clip_high_threshold": 1.05}),
    ("gspo", {}),
    ("dro", {}),
]


class Counted:
    """A backend that counts the policy's own tokens in what it is asked to do."""

    def __init__(self, inner):
        self._inner = inner
        self.calls = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def forward(self, data, *rest, **options):
        self.calls.append(("forward", [int(d.mask.sum()) for d in data]))
        return self._inner.forward(data, *rest, **options)

    def forward_backward(self, data, *rest, **options):
        self.calls.append(("forward_backward", [int(d.mask.sum()) for d in data]))
        return self._inner.forward_backward(data, *rest, **options)


def rows(name, *, own=True, everywhere=False):
    """Three rows whose loss is zero at the first tokens, as prompts are; the last one's is nowhere."""
    rng = np.random.default_rng(0)
    found = []
    for n, prompt in ((9, 5), (6, 2), (4, 4)):
        tokens = rng.integers(65, 91, n + 1)
        gate = np.arange(n) >= (0 if everywhere else prompt)
        gate &= own
        value = rng.normal(size=n)
        inputs = {"weights": value * gate}
        if name != "cross_entropy":
            inputs = {"logprobs": -3.0 + rng.normal(0, 0.3, n), "advantages": value * gate}
        if name == "gspo":
            inputs["sequence_ratio_mask"] = np.maximum(gate, np.arange(n) >= n - 1) * 1.0  # a mean of none has no value
        found.append(LossRow(tokens[:-1], tokens[1:], {key: x.astype(np.float32) for key, x in inputs.items()}))
    return found


def stepped(backend, given, loss, *, whole):
    """(outputs, logprobs after a step of gradient descent); ``whole`` gives the backend every token."""
    model = BackendModels(lambda **_: backend).create(rlkit.Lora())
    if whole:
        loss = type(loss)(loss.name, loss.function, loss.inputs, loss.optional, loss.matrix, loss.elementwise)
    outputs = model.run(given, loss, backward=True)
    model.step(rlkit.Adam(learning_rate=1e5, beta1=0.0, beta2=0.0, eps=1e8))
    data = [rlkit.Datum(np.append(r.tokens, r.targets[-1]), np.arange(r.tokens.size + 1) > 0) for r in given]
    return outputs, np.concatenate(backend.forward(data).result().selected)


@pytest.mark.parametrize("backend", ["toy", "local"])
@pytest.mark.parametrize(("name", "config"), LOSSES)
def test_the_gradient_is_that_of_all_tokens(backend, name, config, tiny):
    """Masked or not: what is left out has none. Values, logprobs of all tokens and metrics are the same, too."""
    options = {"model": tiny("llama"), "device": "cpu"} if backend == "local" else {}
    found = []
    for whole in (False, True):
        with rlkit.connect(backend, seed=0, lora=rlkit.Lora(rank=4, seed=1), **options) as made:
            found.append(stepped(made, rows(name), hosted(name, config), whole=whole))
    ((ours, metrics), after), ((theirs, other_metrics), expected) = found
    assert metrics == pytest.approx(other_metrics, rel=1e-5, abs=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_allclose(a[key], b[key], atol=1e-5)
    np.testing.assert_allclose(after, expected, atol=2e-5)


@pytest.mark.parametrize(("name", "config"), LOSSES)
def test_where_the_gradient_is_taken(name, config):
    """Only where the loss has one; the rest is scored in a pass without. dro pulls everywhere."""
    with rlkit.connect("toy", seed=0) as toy:
        counted = Counted(toy)
        model = BackendModels(lambda **_: counted).create(rlkit.Lora())
        model.run(rows(name), hosted(name, config), backward=True)
        chosen = [9, 6, 4] if name == "dro" else [4, 4, 1] if name == "gspo" else [4, 4, 0]
        rest = [n - k for n, k in zip((9, 6, 4), chosen, strict=True)]
        assert counted.calls == [("forward", rest)] * (name != "dro") + [("forward_backward", chosen)]
        counted.calls.clear()
        model.run(rows(name, everywhere=True), hosted(name, config), backward=True)
        assert counted.calls == [("forward_backward", [9, 6, 4])]
        counted.calls.clear()
        model.run(rows(name), hosted(name, config), backward=False)
        assert counted.calls == [("forward", [9, 6, 4])]


@pytest.mark.parametrize("name", ["cross_entropy", "ppo"])
def test_a_gradient_of_zeros_is_one(name):
    """A batch whose weights or advantages are all 0 is followed by a step, as on the service."""
    with rlkit.connect("toy", seed=0) as toy:
        model = BackendModels(lambda **_: toy).create(rlkit.Lora())
        _, metrics = model.run(rows(name, own=False), hosted(name, {}), backward=True)
        assert metrics["loss:sum"] == 0.0
        assert model.step(rlkit.Adam())["grad_norm:mean"] == 0.0
