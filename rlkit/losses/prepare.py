"""``prepare``, the interface between a loss function and a backend.

It reads the function's signature, checks data against it, binds the settings, and computes the gradient of the
loss with respect to the model's outputs. A backend then only has to propagate that gradient to its parameters.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit.errors import BackendError, ConfigError, DataError
from rlkit.losses.base import Level, Reached, Untouched, marks, ranges, registry
from rlkit.metrics import names
from rlkit.metrics.names import with_ending
from rlkit.types import Datum

if TYPE_CHECKING:
    import torch
else:
    from rlkit._packages import torch

__all__ = [
    "LossGradient",
    "PreparedLoss",
    "check_behaviour",
    "check_pairs",
    "check_shape",
    "margin",
    "preference",
    "prepare",
    "returned",
]

Argument: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"  # of one datum, or of a pair or batch


def check_shape(where: str, name: str, datum: Datum, driver: str) -> None:
    """Refuse shapes that would broadcast: [n] times [n, 1] is [n, n], each token times the sum of all.

    An input is a number or shaped like the driver, [n] or [n, K]; beside [n, K] it may be [n], too. Logprobs are shaped
    exactly like the driver.
    """
    shape, n, length = datum.inputs[name].shape, int(datum.mask.sum()), len(datum)
    wide = datum.inputs["target_tokens"].shape[1:] if driver == "target_logprobs" else ()
    tails = [wide] if name.endswith("logprobs") else [None, (), wide][: 3 if wide else 2]
    if (shape[1:] if shape else None) not in tails:
        expected = [str(x) for tail in tails for x in ([()] if tail is None else [(n, *tail), (length, *tail)])]
        why = "one per target token" if wide else _check.squeeze(shape)
        raise DataError(where, f"has shape {shape}", f"{', '.join(expected[:-1])} or {expected[-1]}", why)


def check_behaviour(name: str, i: int, datum: Datum) -> None:
    """Refuse a datum whose sampling_logprobs are not those of the policy that sampled it."""
    if datum.temperature == 0:
        raise DataError(
            f"data[{i}] was sampled greedily (temperature 0), so it has no sampling_logprobs for the ratio of the "
            f"loss {name!r}; sample with a temperature above 0, or use cross_entropy"
        )
    if datum.truncated:
        raise DataError(
            f"data[{i}] was sampled with top_p, top_k, min_p or a penalty, so its sampling_logprobs are not the "
            f"policy's and the ratio of the loss {name!r} would be wrong; pass corrected ones, from "
            "sampler.logprobs, to sample.datum(sampling_logprobs=...)"
        )


def check_pairs(name: str, data: Sequence[Datum], *, alike: bool) -> None:
    """Refuse data that is not chosen, rejected, chosen, rejected, ...; of ``alike`` pairs the prompts are the same."""
    if len(data) % 2:
        raise DataError(f"data has {len(data)} datums; the loss {name!r} takes (chosen, rejected) pairs")
    for i, datum in enumerate(data):
        if not datum.mask.any():
            raise DataError(f"data[{i}].mask is all False; each datum of a pair needs a token of the policy")
        if alike and i % 2 and not np.array_equal(_prompt(datum), _prompt(data[i - 1])):
            what, expected = f"has a different prompt than data[{i - 1}]", "the same prompt"
            raise DataError(f"data[{i}]", what, expected, "data is chosen, rejected, chosen, rejected, ...")


def preference(function: Callable[..., object]) -> Callable[..., object] | None:
    """Return rlkit's pair loss that this is or is composed of; None for a user's own, whose pairs may be any."""
    while parts := getattr(function, "__rlkit_parts__", None):
        function = parts[0]
    return function if hasattr(function, "__rlkit_per_token__") else None


def margin(function: Callable[..., object], arguments: Mapping[str, Argument]) -> dict[str, float]:
    """Return by how much the chosen of a pair is ahead, and whether it is; return nothing for a user's own loss."""
    loss = preference(function)
    if loss is None:
        return {}
    named = "reference_logprobs" in inspect.signature(loss).parameters  # and not only by a KL term
    references = arguments["reference_logprobs"] if named else (0.0, 0.0)
    gains = [lp.detach() - ref for lp, ref in zip(arguments["logprobs"], references, strict=True)]
    per_token = getattr(loss, "__rlkit_per_token__", False)
    chosen, rejected = (float(gain.mean() if per_token else gain.sum()) for gain in gains)
    return {"margin:mean": chosen - rejected, "accuracy:mean": float(chosen > rejected)}


def _prompt(datum: Datum) -> np.ndarray:
    """Return the tokens before the policy's first."""
    prompt: np.ndarray = datum.tokens[: int(datum.mask.argmax())]
    return prompt


_RESERVED = ("loss:sum", "tokens:sum", "datums:sum")


def returned(name: str, result: object) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the scalar, and the metrics under names that say how they are put together.

    Raises:
        ConfigError: it returned another value.
        BackendError: a metric is not finite.
    """
    value, reported = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(value, torch.Tensor) or value.ndim != 0:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else _check.shown(value)
        raise ConfigError(
            _check.problem(f"the loss {name!r}", f"returned {shape}", "a scalar tensor, or (tensor, metrics)", "sum it")
        )
    if not isinstance(reported, Mapping):
        raise ConfigError(_check.problem(f"the loss {name!r}", f"returned metrics {_check.shown(reported)}", "a dict"))
    metrics = {}
    for key, number in reported.items():
        if not isinstance(key, str) or key in _RESERVED:
            expected = f"other names; {', '.join(_RESERVED)} are reserved for the backend"
            raise ConfigError(_check.problem(f"the loss {name!r}", f"returned the metric {key!r}", expected))
        metrics[with_ending(key)] = float(number.detach() if isinstance(number, torch.Tensor) else number)
        if not np.isfinite(metrics[with_ending(key)]):
            what = f"returned the metric {key!r} = {metrics[with_ending(key)]}"
            raise BackendError(f"the loss {name!r}", what, "a finite number", "leave out what cannot be measured")
    return value, metrics


Driver: TypeAlias = Literal["logprobs", "target_logprobs", "values"]
_DRIVERS = ("logprobs", "target_logprobs", "values")


@attrs.frozen(eq=False)
class LossGradient:
    """The value of a loss, its metrics, and its gradient.

    Attributes:
        value: the sum over the datums.
        metrics: names that end in ":sum", ":mean", ":max" or ":min"; a mean still summed over the datums, so that
            parts can be put together.
        driver: one gradient per datum, shaped like the loss's input ([n] or [n, K]).
        entropy: one [n] per datum where the loss names ``entropy``, else None.
    """

    value: float
    metrics: Mapping[str, float]
    driver: Sequence[torch.Tensor]
    entropy: Sequence[torch.Tensor] | None = None


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
        needed = (*self.inputs, "target_tokens") if self.driver == "target_logprobs" else self.inputs
        for i, datum in enumerate(data):
            self._check_datum(i, datum, needed)
        if self.level == "pair":
            check_pairs(self.name, data, alike=preference(self.function) is not None)

    def _check_datum(self, i: int, datum: Datum, needed: Sequence[str]) -> None:
        missing = [name for name in needed if name not in datum.inputs]
        if missing:
            there = ", ".join(sorted(datum.inputs)) or "none"
            what = f"data[{i}].inputs lacks {missing[0]!r}, which the loss {self.name!r} needs; it has: {there}"
            raise DataError(what)
        targets = datum.inputs["target_tokens"].shape if self.driver == "target_logprobs" else (0, 0)
        if len(targets) != 2:
            raise DataError(f"data[{i}].inputs['target_tokens']", f"has shape {targets}", f"({len(datum)}, K)")
        for name in self._order[1:]:
            if name in datum.inputs:
                check_shape(f"data[{i}].inputs[{name!r}]", name, datum, self.driver)
        for name, allowed in ranges(self.function).items():
            if name in datum.inputs:
                allowed.check(f"data[{i}].inputs[{name!r}]", datum.inputs[name])
        if "weights" in datum.inputs and "weights" not in self._order:
            raise DataError(
                f"data[{i}].inputs has 'weights', which the loss {self.name!r} does not take; they would have no effect"
            )
        if "sampling_logprobs" in self._order and "sampling_logprobs" in datum.inputs:
            check_behaviour(self.name, i, datum)

    def try_out(self, data: Sequence[Datum]) -> None:
        """Call the loss on made-up logprobs, so that a mistake in it raises here and changes nothing.

        Raises:
            MissingPackageError: torch is not installed.
            ConfigError: it does not return a scalar that depends on the model's output.
            Exception: any exception of the function itself, unchanged.
        """
        some = [datum for datum in data if datum.mask.any()]
        some = some if self.level == "batch" else some[: 2 if self.level == "pair" else 1]
        if self.elementwise and some and "weights" in some[0].inputs:  # one of 0 would leave tokens out
            weights = some[0].inputs["weights"]
            some = [some[0].with_inputs(weights=np.where(weights == 0, np.float32(1), weights))]
        entropy = [torch.full((int(datum.mask.sum()),), 0.5) for datum in some]
        with contextlib.suppress(BackendError):  # not finite on made-up numbers, which does not matter for real ones
            self.gradient([self._made_up(datum) for datum in some], some, entropy=entropy)

    def check_settings(self) -> None:
        """Call the loss as far as possible without torch: the settings are checked before anything is computed.

        Raises:
            ConfigError: a setting is out of range.
        """
        with contextlib.suppress(Reached):
            self.function(**dict.fromkeys(self._order, Untouched()), **self.settings)

    def gradient(
        self,
        logprobs: Sequence[torch.Tensor],
        data: Sequence[Datum],
        *,
        entropy: Sequence[torch.Tensor] | None = None,
        places: Sequence[int] | None = None,
    ) -> LossGradient:
        """Return the value, the metrics, and the gradient with respect to the model's outputs.

        Args:
            logprobs: one float tensor per datum, [n] (or [n, K], or values [n]: see ``driver``); detached here.
            data: the datums; those without a masked-in token are not given to the loss, nor, where it is elementwise,
                tokens of weight 0.
            entropy: one [n] per datum, for a loss that names it.
            places: indices of the datums in the user's list, for errors; None: it is ``data``.

        Raises:
            BackendError: the value, a metric or the gradient is not finite, naming the datum.
        """
        leaves = _make_leaves(logprobs)
        entropies = _make_leaves(entropy) if self.entropy and entropy else None
        used = [i for i, datum in enumerate(data) if self._counted(datum).any()]
        total, metrics = self._call(leaves, entropies, data, used)
        sources = [leaves[i] for i in used] + ([entropies[i] for i in used] if entropies else [])
        found: dict[int, torch.Tensor] = {}
        if used and not total.requires_grad:
            raise ConfigError(
                f"the loss {self.name!r} does not depend on {self.driver}: it was detached, or under no_grad"
            )
        if used:
            gradients = torch.autograd.grad(total, sources, allow_unused=True)  # of a batch some may have no say
            found = {id(x): g for x, g in zip(sources, gradients, strict=True) if g is not None}
        value = float(total.detach())
        driver = _take_gradients(found, leaves)
        extra = _take_gradients(found, entropies) if entropies else None
        self._check_finite(value, driver, extra, places)
        return LossGradient(value, {k: float(v) for k, v in metrics.items()}, driver, extra)

    def _call(
        self,
        leaves: Sequence[torch.Tensor],
        entropies: Sequence[torch.Tensor] | None,
        data: Sequence[Datum],
        used: Sequence[int],
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Sum the loss of the used datums, in calls of the form that the loss's level requires."""
        values: list[torch.Tensor] = []
        metrics: dict[str, float] = {}
        for call in self._cut_calls(leaves, used):
            arguments = {
                name: self._argument(name, leaves, entropies, data, call)
                for name in self._order
                if name not in self.optional or any(name in data[i].inputs for i in call)
            }
            value, reported = self._evaluate(arguments)
            values.append(value)
            names.add(metrics, reported, len(call))
        return (torch.stack(values).sum() if values else torch.zeros(())), metrics

    def _cut_calls(self, leaves: Sequence[torch.Tensor], used: Sequence[int]) -> list[list[int]]:
        """Return the datums of each call."""
        if self.level == "pair":
            return [list(used[k : k + 2]) for k in range(0, len(used), 2)]
        # One call of an elementwise loss, too; targets may differ in number.
        whole = self.level == "batch" or (self.elementwise and used and leaves[used[0]].ndim == 1)
        return [list(used)] if used and whole else [[i] for i in used]

    def _evaluate(self, arguments: Mapping[str, Argument]) -> tuple[torch.Tensor, Mapping[str, float]]:
        """Return the value of one call, and its metrics."""
        try:
            result = self.function(**arguments, **self.settings)
        except RuntimeError as error:
            if "numpy() on Tensor that requires grad" not in str(error):
                raise
            what = "computes with numpy, which passes no gradient"
            raise ConfigError(f"the loss {self.name!r}", what, "torch operations, such as x.exp()") from error
        value, reported = returned(self.name, result)
        if self.level == "pair" and self.driver == "logprobs":
            reported = {**margin(self.function, arguments), **reported}
        for key in reported:
            if self.elementwise and names.reduction(key) == "mean":
                expected = "its name must end in ':sum', ':max' or ':min'"
                raise ConfigError(f"metric {key!r} of the elementwise loss {self.name!r}: {expected}")
        return value, reported

    def _argument(
        self,
        name: str,
        leaves: Sequence[torch.Tensor],
        entropies: Sequence[torch.Tensor] | None,
        data: Sequence[Datum],
        call: Sequence[int],
    ) -> Argument:
        if name == self.driver:
            parts = [self._given(leaves[i], data[i]) for i in call]
        elif name == "entropy" and self.entropy:
            parts = [self._given(entropies[i], data[i]) for i in call] if entropies else []
            if not parts:
                raise ConfigError(f"the loss {self.name!r} names entropy, but none was given")
        else:
            parts = [self._input(name, k, data[i], leaves[i]) for k, i in enumerate(call)]
        if self.level == "datum":
            if len(call) == 1:
                return parts[0]
            counts = [int(self._counted(data[i]).sum()) for i in call]
            return torch.cat([p.expand(n) if p.ndim == 0 else p for p, n in zip(parts, counts, strict=True)])
        return tuple(parts) if self.level == "pair" else parts

    def _input(self, name: str, place: int, datum: Datum, like: torch.Tensor) -> torch.Tensor:
        array = datum.inputs.get(name)
        if array is None:  # another datum of this call has it
            default = self.optional[name]
            default = default[place] if isinstance(default, tuple) else default
            if default is None:
                raise DataError(f"some datums lack the input {name!r} of the loss {self.name!r}; expected all or none")
            return torch.tensor(float(default), device=like.device)
        if array.ndim:
            array = array[self._counted(datum)]
        return torch.tensor(array, device=like.device)

    def _counted(self, datum: Datum) -> np.ndarray:
        """Return which tokens [T] the loss is given."""
        weights = datum.inputs.get("weights")
        if not self.elementwise or weights is None:
            return datum.mask
        counted: np.ndarray = datum.mask & (weights != 0)
        return counted

    def _given(self, x: torch.Tensor, datum: Datum) -> torch.Tensor:
        """Select the tokens that the loss gets from the model's outputs for all of the policy's own."""
        counted = self._counted(datum)[datum.mask]
        return x if counted.all() else x[torch.tensor(np.flatnonzero(counted), device=x.device)]

    def _check_finite(
        self,
        value: float,
        driver: Sequence[torch.Tensor],
        extra: Sequence[torch.Tensor] | None,
        places: Sequence[int] | None,
    ) -> None:
        places = range(len(driver)) if places is None else places
        for i, (place, gradient) in enumerate(zip(places, driver, strict=True)):
            if not (torch.isfinite(gradient).all() and (extra is None or torch.isfinite(extra[i]).all())):
                raise BackendError(f"the loss {self.name!r} has a non-finite gradient at data[{place}]")
        if not np.isfinite(value):
            raise BackendError(f"the loss {self.name!r} is {value}")

    def _made_up(self, datum: Datum) -> torch.Tensor:
        if self.driver == "target_logprobs":
            return torch.full(datum.inputs["target_tokens"][datum.mask].shape, -1.0)
        near = datum.inputs.get("sampling_logprobs")  # at these the ratio is 1, where every loss of a ratio is finite
        if near is not None and near.ndim:
            return torch.tensor(near[datum.mask])
        return torch.full((int(datum.mask.sum()),), -1.0)


def _take_gradients(found: Mapping[int, torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [found.get(id(x), torch.zeros_like(x)) for x in leaves]


def _make_leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().float().requires_grad_() for x in tensors]


def prepare(loss: str | Callable[..., object], config: Mapping[str, object] | None = None) -> PreparedLoss:
    """Bind the settings of a loss that is given by name or as a function.

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
    positional: list[inspect.Parameter] = []
    settings: dict[str, object] = {}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the loss {name!r} has no readable signature: {error}") from error
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"the loss {name!r} takes {parameter}; a loss names its inputs and settings one by one")
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings[parameter.name] = parameter.default
        else:
            positional.append(parameter)
    if not positional or positional[0].name not in _DRIVERS:
        raise ConfigError(f"the first parameter of the loss {name!r} must be one of {', '.join(_DRIVERS)}")
    settings = _bound(name, settings, config)
    first, *rest = positional
    rest_names = [p.name for p in rest]
    found = marks(function)
    return PreparedLoss(
        name=name,
        function=function,
        level=found.level,
        elementwise=found.elementwise,
        driver=first.name,  # type: ignore[arg-type]  # checked above
        inputs=tuple(p.name for p in rest if p.default is p.empty and p.name != "entropy"),
        optional={p.name: p.default for p in rest if p.default is not p.empty},
        entropy="entropy" in rest_names,
        settings=settings,
        order=(first.name, *rest_names),
        named=isinstance(loss, str),
    )


def _bound(name: str, settings: dict[str, object], config: Mapping[str, object] | None) -> dict[str, object]:
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(_check.problem("config", f"got {_check.shown(config)}", "a mapping of settings, or None"))
    for key in config or {}:
        if key not in settings:
            raise ConfigError(
                f"config[{key!r}]: the loss {name!r} has no such setting{_check.near(str(key), settings)}"
            )
    settings = {**settings, **(config or {})}
    for key, value in settings.items():
        if value is inspect.Parameter.empty:
            raise ConfigError(f"config lacks {key!r}, a setting of the loss {name!r} without a default")
    return settings
