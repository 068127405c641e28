"""Calls return at once, take effect in order, and their futures are read in either style."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import rlkit
from rlkit.backends.protocol import TrainerBackend
from rlkit.testing.conformance.harness import Harness, worst

STEP = rlkit.Adam(learning_rate=0.02)


class CallTests(Harness):
    """Order, accumulation, steps, and asynchronous use."""

    def test_order_under_pipelining(self, fresh: Callable[..., TrainerBackend]) -> None:
        """Calls made without reading any result do what they do when each is read first."""
        one, two = fresh(), fresh()
        data = self.data(one)
        for _ in range(3):
            one.forward_backward(data, "ppo").result()
            one.optim_step(STEP).result()
        futures: list[rlkit.Future[Any]] = []
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
            policy.forward_backward(data, "ppo")
            policy.optim_step(STEP)
        between = one.sampler()
        one.forward_backward(data, "ppo")
        one.optim_step(STEP)
        tokens = data[-1].tokens
        expected = two.sampler().result().logprobs(tokens).result()
        assert worst([between.result().logprobs(tokens).result()], [expected]) < 1e-6

    def test_adamw(self, policy: TrainerBackend) -> None:
        """A step with learning rate 0 changes nothing, and momentum moves a policy whose gradient is zero."""
        data = self.data(policy)
        start = self.logprobs(policy, data)
        policy.forward_backward(data, "ppo")
        policy.optim_step(rlkit.Adam(learning_rate=0.0))
        assert worst(start, self.logprobs(policy, data)) == 0.0
        zero = [d.with_inputs(advantages=0.0) for d in data]
        policy.forward_backward(zero, "ppo")
        policy.optim_step(STEP)
        assert worst(start, self.logprobs(policy, data)) > 1e-4

    def test_clipping(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A norm bound scales the gradient down: a tenth of its norm moves a tenth as far."""
        free, bound = fresh(), fresh()
        data = self.data(free)
        start = self.logprobs(free, data)
        free.forward_backward(data, "importance_sampling")
        bound.forward_backward(data, "importance_sampling")
        plain = {"beta1": 0.0, "beta2": 0.0, "eps": 1e8, "learning_rate": 1e4}
        norm = free.optim_step(rlkit.Adam(**plain)).result().get("grad_norm:mean")
        if norm is None:
            pytest.skip("this backend does not report the gradient's norm")
        bound.optim_step(rlkit.Adam(**plain, grad_clip_norm=norm / 10)).result()
        far, near = self.logprobs(free, data), self.logprobs(bound, data)
        tenth = [s + (f - s) / 10 for s, f in zip(start, far, strict=True)]
        assert worst(near, tenth) < 0.05 * worst(start, far)

    def test_step_without_gradient_raises(self, policy: TrainerBackend) -> None:
        """optim_step raises at the call when nothing was accumulated, also right after a step."""
        with pytest.raises(rlkit.BackendError, match="accumulated"):
            policy.optim_step(STEP)
        policy.forward_backward(self.data(policy), "ppo")
        policy.optim_step(STEP)
        with pytest.raises(rlkit.BackendError, match="accumulated"):
            policy.optim_step(STEP)

    def test_forward_has_no_gradient(self, policy: TrainerBackend) -> None:
        """Forward gives logprobs and a loss's value, and accumulates nothing."""
        data = self.data(policy)
        value = policy.forward(data, "ppo").result().metrics["loss:sum"]
        with pytest.raises(rlkit.BackendError, match="accumulated"):
            policy.optim_step(STEP)
        assert value == pytest.approx(policy.forward_backward(data, "ppo").result().metrics["loss:sum"], rel=1e-5)

    def test_await_and_result(self, policy: TrainerBackend) -> None:
        """The same future is awaited, read again, and read with result()."""
        data = self.data(policy)

        async def loop() -> tuple[Any, Any, Any]:
            future = policy.forward_backward(data, "ppo")
            step = policy.optim_step(STEP)
            sampler = await policy.sampler()
            samples = await asyncio.gather(
                *[sampler.sample(data[0].tokens[:2], rlkit.SamplingParams()) for _ in range(3)]
            )
            return await future, await step, (future.result(), samples)

        output, _, (again, samples) = asyncio.run(loop())
        assert output.metrics == again.metrics
        assert len(samples) == 3

    def test_cancelled_awaits_lose_no_call(self, fresh: Callable[..., TrainerBackend]) -> None:
        """Tasks that are cancelled while they wait leave the training as if they had not been."""
        one, two = fresh(), fresh()
        data = self.data(one)

        async def waits(future: Any) -> None:
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
        for _ in range(5):
            two.forward_backward(data, "ppo")
            two.optim_step(STEP)
        assert worst(self.logprobs(one, data), self.logprobs(two, data)) < 1e-6

    def test_timeout_abandons_the_waiting_only(self, policy: TrainerBackend) -> None:
        """result(timeout) raises BackendTimeout, a TimeoutError, and the result can be read later."""
        future = policy.forward_backward(self.data(policy) * 20, "ppo")
        with contextlib.suppress(rlkit.BackendTimeout):  # or it was there already
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
            params = rlkit.SamplingParams(max_tokens=12, stop=())
            expected = sampler.sample([1, 2], params, seed=7).result()[0].tokens.tolist()
            future = sampler.sample([1, 2], params, seed=7)
            if future.cancel():
                with pytest.raises(rlkit.RequestCancelled):
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
        calls: list[Callable[[], Any]] = [
            lambda: policy.forward(data),
            lambda: policy.forward_backward(data, "ppo"),
            policy.sampler,
            lambda: policy.save("x"),
        ]
        for call in calls:
            with pytest.raises(rlkit.BackendError, match="closed"):
                call()
