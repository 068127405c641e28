"""Turn out-of-memory errors into actionable messages."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlkit.errors import BackendError

__all__ = ["lacks_memory", "telling"]

_WORDS = ("allocate memory", "not enough memory", "out of memory")  # torch's, as far as these are plain RuntimeErrors


def lacks_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory ran out.

    >>> lacks_memory(MemoryError()), lacks_memory(RuntimeError("CUDA error: out of memory")), lacks_memory(OSError())
    (True, True, False)
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(x in str(error) for x in _WORDS))


@contextmanager
def telling(what: Callable[[], str]) -> Iterator[None]:
    """Raise a BackendError with ``what()`` in place of an error for lack of memory, which becomes its cause.

    >>> with telling(lambda: "a batch of 9"):
    ...     raise MemoryError
    Traceback (most recent call last):
    rlkit.errors.BackendError: out of memory: a batch of 9
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, BackendError) or not lacks_memory(error):
            raise
        raise BackendError(f"out of memory: {what()}") from error
