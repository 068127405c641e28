"""A loss called without torch: its settings are checked, and the first operation on a tensor ends the call."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Reached", "Untouched"]


class Reached(Exception):
    """A loss has begun to compute."""


class Untouched:
    """Stands for a tensor; whatever is done with it ends the call."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Reached

    def _reached(self, *_: object) -> NoReturn:
        raise Reached

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _reached
    __gt__ = __lt__ = __ge__ = __le__ = _reached
