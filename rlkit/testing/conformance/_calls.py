"""Calls return at once, take effect in order, and their futures are read in either style."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from rlkit.backends.protocol import TrainerBackend
from rlkit.errors import BackendError, BackendTimeout, ConfigError, DataError, RequestCancelled, TrainerFailed
from rlkit.futures import Future
from rlkit.testing.conformance._harness import STEP, Harness, Unchecked, worst
from rlkit.types import Adam, Datum, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class CallTests(Harness):
    """Order, accumulation, steps, and asynchronous use."""

    def test_order_under_pipelining(self, fresh: Callable[..., TrainerBackend]) -> None:
        """Calls made without reading any result do what they do when each is read first."""
        one, two = fresh(), fresh()
        data = self.data(one)
        for _ in range(3):
            one.forward_backward(data, "ppo").result()
            one.optim_step(STEP).result()
        futures: list[Future[Unchecked]] = []
        for _ in range(3):
            futures += [two.forward_backward(data, "ppo"), two.optim_step(STEP)]
        last = two.forward(data)
        assert worst(last.result().selected, self.logprobs(one, data)) < 1e-6
        assert all(future.done() for future in futures)

    def test_snapshot_is_taken_in_order(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A sampler asked for between two steps is of the policy between them."""
        one, two = fresh(), fresh()
        data = self.data(one)
        for policy in (one, two):
            self.trained(policy, data)
        between = one.sampler()
        self.trained(one, data)
        tokens = data[-1].tokens
        expected = two.sampler().result().logprobs(tokens).result()
        assert worst([between.result().logprobs(tokens).result()], [expected]) < 1e-6

    def test_adamw(self, policy: TrainerBackend) -> None:
        """A step with learning rate 0 changes nothing, and momentum moves a policy whose gradient is zero."""
        data = self.data(policy)
        start = self.logprobs(policy, data)
        self.trained(policy, data, step=Adam(learning_rate=0.0))
        assert worst(start, self.logprobs(policy, data)) == 0.0
        self.trained(policy, [d.with_inputs(advantages=0.0) for d in data])
        assert worst(start, self.logprobs(policy, data)) > 1e-4

    def test_settings_of_adamw_reach_the_step(self, fresh: Callable[..., TrainerBackend]) -> None:
        """Each of them changes what two steps of different gradients lead to."""
        results = []
        for change in ({}, {"beta1": 0.5}, {"beta2": 0.5}, {"eps": 1.0}, {"weight_decay": 5.0}):
            policy = fresh()
            data = self.data(policy)
            self.trained(policy, data, step=attrs.evolve(STEP, **change))
            self.trained(policy, data[:4], step=attrs.evolve(STEP, **change))
            results.append(self.logprobs(policy, data))
        for a, b in itertools.combinations(results, 2):
            assert worst(a, b) > 1e-5

    def test_clipping(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A norm bound scales the gradient down: a tenth of its norm moves a tenth as far."""
        free, bound = fresh(), fresh()
        data = self.data(free)
        start = self.logprobs(free, data)
        free.forward_backward(data, "importance_sampling")
        bound.forward_backward(data, "importance_sampling")
        plain = {"beta1": 0.0, "beta2": 0.0, "eps": 1e8, "learning_rate": 1e4}
        norm = free.optim_step(Adam(**plain)).result().get("grad_norm:mean")
        if norm is None:
            pytest.skip("this backend does not report the gradient's norm")
        bound.optim_step(Adam(**plain, grad_clip_norm=norm / 10)).result()
        far, near = self.logprobs(free, data), self.logprobs(bound, data)
        tenth = [s + (f - s) / 10 for s, f in zip(start, far, strict=True)]
        assert worst(near, tenth) < 0.05 * worst(start, far)

    def test_step_without_gradient_raises(self, policy: TrainerBackend) -> None:
        """optim_step raises at the call when nothing was accumulated, also right after a step."""
        with pytest.raises(BackendError, match="accumulated"):
            policy.optim_step(STEP)
        self.trained(policy, self.data(policy))
        with pytest.raises(BackendError, match="accumulated"):
            policy.optim_step(STEP)

    def test_forward_has_no_gradient(self, policy: TrainerBackend) -> None:
        """Forward gives logprobs and a loss's value, and accumulates nothing."""
        data = self.data(policy)
        value = policy.forward(data, "ppo").result().metrics["loss:sum"]
        with pytest.raises(BackendError, match="accumulated"):
            policy.optim_step(STEP)
        assert value == pytest.approx(policy.forward_backward(data, "ppo").result().metrics["loss:sum"], rel=1e-5)

    def test_await_and_result(self, policy: TrainerBackend) -> None:
        """The same future is awaited, read again, and read with result()."""
        data = self.data(policy)

        async def loop() -> tuple[Unchecked, ...]:
            future = policy.forward_backward(data, "ppo")
            step = policy.optim_step(STEP)
            sampler = await policy.sampler()
            samples = await asyncio.gather(*[sampler.sample(data[0].tokens[:2], SamplingParams()) for _ in range(3)])
            return await future, await step, (future.result(), samples)

        output, _, (again, samples) = asyncio.run(loop())
        assert output.metrics == again.metrics
        assert len(samples) == 3

    def test_cancelled_awaits_lose_no_call(self, fresh: Callable[..., TrainerBackend]) -> None:
        """Tasks that are cancelled while they wait leave the training as if they had not been."""
        one, two = fresh(), fresh()
        data = self.data(one)

        async def waits(future: Future[Unchecked]) -> None:
            await future

        async def loop() -> None:
            for _ in range(5):
                tasks = [asyncio.create_task(waits(one.forward_backward(data, "ppo")))]
                tasks.append(asyncio.create_task(waits(one.optim_step(STEP))))
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(loop())
        self.trained(two, data, 5)
        assert worst(self.logprobs(one, data), self.logprobs(two, data)) < 1e-6

    def test_timeout_abandons_the_waiting_only(self, policy: TrainerBackend) -> None:
        """result(timeout) raises BackendTimeout, a TimeoutError, and the result can be read later."""
        future = policy.forward_backward(self.data(policy) * 20, "ppo")
        with contextlib.suppress(BackendTimeout):  # or it was there already
            future.result(timeout=0.0)
        assert future.result().metrics["datums:sum"] == 180

    def test_only_requests_of_samplers_are_cancelled(self, policy: TrainerBackend) -> None:
        """A training call goes on; a sample is cancelled or comes, and then is the one that was asked for."""
        data = self.data(policy)
        policy.forward_backward(data, "ppo")
        step, snapshot = policy.optim_step(STEP), policy.sampler()
        assert (step.cancel(), snapshot.cancel(), policy.forward(data).cancel()) == (False, False, False)
        assert step.result() is not None
        with policy.sampler().result() as sampler:
            params = SamplingParams(max_tokens=12, stop=())
            expected = sampler.sample([1, 2], params, seed=7).result()[0].tokens.tolist()
            future = sampler.sample([1, 2], params, seed=7)
            if future.cancel():
                with pytest.raises(RequestCancelled):
                    future.result()
            else:
                assert future.result()[0].tokens.tolist() == expected
            assert not future.cancel()
            assert sampler.sample([1, 2], params, seed=7).result()[0].tokens.tolist() == expected

    def test_closed_backend_refuses(self, policy: TrainerBackend) -> None:
        """close() may be called twice; every call after it raises."""
        data = self.data(policy)
        policy.close()
        policy.close()
        calls: list[Callable[[], object]] = [
            lambda: policy.forward(data),
            lambda: policy.forward_backward(data, "ppo"),
            policy.sampler,
            lambda: policy.save("x"),
        ]
        for call in calls:
            with pytest.raises(BackendError, match="closed"):
                call()


class Boom(Exception):
    """A mistake in a user's loss."""


def raises_from_call(number: int) -> Callable[..., object]:
    """Make a loss that raises when it is called for the ``number``-th time."""
    calls = 0

    def loss(logprobs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise Boom("a mistake in the loss")
        return -logprobs.sum()

    return loss


def featured(logprobs: Tensor, features: Tensor) -> Tensor:
    """Return a loss of features of each token."""
    return -(logprobs * features).sum()


ROW, TARGETS = np.full(3, -1.0), np.full((3, 2), 5)
WRONG_INPUTS: list[tuple[str, Unchecked, Unchecked, Unchecked]] = [  # an input, the loss, its value, the other inputs
    ("features", featured, ROW[:, None], {}),
    ("features", featured, np.ones((3, 3)), {}),
    ("advantages", "reinforce", ROW[:, None], {}),
    ("weights", "cross_entropy", ROW[:, None], {}),
    ("weights", "topk_forward_kl", np.ones((3, 2)), {"target_tokens": TARGETS, "teacher_logprobs": -1.0 * TARGETS}),
    ("sampling_logprobs", "importance_sampling", -1.0, {"advantages": ROW}),
    ("sampling_logprobs", "importance_sampling", np.exp(ROW), {"advantages": ROW}),
    ("reference_logprobs", "kto", np.exp(ROW), {"desirable": 1.0}),
    ("desirable", "kto", 7.0, {"reference_logprobs": ROW}),
    ("desirable", "kto", [1, 0, 1], {"reference_logprobs": ROW}),
    ("mu", "mix", 2.0, {"sampling_logprobs": ROW, "advantages": ROW, "expert": 0.0}),
    ("teacher_logprobs", "topk_forward_kl", ROW, {"target_tokens": TARGETS}),
    ("target_tokens", "topk_forward_kl", 1.0 * TARGETS, {"teacher_logprobs": -1.0 * TARGETS}),
    ("target_tokens", "topk_forward_kl", [5, 5, 5], {"teacher_logprobs": ROW}),
]


class FailureTests(Harness):
    """Failures: calls are all or nothing, and later ones are refused."""

    def test_mistake_raises_in_the_call(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A loss that raises at once raises the user's own exception from the call, and nothing is disturbed."""
        one, two = fresh(), fresh()
        data = self.data(one)
        one.forward_backward(data, "ppo")
        with pytest.raises(Boom):
            one.forward_backward(data, raises_from_call(1))
        two.forward_backward(data, "ppo")
        assert worst(self.after(one, data), self.after(two, data)) < 1e-6

    def test_wrong_inputs_raise_in_the_call(self, policy: TrainerBackend) -> None:
        """Shapes that would broadcast, logprobs above 0, ids that are not integers: named, and later calls work."""
        for name, loss, value, others in WRONG_INPUTS:
            with pytest.raises(DataError, match=rf"inputs\['{name}'\]"):
                policy.forward_backward([Datum([5, 6, 7, 8], [0, 1, 1, 1], {**others, name: value})], loss)
        assert policy.forward([Datum([5, 6], [0, 1])]).result().selected[0].size == 1

    def test_a_metric_that_is_not_finite_is_named(self, policy: TrainerBackend) -> None:
        """It would make a step's metrics, and what is drawn from them, NaN."""

        def measured(logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return -logprobs.sum(), {"broken": logprobs.sum() * float("nan")}

        with pytest.raises(BackendError, match=r"metric 'broken.*nan"):
            policy.forward_backward([Datum([5, 6, 7], [0, 1, 1])], measured).result()

    def test_a_loss_that_is_not_finite_names_the_datum(self, policy: TrainerBackend) -> None:
        """By its place in the list, also behind one that is not trained on."""

        def rooted(logprobs: Tensor, advantages: Tensor) -> Tensor:
            return -(logprobs * advantages**0.5).sum()

        silent = Datum([5, 6, 7], [0, 0, 0], {"advantages": 1.0})
        data = [silent, *(Datum([5, 6, k], [0, 1, 1], {"advantages": 12.0 - k}) for k in range(8, 14))]
        assert float(data[-1].inputs["advantages"]) < 0.0
        with pytest.raises(BackendError, match=rf"'rooted' has a non-finite gradient at data\[{len(data) - 1}\]"):
            policy.forward_backward(data, rooted).result()

    def test_failure_keeps_what_was_accumulated(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A call that fails later loses its own gradient whole, and no other."""
        if not self.recovers:
            pytest.skip("this backend does not accept calls after a failure (recovers = False)")
        one, two = fresh(), fresh()
        data = self.data(one)
        one.forward_backward(data, "ppo")
        failed = one.forward_backward(data, raises_from_call(4))
        with pytest.raises(Boom):
            failed.result()
        two.forward_backward(data, "ppo")
        assert worst(self.after(one, data), self.after(two, data)) == 0.0

    def test_queued_calls_are_refused(self, policy: TrainerBackend) -> None:
        """Behind a failure steps, snapshots and gradients are refused with TrainerFailed, caused by it."""
        data = self.data(policy)
        before = self.logprobs(policy, data)
        failed = policy.forward_backward(data, raises_from_call(4))
        queued: list[Future[Unchecked]] = [
            policy.optim_step(STEP),
            policy.forward_backward(data, "ppo"),
            policy.optim_step(STEP),
            policy.sampler(),
            policy.forward(data),
        ]
        for future in queued:
            with pytest.raises(TrainerFailed, match="a mistake in the loss") as caught:
                future.result()
            assert isinstance(caught.value.__cause__, Boom)
        with pytest.raises(Boom):
            failed.result()
        if self.recovers:
            assert worst(before, self.logprobs(policy, data)) == 0.0
            self.trained(policy, data).result()
            assert worst(before, self.logprobs(policy, data)) > 0.0

    def test_unread_failure_refuses(self, policy: TrainerBackend) -> None:
        """A failure that no one read refuses later calls too, until one of its errors is read."""
        data = self.data(policy)
        policy.forward_backward(data, raises_from_call(4))
        later = policy.forward_backward(data, "ppo")
        with pytest.raises(TrainerFailed):
            later.result()
        if self.recovers:
            policy.forward_backward(data, "ppo").result()

    def test_discard(self, policy: TrainerBackend) -> None:
        """discard() drops what is accumulated and has calls accepted again."""
        if not self.recovers:
            pytest.skip("this backend does not accept calls after a failure (recovers = False)")
        data = self.data(policy)
        policy.forward_backward(data, "ppo")
        policy.forward_backward(data, raises_from_call(4))
        policy.discard()
        with pytest.raises(BackendError, match="accumulated"):
            policy.optim_step(STEP)
        before = self.logprobs(policy, data)
        self.trained(policy, [d.with_inputs(advantages=0.0) for d in data]).result()
        assert worst(before, self.logprobs(policy, data)) == 0.0

    def test_non_finite_loss_is_refused(self, policy: TrainerBackend) -> None:
        """A loss that is NaN or infinite on real logprobs fails its call, and the policy stays as it was."""
        data = self.data(policy)
        before = self.logprobs(policy, data)
        for bad in (float("nan"), float("inf")):
            with pytest.raises(BackendError):
                policy.forward_backward(data, lambda logprobs, bad=bad: (logprobs * bad).sum()).result()
        if self.recovers:
            assert worst(before, self.logprobs(policy, data)) == 0.0

    def test_overflowing_norm_refuses_the_step(self, policy: TrainerBackend) -> None:
        """A finite gradient whose norm overflows float32 would ruin Adam's moments: the step is refused."""
        data = self.data(policy)
        before = self.logprobs(policy, data)
        policy.forward_backward(data, lambda logprobs: logprobs.sum() * 1e30)
        with pytest.raises(BackendError, match="norm"):
            policy.optim_step(STEP).result()
        if self.recovers:
            policy.discard()
            assert worst(before, self.logprobs(policy, data)) == 0.0
            self.trained(policy, data).result()
            assert 0.0 < worst(before, self.logprobs(policy, data)) < 10.0

    def test_detached_loss_is_a_mistake(self, policy: TrainerBackend) -> None:
        """A loss that does not depend on the logprobs, or is no scalar, raises in the call and says so."""
        data = self.data(policy)
        with pytest.raises(ConfigError, match="detached"):
            policy.forward_backward(data, lambda logprobs: logprobs.detach().sum())
        with pytest.raises(ConfigError, match="scalar"):
            policy.forward_backward(data, lambda logprobs: logprobs)
        with pytest.raises(ConfigError, match="scalar"):
            policy.forward_backward(data, lambda logprobs: float(logprobs.detach().sum()))
