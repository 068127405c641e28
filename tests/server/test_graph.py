"""Custom losses on the server: the same numbers as on the client, and nothing but the listed operations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlkit.server._graph import FUNCTIONS, METHODS, read_loss
from rlkit.server._training import _row
from rlkit.server._wire import ApiError, Fields
from rlkit.testing import FakeTinker
from tests.each import for_each

tinker = pytest.importorskip("tinker")
torch = pytest.importorskip("torch")
from tinker import types  # noqa: E402


def dual_clip(logprobs, mask, sampling, advantages):
    lp, q, a = logprobs[mask != 0], sampling[mask != 0], advantages[mask != 0]
    ratio = (lp - q).exp()
    surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    bounded = torch.where(a < 0, torch.maximum(surrogate, 3.0 * a), surrogate)
    return -bounded.sum(), {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": mask.sum()}


def soft(logprobs, beta, ids):
    gate = torch.sigmoid(beta * logprobs) + torch.nn.functional.softplus(logprobs)
    whole = torch.nn.functional.logsigmoid(logprobs[..., :2]).sum() + torch.logsumexp(gate, -1)
    return whole + (logprobs[0] ** 2 / (ids.float().max() + 1)) - torch.stack([gate.max(), gate.min()]).mean(), {}


def matrix(logprobs, teacher):
    p = teacher.exp()
    return (p * (teacher - logprobs)).sum(dim=-1, keepdim=True).mean() * logprobs.shape[0], {}


def data(*names, k=None):
    rng = np.random.default_rng(0)
    made = []
    for n in (5, 2):
        shape = (n,) if k is None else (n, k)
        inputs = {
            "mask": (np.arange(n) > 0).astype(np.float32),
            "sampling": np.full(n, -4.0, np.float32),
            "advantages": rng.normal(size=n).astype(np.float32) * 3,
            "beta": np.array(0.7, np.float32),
            "ids": np.arange(n),
            "teacher": np.full(shape, -1.5, np.float32),
        }
        targets = rng.integers(97, 122, shape)
        chosen = {name: inputs[name] for name in names}
        made.append(types.Datum(types.ModelInput.from_ints([97] * n), {"target_tokens": targets, **chosen}))
    return made


@pytest.fixture(scope="module")
def fake():
    with FakeTinker(seed=0) as fake:
        yield fake


@pytest.fixture(scope="module")
def service(fake):
    return fake.service_client()


@pytest.mark.parametrize(
    ("function", "ranks", "k"),
    [
        (dual_clip, {"mask": 1, "sampling": 1, "advantages": 1}, None),
        (soft, {"beta": 0, "ids": 1}, None),
        (matrix, {"teacher": 2}, 3),
    ],
)
def test_as_on_the_client(fake, service, function, ranks, k):
    """Value, metrics and gradient equal those of the client-side run, in one call instead of two."""
    training = service.create_lora_training_client("toy").result()
    handle = service.create_custom_loss(function, {"logprobs": 1 if k is None else 2, **ranks}).result()
    assert handle.loss_id is not None
    found = []
    weights = fake.service.backend(training.model_id)._weights
    for each in (handle, dataclasses.replace(handle, loss_id=None)):
        result = training.forward_backward_custom(data(*ranks, k=k), each).result()
        found.append((result.metrics, weights.gradient))
        training.optim_step(types.AdamParams(learning_rate=0.0)).result()
    for key, value in found[0][0].items():
        assert found[1][0][key] == pytest.approx(value, rel=1e-5), key
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-6 * np.abs(found[1][1]).max())
    assert np.abs(found[0][1]).max() > 1e-3


def test_inputs_are_numbers_or_like_the_targets():
    """Shapes that would broadcast, and logprobs above 0, are refused by name."""
    wrong = [
        ("given", np.ones((3, 1)), None),
        ("given", np.ones((3, 3)), None),
        ("given", np.ones(2), None),
        ("weights", np.ones((3, 2)), 2),
        ("given_logprobs", -np.ones(3), 2),
        ("given_logprobs", -np.ones(()), None),
        ("given_logprobs", np.full(3, 0.5), None),
    ]
    right = [
        ("given", np.ones(()), None),
        ("given", np.ones(3), 2),
        ("given", np.ones((3, 2)), 2),
        ("weights", np.ones(3), 2),
    ]
    for cases, good in ((wrong, False), (right, True)):
        for name, array, k in cases:
            shape = (3,) if k is None else (3, k)
            returned = {"tuple": [{"ref": "y"}, {"dict": {}}]}
            nodes = [
                *({"op": "placeholder", "name": x, "target": x} for x in ("logprobs", name)),
                {"op": "call_method", "name": "y", "target": "sum", "args": [{"ref": "logprobs"}]},
                {"op": "output", "name": "output", "target": "output", "args": [returned]},
            ]
            ranks = [{"name": "logprobs", "rank": len(shape)}, {"name": name, "rank": array.ndim}]
            loss = read_loss(Fields("x", {"name": "f", "inputs": ranks, "graph": {"format": 1, "nodes": nodes}}))
            inputs = {"target_tokens": np.ones(shape, np.int64), name: array.astype(np.float32)}
            if good:
                assert name in _row("data[0]", np.arange(3), inputs, loss).inputs
            else:
                with pytest.raises(ApiError, match=rf"data\[0\]\['{name}'\]"):
                    _row("data[0]", np.arange(3), inputs, loss)


def test_a_metric_that_is_not_finite(service):
    """It is refused by name, as a loss that is not finite is."""

    def measured(logprobs):
        return -logprobs.sum(), {"custom/broken:sum": (logprobs.sum() - logprobs.sum()) / 0.0}

    training = service.create_lora_training_client("toy").result()
    handle = service.create_custom_loss(measured, {"logprobs": 1}).result()
    with pytest.raises(tinker.RequestFailedError, match="custom/broken:sum' is nan; expected a finite number"):
        training.forward_backward_custom(data(), handle).result()


def test_without_the_flag(service):
    """A server that says it runs none has the client do it."""
    with FakeTinker(config={"custom_loss_server_side": False}) as fake:
        client = fake.service_client()
        handle = client.create_custom_loss(matrix, {"logprobs": 1, "teacher": 1}).result()
        assert handle.loss_id is None


def test_losses_belong_to_a_session(fake, service):
    training = service.create_lora_training_client("toy").result()
    other = fake.service_client().create_custom_loss(matrix, {"logprobs": 1, "teacher": 1}).result()
    with pytest.raises(tinker.BadRequestError, match="loss_id of this session"):
        training.forward_backward(data("teacher"), "custom", {"loss_id": other.loss_id}).result()


def request(nodes, inputs=("logprobs",)):
    placeholders = [{"op": "placeholder", "name": x, "target": x} for x in inputs]
    ranks = [{"name": x, "rank": 1} for x in inputs]
    return Fields("x", {"name": "f", "inputs": ranks, "graph": {"format": 1, "nodes": [*placeholders, *nodes]}})


def output(name="y", metrics=None):
    returned = {"tuple": [{"ref": name}, {"dict": metrics or {}}]}
    return {"op": "output", "name": "output", "target": "output", "args": [returned]}


def function(target, *args, **kwargs):
    return {"op": "call_function", "name": "y", "target": target, "args": list(args), "kwargs": kwargs}


def method(target, *args):
    return {"op": "call_method", "name": "y", "target": target, "args": list(args)}


LP = {"ref": "logprobs"}


@for_each(
    "node",
    [
        function("os.system", "true"),
        function("builtins.eval", "1"),
        function("builtins.exec", "1"),
        function("builtins.__import__", "os"),
        function("torch.load", "x"),
        function("torch.save", LP, "x"),
        function("torch.from_file", "x"),
        function("torch.ops.aten.exp", LP),
        function("torch.hub.load", "x", "y"),
        function("operator.call", LP),
        function("operator.attrgetter", "x"),
        function("operator.setitem", LP, 0, 1),
        function("builtins.setattr", LP, "x", 1),
        function("math.__dict__", LP),
        method("numpy", LP),
        method("item", LP),
        method("tolist", LP),
        method("backward", LP),
        method("__class__", LP),
        method("__reduce__", LP),
        method("apply_", LP),
        method("share_memory_", LP),
        {"op": "call_module", "name": "y", "target": "x"},
        {"op": "get_attr", "name": "y", "target": "x"},
    ],
)
def test_other_operations_are_refused(node):
    """When the loss is created, before any data is there."""
    with pytest.raises(ApiError, match="not allowed"):
        read_loss(request([node, output()]))


@for_each(
    "node",
    [
        function("getattr", LP, "__class__"),
        function("getattr", LP, "grad_fn"),
        function("getattr", LP, "storage", None),
        function("operator.mul", "a", 10**6),
        function("operator.mul", [1], 10**6),
        function("operator.mod", "%1000s", 1),
        function("operator.pow", 10, 10**9),
        function("torch.full_like", LP, {"dtype": "load"}),
        function("torch.exp", {"ref": "nobody"}),
        function("torch.exp", {"device": "cuda"}),
        function("torch.exp", {"a": 1, "b": 2}),
        function("torch.add", LP, {"dict": {"a": 1}}),
        method("expand", LP, 2**30),
        method("new_zeros", LP, {"tuple": [2**20, 2**20]}),
        method("repeat_interleave", LP, 2**40),
        method("sum", LP, {"float": "1e9"}),
        function("torch.exp", LP),  # is no scalar
    ],
)
def test_bad_arguments_fail_the_call(node):
    """Quickly, without much memory, and as the user's fault."""
    with pytest.raises(ApiError) as caught:
        read_loss(request([node, output()])).function(torch.zeros(3), {})
    assert caught.value.status == 400


@for_each(
    "change",
    [
        lambda g: g["nodes"].clear(),
        lambda g: g["nodes"].pop(),
        lambda g: g["nodes"].pop(0),
        lambda g: g["nodes"].append(g["nodes"][0]),
        lambda g: g.update(format=2),
        lambda g: g["nodes"].extend([{}] * 1000),
        lambda g: g["nodes"].insert(1, 3),
        lambda g: g["nodes"][1].update(args="x"),
    ],
)
def test_malformed_graphs(change):
    fields = request([function("torch.sum", LP), output()])
    assert read_loss(fields).function(torch.ones(3), {})[0] == 3
    change(fields.values["graph"])
    with pytest.raises(ApiError):
        read_loss(fields)


def test_metrics_are_checked():
    good = [function("torch.sum", LP), output(metrics={"custom/x:sum": {"ref": "y"}})]
    assert read_loss(request(good)).function(torch.ones(3), {})[1] == {"custom/x:sum": 3.0}
    for key in ("x:sum", "loss:sum", "custom/x", "custom/X:sum"):
        bad = [function("torch.sum", LP), output(metrics={key: {"ref": "y"}})]
        with pytest.raises(ApiError, match="metric"):
            read_loss(request(bad)).function(torch.ones(3), {})


def test_the_list_has_no_way_out():
    """Nothing in the tables reads or writes files, leaves torch, or changes a tensor in place."""
    for name in (*METHODS, *FUNCTIONS):
        last = name.split(".")[-1]
        assert not last.endswith("_") or last in ("and_", "or_", "not_"), name
        assert last not in ("load", "save", "item", "numpy", "tolist", "backward", "apply", "map", "register_hook"), (
            name
        )
