# ruff: noqa: PLW0108
"""The form of a prepared loss that torch.fx can trace, and that a server can so be sent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, cast

from rlkit import _check
from rlkit.errors import ConfigError, UnsupportedError
from rlkit.losses.prepare import PreparedLoss

if TYPE_CHECKING:
    import torch
else:
    from rlkit._lazy import torch

__all__ = ["traceable"]


def traceable(
    prepared: PreparedLoss, *, inputs: Collection[str] | None = None, scalars: Collection[str] = ()
) -> Callable[..., object]:
    """Return a plain function ``(logprobs, mask, <inputs>) -> (loss, metrics)`` over whole arrays [T], settings bound.

    Its parameters are, in this order: ``logprobs`` ([T]; [T, K] for a loss driven by target_logprobs), ``mask`` [T]
    (any number type, 0 where the token is not the policy's), and then by name, in the order of the loss's signature,
    the needed inputs, the optional ones that are sent, and ``entropy`` where the loss names it. Each is [T] or [T, K],
    entries beside the mask are of no account whatever they are (NaN included), except that ``scalars`` are ().
    Metrics are named "custom/<name>:sum" or "custom/<name>:mean", as Tinker's custom losses have them.

    Args:
        prepared: a loss of level "datum", from ``prepare``.
        inputs: names of what every datum carries; others than the loss's are passed over. None: the needed inputs, and
            ``weights`` where the loss takes them.
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
        what = f"got {_check.shown(prepared)}"
        raise ConfigError("prepared", what, "a PreparedLoss, which losses.prepare(loss) gives")
    if prepared.level != "datum":
        raise UnsupportedError(
            f"the loss {prepared.name!r} is of level {prepared.level!r}; a traced loss is called on one datum at a time"
        )
    names = _names(prepared, inputs)
    unknown = [name for name in scalars if name not in names]
    if unknown:
        raise ConfigError(f"scalars: {unknown[0]!r} is not among the inputs that the loss is sent: {', '.join(names)}")
    if len(names) >= len(_CLOSURES):
        raise UnsupportedError(f"the loss {prepared.name!r} takes {len(names)} inputs; at most {len(_CLOSURES) - 1}")

    def call(logprobs: Any, mask: Any, *arrays: Any) -> tuple[Any, dict[str, Any]]:
        chosen = mask != 0
        given = {name: array if name in scalars else array[chosen] for name, array in zip(names, arrays, strict=True)}
        result = prepared.function(**{prepared.driver: logprobs[chosen]}, **given, **prepared.settings)
        value, reported = result if isinstance(result, tuple) else (result, {})
        return value, {_metric(key): _tensor(number, value) for key, number in reported.items()}

    closure: Any = _CLOSURES[len(names)](call)
    code = closure.__code__.replace(co_varnames=("logprobs", "mask", *names))
    closure.__code__ = code
    closure.__name__ = closure.__qualname__ = prepared.name
    return cast("Callable[..., object]", closure)


def _names(prepared: PreparedLoss, inputs: Collection[str] | None) -> tuple[str, ...]:
    entropy = ("entropy",) if prepared.entropy else ()
    if inputs is None:
        return (*prepared.inputs, *(name for name in prepared.optional if name == "weights"), *entropy)
    missing = [name for name in prepared.inputs if name not in inputs]
    if missing:
        raise ConfigError(f"inputs lacks {missing[0]!r}, which the loss {prepared.name!r} needs")
    return (*prepared.inputs, *(name for name in prepared.optional if name in inputs), *entropy)


def _metric(key: str) -> str:
    return f"custom/{key}" if key.endswith((":sum", ":mean")) else f"custom/{key}:mean"


def _tensor(number: Any, like: Any) -> Any:
    """Make a metric part of the graph: numbers become tensors."""
    return torch.full_like(like.detach(), number) if isinstance(number, (int, float)) else number


# fx reads how many arguments there are from a function's code, so there is one function for each number of them; the
# names are put in afterwards.
_CLOSURES: tuple[Callable[[Any], Any], ...] = (
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
