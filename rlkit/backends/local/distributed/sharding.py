"""Base weights that do not fit: each rank holds a shard of every layer, and gathers one layer at a time.

Fully sharded data parallelism (ZeRO-3, arXiv 1910.02054; FSDP, arXiv 2304.11277) of weights that are frozen: a layer's
matrices lie one after another in one flat buffer, of which rank r keeps the r-th of equal parts. Before the layer is
computed, forward or backward, ``all_gather_into_tensor`` puts the parts together where the model's tensors are views;
then the memory is given back. The adapters are small, have gradients, and stay whole on each rank, as norms and
biases do.

torch's ``fully_shard`` gathers in the thread that computes, so that all ranks must compute the same layers in the same
order; ranks with different numbers of micro-batches, or that sample, would wait for one another, or get one another's
layers (docs/sharding.md). So gathering has its own thread here. What a rank did not ask for is gathered with those who
did, and stays until the next order, since ranks that train together come to it a little later. Of W bytes of weights in
units of u bytes at most, W / ranks + 2 u are in memory: what is computed with, and that. gloo adds one to receive.

In which order the ranks gather: rank 0 says so, and all follow.

A collective needs every rank, in one order. But ranks do not compute in step: a rank waits for the user's loss between
its forward and its backward pass, samples what it is asked for, or has more tokens than another. So whoever needs
something tells rank 0, which gives all ranks the next order, and a thread of each rank carries orders out one after the
other, whatever that rank is computing.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from rlkit.backends.local.distributed._shard_reader import ShardReader, is_sharded
from rlkit.backends.local.model.memory import gather_around
from rlkit.errors import ConfigError, RankLost

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GatherOrders", "ShardGroups", "ShardedWeights", "Unit", "shard_groups"]

ShardGroups: TypeAlias = tuple[dist.ProcessGroup, dist.ProcessGroup]

_WAIT = timedelta(days=365)  # for the next order; that a rank is gone is seen at once
_END = -1


def shard_groups(timeout: timedelta) -> ShardGroups:
    """Return a group that gathers, and one for its orders. Made by all ranks together.

    Args:
        timeout: of one gather.
    """
    return dist.new_group(timeout=timeout), dist.new_group(backend="gloo", timeout=_WAIT)


class GatherOrders:
    """The orders as one rank sees them. Made by all ranks together.

    Args:
        group: of gloo, used for nothing else.
        carry_out: called with each order in turn, in a thread.
        failed: called once if the ranks lost one another.
    """

    def __init__(
        self, group: dist.ProcessGroup, carry_out: Callable[[int], None], failed: Callable[[BaseException], None]
    ) -> None:
        self.rank, self._size, self._group = dist.get_rank(group), dist.get_world_size(group), group
        self._carry_out, self._failed = carry_out, failed
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()  # of rank 0 to itself
        self._outbox: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._last: dict[int, int] = {}  # number of the last order for each
        self._count = 0
        self._closing = False
        runs = [self._follow, self._send, self._listen] if self.rank == 0 else [self._follow, self._send]
        self._threads = [threading.Thread(target=self._run, args=(run,), daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    def wish(self, what: int, after: int) -> None:
        """Request an order of ``what``, unless one of the orders after the first ``after`` has it."""
        if self.rank == 0:
            self._take(what, after)
        else:
            self._outbox.put((0, torch.tensor([what, after])))

    def close(self) -> None:
        """End the threads of all ranks; called by rank 0 once no one computes any more, and by others then."""
        with self._lock:
            if self.rank == 0 and not self._closing:
                self._order(_END)
            self._closing = True
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def _take(self, what: int, after: int) -> None:
        with self._lock:
            if self._last.get(what, 0) <= after:
                self._order(what)
                self._last[what] = self._count

    def _order(self, what: int) -> None:
        self._count += 1
        for rank in range(1, self._size):
            self._outbox.put((rank, torch.tensor([what])))
        self._orders.put(what)

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # noqa: BLE001  # whoever waits for an order is told
            if not self._closing:
                self._failed(error)

    def _follow(self) -> None:
        order = torch.zeros(1, dtype=torch.int64)
        while True:
            if self.rank == 0:
                what = self._orders.get()
            else:
                dist.recv(order, 0, group=self._group)
                what = int(order)
            if what == _END:
                self._closing = True
                if self.rank:
                    self._outbox.put((0, torch.tensor([_END, 0])))
                self._outbox.put(None)
                self._failed(RuntimeError("the backend is closed"))
                return
            self._carry_out(what)

    def _send(self) -> None:
        while (message := self._outbox.get()) is not None:  # a send waits until the other end receives
            rank, tensor = message
            dist.send(tensor, rank, group=self._group)

    def _listen(self) -> None:
        wish, left = torch.zeros(2, dtype=torch.int64), self._size - 1
        while left:
            dist.recv(wish, group=self._group)
            what, after = wish.tolist()
            if what == _END:
                left -= 1
            else:
                self._take(what, after)


_ALIGNED = 64  # bytes
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.13


class Unit:
    """Weights that are gathered together: those of a layer, or of an embedding.

    Args:
        index: of the unit.
        shard: uint8 [k], this rank's part.
        ranks: how many there are.

    Attributes:
        buffer: uint8 [ranks k], whose memory is there while the unit is.
    """

    def __init__(self, index: int, shard: torch.Tensor, ranks: int) -> None:
        self.index, self.shard = index, shard
        self.buffer = torch.empty(ranks * shard.numel(), dtype=torch.uint8, device=shard.device)
        self._target = self.buffer.data  # written past autograd, which may have saved a weight: the values are the same
        self.there, self.uses, self.wanted = True, 0, False

    def free(self) -> None:
        """Free the memory."""
        self.there = False
        self.buffer.untyped_storage().resize_(0)

    def all_gather(self, group: dist.ProcessGroup, *, keep: bool) -> None:
        """Take part in gathering it; with ``keep`` it is there afterwards."""
        if keep:
            self.buffer.untyped_storage().resize_(self.buffer.numel())
        target = self._target if keep else torch.empty_like(self._target)
        _all_gather(target, self.shard, group=group)


class _UnitsOf:
    """``Weights`` of a module: those units that it reads. One object, whatever is copied."""

    def __init__(self, owner: ShardedWeights, units: list[Unit]) -> None:
        self._owner, self._units = owner, units

    def gather(self) -> None:
        for unit in self._units:
            self._owner.gather(unit)

    def release(self) -> None:
        for unit in self._units:
            self._owner.release(unit)

    def __deepcopy__(self, _: object) -> Self:
        return self


class ShardedWeights:
    """The weights of one model on this rank. Made by all ranks together, which then load the same model.

    Args:
        device: of the shards and of what is gathered.
        group: that gathers, with a backend for the device.
        orders: a group of gloo for the orders to gather, whose timeout is longer than anything that is waited for.
        patience: seconds that a rank waits for the others to gather.

    Attributes:
        peak: bytes of weights that were in this rank's memory at once at most.
        gathers: how many units this rank took part in gathering.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup, orders: dist.ProcessGroup, patience: float = 90.0
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device, self._group, self._orders_group, self._patience = device, group, orders, patience
        self.units: list[Unit] = []
        self._changed = threading.Condition()
        self._spare: Unit | None = None  # gathered for others, and not used here yet
        self.gathers = 0
        self._error: BaseException | None = None
        self._orders: GatherOrders | None = None
        self._whole, self._gathered, self.peak = 0, 0, 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of weights that always are in this rank's memory."""
        return self._whole + sum(int(unit.shard.numel()) for unit in self.units)

    def reader(self) -> ShardReader:
        """Return what ``shard`` takes the weights from."""
        return ShardReader(self.rank, self.size)

    def shard(self, model: nn.Module, reader: ShardReader) -> None:
        """Make the weights of ``model``, which ``reader`` read, views of buffers that are gathered when it computes.

        Raises:
            ConfigError: a weight is not in the checkpoint.
        """
        owners = _owners(model)
        units: dict[int, Unit] = {}  # by the weight
        for module, weights in [*_gathered_modules(model)]:  # before any weight is replaced
            new = [p for p in weights if id(p) not in units]
            if new:
                unit = self._unit(new, reader, owners)
                units.update((id(p), unit) for p in new)
            needed = [*dict.fromkeys(units[id(p)] for p in weights)]
            gather_around(module, _UnitsOf(self, needed))
        self.peak = max(self.peak, reader.peak)
        self._place_the_rest(model)
        _trim()
        self._whole = sum(p.numel() * p.element_size() for p in model.parameters() if not is_sharded(p))
        self.peak = max(self.peak, self.nbytes)
        self._orders = GatherOrders(self._orders_group, self._carry_out, self._fail)

    def gather(self, unit: Unit) -> None:
        """Keep a unit in memory until ``release``.

        Raises:
            RankLost: another rank is gone, or does not answer.
        """
        with self._changed:
            if not unit.there:
                self._wait_for(unit)
            unit.uses += 1
            if self._spare is unit:
                self._spare = None

    def release(self, unit: Unit) -> None:
        """Free its memory if nothing else needs it."""
        with self._changed:
            unit.uses -= 1
            if unit.uses == 0 and unit.there:
                self._free(unit)

    def close(self) -> None:
        """End the thread that gathers; on rank 0 first."""
        if self._orders is not None:
            self._orders.close()

    def _wait_for(self, unit: Unit) -> None:
        unit.wanted = True
        try:
            self._check()
            assert self._orders is not None  # noqa: S101
            try:
                self._orders.wish(unit.index, self.gathers)
            except RuntimeError as error:
                self._error = self._error or error
            if not self._changed.wait_for(lambda: unit.there or self._error is not None, self._patience):
                raise RankLost(
                    f"shard: the other processes did not gather weights with rank {self.rank} in {self._patience:g} s"
                )
            if not unit.there:
                self._check()
        finally:
            unit.wanted = False

    def _check(self) -> None:
        if self._error is not None:
            raise RankLost(
                f"shard: a process that held a part of the weights was lost: {self._error}; connect anew with "
                "resume_from= and the last saved path"
            ) from self._error

    def _carry_out(self, index: int) -> None:
        unit = self.units[index]
        with self._changed:
            if self._spare is not None and self._spare is not unit:  # no one came for it
                self._free(self._spare)
            keep = unit.uses == 0
            if keep and unit.there:
                self._free(unit)
            self._gathered += unit.buffer.numel()
            self.peak = max(self.peak, self.nbytes + self._gathered)
        unit.all_gather(self._group, keep=keep)
        with self._changed:
            self.gathers += 1
            if keep:
                unit.there = True
                self._spare = None if unit.wanted else unit
            else:
                self._gathered -= unit.buffer.numel()
            self._changed.notify_all()

    def _free(self, unit: Unit) -> None:
        unit.free()
        self._gathered -= unit.buffer.numel()
        if self._spare is unit:
            self._spare = None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _unit(
        self, weights: list[nn.Parameter], reader: ShardReader, owners: dict[int, list[tuple[nn.Module, str]]]
    ) -> Unit:
        """Lay the weights out one after another, those of one dtype without a gap: products read several as one."""
        starts, end = [], 0
        for i, weight in enumerate(weights):
            if i and weight.dtype != weights[i - 1].dtype:
                end = -(-end // _ALIGNED) * _ALIGNED
            starts.append(end)
            end += weight.numel() * weight.element_size()
        length = -(-end // (_ALIGNED * self.size)) * _ALIGNED
        shard = torch.zeros(length, dtype=torch.uint8, device=self._device)
        first = self.rank * length
        for start, weight in zip(starts, weights, strict=True):
            piece = reader.take(weight)
            if piece is None:
                module, name = owners[id(weight)][0]
                raise ConfigError(f"shard=True: the checkpoint lacks {name!r} of {type(module).__name__}")
            whole = self._joined(piece.view(torch.uint8))[: weight.numel() * weight.element_size()]
            begin, stop = max(start, first), min(start + whole.numel(), first + length)
            if begin < stop:
                shard[begin - first : stop - first] = whole[begin - start : stop - start]
            self.peak = max(self.peak, reader.nbytes + self.nbytes + length + (self.size + 1) * piece.nbytes)
        unit = Unit(len(self.units), shard, self.size)
        for start, weight in zip(starts, weights, strict=True):
            view = unit.buffer[start : start + weight.numel() * weight.element_size()].view(weight.dtype)
            parameter = nn.Parameter(view.view(weight.shape), requires_grad=False)
            for module, name in owners[id(weight)]:
                setattr(module, name, parameter)
        unit.free()
        self.units.append(unit)
        return unit

    def _joined(self, piece: torch.Tensor) -> torch.Tensor:
        """Return all ranks' pieces one after another."""
        piece = piece.to(self._device)
        out = piece.new_empty(self.size * piece.numel())
        try:
            _all_gather(out, piece, group=self._group)
        except RuntimeError as error:
            raise RankLost(f"shard: a process was lost while the weights were distributed: {error}") from error
        return out

    def _place_the_rest(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                if parameter.device != self._device:
                    setattr(module, name, nn.Parameter(parameter.to(self._device), requires_grad=False))
            for name, buffer in [*module.named_buffers(recurse=False)]:
                module._buffers[name] = buffer.to(self._device)  # noqa: SLF001  # as Module.to does


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return where each weight is, more than one place for tied ones: by its id (module, name)."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return owners


def _gathered_modules(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield the modules around which weights are gathered, with these: layers, and what has any outside of them."""
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        if isinstance(module, nn.ModuleList):
            for layer in module:
                inside.update(id(x) for x in layer.modules())
                if weights := [p for p in layer.parameters() if is_sharded(p)]:
                    yield layer, weights
        elif weights := [p for p in module.parameters(recurse=False) if is_sharded(p)]:
            yield module, weights


def _trim() -> None:
    """Ask malloc to return the memory of freed pieces, where it can be asked."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
