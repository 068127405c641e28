"""Programs that this one starts: run to their end, or kept to answer questions.

Each has a process group, which ends with this process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any

import attrs

from rlkit import _orphans
from rlkit.errors import EnvError

__all__ = ["Child", "ChildLost", "Program", "ProgramResult", "bypass_proxies", "describe_command", "read_tail"]

_CHUNK = 1 << 16  # bytes
_DRAIN = 1.0  # seconds for what is left in the pipes of a program that has ended

_INTERPRETER = re.compile(r"(python|pypy|node|deno|bun|ruby|perl|bash|sh|dash|zsh|uv|uvx|npx|java)[\d.]*(\.exe)?")
_LONGEST = 80  # characters of an argument in a message
_LOCAL = "127.0.0.1,localhost"


def describe_command(arguments: Sequence[str | os.PathLike[str]]) -> str:
    """Return a command's name for messages: of an interpreter what it runs, too.

    >>> describe_command(["/usr/bin/python3.11", "agents/write.py", "--key", "k"])
    '/usr/bin/python3.11 agents/write.py'
    >>> describe_command(["bin/agent", "--key", "k"])
    'bin/agent'
    """
    texts = [os.fspath(each) for each in arguments]
    parts = 1
    if _INTERPRETER.fullmatch(os.path.basename(texts[0])):  # noqa: PTH119
        parts = next((i + 1 for i, text in enumerate(texts) if i and not text.startswith("-")), 1)
    return shlex.join(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in texts[:parts])


def bypass_proxies(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a program's variables with which it reaches this machine directly, whatever proxy it uses."""
    local = {name: ",".join(filter(None, (variables.get(name), _LOCAL))) for name in ("NO_PROXY", "no_proxy")}
    return {**variables, **local}


def read_tail(log: IO[Any], most: int, *, start: int = 0) -> str:
    """Return the last ``most`` bytes after ``start`` of a file, in one line; "" once it is closed."""
    try:
        text = os.pread(log.fileno(), most, max(start, os.fstat(log.fileno()).st_size - most))
    except ValueError:
        return ""
    return " ".join(text.decode("utf-8", "replace").split())


@attrs.frozen
class ProgramResult:
    """How a program ended.

    Attributes:
        code: its exit code; negative: the signal that ended it.
        stdout, stderr: what it wrote, each the last ``keep`` bytes of it.
    """

    code: int
    stdout: str
    stderr: str


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
        keep: bytes kept of each of its outputs, >= 1.
        grace: seconds between SIGTERM and SIGKILL.
        ending: a command that is run where this process is gone before the program has ended: it removes a folder, say.
    """

    _arguments: Sequence[str]
    _environment: Mapping[str, str] = attrs.field(kw_only=True)
    _stdin: bytes = attrs.field(default=b"", kw_only=True)
    _folder: str | None = attrs.field(default=None, kw_only=True)
    _keep: int = attrs.field(default=1_000_000, kw_only=True)
    _grace: float = attrs.field(default=2.0, kw_only=True)
    _ending: Sequence[str] = attrs.field(default=(), kw_only=True)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _process: subprocess.Popen[bytes] | None = attrs.field(default=None, init=False)
    _killed: bool = attrs.field(default=False, init=False)
    _tails: list[bytearray] = attrs.field(factory=lambda: [bytearray(), bytearray()], init=False)

    def start(self) -> Future[ProgramResult]:
        """Run it in a thread; see ``run``."""
        ended = Future[ProgramResult]()

        def run() -> None:
            try:
                ended.set_result(self.run())
            except BaseException as error:  # noqa: BLE001  # whoever reads the future gets it
                ended.set_exception(error)

        _start_thread(run)
        return ended

    @property
    def written(self) -> str:
        """Return the end of what it wrote so far: stdout, and then stderr."""
        return "\n".join(tail[-self._keep :].decode("utf-8", "replace") for tail in self._tails)

    def run(self) -> ProgramResult:
        """Run it to its end, and end the processes that it leaves running; this blocks.

        Raises:
            EnvError: it cannot be started, or was killed before.
        """
        process = self._start()
        try:
            pipes = zip((process.stdout, process.stderr), self._tails, strict=True)
            readers = [_start_thread(_read, pipe, tail, self._keep) for pipe, tail in pipes]
            _start_thread(_write, process.stdin, self._stdin)
            _wait_exit(process)
        finally:
            _kill_group(process)  # with what it started, before its number can be another's
            _orphans.release(process.pid)
            code = process.wait()
        for reader in readers:  # a process that left the group may hold the other end for ever
            reader.join(_DRAIN)
        stdout, stderr = (tail[-self._keep :].decode("utf-8", "replace") for tail in self._tails)
        return ProgramResult(code, stdout, stderr)

    def kill(self, *, grace: float | None = None) -> None:
        """End it: SIGTERM now, SIGKILL after ``grace`` seconds. ``run`` returns after that."""
        grace = self._grace if grace is None else grace
        with self._lock:
            self._killed = True
            process = self._process
        if process is None or process.returncode is not None:
            return
        if grace > 0.0:
            _kill_group(process, signal.SIGTERM)
            timer = threading.Timer(grace, self.kill, kwargs={"grace": 0.0})
            timer.daemon = True
            timer.start()
        else:
            _kill_group(process)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._killed:
                raise EnvError(f"{describe_command(self._arguments)!r}: was stopped before it started")
            try:
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                self._process = _start_group(
                    self._arguments, self._environment, self._folder, **pipes, ending=self._ending
                )
            except (OSError, ValueError) as error:
                raise EnvError(f"{describe_command(self._arguments)!r}: could not be started: {error}") from error
            return self._process


_SHOWN = 500  # bytes of what a child wrote, for messages


class ChildLost(Exception):
    """A child has ended; the message has the end of what it wrote to stderr."""


class Child:
    """A process that answers questions, which are lines of JSON, in any order.

    It gets the questions on stdin, each with a number as its "id", and writes the answers, with the same "id", to
    stdout. It ends with its process group: by ``end``, when nothing refers to this object any more, and with this
    process.

    Args:
        arguments: the command.
        environment: all variables that it sees.
        folder: its working directory; None: this process's.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, arguments: Sequence[str], *, environment: Mapping[str, str], folder: str | None = None) -> None:
        self._log = log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        try:
            self._process = _start_group(arguments, environment, folder, stdout=subprocess.PIPE, stderr=log)
        except BaseException:
            log.close()
            raise
        self.pid = self._process.pid
        self._writing = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Mapping[str, Any]]] = {}
        self._lost = threading.Event()
        self._owner = os.getpid()
        self.end = weakref.finalize(self, _end, self._process, log, self._owner)
        _start_thread(_listen, self._process.stdout, log, self._waiting, self._lost)  # which keeps no child alive

    @property
    def lost(self) -> bool:
        """Return whether it has ended, or is another process's: a fork does not hear its answers."""
        return self._lost.is_set() or os.getpid() != self._owner

    @property
    def written(self) -> str:
        """Return the end of what it wrote to stderr, for a message."""
        return _quote(self._log)

    def ask(self, question: Mapping[str, object]) -> tuple[int, Future[Mapping[str, Any]]]:
        """Send a question; return its "id", and the answer to come, which is ``ChildLost`` if the child ends before."""
        number, answer = next(self._numbers), Future[Mapping[str, Any]]()
        self._waiting[number] = answer
        self.send({**question, "id": number})
        if self.lost and self._waiting.pop(number, None) is not None:  # it had ended already
            answer.set_exception(ChildLost("the process has ended"))
        return number, answer

    def send(self, message: Mapping[str, object]) -> None:
        """Send a line that has no answer."""
        if self.lost:
            return
        line = json.dumps(message).encode() + b"\n"
        with self._writing, contextlib.suppress(OSError, ValueError):  # who waits for an answer is told that it ended
            assert self._process.stdin is not None  # noqa: S101  # it is a pipe
            self._process.stdin.write(line)
            self._process.stdin.flush()


def _listen(
    stdout: IO[bytes], log: IO[bytes], waiting: dict[int, Future[Mapping[str, Any]]], lost: threading.Event
) -> None:
    """Settle answers until the child ends, which those that still wait are told."""
    with stdout:
        for line in stdout:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # something else that was written
                told = json.loads(line)
                if (answer := waiting.pop(told["id"], None)) is not None:
                    answer.set_result(told)
    text = f"the process has ended{_quote(log)}"
    lost.set()
    for number in list(waiting):
        if (answer := waiting.pop(number, None)) is not None:
            answer.set_exception(ChildLost(text))


def _quote(log: IO[bytes]) -> str:
    text = read_tail(log, _SHOWN)
    return f"; it wrote: {text}" if text else ""


def _end(process: subprocess.Popen[bytes], log: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork, which has no children
        return
    _kill_group(process)
    _orphans.release(process.pid)
    process.wait()
    for stream in (process.stdin, log):
        if stream is not None:
            with contextlib.suppress(OSError):  # output that is no longer read
                stream.close()


def _start_group(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
    *,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    ending: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, with a pipe to its stdin, that ends with this process."""
    _orphans.prepare()
    process = subprocess.Popen(  # noqa: S603  # the user's own command, or a file of rlkit
        list(arguments),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        cwd=folder,
        start_new_session=True,
    )
    _orphans.adopt(process.pid, ending=ending)
    return process


def _start_thread(function: Any, *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name="rlkit-process", daemon=True)
    thread.start()
    return thread


def _read(pipe: io.BufferedReader, tail: bytearray, keep: int) -> None:
    """Read to the end; keep the last bytes."""
    with pipe:
        while chunk := pipe.read1(_CHUNK):
            tail += chunk
            if len(tail) > 2 * keep:
                del tail[:-keep]


def _write(pipe: IO[bytes], text: bytes) -> None:
    with contextlib.suppress(OSError), pipe:  # nothing reads any more
        pipe.write(text)


def _wait_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait until it has ended, and leave it to be waited for, so that its number, which is its group's, stays valid."""
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        process.wait()
        return
    with contextlib.suppress(ChildProcessError):  # the program ignores SIGCHLD: the system has waited for it
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def _kill_group(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, number)
