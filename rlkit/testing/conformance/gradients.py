"""What a gradient is: a sum over datums and tokens of the policy's own, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.backends.protocol import TrainerBackend
from rlkit.testing.conformance.harness import Harness, worst

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
STEP = rlkit.Adam(learning_rate=0.02)


class GradientTests(Harness):
    """Sums, order, masks and weights."""

    def test_losses_are_sums(self, policy: TrainerBackend) -> None:
        """Cross entropy is minus the sum of the logprobs, over all tokens of all datums."""
        data = self.data(policy)
        output = policy.forward_backward(data, "cross_entropy").result()
        expected = -sum(float(lp.sum()) for lp in self.logprobs(policy, data))
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
        assert output.metrics["tokens:sum"] == sum(d.mask.sum() for d in data)
        assert output.metrics["datums:sum"] == len(data)
        for datum, lp in zip(data, output.logprobs, strict=True):
            assert lp.shape == datum.tokens.shape
            assert not lp[~datum.mask].any()

    def test_two_calls_equal_one(self, fresh: Callable[..., TrainerBackend]) -> None:
        """Gradients of two calls add up to that of one call on all the data."""
        one, two = fresh(), fresh()
        data = self.data(one)
        one.forward_backward(data, "importance_sampling")
        two.forward_backward(data[:4], "importance_sampling")
        two.forward_backward(data[4:], "importance_sampling")
        a, b = self.after(one, data), self.after(two, data)
        assert worst(a, b) < 1e-5
        assert worst(a, self.logprobs(fresh(), data)) > 1e-3

    def test_order_of_the_data_is_of_no_account(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A permutation of the batch, and so other micro-batches, gives the same gradient and aligned outputs."""
        one, two = fresh(), fresh()
        data = self.data(one)
        order = np.random.default_rng(0).permutation(len(data))
        first = one.forward_backward(data, "ppo").result()
        second = two.forward_backward([data[i] for i in order], "ppo").result()
        assert worst([first.logprobs[i] for i in order], second.logprobs) < self.tolerance
        assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-4)
        assert worst(self.after(one, data), self.after(two, data)) < 1e-5

    def test_padding_is_of_no_account(self, policy: TrainerBackend) -> None:
        """A short datum has the same logprobs alone and beside a long one."""
        data = sorted(self.data(policy), key=len)
        assert worst(self.logprobs(policy, data[:1]), self.logprobs(policy, [data[0], data[-1]])[:1]) < self.tolerance

    @pytest.mark.parametrize("name", LOSSES)
    def test_name_equals_callable(self, fresh: Callable[..., TrainerBackend], name: str) -> None:
        """A name and the function behind it give the same value and gradient; another loss does not."""
        import rlkit.losses

        one, two = fresh(), fresh()
        data = self.data(one)
        a = one.forward_backward(data, name).result()
        b = two.forward_backward(data, rlkit.losses.registry[name]).result()
        assert a.metrics["loss:sum"] == pytest.approx(b.metrics["loss:sum"], rel=1e-4)
        after = self.after(one, data)
        assert worst(after, self.after(two, data)) < 1e-5
        other = fresh()
        other.forward_backward(data, "dro" if name == "cross_entropy" else "cross_entropy")
        assert worst(after, self.after(other, data)) > 1e-3

    def test_settings_reach_the_loss(self, fresh: Callable[..., TrainerBackend]) -> None:
        """``config`` sets the bounds of a named loss and of a function alike."""
        import rlkit.losses

        one, two, plain = fresh(), fresh(), fresh()
        data = self.data(one)
        tight = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
        one.forward_backward(data, "ppo", config=tight)
        two.forward_backward(data, rlkit.losses.ppo, config=tight)
        plain.forward_backward(data, "ppo")
        after = self.after(one, data)
        assert worst(after, self.after(two, data)) < 1e-5
        assert worst(after, self.after(plain, data)) > 1e-4

    def test_advantage_has_a_direction(self, policy: TrainerBackend) -> None:
        """A positive advantage makes a sample more probable, a negative one less."""
        samples = self.samples(policy)
        data = [s.datum(a) for s, a in zip(samples, [1.0, -1.0, 0.0] * 3, strict=True)]
        before = [lp.sum() for lp in self.logprobs(policy, data)]
        policy.forward_backward(data, "importance_sampling")
        after = [lp.sum() for lp in self.after(policy, data)]
        change = np.subtract(after, before)
        assert change[0::3].sum() > 0 > change[1::3].sum()

    def test_zero_advantage_is_no_gradient(self, policy: TrainerBackend) -> None:
        """Zero advantages give an exactly zero gradient: a first step changes nothing, to the bit."""
        data = [s.datum(0.0) for s in self.samples(policy)]
        before = self.logprobs(policy, data)
        policy.forward_backward(data, "ppo")
        norm = policy.optim_step(STEP).result().get("grad_norm:mean", 0.0)
        assert norm == 0.0
        assert worst(before, self.logprobs(policy, data)) == 0.0

    def test_masked_tokens_have_no_influence(self, fresh: Callable[..., TrainerBackend]) -> None:
        """Masked-out tokens after the policy's own, and numbers behind the mask, change neither loss nor gradient."""
        one, two = fresh(), fresh()
        data = self.data(one)
        longer = []
        for datum in data:
            tail = np.arange(1, 4)
            inputs = {
                k: np.concatenate([np.where(datum.mask, v, np.nan), tail * np.nan]) for k, v in datum.inputs.items()
            }
            tokens, mask = np.concatenate([datum.tokens, tail]), np.concatenate([datum.mask, np.zeros(3, bool)])
            longer.append(rlkit.Datum(tokens, mask, inputs))
        for loss in ("dro", "ppo", "cispo"):
            a, b = one.forward_backward(data, loss).result(), two.forward_backward(longer, loss).result()
            assert a.metrics["loss:sum"] == pytest.approx(b.metrics["loss:sum"], rel=1e-4)
        assert worst(self.after(one, data), self.after(two, data)) < 1e-5

    def test_datum_without_own_tokens_is_zero(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A fully masked datum adds nothing; a batch of them accumulates nothing at all."""
        one, two = fresh(), fresh()
        data = self.data(one)
        empty = attrs.evolve(data[0], mask=np.zeros_like(data[0].mask))
        assert one.forward_backward([empty], "ppo").result().metrics["loss:sum"] == 0.0
        with pytest.raises(rlkit.BackendError, match="accumulated"):
            one.optim_step(STEP)
        one.forward_backward([empty, *data], "ppo")
        two.forward_backward(data, "ppo")
        assert worst(self.after(one, data), self.after(two, data)) < 1e-5

    @pytest.mark.parametrize("name", LOSSES)
    def test_weights_multiply_every_term(self, fresh: Callable[..., TrainerBackend], name: str) -> None:
        """Weights of a half, one number or one per token, halve value and gradient: two such calls make one."""
        one, two = fresh(), fresh()
        data = self.data(one)
        start = self.logprobs(one, data)
        half = [d.with_inputs(weights=0.5) for d in data]
        halves = [d.with_inputs(weights=np.full(int(d.mask.sum()), 0.5)) for d in data]
        whole = one.forward_backward(data, name).result().metrics["loss:sum"]
        parts = [two.forward_backward(d, name).result().metrics["loss:sum"] for d in (half, halves)]
        assert parts == pytest.approx([whole / 2] * 2, rel=1e-4)
        after = self.after(one, data)
        assert worst(after, start) > 1e-4  # or two gradients of zero would agree
        assert worst(after, self.after(two, data)) < 1e-5

    def test_pairs_and_batches(self, fresh: Callable[..., TrainerBackend]) -> None:
        """Losses over pairs and over the whole batch see their datums together, however the data is split up."""
        import torch

        import rlkit.losses

        @rlkit.losses.loss(level="pair")
        def preferred(logprobs: Any, weights: Any = (1.0, 1.0)) -> Any:
            chosen, rejected = logprobs
            return -weights[0] * torch.nn.functional.logsigmoid(chosen.sum() - rejected.sum())

        @rlkit.losses.loss(level="batch")
        def centred(logprobs: Any) -> Any:
            sums = torch.stack([lp.sum() for lp in logprobs])
            return (sums - sums.mean()).pow(2).sum() / 100

        one, two, three = fresh(), fresh(), fresh()
        data = self.data(one)[:8]
        lps = [lp.astype(np.float64).sum() for lp in self.logprobs(one, data)]
        margins = np.array([lps[k] - lps[k + 1] for k in range(0, 8, 2)])
        value = one.forward_backward(data, preferred).result().metrics["loss:sum"]
        assert value == pytest.approx(np.log1p(np.exp(-margins)).sum(), rel=1e-3)
        two.forward_backward([*data[4:], *data[:4]], preferred)
        assert worst(self.after(one, data), self.after(two, data)) < 1e-5
        value = three.forward_backward(data, centred).result().metrics["loss:sum"]
        assert value == pytest.approx(np.square(lps - np.mean(lps)).sum() / 100, rel=1e-3)

    def test_metrics_of_a_loss_are_combined(self, policy: TrainerBackend) -> None:
        """A loss's own metrics come back summed or as means over the datums."""

        def counted(logprobs: Any) -> Any:
            return -logprobs.sum(), {"count:sum": logprobs.numel(), "size:mean": logprobs.numel(), "one": 1.0}

        metrics = policy.forward_backward(self.data(policy), counted).result().metrics
        assert metrics["count:sum"] == metrics["tokens:sum"]
        assert metrics["size:mean"] == pytest.approx(metrics["tokens:sum"] / metrics["datums:sum"])
        assert metrics["one:mean"] == 1.0
