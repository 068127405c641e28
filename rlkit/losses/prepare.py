"""``prepare``: what stands between a loss function and a backend.

It reads the function's signature, checks data against it, binds the settings, and gives the gradient of the loss
with respect to what the model computed. A backend then only has to carry that gradient into its parameters.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import numpy as np

from rlkit import _aliases, _check
from rlkit._calls import answered
from rlkit.errors import BackendError, ConfigError, DataError
from rlkit.losses._returned import returned
from rlkit.losses._untouched import Reached, Untouched
from rlkit.losses.base import Level, marks, registry
from rlkit.types import Datum

if TYPE_CHECKING:
    import torch
else:
    from rlkit._lazy import torch

__all__ = ["LossGradient", "PreparedLoss", "prepare"]

Driver: TypeAlias = Literal["logprobs", "target_logprobs", "values"]
_DRIVERS = ("logprobs", "target_logprobs", "values")


@attrs.frozen(eq=False)
class LossGradient:
    """The value of a loss, its metrics, and its gradient.

    Attributes:
        value: the sum over the datums.
        metrics: "name:sum" or "name:mean", the latter still summed over the datums, so that parts can be added.
        driver: one gradient per datum, shaped like what the loss was given ([n] or [n, K]).
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
        driver: what the model must give: "logprobs" [n], "target_logprobs" [n, K] (at the int64 input
            ``target_tokens`` [T, K], -1 = none), or "values" [n].
        inputs: names of the datum inputs it needs.
        optional: names of those that it takes when they are there, with their defaults; a tuple of two is one for
            each of a pair.
        entropy: it also wants the exact entropies [n].
        settings: its keyword-only settings.
        named: it was asked for by name, so that a backend may use an implementation of its own (rule R4).
    """

    name: str
    function: Callable[..., object]
    level: Level
    elementwise: bool
    driver: Driver
    inputs: tuple[str, ...]
    optional: Mapping[str, Any]
    entropy: bool
    settings: Mapping[str, Any]
    _order: tuple[str, ...]
    named: bool = False

    def check(self, data: Sequence[Datum]) -> None:
        """Raise DataError where ``data`` lacks what this loss needs, naming datum and input."""
        needed = (*self.inputs, "target_tokens") if self.driver == "target_logprobs" else self.inputs
        for i, datum in enumerate(data):
            missing = [name for name in needed if name not in datum.inputs]
            if missing:
                there = ", ".join(sorted(datum.inputs)) or "none"
                what = f"data[{i}].inputs lacks {missing[0]!r}, which the loss {self.name!r} needs; it has: {there}"
                raise DataError(what + _aliases.input_hint(missing[0]))
            if "weights" in datum.inputs and "weights" not in self._order:
                raise DataError(
                    f"data[{i}].inputs has 'weights', which the loss {self.name!r} does not name: they would do nothing"
                )
            if "sampling_logprobs" in self._order and "sampling_logprobs" in datum.inputs:
                self._check_behaviour(i, datum)
        for name in self.optional:
            if name in _aliases.INPUTS and data and not any(name in datum.inputs for datum in data):
                what = f"names {name!r}, which no datum has, so its default would stand for it"
                raise DataError(f"the loss {self.name!r} {what}{_aliases.input_hint(name)}")
        if self.level == "pair":
            if len(data) % 2:
                raise DataError(f"data has {len(data)} datums; the loss {self.name!r} takes (chosen, rejected) pairs")
            for i, datum in enumerate(data):
                if not datum.mask.any():
                    raise DataError(f"data[{i}].mask is all False; both of a pair need a token of the policy's own")

    def try_out(self, data: Sequence[Datum]) -> None:
        """Call the loss on made-up logprobs, so that a mistake in it raises here and changes nothing.

        Raises:
            MissingPackageError: torch is not installed.
            ConfigError: it does not return a scalar that depends on what the model gives.
            Exception: whatever the function itself raises, unchanged.
        """
        some = [datum for datum in data if datum.mask.any()]
        some = some if self.level == "batch" else some[: 2 if self.level == "pair" else 1]
        entropy = [torch.full((int(datum.mask.sum()),), 0.5) for datum in some]
        with contextlib.suppress(BackendError):  # not finite on made-up numbers, which says nothing about real ones
            self.gradient([self._made_up(datum) for datum in some], some, entropy=entropy)

    def check_settings(self) -> None:
        """Call the loss as far as it can go without torch: the settings are checked before anything is computed.

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
        """Value, metrics, and the gradient with respect to what the model computed.

        Args:
            logprobs: one float tensor per datum, [n] (or [n, K], or values [n]: see ``driver``); detached here.
            data: the datums; those without a masked-in token are not given to the loss.
            entropy: one [n] per datum, for a loss that names it.
            places: where the user's list has the datums, for errors; None: it is ``data``.

        Raises:
            BackendError: the value or the gradient is not finite, naming the datum.
        """
        leaves = [x.detach().float().requires_grad_() for x in logprobs]
        entropies = [x.detach().float().requires_grad_() for x in entropy] if self.entropy and entropy else None
        used = [i for i, datum in enumerate(data) if datum.mask.any()]
        total, metrics = self._call(leaves, entropies, data, used)
        sources = [leaves[i] for i in used] + ([entropies[i] for i in used] if entropies else [])
        found: dict[int, torch.Tensor] = {}
        if used:
            if not total.requires_grad:
                raise ConfigError(
                    f"the loss {self.name!r} does not depend on {self.driver}: it was detached, or under no_grad"
                )
            gradients = torch.autograd.grad(total, sources, allow_unused=True)
            found = {id(x): g for x, g in zip(sources, gradients, strict=True) if g is not None}
        value = float(total.detach())
        driver = [found.get(id(x), torch.zeros_like(x)) for x in leaves]
        extra = [found.get(id(x), torch.zeros_like(x)) for x in entropies] if entropies else None
        self._check_finite(value, driver, extra, range(len(data)) if places is None else places)
        return LossGradient(value, {k: float(v) for k, v in metrics.items()}, driver, extra)

    def _call(
        self,
        leaves: Sequence[torch.Tensor],
        entropies: Sequence[torch.Tensor] | None,
        data: Sequence[Datum],
        used: Sequence[int],
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Sum the loss of the used datums, by calls of the shape that the loss's level asks for."""
        if self.level == "batch":
            calls = [list(used)] if used else []
        elif self.level == "pair":
            calls = [list(used[k : k + 2]) for k in range(0, len(used), 2)]
        elif self.elementwise and used and leaves[used[0]].ndim == 1:  # one call; targets may differ in number
            calls = [list(used)]
        else:
            calls = [[i] for i in used]
        values: list[torch.Tensor] = []
        metrics: dict[str, float] = {}
        for call in calls:
            arguments = {
                name: self._argument(name, leaves, entropies, data, call)
                for name in self._order
                if name not in self.optional or any(name in data[i].inputs for i in call)
            }
            value, reported = returned(self.name, self.function(**arguments, **self.settings))
            values.append(value)
            for key, number in reported.items():
                if self.elementwise and not key.endswith(":sum"):
                    raise ConfigError(
                        f"metric {key!r} of the elementwise loss {self.name!r}: its name must end in ':sum'"
                    )
                metrics[key] = metrics.get(key, 0.0) + number * (len(call) if key.endswith(":mean") else 1)
        return (torch.stack(values).sum() if values else torch.zeros(())), metrics

    def _argument(
        self,
        name: str,
        leaves: Sequence[torch.Tensor],
        entropies: Sequence[torch.Tensor] | None,
        data: Sequence[Datum],
        call: Sequence[int],
    ) -> Any:
        if name == self.driver:
            parts = [leaves[i] for i in call]
        elif name == "entropy" and self.entropy:
            parts = [entropies[i] for i in call] if entropies else []
            if not parts:
                raise ConfigError(f"the loss {self.name!r} names entropy, and none was given")
        else:
            parts = [self._input(name, k, data[i], leaves[i]) for k, i in enumerate(call)]
        if self.level == "datum":
            if len(call) == 1:
                return parts[0]
            flat = [p.expand(leaves[i].shape[0]) if p.ndim == 0 else p for p, i in zip(parts, call, strict=True)]
            return torch.cat(flat)
        return tuple(parts) if self.level == "pair" else parts

    def _input(self, name: str, place: int, datum: Datum, like: torch.Tensor) -> torch.Tensor:
        array = datum.inputs.get(name)
        if array is None:  # another datum of this call has it
            default = self.optional[name]
            default = default[place] if isinstance(default, tuple) else default
            if default is None:
                raise DataError(f"some datums have the input {name!r} of the loss {self.name!r} and some do not")
            return torch.tensor(float(default), device=like.device)
        if array.ndim:
            array = array[datum.mask]
        return torch.tensor(array, device=like.device)

    def _check_behaviour(self, i: int, datum: Datum) -> None:
        if datum.temperature == 0:
            raise DataError(
                f"data[{i}] was sampled greedily (temperature 0), which has no sampling_logprobs that the loss "
                f"{self.name!r} could form a ratio with; sample with a temperature above 0, or use cross_entropy"
            )
        if datum.truncated:
            raise DataError(
                f"data[{i}] was sampled with top_p, top_k, min_p or a penalty, so its sampling_logprobs are not the "
                f"policy's and the ratio of the loss {self.name!r} would be off; give "
                "sample.datum(sampling_logprobs=...) corrected ones, such as sampler.logprobs gives"
            )

    def _check_finite(
        self,
        value: float,
        driver: Sequence[torch.Tensor],
        extra: Sequence[torch.Tensor] | None,
        places: Sequence[int],
    ) -> None:
        for i, (place, gradient) in enumerate(zip(places, driver, strict=True)):
            if not (torch.isfinite(gradient).all() and (extra is None or torch.isfinite(extra[i]).all())):
                raise BackendError(f"the loss {self.name!r} has a non-finite gradient at data[{place}]")
        if not np.isfinite(value):
            raise BackendError(f"the loss {self.name!r} is {value}")

    def _made_up(self, datum: Datum) -> torch.Tensor:
        if self.driver == "target_logprobs":
            return torch.full(datum.inputs["target_tokens"][datum.mask].shape, -1.0)
        near = datum.inputs.get("sampling_logprobs")
        if near is not None and near.ndim:
            return torch.tensor(near[datum.mask])
        return torch.full((int(datum.mask.sum()),), -1.0)


@answered
def prepare(loss: str | Callable[..., object], config: Mapping[str, Any] | None = None) -> PreparedLoss:
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
    settings: dict[str, Any] = {}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the loss {name!r} has no signature to read: {error}") from error
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


def _bound(name: str, settings: dict[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(_check.problem("config", f"got {_check.shown(config)}", "a mapping of settings, or None"))
    for key in config or {}:
        if key not in settings:
            there = ", ".join(sorted(settings)) or "none"
            hint = _aliases.answer("losses", str(key), settings)
            raise ConfigError(f"config[{key!r}]: the loss {name!r} has no such setting; it has: {there}{hint}")
    settings = {**settings, **(config or {})}
    for key, value in settings.items():
        if value is inspect.Parameter.empty:
            raise ConfigError(f"config lacks {key!r}, a setting of the loss {name!r} without a default")
    return settings
