"""``Ranks``: a local backend's training and sampling, carried out by all ranks. Rank 0's side."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np
import torch

from rlkit.backends.local.distributed.losses import AskedLoss, Losses, gradient_message, question
from rlkit.backends.local.distributed.peer import RemoteError, Reply
from rlkit.backends.local.distributed.rendezvous import SLACK
from rlkit.backends.local.distributed.replicas import Replicas
from rlkit.backends.local.distributed.sampling import Request, SpreadSampling
from rlkit.backends.local.distributed.settings import Processes
from rlkit.backends.local.distributed.sharding import ShardedWeights
from rlkit.backends.local.distributed.split import shares_of
from rlkit.backends.local.distributed.wire import Message, packed_data
from rlkit.backends.local.distributed.world import leave_world, share_world
from rlkit.backends.local.sampling.live import Updated
from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.local.training.trainer import LocalTrainer, Outputs
from rlkit.backends.worker import Worker
from rlkit.errors import BackendError, ConfigError, RankLost
from rlkit.types import Adam, Datum

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["Ranks"]

T = TypeVar("T")

_LOOK = 0.02  # seconds between two looks whether ranks are done, in which samples are decoded here


class Ranks:
    """The ranks of one backend.

    Args:
        settings: how many.
        options: of each rank's ``LocalBackend``, as far as JSON holds them.
        place: rank 0's device.
        named: what the user called it, None where nothing.

    Attributes:
        weights: the base's, where ranks share them out.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or one GPU for ranks that share the weights out.
        BackendError: a rank did not start.
    """

    def __init__(self, settings: Processes, options: Mapping[str, Any], place: torch.device, named: str | None) -> None:
        gpus = place.type == "cuda" and named in (None, "cuda")  # one for each
        if gpus and settings.ray is None and settings.count > torch.cuda.device_count():
            what = f"got {settings.count}, and there are {torch.cuda.device_count()} GPUs"
            raise ConfigError("processes", what, "at most as many", "or device='cuda:0', which all would share")
        if options.get("shard") and place.type != "cpu" and not gpus:
            raise ConfigError("shard", f"got True on {place}", "a GPU for each process, or a CPU")
        self._world = share_world(settings, "cuda" if gpus else "cpu")
        self._backend = self._world.register(self._asked)
        self._losses: Losses | None = None
        self._computes_losses = Worker("losses")
        self._replicas: Replicas | None = None
        self._here: Updated | None = None
        self._sampling: SpreadSampling | None = None
        self._device = place if gpus else torch.device("cpu")
        self._closed = False
        fields = {"backend": self._backend, "options": dict(options), "device": "cuda" if gpus else str(place)}
        try:
            self._opened, self._group, shares = self._world.open(fields)
        except BaseException:
            self.close()
            raise
        self.weights = None if shares is None else ShardedWeights(place, *shares, settings.deadline + SLACK)

    @property
    def size(self) -> int:
        """How many, this one included."""
        return self._world.size

    def begin(self, trainer: LocalTrainer, here: Updated, base: Snapshot, *, optimizer: bool) -> None:
        """Wait until all have the model, and give them rank 0's adapter, with its ``optimizer``'s state.

        Args:
            trainer: rank 0's.
            here: decodes on rank 0.
            base: the snapshot without an adapter.
            optimizer: whether that was restored.
        """
        self._collect(dict(enumerate(self._opened, 1)), "connect")
        self._replicas = replicas = Replicas(trainer, self._group, self._device)
        replies = self._tell_all("share", optimizer=optimizer)
        self._together(lambda: replicas.share(optimizer=optimizer))
        self._same(self._collect(replies, "connect"))
        self._here = here
        self._sampling = SpreadSampling(self._world, self._backend, here.submit)
        self._sampling.base(base)
        self._world.ticks.append(self._sampling.tick)

    def check(self) -> None:
        """Raise RankLost where a rank is gone, or differs from the others."""
        self._world.check()

    # What a ``LocalTrainer`` does, on all ranks.

    def run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, names: Sequence[str], *, backward: bool
    ) -> Generator[None, None, tuple[Outputs, list[LossGradient]]]:
        """See ``LocalTrainer.run``: outputs in the user's order; the gradient is spread over ranks until a step."""
        self._world.check()
        trainer = self._trainer
        pairs = loss is not None and loss.level == "pair"
        shares = shares_of(data, self.size, pairs=pairs, share=trainer.forward.shares)
        losses = None if loss is None else Losses(loss, data, shares, self._computes_losses)
        self._losses = losses
        earlier = [p.grad for p in trainer.parameters.values()]
        call, calls = "forward_backward" if backward else "forward", {}
        for rank, share in enumerate(shares):
            if rank and share:
                fields, arrays = packed_data([data[i] for i in share])
                described = None if loss is None else [loss.level, loss.driver, loss.entropy]
                fields |= {"backend": self._backend, "loss": described, "names": list(names), "backward": backward}
                calls[rank] = self._world.call(rank, "run", fields, arrays)
                if losses is not None:  # which others wait for, and rank 0
                    calls[rank].add_done_callback(partial(_abort, losses, rank, call))
        kept = ("logprobs", *names)
        outputs: Outputs = {name: [torch.zeros(0)] * len(data) for name in kept}
        try:
            own = [data[i] for i in shares[0]]
            asked = None if losses is None else AskedLoss(losses, len(own))
            computed, _ = yield from trainer.run(own, asked, names, backward=backward)
            while not all(reply.done() for reply in calls.values()):
                concurrent.futures.wait(calls.values(), _LOOK)
                yield
            if losses is not None and losses.error is not None:
                raise losses.error
            replies = self._collect(calls, call)
        except BaseException as error:
            self._break_off(calls, losses, earlier, error, backward=backward)
            raise
        finally:
            self._losses = None
        _put(outputs, shares[0], {name: computed[name] for name in kept})
        for rank, reply in replies.items():
            sizes = [int(data[i].mask.sum()) for i in shares[rank]]
            flat = [torch.from_numpy(np.asarray(array)) for array in reply.arrays]
            _put(outputs, shares[rank], {n: torch.split(x, sizes) for n, x in zip(kept, flat, strict=True)})
        return outputs, [] if losses is None else losses.parts

    def step(self, params: Adam) -> Mapping[str, float]:
        """See ``LocalTrainer.step``: the sum of all ranks' gradients, and the same step on each.

        Raises:
            RankLost: ranks are not the same any more.
        """
        self._world.check()
        replies = self._tell_all("step", adam=attrs.asdict(params))
        try:
            metrics = self._together(lambda: self._whole.step(params))
        except BackendError as error:
            self._world.check()
            self._settle(replies)
            if any(reply.exception() is None for reply in replies.values()):
                raise self._world.fail(f"optim_step: only rank 0 raised {error}") from error
            raise  # all ranks found the same
        self._same(self._collect(replies, "optim_step", fatal=True))
        return metrics

    def clear(self) -> None:
        """See ``LocalTrainer.clear``; where a rank is gone, there is nothing to drop but rank 0's."""
        self._trainer.clear()
        with contextlib.suppress(RankLost):
            self._world.check()
            self._collect(self._tell_all("clear"), "discard")

    # What a ``Scheduler`` does.

    def submit(self, request: Request) -> None:
        """Draw or score on the rank that has least to do."""
        assert self._sampling is not None  # noqa: S101  # begun
        self._sampling.submit(request)

    def take(self, snapshot: Snapshot) -> None:
        """Have all ranks take this snapshot, too."""
        self._world.check()
        assert self._sampling is not None  # noqa: S101  # begun
        self._sampling.take(snapshot)

    def update(
        self, snapshot: Snapshot, newer: Snapshot, *, recompute: bool, done: Callable[[], None] | None = None
    ) -> None:
        """Have a live sampler's snapshot become ``newer`` on all ranks, this one last. See ``Scheduler.update``.

        Raises:
            RankLost: also where some ranks have ``newer``, and one raised: they are not the same any more.
        """
        self._world.check()
        assert self._sampling is not None and self._here is not None  # noqa: PT018, S101  # begun
        numbers = {"snapshot": self._sampling.number(snapshot), "newer": self._sampling.number(newer)}
        with self._sampling.holding(snapshot):  # others have it before ``done``, and draw
            replies = self._tell_all("update", **numbers, recompute=recompute)
            try:
                self._collect(replies, "update")
                self._here.update(snapshot, newer, recompute=recompute, done=done)
            except BaseException as error:
                self._world.check()
                if any(reply.exception() is None for reply in replies.values()):
                    raise self._world.fail(f"update: not every rank has the newer policy: {error}") from error
                raise

    def close(self) -> None:
        """Leave the ranks; the last backend ends them. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._world.forget(self._backend)
        if self._sampling is not None:
            self._world.ticks.remove(self._sampling.tick)
        if self._world.broken is None:
            self._settle(self._tell_all("close"))
        leave_world(self._world)
        self._computes_losses.close()

    @property
    def _whole(self) -> Replicas:
        assert self._replicas is not None  # noqa: S101  # begun
        return self._replicas

    @property
    def _trainer(self) -> LocalTrainer:
        return self._whole.trainer

    def _asked(self, message: Message) -> Reply:
        """Have a loss computed for another rank."""
        losses = self._losses
        if losses is None:
            raise BackendError("no call wants a loss")
        rank, reply = int(message.fields["rank"]), concurrent.futures.Future[Message]()

        def answer(done: concurrent.futures.Future[LossGradient]) -> None:
            error = done.exception()
            if error is None:
                reply.set_result(gradient_message(done.result()))
            else:
                reply.set_exception(error)

        losses.ask(rank, *question(message)).add_done_callback(answer)
        return reply

    def _tell_all(self, kind: str, **fields: Any) -> dict[int, Reply]:
        fields = {"backend": self._backend, **fields}
        return {rank: self._world.call(rank, kind, fields) for rank in range(1, self.size)}

    def _settle(self, replies: Mapping[int, Reply]) -> None:
        concurrent.futures.wait(replies.values())  # a rank that is gone or silent settles them, too

    def _collect(self, replies: Mapping[int, Reply], call: str, *, fatal: bool = False) -> dict[int, Message]:
        """Return the replies of ranks, or raise what one of them raised once all are there."""
        self._settle(replies)
        self._world.check()
        for rank, reply in replies.items():
            error = reply.exception()
            if error is not None:
                named = _named(error, rank, call)
                raise self._world.fail(str(named)) if fatal else named
        return {rank: reply.result() for rank, reply in replies.items()}

    def _together(self, work: Callable[[], T]) -> T:
        """Return what ``work`` gives, which all ranks do; where that breaks between them, they are lost."""
        try:
            return work()
        except BackendError:
            raise
        except RuntimeError as error:  # of torch.distributed
            raise self._world.fail(f"what ranks do together failed on rank 0: {error}") from error

    def _same(self, replies: Mapping[int, Message]) -> None:
        own = self._whole.checksum
        for rank, reply in replies.items():
            if int(reply.fields["checksum"]) != own:
                raise self._world.fail(f"the adapter of rank {rank} is not that of rank 0 any more")

    def _break_off(
        self,
        calls: Mapping[int, Reply],
        losses: Losses | None,
        earlier: Sequence[torch.Tensor | None],
        error: BaseException,
        *,
        backward: bool,
    ) -> None:
        """Take back what this call has added, on every rank."""
        if losses is not None:
            losses.abort(error)
        self._settle(calls)
        for p, gradient in zip(self._trainer.parameters.values(), earlier, strict=True):
            p.grad = gradient
        if backward and self._world.broken is None:
            fields = {"backend": self._backend}
            self._settle({rank: self._world.call(rank, "take_back", fields) for rank in calls})


def _named(error: BaseException, rank: int, call: str) -> BaseException:
    """Return what a rank raised as an error of this process."""
    return BackendError(f"{call}: rank {rank} raised {error}") if isinstance(error, RemoteError) else error


def _abort(losses: Losses, rank: int, call: str, reply: Reply) -> None:
    """Let nobody wait for a rank that asks no more."""
    error = reply.exception()
    if error is not None:
        losses.abort(_named(error, rank, call))


def _put(outputs: Outputs, share: Sequence[int], values: Mapping[str, Sequence[torch.Tensor]]) -> None:
    for name, tensors in values.items():
        for i, tensor in zip(share, tensors, strict=True):
            outputs[name][i] = tensor
