"""A program in a process group of its own: it is given its input, heard within bounds, and ended with its children."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import attrs

from rlkit import _orphans
from rlkit.errors import EnvError

__all__ = ["Ended", "Program"]

_CHUNK = 1 << 16  # bytes
_DRAIN = 1.0  # seconds for what is left in the pipes of a program that has ended
_POLL = 0.05  # seconds, where the system cannot say when a process ends


@attrs.frozen
class Ended:
    """How a program ended.

    Attributes:
        code: its exit code; negative: the signal that ended it.
        stdout, stderr: what it wrote, each the last ``most`` bytes of it.
    """

    code: int
    stdout: str
    stderr: str


class _Tail:
    """The end of what was written."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = bytearray()

    def add(self, chunk: bytes) -> None:
        self._bytes += chunk
        if len(self._bytes) > 2 * self._most:
            del self._bytes[: -self._most]

    @property
    def text(self) -> str:
        return self._bytes[-self._most :].decode("utf-8", "replace")


class Program:
    """A process and all that it starts, in a session of their own, so that one signal reaches them.

    They end with this process, too, whatever ends it. A process that leaves the group by a session of its own is not
    found any more.

    Args:
        arguments: the command.
        environment: all variables that it sees.
        stdin: what it is given to read.
        folder: where it runs; None: here.
        ending: a command for what is not in the group, which is run where this process ends before the program does.
        most: bytes kept of each of its outputs, >= 1.
        grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: bytes = b"",
        folder: str | None = None,
        ending: Sequence[str] = (),
        most: int = 1_000_000,
        grace: float = 2.0,
    ) -> None:
        self._arguments = list(arguments)
        self._environment = dict(environment)
        self._stdin = stdin
        self._folder = folder
        self._ending = list(ending)
        self._most = most
        self._grace = grace
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def run(self) -> Ended:
        """Run it to its end, and end what it leaves behind; this blocks.

        Raises:
            EnvError: it cannot be started, or was killed before.
        """
        process = self._start()
        try:
            return self._watch(process)
        finally:
            _reap(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def kill(self, *, grace: float | None = None) -> None:
        """End it: SIGTERM now, SIGKILL after ``grace`` seconds. ``run`` returns when that is done."""
        grace = self._grace if grace is None else grace
        with self._lock:
            self._killed = True
            process = self._process
        if process is None or process.returncode is not None:
            return
        if grace == 0.0:
            _signal(process, signal.SIGKILL)
            return
        _signal(process, signal.SIGTERM)
        timer = threading.Timer(grace, _signal, (process, signal.SIGKILL))
        timer.daemon = True
        timer.start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._killed:
                raise EnvError(f"{self._arguments[0]!r}: was ended before it began")
            try:
                self._process = subprocess.Popen(  # noqa: S603  # the user's own command
                    self._arguments,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env=self._environment,
                    cwd=self._folder,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise EnvError(f"{self._arguments[0]!r}: cannot be started: {error}") from error
            _orphans.adopt(self._process.pid, ending=self._ending)
            return self._process

    def _watch(self, process: subprocess.Popen[bytes]) -> Ended:
        """Feed and read until the process has ended and its pipes are empty, or nobody waits for what is in them."""
        if process.stdin is None or process.stdout is None or process.stderr is None:  # pragma: no cover
            raise AssertionError
        out, err = _Tail(self._most), _Tail(self._most)
        tails = {process.stdout.fileno(): out, process.stderr.fileno(): err}
        inlet, left = process.stdin.fileno(), memoryview(self._stdin)
        due: float | None = None  # until when what a process that has ended wrote is read
        with selectors.PollSelector() as selector, _exit(process) as handle:  # no descriptor of its own
            for descriptor in (inlet, *tails):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_WRITE if descriptor == inlet else selectors.EVENT_READ)
            if handle is not None:
                selector.register(handle, selectors.EVENT_READ)
            while due is None or (tails and time.monotonic() < due):
                ended = handle is None and due is None and _gone(process)
                pause = (None if handle is not None else _POLL) if due is None else max(0.0, due - time.monotonic())
                for key, _ in selector.select(0.0 if ended else pause):
                    if key.fd == handle:
                        ended = True
                        selector.unregister(handle)
                    elif key.fd == inlet:
                        left = _write(inlet, left)
                        if not left:
                            selector.unregister(inlet)
                            process.stdin.close()
                            inlet = -1
                    elif not _read(key.fd, tails[key.fd]):
                        selector.unregister(key.fd)
                        del tails[key.fd]
                if ended:
                    due = time.monotonic() + _DRAIN
                    _signal(process, signal.SIGKILL)  # what it started, before its number can be another's
        return Ended(_reap(process), out.text, err.text)


@contextlib.contextmanager
def _exit(process: subprocess.Popen[bytes]) -> Iterator[int | None]:
    """Give a descriptor that can be read once the process has ended; None where the system has none."""
    handle: int | None = None
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(process.pid)
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def _gone(process: subprocess.Popen[bytes]) -> bool:
    """Return whether it has ended; it is not waited for yet, so its number stays its own."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _write(descriptor: int, left: memoryview) -> memoryview:
    """Write what there is room for; return the rest, nothing where nobody reads."""
    try:
        return left[os.write(descriptor, left[:_CHUNK]) :]
    except BlockingIOError:
        return left
    except OSError:
        return left[:0]


def _read(descriptor: int, tail: _Tail) -> bool:
    """Read what is there; return whether there may be more."""
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return True
    tail.add(chunk)
    return bool(chunk)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the group of a process that has not been waited for, which is named as the process is."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Kill what is left of its group, and return its exit code."""
    _signal(process, signal.SIGKILL)
    _orphans.release(process.pid)
    return process.wait()
