"""The error tree. Every error that rlkit itself raises is an ``RlkitError``.

Foreign errors stay attached as ``__cause__``; an exception raised by the user's own function passes
through unchanged. All of them can be pickled.
"""

from __future__ import annotations

import concurrent.futures

__all__ = [
    "AgentError",
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


class MissingPackageError(ConfigError, ModuleNotFoundError):
    """A package that is needed is not installed; the message has the command that installs it."""


class UnknownNameError(RlkitError, LookupError):
    """A registry has no entry of that name; the message lists its names."""


class UnsupportedError(RlkitError, NotImplementedError):
    """The backend does not support the request; the message names the alternative."""


class BackendError(RlkitError, RuntimeError):
    """A backend failed at a call that it had accepted."""


class BackendTimeout(BackendError, TimeoutError):
    """Waiting timed out; the work itself goes on."""


class RankLost(BackendError):
    """A process that trains with this one is gone, silent or not the same: reconnect with the last saved path."""


class RequestCancelled(BackendError, concurrent.futures.CancelledError):
    """A sampler's request was cancelled, or abandoned when no one waited for it any more; it trained nothing."""


class StepOutcomeUnknown(BackendError):
    """An optimizer step may or may not have been applied: reload the last saved state, do not repeat the step."""


class TrainerFailed(BackendError):
    """Refused because an earlier training call failed; ``__cause__`` is that failure."""


class CheckpointError(BackendError):
    """A saved state could not be written, or is missing, damaged or of another kind."""


class EnvError(RlkitError, RuntimeError):
    """An environment failed, returned an invalid observation or reward, or tried to exit the process."""


class EnvTimeout(EnvError, TimeoutError):
    """An environment did not answer in time; where it was running in a thread, the thread goes on."""


class EnvBusy(EnvError):
    """An environment has no capacity now; the same call may succeed later."""


class EnvLost(EnvError, ConnectionError):
    """The process of an environment is gone; the episode can restart in another one."""


class AgentError(EnvError):
    """An agent's program failed: the message has its exit code and the end of its stderr."""
