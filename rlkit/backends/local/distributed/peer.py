"""``Peer``: the other end of a connection, which is asked, and which asks."""

from __future__ import annotations

import concurrent.futures
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlkit.backends.local.distributed.wire import Connection, Message

__all__ = ["Handler", "Peer", "RemoteError", "Reply"]

Reply: TypeAlias = "concurrent.futures.Future[Message]"
Handler: TypeAlias = "Callable[[Message], Reply | None]"

_REPLY, _ERROR, _ALIVE = "reply", "error", "alive"
BEAT = 1.0  # seconds between signs of life


class RemoteError(Exception):
    """What the other end raised, as text."""


class Peer:
    """A connection with a thread that sends and one that receives, so that no end waits for the other to read.

    Args:
        connection: to it.
        handle: begins what it asks for, in the thread that receives, which is not to wait for anything: signs of life
            and the end are read there, too. What it returns is sent once it is done.
        lost: told that the connection is gone, and why.
        beats: give signs of life.
    """

    def __init__(
        self,
        connection: Connection,
        handle: Handler,
        lost: Callable[[BaseException], None],
        *,
        beats: bool = False,
    ) -> None:
        self._connection, self._handle, self._lost, self._beats = connection, handle, lost, beats
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Reply] = {}
        self._lock = threading.Lock()
        self._gone: BaseException | None = None
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.heard = 0  # messages so far
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send_all, self._receive_all)]

    def start(self) -> None:
        """Begin to send and to receive."""
        for thread in self._threads:
            thread.start()

    def call(self, kind: str, fields: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> Reply:
        """Ask for something; the future has the reply, a ``RemoteError``, or why the connection is gone."""
        future: Reply = concurrent.futures.Future()
        number = next(self._numbers)
        with self._lock:
            gone = self._gone
            if gone is None:
                self._waiting[number] = future
        if gone is not None:
            future.set_exception(gone)
        else:
            self._outbox.put(Message(kind, {**fields, "call": number}, arrays))
        return future

    def tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Say something that has no reply."""
        self._outbox.put(Message(kind, fields))

    def fail(self, why: BaseException) -> None:
        """Let everything that waits for the other end raise ``why``, now and later."""
        with self._lock:
            if self._gone is not None:
                return
            self._gone = why
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(why)

    def close(self) -> None:
        """Send what was said, and end the connection."""
        self._outbox.put(None)
        self._threads[0].join(timeout=5.0)
        self._connection.close()
        if threading.current_thread() is not self._threads[1]:
            self._threads[1].join(timeout=5.0)

    def _send_all(self) -> None:
        began = time.monotonic()
        while True:
            try:
                wait = max(0.0, began + BEAT - time.monotonic()) if self._beats else None
                message = self._outbox.get(timeout=wait)
            except queue.Empty:
                message, began = Message(_ALIVE), time.monotonic()
            if message is None:
                return
            try:
                self._connection.send(message)
            except OSError:  # the thread that receives says so
                return

    def _receive_all(self) -> None:
        try:
            while True:
                message = self._connection.receive()
                self.heard += 1
                self._take(message)
        except BaseException as error:  # noqa: BLE001  # whatever it is, nothing comes any more
            self._lost(error)

    def _take(self, message: Message) -> None:
        if message.kind == _ALIVE:
            return
        if message.kind in (_REPLY, _ERROR):
            with self._lock:
                future = self._waiting.pop(int(message.fields["call"]), None)
            if future is None:
                return
            if message.kind == _ERROR:
                future.set_exception(RemoteError(str(message.fields["text"])))
            else:
                future.set_result(message)
            return
        number = message.fields.get("call")
        try:
            reply = self._handle(message)
        except BaseException as error:  # noqa: BLE001  # whoever asked gets it
            reply = concurrent.futures.Future()
            reply.set_exception(error)
        if number is not None and reply is not None:
            reply.add_done_callback(lambda done: self._answer(number, done))

    def _answer(self, number: int, done: Reply) -> None:
        error = concurrent.futures.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            text = f"{type(error).__name__}: {error}"
            self._outbox.put(Message(_ERROR, {"call": number, "text": text}))
            return
        message = done.result()
        self._outbox.put(Message(_REPLY, {**message.fields, "call": number}, message.arrays))
