"""Ranks other than 0: ``python -m rlkit.backends.local._serve`` is one, which reads where to go from stdin.

Under torchrun ``LocalBackend`` serves in every process but the first.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from rlkit.backends.local import load_policy
from rlkit.backends.local.checks import check_options
from rlkit.backends.local.distributed.losses import RemoteLoss
from rlkit.backends.local.distributed.ranks import Replicas
from rlkit.backends.local.distributed.sampling import BASE, Request, answer_of, request_of
from rlkit.backends.local.distributed.server import Server, on_one_node, open_file_store, torchrun_store
from rlkit.backends.local.distributed.sharding import ShardedWeights
from rlkit.backends.local.distributed.wire import Message, Peer, Reply, unpacked_data
from rlkit.backends.local.sampling.sampler import Snapshot
from rlkit.backends.trainer import Worker
from rlkit.errors import BackendError
from rlkit.types import Adam, Lora


class Replica:
    """The same model and adapter as rank 0's.

    Args:
        options: rank 0's, of the local backend.
        device: this rank's.
        group: of the ranks of this backend.
        peer: rank 0.
        number: of the backend.
        rank: this one's.
        weights: the base's, where ranks share them out.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        device: str,
        group: dist.ProcessGroup,
        peer: Peer,
        number: int,
        rank: int,
        weights: ShardedWeights | None,
    ) -> None:
        here = {"lora": Lora(**options["lora"]), "device": device, "processes": 1, "shard": False}
        resolved = check_options(**{**options, **here})
        self._policy, self._weights = load_policy(resolved, weights), weights
        self._trainer = self._policy.trainer
        self._worker = Worker("local", self._policy.scheduler)
        self._policy.scheduler.wake = self._worker.wake
        there = torch.device(device) if dist.get_backend(group) == "nccl" else torch.device("cpu")
        self._replicas = Replicas(self._trainer, group, there)
        self._peer, self._number, self._rank = peer, number, rank
        self._snapshots: dict[int, Snapshot] = {BASE: self._policy.bare}
        self._requests: dict[int, Request] = {}
        self._earlier: list[torch.Tensor | None] = []
        self._jobs: dict[str, Callable[[Message], Message | Generator[None, None, Message]]] = {
            "share": self._share,
            "run": self._run_share,
            "step": self._step_together,
            "clear": self._clear,
            "take_back": self._take_back,
            "update": self._update,
        }

    def handle(self, message: Message) -> Reply | None:
        """Carry out what rank 0 says, in the thread that receives it or, what trains, in that of the backend."""
        fields = message.fields
        if message.kind == "take":  # rank 0 waits for what trains before it takes one
            self._snapshots[int(fields["snapshot"])] = self._policy.snapshot(int(fields["version"]))
        elif message.kind == "forget":
            self._snapshots.pop(int(fields["snapshot"]), None)
        elif message.kind == "drop":
            request = self._requests.get(int(fields["request"]))
            if request is not None:
                request.drop()
        elif message.kind in ("sample", "score"):
            return self._draw(message)
        elif message.kind in self._jobs:
            job = self._jobs[message.kind]
            return self._worker.submit(lambda: job(message))
        else:
            raise BackendError(f"rank 0 sent a message {message.kind!r}, which this version does not know")
        return None

    def close(self) -> None:
        """Finish what was submitted, and free the model. May be called twice."""
        self._worker.close()
        if self._weights is not None:
            self._weights.close()

    def _draw(self, message: Message) -> Reply:
        snapshot = self._snapshots[int(message.fields["snapshot"])]
        request = request_of(message, snapshot, self._policy.base.tokenizer)
        number, reply = int(message.fields["request"]), concurrent.futures.Future[Message]()
        self._requests[number] = request

        def done(future: concurrent.futures.Future[Any]) -> None:
            self._requests.pop(number, None)
            error = future.exception()
            if error is None:
                reply.set_result(answer_of(request))
            else:
                reply.set_exception(error)

        request.future.add_done_callback(done)
        self._policy.scheduler.submit(request)
        return reply

    def _share(self, message: Message) -> Message:
        self._replicas.share(optimizer=bool(message.fields["optimizer"]))
        return self._with_checksum()

    def _run_share(self, message: Message) -> Generator[None, None, Message]:
        fields = message.fields
        data, names, loss = unpacked_data(fields, message.arrays), tuple(fields["names"]), None
        if fields["loss"] is not None:
            loss = RemoteLoss(self._peer, self._number, self._rank, len(data), *fields["loss"])
        self._earlier = [p.grad for p in self._trainer.parameters.values()]
        outputs, _ = yield from self._trainer.run(data, loss, names, backward=bool(fields["backward"]))
        return Message("", {}, [torch.cat(outputs[name]).numpy() for name in ("logprobs", *names)])

    def _step_together(self, message: Message) -> Message:
        self._replicas.step(Adam(**message.fields["adam"]))
        return self._with_checksum()

    def _clear(self, message: Message) -> Message:
        del message
        self._trainer.clear()
        return Message("")

    def _take_back(self, message: Message) -> Message:
        """Restore the gradient from before the last call; a call that failed has not changed it."""
        del message
        for p, gradient in zip(self._trainer.parameters.values(), self._earlier, strict=True):
            p.grad = gradient
        return Message("")

    def _update(self, message: Message) -> Message:
        snapshot, newer = (self._snapshots[int(message.fields[name])] for name in ("snapshot", "newer"))
        self._policy.scheduler.update(snapshot, newer, recompute=bool(message.fields["recompute"]))
        return Message("")

    def _with_checksum(self) -> Message:
        return Message("", {"checksum": self._replicas.checksum})


def serve_torchrun(start: float) -> NoReturn:
    """Serve in a process that torchrun started, where the others come in ``start`` seconds; then leave the program."""
    store, rank, size = torchrun_store(start)
    Server(Replica, store, rank, size, None, lambda: os._exit(1), loopback=on_one_node()).run()
    raise SystemExit(0)


def main() -> None:
    """Serve in a process that rank 0 started."""
    settings = json.loads(sys.stdin.read())
    store: dist.Store
    if "folder" in settings:
        store = open_file_store(settings["folder"], settings["start"])
    else:  # Ray's placement
        timeout = timedelta(seconds=settings["start"])
        store = dist.TCPStore(settings["host"], int(settings["port"]), is_master=False, timeout=timeout)
    rank, size, loopback = int(settings["rank"]), int(settings["size"]), settings.get("host") in (None, "127.0.0.1")
    Server(Replica, store, rank, size, settings["address"], lambda: os._exit(1), loopback=loopback).run()
    sys.stdout.flush()
    os._exit(0)  # threads of libraries that were loaded would be waited for


if __name__ == "__main__":
    main()
