"""Behind the API: what a backend is asked for."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit

pytest.importorskip("tinker")
from rlkit.server._losses import hosted
from rlkit.server._models import Models, Row
from tests.each import for_each

LOSSES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("cispo", {"clip_high_threshold": 1.05}),
    ("gspo", {}),
]


def rows(name, *, own=True):
    """Two rows whose loss is zero at the first tokens, as prompts are."""
    rng = np.random.default_rng(0)
    found = []
    for n, prompt in ((9, 5), (6, 2)):
        tokens = rng.integers(65, 91, n + 1)
        gate = own & (np.arange(n) >= prompt)
        value = rng.normal(size=n)
        inputs = {"weights": value * gate}
        if name != "cross_entropy":
            inputs = {"logprobs": -3.0 + rng.normal(0, 0.3, n), "advantages": value * gate}
        if name == "gspo":
            inputs["sequence_ratio_mask"] = (np.arange(n) >= prompt) * 1.0
        found.append(Row(tokens[:-1], tokens[1:], {key: x.astype(np.float32) for key, x in inputs.items()}))
    return found


@for_each("backend", ["toy", "local"])
@for_each(("name", "config"), LOSSES)
def test_shifted_and_given_targets_are_the_same(backend, name, config, tiny):
    """Rows whose targets are the next tokens are ordinary datums; beside one with other targets they are given ones."""
    options = {"model": tiny("llama"), "device": "cpu"} if backend == "local" else {}
    found, given = [], rows(name)
    nothing = {key: np.zeros(2, np.float32) for key in given[0].inputs} | {
        "sequence_ratio_mask": np.ones(2, np.float32)
    }
    other = Row(np.array([65, 66]), np.array([70, 71]), {key: nothing[key] for key in given[0].inputs})
    for data in (given, [*given, other]):
        with rlkit.connect(backend, seed=0, lora=rlkit.Lora(rank=4, seed=1), **options) as made:
            model = Models(lambda made=made, **_: made).create(rlkit.Lora())
            forward, _ = model.run(data, hosted(name, config), backward=False)
            backward, metrics = model.run(data, hosted(name, config), backward=True)
            found.append((forward[:2], backward[:2], metrics, model.step(rlkit.Adam())["grad_norm:mean"]))
    for part in (0, 1):
        for a, b in zip(found[0][part], found[1][part], strict=True):
            for key in ("logprobs", "elementwise_loss"):
                np.testing.assert_allclose(a[key], b[key], atol=2e-5)
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-5, abs=1e-6)
    assert found[0][3] == pytest.approx(found[1][3], rel=1e-4)
    assert found[0][3] > 0


@for_each("name", ["cross_entropy", "ppo"])
def test_a_gradient_of_zeros_is_one(name):
    """A batch whose weights or advantages are all 0 is followed by a step, as on the service."""
    with rlkit.connect("toy", seed=0) as toy:
        model = Models(lambda **_: toy).create(rlkit.Lora())
        _, metrics = model.run(rows(name, own=False), hosted(name, {}), backward=True)
        assert metrics["loss:sum"] == 0.0
        assert model.step(rlkit.Adam())["grad_norm:mean"] == 0.0
        model.run(rows(name), hosted(name, {}), backward=False)
        assert model.step(rlkit.Adam())["grad_norm:mean"] == 0.0  # without a gradient it is zero


@for_each("name", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_what_is_switched_off_adds_nothing(name):
    """Where the weight or the advantage is 0 a ratio without a bound is not looked at: 0 times it is no number."""
    (row, _) = rows(name)
    if name != "cross_entropy":
        row.inputs["logprobs"][row.inputs["advantages"] == 0] = -1000.0
    with rlkit.connect("toy", seed=0) as toy:
        model = Models(lambda **_: toy).create(rlkit.Lora())
        arrays, metrics = model.run([row], hosted(name, {}), backward=True)
        assert np.isfinite(metrics["loss:sum"])
        assert not arrays[0]["elementwise_loss"][:5].any()
        assert arrays[0]["elementwise_loss"][5:].all()
        assert np.isfinite(model.step(rlkit.Adam())["grad_norm:mean"])


def test_a_loss_that_is_not_finite():
    """Fails by the number of its datum."""
    first, row = rows("importance_sampling")
    row.inputs["logprobs"][row.inputs["advantages"] != 0] = -1000.0
    with rlkit.connect("toy", seed=0) as toy:
        model = Models(lambda **_: toy).create(rlkit.Lora())
        with pytest.raises(rlkit.BackendError, match=r"not finite at data\[1\]"):
            model.run([first, row], hosted("importance_sampling", {}), backward=False)
