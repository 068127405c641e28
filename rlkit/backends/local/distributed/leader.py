"""``Leader``: rank 0's side of a backend: what its trainer and its samplers have done by all ranks.

Rank 0 alone has the user's losses, the accumulated gradient, the optimizer and the version; the others have the model,
the adapter as it is now, and snapshots of it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from rlkit._runtime import torchrun_world_size
from rlkit.backends.local.distributed._messages import (
    IDLE,
    Part,
    Request,
    pack_inputs,
    pack_request,
    unpack_result,
)
from rlkit.backends.local.distributed.shard import make_mesh
from rlkit.backends.local.distributed.world import acquire, one_after_another, release
from rlkit.backends.local.sampling.sampler import SampleRequest, Snapshot
from rlkit.backends.local.sampling.scheduler import Scheduler
from rlkit.backends.local.training.trainer import Flat, Inputs, LocalTrainer
from rlkit.errors import BackendError, ConfigError, RequestCancelled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rlkit.backends.local import LoadedPolicy
    from rlkit.backends.local.distributed.settings import Processes

__all__ = ["BASE", "Leader", "flatten", "load_flat", "take_turns"]

BASE = 0  # the number of the snapshot without an adapter
_TURNS = 8  # of the scheduler between two exchanges of requests and samples, at most


@attrs.define(eq=False)
class _Sent:
    """A request that another rank has."""

    request: Request
    rank: int
    size: int
    dropped: bool = False  # its rank was told


class Leader:
    """The ranks of one backend: ``Hands`` of its trainer, ``Background`` of its worker, ``Updated`` of its samplers.

    Args:
        settings: how many.
        options: of each rank's ``LocalBackend``, as far as JSON holds them.
        place: rank 0's device.
        named: what the user called it, None where nothing.
        load: loads rank 0's policy, while the others load theirs.

    Attributes:
        policy: what was loaded.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or one GPU for ranks that share the weights out.
        BackendError: a rank did not start, or did not load the policy.
    """

    def __init__(
        self,
        settings: Processes,
        options: Mapping[str, Any],
        place: torch.device,
        named: str | None,
        load: Callable[[DeviceMesh | None], LoadedPolicy],
    ) -> None:
        gpus = place.type == "cuda" and named in (None, "cuda")  # one for each
        here = settings.count if torchrun_world_size() is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if gpus and here > torch.cuda.device_count():
            what = f"got {here} on this machine, which has {torch.cuda.device_count()} GPUs"
            raise ConfigError("processes", what, "at most one per GPU", "or device='cuda:0', which all of them share")
        self._sharded = bool(options.get("shard"))
        if self._sharded and place.type != "cpu" and not gpus:
            raise ConfigError("shard", f"got True on {place}", "a GPU for each process, or a CPU")
        if self._sharded:  # parts of closed policies, which cycles of references keep
            gc.collect()
        self._world, self._backend = acquire(settings, "cuda" if gpus else "cpu")
        self._device = place if gpus else torch.device("cpu")  # where what all sum lies
        self._numbers: weakref.WeakKeyDictionary[Snapshot, int] = weakref.WeakKeyDictionary()
        self._snapshots, self._keys = itertools.count(BASE + 1), itertools.count()
        self._inbox, self._stopped = threading.Lock(), False
        self._waiting: list[Request] = []
        self._dead: deque[int] = deque()  # freed snapshots; the garbage collector must not take locks
        self._sent: dict[int, _Sent] = {}
        self._load = [0] * self.size  # tokens that each has to draw or to score
        self._spent = 0.0  # seconds that other backends have held the ranks until this one's last turn
        try:
            self.policy = self._open({**options}, "cuda" if gpus else str(place), load)
            self._numbers[self.policy.bare] = BASE
            self.share()
        except BaseException:
            self.close()
            raise
        self._trainer.hands = self

    @property
    def size(self) -> int:
        """Return the number of ranks, this one included."""
        return self._world.size

    def check(self) -> None:
        """Raise RankLost where a rank is gone."""
        self._world.check()

    def close(self) -> None:
        """Leave the ranks; the last backend ends them. May be called twice."""
        if not self._world.forked:
            release(self._world, self._backend)

    def _open(
        self,
        options: dict[str, Any],
        device: str,
        load: Callable[[DeviceMesh | None], LoadedPolicy],
    ) -> LoadedPolicy:
        """Load the policy on all ranks: at once, or one after the other, where each reads whole weights."""
        world, start = self._world, self._world.settings.start
        with self._exchange("open", within=start, options=options, device=device) as answers:
            if not self._sharded:
                policy = load(None)
            else:
                mesh = make_mesh(world.group, self._device)
                with one_after_another(0, self.size, start):
                    policy = load(mesh)
        self._raise_errors("connect", answers)
        return policy

    # What a trainer has others do; see ``Hands``.

    def forward(self, others: Sequence[Inputs], own: Callable[[], Flat], *, gradient: bool) -> list[Flat]:
        """See ``Hands``."""
        if not others and not self._sharded:
            return [own()]
        parts = [pack_inputs(inputs) for inputs in others]
        parts += [IDLE] * (self.size - 1 - len(parts))
        with self._exchange("forward", parts, gradient=gradient) as answers:
            flat = self._world.in_step(own) if self._sharded else own()
        self._raise_errors("a micro-batch", answers)
        return [flat, *(dict(zip(header["names"], tensors, strict=True)) for header, tensors in answers[: len(others)])]

    def backward(self, others: Sequence[Sequence[torch.Tensor]], names: Sequence[str], own: Callable[[], None]) -> None:
        """See ``Hands``."""
        parts: list[Part] = [({}, gradients) for gradients in others]
        parts += [IDLE] * (self.size - 1 - len(parts))
        if self._sharded:
            self._world.together("backward", self._backend, own, parts, names=list(names))
            return
        if others:
            self._order("backward", parts, names=list(names))
        own()

    def sum_gradients(self) -> None:
        """See ``Hands``."""
        parameters = list(self._trainer.parameters.values())
        with self._exchange("finish") as answers:
            flat = flatten([p.grad for p in parameters], parameters).to(self._device)
        self._raise_errors("forward_backward", answers)
        self._together("sum", lambda: dist.reduce(flat, 0, group=self._world.group))
        for p, piece in zip(parameters, _pieces(flat, parameters), strict=True):
            p.grad = piece

    def clear(self) -> None:
        """See ``Hands``."""
        self._order("clear")

    def share(self) -> None:
        """Send the adapter as it is now to all."""
        parameters = list(self._trainer.parameters.values())
        flat = flatten(parameters, parameters).to(self._device)
        self._together("adapter", lambda: dist.broadcast(flat, 0, group=self._world.group))

    # What samplers have others do.

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Have all take the same snapshot of their adapter."""
        number = next(self._snapshots)
        weakref.finalize(snapshot, self._dead.append, number).atexit = False
        gone = self._forgotten()
        with self._exchange("snapshot", number=number, version=snapshot.version, forgotten=gone) as answers:
            pass
        self._raise_errors("sampler", answers)
        self._numbers[snapshot] = number

    def submit(self, request: Request) -> None:
        """Draw or score on the rank that has least to do; from any thread.

        Raises:
            RankLost: a rank is gone.
        """
        self._world.check()
        with self._inbox:
            if self._stopped:
                raise BackendError("the local backend is closed")
            self._waiting.append(request)
        self._scheduler.wake()

    def update(
        self, snapshot: Snapshot, newer: Snapshot, *, recompute: bool, done: Callable[[], None] | None = None
    ) -> None:
        """Update a live sampler's snapshot to ``newer`` on all ranks. See ``Scheduler.update``.

        Raises:
            RankLost: also where this rank has ``newer``, and another one raised: they are not the same any more.
        """
        older, newest = self._numbers[snapshot], self._numbers[newer]
        self._world.check()
        self._scheduler.update(snapshot, newer, recompute=recompute)  # nothing is given out until the next turn
        with self._exchange("update", snapshot=older, newer=newest, recompute=recompute) as answers:
            pass
        for rank, (header, _) in enumerate(answers, 1):
            if header.get("error"):
                raise self._world.fail(f"update: rank {rank} has not the newer policy: {header['error']}")
        if done is not None:
            done()

    # What a worker does in between; see ``Background``.

    def delay(self) -> float | None:
        """See ``Background``."""
        return 0 if self._waiting or self._sent else self._scheduler.delay()

    def turn(self) -> None:
        """Deal requests out, have all ranks decode a little, and take what has ended."""
        try:
            parts = self._deal()
            if self._sent:
                self._tick(parts)
            else:
                self._scheduler.turn()
        except BaseException as error:  # noqa: BLE001  # whoever waits gets it; the worker goes on
            self._refuse(error)

    def stop(self) -> None:
        """See ``Background``: also of a policy that was forgotten, and not closed."""
        with self._inbox:
            self._stopped = True
        self._refuse(BackendError("the local backend was closed before this was sampled"))
        self._scheduler.stop()
        self.close()

    def _tick(self, parts: Sequence[Part]) -> None:
        spent = self._world.spent_by_others(self._backend)
        seconds = (spent - self._spent) or None  # as long as another policy, which trains say, has had them
        self._spent = spent
        with self._exchange("tick", parts, forgotten=self._forgotten(), seconds=seconds) as answers:
            take_turns(self._scheduler, seconds)
        for header, tensors in answers:
            left = list(tensors)
            for key, result, count in header["done"]:
                if key in self._sent:  # else it was refused
                    self._settle(self._sent.pop(key), (result, left[:count]))
                del left[:count]

    def _deal(self) -> list[Part]:
        """Hand out the waiting requests; return a message to each other rank: its new ones, and those to cancel."""
        new: list[list[tuple[int, int, Part]]] = [[] for _ in range(self.size)]
        for request in self._take_waiting():
            number, size = self._numbers.get(request.snapshot), _size(request)
            rank = 0 if number is None else min(range(self.size), key=self._load.__getitem__)
            self._load[rank] += size
            if rank == 0:
                request.future.add_done_callback(partial(self._unload, 0, size))
                self._scheduler.submit(request)
            elif number is not None:
                key = next(self._keys)
                self._sent[key] = _Sent(request, rank, size)
                new[rank].append((key, number, pack_request(request)))
        dropped: list[list[int]] = [[] for _ in range(self.size)]
        for key, sent in self._sent.items():
            if sent.request.dropped and not sent.dropped:
                sent.dropped = True
                dropped[sent.rank].append(key)
        parts: list[Part] = []
        for rank in range(1, self.size):
            entries = [[key, number, header, len(tensors)] for key, number, (header, tensors) in new[rank]]
            tensors = [x for _, _, (_, several) in new[rank] for x in several]
            parts.append(({"new": entries, "dropped": dropped[rank]}, tensors))
        return parts

    def _forgotten(self) -> list[int]:
        """Return the snapshots that nobody has any more."""
        return [self._dead.popleft() for _ in range(len(self._dead))]

    def _settle(self, sent: _Sent, result: Part) -> None:
        self._unload(sent.rank, sent.size)
        future, header = sent.request.future, result[0]
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            if sent.request.dropped:
                what = "no caller waits for this request any more, so it was cancelled; send it again"
                future.set_exception(RequestCancelled(what))
            elif "error" in header:
                future.set_exception(BackendError(f"rank {sent.rank} raised {header['error']}"))
            else:
                future.set_result(unpack_result(sent.request, result))

    def _refuse(self, error: BaseException) -> None:
        left = []
        for sent in self._sent.values():
            self._unload(sent.rank, sent.size)
            left.append(sent.request)
        self._sent.clear()
        for request in [*left, *self._take_waiting()]:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
                request.future.set_exception(error)

    def _take_waiting(self) -> list[Request]:
        with self._inbox:
            taken, self._waiting = self._waiting, []
        return taken

    def _unload(self, rank: int, size: int, _: object = None) -> None:
        self._load[rank] -= size

    def _order(self, kind: str, parts: Sequence[Part] = (), **fields: object) -> None:
        self._world.order(kind, self._backend, parts, **fields)

    def _exchange(
        self, kind: str, parts: Sequence[Part] = (), within: float | None = None, **fields: object
    ) -> AbstractContextManager[list[Part]]:
        return self._world.exchange(kind, self._backend, parts, within, **fields)

    def _together(self, kind: str, work: Callable[[], object]) -> None:
        self._world.together(kind, self._backend, work)

    def _raise_errors(self, call: str, answers: Sequence[Part]) -> None:
        for rank, (header, _) in enumerate(answers, 1):
            if header.get("error"):
                raise BackendError(f"{call}: rank {rank} raised {header['error']}")

    @property
    def _trainer(self) -> LocalTrainer:
        return self.policy.trainer

    @property
    def _scheduler(self) -> Scheduler:
        return self.policy.scheduler


def take_turns(scheduler: Scheduler, seconds: float | None) -> None:
    """Decode a little, and for no longer than ``seconds``."""
    began = time.monotonic()
    for _ in range(_TURNS):
        if scheduler.delay() is None:
            return
        scheduler.turn()
        if seconds is not None and time.monotonic() - began > seconds:
            return


def flatten(tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return float32 [all of them in one row], zeros where there is None."""
    there = [torch.zeros_like(p) if x is None else x.detach() for x, p in zip(tensors, like, strict=True)]
    return torch.cat([x.reshape(-1).float() for x in there])


def load_flat(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
    """Write a row into parameters."""
    with torch.no_grad():
        for p, piece in zip(parameters, _pieces(flat, parameters), strict=True):
            p.copy_(piece)


def _pieces(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [x.numel() for x in like])
    return [part.view(x.shape).to(x.device) for part, x in zip(parts, like, strict=True)]


def _size(request: Request) -> int:
    """Return how many tokens it takes at most, those of its prompt counted once."""
    if isinstance(request, SampleRequest):
        return int(request.prompt.size) + len(request.rngs) * request.limit
    return int(request.tokens.size)
