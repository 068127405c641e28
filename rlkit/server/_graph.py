"""Custom losses: a traced graph as plain data, carried out from a list of allowed operations.

No code of the request is ever executed: a node names an operation, and the called functions come from the tables
of ``rlkit.server._graph``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs
import torch

from rlkit.server._losses import Loss
from rlkit.server._wire import ApiError, Fields

__all__ = ["FUNCTIONS", "LIMIT", "METHODS", "Graph", "bounded", "read_loss"]

LIMIT = 2**24  # elements of a tensor that an operation may make


def _names(text: str) -> list[str]:
    return text.split()


_TENSOR = _names("""
    abs absolute acos acosh add addcdiv addcmul all amax amin aminmax any argmax argmin asin asinh atan atan2 atanh
    bitwise_and bitwise_not bitwise_or bitwise_xor bool broadcast_to cat ceil chunk clamp clamp_max clamp_min clip clone
    concat contiguous copysign cos cosh count_nonzero cummax cummin cumprod cumsum deg2rad detach diagonal diff digamma
    dim div divide dot double eq erf erfc erfinv exp exp2 expand expand_as expm1 fill flatten flip float floor
    floor_divide fmax fmin fmod frac full full_like gather ge greater greater_equal gt heaviside hypot index_select int
    isfinite isinf isnan kthvalue le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2
    logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp long lt masked_fill masked_select matmul
    max maximum mean median min minimum mm movedim mul multiply mv nan_to_num nanmean nanmedian nansum ne neg negative
    new_full new_ones new_tensor new_zeros nonzero norm not_equal numel ones ones_like outer permute positive pow prod
    quantile reciprocal relu remainder reshape roll round rsqrt scalar_tensor scatter select sgn sigmoid sign signbit
    sin sinc sinh size softmax sort split sqrt square squeeze stack std std_mean sub subtract sum swapaxes t take
    take_along_dim tan tanh tensor to topk transpose tril triu true_divide trunc type_as unbind unflatten unique
    unsqueeze var var_mean vdot view view_as where xlogy zeros zeros_like
""")
_FUNCTIONAL = _names("""
    binary_cross_entropy_with_logits elu gelu hardsigmoid hardtanh huber_loss kl_div l1_loss leaky_relu log_sigmoid
    log_softmax logsigmoid mse_loss normalize one_hot pad relu relu6 selu sigmoid silu smooth_l1_loss softmax softmin
    softplus softsign tanh threshold
""")
_OPERATORS = _names("""
    abs add and_ eq floordiv ge gt inv invert le lt matmul mod mul ne neg not_ or_ pos pow sub truediv xor
""")
_MATH = _names("""
    acos asin atan atan2 ceil cos cosh erf erfc exp expm1 floor fsum hypot isfinite isinf isnan lgamma log log10 log1p
    log2 pow prod sin sinh sqrt tan tanh trunc
""")
_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "T", "mT", "layout")


def _attribute(value: object, name: str, *default: object) -> object:
    del default
    if name not in _ATTRIBUTES:
        raise ValueError(f"the attribute {name!r} cannot be read")
    return getattr(value, name)


def _of_numbers(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap an operator so that it refuses texts and lists, which it could repeat or format without bound."""

    def checked(*args: object) -> object:
        if any(isinstance(arg, (str, list, tuple, dict)) for arg in args):
            raise ValueError(f"{function.__name__} takes tensors and numbers only")
        return function(*args)

    return checked


def bounded(args: object) -> None:
    """Refuse arguments that could request a huge tensor or number."""
    product, stack = 1, [args]
    while stack:
        arg = stack.pop()
        if isinstance(arg, (list, tuple)):
            stack += arg
        elif isinstance(arg, dict):
            stack += arg.values()
        elif isinstance(arg, int) and arg:
            product *= abs(arg)
    if product > LIMIT:
        raise ValueError(f"the arguments ask for up to {product} elements; the limit is {LIMIT}")


METHODS: Mapping[str, Callable[..., object]] = {
    n: getattr(torch.Tensor, n) for n in _TENSOR if hasattr(torch.Tensor, n)
}
FUNCTIONS: Mapping[str, Callable[..., object]] = {
    **{f"torch.{n}": getattr(torch, n) for n in _TENSOR if hasattr(torch, n)},
    **{f"torch.special.{n}": getattr(torch.special, n) for n in _TENSOR if hasattr(torch.special, n)},
    **{
        f"{where}.{n}": getattr(torch.nn.functional, {"log_sigmoid": "logsigmoid"}.get(n, n))
        for n in _FUNCTIONAL
        for where in ("torch.nn.functional", "torch._C._nn")
    },
    **{f"operator.{n}": _of_numbers(getattr(operator, n)) for n in _OPERATORS},
    "operator.getitem": operator.getitem,
    **{f"math.{n}": getattr(math, n) for n in _MATH},
    "getattr": _attribute,
}

Returned: TypeAlias = tuple[torch.Tensor, dict[str, float]]  # the loss, and its metrics
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MAX_NODES = 1000

_CONSTANTS = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


@attrs.frozen
class _Node:
    op: str
    name: str
    target: str
    args: list[object]
    kwargs: Mapping[str, object]


class Graph:
    """A custom loss: called with logprobs and its inputs, it returns (loss, metrics).

    Args:
        nodes: as received, in order of execution.
        inputs: the names of the placeholders, "logprobs" first.

    Raises:
        ApiError: 400, naming the node that is not allowed or not valid.
    """

    def __init__(self, nodes: list[object], inputs: tuple[str, ...]) -> None:
        if not 1 <= len(nodes) <= _MAX_NODES:
            raise ApiError(400, f"create_custom_loss: the graph has {len(nodes)} nodes; expected 1 to {_MAX_NODES}")
        self._inputs = inputs
        self._nodes = [_read_node(i, node) for i, node in enumerate(nodes)]
        names = [node.name for node in self._nodes]
        placeholders = [node.target for node in self._nodes if node.op == "placeholder"]
        if len(set(names)) != len(names) or placeholders != list(inputs) or self._nodes[-1].op != "output":
            raise ApiError(
                400, f"create_custom_loss: expected the placeholders {list(inputs)} first and an output last"
            )

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Returned:
        """Return the loss and its metrics.

        Raises:
            ApiError: 400, a node failed, or the result is not a loss.
        """
        values: dict[str, object] = {}
        for node in self._nodes:
            try:
                args = [_decoded(arg, values) for arg in node.args]
                kwargs = {key: _decoded(arg, values) for key, arg in node.kwargs.items()}
                if node.op == "placeholder":
                    value = logprobs if node.target == "logprobs" else inputs[node.target]
                elif node.op == "output":
                    return _checked(args[0])
                else:
                    bounded([args, kwargs])
                    table = FUNCTIONS if node.op == "call_function" else METHODS
                    value = table[node.target](*args, **kwargs)
            except (ApiError, torch.cuda.OutOfMemoryError):
                raise
            except Exception as error:
                raise ApiError(400, f"custom loss: node {node.name!r} ({node.target}): {error}") from error
            if isinstance(value, torch.Tensor) and value.numel() > LIMIT:
                raise ApiError(400, f"custom loss: node {node.name!r} makes a tensor of {value.numel()} elements")
            values[node.name] = value
        raise AssertionError("the last node is the output")


def read_loss(fields: Fields) -> Loss:
    """Return the loss of a create_custom_loss request. Raises ApiError: 400 or 422, naming what is not allowed."""
    ranks: dict[str, int] = {}
    for i, item in enumerate(fields.items("inputs")):
        declared = Fields(f"create_custom_loss.inputs[{i}]", item if isinstance(item, dict) else {})
        ranks[declared.text("name")] = declared.integer("rank", low=0, high=2)
    if next(iter(ranks), None) != "logprobs" or ranks["logprobs"] == 0:
        raise ApiError(400, "create_custom_loss: the first input is logprobs, of rank 1 or 2")
    graph = fields.object("graph")
    if graph.integer("format") != 1:
        raise ApiError(400, f"create_custom_loss: graph.format is {graph.get('format')}; this server reads format 1")
    read = Graph(graph.items("nodes"), tuple(ranks))
    return Loss(f"custom {fields.text('name')}", read, matrix=True, elementwise=False, ranks=ranks)


def _read_node(i: int, item: object) -> _Node:
    fields = Fields(f"create_custom_loss.graph.nodes[{i}]", item if isinstance(item, dict) else {})
    node = _Node(
        fields.text("op"),
        fields.text("name"),
        fields.text("target"),
        fields.items("args", []),
        fields.object("kwargs", Fields("", {})).values,
    )
    allowed = {"placeholder": None, "output": None, "call_function": FUNCTIONS, "call_method": METHODS}
    if node.op not in allowed:
        raise ApiError(400, f"{fields.where}: {node.op} is not allowed; a custom loss calls functions and methods only")
    table = allowed[node.op]
    if table is not None and node.target not in table:
        raise ApiError(400, f"{fields.where}: {node.op} of {node.target!r} is not allowed by this server")
    return node


def _decoded(value: object, values: Mapping[str, object]) -> object:
    """Decode an argument: JSON scalars are themselves, an object with one key is a type that JSON lacks."""
    if isinstance(value, list):
        return [_decoded(x, values) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"an argument has {len(value)} keys; expected one")
    kind, inner = next(iter(value.items()))
    if kind == "ref":
        return values[inner]
    if kind in ("tuple", "slice"):
        parts = [_decoded(x, values) for x in inner]
        return tuple(parts) if kind == "tuple" else slice(*parts)
    if kind == "dict":
        return {key: _decoded(x, values) for key, x in inner.items()}
    return _read_constant(kind, inner)


def _read_constant(kind: str, name: object) -> object:
    if kind == "ellipsis":
        return Ellipsis
    if kind == "float" and name in ("inf", "-inf", "nan"):
        return float(str(name))
    if kind == "device" and name == "cpu":
        return torch.device("cpu")
    constant = getattr(torch, str(name), None) if kind in _CONSTANTS else None
    if constant is None or not isinstance(constant, _CONSTANTS[kind]):
        raise ValueError(f"an argument {{{kind!r}: {name!r}}} is not supported")
    return constant


def _checked(returned: object) -> Returned:
    loss, metrics = returned if isinstance(returned, (tuple, list)) and len(returned) == 2 else (None, None)
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not isinstance(metrics, dict):
        raise ApiError(400, "custom loss: expected it to return (a scalar tensor, a dict of metrics)")
    for key, value in metrics.items():
        if not _METRIC.fullmatch(key) or not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ApiError(400, f"custom loss: the metric {key!r}: expected a scalar named custom/<name>:sum or :mean")
    numbers = {key: float(value.detach()) for key, value in metrics.items()}
    for key, number in numbers.items():
        if not math.isfinite(number):
            raise ApiError(400, f"custom loss: the metric {key!r} is {number}; expected a finite number")
    return loss, numbers
