"""One server that samples: asked, waited for, and started again when it died or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import attrs
import numpy as np

from rlkit.backends.vllm.client import Json, Model, ServerLost, Unreachable, VllmClient
from rlkit.backends.vllm.process import VllmProcess
from rlkit.errors import BackendError, BackendTimeout, ConfigError, RlkitError

__all__ = ["Adapter", "Check", "Server", "begin"]

T = TypeVar("T")

_START = 900.0  # seconds that a server which is started here may take until it answers
_BACK = 60.0  # that somebody else's may take, where something listens or has listened
_ABSENT = 3.0  # where nobody listens at connect
_PARTING = 5.0  # seconds that its last requests may take


@attrs.frozen(eq=False, weakref_slot=True)
class Adapter:
    """A version of the policy that servers have. Whoever may still sample from it holds this object.

    Attributes:
        name: what requests call it; never used twice, since servers keep what they computed by it.
        folder: where its files are, as long as it is loaded: servers may read them again.
        version: optimizer steps behind it.
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
        gone: why it gets no more requests; None: it does.
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
        """Of the process that rlkit started."""
        return None if self._process is None else self._process.pid

    @property
    def up(self) -> bool:
        """Whether it is there, as far as is known."""
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
            await self.settled()
            return await self._watched(self.client.generate(body))
        finally:
            self.busy -= 1

    async def load(self, adapter: Adapter) -> None:
        """Have it load an adapter, which it has again whenever it comes back. Raises as ``generate`` does."""
        self._adapters.add(adapter)
        await self.settled()
        if adapter.name not in self._loaded:
            await self._watched(self.client.load_adapter(adapter.name, str(adapter.folder)))
            self._loaded.add(adapter.name)

    def expect(self, adapter: Adapter) -> None:
        """Have it load an adapter when it comes back."""
        self._adapters.add(adapter)

    async def unload(self, name: str) -> None:
        """Have it forget an adapter; one that it does not know is no error."""
        self._loaded.discard(name)
        with contextlib.suppress(BackendError):
            await self.client.unload_adapter(name)

    async def settled(self) -> None:
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
                self.gone = BackendError(
                    f"{lost}; it was started again as often as restarts= allows{self._last_words()}"
                )
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
            self.gone = BackendError(f"{lost}; it came back, and did not sample within {self._patience:g} s")
        finally:
            self._generation += 1
            self._revival = None

    async def _restore(self) -> None:
        """Have it load what it is to have, and check it."""
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
        """Wait until it is healthy: ``within`` seconds, or ``absent`` ones where nobody listens there."""
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
                what = "accepts connections and is silent" if isinstance(reason, BackendTimeout) else str(reason)
                where = f"{self.client.url}: no server answered within {within:g} s"
                raise BackendTimeout(f"{where}: {what}{self._last_words()}")
            await asyncio.sleep(0.2)

    def _last_words(self) -> str:
        log = "" if self._process is None else self._process.log[-1500:]
        return f"; the end of its log:\n{log}" if log else ""


async def begin(servers: Sequence[Server]) -> list[list[Model]]:
    """Have all begin, and return what each serves.

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
    remedy = "leave sampler out, and this process samples" if unable else "see its arguments= and environment="
    return ConfigError(f"sampler='vllm': the server ended with status {process.status}: {why[-400:]}; {remedy}")
