"""The queue of calls against a model of what it promises, with both executors; the test gives turns and answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import rlkit
from rlkit import BackendError, RankLost, TrainerFailed
from rlkit.backends.tinker._calls import Calls
from rlkit.backends.trainer import CallQueue, PendingResult, ThreadExecutor
from tests.properties import examples

TRAINS = ("forward_backward", "optim_step")
OUTCOMES = st.runner().flatmap(lambda machine: st.sampled_from(machine.outcomes))


class ByHand:
    """A worker whose next job runs when ``turn`` is called."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.jobs: deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = deque()

    def submit(self, job):
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.jobs.append((job, future))
        return future

    def turn(self):
        job, future = self.jobs.popleft()
        try:
            result = job()
            while isinstance(result, Generator):
                try:
                    next(result)
                except StopIteration as end:
                    result = end.value
            future.set_result(result)
        except BaseException as error:  # as a worker does
            future.set_exception(error)

    def drain(self):
        while self.jobs:
            self.turn()

    close = drain


class Boom(Exception):
    """The error of a job."""


@attrs.define(eq=False)
class Made:
    """A call that was accepted.

    ``outcome``: "works", "raises" in its job, or, once it was sent, is "lost", "late", or its answer is "wrong".
    ``end``: None while it waits, then "value", "error" (its own) or "refused".
    """

    number: int
    kind: str
    generation: int
    outcome: str
    adds: bool = False
    sent: bool = False
    final: bool = False  # refused, because the policy was lost
    end: str | None = None
    future: rlkit.Future[Any] | None = None

    @property
    def trains(self):
        return self.kind in TRAINS


class Machine(RuleBasedStateMachine):
    """Calls, turns and readings in any order.

    The model: the calls that were made, and what stands on the device (``gradient``: the calls whose gradient it holds;
    ``log``: the calls whose job has run). Whether a gradient is pending follows from the calls of the generation.
    """

    outcomes = ("works", "raises")

    def __init__(self):
        super().__init__()
        self.queue = self.make()
        self.made: list[Made] = []
        self.gradient: list[int] = []
        self.log: list[int] = []
        self.generation = 0
        self.gradient_before = False  # whether the generation began with a gradient
        self.closed = False

    def make(self):
        self.worker = ByHand()
        return CallQueue("toy", ThreadExecutor(self.worker))

    @property
    def waiting(self):
        return [call for call in self.made if call.end is None and not call.sent]

    @property
    def final(self):
        return any(call.trains and call.sent and call.end == "error" for call in self.made)

    @property
    def pending(self):
        """Whether a gradient is there once the calls of this generation are carried out."""
        pending = self.gradient_before
        for call in self.made:
            if call.generation == self.generation and call.trains:
                pending = call.adds or (pending and call.kind != "optim_step")
        return pending

    def failed_before(self, call):
        """Whether a training call of the same generation failed before this one, or the policy is lost."""
        return self.final or any(
            other.trains and other.end == "error" and other.generation == call.generation and other.number < call.number
            for other in self.made
        )

    def begin_generation(self, *, gradient):
        self.generation += 1
        self.gradient_before = gradient

    def take_effect(self, call):
        if call.adds:
            self.gradient.append(call.number)
        elif call.kind in ("optim_step", "discard"):
            self.gradient.clear()

    def expect_turn(self):
        """The next waiting call as it ends on its turn."""
        call = self.waiting[0]
        refused = self.failed_before(call)
        call.end = "refused" if refused else "error" if call.outcome == "raises" else "value"
        call.final = refused and self.final
        return call

    def job(self, call):
        def run():
            self.log.append(call.number)
            yield
            if call.outcome == "raises":
                raise Boom(call.number)
            self.take_effect(call)
            return call.number

        return run

    def call(self, kind, outcome, submit, *, adds=False):
        call = Made(len(self.made), kind, self.generation + (kind == "discard"), outcome, adds)
        if self.closed:
            with pytest.raises(BackendError, match="closed"):
                submit(self.job(call))
        elif kind == "optim_step" and not self.pending:
            with pytest.raises(BackendError, match="no gradient is accumulated"):
                submit(self.job(call))
        elif kind == "save" and self.pending and not self.final:
            with pytest.raises(BackendError, match="would be lost"):
                submit(self.job(call))
        else:
            call.future = submit(self.job(call))
            self.made.append(call)

    @rule(outcome=OUTCOMES, adds=st.sampled_from([True, True, False]))
    def forward_backward(self, outcome, adds):
        self.call("forward_backward", outcome, lambda job: self.queue.forward_backward(job, adds=adds), adds=adds)

    @rule(outcome=OUTCOMES)
    def optim_step(self, outcome):
        self.call("optim_step", outcome, self.queue.optim_step)

    @rule(outcome=OUTCOMES)
    def forward(self, outcome):
        self.call("forward", outcome, lambda job: self.queue.enqueue("forward", job))

    @rule(outcome=OUTCOMES)
    def save(self, outcome):
        self.call("save", outcome, self.queue.save)

    @rule()
    def discard(self):
        self.call("discard", "works", self.queue.discard)
        if not self.closed:
            self.begin_generation(gradient=False)

    @precondition(lambda self: self.waiting)
    @rule()
    def turn(self):
        self.expect_turn()
        self.worker.turn()

    @precondition(lambda self: any(call.end is not None for call in self.made))
    @rule(data=st.data())
    def read(self, data):
        """Reading the failure's error, or a refusal for it, in its generation begins the next one."""
        call = data.draw(st.sampled_from([call for call in self.made if call.end is not None]))
        self.check_result(call)
        of_failure = call.end == "refused" or (call.end == "error" and call.trains)
        if of_failure and call.generation == self.generation and not self.final:
            self.begin_generation(gradient=bool(self.gradient))

    def check_result(self, call):
        if call.end == "value":
            assert call.future.result() == call.number
        elif call.end == "refused":
            with pytest.raises(TrainerFailed, match=f"{call.kind}: refused") as caught:
                call.future.result()
            assert caught.value.__cause__ is not None
            assert ("the call was already sent" in str(caught.value)) == call.sent
            assert ("resume_from=" in str(caught.value)) == call.final
        else:
            with pytest.raises((Boom, BackendError)) as caught:
                call.future.result()
            assert not isinstance(caught.value, TrainerFailed)
            assert isinstance(caught.value, BackendError) == call.sent

    def expect_all(self):
        while self.waiting:
            self.expect_turn()

    @precondition(lambda self: len(self.made) > 10)
    @rule()
    def close(self):
        """What was made is finished first."""
        self.expect_all()
        self.queue.close()
        self.closed = True

    @invariant()
    def as_the_model(self):
        """Jobs run in the order of the calls; all that should have run has, and what was refused has not."""
        ran = [call.number for call in self.made if call.sent or call.end in ("value", "error")]
        assert self.log == sorted(self.log) == ran
        assert (self.queue.generation, self.queue.closed) == (self.generation, self.closed)
        assert (self.queue.pending, self.queue.accumulated) == (self.pending, bool(self.gradient))
        for call in self.made:
            assert call.future.done() == (call.end is not None), call

    @invariant()
    def failures_keep_what_was_accumulated(self):
        """A call that failed or was refused neither adds to the gradient nor clears it."""
        gradient = []
        for call in self.made:
            worked = call.sent or call.end == "value"
            if worked and call.adds:
                gradient.append(call.number)
            elif worked and call.kind in ("optim_step", "discard"):
                gradient.clear()
        assert self.gradient == gradient


class Holder:
    """The SDK's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run_coroutine_threadsafe(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


class ServiceMachine(Machine):
    """The same with a service: calls are sent at once, when they take effect, and what fails after that is final."""

    outcomes = ("works", "works", "works", "raises", "lost", "late", "wrong")

    def make(self):
        self.holder = Holder()
        self.answers: dict[int, concurrent.futures.Future[int]] = {}
        return CallQueue("tinker", Calls(self.holder, seconds=60.0))

    def teardown(self):
        self.expect_all()
        self.holder.close()

    def job(self, call):
        def send():
            self.log.append(call.number)
            if call.outcome == "raises":
                raise Boom(call.number)
            self.take_effect(call)
            self.answers[call.number] = part = concurrent.futures.Future()
            return PendingResult([part], finish)

        def finish(results):
            if call.outcome == "wrong":
                raise ValueError("not what was asked for")
            return results[0]

        return send

    def call(self, kind, outcome, submit, *, adds=False):
        super().call(kind, outcome, submit, adds=adds)
        while self.waiting:
            self.expect_turn()

    def expect_turn(self):
        call = super().expect_turn()
        if call.end == "value":
            call.end, call.sent = None, True
        return call

    @property
    def unanswered(self):
        return [call for call in self.made if call.sent and call.end is None]

    @precondition(lambda self: self.unanswered)
    @rule()
    def take(self):
        """The service answers the oldest call. A failure that is final refuses all that were sent after it."""
        call, *later = self.unanswered
        call.end = "value" if call.outcome == "works" else "error"
        errors = {"lost": ConnectionError("the answer was lost"), "late": TimeoutError()}
        if call.outcome in errors:
            self.answers[call.number].set_exception(errors[call.outcome])
        else:
            self.answers[call.number].set_result(call.number)
        if self.final:
            for other in later:
                other.end, other.final = "refused", True
        ended = [each for each in self.made if each.end is not None]
        concurrent.futures.wait([each.future._inner for each in ended], 60)
        assert all(self.answers[each.number].cancelled() for each in later if each.final)

    @rule()
    def discard(self):
        """It cannot take back what is on the service."""
        if self.closed:
            with pytest.raises(BackendError, match="closed"):
                self.queue.discard(None)
            return
        try:
            self.queue.discard(None).result()
        except TrainerFailed:
            assert self.final
        except BackendError:
            assert self.gradient
            assert not self.final
        else:
            assert not self.gradient
            assert not self.final
            self.begin_generation(gradient=False)

    def expect_all(self):
        while self.unanswered:
            self.take()


TestQueueHere = Machine.TestCase
TestQueueOfAService = ServiceMachine.TestCase
TestQueueHere.settings = TestQueueOfAService.settings = examples(150, stateful_step_count=40)


def test_an_old_error_ends_no_new_failure():
    """Of two failures, reading what the first one refused leaves the second as it is."""
    worker = ByHand()
    queue = CallQueue("toy", ThreadExecutor(worker))

    def fails():
        raise Boom

    first = [queue.forward_backward(fails, adds=True) for _ in range(2)]
    worker.drain()
    with pytest.raises(Boom):
        first[0].result()
    second = queue.forward_backward(fails, adds=True)
    worker.drain()
    with pytest.raises(TrainerFailed):
        first[1].result()
    refused = queue.forward_backward(lambda: 3, adds=True)
    worker.drain()
    with pytest.raises(TrainerFailed):
        refused.result()
    with pytest.raises(Boom):
        second.result()
    accepted = queue.forward_backward(lambda: 3, adds=True)
    worker.drain()
    assert accepted.result() == 3


def test_calls_behind_a_lost_rank_are_refused_with_the_same_error():
    """Whoever catches ``RankLost`` need not read the call that met it; once one is read, calls are carried out."""
    executor = ByHand()
    queue = CallQueue("local", ThreadExecutor(executor))

    def loses():
        raise RankLost("rank 1 is gone")

    first = queue.forward_backward(loses, adds=True)
    refused = [queue.optim_step(dict), queue.enqueue("sampler", dict)]
    executor.drain()
    for future in refused:
        with pytest.raises(RankLost, match="refused, because the earlier forward_backward failed: rank 1") as caught:
            future.result()
        assert not isinstance(caught.value, TrainerFailed)
        assert isinstance(caught.value.__cause__, RankLost)
    with pytest.raises(RankLost):
        first.result()
    later = queue.enqueue("sampler", dict)
    executor.drain()
    assert later.result() == {}
