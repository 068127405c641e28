"""A program in its own process group: it gets its input, its output is bounded, and it is ended with its children."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

import attrs

from rlkit import _orphans
from rlkit.errors import EnvError

__all__ = ["Ended", "Program", "spelled"]

_CHUNK = 1 << 16  # bytes
_DRAIN = 1.0  # seconds for what is left in the pipes of a program that has ended
_POLL = 0.05  # seconds, where the system cannot say when a process ends

_INTERPRETER = re.compile(r"(python|pypy|node|deno|bun|ruby|perl|bash|sh|dash|zsh|uv|uvx|npx|java)[\d.]*(\.exe)?")
_LONGEST = 80  # characters of an argument in a message


def spelled(arguments: Sequence[str | os.PathLike[str]]) -> str:
    """Return a command's name for messages: of an interpreter what it runs, too.

    >>> spelled(["/usr/bin/python3.11", "agents/write.py", "--key", "k"]), spelled(["bin/agent", "--key", "k"])
    ('/usr/bin/python3.11 agents/write.py', 'bin/agent')
    """
    texts = [os.fspath(each) for each in arguments]
    parts = 1
    if _INTERPRETER.fullmatch(os.path.basename(texts[0])):  # noqa: PTH119
        parts = next((i + 1 for i, text in enumerate(texts) if i and not text.startswith("-")), 1)
    return shlex.join(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in texts[:parts])


@attrs.frozen
class Ended:
    """The end of a program: its exit code and its output.

    Attributes:
        code: its exit code; negative: the signal that ended it.
        stdout, stderr: what it wrote, each the last ``most`` bytes of it.
    """

    code: int
    stdout: str
    stderr: str


class _Tail:
    """The last bytes of an output."""

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


@attrs.define(eq=False)
class Program:
    """A process and all that it starts, in their own session, so that one signal reaches them.

    They end with this process, too, whatever ends it. A process that leaves the group by starting its own session is
    not found any more.

    Args:
        arguments: the command.
        environment: all variables that it sees.
        stdin: its input.
        folder: its working directory; None: this process's.
        most: bytes kept of each of its outputs, >= 1.
        grace: seconds between SIGTERM and SIGKILL.
    """

    _arguments: Sequence[str]
    _environment: Mapping[str, str] = attrs.field(kw_only=True)
    _stdin: bytes = attrs.field(default=b"", kw_only=True)
    _folder: str | None = attrs.field(default=None, kw_only=True)
    _most: int = attrs.field(default=1_000_000, kw_only=True)
    _grace: float = attrs.field(default=2.0, kw_only=True)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _process: subprocess.Popen[bytes] | None = attrs.field(default=None, init=False)
    _killed: bool = attrs.field(default=False, init=False)

    def run(self) -> Ended:
        """Run it to its end, and end the processes that it leaves running; this blocks.

        Raises:
            EnvError: it cannot be started, or was killed before.
        """
        process = self._start()
        try:
            return self._watch(process)
        finally:
            _reap(process)
            for pipe in _pipes(process):
                pipe.close()

    def kill(self, *, grace: float | None = None) -> None:
        """End it: SIGTERM now, SIGKILL after ``grace`` seconds. ``run`` returns after that."""
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
                raise EnvError(f"{spelled(self._arguments)!r}: was stopped before it started")
            _orphans.prepare()
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
                raise EnvError(f"{spelled(self._arguments)!r}: could not be started: {error}") from error
            _orphans.adopt(self._process.pid)
            return self._process

    def _watch(self, process: subprocess.Popen[bytes]) -> Ended:
        """Feed and read until the process has ended and its pipes are empty, or their content is no longer needed."""
        stdin, stdout, stderr = _pipes(process)
        out, err = _Tail(self._most), _Tail(self._most)
        outlets = {stdout.fileno(): out, stderr.fileno(): err}
        inlet, left = stdin.fileno(), memoryview(self._stdin)
        due: float | None = None  # until when what a process that has ended wrote is read
        with selectors.PollSelector() as selector, _exit(process) as handle:  # no descriptor of its own
            _register(selector, inlet, outlets, handle)
            while due is None or (outlets and time.monotonic() < due):
                ended = handle is None and due is None and _gone(process)
                for key, _ in selector.select(0.0 if ended else _pause(handle, due)):
                    if key.fd == inlet:
                        left = _write(inlet, left)
                        more = bool(left)
                    else:
                        more = key.fd in outlets and _read(key.fd, outlets[key.fd])
                    if more:
                        continue
                    selector.unregister(key.fd)
                    outlets.pop(key.fd, None)
                    ended = ended or key.fd == handle
                    if key.fd == inlet:
                        stdin.close()
                if ended:
                    due = time.monotonic() + _DRAIN
                    _signal(process, signal.SIGKILL)  # what it started, before its number can be another's
        return Ended(_reap(process), out.text, err.text)


def _pipes(process: subprocess.Popen[bytes]) -> list[IO[bytes]]:
    """Return its input and its two outputs, which ``_start`` has made pipes."""
    return [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe is not None]


def _register(selector: selectors.BaseSelector, inlet: int, outlets: Iterable[int], handle: int | None) -> None:
    for descriptor in (inlet, *outlets):
        os.set_blocking(descriptor, False)
        selector.register(descriptor, selectors.EVENT_WRITE if descriptor == inlet else selectors.EVENT_READ)
    if handle is not None:
        selector.register(handle, selectors.EVENT_READ)


def _pause(handle: int | None, due: float | None) -> float | None:
    """Return how many seconds to wait for the descriptors; None: until one is ready."""
    if due is None:
        return None if handle is not None else _POLL
    return max(0.0, due - time.monotonic())


@contextlib.contextmanager
def _exit(process: subprocess.Popen[bytes]) -> Iterator[int | None]:
    """Return a descriptor that can be read once the process has ended; None where the system does not provide one."""
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
    """Return whether it has ended; it is not waited for yet, so its number stays valid."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _write(descriptor: int, left: memoryview) -> memoryview:
    """Write as much as fits; return the rest, nothing if the reader is gone."""
    try:
        return left[os.write(descriptor, left[:_CHUNK]) :]
    except BlockingIOError:
        return left
    except OSError:
        return left[:0]


def _read(descriptor: int, tail: _Tail) -> bool:
    """Read the available bytes; return whether there may be more."""
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return True
    tail.add(chunk)
    return bool(chunk)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the group of a process that has not been waited for, whose number is the process's."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _reap(process: subprocess.Popen[bytes]) -> int:
    """Kill what is left of its group, and return its exit code."""
    _signal(process, signal.SIGKILL)
    _orphans.release(process.pid)
    return process.wait()
