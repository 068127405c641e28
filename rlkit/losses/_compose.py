"""Losses made of a loss and one more term: ``with_kl(ppo, 0.01)``, ``with_entropy(with_kl(ppo), 0.001)``.

The result is an ordinary loss: its inputs are those of the loss and of the term, its settings too, and ``weights``
multiplies both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs
from torch import Tensor

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.losses import kl
from rlkit.losses._preference import average_weight
from rlkit.losses.prepare import Range, check_shapes, marks, mask_weightless, registry

Loss: TypeAlias = Callable[..., object]
Value: TypeAlias = Tensor | tuple[Tensor, Mapping[str, float]]  # what a loss returns
Given: TypeAlias = Mapping[str, Tensor]  # the arguments of one datum, by name
_Parameter = inspect.Parameter


def with_kl(loss: str | Loss, coef: float | str = 0.01, estimator: str | Loss = "k3") -> Loss:
    """Add coef sum w KL(policy || reference) to a loss, by an estimator per token.

    The new loss also needs ``reference_logprobs`` [n] (and ``sampling_logprobs`` where the estimator takes them), and
    has the setting ``kl_coef``. Its level and ``elementwise`` are those of ``loss``; at the levels "pair" and "batch"
    the term runs over the tokens of all datums, those of a pair with the pair's weight.

    Args:
        loss: a name, or a loss driven by logprobs.
        coef: the default of ``kl_coef``, >= 0; or the name of a datum input () or [n] that holds the coefficient,
            >= 0, too, so that it can follow a schedule without the loss becoming another one.
        estimator: a name of ``rlkit.losses.kl.registry``, or ``fn(logprobs, reference_logprobs) -> [n]`` that acts on
            each token by itself. Its keyword-only settings become the loss's.

    Raises:
        ConfigError: a negative coefficient, a setting of the loss and of the estimator with the same name, or a loss
            driven by something else.
        UnknownNameError: no loss or no estimator has that name.

    >>> import torch
    >>> loss = with_kl("reinforce", 0.1, "k2")
    >>> lp, a, ref = torch.tensor([-1.0]), torch.tensor([2.0]), torch.tensor([-3.0])
    >>> loss(lp, a, ref)  # 2 * 1 + 0.1 * 2^2 / 2
    tensor(2.2000)
    >>> loss(lp, a, ref, torch.tensor(0.5), kl_coef=1.0)  # (2 + 2) / 2
    tensor(2.)

    Source: GRPO, arXiv:2402.03300 eq. 3. Peers: SkyRL folds token weights into advantages, which this term misses.
    """
    function, estimate = registry.resolve(loss), kl.registry.resolve(estimator)
    title = f"with_kl({_name_loss(loss)})"
    first, more = _read_parameters(title, function)[0].name, _read_parameters(title, estimate)[1:]
    if first != "logprobs":
        raise ConfigError(f"{title}: the loss is driven by {first!r}, but a KL term needs 'logprobs'")

    def term(given: Given) -> Tensor:
        return estimate(given["logprobs"], **{parameter.name: given[parameter.name] for parameter in more})

    composed = _add_term(title, function, term, more, "kl_coef", coef, low=0.0)
    composed.__rlkit_parts__ = (function, estimate)  # type: ignore[attr-defined]
    return composed


def with_entropy(loss: str | Loss, coef: float | str = 0.01) -> Loss:
    """Subtract coef sum w H from a loss, where H is the exact entropy of the policy's distribution at each token.

    The new loss names ``entropy`` [n], which only backends that have the whole distribution give, and has the setting
    ``entropy_coef``. Its level and ``elementwise`` are those of ``loss``.

    Args:
        loss: a name, or a loss.
        coef: the default of ``entropy_coef``, finite (below 0 it makes the policy surer); or the name of a datum input
            () or [n] that holds the coefficient.

    Raises:
        ConfigError: the coefficient is not a number, or the loss has a setting of that name.
        UnknownNameError: no loss has that name.

    >>> import torch
    >>> loss = with_entropy("reinforce", 0.1)
    >>> loss(torch.tensor([-1.0]), torch.tensor([2.0]), entropy=torch.tensor([5.0]))  # 2 * 1 - 0.1 * 5
    tensor(1.5000)

    Source: Williams and Peng 1991; A3C, arXiv:1602.01783. Where there are no logits, ``rlkit.advantages.entropy_bonus``
    is the sampled estimate. ``rlkit.losses.adaptive_entropy`` gives a coefficient that follows the entropy.
    """
    function, title = registry.resolve(loss), f"with_entropy({_name_loss(loss)})"
    entropy = _Parameter("entropy", _Parameter.POSITIONAL_OR_KEYWORD)
    return _add_term(title, function, lambda given: -given["entropy"], [entropy], "entropy_coef", coef)


def _add_term(
    title: str,
    function: Callable[..., Value],
    term: Callable[[Given], Tensor],
    more: Sequence[inspect.Parameter],
    coef_name: str,
    coef: float | str,
    *,
    low: float | None = None,
) -> Loss:
    """Add coef sum w term to ``function``, under a signature that holds what both need; coef is >= ``low``."""
    own, marked = _read_parameters(title, function), marks(function)
    if isinstance(coef, str):
        if not coef.isidentifier():
            raise ConfigError("coef", f"got {coef!r}", "a number, or the name of a datum input")
        if coef in {*_list_inputs(own), "weights", "reference_logprobs", "entropy"}:
            raise ConfigError(f"coef: the loss already has an input {coef!r}; name one that holds only the coefficient")
        coef_name, extra = coef, _Parameter(coef, _Parameter.POSITIONAL_OR_KEYWORD)
        if low is not None:
            marked = attrs.evolve(marked, ranges={**marked.ranges, coef: Range(low)})
    else:
        default = _check.real(coef_name, coef, low=low)
        extra = _Parameter(coef_name, _Parameter.KEYWORD_ONLY, default=default)
    signature = _merge_signatures(title, own, [*more, extra])
    names = [parameter.name for parameter in own]
    read = [names[0], *_list_inputs(more)]  # by the term

    def compute_term(one: Given) -> Tensor:
        """Return the term of one datum; its logprobs where the weight is 0 are replaced, as they may overflow."""
        scale = one[coef_name] * one.get("weights", 1.0)
        logprobs = [name for name in read if name.endswith("logprobs") and one[name] is not None]
        safe = {name: mask_weightless(scale, one[name], -1.0) for name in logprobs}
        return (scale * term({**one, **safe})).sum()

    def composed(*args: object, **kwargs: object) -> Value:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        check_shapes(title, {name: given[name] for name in (*read, "weights", coef_name) if name in given})
        if extra.kind is extra.KEYWORD_ONLY:
            _check.real(coef_name, given[coef_name], low=low)
        result = function(**{name: given[name] for name in names})
        added = sum(map(compute_term, _split_datums(given, marked.level)))
        return (result[0] + added, result[1]) if isinstance(result, tuple) else result + added

    composed.__name__ = composed.__qualname__ = title
    composed.__module__ = function.__module__  # which says whether the loss is one of rlkit's
    composed.__doc__ = f"{(inspect.getdoc(function) or title).partition(chr(10))[0]} Made by {title}."
    composed.__signature__ = signature  # type: ignore[attr-defined]
    composed.__rlkit_loss__ = marked  # type: ignore[attr-defined]
    composed.__rlkit_parts__ = (function,)  # type: ignore[attr-defined]
    return composed


def _list_inputs(parameters: Sequence[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]


def _split_datums(given: Mapping[str, Tensor | Sequence[Tensor]], level: str) -> list[Given]:
    """Return the arguments of each datum of a call."""
    if level == "datum":
        return [given]
    if level == "pair":
        given = {**given, "weights": average_weight(given.get("weights", 1.0))}
    count = len(next(iter(given.values())))
    return [
        {name: value[i] if isinstance(value, (list, tuple)) else value for name, value in given.items()}
        for i in range(count)
    ]


def _merge_signatures(
    title: str, own: Sequence[inspect.Parameter], more: Sequence[inspect.Parameter]
) -> inspect.Signature:
    """Needed inputs, then optional ones, then settings; inputs that both name are one, optional if it is for both."""
    merged = {parameter.name: parameter for parameter in own}
    for parameter in more:
        present = merged.setdefault(parameter.name, parameter)
        if present is not parameter:
            if _Parameter.KEYWORD_ONLY in (present.kind, parameter.kind):
                raise ConfigError(f"{title}: the loss already has a parameter {parameter.name!r}")
            if parameter.default is parameter.empty:
                merged[parameter.name] = parameter
    rank = {p.name: 2 if p.kind is p.KEYWORD_ONLY else int(p.default is not p.empty) for p in merged.values()}
    return inspect.Signature(sorted(merged.values(), key=lambda p: rank[p.name]))  # stable: the first stays first


def _read_parameters(title: str, function: Loss) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    wrong = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    if wrong or not parameters:
        raise ConfigError(f"{title}: {_name_loss(function)} must name its inputs and settings one by one")
    return parameters


def _name_loss(loss: str | Loss) -> str:
    return loss if isinstance(loss, str) else str(getattr(loss, "__name__", type(loss).__name__))
