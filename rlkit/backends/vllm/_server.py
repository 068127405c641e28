"""One server that samples: asked, waited for, and started again when it died or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias, TypeVar

import attrs
import numpy as np

from rlkit.backends.vllm._client import Json, Model, ServerLost, Unreachable, VllmClient
from rlkit.backends.vllm.keeper import GRACE
from rlkit.errors import BackendError, BackendTimeout, ConfigError, RlkitError
from rlkit.types import Lora

__all__ = [
    "RANKS",
    "Adapter",
    "Check",
    "Server",
    "VllmProcess",
    "begin",
    "free_port",
    "server_options",
]

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for


def server_options(dtype: str, lora: Lora, modules: Sequence[str], max_length: int, *, device: str) -> list[str]:
    """Return what every server has to be started with; see ``Vllm.command``."""
    rank = next((rank for rank in RANKS if rank >= lora.rank), lora.rank)
    return [
        *("--dtype", dtype, "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"),
        # Without it the head is prepared for adapters, too, and vLLM for CPUs (0.32) dies of two prompts at once
        # whose logprobs are asked for.
        *("--lora-target-modules", *sorted(modules)),
        # One token is sampled after every text that is scored.
        *("--max-cpu-loras", "4", "--max-model-len", str(max_length + 1)),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"),
        # vLLM for CPUs (0.32) dies of a prompt that is computed in parts and sampled with a seed: it turns the
        # generator back, which a CPU's cannot.
        *(["--no-enable-chunked-prefill"] if device == "cpu" else []),
    ]


_LINES, _LINE = 400, 2000  # of its log that are kept, and characters of each
_PORTS = range(20_000, 32_000)
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")  # of this environment, not of the server's


class VllmProcess:
    """Start a server, and end it with all that it started: on ``stop``, and when this process dies.

    Args:
        command: of the server.
        environment: variables besides this process's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = {k: v for k, v in os.environ.items() if k not in _OURS} | dict(environment)
        self._log: deque[str] = deque(maxlen=_LINES)
        self._keeper: subprocess.Popen[bytes] | None = None
        self.pid: int | None = None

    def start(self) -> None:
        """Start it."""
        self._log.clear()
        self.pid = None
        self._keeper = subprocess.Popen(  # noqa: S603  # the interpreter that the user names, without a shell
            [sys.executable, "-I", str(Path(__file__).with_name("keeper.py")), *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is this process's
        )
        assert self._keeper.stdout is not None  # noqa: S101  # it is a pipe
        threading.Thread(target=self._copy, args=(self._keeper.stdout,), daemon=True).start()

    @property
    def status(self) -> int | None:
        """Return the exit status; None while it runs."""
        return None if self._keeper is None else self._keeper.poll()

    @property
    def log(self) -> str:
        """Return the end of its log."""
        return "\n".join(self._log)

    def stop(self) -> None:
        """End it. May be called twice."""
        keeper = self._keeper
        if keeper is None:
            return
        assert keeper.stdin is not None  # noqa: S101  # it is a pipe
        with contextlib.suppress(OSError):
            keeper.stdin.close()
        try:
            keeper.wait(GRACE + 5)
        except subprocess.TimeoutExpired:
            for pid in (self.pid, keeper.pid):
                with contextlib.suppress(OSError, TypeError):
                    os.killpg(pid, signal.SIGKILL)  # type: ignore[arg-type]
            keeper.wait()

    def _copy(self, source: IO[bytes]) -> None:
        with source, contextlib.suppress(OSError, ValueError):
            for line in iter(lambda: source.readline(_LINE), b""):
                text = line.decode("utf-8", "replace").rstrip()
                if self.pid is None and text.startswith("rlkit: process "):
                    self.pid = int(text.rpartition(" ")[2])
                elif text:
                    self._log.append(text)


def free_port() -> int:
    """Return a free port of this machine.

    It is below those that systems give to connections: a server that is started takes it only when it has loaded much.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise BackendError("sampler='vllm': this machine has no free port")


T = TypeVar("T")

_START = 900.0  # seconds that a server which is started here may take until it answers
_BACK = 60.0  # that somebody else's may take, where something listens or has listened
_ABSENT = 3.0  # where nothing listens at connect
_PARTING = 5.0  # seconds that its last requests may take


@attrs.frozen(eq=False, weakref_slot=True)
class Adapter:
    """A version of the policy that servers have. Whoever may still sample from it holds this object.

    Attributes:
        name: what requests call it; never used twice, since servers keep what they computed by it.
        folder: where its files are, as long as it is loaded: servers may read them again.
        version: optimizer steps that the policy had taken.
        expected: float32 [T], the trainer's logprobs of the probe's text, for a server that comes back.
    """

    name: str
    folder: Path
    version: int
    expected: np.ndarray


Check: TypeAlias = Callable[["Server", Sequence[Adapter]], Coroutine[object, object, None]]
"""Raises BackendError where a server that came back samples other policies than it is asked for."""


class Server:
    """A server and the adapters that it is to have.

    Args:
        client: asks it.
        process: what rlkit started; None: somebody else's.
        start: seconds that it may take until it answers; None: see ``Vllm``.
        restarts: how often it is started again, or waited for.
        check: asked when it came back, before it gets requests.

    Attributes:
        busy: requests that it has, or that wait for it.
        gone: why it gets no more requests; None: it still gets them.
    """

    def __init__(
        self, client: VllmClient, process: VllmProcess | None, *, start: float | None, restarts: int, check: Check
    ) -> None:
        self.client = client
        self.busy = 0
        self.restarts_left = restarts
        self.gone: BackendError | None = None
        self._process = process
        self._patience = start or (_BACK if process is None else _START)
        self._absent = (start or _ABSENT) if process is None else None
        self._check = check
        self._adapters: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._loaded: set[str] = set()
        self._generation = 0
        self._revival: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the process that rlkit started."""
        return None if self._process is None else self._process.pid

    @property
    def up(self) -> bool:
        """Return whether it is there, as far as is known."""
        return self.gone is None and self._revival is None

    async def begin(self) -> list[Model]:
        """Start it if it is rlkit's, wait until it answers, and return what it serves.

        Raises:
            ConfigError: it cannot serve this model, or does not start.
            Unreachable: somebody else's is not there.
            BackendTimeout: it does not answer in time.
        """
        if self._process is not None:
            self._process.start()
        await self._answers(self._patience, absent=self._absent)
        return await self.client.models()

    async def generate(self, body: Json) -> Json:
        """Return its answer.

        Raises:
            ServerLost: it died under the request; it is being started again, or waited for. Ask again, here or
                elsewhere.
            BackendTimeout: it hangs; as before.
        """
        self.busy += 1
        try:
            await self.wait_done()
            return await self._watched(self.client.generate(body))
        finally:
            self.busy -= 1

    async def load(self, adapter: Adapter) -> None:
        """Make it load an adapter, now and whenever it comes back. Raises as ``generate`` does."""
        self._adapters.add(adapter)
        await self.wait_done()
        if adapter.name not in self._loaded:
            await self._watched(self.client.load_adapter(adapter.name, str(adapter.folder)))
            self._loaded.add(adapter.name)

    def expect(self, adapter: Adapter) -> None:
        """Make it load an adapter when it comes back."""
        self._adapters.add(adapter)

    async def unload(self, name: str) -> None:
        """Make it forget an adapter; one that it does not know is not an error."""
        self._loaded.discard(name)
        with contextlib.suppress(BackendError):
            await self.client.unload_adapter(name)

    async def wait_done(self) -> None:
        """Wait while it is coming back.

        Raises:
            ServerLost: it did not.
        """
        while self._revival is not None:
            await asyncio.shield(self._revival)  # others wait for it, too
        if self.gone is not None:
            raise ServerLost(str(self.gone))

    async def end(self) -> None:
        """End the process, or have somebody else's server forget the adapters; close the connections."""
        if self._process is None and self.up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PARTING):
                    await asyncio.gather(*(self.unload(name) for name in list(self._loaded)))
        await self.client.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def _watched(self, request: Coroutine[object, object, T]) -> T:
        generation = self._generation
        try:
            return await request
        except (ServerLost, BackendTimeout) as error:
            if self.up and generation == self._generation:  # else another request noticed it before
                self._revival = asyncio.get_running_loop().create_task(self._revive(error))
            raise

    async def _revive(self, lost: BackendError) -> None:
        try:
            if self.restarts_left == 0:
                self.gone = BackendError(f"{lost}; it was restarted as often as restarts= allows{self._last_words()}")
                return
            self.restarts_left -= 1
            self._loaded.clear()
            if self._process is not None:
                await asyncio.to_thread(self._process.stop)
                self._process.start()
            await self._answers(self._patience)
            async with asyncio.timeout(self._patience):
                await self._restore()
        except RlkitError as error:
            self.gone = BackendError(f"{error}; it was lost before: {lost}{self._last_words()}")
        except TimeoutError:
            self.gone = BackendError(f"{lost}; it was restarted, but did not sample within {self._patience:g} s")
        finally:
            self._generation += 1
            self._revival = None

    async def _restore(self) -> None:
        """Reload its adapters, and check it."""
        names = {model.name for model in await self.client.models()}
        self._loaded |= {adapter.name for adapter in list(self._adapters) if adapter.name in names}
        await self._check(self, ())
        checked: set[str] = set()
        while new := [adapter for adapter in list(self._adapters) if adapter.name not in checked]:
            for adapter in new:
                if adapter.name not in self._loaded:
                    await self.client.load_adapter(adapter.name, str(adapter.folder))
                    self._loaded.add(adapter.name)
            await self._check(self, new)
            checked |= {adapter.name for adapter in new}

    async def _answers(self, within: float, absent: float | None = None) -> None:
        """Wait until it is healthy: ``within`` seconds, or ``absent`` ones where nothing listens there."""
        began = time.monotonic()
        while True:
            try:
                await self.client.check_health(5.0)
            except (ServerLost, BackendTimeout) as error:
                reason = error
            else:
                return
            if self._process is not None and self._process.status is not None:
                raise _did_not_start(self._process)
            waited = time.monotonic() - began
            if isinstance(reason, Unreachable) and absent is not None and waited > absent:
                raise reason
            if waited > within:
                what = "accepts connections but does not answer" if isinstance(reason, BackendTimeout) else str(reason)
                where = f"{self.client.url}: no server answered within {within:g} s"
                raise BackendTimeout(f"{where}: {what}{self._last_words()}")
            await asyncio.sleep(0.2)

    def _last_words(self) -> str:
        log = "" if self._process is None else self._process.log[-1500:]
        return f"; the end of its log:\n{log}" if log else ""


async def begin(servers: Sequence[Server]) -> list[list[Model]]:
    """Begin with all servers, and return what each serves.

    Raises:
        Unreachable: somebody else's are not there; all of them are named.
        RlkitError: as ``Server.begin`` raises.
    """
    results = await asyncio.gather(*(server.begin() for server in servers), return_exceptions=True)
    absent = [str(result) for result in results if isinstance(result, Unreachable)]
    if absent:
        raise Unreachable("; ".join(absent))
    served = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        served.append(result)
    return served


def _did_not_start(process: VllmProcess) -> ConfigError:
    log = process.log
    lines = [line.strip() for line in log.splitlines() if "Error" in line]
    unable = [line for line in lines if "not support" in line]  # a model class, or adapters on it
    why = [*unable, *lines, log[-300:]][0]
    remedy = "omit sampler=, so that this process samples" if unable else "see its arguments= and environment="
    return ConfigError(f"sampler='vllm': the server ended with status {process.status}: {why[-400:]}; {remedy}")
