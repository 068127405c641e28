"""What ranks say to one another: a line of JSON and arrays as they lie in memory. Nothing is pickled.

A frame is the length of its head (4 bytes, big-endian), the head, and the arrays one after the other. The head names
the kind of the message, its fields, and dtype and shape of each array.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from rlkit.types import Datum

__all__ = ["Connection", "Handler", "Message", "Peer", "RemoteError", "Reply", "packed_data", "unpacked_data"]

_DTYPES = {"<f4", "<f8", "<i8", "|b1"}
_HEAD = struct.Struct(">I")
_LONGEST = 1 << 28  # bytes of a head
_HELLO = 1000  # and of the first one


@attrs.frozen(eq=False)
class Message:
    """One message.

    Attributes:
        kind: what it asks for or says.
        fields: what JSON can hold.
        arrays: float32, float64, int64 or bool.
    """

    kind: str
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    arrays: Sequence[np.ndarray] = ()

    def frame(self) -> list[bytes | memoryview]:
        """Return it as it travels."""
        arrays = [np.ascontiguousarray(array).reshape(array.shape) for array in self.arrays]
        shapes = [[array.dtype.str, list(array.shape)] for array in arrays]
        head = json.dumps([self.kind, dict(self.fields), shapes], separators=(",", ":")).encode()
        bodies = [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]
        return [_HEAD.pack(len(head)) + head, *bodies]


class Connection:
    """Messages over a socket. One thread may send while another receives."""

    def __init__(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(None)
        self._link = link

    def send(self, message: Message) -> None:
        """Send ``message``. Raises OSError where the other end is gone."""
        for part in message.frame():
            self._link.sendall(part)

    def receive(self, *, stranger: bool = False) -> Message:
        """Return the next message.

        Args:
            stranger: the other end has shown no token yet, so the message is short and has no arrays.

        Raises:
            EOFError: the other end closed.
            OSError: it broke.
            ValueError: what came is not a message.
        """
        (length,) = _HEAD.unpack(self._read(_HEAD.size))
        if length > (_HELLO if stranger else _LONGEST):
            raise ValueError(f"a message has a header of {length} bytes, which is too long")
        kind, fields, shapes = json.loads(bytes(self._read(length)))
        arrays = []
        for dtype, shape in () if stranger else shapes:
            if dtype not in _DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise ValueError(f"a message has an array of unsupported dtype {dtype} or shape {shape}")
            body = self._read(np.dtype(dtype).itemsize * math.prod(shape))
            arrays.append(np.frombuffer(body, dtype).reshape(shape))
        return Message(str(kind), fields, arrays)

    def close(self) -> None:
        """End it; a thread that receives gets an error."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def _read(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view, read = memoryview(buffer), 0
        while read < size:
            count = self._link.recv_into(view[read:])
            if count == 0:
                raise EOFError("the connection was closed")
            read += count
        return buffer


def packed_data(data: Sequence[Datum]) -> tuple[dict[str, object], list[np.ndarray]]:
    """Return fields and arrays of datums, with what a model computes from: tokens, mask, temperature and targets.

    Losses are computed where the user's function is, so that the other inputs stay there.
    """
    arrays: list[np.ndarray] = []
    targets = []
    for datum in data:
        arrays += [datum.tokens, datum.mask]
        target = datum.inputs.get("target_tokens")
        targets.append(target is not None)
        if target is not None:
            arrays.append(target)
    return {"temperatures": [datum.temperature for datum in data], "targets": targets}, arrays


def unpacked_data(fields: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> list[Datum]:
    """Return the datums of ``packed_data``."""
    left = iter(arrays)
    data = []
    for temperature, has_targets in zip(fields["temperatures"], fields["targets"], strict=True):
        tokens, mask = next(left), next(left)
        inputs = {"target_tokens": next(left)} if has_targets else {}
        data.append(Datum(tokens, mask, inputs, temperature=temperature))
    return data


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

    def call(self, kind: str, fields: Mapping[str, object], arrays: Sequence[np.ndarray] = ()) -> Reply:
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

    def tell(self, kind: str, fields: Mapping[str, object]) -> None:
        """Send a message that has no reply."""
        self._outbox.put(Message(kind, fields))

    def fail(self, why: BaseException) -> None:
        """Make everything that waits for the other end raise ``why``, now and later."""
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
