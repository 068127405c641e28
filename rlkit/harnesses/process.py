"""A program of somebody else's: shown while it runs, and ended with all that it started."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from rlkit import _orphans
from rlkit.errors import EnvError, EnvTimeout

__all__ = ["run"]

_GRACE = 5.0  # seconds between asking it to end and ending it
_TAIL = 4000  # characters of its output that a message may be made of


def run(name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path, deadline: float) -> None:
    """Run a program to its end. What it says is written to standard error and to ``log``.

    Args:
        name: for messages.
        command: the program and its arguments.
        environment: all its variables.
        log: a file.
        deadline: seconds.

    Raises:
        EnvError: it could not be started, or ended with another status than 0.
        EnvTimeout: it took longer.

    It has a process group of its own, which is ended with it: also at the deadline, on Ctrl-C, and where this program
    is killed.
    """
    with _sigterm_raises(), log.open("wb") as file:
        try:
            process = subprocess.Popen(  # noqa: S603  # what the user asked for, without a shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"{name}: {command[0]} cannot be started: {error}") from error
        tail: deque[str] = deque(maxlen=_TAIL)
        assert process.stdout is not None  # noqa: S101  # it is a pipe
        copying = threading.Thread(target=_copy, args=(process.stdout, file, tail), daemon=True)
        try:  # from here on a signal finds what is to be ended
            _orphans.adopt(process.pid)
            copying.start()
            status = process.wait(deadline)
        except subprocess.TimeoutExpired as error:
            raise EnvTimeout(f"{name} did not end within {deadline:g} s; its output is in {log}") from error
        finally:
            _end(process)
            if copying.ident is not None:
                copying.join(_GRACE)
            if not copying.is_alive():  # else something that left the group holds the pipe
                process.stdout.close()
    if status:
        last = next((line for line in reversed("".join(tail).splitlines()) if line.strip()), "it said nothing").strip()
        how = f"status {status}" if status > 0 else f"signal {-status}"
        raise EnvError(f"{name} ended with {how}: {last} (all that it said is in {log})")


def _copy(source: IO[bytes], file: IO[bytes], tail: deque[str]) -> None:
    """Copy as it comes, progress bars too; a terminal that is gone does not hold the program up."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with contextlib.suppress(OSError, ValueError):  # closed, since something that it started holds the pipe
        while data := os.read(source.fileno(), 65536):
            file.write(data)
            file.flush()
            text = decoder.decode(data)
            tail.extend(text)
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text)
                sys.stderr.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of its group."""
    try:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    finally:
        _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
        _orphans.release(process.pid)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):  # none is left
        if hasattr(os, "killpg"):
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Have SIGTERM raise SystemExit in the main thread, so that what runs is ended; elsewhere, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raised(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, raised)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
