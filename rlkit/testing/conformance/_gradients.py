"""Gradients are sums over datums and the policy's own tokens, and depend on no other data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from rlkit import losses
from rlkit.backends.protocol import PromptLogprobs, TargetLogprobs, TopK, TrainerBackend
from rlkit.errors import BackendError, ConfigError, DataError, UnsupportedError
from rlkit.testing.conformance._harness import STEP, Harness, Unchecked, worst
from rlkit.types import Adam, Datum

if TYPE_CHECKING:
    from torch import Tensor

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def _sum_targets(target_logprobs: Tensor) -> Tensor:
    return target_logprobs.sum()


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

    @pytest.mark.parametrize(
        ("loss", "temperature"),
        [
            ("cross_entropy", 1.0),
            ("cross_entropy", 0.5),
            ("cross_entropy", 0.0),
            ("topk_forward_kl", 1.0),
            (losses.with_entropy("cross_entropy", 1.0), 0.5),
        ],
    )
    def test_gradient_is_that_of_the_loss(
        self, fresh: Callable[..., TrainerBackend], loss: str | Callable[..., object], temperature: float
    ) -> None:
        """A step of size s along the gradient g changes the loss by s |g|^2, as central differences measure it.

        The other tests compare a backend with itself. This one finds a gradient that is scaled, lacks the temperature,
        counts a context that repeats once, or is wrong for several targets of a token, for the entropy, for many datums
        or for long ones.
        """
        if temperature == 0.5 and not self.tempered:
            pytest.skip("it has no logprobs at other temperatures")

        text, count, entropy = "aaaa bbbb " * 5, 18, callable(loss)

        def step(sign: float, size: float) -> tuple[float, float | None]:
            policy = fresh()
            tokens = self.prompt(policy, text)
            datum = Datum(tokens, np.arange(tokens.size) > 0, {"weights": sign}, temperature=temperature)
            if loss == "topk_forward_kl":
                targets = np.stack([np.roll(tokens, 3), np.full(tokens.size, -1), np.roll(tokens, 1), tokens], axis=1)
                teacher = np.tile(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), (tokens.size, 1))
                datum = datum.with_inputs(target_tokens=targets, teacher_logprobs=teacher)
            policy.forward_backward([datum] * count, loss, want=("entropy",) if entropy else ())
            norm = policy.optim_step(Adam(learning_rate=size * 1e8, beta1=0.0, beta2=0.0, eps=1e8)).result()
            there = policy.forward([datum.with_inputs(weights=1.0)] * count, loss).result()
            return there.metrics["loss:sum"], norm.get("grad_norm:mean")

        try:
            _, norm = step(1.0, 0.0)
        except UnsupportedError:
            pytest.skip("it has no entropies")
        if norm is None:
            pytest.skip("its steps report no grad_norm:mean")
        size = 0.05 * count * len(text) / norm**2  # the loss falls by a percent or so
        assert (step(-1.0, size)[0] - step(1.0, size)[0]) / (2 * size) == pytest.approx(norm**2, rel=0.03)

    def test_targets_of_minus_one_count_nothing(self, policy: TrainerBackend) -> None:
        """Their logprob is 0 for the trainer."""
        (datum,) = self.data(policy)[:1]
        targets = np.stack([datum.tokens, np.full(len(datum), -1)], axis=1)
        own, padded = (datum.with_inputs(target_tokens=x) for x in (targets[:, :1], targets))
        values = [policy.forward([x], _sum_targets).result().metrics["loss:sum"] for x in (own, padded)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)
        assert values[0] == pytest.approx(float(self.logprobs(policy, [datum])[0].sum()), rel=1e-4)

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
        one, two = fresh(), fresh()
        data = self.data(one)
        a = one.forward_backward(data, name).result()
        b = two.forward_backward(data, losses.registry[name]).result()
        assert a.metrics["loss:sum"] == pytest.approx(b.metrics["loss:sum"], rel=1e-4)
        after = self.after(one, data)
        assert worst(after, self.after(two, data)) < 1e-5
        other = fresh()
        other.forward_backward(data, "dro" if name == "cross_entropy" else "cross_entropy")
        assert worst(after, self.after(other, data)) > 1e-3

    def test_settings_reach_the_loss(self, fresh: Callable[..., TrainerBackend]) -> None:
        """``config`` sets the bounds of a named loss and of a function alike."""
        one, two, plain = fresh(), fresh(), fresh()
        data = self.data(one)
        tight = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
        one.forward_backward(data, "ppo", config=tight)
        two.forward_backward(data, losses.ppo, config=tight)
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
            longer.append(Datum(tokens, mask, inputs))
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
        with pytest.raises(BackendError, match="accumulated"):
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

        @losses.loss(level="pair")
        def preferred(logprobs: Sequence[Tensor], weights: Sequence[float] = (1.0, 1.0)) -> Tensor:
            chosen, rejected = logprobs
            return -weights[0] * torch.nn.functional.logsigmoid(chosen.sum() - rejected.sum())

        @losses.loss(level="batch")
        def centred(logprobs: Sequence[Tensor]) -> Tensor:
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
        """A loss's own metrics come back summed or as means over the datums that it was given."""

        def counted(logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
            return -logprobs.sum(), {
                "count:sum": logprobs.numel(),
                "size:mean": logprobs.numel(),
                "size_max": logprobs.numel(),
                "size:min": logprobs.numel(),
                "one": 1.0,
            }

        data = self.data(policy)
        without = [Datum(datum.tokens, np.zeros(len(datum), bool)) for datum in data[:2]]  # not given to the loss
        metrics = policy.forward_backward([*without, *data], counted).result().metrics
        assert metrics["count:sum"] == metrics["tokens:sum"]
        sizes = [int(datum.mask.sum()) for datum in data]
        assert metrics["size:mean"] == pytest.approx(np.mean(sizes))
        assert (metrics["size_max:max"], metrics["size:min"]) == (max(sizes), min(sizes))
        assert metrics["one:mean"] == 1.0


class ScoreTests(Harness):
    """A sampler with ``TopK`` and ``TargetLogprobs`` can teach by the top-k losses."""

    @pytest.fixture
    def scorer(self, sampler: Unchecked) -> Unchecked:
        """Return a sampler that has both protocols."""
        if not (isinstance(sampler, TopK) and isinstance(sampler, TargetLogprobs)):
            pytest.skip("its samplers have neither TopK nor TargetLogprobs")
        return sampler

    def test_top_logprobs_are_the_largest(self, policy: Unchecked, scorer: Unchecked) -> None:
        """Of all logprobs at a place, the best first; those at the text's own tokens are ``logprobs``; row 0 is 0."""
        tokens = self.prompt(policy, "hello")
        everything = np.tile(np.arange(policy.tokenizer.vocab_size), (tokens.size, 1))
        ids, logprobs = scorer.top_logprobs(tokens, 5).result()
        whole = scorer.target_logprobs(tokens, everything).result()
        scored = scorer.logprobs(tokens).result()
        if isinstance(scorer, PromptLogprobs):  # both, of one pass
            self.check_prompt_logprobs(scorer, tokens, scored, logprobs)
        assert (ids.dtype, logprobs.dtype, whole.dtype) == (np.int64, np.float32, np.float32)
        assert ids.shape == logprobs.shape == (tokens.size, 5)
        assert not ids[0].any()
        assert not logprobs[0].any()
        assert not whole[0].any()
        places = np.arange(1, tokens.size)
        assert worst([np.sort(whole[1:])[:, :-6:-1]], [logprobs[1:]]) < self.tolerance
        assert worst([np.take_along_axis(whole[1:], ids[1:], 1)], [logprobs[1:]]) < self.tolerance
        assert worst([whole[places, tokens[1:]]], [scored[1:]]) < self.tolerance
        assert np.exp(whole[1:]).sum(-1) == pytest.approx(1.0, abs=1e-3)

    def check_prompt_logprobs(
        self, scorer: PromptLogprobs, tokens: np.ndarray, scored: np.ndarray, largest: np.ndarray
    ) -> None:
        """Check that one pass gives the logprobs of the tokens, and the largest."""
        both = scorer.prompt_logprobs(tokens, 5).result()
        assert worst(both[:1], [scored]) < self.tolerance
        assert worst(both[2:], [largest]) < self.tolerance
        assert [each.dtype for each in both] == [np.float32, np.int64, np.float32]

    def test_targets_of_minus_one_are_none(self, scorer: Unchecked) -> None:
        """Their logprob is 0, as is that of the first token's targets; one token alone has none at all."""
        scores = scorer.target_logprobs([1, 2, 3], [[5, -1], [-1, 6], [7, 8]]).result()
        assert (scores == 0).tolist() == [[True, True], [True, False], [False, False]]
        assert not scorer.target_logprobs([1], [[5]]).result().any()
        assert not scorer.top_logprobs([1], 2).result()[1].any()

    def test_masked_logprobs_are_those_of_the_whole_text(self, policy: Unchecked, sampler: Unchecked) -> None:
        """Where the mask is true, but for the first token; 0 elsewhere."""
        tokens = self.prompt(policy, "hello there")
        mask = np.arange(tokens.size) % 2 == 0
        whole = sampler.logprobs(tokens).result()
        if not hasattr(sampler, "masked_logprobs"):
            pytest.skip("its samplers have no masked_logprobs")
        masked = sampler.masked_logprobs(tokens, mask).result()
        assert masked.dtype == np.float32
        assert worst([masked], [np.where(mask, whole, 0.0)]) < self.tolerance
        with pytest.raises(DataError, match="mask"):
            sampler.masked_logprobs(tokens, mask[1:])

    def test_bad_targets_are_refused(self, policy: Unchecked, scorer: Unchecked) -> None:
        """At the call, naming the argument."""
        size = policy.tokenizer.vocab_size
        bad: object
        for bad in ([[5.0]] * 3, [[5]], [5, 6, 7], [[-2]] * 3, [[size]] * 3, [[]] * 3):
            with pytest.raises(DataError, match="targets"):
                scorer.target_logprobs([1, 2, 3], bad)
        for k in (0, size + 1, 2.0):
            with pytest.raises(ConfigError, match="k"):
                scorer.top_logprobs([1, 2], k)
            if isinstance(scorer, PromptLogprobs):
                with pytest.raises(ConfigError, match="k"):
                    scorer.prompt_logprobs([1, 2], k)  # type: ignore[arg-type]  # on purpose

    def test_a_teacher_of_the_top_k_is_imitated(self, policy: Unchecked, scorer: Unchecked) -> None:
        """The loss against the policy's own top k is 0, and its gradient vanishes where k is the vocabulary."""
        (sample,) = self.samples(policy)[:1]
        text = np.concatenate([sample.prompt, sample.tokens])
        k = min(policy.tokenizer.vocab_size, 1000)
        ids, logprobs = scorer.top_logprobs(text, k).result()
        datum = sample.datum()
        chosen = {"target_tokens": datum.select(ids), "teacher_logprobs": datum.select(logprobs)}
        output = policy.forward([datum.with_inputs(**chosen)], "topk_forward_kl").result()
        assert output.metrics["loss:sum"] == pytest.approx(0.0, abs=sample.tokens.size * k * self.tolerance / 100)
