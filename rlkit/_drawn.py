"""How tokens are drawn: what ``SamplingParams`` asks for and ``Sample`` records alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, cast

import attrs

from rlkit import _check
from rlkit.errors import RlkitError

__all__ = ["DRAWN_WITH", "NEW_OPTIONS", "Drawn", "DrawnWith"]

NEW_OPTIONS: Mapping[str, float] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Options that not every sampler has, and their neutral values."""

DRAWN_WITH = ("temperature", "top_p", "top_k", *NEW_OPTIONS)


class DrawnWith(TypedDict, total=False):
    """Some of these fields."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


class Drawn:
    """A mixin of the two classes, which have these fields."""

    __slots__ = ()

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    @property
    def drawn_with(self) -> DrawnWith:
        """The fields that say how tokens are drawn, by name: a sampler passes them on to its samples."""
        return cast("DrawnWith", {name: getattr(self, name) for name in DRAWN_WITH})

    @property
    def truncates(self) -> bool:
        """Whether top_p, top_k or min_p cuts the distribution."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def penalizes(self) -> bool:
        """Whether tokens that were there before are less, or more, probable than to the policy."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reshapes(self) -> bool:
        """Whether tokens are drawn from another distribution than the policy's at that temperature."""
        return self.temperature > 0 and (self.truncates or self.penalizes)

    def _check_drawn(self, where: str, error: type[RlkitError]) -> None:
        _check.temperature(where + "temperature", self.temperature, zero=True, error=error)
        _check.real(where + "top_p", self.top_p, above=0.0, high=1.0, error=error)
        if self.top_k != -1 or isinstance(self.top_k, (bool, float)):
            _check.integer(where + "top_k", self.top_k, low=1, why="or -1 for off", error=error)
        _check.real(where + "min_p", self.min_p, low=0.0, high=1.0, error=error)
        _check.real(where + "repetition_penalty", self.repetition_penalty, low=0.001, high=1000.0, error=error)
        for name in ("presence_penalty", "frequency_penalty"):
            _check.real(where + name, getattr(self, name), low=-2.0, high=2.0, error=error)

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in self._fields()}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        for field in self._fields():  # a pickle of an earlier version lacks the later ones
            object.__setattr__(self, field.name, state.get(field.name, field.default))

    def _fields(self) -> tuple[attrs.Attribute[object], ...]:
        fields: tuple[attrs.Attribute[object], ...] = attrs.fields(cast("type[attrs.AttrsInstance]", type(self)))
        return fields
