"""Ranks other than 0, which carry out what rank 0 orders.

Under torchrun the first ``Run`` or ``LocalBackend`` follows in every process but the first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlkit.backends.local import load_policy
from rlkit.backends.local.checks import check_options
from rlkit.backends.local.distributed._messages import (
    Part,
    Request,
    describe_error,
    pack_result,
    unpack_inputs,
    unpack_request,
)
from rlkit.backends.local.distributed.launch import join_torchrun, open_store
from rlkit.backends.local.distributed.leader import BASE, flatten, load_flat, take_turns
from rlkit.backends.local.distributed.shard import make_idle_inputs, make_mesh
from rlkit.backends.local.distributed.world import FollowerWorld, one_after_another, release_torchrun_at_exit
from rlkit.backends.local.sampling.sampler import Snapshot
from rlkit.backends.local.training.trainer import Flat, backpropagate
from rlkit.types import Lora

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Follower:
    """The same model and adapter as rank 0's, of one backend.

    Args:
        world: with rank 0.
        options: rank 0's, of the local backend.
        device: this rank's.
        mesh: of the ranks that share the base's weights out, if they do.
    """

    def __init__(self, world: FollowerWorld, options: Mapping[str, Any], device: str, mesh: DeviceMesh | None) -> None:
        here = {"lora": Lora(**options["lora"]), "device": device, "processes": 1, "shard": False}
        self._world, self._sharded = world, mesh is not None
        self._policy = load_policy(check_options(**{**options, **here}), mesh)
        self._trainer, self._scheduler = self._policy.trainer, self._policy.scheduler
        self._parameters = list(self._trainer.parameters.values())
        self._device = torch.device(device)
        self._shared = self._device if dist.get_backend(world.group) == "nccl" else torch.device("cpu")
        self._snapshots: dict[int, Snapshot] = {BASE: self._policy.bare}
        self._requests: dict[int, Request] = {}
        self._flat: Flat = {}
        self._gradient = torch.empty(0)  # of this call, in one row
        self._error: str | None = None  # of this call

    def forward(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Compute a micro-batch, and answer with its outputs."""
        self._flat = {}
        if (tensors or self._sharded) and self._error is None:
            with self._reporting():
                inputs = unpack_inputs((header, tensors), self._device) if tensors else make_idle_inputs(self._device)
                self._flat = self._trainer.outputs(inputs, gradient=header["gradient"])
        flat = self._flat if tensors else {}
        answer = {"error": self._error, "names": list(flat)}
        self._world.answer((answer, [x.detach().float() for x in flat.values()]))
        if not header["gradient"]:
            self._flat, self._error = {}, None

    def backward(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Add the gradient of the micro-batch."""
        names = header["names"]
        if self._sharded and not tensors:
            names, tensors = ["logprobs"], [torch.zeros(1)]
        if tensors and self._error is None:
            with self._reporting():
                backpropagate(self._flat, names, tensors)
        self._flat = {}

    def finish(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Answer whether all went well."""
        del header, tensors
        with self._reporting():
            self._gradient = flatten([p.grad for p in self._parameters], self._parameters).to(self._shared)
        self._world.answer(({"error": self._error}, []))

    def sum(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Add the gradient to rank 0's, and drop it."""
        dist.reduce(self._gradient, 0, group=self._world.group)
        self.clear(header, tensors)

    def clear(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Drop the gradient of this call."""
        del header, tensors
        self._flat, self._gradient, self._error = {}, torch.empty(0), None
        self._trainer.clear()

    def adapter(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Take rank 0's adapter as it is now."""
        del header, tensors
        flat = flatten(self._parameters, self._parameters).to(self._shared)
        dist.broadcast(flat, 0, group=self._world.group)
        load_flat(flat, self._parameters)

    def snapshot(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Take a snapshot of the adapter."""
        del tensors
        self._forget(header["forgotten"])
        with self._answering():
            self._snapshots[header["number"]] = self._policy.snapshot(header["version"])

    def update(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Update a live sampler's snapshot."""
        del tensors
        with self._answering():
            snapshot, newer = (self._snapshots[header[name]] for name in ("snapshot", "newer"))
            self._scheduler.update(snapshot, newer, recompute=header["recompute"])

    def tick(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Begin requests, decode a little, and answer with what has ended."""
        self._forget(header["forgotten"])
        ended: dict[int, Part] = {}
        for key in header["dropped"]:
            if key in self._requests:
                self._requests[key].drop()
        for key, number, described, count in header["new"]:
            own, tensors = tensors[:count], tensors[count:]
            try:
                request = unpack_request((described, own), self._snapshots[number], self._policy.base.tokenizer)
                self._scheduler.submit(request)
                self._requests[key] = request
            except Exception as error:  # noqa: BLE001  # the caller gets it
                ended[key] = {"error": describe_error(error)}, []
        take_turns(self._scheduler, header["seconds"])
        ended |= {key: pack_result(request) for key, request in self._requests.items() if request.future.done()}
        for key in ended:
            self._requests.pop(key, None)
        entries = [[key, result, len(several)] for key, (result, several) in ended.items()]
        self._world.answer(({"done": entries}, [x for _, several in ended.values() for x in several]))

    def close(self, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
        """Free the model."""
        del header, tensors
        self._scheduler.stop()

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._snapshots.pop(number, None)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Keep what is raised, for rank 0."""
        try:
            yield
        except Exception as error:
            if self._sharded:  # others wait for this rank, which has to leave
                raise
            self._error = describe_error(error)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Answer whether this went well; it is no part of a call of the trainer's."""
        error = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001  # rank 0 raises it
            error = describe_error(raised)
        self._world.answer(({"error": error}, []))


def follow(world: FollowerWorld) -> None:
    """Do what rank 0 says until it leaves."""
    backends: dict[int, Follower] = {}
    while True:
        header, tensors = world.receive()
        kind, number = header["order"], header.get("backend")
        if kind == "end":
            return
        if kind == "open":
            backends |= _open(world, header)
        elif number in backends:
            getattr(backends[number], kind)(header, list(tensors))
            if kind == "close":
                del backends[number]
                gc.collect()  # sharded modules are in cycles of references


def _open(world: FollowerWorld, header: Mapping[str, Any]) -> dict[int, Follower]:
    device, error, opened = header["device"], None, dict[int, Follower]()
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', world.rank)}"
    sharded = header["options"].get("shard")
    try:
        mesh = make_mesh(world.group, torch.device(device)) if sharded else None
        with one_after_another(world.rank, world.size, world.start) if sharded else contextlib.nullcontext():
            opened[header["backend"]] = Follower(world, header["options"], device, mesh)
    except Exception as raised:  # noqa: BLE001  # rank 0 raises it
        error = describe_error(raised)
    world.answer(({"error": error}, []))
    return opened


def follow_torchrun() -> None:
    """See ``rlkit._runtime.follow_torchrun``."""
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if rank == 0:
        release_torchrun_at_exit()
        return
    store, told = join_torchrun(rank)
    if told:
        _follow_until_end(FollowerWorld(store, rank, size, **told))
    if threading.current_thread() is not threading.main_thread():  # which would go on
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    raise SystemExit(0)


def main(folder: str, rank: int, size: int, device: str, start: float, deadline: float) -> None:
    """Follow in a process that rank 0 started. See ``FollowerWorld``."""
    store = open_store(folder, start)
    store.set(f"rank{rank}", "here")
    _follow_until_end(FollowerWorld(store, rank, size, device, start, deadline))
    sys.stdout.flush()
    os._exit(0)  # threads of libraries that were loaded would be waited for


def _follow_until_end(world: FollowerWorld) -> None:
    try:
        follow(world)
    except Exception:  # noqa: BLE001  # of torch.distributed, say: rank 0 is gone, or another rank
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()
