"""The error tree. Every error rlkit raises on its own behalf is an ``RlkitError``.

Foreign errors stay attached as ``__cause__``; an exception raised by the user's own function passes
through unchanged. All of them can be pickled.
"""

from __future__ import annotations

import concurrent.futures

__all__ = [
    "AgentError",
    "ArgumentError",
    "BackendError",
    "BackendTimeout",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EnvBusy",
    "EnvError",
    "EnvLost",
    "EnvTimeout",
    "MissingPackageError",
    "RankLost",
    "RequestCancelled",
    "RlkitError",
    "StepOutcomeUnknown",
    "TrainerFailed",
    "UnknownNameError",
    "UnsupportedError",
]


class RlkitError(Exception):
    """Base of everything that rlkit raises.

    Args:
        where: the whole message, or the argument that is wrong.
        what, expected, why: of that argument.

    >>> print(DataError("rewards", "is None", "a number", "one per sample"))
    rewards: is None; expected a number (one per sample)
    """

    def __init__(self, where: object = "", what: str = "", expected: str = "", why: str = "") -> None:
        more = f"; expected {expected}" + (f" ({why})" if why else "")
        super().__init__(f"{where}: {what}{more}" if what else where)


class DataError(RlkitError, ValueError):
    """A datum, prompt, reward or other piece of data does not have the required form."""


class ConfigError(RlkitError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another one."""


class ArgumentError(ConfigError, TypeError):
    """A call has an argument that the function does not take, or lacks one; a name known from elsewhere is answered."""


class MissingPackageError(ConfigError, ModuleNotFoundError):
    """A package that is needed is not installed; the message has the command that installs it."""


class UnknownNameError(RlkitError, LookupError):
    """A registry has nothing of that name; the message lists what it has."""


class UnsupportedError(RlkitError, NotImplementedError):
    """The backend cannot give what was asked for; the message names the alternative."""


class BackendError(RlkitError, RuntimeError):
    """A backend could not do what it had accepted."""


class BackendTimeout(BackendError, TimeoutError):
    """Waiting was given up; the work itself goes on."""


class RankLost(BackendError):
    """A process that trains with this one is gone, silent or not the same: connect anew with the last saved path."""


class RequestCancelled(BackendError, concurrent.futures.CancelledError):
    """A sampler's request was cancelled, or given up when nobody waited for it any more; nothing was trained by it."""


class StepOutcomeUnknown(BackendError):
    """An optimizer step may or may not have been applied: reload the last saved state, never repeat it."""


class TrainerFailed(BackendError):
    """Refused because an earlier training call failed; ``__cause__`` is that failure."""


class CheckpointError(BackendError):
    """A saved state could not be written, or is missing, damaged or of another kind."""


class EnvError(RlkitError, RuntimeError):
    """An environment answered with what is no observation or no reward, or tried to end the program."""


class EnvTimeout(EnvError, TimeoutError):
    """An environment did not answer in time; where it was running in a thread, the thread goes on."""


class EnvBusy(EnvError):
    """An environment has no capacity now; the same call may succeed later."""


class EnvLost(EnvError, ConnectionError):
    """The process that an environment lived in is gone; the episode can begin again in another one."""


class AgentError(EnvError):
    """An agent's program failed: the message has its exit code and the end of what it wrote to stderr."""
