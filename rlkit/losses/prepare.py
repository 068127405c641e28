"""Say what a loss is, and prepare one for a backend.

A loss gets the n tokens that the policy chose in one datum, and returns the sum of a term for each:

    def clipped(logprobs, sampling_logprobs, advantages, weights=1.0, *, high=1.2):
        ratio = (logprobs - sampling_logprobs).exp()
        return -(weights * ratio.clamp(max=high) * advantages).sum()

Its signature is its schema. The first parameter, its driver, is what the model computes: ``logprobs`` [n],
``target_logprobs`` [n, K] (0 where a target is -1) or ``values`` [n]. The other positional ones are inputs of the
datums, [n] or (); beside [n, K] other logprobs are [n, K]. A datum may omit an input that has a default. An input named
``entropy`` [n] does not come from the datum: the model computes it. Keyword-only parameters are settings, and
``config`` sets them. A loss returns a scalar tensor, or (scalar, {name: number}).

Multiply the term of each token by ``weights``, () or [n], and divide by no length or count; for [n, K] write
``(weights * x.sum(-1)).sum()``. ``@loss(level="pair")`` gives a loss two datums at once, every argument a tuple of two;
"batch" gives it a list of all datums with a token of the policy. There the default 1.0 of ``weights`` comes once for
each datum. ``@loss(elementwise=True)`` says that the loss is a sum over tokens, so that one call may get the tokens of
many datums; a trial with logprobs [n] that shows otherwise is a ConfigError.

A backend calls ``prepare(loss, config)``, and of the result ``check(data)`` and ``try_out(data)`` before any work
(``InProcessBackend`` does both), then ``gradient(outputs, data)`` for each micro-batch, in which pairs stay whole, but
once at the level "batch". It passes this gradient, and no other, back to its parameters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs
import numpy as np
import torch
from torch import Tensor

from rlkit import _check
from rlkit.errors import BackendError, ConfigError, DataError
from rlkit.metrics import names
from rlkit.registry import Registry
from rlkit.types import Datum

__all__ = [
    "Driver",
    "Level",
    "LossGradient",
    "Marks",
    "PreparedLoss",
    "Range",
    "Weights",
    "check_shapes",
    "define",
    "guard_shapes",
    "loss",
    "marks",
    "mask_weightless",
    "prepare",
    "register",
    "registry",
]

Level: TypeAlias = Literal["datum", "pair", "batch"]
Driver: TypeAlias = Literal["logprobs", "target_logprobs", "values"]
Weights: TypeAlias = Tensor | float  # [n], or one number for all
Argument: TypeAlias = Tensor | Sequence[Tensor]  # of one datum; of a pair or a batch
F = TypeVar("F", bound=Callable[..., object])

_DRIVERS = ("logprobs", "target_logprobs", "values")
_RESERVED = ("loss:sum", "tokens:sum", "datums:sum")  # what a backend itself reports

registry = Registry("loss", entry_point_group="rlkit.losses")
register = registry.register


@attrs.frozen
class Range:
    """The values that an input may have: [low, high], only integers where ``whole``, one per datum where ``single``."""

    low: float = 0.0
    high: float = math.inf
    whole: bool = False
    single: bool = False

    def check(self, where: str, array: np.ndarray) -> None:
        """Raise DataError for an array with another value, or another shape."""
        if self.single and array.ndim:
            raise DataError(where, f"has shape {array.shape}", "()", "one number for the whole sequence")
        wrong = np.argwhere((array < self.low) | (array > self.high) | (self.whole & (array % 1 != 0)))
        if len(wrong):
            kind = "an integer" if self.whole else "a number"
            expected = f"{kind} in [{self.low:g}, {self.high:g}]" if self.high < math.inf else f"{kind} >= {self.low:g}"
            index = "".join(f"[{i}]" for i in wrong[0])
            raise DataError(where + index, f"is {array[tuple(wrong[0])]}", expected)


@attrs.frozen
class Marks:
    """Say how a loss is called, and what its signature cannot tell.

    Attributes:
        level, elementwise: see ``loss``.
        ranges: the values that inputs may have which act as settings, such as the coefficient of a KL term.
        score: of a loss that prefers the chosen of two answers to one prompt: arguments of one -> its score. How far
            the chosen one is ahead is reported as a metric.
    """

    level: Level = "datum"
    elementwise: bool = False
    ranges: Mapping[str, Range] = attrs.field(factory=dict, repr=False)
    score: Callable[[Mapping[str, Tensor]], Tensor] | None = attrs.field(default=None, repr=False)


def loss(*, level: Level = "datum", elementwise: bool = False) -> Callable[[F], F]:
    """Mark how a loss function takes its datums; does not register it.

    Args:
        level: "datum": called once per datum with tensors [n]. "pair": called once per two consecutive datums
            (chosen, rejected), every argument a tuple of two. "batch": called once with everything, every argument
            a list with one tensor per datum that has a token of the policy.
        elementwise: the loss is a sum over tokens of a function of that token alone, so that one call on the
            concatenated tokens of many datums gives the same; only at level "datum". Tokens whose ``weights`` are 0
            are left out of that call, so that their results, however large, have no effect.

    >>> @loss(elementwise=True)
    ... def likelihood(logprobs, weights=1.0):
    ...     return -(weights * logprobs).sum()
    >>> marks(likelihood)
    Marks(level='datum', elementwise=True)
    """
    _check.choice("loss(level)", level, ("datum", "pair", "batch"))
    _check.flag("loss(elementwise)", elementwise)
    if elementwise and level != "datum":
        raise ConfigError(f"loss(elementwise=True) needs level 'datum'; got {level!r}")

    def mark(function: F) -> F:
        function.__rlkit_loss__ = Marks(level, elementwise)  # type: ignore[attr-defined]
        return function

    return mark


def marks(function: Callable[..., object]) -> Marks:
    """Return the marks of a loss function, also within a ``functools.partial``; those of ``loss()`` without any."""
    found = getattr(function, "__rlkit_loss__", None) or getattr(
        getattr(function, "func", None), "__rlkit_loss__", None
    )
    return found if isinstance(found, Marks) else Marks()


@attrs.frozen(eq=False)
class LossGradient:
    """The value of a loss, its metrics, and its gradient.

    Attributes:
        value: the sum over the datums.
        metrics: names that end in ":sum", ":mean", ":max" or ":min". A mean is still a sum over datums here, so that
            micro-batches add up; ``assemble_output`` of a backend divides it.
        driver: one gradient per datum, shaped like the loss's input ([n] or [n, K]).
        entropy: one [n] per datum where the loss names ``entropy``, else None.
    """

    value: float
    metrics: Mapping[str, float]
    driver: Sequence[Tensor]
    entropy: Sequence[Tensor] | None = None


def prepare(loss: str | Callable[..., object], config: Mapping[str, object] | None = None) -> PreparedLoss:
    """Read the signature of a loss, given by name or as a function, and bind its settings.

    Args:
        loss: a name of ``rlkit.losses.registry``, or ``fn(logprobs, <inputs>, weights=1.0, *, <settings>)``.
        config: the keyword-only settings to change.

    Raises:
        UnknownNameError: no loss has that name.
        ConfigError: a setting is unknown or missing, or the signature cannot be a loss's.

    >>> prepared = prepare("ppo", {"clip_high_threshold": 1.28})
    >>> prepared.inputs, prepared.settings["clip_high_threshold"]
    (('sampling_logprobs', 'advantages'), 1.28)
    """
    function = registry.resolve(loss)
    name = loss if isinstance(loss, str) else str(getattr(function, "__name__", type(function).__name__))
    positional, defaults = _read_signature(name, function)
    driver, *inputs = positional
    optional = {key: positional[key] for key in inputs if positional[key] is not inspect.Parameter.empty}
    marked = marks(function)
    return PreparedLoss(
        name=name,
        function=function,
        level=marked.level,
        elementwise=marked.elementwise,
        driver=cast("Driver", driver),
        inputs=tuple(key for key in inputs if key not in optional and key != "entropy"),
        optional=optional,
        entropy="entropy" in inputs,
        settings=_bind_settings(name, defaults, config, inputs),
        order=tuple(positional),
        named=isinstance(loss, str),
    )


def _read_signature(name: str, function: Callable[..., object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the defaults of the positional parameters, the driver first, and those of the settings."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the loss {name!r} has no readable signature: {error}") from error
    for p in parameters:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            what = f"has the {p.kind.description} parameter {str(p)!r}"
            raise ConfigError(f"the loss {name!r}", what, "inputs and settings named one by one")
    positional = {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}
    if next(iter(positional), None) not in _DRIVERS:
        raise ConfigError(f"the first parameter of the loss {name!r} must be one of {', '.join(_DRIVERS)}")
    return positional, {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _bind_settings(
    name: str, defaults: Mapping[str, object], config: object, inputs: Sequence[str]
) -> dict[str, object]:
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError("config", f"got {_check.describe(config)}", "a mapping of settings, or None")
    for key in config or {}:
        if key not in defaults:
            there = f"; {key} is an input: put it after * to make it a setting" if key in inputs else ""
            there = there or _check.suggest(str(key), defaults)
            raise ConfigError(f"config[{key!r}]: the loss {name!r} has no such setting{there}")
    settings = {**defaults, **(config or {})}
    for key, value in settings.items():
        if value is inspect.Parameter.empty:
            raise ConfigError(f"config lacks {key!r}, a setting of the loss {name!r} without a default")
    return settings


@attrs.frozen(eq=False)
class PreparedLoss:
    """A loss with its settings bound.

    Attributes:
        name: for messages.
        function: called with the driver, the inputs and the settings, all by name.
        level, elementwise: its marks.
        driver: the output that the model must give: "logprobs" [n], "target_logprobs" [n, K] (at the int64 input
            ``target_tokens`` [T, K], -1 = none), or "values" [n].
        inputs: names of the datum inputs it needs.
        optional: names of those that it takes if present, with their defaults; a tuple of two is one for
            each of a pair.
        entropy: it also wants the exact entropies [n].
        settings: its keyword-only settings.
        named: it was asked for by name, so that a backend may use its own implementation (rule R4).
    """

    name: str
    function: Callable[..., object]
    level: Level
    elementwise: bool
    driver: Driver
    inputs: tuple[str, ...]
    optional: Mapping[str, float | tuple[float | None, ...] | None]
    entropy: bool
    settings: Mapping[str, Any]
    _order: tuple[str, ...]
    named: bool = False

    def check(self, data: Sequence[Datum]) -> None:
        """Raise DataError, naming datum and input, where one is missing or has a wrong shape or value."""
        for i, datum in enumerate(data):
            self._check_datum(f"data[{i}]", datum)
        if self.level == "pair":
            self._check_pairs(data)

    def _check_datum(self, where: str, datum: Datum) -> None:
        inputs = datum.inputs
        wide = self.driver == "target_logprobs"
        for name in (*self.inputs, *(["target_tokens"] if wide else [])):
            if name not in inputs:
                there = ", ".join(sorted(inputs)) or "none"
                what = f"lacks {name!r}, which the loss {self.name!r} needs; it has: {there}"
                raise DataError(f"{where}.inputs {what}")
        if wide and inputs["target_tokens"].ndim != 2:
            shape = inputs["target_tokens"].shape
            raise DataError(f"{where}.inputs['target_tokens']", f"has shape {shape}", f"({len(datum)}, K)")
        ranges = marks(self.function).ranges
        for name in (name for name in self._order[1:] if name in inputs):
            _check_input(f"{where}.inputs[{name!r}]", name, datum, wide=wide)
            if name in ranges:
                ranges[name].check(f"{where}.inputs[{name!r}]", inputs[name])
        for name in inputs.keys() - set(self._order):
            meant = {f"{name}s", name.removesuffix("s")} & (self.optional.keys() - inputs.keys())
            if meant or name == "weights":  # other inputs may be of another loss
                what = f"has {name!r}, which the loss {self.name!r} does not take; it would have no effect"
                raise DataError(f"{where}.inputs {what}" + (f"; did you mean {min(meant)!r}?" if meant else ""))
        if "sampling_logprobs" in inputs and "sampling_logprobs" in self._order:
            self._check_sampling(where, datum)

    def _check_sampling(self, where: str, datum: Datum) -> None:
        """Refuse a datum whose sampling_logprobs are not those of the policy that sampled it."""
        if datum.temperature == 0:
            raise DataError(
                f"{where} was sampled greedily (temperature 0), so it has no sampling_logprobs for the ratio of the "
                f"loss {self.name!r}; sample with a temperature above 0, or use cross_entropy"
            )
        if datum.truncated:
            raise DataError(
                f"{where} was sampled with top_p, top_k, min_p or a penalty, so its sampling_logprobs are not the "
                f"policy's and the ratio of the loss {self.name!r} would be wrong; pass corrected ones, from "
                "sampler.logprobs, to sample.datum(sampling_logprobs=...)"
            )

    def _check_pairs(self, data: Sequence[Datum]) -> None:
        if len(data) % 2:
            raise DataError(f"data has {len(data)} datums; the loss {self.name!r} takes (chosen, rejected) pairs")
        for i, datum in enumerate(data):
            if not datum.mask.any():
                raise DataError(f"data[{i}].mask is all False; each datum of a pair needs a token of the policy")
        if marks(self.function).score is None:
            return  # a user's own loss, whose pairs may be any
        prompts = [datum.tokens[: int(datum.mask.argmax())] for datum in data]
        for i in range(1, len(data), 2):
            if not np.array_equal(prompts[i], prompts[i - 1]):
                what = f"has a different prompt than data[{i - 1}]"
                raise DataError(
                    f"data[{i}]", what, "the same prompt", "data is chosen, rejected, chosen, rejected, ..."
                )

    def try_out(self, data: Sequence[Datum]) -> None:
        """Call the loss on made-up logprobs, so that a mistake in it raises here and changes nothing.

        Raises:
            ConfigError: it does not return a scalar that depends on the model's output, or a setting is out of range,
                or it is marked as elementwise and is no sum over tokens.
            Exception: any exception of the function itself, unchanged.
        """
        used = [datum for datum in data if datum.mask.any()]
        some = used if self.level == "batch" else used[: 2 if self.level == "pair" else 1]
        with contextlib.suppress(BackendError):  # not finite on made-up numbers, which does not matter for real ones
            alone = self._call_on_dummies(some)
            # A sum gives tokens the same gradient in any company. Those of rlkit are sums, as its tests say.
            if not self.elementwise or not used or str(self.function.__module__).startswith("rlkit."):
                return
            alone += self._call_on_dummies(used[-1:])
            together = self._call_on_dummies([used[0], used[-1]])
            if not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(alone, together, strict=True)):
                where, what = f"the elementwise loss {self.name!r}", "gives a token another gradient among more tokens"
                raise ConfigError(where, what, "a sum over tokens", "leave the mark out")

    def _call_on_dummies(self, data: Sequence[Datum]) -> list[Tensor]:
        """Return the gradient of each datum's driver."""
        if self.elementwise:  # a weight of 0 would leave tokens out
            weights = [np.asarray(datum.inputs.get("weights", 1.0)) for datum in data]
            pairs = zip(data, weights, strict=True)
            data = [
                d.with_inputs(weights=np.where(w == 0, np.float32(1), w)) if (w == 0).any() else d for d, w in pairs
            ]
        entropy = [torch.full((int(datum.mask.sum()),), 0.5) for datum in data]
        return list(self.gradient([self._dummy_driver(datum) for datum in data], data, entropy=entropy).driver)

    def _dummy_driver(self, datum: Datum) -> Tensor:
        if self.driver == "target_logprobs":
            return torch.full(datum.inputs["target_tokens"][datum.mask].shape, -1.0)
        near = datum.inputs.get("sampling_logprobs")  # at these the ratio is 1, where every loss of a ratio is finite
        if near is not None and near.ndim:
            return torch.tensor(near[datum.mask])
        return torch.full((int(datum.mask.sum()),), -1.0)

    def gradient(
        self,
        outputs: Sequence[Tensor],
        data: Sequence[Datum],
        *,
        entropy: Sequence[Tensor] | None = None,
        places: Sequence[int] | None = None,
    ) -> LossGradient:
        """Return the value, the metrics, and the gradient with respect to the model's outputs.

        Args:
            outputs: of the model, one float tensor per datum: logprobs [n], target_logprobs [n, K] or values [n], as
                ``driver`` says; detached here.
            data: the datums. The loss does not get those without a masked-in token; an elementwise loss does not get
                tokens of weight 0.
            entropy: one [n] per datum, for a loss that names it.
            places: indices of the datums in the user's list, for errors; None: it is ``data``.

        Raises:
            BackendError: the value, a metric or the gradient is not finite, naming the datum.
        """
        leaves: dict[str, list[Tensor]] = {self.driver: _make_leaves(outputs)}
        if self.entropy:
            if entropy is None:
                raise ConfigError(f"the loss {self.name!r} names entropy, but none was given")
            leaves["entropy"] = _make_leaves(entropy)
        used = [i for i, datum in enumerate(data) if self._choose_tokens(datum).any()]
        values: list[Tensor] = []
        metrics: dict[str, float] = {}
        for call in self._cut_calls(used, leaves[self.driver]):
            value, reported = self._call(call, leaves, data)
            values.append(value)
            names.add(metrics, reported, len(call))
        total = torch.stack(values).sum() if values else torch.zeros(())
        sources = [x for each in leaves.values() for x in each]
        gradients = self._differentiate(total, sources) if values else [torch.zeros_like(x) for x in sources]
        value = float(total.detach())
        self._check_finite(value, gradients, range(len(outputs)) if places is None else places)
        return LossGradient(value, metrics, gradients[: len(outputs)], gradients[len(outputs) :] or None)

    def _differentiate(self, total: Tensor, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient with respect to each source, 0 for those that the loss was not given or passed over."""
        if not total.requires_grad:
            what = f"the loss {self.name!r} does not depend on {self.driver}: it was detached, or under no_grad"
            raise ConfigError(what)
        found = torch.autograd.grad(total, sources, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(sources, found, strict=True)]

    def _check_finite(self, value: float, gradients: Sequence[Tensor], places: Sequence[int]) -> None:
        for i, gradient in enumerate(gradients):  # of the driver, then of the entropy
            if not torch.isfinite(gradient).all():
                place = places[i % len(places)]
                raise BackendError(f"the loss {self.name!r} has a non-finite gradient at data[{place}]")
        if not math.isfinite(value):
            raise BackendError(f"the loss {self.name!r} is {value}")

    def _cut_calls(self, used: list[int], driver: Sequence[Tensor]) -> list[list[int]]:
        """Return the places of the datums of each call."""
        if self.level == "pair":
            return [used[k : k + 2] for k in range(0, len(used), 2)]
        # Matrices [n, K] are not concatenated: each datum may have another K.
        whole = self.level == "batch" or (self.elementwise and used and driver[used[0]].ndim == 1)
        return [used] if used and whole else [[i] for i in used]

    def _call(
        self, call: Sequence[int], leaves: Mapping[str, Sequence[Tensor]], data: Sequence[Datum]
    ) -> tuple[Tensor, dict[str, float]]:
        """Call the function once, on the datums at ``call``, and check what it returns."""
        arguments: dict[str, Argument] = {}
        for name in self._order:
            if name in leaves:
                parts = [self._drop_tokens(leaves[name][i], data[i]) for i in call]
            elif self._takes_default(name) and not any(name in data[i].inputs for i in call):
                continue
            else:
                parts = [self._read_input(name, k, data[i], leaves[self.driver][i]) for k, i in enumerate(call)]
            arguments[name] = self._join(parts, [data[i] for i in call])
        try:
            result = self.function(**arguments, **self.settings)
        except RuntimeError as error:
            if "numpy() on Tensor that requires grad" not in str(error):
                raise
            what = "computes with numpy, which passes no gradient"
            raise ConfigError(f"the loss {self.name!r}", what, "torch operations, such as x.exp()") from error
        value, metrics = self._check_result(result)
        return value, {**self._measure_margin(arguments), **metrics}

    def _takes_default(self, name: str) -> bool:
        """Return whether the function's own default is in the form of its level: else each datum gets it."""
        return name in self.optional and (self.level == "datum" or not isinstance(self.optional[name], (int, float)))

    def _join(self, parts: Sequence[Tensor], data: Sequence[Datum]) -> Argument:
        """Put what several datums have in the place of one argument together, in the form of the loss's level."""
        if self.level != "datum":
            return tuple(parts) if self.level == "pair" else list(parts)
        if len(parts) == 1:
            return parts[0]
        sizes = [int(self._choose_tokens(datum).sum()) for datum in data]
        return torch.cat([x.expand(n) if x.ndim == 0 else x for x, n in zip(parts, sizes, strict=True)])

    def _read_input(self, name: str, k: int, datum: Datum, like: Tensor) -> Tensor:
        """Return an input of the datum that is the ``k``-th of its call."""
        array = datum.inputs.get(name)
        if array is not None:
            return torch.tensor(array[self._choose_tokens(datum)] if array.ndim else array, device=like.device)
        default = self.optional[name]  # another datum of this call has the input
        default = default[k] if isinstance(default, tuple) else default
        if default is None:
            raise DataError(f"some datums lack the input {name!r} of the loss {self.name!r}; expected all or none")
        return torch.tensor(float(default), device=like.device)

    def _choose_tokens(self, datum: Datum) -> np.ndarray:
        """Return which tokens [T] the loss is given."""
        weights = datum.inputs.get("weights")
        chosen: np.ndarray = datum.mask & (weights != 0) if self.elementwise and weights is not None else datum.mask
        return chosen

    def _drop_tokens(self, output: Tensor, datum: Datum) -> Tensor:
        """Reduce an output of the model, which has all n tokens, to those that the loss is given."""
        chosen = self._choose_tokens(datum)[datum.mask]
        return output if chosen.all() else output[torch.tensor(np.flatnonzero(chosen), device=output.device)]

    def _check_result(self, result: object) -> tuple[Tensor, dict[str, float]]:
        """Return the scalar, and the metrics under names that say how they are put together."""
        where = f"the loss {self.name!r}"
        value, reported = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(value, Tensor) or value.ndim != 0:
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _check.describe(value)
            raise ConfigError(where, f"returned {shape}", "a scalar tensor, or (tensor, metrics)", "sum it")
        if not isinstance(reported, Mapping):
            raise ConfigError(where, f"returned metrics {_check.describe(reported)}", "a dict")
        return value, dict(self._read_metric(where, key, number) for key, number in reported.items())

    def _read_metric(self, where: str, key: object, number: object) -> tuple[str, float]:
        """Return the name that says how a metric is put together, and the number."""
        if not isinstance(key, str) or key in _RESERVED:
            expected = f"other names; {', '.join(_RESERVED)} are reserved for the backend"
            raise ConfigError(where, f"returned the metric {key!r}", expected)
        name = names.with_ending(key)
        if self.elementwise and names.reduction(name) == "mean":  # one call has many datums
            expected = "its name must end in ':sum', ':max' or ':min'"
            raise ConfigError(f"metric {name!r} of the elementwise loss {self.name!r}: {expected}")
        number = number.item() if isinstance(number, Tensor) and number.numel() == 1 else _check.plain(number)
        if not isinstance(number, (int, float)):
            raise ConfigError(where, f"returned the metric {key!r} = {_check.describe(number)}", "one number")
        if not math.isfinite(number):
            what, why = f"returned the metric {key!r} = {number}", "leave out what cannot be measured"
            raise BackendError(where, what, "a finite number", why)
        return name, float(number)

    def _measure_margin(self, arguments: Mapping[str, Argument]) -> dict[str, float]:
        """Return by how much the chosen of a pair is ahead of the rejected, and whether it is."""
        score = marks(self.function).score
        if score is None:
            return {}
        with torch.no_grad():
            chosen, rejected = (float(score({name: pair[k] for name, pair in arguments.items()})) for k in (0, 1))
        return {"margin:mean": chosen - rejected, "accuracy:mean": float(chosen > rejected)}


def _make_leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().float().requires_grad_() for x in outputs]


def _check_input(where: str, name: str, datum: Datum, *, wide: bool) -> None:
    """Refuse shapes that would broadcast: [n] times [n, 1] is [n, n], each token times the sum of all.

    An input is a number or shaped like the driver, [n] or [n, K]; with [n, K] it may also be [n]. Logprobs are shaped
    exactly like the driver.
    """
    shape, n, length = datum.inputs[name].shape, int(datum.mask.sum()), len(datum)
    targets = datum.inputs["target_tokens"].shape[1:] if wide else ()
    tails = [targets] if name.endswith("logprobs") else [None, (), targets][: 3 if wide else 2]
    if (shape[1:] if shape else None) not in tails:
        expected = [str(x) for tail in tails for x in ([()] if tail is None else [(n, *tail), (length, *tail)])]
        why = "one per target token" if wide else _check.squeeze(shape)
        raise DataError(where, f"has shape {shape}", f"{', '.join(expected[:-1])} or {expected[-1]}", why)


# The rest serves the losses of rlkit; a user's loss does not need it.


def define(
    name: str,
    *,
    level: Level = "datum",
    elementwise: bool = False,
    ranges: Mapping[str, Range] | None = None,
    score: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
) -> Callable[[F], F]:
    """Register a loss of rlkit with its marks, and check the shapes in direct calls of it.

    An elementwise loss leaves tokens of weight 0 out in direct calls, too. Other levels do so in their formulas, since
    what the tokens of a sequence or batch have in common depends on all of them.
    """

    def add(function: F) -> F:
        guarded = guard_shapes(function, drop_weightless=elementwise)
        guarded.__rlkit_loss__ = Marks(level, elementwise, ranges or {}, score)  # type: ignore[attr-defined]
        return register(name)(guarded)

    return add


def guard_shapes(function: F, *, drop_weightless: bool = False) -> F:
    """Decorate a loss or KL estimator: direct calls, too, refuse tensors that would broadcast."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        given = signature.bind(*args, **kwargs).arguments
        check_shapes(function.__name__, given)
        return function(**(_replace_weightless(given) if drop_weightless else given))

    return cast("F", call)


def check_shapes(title: str, given: Mapping[str, Any]) -> None:
    """Raise DataError for a tensor that is neither () nor shaped like the first argument; logprobs are never ().

    Of targets [n, K] other logprobs and ids are [n, K], all else is [n].
    """
    driver, like = next(iter(given.items()))
    if isinstance(like, (list, tuple)):
        for k, each in enumerate(like):
            part = {n: v[k] if isinstance(v, (list, tuple)) and k < len(v) else v for n, v in given.items()}
            check_shapes(title, part | {driver: each})
    elif isinstance(like, Tensor):
        for name, value in given.items():
            shape = tuple(getattr(value, "shape", ()))
            logprobs = name.endswith("logprobs")
            wide = driver == "target_logprobs" and not (logprobs or name == "target_tokens")
            expected = tuple(like.shape[:-1] if wide else like.shape)
            scalar = not (logprobs and isinstance(value, Tensor))
            if shape != expected and not (scalar and shape == ()):
                allowed = "() or " * scalar + f"{expected}"
                raise DataError(f"{title}({name})", f"has shape {shape}", allowed, _check.squeeze(shape))


def mask_weightless(weights: Weights, x: Tensor, fill: float = 0.0) -> Tensor:
    """Return ``x``, but ``fill`` where the weight is 0: 0 times an overflow would be NaN, in the gradient too."""
    if isinstance(weights, (int, float)):
        if weights != 0:
            return x
        weights = x.new_tensor(weights)
    return x.where(weights != 0, fill)


def _replace_weightless(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the inputs of tokens with weight 0 before an elementwise loss computes with them."""
    weights = given.get("weights", 1.0)
    if "target_logprobs" in given and not isinstance(weights, (int, float)):
        weights = weights.unsqueeze(-1)
    replaced = dict(given)
    for name, value in given.items():
        if not isinstance(value, (int, float)):
            if name.endswith("logprobs"):
                replaced[name] = mask_weightless(weights, value, -1.0)
            elif name in ("advantages", "values", "old_values", "returns"):
                replaced[name] = mask_weightless(weights, value)
    return replaced
