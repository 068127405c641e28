# ruff: noqa: PLW0108
"""The form of a prepared loss that torch.fx can trace, so that it can be sent to a server."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import TypeAlias, cast

import torch

from rlkit import _check
from rlkit.errors import ConfigError, UnsupportedError
from rlkit.losses.prepare import PreparedLoss
from rlkit.metrics.names import with_ending

__all__ = ["traceable"]

Traced: TypeAlias = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def traceable(
    prepared: PreparedLoss, *, inputs: Collection[str] | None = None, scalars: Collection[str] = ()
) -> Traced:
    """Return a plain function ``(logprobs, mask, <inputs>) -> (loss, metrics)`` over whole arrays [T], settings bound.

    Its parameters are, in this order: ``logprobs`` ([T]; [T, K] for a loss driven by target_logprobs), ``mask`` [T]
    (any number type, 0 where the token is not the policy's), and then by name, in the order of the loss's signature,
    the needed inputs, the optional ones that are sent, and ``entropy`` where the loss names it. Each is [T] or [T, K],
    entries outside of the mask are ignored (NaN included), except that ``scalars`` are ().
    Metrics are named "custom/<name>:sum" or "custom/<name>:mean", as Tinker's custom losses have them; ":max" and
    ":min" are not supported, so a loss with such a metric is not run there.

    Args:
        prepared: a loss of level "datum", from ``prepare``.
        inputs: names of the inputs of every datum; those that the loss does not take are ignored. None: the needed
            inputs, and ``weights`` where the loss takes them.
        scalars: which inputs have shape ().

    Raises:
        UnsupportedError: the loss looks at several datums, or takes more inputs than a trace can have.
        ConfigError: ``prepared`` is not from ``prepare``, ``inputs`` lacks one that the loss needs, or ``scalars``
            names none of them.

    >>> import inspect
    >>> from rlkit.losses import prepare
    >>> ppo = traceable(prepare("ppo", {"clip_high_threshold": 1.28}))
    >>> list(inspect.signature(ppo).parameters)
    ['logprobs', 'mask', 'sampling_logprobs', 'advantages', 'weights']
    >>> nan = float("nan")
    >>> lp, mask, q = torch.tensor([nan, -1.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.0, -1.0])
    >>> ppo(lp, mask, q, torch.tensor([nan, 3.0]), torch.tensor([nan, 0.5]))
    (tensor(-1.5000), {})
    """
    if not isinstance(prepared, PreparedLoss):
        what = f"got {_check.describe(prepared)}"
        raise ConfigError("prepared", what, "a PreparedLoss, as losses.prepare(loss) returns")
    if prepared.level != "datum":
        raise UnsupportedError(
            f"the loss {prepared.name!r} has the level {prepared.level!r}; only losses of one datum can be traced"
        )
    names = _names(prepared, inputs)
    unknown = [name for name in scalars if name not in names]
    if unknown:
        raise ConfigError(f"scalars: {unknown[0]!r} is not an input of the loss: {', '.join(names)}")
    if len(names) >= len(_CLOSURES):
        raise UnsupportedError(f"the loss {prepared.name!r} takes {len(names)} inputs; at most {len(_CLOSURES) - 1}")

    def call(
        logprobs: torch.Tensor, mask: torch.Tensor, *arrays: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        chosen = mask != 0
        if prepared.elementwise and "weights" in names:
            chosen = chosen & (arrays[names.index("weights")] != 0)
        given = {name: array if name in scalars else array[chosen] for name, array in zip(names, arrays, strict=True)}
        result = prepared.function(**{prepared.driver: logprobs[chosen]}, **given, **prepared.settings)
        value, reported = result if isinstance(result, tuple) else (result, {})
        return value, {f"custom/{with_ending(key)}": _tensor(number, value) for key, number in reported.items()}

    closure = cast("FunctionType", _CLOSURES[len(names)](call))
    closure.__code__ = closure.__code__.replace(co_varnames=("logprobs", "mask", *names))
    closure.__name__ = closure.__qualname__ = prepared.name
    return closure


def _names(prepared: PreparedLoss, inputs: Collection[str] | None) -> tuple[str, ...]:
    entropy = ("entropy",) if prepared.entropy else ()
    if inputs is None:
        return (*prepared.inputs, *(name for name in prepared.optional if name == "weights"), *entropy)
    missing = [name for name in prepared.inputs if name not in inputs]
    if missing:
        raise ConfigError(f"inputs lacks {missing[0]!r}, which the loss {prepared.name!r} needs")
    return (*prepared.inputs, *(name for name in prepared.optional if name in inputs), *entropy)


def _tensor(number: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """Make a metric part of the graph: numbers become tensors."""
    return torch.full_like(like.detach(), number) if isinstance(number, (int, float)) else number


# fx reads how many arguments there are from a function's code, so there is one function for each number of them; the
# names are put in afterwards.
_CLOSURES: tuple[Callable[[Traced], Traced], ...] = (
    lambda f: lambda x, m: f(x, m),
    lambda f: lambda x, m, a: f(x, m, a),
    lambda f: lambda x, m, a, b: f(x, m, a, b),
    lambda f: lambda x, m, a, b, c: f(x, m, a, b, c),
    lambda f: lambda x, m, a, b, c, d: f(x, m, a, b, c, d),
    lambda f: lambda x, m, a, b, c, d, e: f(x, m, a, b, c, d, e),
    lambda f: lambda x, m, a, b, c, d, e, g: f(x, m, a, b, c, d, e, g),
    lambda f: lambda x, m, a, b, c, d, e, g, h: f(x, m, a, b, c, d, e, g, h),
    lambda f: lambda x, m, a, b, c, d, e, g, h, i: f(x, m, a, b, c, d, e, g, h, i),
    lambda f: lambda x, m, a, b, c, d, e, g, h, i, j: f(x, m, a, b, c, d, e, g, h, i, j),
    lambda f: lambda x, m, a, b, c, d, e, g, h, i, j, k: f(x, m, a, b, c, d, e, g, h, i, j, k),
)
