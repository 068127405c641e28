"""Losses are computed on rank 0, where the user's function is; logprobs come here, their gradients go back.

A rank asks for each of its micro-batches. A loss over the whole batch is computed once all ranks have asked. One thread
computes them all, which receives nothing: a loss may take its time, and a rank that dies meanwhile is noticed.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np
import torch

from rlkit.backends.local.distributed.wire import Message, Peer
from rlkit.backends.trainer import Worker
from rlkit.losses.prepare import Driver, Level, LossGradient
from rlkit.types import Datum

if TYPE_CHECKING:
    from rlkit.losses.prepare import PreparedLoss

__all__ = ["AskedLoss", "Losses", "RemoteLoss", "gradient_message", "question"]

Tensors: TypeAlias = Sequence[torch.Tensor]
Answer: TypeAlias = "concurrent.futures.Future[LossGradient]"


@attrs.define(eq=False)
class _Question:
    rank: int
    places: Sequence[int]
    driver: Tensors
    entropy: Tensors | None
    answer: Answer = attrs.field(factory=concurrent.futures.Future)


class Losses:
    """The loss of one call.

    Args:
        loss: the user's.
        data: all datums, in the user's order.
        shares: which of them each rank has.
        worker: computes it, so that a user's function is not called by two threads at once.

    Attributes:
        error: what it raised, or what broke the call off.
    """

    def __init__(
        self, loss: PreparedLoss, data: Sequence[Datum], shares: Sequence[Sequence[int]], worker: Worker
    ) -> None:
        self.loss = loss
        self._data, self._shares, self._worker = data, shares, worker
        self._parts: list[list[LossGradient]] = [[] for _ in shares]
        self._asked: dict[int, _Question] = {}
        self._unanswered: list[_Question] = []
        self._lock = threading.Lock()  # never held while a loss is computed
        self.error: BaseException | None = None

    @property
    def parts(self) -> list[LossGradient]:
        """Return what was computed, in the order of ranks."""
        return [part for parts in self._parts for part in parts]

    def ask(self, rank: int, places: Sequence[int], driver: Tensors, entropy: Tensors | None) -> Answer:
        """Return the future gradient of datums at ``places`` of a rank's share."""
        question = _Question(rank, places, driver, entropy)
        with self._lock:
            error = self.error
            if error is None:
                self._unanswered.append(question)
        if error is None:
            self._worker.submit(partial(self._compute, question))
        else:
            question.answer.set_exception(error)
        return question.answer

    def abort(self, error: BaseException) -> None:
        """Refuse all unanswered requests, also those being computed, and all later ones."""
        with self._lock:
            if self.error is None:
                self.error = error
            unanswered, self._unanswered = self._unanswered, []
        for question in unanswered:
            question.answer.set_exception(error)

    def _compute(self, question: _Question) -> None:
        if self.error is not None:
            return
        try:
            if self.loss.level != "batch":
                places = [self._shares[question.rank][i] for i in question.places]
                data = [self._data[i] for i in places]
                part = self.loss.gradient(question.driver, data, entropy=question.entropy, places=places)
                self._parts[question.rank].append(part)
                self._answer(question, part)
            else:
                self._asked[question.rank] = question
                if len(self._asked) == sum(1 for share in self._shares if share):
                    self._answer_all()
        except BaseException as error:  # noqa: BLE001  # whoever asked gets it, and ``run`` raises it
            self.abort(error)

    def _answer(self, question: _Question, part: LossGradient) -> None:
        with self._lock:
            if question not in self._unanswered:  # it was refused meanwhile
                return
            self._unanswered.remove(question)
        question.answer.set_result(part)

    def _answer_all(self) -> None:
        """Compute a loss over the whole batch, in the user's order."""
        n = len(self._data)
        driver, entropy = [torch.zeros(0)] * n, [torch.zeros(0)] * n
        where = {rank: [self._shares[rank][i] for i in q.places] for rank, q in self._asked.items()}
        for rank, question in self._asked.items():
            for k, i in enumerate(where[rank]):
                driver[i] = question.driver[k]
                if question.entropy is not None:
                    entropy[i] = question.entropy[k]
        whole = self.loss.gradient(driver, self._data, entropy=entropy if self.loss.entropy else None)
        self._parts[0].append(whole)
        asked, self._asked = self._asked, {}
        for rank, question in asked.items():
            extra = None if whole.entropy is None else [whole.entropy[i] for i in where[rank]]
            self._answer(question, LossGradient(0.0, {}, [whole.driver[i] for i in where[rank]], extra))


@attrs.frozen(eq=False)
class AskedLoss:
    """A loss as a trainer of rank 0 calls it."""

    losses: Losses
    size: int  # of rank 0's share

    @property
    def level(self) -> Level:
        return self.losses.loss.level

    @property
    def driver(self) -> Driver:
        return self.losses.loss.driver

    @property
    def entropy(self) -> bool:
        return self.losses.loss.entropy

    def gradient(
        self,
        logprobs: Tensors,
        data: Sequence[Datum],  # noqa: ARG002  # which rank 0 has
        *,
        entropy: Tensors | None = None,
        places: Sequence[int] | None = None,
    ) -> LossGradient:
        """See ``PreparedLoss.gradient``."""
        return self.losses.ask(0, range(self.size) if places is None else places, logprobs, entropy).result()


@attrs.frozen(eq=False)
class RemoteLoss:
    """A loss as a trainer of another rank calls it: rank 0 is asked."""

    peer: Peer
    backend: int
    rank: int
    size: int  # of this rank's share
    level: Level
    driver: Driver
    entropy: bool

    def gradient(
        self,
        logprobs: Tensors,
        data: Sequence[Datum],  # noqa: ARG002  # which rank 0 has
        *,
        entropy: Tensors | None = None,
        places: Sequence[int] | None = None,
    ) -> LossGradient:
        """See ``PreparedLoss.gradient``; the value stays on rank 0."""
        where = [int(i) for i in (range(self.size) if places is None else places)]
        fields = {"backend": self.backend, "rank": self.rank, "places": where, "entropy": entropy is not None}
        arrays = [x.detach().numpy() for x in (*logprobs, *(entropy or ()))]
        reply = self.peer.call("loss", fields, arrays).result()
        tensors = [torch.from_numpy(np.asarray(array)) for array in reply.arrays]
        n = len(logprobs)
        return LossGradient(0.0, {}, tensors[:n], tensors[n:] if reply.fields["entropy"] else None)


def question(message: Message) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor] | None]:
    """Return places, driver and entropy of what a ``RemoteLoss`` asks."""
    places = [int(i) for i in message.fields["places"]]
    tensors = [torch.from_numpy(np.asarray(array)) for array in message.arrays]
    return places, tensors[: len(places)], tensors[len(places) :] if message.fields["entropy"] else None


def gradient_message(part: LossGradient) -> Message:
    """Return the reply to it."""
    arrays = [x.float().numpy() for x in (*part.driver, *(part.entropy or ()))]
    return Message("", {"entropy": part.entropy is not None}, arrays)
