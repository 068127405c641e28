"""The operations that a custom loss may use: what stands here is all that a request can have called."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

import torch

__all__ = ["FUNCTIONS", "LIMIT", "METHODS", "bounded"]

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
    """Refuses arguments that could ask for a huge tensor or number."""
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
