"""Try faster paths before they are taken; log the reason, or warn of it, where one is not taken."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

import attrs

from rlkit._runtime import warn

__all__ = ["REFUSALS", "NotSupportedHere", "Outcome", "try_path"]

_log = logging.getLogger(__name__)
_warned: set[str] = set()
REFUSALS = (ValueError, NotImplementedError)  # what libraries raise for what they do not support


class NotSupportedHere(NotImplementedError):
    """A path does not support this model, device or build of a library, and says so itself."""


@attrs.frozen
class Outcome:
    """The result of a path's trial.

    Attributes:
        works: whether to take it.
        reason: the numbers that decided.
    """

    works: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.works


def try_path(
    path: str,
    trial: Callable[[], Outcome],
    slower: str,
    *,
    refusals: tuple[type[Exception], ...] = REFUSALS,
    loud: bool = False,
) -> bool:
    """Return whether a path works; log why not, or warn once where the reason is a bug of rlkit's.

    Args:
        path: its name.
        trial: compares its numbers.
        slower: what happens without it.
        refusals: which errors mean "not supported" where the code of torch or transformers raises it.
        loud: whether to warn of every reason.
    """
    try:
        outcome = trial()
    except Exception as error:  # noqa: BLE001  # whatever the path raises, a slower one is right
        if not _is_refusal(error, refusals):
            _warn_of_bug(path, slower, error)
            return False
        outcome = Outcome(False, f"{type(error).__name__}: {error}")
    if not outcome.works:
        message = f"{path} is not used, so {slower}: {outcome.reason}"
        warn(message) if loud else _log.info("%s", message)
    return outcome.works


def _is_refusal(error: Exception, refusals: tuple[type[Exception], ...]) -> bool:
    """Return whether a path declared it, or a library refused what it does not support."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    library = str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "transformers")
    return isinstance(error, NotSupportedHere) or (library and isinstance(error, refusals))


def _warn_of_bug(path: str, slower: str, error: Exception) -> None:
    text = "".join(traceback.format_exception(error)).rstrip()
    place = traceback.extract_tb(error.__traceback__)[-1]
    cause = f"{path} {type(error).__name__} {place.filename}:{place.lineno}"
    if cause not in _warned:
        _warned.add(cause)
        warn(f"{path} failed and is not used, so {slower}. Numbers stay right; please report this bug:\n{text}")
