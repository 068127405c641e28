"""An event loop in a thread of its own, in which requests wait side by side."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

__all__ = ["EventLoop"]

T = TypeVar("T")


class EventLoop:
    """Runs coroutines that other threads give to it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.at_end: list[Callable[[], Coroutine[object, object, None]]] = []  # what is to be closed in it
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Run ``work``; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop call it; takes no lock, and does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)

    def keep(self, work: Coroutine[object, object, None]) -> None:
        """Run ``work`` to its end; called in the loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self, *, wait: bool = True) -> None:
        """Cancel what runs, close what is to be closed, and end the thread. May be called twice, and from within."""
        self.soon(self.loop.stop)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(
                asyncio.gather(*tasks, *(close() for close in self.at_end), return_exceptions=True)
            )
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.run_until_complete(asyncio.sleep(0))  # transports say in a turn of the loop that they are closed
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
