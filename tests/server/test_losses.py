"""Losses by name: values and gradients equal a float64 oracle's; the optimizer equals torch's."""

from __future__ import annotations

import numpy as np
import pytest

from rlkit.testing import FakeTinker
from tests.each import for_each
from tests.server import oracle

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
CASES = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.3}),
    ("cispo", {}),
    ("cispo", CLIP),
    ("dro", {}),
    ("dro", {"beta": 0.3}),
    ("gspo", {}),
    ("gspo", CLIP),
]


@pytest.fixture(scope="module")
def fake():
    with FakeTinker(seed=0) as fake:
        yield fake


@pytest.fixture
def training(fake):
    return fake.service_client().create_lora_training_client("toy", rank=8).result()


def weights_of(fake, training):
    return fake.service.runs[training.model_id].model.backend._weights


def batch(weights, name, rng, k=None):
    """Datums whose targets are any tokens, with ratios around 1, as (tokens, targets, inputs)."""
    data = []
    for n in (1, 5, 9):
        tokens, shape = rng.integers(0, 259, n), (n,) if k is None else (n, k)
        targets = rng.integers(0, 259, shape)
        inputs = {}
        if name == "cross_entropy":
            inputs["weights"] = rng.normal(size=shape)
        else:
            inputs["logprobs"] = oracle.logprobs(weights, tokens, targets) + rng.normal(0, 0.15, shape)
            inputs["advantages"] = rng.normal(size=shape)
        if name == "gspo":
            inputs["sequence_ratio_mask"] = (np.arange(n) >= n // 3) * 1.0
        data.append((tokens, targets, {key: x.astype(np.float32) for key, x in inputs.items()}))
    return data


def datums(data):
    return [
        types.Datum(types.ModelInput.from_ints(x.tolist()), {"target_tokens": t, **inputs}) for x, t, inputs in data
    ]


def compare(fake, training, name, config, data):
    """Value, per-datum logprobs and gradient of a call against the oracle's."""
    weights = weights_of(fake, training).value
    result = training.forward_backward(datums(data), name, config).result()
    assert result.metrics["loss:sum"] == pytest.approx(oracle.loss(name, config, weights, weights, data), rel=2e-5)
    for (tokens, targets, _), found in zip(data, result.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(found["logprobs"].to_numpy(), oracle.logprobs(weights, tokens, targets), atol=1e-5)
        assert found["logprobs"].shape == list(targets.shape)
    terms = sum(x["elementwise_loss"].to_numpy().sum() for x in result.loss_fn_outputs)
    assert terms == pytest.approx(result.metrics["loss:sum"], rel=1e-5)
    gradient = weights_of(fake, training).gradient
    rng = np.random.default_rng(3)
    for _ in range(3):
        direction = rng.normal(size=gradient.shape)
        expected = oracle.slope(name, config, weights, data, direction)
        assert (gradient * direction).sum() == pytest.approx(expected, rel=1e-4, abs=1e-4 * np.abs(gradient).sum())


@for_each(("name", "config"), CASES)
def test_value_and_gradient(fake, training, name, config):
    weights = weights_of(fake, training).value
    for seed in (0, 1):
        compare(fake, training, name, config, batch(weights, name, np.random.default_rng(seed)))
        training.optim_step(types.AdamParams(learning_rate=0.0)).result()


def test_a_sequence_without_a_mask(fake, training):
    """gspo's mean is then over what has an advantage, and a sequence in which nothing has one adds nothing."""
    weights, data = weights_of(fake, training).value, []
    for tokens, targets, inputs in batch(weights, "gspo", np.random.default_rng(0)):
        inputs["advantages"] *= inputs["sequence_ratio_mask"]
        inputs["logprobs"] *= inputs["sequence_ratio_mask"]  # prompts have none
        data.append((tokens, targets, inputs))
    compare(fake, training, "gspo", {}, data)
    whole = training.forward(datums(data), "gspo").result()
    bare = [(x, t, {k: a for k, a in inputs.items() if k != "sequence_ratio_mask"}) for x, t, inputs in data]
    assert training.forward(datums(bare), "gspo").result().metrics == whole.metrics
    x, t, inputs = bare[2]
    nothing = [(x, t, {**inputs, "advantages": np.zeros_like(inputs["advantages"])})]
    assert training.forward_backward(datums(nothing), "gspo").result().metrics["loss:sum"] == 0.0


@pytest.mark.parametrize("k", [1, 3])
def test_matrix_targets(fake, training, k):
    """cross_entropy takes [N, K] targets and weights."""
    weights = weights_of(fake, training).value
    compare(fake, training, "cross_entropy", {}, batch(weights, "cross_entropy", np.random.default_rng(0), k))


def test_clipping_stops_the_gradient(fake, training):
    """Beyond its bound the good way a token of ppo has none; cispo keeps one, of the bound's size."""
    state = weights_of(fake, training)
    tokens, targets = np.array([7]), np.array([8])
    lp = oracle.logprobs(state.value, tokens, targets)
    data = [(tokens, targets, {"logprobs": (lp - 1.0).astype(np.float32), "advantages": np.ones(1, np.float32)})]
    training.forward_backward(datums(data), "ppo").result()
    assert np.abs(weights_of(fake, training).gradient).max() == 0
    training.forward_backward(datums(data), "cispo", {"clip_high_threshold": 1.5}).result()
    clipped = weights_of(fake, training).gradient
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()
    training.forward_backward(datums(data), "importance_sampling").result()
    np.testing.assert_allclose(clipped * np.e / 1.5, weights_of(fake, training).gradient, rtol=1e-5)


def test_dro_has_no_mask(fake, training):
    """A position with q = 0 and A = 0 still pulls: the reason why clients fill in q."""
    state = weights_of(fake, training)
    data = [
        (np.array([7]), np.array([8]), {"logprobs": np.zeros(1, np.float32), "advantages": np.zeros(1, np.float32)})
    ]
    training.forward_backward(datums(data), "dro", {"beta": 1.0}).result()
    assert np.abs(weights_of(fake, training).gradient).max() > 0.1
    own = oracle.logprobs(state.value, *data[0][:2]).astype(np.float32)
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()
    training.forward_backward(datums([(*data[0][:2], {**data[0][2], "logprobs": own})]), "dro", {"beta": 1.0}).result()
    assert np.abs(weights_of(fake, training).gradient).max() < 1e-5


def test_forward_leaves_no_gradient(fake, training):
    data = batch(weights_of(fake, training).value, "ppo", np.random.default_rng(0))
    forward = training.forward(datums(data), "ppo").result()
    assert np.abs(weights_of(fake, training).gradient).max() == 0
    assert forward.metrics == training.forward_backward(datums(data), "ppo").result().metrics


def test_gradients_accumulate(fake, training):
    """Two calls are one call with both datums, up to the order of a sum."""
    data = batch(weights_of(fake, training).value, "ppo", np.random.default_rng(0))
    for part in (data[:1], data[1:]):
        training.forward_backward(datums(part), "ppo").result()
    parts = weights_of(fake, training).gradient
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()
    training.forward_backward(datums(data), "ppo").result()
    np.testing.assert_allclose(parts, weights_of(fake, training).gradient, atol=1e-12)


def test_optimizer_is_adamw(fake, training):
    """Ten steps with changing settings, clipping among them, and one without a gradient, equal torch.optim.AdamW."""
    import torch

    rng = np.random.default_rng(5)
    start = weights_of(fake, training).value
    parameter = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter])
    for step in range(10):
        settings = {"learning_rate": 10.0 ** -rng.integers(1, 4), "beta1": 0.8, "beta2": 0.97, "eps": 1e-10}
        settings |= {"weight_decay": 0.1 * (step % 3), "grad_clip_norm": 0.5 * (step % 2)}
        if step != 6:
            state = weights_of(fake, training)
            training.forward_backward(datums(batch(state.value, "cross_entropy", rng)), "cross_entropy").result()
        parameter.grad = torch.tensor(weights_of(fake, training).gradient)
        if settings["grad_clip_norm"]:
            torch.nn.utils.clip_grad_norm_([parameter], settings["grad_clip_norm"])
        group = optimizer.param_groups[0]
        group |= {"lr": settings["learning_rate"], "betas": (0.8, 0.97), "eps": 1e-10}
        group["weight_decay"] = settings["weight_decay"]
        optimizer.step()
        training.optim_step(types.AdamParams(**settings)).result()
        np.testing.assert_allclose(weights_of(fake, training).value, parameter.detach(), rtol=1e-6, atol=1e-7)
    assert np.abs(start - parameter.detach().numpy()).max() > 0.05


def _sparse():
    import torch

    return types.TensorData.from_torch_sparse(torch.eye(3, 20, dtype=torch.int64))


BAD = {
    "no loss of that name": ("nothing", {}, {}, "unknown"),
    "stable_reinforce": ("stable_reinforce", {}, {}, "stability"),
    "unknown setting": ("ppo", {"epsilon": 0.2}, {}, "no such setting"),
    "text setting": ("ppo", {"clip_low_threshold": "a"}, {}, "finite number"),
    "missing input": ("ppo", {}, {"advantages": None}, "lacks 'advantages'"),
    "missing targets": ("ppo", {}, {"target_tokens": None}, "lacks 'target_tokens'"),
    "unknown input": ("ppo", {}, {"mask": np.ones(3, np.float32)}, "does not read"),
    "wrong length": ("ppo", {}, {"advantages": np.ones(2, np.float32)}, "shape (2,)"),
    "wrong dtype": ("ppo", {}, {"advantages": np.ones(3, np.int64)}, "dtype int64"),
    "sparse": ("ppo", {}, {"target_tokens": _sparse()}, "is sparse; expected a dense tensor"),
    "matrix": ("ppo", {}, {"target_tokens": np.ones((3, 2), np.int64)}, "one row per token"),
    "not a number": ("ppo", {}, {"advantages": np.array([0, np.nan, 0], np.float32)}, "[1] is nan"),
    "infinite": ("ppo", {}, {"logprobs": np.array([0, 0, -np.inf], np.float32)}, "[2] is -inf"),
    "negative id": ("ppo", {}, {"target_tokens": np.array([1, -1, 2])}, "[-1, 2]"),
    "id too large": ("ppo", {}, {"target_tokens": np.array([1, 1, 259])}, "[1, 259]"),
    "a loss sent as a graph": ("custom", {"loss_id": "x"}, {}, "unknown"),
}


@for_each("case", BAD)
def test_bad_calls_are_refused(fake, training, case):
    """By name and index, changing nothing, and the client goes on."""
    name, config, changes, message = BAD[case]
    inputs = {"target_tokens": np.array([1, 2, 3]), "logprobs": -np.ones(3, np.float32)}
    inputs = {**inputs, "advantages": np.ones(3, np.float32), **changes}
    inputs = {key: x for key, x in inputs.items() if x is not None}
    bad = types.Datum(types.ModelInput.from_ints([1, 2, 3]), inputs)
    good = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": np.array([2])})
    before = weights_of(fake, training).gradient
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError)) as caught:
        training.forward_backward([bad], name, config).result()
    assert message in str(caught.value)
    assert weights_of(fake, training).gradient is before
    training.forward_backward([good], "cross_entropy").result()


def test_logprobs_are_at_most_0(training):
    """Whoever sends probabilities is told so, before anything is computed."""
    inputs = {"logprobs": np.array([-1.0, 0.5], np.float32), "advantages": np.ones(2, np.float32)}
    datum = types.Datum(types.ModelInput.from_ints([7, 8]), {"target_tokens": np.array([8, 9]), **inputs})
    for call in (training.forward, training.forward_backward):
        with pytest.raises(tinker.BadRequestError, match=r"\['logprobs'\] has an entry of 0.5; expected logprobs"):
            call([datum], "ppo").result()
