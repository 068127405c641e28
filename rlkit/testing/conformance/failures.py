"""A failed training call changes nothing, and what was queued behind it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rlkit
from rlkit.backends.protocol import TrainerBackend
from rlkit.testing.conformance.harness import Harness, worst

STEP = rlkit.Adam(learning_rate=0.02)


class Boom(Exception):
    """A mistake in a user's loss."""


def raises_from_call(number: int) -> Callable[..., object]:
    """Make a loss that raises when it is called for the ``number``-th time."""
    calls = 0

    def loss(logprobs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise Boom("a mistake in the loss")
        return -logprobs.sum()

    return loss


class FailureTests(Harness):
    """Nothing half done, nothing applied behind a failure."""

    def test_mistake_raises_in_the_call(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A loss that raises at once raises the user's own exception from the call, and nothing is disturbed."""
        one, two = fresh(), fresh()
        data = self.data(one)
        one.forward_backward(data, "ppo")
        with pytest.raises(Boom):
            one.forward_backward(data, raises_from_call(1))
        two.forward_backward(data, "ppo")
        assert worst(self.after(one, data), self.after(two, data)) < 1e-6

    def test_a_loss_that_is_not_finite_names_the_datum(self, policy: TrainerBackend) -> None:
        """By its place in the list, also behind one that is not trained on."""

        def rooted(logprobs: Any, advantages: Any) -> Any:
            return -(logprobs * advantages**0.5).sum()

        silent = rlkit.Datum([5, 6, 7], [0, 0, 0], {"advantages": 1.0})
        data = [silent, *(rlkit.Datum([5, 6, k], [0, 1, 1], {"advantages": 12.0 - k}) for k in range(8, 14))]
        assert float(data[-1].inputs["advantages"]) < 0.0
        with pytest.raises(rlkit.BackendError, match=rf"'rooted' has a non-finite gradient at data\[{len(data) - 1}\]"):
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
        queued: list[rlkit.Future[Any]] = [
            policy.optim_step(STEP),
            policy.forward_backward(data, "ppo"),
            policy.optim_step(STEP),
            policy.sampler(),
            policy.forward(data),
        ]
        for future in queued:
            with pytest.raises(rlkit.TrainerFailed, match="a mistake in the loss") as caught:
                future.result()
            assert isinstance(caught.value.__cause__, Boom)
        with pytest.raises(Boom):
            failed.result()
        if self.recovers:
            assert worst(before, self.logprobs(policy, data)) == 0.0
            policy.forward_backward(data, "ppo")
            policy.optim_step(STEP).result()
            assert worst(before, self.logprobs(policy, data)) > 0.0

    def test_unread_failure_refuses(self, policy: TrainerBackend) -> None:
        """A failure that nobody read refuses later calls too, until one of its errors is read."""
        data = self.data(policy)
        policy.forward_backward(data, raises_from_call(4))
        later = policy.forward_backward(data, "ppo")
        with pytest.raises(rlkit.TrainerFailed):
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
        with pytest.raises(rlkit.BackendError, match="accumulated"):
            policy.optim_step(STEP)
        before = self.logprobs(policy, data)
        policy.forward_backward([d.with_inputs(advantages=0.0) for d in data], "ppo")
        policy.optim_step(STEP).result()
        assert worst(before, self.logprobs(policy, data)) == 0.0

    def test_non_finite_loss_is_refused(self, policy: TrainerBackend) -> None:
        """A loss that is NaN or infinite on real logprobs fails its call, and the policy stays as it was."""
        data = self.data(policy)
        before = self.logprobs(policy, data)
        for bad in (float("nan"), float("inf")):
            with pytest.raises(rlkit.BackendError):
                policy.forward_backward(data, lambda logprobs, bad=bad: (logprobs * bad).sum()).result()
        if self.recovers:
            assert worst(before, self.logprobs(policy, data)) == 0.0

    def test_overflowing_norm_refuses_the_step(self, policy: TrainerBackend) -> None:
        """A finite gradient whose norm overflows float32 would ruin Adam's moments: the step is refused."""
        data = self.data(policy)
        before = self.logprobs(policy, data)
        policy.forward_backward(data, lambda logprobs: logprobs.sum() * 1e30)
        with pytest.raises(rlkit.BackendError, match="norm"):
            policy.optim_step(STEP).result()
        if self.recovers:
            policy.discard()
            assert worst(before, self.logprobs(policy, data)) == 0.0
            policy.forward_backward(data, "ppo")
            policy.optim_step(STEP).result()
            assert 0.0 < worst(before, self.logprobs(policy, data)) < 10.0

    def test_detached_loss_is_a_mistake(self, policy: TrainerBackend) -> None:
        """A loss that does not depend on the logprobs, or is no scalar, raises in the call and says so."""
        data = self.data(policy)
        with pytest.raises(rlkit.ConfigError, match="detached"):
            policy.forward_backward(data, lambda logprobs: logprobs.detach().sum())
        with pytest.raises(rlkit.ConfigError, match="scalar"):
            policy.forward_backward(data, lambda logprobs: logprobs)
        with pytest.raises(rlkit.ConfigError, match="scalar"):
            policy.forward_backward(data, lambda logprobs: float(logprobs.detach().sum()))
