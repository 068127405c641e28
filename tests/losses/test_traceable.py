"""Losses as graphs: what torch.fx makes of them gives the same value and gradient, and Tinker's SDK takes it."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import torch.fx

from rlkit import ConfigError, UnsupportedError, losses
from rlkit.losses import prepare, traceable
from tests.losses.calls import BATCHES, COMPOSED, PAIRS, SCALARS, VARIANTS, example, identity, needs

CASES = [
    *[pytest.param(*variant, id=identity(variant)) for variant in VARIANTS if variant[0] not in (*PAIRS, *BATCHES)],
    *[
        pytest.param(loss, {}, id=title)
        for title, loss in COMPOSED.items()
        if not title.startswith(("kl_cov", "simpo"))
    ],
]
MASK = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0], dtype=np.float32)  # a tool's token stands between the policy's


def whole(selected, fill):
    """[n] or [n, K] at the mask's places, ``fill`` elsewhere; numbers stay numbers."""
    array = np.asarray(selected)
    if array.ndim == 0:
        return torch.tensor(array, dtype=torch.float64)
    kind = np.int64 if array.dtype.kind == "i" else np.float64
    out = np.full((MASK.size, *array.shape[1:]), fill if kind is np.float64 else -7, kind)
    out[MASK != 0] = array
    return torch.tensor(out)


def prepared_and_closure(loss, settings):
    prepared = prepare(loss, settings)
    driver, inputs = example(loss, np.random.default_rng(2), sizes=(5,), settings=settings)
    names = needs(loss, settings)[1]
    scalars = [name for name in names if name in SCALARS]
    return prepared, traceable(prepared, inputs=names, scalars=scalars), driver[0], {k: v[0] for k, v in inputs.items()}


def value_and_gradient(function, x, others):
    leaf = x.clone().requires_grad_()
    value, metrics = function(leaf, *others)
    return value.item(), torch.autograd.grad(value, leaf)[0], metrics


@pytest.mark.parametrize(("loss", "settings"), CASES)
def test_graph_is_the_loss(loss, settings):
    """The graph, over whole arrays with NaN beside the mask, is the loss of the selected tokens and 0 elsewhere."""
    prepared, closure, x, inputs = prepared_and_closure(loss, settings)
    names = list(inspect.signature(closure).parameters)
    assert names[:2] == ["logprobs", "mask"]
    selected = {k: torch.tensor(np.asarray(v)) for k, v in inputs.items()}
    leaf = torch.tensor(x, requires_grad=True)
    expected = prepared.function(**{prepared.driver: leaf}, **selected, **prepared.settings)
    gradient = torch.autograd.grad(expected, leaf)[0].numpy()

    others = [torch.tensor(MASK), *(whole(inputs[name], np.nan) for name in names[2:])]
    for function in (closure, torch.fx.symbolic_trace(closure)):
        value, full, metrics = value_and_gradient(function, whole(x, np.nan), others)
        assert value == pytest.approx(expected.item(), rel=1e-12)
        assert metrics == {}
        np.testing.assert_allclose(full.numpy()[MASK != 0], gradient, rtol=1e-12, atol=1e-15)
        assert not full[MASK == 0].any()


@pytest.mark.parametrize(("loss", "settings"), CASES)
def test_tinker_takes_it(loss, settings):
    """The SDK's offline checks pass, and the graph that it would send computes the same."""
    pytest.importorskip("tinker")
    from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

    _, closure, x, inputs = prepared_and_closure(loss, settings)
    names = list(inspect.signature(closure).parameters)
    ranks = {"logprobs": x.ndim, "mask": 1, **{k: np.ndim(v) for k, v in inputs.items()}}
    handle = trace_loss(closure, ranks, "session")
    assert list(handle.input_names) == names[1:]
    assert handle.name == prepare(loss, settings).name
    assert encode_graph(handle).nodes
    others = [torch.tensor(MASK), *(whole(inputs[name], np.nan) for name in names[2:])]
    expected = value_and_gradient(closure, whole(x, np.nan), others)
    actual = value_and_gradient(handle.graph, whole(x, np.nan), others)
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])


def counted(logprobs, advantages, weights=1.0, extra=0.0):
    """A loss with metrics of all kinds."""
    value = -(weights * advantages * logprobs).sum() + extra
    return value, {"top:sum": logprobs.detach().max(), "half": 0.5, "count:sum": logprobs.numel()}


def test_metrics_have_the_names_that_tinker_asks_for():
    """Metrics become "custom/name:sum" or ":mean", numbers among them tensors."""
    closure = traceable(prepare(counted))
    arguments = torch.tensor([-1.0, -2.0]), torch.tensor([0.0, 1.0]), torch.ones(2), torch.ones(2)
    for function in (closure, torch.fx.symbolic_trace(closure)):
        value, metrics = function(*arguments)
        assert value.item() == 2.0
        assert {k: float(v) for k, v in metrics.items()} == {
            "custom/top:sum": -2.0,
            "custom/half:mean": 0.5,
            "custom/count:sum": 1.0,
        }


def test_metrics_pass_the_check_of_tinker():
    pytest.importorskip("tinker")
    from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

    def measured(logprobs, advantages):
        return -(advantages * logprobs).sum(), {"top:sum": logprobs.detach().max(), "half": 0.5}

    handle = trace_loss(traceable(prepare(measured)), {"logprobs": 1, "mask": 1, "advantages": 1}, "session")
    assert encode_graph(handle).nodes


def test_order_of_the_inputs():
    """Needed inputs, then the optional ones that are sent, in the order of the signature; others are passed over."""

    def names(*args, **kwargs):
        return list(inspect.signature(traceable(*args, **kwargs)).parameters)[2:]

    prepared = prepare(losses.mix)
    need = ["sampling_logprobs", "advantages", "expert"]
    assert names(prepared) == [*need, "weights"]
    assert names(prepared, inputs=["mu", "other", *need]) == [*need, "mu"]
    assert names(prepared, inputs={"mu", "weights", *need}, scalars=["mu"]) == [*need, "weights", "mu"]
    assert names(prepare(losses.cross_entropy), inputs=[]) == []
    assert names(prepare(losses.with_entropy("ppo")))[-1] == "entropy"


def test_what_can_not_be_traced():
    """Losses over several datums, and inputs that do not fit, are refused by name."""
    for name in ("dpo", "kl_cov"):
        with pytest.raises(UnsupportedError, match="level '(pair|batch)'"):
            traceable(prepare(name))
    with pytest.raises(ConfigError, match="inputs lacks 'advantages'"):
        traceable(prepare("ppo"), inputs=["sampling_logprobs"])
    for unprepared in ("ppo", losses.ppo, None):
        with pytest.raises(ConfigError, match=r"^prepared: got .*; expected a PreparedLoss"):
            traceable(unprepared)
    with pytest.raises(ConfigError, match="'mu' is not an input of the loss"):
        traceable(prepare("ppo"), scalars=["mu"])


def wide(logprobs, a, b, c, d, e, f, g, h, i, j):
    return (logprobs * (a + b + c + d + e + f + g + h + i + j)).sum()


def wider(logprobs, a, b, c, d, e, f, g, h, i, j, k):
    return (logprobs * (a + b + c + d + e + f + g + h + i + j + k)).sum()


def test_number_of_inputs():
    """Ten inputs go, one more is refused."""
    closure = torch.fx.symbolic_trace(traceable(prepare(wide)))
    mask, rest = torch.ones(2), [torch.full((2,), float(i)) for i in range(10)]
    assert closure(torch.ones(2), mask, *rest)[0].item() == 2 * 45
    with pytest.raises(UnsupportedError, match="11 inputs; at most 10"):
        traceable(prepare(wider))
