"""What a long micro-batch keeps of its tokens: on the device, in the memory of the CPU, or in a file."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import IO, Protocol

import torch

from rlkit.errors import BackendError

__all__ = ["FileRows", "MemoryRows", "Rows", "Storage"]


class Rows(Protocol):
    """A tensor [N, width] that is read and written some rows at a time."""

    def read(self, part: slice) -> torch.Tensor:
        """Return rows [n, width] on the device; they may be the rows themselves and are not to be written to."""

    def write(self, part: slice, rows: torch.Tensor) -> None:
        """Replace rows."""


class MemoryRows:
    """In memory.

    Args:
        tensor: [N, width].
        device: where rows are computed with, perhaps another one than the tensor's.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._tensor, self._device = tensor, device

    def read(self, part: slice) -> torch.Tensor:
        return self._tensor[part].to(self._device, non_blocking=True)

    def write(self, part: slice, rows: torch.Tensor) -> None:
        self._tensor[part].copy_(rows)


class FileRows:
    """In a part of a file, which begins at a byte; what was never written is zeros.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     rows = FileRows(file, 0, 2, torch.float32)
    ...     rows.write(slice(1, 2), torch.tensor([[3.0, 4.0]]))
    ...     rows.read(slice(0, 2))
    tensor([[0., 0.],
            [3., 4.]])
    """

    def __init__(self, file: IO[bytes], begin: int, width: int, dtype: torch.dtype) -> None:
        self._file, self._begin, self._width, self._dtype = file, begin, width, dtype

    def read(self, part: slice) -> torch.Tensor:
        rows = torch.zeros(part.stop - part.start, self._width, dtype=self._dtype)
        buffer, place = memoryview(rows.view(torch.uint8).numpy()).cast("B"), self._place(part, rows)
        while buffer and (size := os.preadv(self._file.fileno(), [buffer], place)):
            buffer, place = buffer[size:], place + size
        return rows

    def write(self, part: slice, rows: torch.Tensor) -> None:
        rows = rows.to(self._dtype).contiguous()
        buffer, place = memoryview(rows.view(torch.uint8).numpy()).cast("B"), self._place(part, rows)
        while buffer:
            try:
                size = os.pwrite(self._file.fileno(), buffer, place)
            except OSError as error:
                raise BackendError(
                    f"offload_folder: {error}, after {place / 1e9:.1f} GB of a long micro-batch were written; "
                    "nothing was changed; choose a folder with more space, or shorten the longest datum"
                ) from error
            buffer, place = buffer[size:], place + size

    def _place(self, part: slice, rows: torch.Tensor) -> int:
        place: int = self._begin + part.start * self._width * rows.element_size()
        return place


class Storage:
    """Where the rows of one micro-batch are.

    Args:
        tokens: N.
        device: where it is computed.
        away: whether inputs of layers leave the device's memory.
        folder: of the file that a CPU's rows are in, all of them; None keeps them in memory.
    """

    def __init__(self, tokens: int, device: torch.device, *, away: bool, folder: Path | None) -> None:
        self._tokens, self._device, self._away = tokens, device, away
        # Without a name from the start, so that nothing is left behind whatever happens.
        self._file = tempfile.TemporaryFile(dir=folder) if away and folder and device.type == "cpu" else None  # noqa: SIM115
        self._end = 0
        if self._file is not None:
            weakref.finalize(self, self._file.close)

    def rows(self, width: int, dtype: torch.dtype, *, large: bool = False) -> Rows:
        """Return new rows [N, width], zeros.

        Args:
            width: of a row.
            dtype: of its numbers.
            large: whether there is one of them for every layer.
        """
        if self._file is not None:
            begin, size = self._end, self._tokens * width * dtype.itemsize
            self._end += size
            return FileRows(self._file, begin, width, dtype)
        away = large and self._away and self._device.type == "cuda"
        device = torch.device("cpu") if away else self._device
        return MemoryRows(torch.zeros(self._tokens, width, dtype=dtype, device=device, pin_memory=away), self._device)
