"""``Ranks``: a local backend's training and sampling, carried out by all ranks. Rank 0's side."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np
import torch
import torch.distributed as dist

from rlkit.backends.local.distributed._world import leave_world, share_world
from rlkit.backends.local.distributed.losses import AskedLoss, Losses, gradient_message, question
from rlkit.backends.local.distributed.sampling import Request, SpreadSampling
from rlkit.backends.local.distributed.server import SLACK
from rlkit.backends.local.distributed.sharding import ShardedWeights
from rlkit.backends.local.distributed.wire import Message, RemoteError, Reply, packed_data
from rlkit.backends.local.sampling.sampler import Snapshot, Updated
from rlkit.backends.local.training.micro_batches import Costs, cut_units, tree_costs
from rlkit.backends.local.training.trainer import LocalTrainer, Outputs
from rlkit.backends.trainer import Worker
from rlkit.errors import BackendError, ConfigError, RankLost
from rlkit.types import Adam, Datum

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.settings import Processes
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["Ranks", "Replicas", "shares_of"]


def shares_of(data: Sequence[Datum], ranks: int, *, pairs: bool, share: int) -> list[list[int]]:
    """Return the indices of each rank's datums, so that the rank that computes the most tokens computes the fewest.

    In sorted order, in which those that begin alike are adjacent, each rank gets a stretch. A prompt that several
    datums have in common counts once for a rank, so that a group is only cut where that pays for computing it twice.

    Args:
        data: the datums; those without a masked-in token, of which nothing is computed, are rank 0's.
        ranks: how many there are.
        pairs: datums 2k and 2k + 1 stay together.
        share: blocks in which what datums begin with is computed once, 0 for not at all.

    >>> data = [Datum([1, 2, 3, k], [0, 0, 0, 1]) for k in (5, 6)] + [Datum([4, 5, 6, 7, 8], [0, 0, 0, 0, 1])]
    >>> shares_of(data, 2, pairs=False, share=1)
    [[0, 1], [2]]
    """
    units, read = cut_units(data, pairs=pairs)
    scored = {unit: [read[i] for i in unit if i in read] for unit in units}
    chosen = sorted((unit for unit in units if scored[unit]), key=lambda unit: scored[unit][0].tobytes())
    firsts = np.cumsum([0, *(len(scored[unit]) for unit in chosen)])
    flat = [tokens for unit in chosen for tokens in scored[unit]]
    costs = tree_costs(flat, firsts, share) if share else _sums(flat, firsts)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for rank, stretch in enumerate(_stretches(len(chosen), costs, ranks)):
        shares[rank] = sorted(itertools.chain(*chosen[stretch]))
    shares[0] = sorted(itertools.chain(shares[0], *(unit for unit in units if not scored[unit])))
    return shares


def _stretches(units: int, costs: Costs, ranks: int) -> list[slice]:
    """Return at most ``ranks`` slices of units whose largest cost is the smallest, found by bisection."""
    if units == 0:
        return []
    most = 1 << 62
    low, high = 1, int(costs(0, most)[units - 1])
    best = [slice(0, units)]
    while low < high:
        middle = (low + high) // 2
        cut = _filled(units, costs, middle, ranks)
        if cut is None:
            low = middle + 1
        else:
            high, best = middle, cut
    return best


def _filled(units: int, costs: Costs, budget: int, ranks: int) -> list[slice] | None:
    """Return slices of at most ``budget`` tokens, or None where those are more than ``ranks``."""
    slices: list[slice] = []
    begin = 0
    while begin < units:
        cost = costs(begin, budget)
        count = int(np.searchsorted(cost, budget, "right"))
        if count == 0 or len(slices) == ranks:
            return None
        slices.append(slice(begin, begin + count))
        begin += count
    return slices


def _sums(members: Sequence[np.ndarray], firsts: np.ndarray) -> Costs:
    before = np.concatenate([[0], np.cumsum([x.size for x in members], dtype=int)])[firsts]

    def costs(unit: int, budget: int) -> np.ndarray:
        del budget
        tokens: np.ndarray = before[unit + 1 :] - before[unit]
        return tokens

    return costs


_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@attrs.frozen(eq=False)
class Replicas:
    """One trainer of several that are the same.

    Attributes:
        trainer: this rank's.
        group: of the ranks.
        device: where what travels lies: a CPU for gloo, this rank's GPU for NCCL.
    """

    trainer: LocalTrainer
    group: dist.ProcessGroup
    device: torch.device

    def step(self, params: Adam) -> Mapping[str, float]:
        """Sum the gradient over ranks, and make one step with it; where that raises, all is as it was."""
        parameters = list(self.trainer.parameters.values())
        own = [p.grad for p in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = _flat(gradients).to(self.device)
        dist.all_reduce(flat, group=self.group)  # adds in an order that the number of ranks alone decides
        for p, summed in zip(parameters, _pieces(flat, gradients), strict=True):
            p.grad = summed
        try:
            return self.trainer.step(params)
        except BaseException:
            for p, gradient in zip(parameters, own, strict=True):
                p.grad = gradient
            raise

    def share(self, *, optimizer: bool) -> None:
        """Send rank 0's adapter, with its optimizer's state, to all; called on every rank."""
        parameters = list(self.trainer.parameters.values())
        targets = [p.data for p in parameters]
        states = self.trainer.optimizer.state
        if optimizer:
            for p in parameters:
                if p not in states:
                    step = torch.zeros((), dtype=torch.float32, device=p.device)
                    states[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "step": step}
            targets += [states[p][name] for p in parameters for name in _MOMENTS]
        flat = _flat(targets).to(self.device)
        dist.broadcast(flat, 0, group=self.group)
        for target, piece in zip(targets, _pieces(flat, targets), strict=True):
            target.copy_(piece)

    @property
    def checksum(self) -> int:
        """Return a number that two adapters have in common only if they are the same, as good as always."""
        bits = [p.detach().view(torch.int32).sum(dtype=torch.int64) for p in self.trainer.parameters.values()]
        return sum(k * int(x) for k, x in enumerate(torch.stack(bits).tolist(), 1)) % 2**63


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.detach().reshape(-1).float() for x in tensors])


def _pieces(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [x.numel() for x in like])
    return [part.view(x.shape).to(x.device) for part, x in zip(parts, like, strict=True)]


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
            what = f"got {settings.count}, but this machine has {torch.cuda.device_count()} GPUs"
            raise ConfigError("processes", what, "at most one per GPU", "or device='cuda:0', which all of them share")
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
        self.weights: ShardedWeights | None = None
        fields = {"backend": self._backend, "options": dict(options), "device": "cuda" if gpus else str(place)}
        try:
            self._opened, self._group, shares = self._world.open(fields)
        except BaseException:
            self.close()
            raise
        if shares is not None:
            self.weights = ShardedWeights(place, *shares, settings.deadline + SLACK)

    @property
    def size(self) -> int:
        """Return the number of ranks, this one included."""
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
        self._sampling = SpreadSampling(self._world, self._backend, here.submit, base)
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
        losses = described = None
        if loss is not None:
            losses = Losses(loss, data, shares, self._computes_losses)
            described = [loss.level, loss.driver, loss.entropy]
        self._losses = losses
        earlier = [p.grad for p in trainer.parameters.values()]
        call = "forward_backward" if backward else "forward"
        fields = {"backend": self._backend, "loss": described, "names": list(names), "backward": backward}
        calls = self._send_shares(data, shares, fields, losses, call)
        kept = ("logprobs", *names)
        outputs: Outputs = {name: [torch.zeros(0)] * len(data) for name in kept}
        try:
            own = [data[i] for i in shares[0]]
            asked = None if losses is None else AskedLoss(losses, len(own))
            computed, _ = yield from trainer.run(own, asked, names, backward=backward)
            yield from _wait_for(calls.values())
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
            _put(outputs, shares[rank], _cut_reply(reply, [data[i] for i in shares[rank]], kept))
        return outputs, [] if losses is None else losses.parts

    def _send_shares(
        self,
        data: Sequence[Datum],
        shares: Sequence[Sequence[int]],
        fields: Mapping[str, object],
        losses: Losses | None,
        call: str,
    ) -> dict[int, Reply]:
        """Ask the other ranks for their shares."""
        calls = {}
        for rank, share in enumerate(shares):
            if rank and share:
                described, arrays = packed_data([data[i] for i in share])
                calls[rank] = self._world.call(rank, "run", {**described, **fields}, arrays)
                if losses is not None:  # which others wait for, and rank 0
                    calls[rank].add_done_callback(partial(_abort, losses, rank, call))
        return calls

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
        """Send this snapshot to all other ranks."""
        self._world.check()
        assert self._sampling is not None  # noqa: S101  # begun
        self._sampling.take(snapshot)

    def update(
        self, snapshot: Snapshot, newer: Snapshot, *, recompute: bool, done: Callable[[], None] | None = None
    ) -> None:
        """Update a live sampler's snapshot to ``newer`` on all ranks, this one last. See ``Scheduler.update``.

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
        if self.weights is not None:
            self.weights.close()
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
        """Ask for a loss to be computed for another rank."""
        losses = self._losses
        if losses is None:
            raise BackendError("rank 0 has no call that computes a loss")
        rank, reply = int(message.fields["rank"]), concurrent.futures.Future[Message]()

        def answer(done: concurrent.futures.Future[LossGradient]) -> None:
            error = done.exception()
            if error is None:
                reply.set_result(gradient_message(done.result()))
            else:
                reply.set_exception(error)

        losses.ask(rank, *question(message)).add_done_callback(answer)
        return reply

    def _tell_all(self, kind: str, **fields: object) -> dict[int, Reply]:
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
            raise self._world.fail(f"a collective operation failed on rank 0: {error}") from error

    def _same(self, replies: Mapping[int, Message]) -> None:
        own = self._whole.checksum
        for rank, reply in replies.items():
            if int(reply.fields["checksum"]) != own:
                raise self._world.fail(f"the adapter of rank {rank} no longer equals that of rank 0")

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
    """Release all ranks that wait for a rank that has stopped asking."""
    error = reply.exception()
    if error is not None:
        losses.abort(_named(error, rank, call))


def _wait_for(replies: Collection[Reply]) -> Iterator[None]:
    while not all(reply.done() for reply in replies):
        concurrent.futures.wait(replies, _LOOK)
        yield


def _cut_reply(reply: Message, data: Sequence[Datum], names: Sequence[str]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return each output of a rank, cut into a tensor per datum."""
    sizes = [int(datum.mask.sum()) for datum in data]
    flat = [torch.from_numpy(np.asarray(array)) for array in reply.arrays]
    return {name: torch.split(x, sizes) for name, x in zip(names, flat, strict=True)}


def _put(outputs: Outputs, share: Sequence[int], values: Mapping[str, Sequence[torch.Tensor]]) -> None:
    for name, tensors in values.items():
        for i, tensor in zip(share, tensors, strict=True):
            outputs[name][i] = tensor
