"""Losses as graphs: what torch.fx makes of them gives the same value and gradient, and Tinker's SDK takes it."""

from __future__ import annotations

import importlib.util
import inspect

import numpy as np
import pytest
import torch
import torch.fx

from rlkit import ConfigError, UnsupportedError, losses
from rlkit.losses import prepare, traceable
from tests.each import for_each
from tests.losses.calls import BATCHES, COMPOSED, PAIRS, SCALARS, TERMS, VARIANTS, example, needs

CASES = [variant for variant in VARIANTS if variant[0] not in (*PAIRS, *BATCHES)]
CASES += [(loss, {}) for title, loss in COMPOSED.items() if TERMS[title][0] not in (*PAIRS, *BATCHES)]
MASK = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0], dtype=np.float32)  # a tool's token stands between the policy's


def whole(selected, fill):
    """Return [n] or [n, K] at the mask's places, ``fill`` elsewhere; numbers stay numbers."""
    array = np.asarray(selected)
    if array.ndim == 0:
        return torch.tensor(array, dtype=torch.float64)
    out = np.full((MASK.size, *array.shape[1:]), -7 if array.dtype.kind == "i" else fill, array.dtype)
    out[MASK != 0] = array
    return torch.tensor(out)


@for_each(("loss", "settings"), CASES)
def test_graph_is_the_loss(loss, settings):
    """The graph, over whole arrays with NaN beside the mask, is the loss of the selected tokens and 0 elsewhere.

    It passes the offline checks of Tinker's SDK, which would send a graph that computes the same.
    """
    prepared, names = prepare(loss, settings), needs(loss, settings)[1]
    driver, inputs = example(loss, np.random.default_rng(2), sizes=(5,), settings=settings)
    x, inputs = driver[0], {k: v[0] for k, v in inputs.items()}
    closure = traceable(prepared, inputs=names, scalars=[name for name in names if name in SCALARS])
    names = list(inspect.signature(closure).parameters)
    assert names[:2] == ["logprobs", "mask"]
    leaf = torch.tensor(x, requires_grad=True)
    selected = {k: torch.tensor(np.asarray(v)) for k, v in inputs.items()}
    expected = prepared.function(**{prepared.driver: leaf}, **selected, **prepared.settings)
    gradient = torch.autograd.grad(expected, leaf)[0].numpy()
    graphs = [closure, torch.fx.symbolic_trace(closure)]
    if importlib.util.find_spec("tinker"):
        handle = trace(closure, {"logprobs": x.ndim, "mask": 1, **{k: np.ndim(v) for k, v in inputs.items()}})
        assert (list(handle.input_names), handle.name) == (names[1:], prepared.name)
        graphs.append(handle.graph)
    others = [torch.tensor(MASK), *(whole(inputs[name], np.nan) for name in names[2:])]
    for function in graphs:
        leaf = whole(x, np.nan).requires_grad_()
        value, metrics = function(leaf, *others)
        assert (value.item(), metrics) == (pytest.approx(expected.item(), rel=1e-12), {})
        full = torch.autograd.grad(value, leaf)[0]
        np.testing.assert_allclose(full.numpy()[MASK != 0], gradient, rtol=1e-12, atol=1e-15)
        assert not full[MASK == 0].any()


def trace(closure, ranks):
    """Trace as Tinker's SDK does, with its checks."""
    from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

    handle = trace_loss(closure, ranks, "session")
    assert encode_graph(handle).nodes
    return handle


def test_metrics_have_the_names_that_tinker_asks_for():
    """Metrics become "custom/name:sum" or ":mean", numbers among them tensors."""

    def measured(logprobs, advantages, weights=1.0):
        value = -(weights * advantages * logprobs).sum()
        return value, {"top:sum": logprobs.detach().max(), "half": 0.5, "two:sum": 2}

    closure = traceable(prepare(measured))
    arguments = torch.tensor([-1.0, -2.0]), torch.tensor([0.0, 1.0]), torch.ones(2), torch.ones(2)
    for function in (closure, torch.fx.symbolic_trace(closure)):
        value, metrics = function(*arguments)
        assert value.item() == 2.0
        found = {k: float(v) for k, v in metrics.items()}
        assert found == {"custom/top:sum": -2.0, "custom/half:mean": 0.5, "custom/two:sum": 2.0}
    pytest.importorskip("tinker")
    trace(closure, {"logprobs": 1, "mask": 1, "advantages": 1, "weights": 1})


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


def test_what_cannot_be_traced():
    """Losses over several datums, inputs that do not fit, and more than ten of them are refused by name."""
    ten = prepare(
        lambda logprobs, a, b, c, d, e, f, g, h, i, j: (a + b + c + d + e + f + g + h + i + logprobs * j).sum()
    )
    given = torch.ones(2), torch.ones(2), *(torch.full((2,), float(i)) for i in range(10))
    assert torch.fx.symbolic_trace(traceable(ten))(*given)[0].item() == 2 * 45
    eleven = prepare(lambda logprobs, a, b, c, d, e, f, g, h, i, j, k: logprobs.sum())
    for prepared, options, error, message in (
        *[(prepare(name), {}, UnsupportedError, "level '(pair|batch)'") for name in ("dpo", "kl_cov")],
        *[(loss, {}, ConfigError, "^prepared: got .*; expected a PreparedLoss") for loss in ("ppo", losses.ppo, None)],
        (prepare("ppo"), {"inputs": ["sampling_logprobs"]}, ConfigError, "inputs lacks 'advantages'"),
        (prepare("ppo"), {"scalars": ["mu"]}, ConfigError, "'mu' is not an input of the loss"),
        (eleven, {}, UnsupportedError, "11 inputs; at most 10"),
    ):
        with pytest.raises(error, match=message):
            traceable(prepared, **options)
