"""Process groups that end with this process, whatever ends it: SIGTERM and SIGKILL, too.

A watcher, which is this file run by a separate interpreter, is told of every group, and holds the reading end of a pipe
whose other end is closed by the system when this process is gone. Then it kills the remaining groups.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

__all__ = ["adopt", "prepare", "release"]

_PATIENCE = 30  # seconds for the commands that are run then


class _Watcher:
    """The watching process, started with the first group, and again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, list[str]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        with self._lock:
            if self._process is None:
                self._start()

    def add(self, group: int, ending: Sequence[str]) -> None:
        with self._lock:
            self._groups[group] = list(ending)
            if self._process is None or not self._tell(group):
                self._start()

    def discard(self, group: int) -> None:
        with self._lock:
            if self._groups.pop(group, None) is not None and not self._tell(group):
                self._start()

    def _tell(self, group: int) -> bool:
        """Send the state of a group; return whether the watcher listens."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(json.dumps([group, self._groups.get(group)]).encode() + b"\n")
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self._end()
        with contextlib.suppress(OSError, ValueError):  # without one, groups end where this process can end them
            self._process = subprocess.Popen(  # noqa: S603  # this file
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,  # a line is there whole or not at all
                cwd=os.sep,
                start_new_session=True,  # it must not get Ctrl-C
            )
        for group in self._groups:
            self._tell(group)

    def _end(self) -> None:
        """Make the watcher kill the remaining groups, and wait until it has."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE + 1)
        self._process = None

    def close(self) -> None:
        with self._lock:
            self._end()

    def leave(self) -> None:
        """Forget the parent's groups in a child made by fork."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # or the parent's end would go unnoticed
            self._process.returncode = 0  # nothing to wait for
        self._lock, self._groups, self._process = threading.Lock(), {}, None


_watcher = _Watcher()
atexit.register(_watcher.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watcher.leave)


def prepare() -> None:
    """Start the watcher, before a program is started, so that it hears of the program's group at once."""
    _watcher.prepare()


def adopt(group: int, *, ending: Sequence[str] = ()) -> None:
    """Register a process group to be killed when this process ends, also by a signal that it cannot catch.

    Args:
        group: its number, that of its leader.
        ending: a command that is also run then: it removes what is not in the group, such as a folder.
    """
    _watcher.add(group, ending)


def release(group: int) -> None:
    """Stop watching a group; call it before its leader is waited for, while its number is still valid."""
    _watcher.discard(group)


def _watch() -> None:
    """Read messages about groups until the other end is closed, then kill the remaining groups."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # what ends a whole job ends its program first
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, list[str]] = {}
    for line in sys.stdin:
        with contextlib.suppress(ValueError):  # cut off
            group, ending = json.loads(line)
            if ending is None:
                groups.pop(group, None)
            else:
                groups[group] = ending
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    quiet = subprocess.DEVNULL
    commands = []
    for ending in filter(None, groups.values()):
        with contextlib.suppress(OSError):
            commands.append(subprocess.Popen(ending, stdin=quiet, stdout=quiet, stderr=quiet))  # noqa: S603
    for command in commands:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(_PATIENCE)


if __name__ == "__main__":
    _watch()
