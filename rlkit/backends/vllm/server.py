"""One server that samples: asked, waited for, and started again when it died."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from pathlib import Path

import attrs

from rlkit.backends.vllm.client import Json, Model, ServerLost, VllmClient
from rlkit.backends.vllm.process import VllmProcess
from rlkit.errors import BackendError, BackendTimeout, ConfigError

__all__ = ["Adapter", "Server"]


@attrs.frozen(eq=False, weakref_slot=True)
class Adapter:
    """A version of the policy that servers have. Whoever may still sample from it holds this object.

    Attributes:
        name: what requests call it; never used twice, since servers keep what they computed by it.
        folder: where its files are, as long as it is loaded: servers may read them again.
        version: optimizer steps behind it.
    """

    name: str
    folder: Path
    version: int


class Server:
    """A server and the adapters that it is to have.

    Args:
        client: asks it.
        process: what rlkit started; None: somebody else's.
        start: seconds that it may take until it answers; one that runs already has a minute at most.
        restarts: how often it is started again, or waited for.
    """

    def __init__(self, client: VllmClient, process: VllmProcess | None, *, start: float, restarts: int) -> None:
        self.client = client
        self.busy = 0
        self.restarts_left = restarts
        self._process = process
        self._patience = start if process is not None else min(start, 60.0)
        self._adapters: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._generation = 0
        self._reviving = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process that rlkit started."""
        return None if self._process is None else self._process.pid

    async def begin(self) -> list[Model]:
        """Start it if it is rlkit's, wait until it answers, and return what it serves.

        Raises:
            ConfigError: it cannot serve this model, or does not start.
            BackendTimeout: it does not answer in time.
        """
        if self._process is not None:
            self._process.start()
        await self._answers(self._patience)
        return await self.client.models()

    async def generate(self, body: Json) -> Json:
        """Return its answer; a request that a server's death broke off is asked again."""
        self.busy += 1
        try:
            while True:
                generation = self._generation
                try:
                    return await self.client.generate(body)
                except ServerLost as error:
                    await self._revive(generation, error)
        finally:
            self.busy -= 1

    async def load(self, adapter: Adapter) -> None:
        """Have it load an adapter."""
        self._adapters.add(adapter)
        generation = self._generation
        try:
            await self.client.load_adapter(adapter.name, str(adapter.folder))
        except ServerLost as error:
            await self._revive(generation, error)  # loads all of them

    async def unload(self, name: str) -> None:
        """Have it forget an adapter; one that it does not know is no error."""
        with contextlib.suppress(BackendError):
            await self.client.unload_adapter(name)

    async def end(self) -> None:
        """Close the connections, and end the process."""
        await self.client.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def _revive(self, generation: int, lost: ServerLost) -> None:
        async with self._reviving:
            if generation != self._generation:  # another request's death was the same
                return
            if self.restarts_left == 0:
                raise BackendError(
                    f"{lost}; it was started again as often as restarts= allows{self._last_words()}"
                ) from (lost)
            self.restarts_left -= 1
            try:
                if self._process is not None:
                    await asyncio.to_thread(self._process.stop)
                    self._process.start()
                await self._answers(self._patience)
                loaded = {model.name for model in await self.client.models()}
                for adapter in list(self._adapters):
                    if adapter.name not in loaded:
                        await self.client.load_adapter(adapter.name, str(adapter.folder))
            except ServerLost as error:  # it died again
                raise BackendError(f"{error}; it had died before: {lost}{self._last_words()}") from error
            self._generation += 1

    async def _answers(self, within: float) -> None:
        """Wait until it is healthy."""
        deadline = time.monotonic() + within
        while not await self.client.healthy(5.0):
            if self._process is not None and self._process.status is not None:
                raise _did_not_start(self._process)
            if time.monotonic() > deadline:
                raise BackendTimeout(f"{self.client.url}: no server answered within {within:g} s{self._last_words()}")
            await asyncio.sleep(0.2)

    def _last_words(self) -> str:
        log = "" if self._process is None else self._process.log[-1500:]
        return f"; the end of its log:\n{log}" if log else ""


def _did_not_start(process: VllmProcess) -> ConfigError:
    log = process.log
    if "No module named" in log and "vllm" in log.rpartition("No module named")[2][:30]:
        return ConfigError("sampler='vllm': this Python has no vllm; name one that has: sampler=Vllm(python=...)")
    lines = [line.strip() for line in log.splitlines() if "Error" in line]
    why = next((line for line in lines if "not supported" in line), lines[0] if lines else log[-300:])
    remedy = (
        "leave sampler out, and this process samples"
        if "not supported" in why
        else "see its arguments= and environment="
    )
    return ConfigError(f"sampler='vllm': the server ended with status {process.status}: {why[-400:]}; {remedy}")
