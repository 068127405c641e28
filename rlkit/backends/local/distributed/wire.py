"""What ranks say to one another: a line of JSON and arrays as they lie in memory. Nothing is pickled.

A frame is the length of its head (4 bytes, big-endian), the head, and the arrays one after the other. The head names
the kind of the message, its fields, and dtype and shape of each array.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlkit.types import Datum

__all__ = ["Connection", "Message", "packed_data", "unpacked_data"]

_DTYPES = {"<f4", "<f8", "<i8", "|b1"}
_HEAD = struct.Struct(">I")
_LONGEST = 1 << 28  # bytes of a head


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

    def receive(self) -> Message:
        """Return the next message.

        Raises:
            EOFError: the other end closed.
            OSError: it broke.
            ValueError: what came is no message.
        """
        (length,) = _HEAD.unpack(self._read(_HEAD.size))
        if length > _LONGEST:
            raise ValueError(f"a message with a head of {length} bytes")
        kind, fields, shapes = json.loads(bytes(self._read(length)))
        arrays = []
        for dtype, shape in shapes:
            if dtype not in _DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise ValueError(f"a message with an array of dtype {dtype} and shape {shape}")
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


def packed_data(data: Sequence[Datum]) -> tuple[dict[str, Any], list[np.ndarray]]:
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
