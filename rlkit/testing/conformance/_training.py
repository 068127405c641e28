"""Gradients and their sums, the order of calls, failures, wrong input, and saved states."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from rlkit import losses
from rlkit.backends.protocol import TrainerBackend
from rlkit.errors import (
    BackendError,
    BackendTimeout,
    CheckpointError,
    ConfigError,
    DataError,
    RequestCancelled,
    TrainerFailed,
    UnknownNameError,
    UnsupportedError,
)
from rlkit.futures import Future
from rlkit.testing.conformance._base import (
    STEP,
    ConformanceBase,
    Data,
    Fresh,
    Unchecked,
    check_refused,
    max_difference,
    require,
)
from rlkit.types import Adam, Datum, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


GRADIENTS: list[tuple[Unchecked, float]] = [("cross_entropy", temperature) for temperature in (1.0, 0.5, 0.0)]
GRADIENTS += [("topk_forward_kl", 1.0), (losses.with_entropy("cross_entropy", 1.0), 0.5)]
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


class GradientTests(ConformanceBase):
    """Sums, order, masks and weights."""

    def test_losses_are_sums(self, policy: TrainerBackend, data: Data) -> None:
        """Cross entropy is minus the sum of the logprobs, over all tokens of all datums."""
        output = policy.forward_backward(data, "cross_entropy").result()
        expected = -sum(float(lp.sum()) for lp in self.logprobs(policy, data))
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
        assert output.metrics["tokens:sum"] == sum(d.mask.sum() for d in data)
        assert output.metrics["datums:sum"] == len(data)
        for datum, lp in zip(data, output.logprobs, strict=True):
            assert lp.shape == datum.tokens.shape
            assert not lp[~datum.mask].any()

    @pytest.mark.parametrize(("loss", "temperature"), GRADIENTS)
    def test_gradient_is_that_of_the_loss(
        self, fresh: Fresh, loss: str | Callable[..., object], temperature: float
    ) -> None:
        """A step of size s along the gradient g changes the loss by s |g|^2, as central differences measure it.

        The other tests compare a backend with itself. This one finds a gradient that is scaled, lacks the temperature,
        counts a context that repeats once, or is wrong for several targets of a token, for the entropy, for many datums
        or for long ones.
        """
        require(not (temperature == 0.5 and not self.tempered), "it has no logprobs at other temperatures")

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

    def test_targets_of_minus_one_count_nothing(self, policy: TrainerBackend, data: Data) -> None:
        """Their logprob is 0 for the trainer."""
        datum = data[0]
        targets = np.stack([datum.tokens, np.full(len(datum), -1)], axis=1)
        own, padded = (datum.with_inputs(target_tokens=x) for x in (targets[:, :1], targets))
        outputs = [policy.forward([x], lambda target_logprobs: target_logprobs.sum()) for x in (own, padded)]
        values = [output.result().metrics["loss:sum"] for output in outputs]
        assert values[0] == pytest.approx(values[1], rel=1e-4)
        assert values[0] == pytest.approx(float(self.logprobs(policy, [datum])[0].sum()), rel=1e-4)

    def test_two_calls_equal_one(self, policy: TrainerBackend, twin: TrainerBackend, data: Data, fresh: Fresh) -> None:
        """Gradients of two calls add up to that of one call on all the data."""
        policy.forward_backward(data, "importance_sampling")
        twin.forward_backward(data[:4], "importance_sampling")
        twin.forward_backward(data[4:], "importance_sampling")
        a, b = self.after(policy, data), self.after(twin, data)
        assert max_difference(a, b) < 1e-5
        assert max_difference(a, self.logprobs(fresh(), data)) > 1e-3

    def test_order_of_the_data_is_of_no_account(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """A permutation of the batch, and so other micro-batches, gives the same gradient and aligned outputs."""
        order = np.random.default_rng(0).permutation(len(data))
        first = policy.forward_backward(data, "ppo").result()
        second = twin.forward_backward([data[i] for i in order], "ppo").result()
        assert max_difference([first.logprobs[i] for i in order], second.logprobs) < self.tolerance
        assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-4)
        assert max_difference(self.after(policy, data), self.after(twin, data)) < 1e-5

    def test_padding_is_of_no_account(self, policy: TrainerBackend) -> None:
        """A short datum has the same logprobs alone and beside a long one."""
        data = sorted(self.data(policy), key=len)
        alone, beside = self.logprobs(policy, data[:1]), self.logprobs(policy, [data[0], data[-1]])
        assert max_difference(alone, beside[:1]) < self.tolerance

    @pytest.mark.parametrize("name", LOSSES)
    def test_name_equals_callable(
        self, policy: TrainerBackend, twin: TrainerBackend, data: Data, fresh: Fresh, name: str
    ) -> None:
        """A name and the function behind it give the same value and gradient; another loss does not."""
        a = policy.forward_backward(data, name).result()
        b = twin.forward_backward(data, losses.registry[name]).result()
        assert a.metrics["loss:sum"] == pytest.approx(b.metrics["loss:sum"], rel=1e-4)
        after = self.after(policy, data)
        assert max_difference(after, self.after(twin, data)) < 1e-5
        other = fresh()
        other.forward_backward(data, "dro" if name == "cross_entropy" else "cross_entropy")
        assert max_difference(after, self.after(other, data)) > 1e-3

    def test_settings_reach_the_loss(
        self, policy: TrainerBackend, twin: TrainerBackend, data: Data, fresh: Fresh
    ) -> None:
        """``config`` sets the bounds of a named loss and of a function alike."""
        plain = fresh()
        tight = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
        policy.forward_backward(data, "ppo", config=tight)
        twin.forward_backward(data, losses.ppo, config=tight)
        plain.forward_backward(data, "ppo")
        after = self.after(policy, data)
        assert max_difference(after, self.after(twin, data)) < 1e-5
        assert max_difference(after, self.after(plain, data)) > 1e-4

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
        assert max_difference(before, self.logprobs(policy, data)) == 0.0

    def test_masked_tokens_have_no_influence(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """Masked-out tokens after the policy's own, and numbers behind the mask, change neither loss nor gradient."""
        longer = []
        for datum in data:
            tail = np.arange(1, 4)
            inputs = {
                k: np.concatenate([np.where(datum.mask, v, np.nan), tail * np.nan]) for k, v in datum.inputs.items()
            }
            tokens, mask = np.concatenate([datum.tokens, tail]), np.concatenate([datum.mask, np.zeros(3, bool)])
            longer.append(Datum(tokens, mask, inputs))
        for loss in ("dro", "ppo", "cispo"):
            a, b = policy.forward_backward(data, loss).result(), twin.forward_backward(longer, loss).result()
            assert a.metrics["loss:sum"] == pytest.approx(b.metrics["loss:sum"], rel=1e-4)
        assert max_difference(self.after(policy, data), self.after(twin, data)) < 1e-5

    def test_datum_without_own_tokens_is_zero(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """A fully masked datum adds nothing; a batch of them accumulates nothing at all."""
        empty = attrs.evolve(data[0], mask=np.zeros_like(data[0].mask))
        assert policy.forward_backward([empty], "ppo").result().metrics["loss:sum"] == 0.0
        check_refused(BackendError, "accumulated", policy.optim_step, STEP)
        policy.forward_backward([empty, *data], "ppo")
        twin.forward_backward(data, "ppo")
        assert max_difference(self.after(policy, data), self.after(twin, data)) < 1e-5

    @pytest.mark.parametrize("name", LOSSES)
    def test_weights_multiply_every_term(
        self, policy: TrainerBackend, twin: TrainerBackend, data: Data, name: str
    ) -> None:
        """Weights of a half, one number or one per token, halve value and gradient: two such calls make one."""
        start = self.logprobs(policy, data)
        half = [d.with_inputs(weights=0.5) for d in data]
        halves = [d.with_inputs(weights=np.full(int(d.mask.sum()), 0.5)) for d in data]
        whole = policy.forward_backward(data, name).result().metrics["loss:sum"]
        parts = [twin.forward_backward(d, name).result().metrics["loss:sum"] for d in (half, halves)]
        assert parts == pytest.approx([whole / 2] * 2, rel=1e-4)
        after = self.after(policy, data)
        assert max_difference(after, start) > 1e-4  # or two gradients of zero would agree
        assert max_difference(after, self.after(twin, data)) < 1e-5

    def test_pairs_and_batches(self, fresh: Fresh) -> None:
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
        assert max_difference(self.after(one, data), self.after(two, data)) < 1e-5
        value = three.forward_backward(data, centred).result().metrics["loss:sum"]
        assert value == pytest.approx(np.square(lps - np.mean(lps)).sum() / 100, rel=1e-3)

    def test_metrics_of_a_loss_are_combined(self, policy: TrainerBackend, data: Data) -> None:
        """A loss's own metrics come back summed or as means over the datums that it was given."""

        def counted(logprobs: Tensor) -> tuple[Tensor, dict[str, float]]:
            size = logprobs.numel()
            return -logprobs.sum(), {
                "count:sum": size,
                "size:mean": size,
                "size_max": size,
                "size:min": size,
                "one": 1.0,
            }

        without = [Datum(datum.tokens, np.zeros(len(datum), bool)) for datum in data[:2]]  # not given to the loss
        metrics = policy.forward_backward([*without, *data], counted).result().metrics
        assert metrics["count:sum"] == metrics["tokens:sum"]
        sizes = [int(datum.mask.sum()) for datum in data]
        assert metrics["size:mean"] == pytest.approx(np.mean(sizes))
        assert (metrics["size_max:max"], metrics["size:min"]) == (max(sizes), min(sizes))
        assert metrics["one:mean"] == 1.0

    def test_entropy_is_exact(self, policy: Unchecked, data: Data) -> None:
        """``want`` gives the distribution's own entropy and sums, and a loss that names entropy its gradient."""
        try:
            output = policy.forward(data, want=("entropy", "sum_p2", "sum_p2_logp")).result()
        except UnsupportedError:
            pytest.skip("this backend has no exact entropies and reports that")
        datum = data[0]
        place = int(np.flatnonzero(datum.mask)[0])
        with policy.sampler().result() as sampler:
            lps = self.following(sampler, datum.tokens[:place])
        of = {name: values[0][place] for name, values in output.outputs.items()}
        assert of["entropy"] == pytest.approx(-(np.exp(lps) * lps).sum(), rel=1e-3)
        assert of["sum_p2"] == pytest.approx(np.exp(2 * lps).sum(), rel=1e-3)
        assert of["sum_p2_logp"] == pytest.approx((np.exp(2 * lps) * lps).sum(), rel=1e-3)
        before = sum(float(h.sum()) for h in output.outputs["entropy"])
        policy.forward_backward(data, lambda logprobs, entropy: -entropy.sum() + 0 * logprobs.sum())
        self.after(policy, data)
        after = sum(float(h.sum()) for h in policy.forward(data, want=("entropy",)).result().outputs["entropy"])
        assert after > before

    def test_bad_training_calls(self, policy: Unchecked, data: Data) -> None:
        """Each names the field and the index, and leaves the policy as it was."""
        size = policy.tokenizer.vocab_size
        before = self.logprobs(policy, data)
        beyond = attrs.evolve(data[1], tokens=np.where(data[1].mask, size, data[1].tokens))
        long = Datum.supervised([1], np.ones(policy.max_length, np.int64))
        lacking = Datum(data[0].tokens, data[0].mask, {"advantages": np.ones(int(data[0].mask.sum()))})
        greedy = attrs.evolve(data[0], temperature=0.0)
        cut = attrs.evolve(data[0], truncated=True)
        weighted, tall = data[0].with_inputs(weights=1.0), data[0].with_inputs(x=np.ones((len(data[0]), 1)))
        run = policy.forward_backward
        for wrong, match in (([], "empty"), (None, "data"), (data[0], "list of Datum"), ("data", "list of Datum")):
            check_refused(DataError, match, run, wrong, "ppo")
        for bad in (None, {"tokens": [1]}):
            check_refused(DataError, r"data\[1\]", run, [data[0], bad], "ppo")
        check_refused(DataError, r"data\[1\].tokens\[\d+\]", run, [data[0], beyond], "ppo")
        check_refused(DataError, r"data\[1\].tokens", run, [data[0], long], "cross_entropy")
        check_refused(DataError, r"data\[1\].*sampling_logprobs", run, [data[0], lacking], "ppo")
        check_refused(DataError, r"data\[0\].*greedily", run, [greedy], "ppo")
        check_refused(DataError, r"data\[0\].*top_p", run, [cut], "ppo")
        check_refused(DataError, "weights", run, [weighted], lambda logprobs: logprobs.sum())
        check_refused(DataError, r"data\[0\].*'x'.*shape", run, [tall], lambda logprobs, x: (logprobs * x).sum())
        check_refused(DataError, "absent", run, data, lambda logprobs, absent: logprobs.sum())
        check_refused(UnknownNameError, "did you mean 'ppo'", run, data, "pppo")
        for loss, match in (
            (None, "loss"),
            (3, "loss"),
            (lambda x: x.sum(), "first parameter"),
            (lambda logprobs, *rest: logprobs.sum(), "rest"),
            (lambda logprobs: (logprobs.sum(), {"loss:sum": 1.0}), "loss:sum"),
            (lambda logprobs: (logprobs.sum(), {1: 1.0}), "metric 1"),
        ):
            check_refused(ConfigError, match, run, data, loss)
        for name, value in (("clip_high", 1.3), ("clip_low_threshold", 1.5), ("clip_low_threshold", float("nan"))):
            check_refused(ConfigError, "clip_(high|low)_threshold", run, data, "ppo", config={name: value})
        check_refused(ConfigError, "config", run, data, "ppo", config=3)
        for want in ("entropy", None):
            check_refused(ConfigError, "want", run, data, "ppo", want=want)
        check_refused(UnsupportedError, "nothing", run, data, "ppo", want=("nothing",))
        check_refused(ConfigError, "config", policy.forward, data, config={"beta": 1})
        check_refused(DataError, "empty", policy.forward, [])
        for step in (None, {"learning_rate": 1e-4}):
            check_refused(ConfigError, "Adam", policy.optim_step, step)
        assert max_difference(before, self.logprobs(policy, data)) == 0.0
        check_refused(BackendError, "accumulated", policy.optim_step, Adam())


class CallTests(ConformanceBase):
    """Order, accumulation, steps, and asynchronous use."""

    def test_order_under_pipelining(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """Calls made without reading any result do what they do when each is read first."""
        for _ in range(3):
            policy.forward_backward(data, "ppo").result()
            policy.optim_step(STEP).result()
        futures: list[Future[Unchecked]] = []
        for _ in range(3):
            futures += [twin.forward_backward(data, "ppo"), twin.optim_step(STEP)]
        last = twin.forward(data)
        assert max_difference(last.result().selected, self.logprobs(policy, data)) < 1e-6
        assert all(future.done() for future in futures)

    def test_snapshot_is_taken_in_order(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """A sampler asked for between two steps is of the policy between them."""
        for each in (policy, twin):
            self.trained(each, data)
        between = policy.sampler()
        self.trained(policy, data)
        tokens = data[-1].tokens
        expected = twin.sampler().result().logprobs(tokens).result()
        assert max_difference([between.result().logprobs(tokens).result()], [expected]) < 1e-6

    def test_adamw(self, policy: TrainerBackend, data: Data) -> None:
        """A step with learning rate 0 changes nothing, and momentum moves a policy whose gradient is zero."""
        start = self.logprobs(policy, data)
        self.trained(policy, data, step=Adam(learning_rate=0.0))
        assert max_difference(start, self.logprobs(policy, data)) == 0.0
        self.trained(policy, [d.with_inputs(advantages=0.0) for d in data])
        assert max_difference(start, self.logprobs(policy, data)) > 1e-4

    def test_settings_of_adamw_reach_the_step(self, fresh: Fresh) -> None:
        """Each of them changes what two steps of different gradients lead to."""
        results = []
        for change in ({}, {"beta1": 0.5}, {"beta2": 0.5}, {"eps": 1.0}, {"weight_decay": 5.0}):
            policy = fresh()
            data = self.data(policy)
            self.trained(policy, data, step=attrs.evolve(STEP, **change))
            self.trained(policy, data[:4], step=attrs.evolve(STEP, **change))
            results.append(self.logprobs(policy, data))
        for a, b in itertools.combinations(results, 2):
            assert max_difference(a, b) > 1e-5

    def test_clipping(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """A norm bound scales the gradient down: a tenth of its norm moves a tenth as far."""
        start = self.logprobs(policy, data)
        policy.forward_backward(data, "importance_sampling")
        twin.forward_backward(data, "importance_sampling")
        plain = {"beta1": 0.0, "beta2": 0.0, "eps": 1e8, "learning_rate": 1e4}
        norm = policy.optim_step(Adam(**plain)).result().get("grad_norm:mean")
        if norm is None:
            pytest.skip("this backend does not report the gradient's norm")
        twin.optim_step(Adam(**plain, grad_clip_norm=norm / 10)).result()
        far, near = self.logprobs(policy, data), self.logprobs(twin, data)
        tenth = [s + (f - s) / 10 for s, f in zip(start, far, strict=True)]
        assert max_difference(near, tenth) < 0.05 * max_difference(start, far)

    def test_step_without_gradient_raises(self, policy: TrainerBackend) -> None:
        """optim_step raises at the call when nothing was accumulated, also right after a step."""
        check_refused(BackendError, "accumulated", policy.optim_step, STEP)
        self.trained(policy, self.data(policy))
        check_refused(BackendError, "accumulated", policy.optim_step, STEP)

    def test_forward_has_no_gradient(self, policy: TrainerBackend, data: Data) -> None:
        """Forward gives logprobs and a loss's value, and accumulates nothing."""
        value = policy.forward(data, "ppo").result().metrics["loss:sum"]
        check_refused(BackendError, "accumulated", policy.optim_step, STEP)
        assert value == pytest.approx(policy.forward_backward(data, "ppo").result().metrics["loss:sum"], rel=1e-5)

    def test_await_and_result(self, policy: TrainerBackend, data: Data) -> None:
        """The same future is awaited, read again, and read with result()."""

        async def loop() -> tuple[Unchecked, ...]:
            future = policy.forward_backward(data, "ppo")
            step = policy.optim_step(STEP)
            sampler = await policy.sampler()
            samples = await asyncio.gather(*[sampler.sample(data[0].tokens[:2], SamplingParams()) for _ in range(3)])
            return await future, await step, (future.result(), samples)

        output, _, (again, samples) = asyncio.run(loop())
        assert output.metrics == again.metrics
        assert len(samples) == 3

    def test_cancelled_awaits_lose_no_call(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """Tasks that are cancelled while they wait leave the training as if they had not been."""

        async def loop() -> None:
            for _ in range(5):
                calls = (policy.forward_backward(data, "ppo"), policy.optim_step(STEP))
                tasks = [asyncio.ensure_future(call) for call in calls]
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(loop())
        self.trained(twin, data, 5)
        assert max_difference(self.logprobs(policy, data), self.logprobs(twin, data)) < 1e-6

    def test_timeout_abandons_the_waiting_only(self, policy: TrainerBackend) -> None:
        """result(timeout) raises BackendTimeout, a TimeoutError, and the result can be read later."""
        future = policy.forward_backward(self.data(policy) * 20, "ppo")
        with contextlib.suppress(BackendTimeout):  # or it was there already
            future.result(timeout=0.0)
        assert future.result().metrics["datums:sum"] == 180

    def test_only_requests_of_samplers_are_cancelled(self, policy: TrainerBackend, data: Data) -> None:
        """A training call goes on; a sample is cancelled or comes, and then is the one that was asked for."""
        policy.forward_backward(data, "ppo")
        step, snapshot = policy.optim_step(STEP), policy.sampler()
        assert (step.cancel(), snapshot.cancel(), policy.forward(data).cancel()) == (False, False, False)
        assert step.result() is not None
        with policy.sampler().result() as sampler:
            params = SamplingParams(max_tokens=12, stop=())
            expected = sampler.sample([1, 2], params, seed=7).result()[0].tokens.tolist()
            future = sampler.sample([1, 2], params, seed=7)
            if future.cancel():
                check_refused(RequestCancelled, None, future.result)
            else:
                assert future.result()[0].tokens.tolist() == expected
            assert not future.cancel()
            assert sampler.sample([1, 2], params, seed=7).result()[0].tokens.tolist() == expected

    def test_closed_backend_refuses(self, policy: TrainerBackend, data: Data) -> None:
        """close() may be called twice; every call after it raises."""
        policy.close()
        policy.close()
        check_refused(BackendError, "closed", policy.forward, data)
        check_refused(BackendError, "closed", policy.forward_backward, data, "ppo")
        check_refused(BackendError, "closed", policy.sampler)
        check_refused(BackendError, "closed", policy.save, "x")


class Boom(Exception):
    """A mistake in a user's loss."""


def raises_from_call(number: int) -> Callable[..., object]:
    """Make a loss that raises when it is called for the ``number``-th time."""
    calls = itertools.count(1)

    def loss(logprobs: Tensor) -> Tensor:
        if next(calls) >= number:
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


class FailureTests(ConformanceBase):
    """Failures: calls are all or nothing, and later ones are refused."""

    def test_mistake_raises_in_the_call(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """A loss that raises at once raises the user's own exception from the call, and nothing is disturbed."""
        policy.forward_backward(data, "ppo")
        check_refused(Boom, None, policy.forward_backward, data, raises_from_call(1))
        twin.forward_backward(data, "ppo")
        assert max_difference(self.after(policy, data), self.after(twin, data)) < 1e-6

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

        data = [Datum([5, 6, 7], [0, 1, 1])]
        check_refused(BackendError, "metric 'broken.*nan", lambda: policy.forward_backward(data, measured).result())

    def test_a_loss_that_is_not_finite_names_the_datum(self, policy: TrainerBackend) -> None:
        """By its place in the list, also behind one that is not trained on."""

        def rooted(logprobs: Tensor, advantages: Tensor) -> Tensor:
            return -(logprobs * advantages**0.5).sum()

        silent = Datum([5, 6, 7], [0, 0, 0], {"advantages": 1.0})
        data = [silent, *(Datum([5, 6, k], [0, 1, 1], {"advantages": 12.0 - k}) for k in range(8, 14))]
        assert float(data[-1].inputs["advantages"]) < 0.0
        match = rf"'rooted' has a non-finite gradient at data\[{len(data) - 1}\]"
        check_refused(BackendError, match, lambda: policy.forward_backward(data, rooted).result())

    def test_failure_keeps_what_was_accumulated(self, policy: TrainerBackend, twin: TrainerBackend, data: Data) -> None:
        """A call that fails later loses its own gradient whole, and no other."""
        require(self.recovers, "this backend does not accept calls after a failure (recovers = False)")
        policy.forward_backward(data, "ppo")
        failed = policy.forward_backward(data, raises_from_call(4))
        check_refused(Boom, None, failed.result)
        twin.forward_backward(data, "ppo")
        assert max_difference(self.after(policy, data), self.after(twin, data)) == 0.0

    def test_queued_calls_are_refused(self, policy: TrainerBackend, data: Data) -> None:
        """Behind a failure steps, snapshots and gradients are refused with TrainerFailed, caused by it."""
        before = self.logprobs(policy, data)
        failed = policy.forward_backward(data, raises_from_call(4))
        queued: list[Future[Unchecked]] = [policy.optim_step(STEP), policy.forward_backward(data, "ppo")]
        queued += [policy.optim_step(STEP), policy.sampler(), policy.forward(data)]
        for future in queued:
            with pytest.raises(TrainerFailed, match="a mistake in the loss") as caught:
                future.result()
            assert isinstance(caught.value.__cause__, Boom)
        check_refused(Boom, None, failed.result)
        if self.recovers:
            assert max_difference(before, self.logprobs(policy, data)) == 0.0
            self.trained(policy, data).result()
            assert max_difference(before, self.logprobs(policy, data)) > 0.0

    def test_unread_failure_refuses(self, policy: TrainerBackend, data: Data) -> None:
        """A failure that no one read refuses later calls too, until one of its errors is read."""
        policy.forward_backward(data, raises_from_call(4))
        later = policy.forward_backward(data, "ppo")
        check_refused(TrainerFailed, None, later.result)
        if self.recovers:
            policy.forward_backward(data, "ppo").result()

    def test_discard(self, policy: TrainerBackend, data: Data) -> None:
        """discard() drops what is accumulated and has calls accepted again."""
        require(self.recovers, "this backend does not accept calls after a failure (recovers = False)")
        policy.forward_backward(data, "ppo")
        policy.forward_backward(data, raises_from_call(4))
        policy.discard()
        check_refused(BackendError, "accumulated", policy.optim_step, STEP)
        before = self.logprobs(policy, data)
        self.trained(policy, [d.with_inputs(advantages=0.0) for d in data]).result()
        assert max_difference(before, self.logprobs(policy, data)) == 0.0

    def test_non_finite_loss_is_refused(self, policy: TrainerBackend, data: Data) -> None:
        """A loss that is NaN or infinite on real logprobs fails its call, and the policy stays as it was."""
        before = self.logprobs(policy, data)
        for bad in (float("nan"), float("inf")):
            with pytest.raises(BackendError):
                policy.forward_backward(data, lambda logprobs, bad=bad: (logprobs * bad).sum()).result()
        if self.recovers:
            assert max_difference(before, self.logprobs(policy, data)) == 0.0

    def test_overflowing_norm_refuses_the_step(self, policy: TrainerBackend, data: Data) -> None:
        """A finite gradient whose norm overflows float32 would ruin Adam's moments: the step is refused."""
        before = self.logprobs(policy, data)
        policy.forward_backward(data, lambda logprobs: logprobs.sum() * 1e30)
        check_refused(BackendError, "norm", lambda: policy.optim_step(STEP).result())
        if self.recovers:
            policy.discard()
            assert max_difference(before, self.logprobs(policy, data)) == 0.0
            self.trained(policy, data).result()
            assert 0.0 < max_difference(before, self.logprobs(policy, data)) < 10.0

    def test_detached_loss_is_a_mistake(self, policy: TrainerBackend, data: Data) -> None:
        """A loss that does not depend on the logprobs, or is no scalar, raises in the call and says so."""
        check_refused(ConfigError, "detached", policy.forward_backward, data, lambda logprobs: logprobs.detach().sum())
        for loss in (lambda logprobs: logprobs, lambda logprobs: float(logprobs.detach().sum())):
            check_refused(ConfigError, "scalar", policy.forward_backward, data, loss)


class SavingTests(ConformanceBase):
    """save, resume_from and init_from."""

    def test_resume_is_exact(self, policy: TrainerBackend, data: Data, fresh: Fresh) -> None:
        """A resumed run goes on as the uninterrupted one does: weights, moments, version and sampling."""
        params = SamplingParams(max_tokens=8, stop=())
        with policy.sampler().result() as sampler:
            sampler.sample([1, 2], params).result()
        self.trained(policy, data, 2)
        path = policy.save("two").result()
        resumed = fresh(seed=None, resume_from=path)
        assert max_difference(self.logprobs(policy, data), self.logprobs(resumed, data)) == 0.0
        for backend in (policy, resumed):
            self.trained(backend, data, 2)
        assert max_difference(self.logprobs(policy, data), self.logprobs(resumed, data)) == 0.0
        a, b = (backend.sampler().result() for backend in (policy, resumed))
        assert a.version == b.version == 4
        drawn = [s.sample([1, 2], params).result()[0].tokens.tolist() for s in (a, b)]
        assert drawn[0] == drawn[1]

    def test_init_takes_weights_only(self, policy: TrainerBackend, data: Data, fresh: Fresh) -> None:
        """init_from starts a fresh optimizer: the weights agree, the next step does not."""
        self.trained(policy, data, 2)
        paths = [policy.save("weights", optimizer=optimizer).result() for optimizer in (True, False)]
        others = [fresh(init_from=path) for path in paths]
        for other in others:
            assert max_difference(self.logprobs(policy, data), self.logprobs(other, data)) == 0.0
            assert other.sampler().result().version == 0
        check_refused(CheckpointError, "optimizer", fresh, resume_from=paths[1])
        self.trained(policy, data, 1)
        self.trained(others[0], data, 1)
        assert max_difference(self.logprobs(policy, data), self.logprobs(others[0], data)) > 1e-5

    def test_paths_are_unique(self, policy: TrainerBackend, data: Data) -> None:
        """Saving twice under one label gives two states."""
        first = policy.save("same").result()
        self.trained(policy, data, 1)
        assert policy.save("same").result() != first

    def test_save_with_gradient_pending_raises(self, policy: TrainerBackend) -> None:
        """An accumulated gradient would be lost, so save raises at the call."""
        policy.forward_backward(self.data(policy), "ppo")
        check_refused(BackendError, "accumulated", policy.save, "x")

    @pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/abs", "a\0b", ".hidden", "x" * 101, None, 3])
    def test_names_are_labels(self, policy: TrainerBackend, tmp_path: Path, name: Unchecked) -> None:
        """A label that could leave the folder is refused, and nothing is written."""
        before = sorted(tmp_path.rglob("*"))
        check_refused(ConfigError, r"save\(name\)", policy.save, name)
        assert sorted(tmp_path.rglob("*")) == before

    def test_missing_path(self, fresh: Fresh, tmp_path: Path) -> None:
        """A path with nothing there is a CheckpointError."""
        check_refused(CheckpointError, None, fresh, resume_from=str(tmp_path / "nothing"))
        check_refused(ConfigError, "both", fresh, resume_from="a", init_from="b")
