"""What ends an attempt at an episode without its being the policy's doing."""

from __future__ import annotations

__all__ = ["SHORT", "Deadline", "Fault", "described"]

SHORT = 500  # characters of a message that are kept


class Fault(Exception):
    """Something that is not the policy's doing; ends an attempt."""

    def __init__(self, where: str, error: Exception, *, kind: str | None = None) -> None:
        super().__init__(str(error))
        self.where = where
        self.error = error
        self.kind = type(error).__name__ if kind is None else kind


class Deadline(Exception):
    """The episode's time is over."""


def described(error: BaseException) -> str:
    """Return the error's text with its notes, which say whose it is; shortened."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])[:SHORT]
