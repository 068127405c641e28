"""Each conformance test fails on a backend with the fault that it is there to catch."""

from __future__ import annotations

import inspect
from unittest import mock

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.backends import toy
from rlkit.backends.toy import ToyBackend, ToySampler, Weights, log_softmax
from rlkit.backends.trainer import CallQueue, ThreadExecutor
from rlkit.futures import Future
from rlkit.losses import PreparedLoss, with_entropy
from rlkit.testing import BackendConformance
from rlkit.types import OPTIONAL_OPTIONS


class SharesWeights(ToyBackend):
    """Samplers follow the policy: a step writes into the array that they hold."""

    def _step(self, params):
        held = self._weights.value
        metrics = super()._step(params)
        held[...] = self._weights.value
        self._weights.value = held
        return metrics


class IgnoresTemperature(ToyBackend):
    def _predict(self, datum):
        return super()._predict(attrs.evolve(datum, temperature=1.0))


class ShiftsByOne(ToyBackend):
    """Scores token t with what was known one token later."""

    def _predict(self, datum):
        features = self._features.all(datum.tokens)[datum.mask]
        return features, log_softmax(features @ self._weights.value)


class MeansInsteadOfSums(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        before = self._weights.gradient
        out = yield from super()._run(data, loss, want, backward=backward)
        self._weights.gradient = before + (self._weights.gradient - before) / len(data)
        return attrs.evolve(out, metrics={**out.metrics, "loss:sum": out.metrics["loss:sum"] / len(data)})


class ScalesTheGradient(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        before = self._weights.gradient
        out = yield from super()._run(data, loss, want, backward=backward)
        self._weights.gradient = before + 3.0 * (self._weights.gradient - before)
        return out


class ForgetsWeightDecay(ToyBackend):
    def _step(self, params):
        return super()._step(attrs.evolve(params, weight_decay=0.0))


class ScoresNoTarget(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        def pick(logprobs, ids, right=toy.pick):
            return right(logprobs, np.maximum(ids, 0))

        with mock.patch.object(toy, "pick", pick):
            return (yield from super()._run(data, loss, want, backward=backward))


class SeedsAllButTheLast(ToySampler):
    def sample(self, prompt, params, *, n=1, seed=None):
        whole = super().sample(prompt, params, n=n, seed=seed).result()
        return Future.of([*whole[:-1], *super().sample(prompt, params).result()] if n > 2 else whole)


class LosesASeed(ToyBackend):
    def _snapshot(self):
        sampler = super()._snapshot()
        sampler.__class__ = SeedsAllButTheLast
        return sampler


class ForgetsTheEntropy(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        def gradient(*args, right=PreparedLoss.gradient, **kwargs):
            return attrs.evolve(right(*args, **kwargs), entropy=None)

        with mock.patch.object(PreparedLoss, "gradient", gradient):
            return (yield from super()._run(data, loss, want, backward=backward))


class LearnsTheFirstTargetAlone(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        def pass_back(logprobs, ids, by_driver, right=toy.pass_back):
            return right(logprobs, ids[:, :1], by_driver.reshape(ids.shape)[:, :1])

        with mock.patch.object(toy, "pass_back", pass_back):
            return (yield from super()._run(data, loss, want, backward=backward))


class ForgetsTheTemperatureOfTheGradient(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        before = self._weights.gradient
        out = yield from super()._run(data, loss, want, backward=backward)
        self._weights.gradient = before + data[0].temperature * (self._weights.gradient - before)
        return out


class CountsARepeatedContextOnce(ToyBackend):
    """As ``gradient[ids] += x`` does, where an id occurs several times."""

    def _predict(self, datum):
        features, logprobs = super()._predict(datum)
        _, first = np.unique(datum.tokens[np.flatnonzero(datum.mask) - 1], return_index=True)
        once = np.zeros_like(features)
        once[first] = features[first]
        return once, logprobs


class OverwritesTheGradient(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        if backward:
            self._weights.clear()
        return (yield from super()._run(data, loss, want, backward=backward))


class KeepsAFailedGradient(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        if backward:
            half = yield from super()._run(data[:1], rlkit.losses.prepare("cross_entropy"), want, backward=True)
            del half
        return (yield from super()._run(data, loss, want, backward=backward))


class AlwaysCrossEntropy(ToyBackend):
    def _run(self, data, loss, want, *, backward):
        loss = rlkit.losses.prepare("cross_entropy") if loss is not None else None
        return (yield from super()._run(data, loss, want, backward=backward))


class IgnoresSettings(ToyBackend):
    def forward_backward(self, data, loss, *, config=None, want=()):
        return super().forward_backward(data, loss, want=want)


class IgnoresWeights(ToyBackend):
    def forward_backward(self, data, loss, *, config=None, want=()):
        if isinstance(data, list):
            data = [
                d.with_inputs(weights=1.0) if isinstance(d, rlkit.Datum) and "weights" in d.inputs else d for d in data
            ]
        return super().forward_backward(data, loss, config=config, want=want)


class NeverRefuses(ThreadExecutor):
    def start(self, call):
        return super().start(attrs.evolve(call, trains=False))


class StepsBehindAFailure(ToyBackend):
    def __init__(self, **options):
        super().__init__(**options)
        self._queue = CallQueue("toy", NeverRefuses(self._worker))


class StepsOnInfinity(ToyBackend):
    def _step(self, params):
        self._weights.gradient = np.clip(np.nan_to_num(self._weights.gradient), -1e10, 1e10)
        return super()._step(params)


class ForgetsMoments(ToyBackend):
    def __init__(self, **options):
        super().__init__(**options)
        self._weights.first = self._weights.second = np.zeros_like(self._weights.value)


class ForgetsTheSeedStream(ToyBackend):
    def __init__(self, **options):
        super().__init__(**options)
        self._seeds.count = 0


class OneSeedForAll(ToySampler):
    """Every sample of a group is the same one."""

    def sample(self, prompt, params, *, n=1, seed=None):
        one = super().sample(prompt, params, n=1, seed=seed).result()[0]
        return Future.of([one] * n)


class SamplesAlike(ToyBackend):
    def _snapshot(self):
        sampler = super()._snapshot()
        sampler.__class__ = OneSeedForAll
        return sampler


class DrawsElsewhere(ToySampler):
    """Reports other logprobs than those it draws by: top_p without renormalising."""

    def sample(self, prompt, params, *, n=1, seed=None):
        drawn = super().sample(prompt, params, n=n, seed=seed).result()
        whole = [self.logprobs(np.concatenate([s.prompt, s.tokens])).result()[s.prompt.size :] for s in drawn]
        return Future.of([attrs.evolve(s, logprobs=lp) for s, lp in zip(drawn, whole, strict=True)])


class DoesNotRenormalise(ToyBackend):
    def _snapshot(self):
        sampler = super()._snapshot()
        sampler.__class__ = DrawsElsewhere
        return sampler


class ForgetsOptions(ToySampler):
    """Says that it drew by the new options, and did not."""

    def sample(self, prompt, params, *, n=1, seed=None):
        drawn = super().sample(prompt, attrs.evolve(params, **OPTIONAL_OPTIONS), n=n, seed=seed).result()
        return Future.of([attrs.evolve(s, **params.sampling_options) for s in drawn])


class IgnoresOptions(ToyBackend):
    def _snapshot(self):
        sampler = super()._snapshot()
        sampler.__class__ = ForgetsOptions
        return sampler


class ScoresTheNext(ToySampler):
    """Its targets are about the token after the one they stand at."""

    def target_logprobs(self, tokens, targets):
        scores = super().target_logprobs(tokens, np.roll(np.asarray(targets), -1, axis=0)).result()
        return Future.of(np.roll(scores, 1, axis=0))

    def top_logprobs(self, tokens, k):
        ids, logprobs = super().top_logprobs(tokens, k).result()
        return Future.of((np.roll(ids, 1, axis=0), np.roll(logprobs, 1, axis=0)))


class ShiftsScores(ToyBackend):
    def _snapshot(self):
        sampler = super()._snapshot()
        sampler.__class__ = ScoresTheNext
        return sampler


FAULTS = [
    (SharesWeights, "test_snapshots_never_change", {}),
    (SharesWeights, "test_base_is_never_written", {"base": True}),
    (IgnoresTemperature, "test_sampler_and_trainer_agree", {"temperature": 0.7}),
    (ShiftsByOne, "test_sampler_and_trainer_agree", {"temperature": 1.0}),
    (MeansInsteadOfSums, "test_losses_are_sums", {}),
    (MeansInsteadOfSums, "test_two_calls_equal_one", {}),
    (ScalesTheGradient, "test_gradient_is_that_of_the_loss", {"loss": "cross_entropy", "temperature": 1.0}),
    (
        ForgetsTheTemperatureOfTheGradient,
        "test_gradient_is_that_of_the_loss",
        {"loss": "cross_entropy", "temperature": 0.5},
    ),
    (CountsARepeatedContextOnce, "test_gradient_is_that_of_the_loss", {"loss": "cross_entropy", "temperature": 1.0}),
    (
        ForgetsTheEntropy,
        "test_gradient_is_that_of_the_loss",
        {"loss": with_entropy("cross_entropy", 1.0), "temperature": 0.5},
    ),
    (ForgetsWeightDecay, "test_settings_of_adamw_reach_the_step", {}),
    (ScoresNoTarget, "test_targets_of_minus_one_count_nothing", {}),
    (LosesASeed, "test_seeds_repeat", {}),
    (LearnsTheFirstTargetAlone, "test_gradient_is_that_of_the_loss", {"loss": "topk_forward_kl", "temperature": 1.0}),
    (OverwritesTheGradient, "test_two_calls_equal_one", {}),
    (OverwritesTheGradient, "test_failure_keeps_what_was_accumulated", {}),
    (KeepsAFailedGradient, "test_failure_keeps_what_was_accumulated", {}),
    (AlwaysCrossEntropy, "test_name_equals_callable", {"name": "cross_entropy"}),
    (IgnoresSettings, "test_settings_reach_the_loss", {}),
    (IgnoresWeights, "test_weights_multiply_every_term", {"name": "dro"}),
    (StepsBehindAFailure, "test_queued_calls_are_refused", {}),
    (StepsOnInfinity, "test_overflowing_norm_refuses_the_step", {}),
    (ForgetsMoments, "test_resume_is_exact", {}),
    (ForgetsTheSeedStream, "test_resume_is_exact", {}),
    (SamplesAlike, "test_samples_of_a_group_differ", {}),
    (DoesNotRenormalise, "test_truncation_renormalises", {}),
    (IgnoresOptions, "test_min_p_renormalises", {}),
    (IgnoresOptions, "test_penalties_lower_logprobs", {"temperature": 0.0}),
    (IgnoresOptions, "test_penalties_lower_logprobs", {"temperature": 1.0}),
    (ShiftsScores, "test_top_logprobs_are_the_largest", {}),
    (ShiftsScores, "test_targets_of_minus_one_are_none", {}),
    (ShiftsScores, "test_a_teacher_of_the_top_k_is_imitated", {}),
    (DoesNotRenormalise, "test_sampler_and_trainer_agree", {"temperature": 0.5}),
]


@pytest.mark.parametrize(("faulty", "test", "arguments"), FAULTS, ids=[f"{f.__name__}-{t[5:]}" for f, t, _ in FAULTS])
def test_fault_is_found(faulty, test, arguments, tmp_path):
    """The conformance test passes on the sound toy, and fails on the faulty one."""
    if faulty is not IgnoresOptions:  # the toy has no such options; the local backend passes these
        run_with(ToyBackend, test, {k: v for k, v in arguments.items() if k != "base"}, tmp_path / "sound")
    made = faulty
    if arguments.get("base"):

        class WritesBase(faulty):
            def __init__(self, **options):
                super().__init__(**options)
                self._weights = Weights(self._base_weights)

        made = WritesBase
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_with(made, test, {k: v for k, v in arguments.items() if k != "base"}, tmp_path / "faulty")


def run_with(backend, test, arguments, folder):
    """Runs one conformance test by hand on a backend class."""

    class Suite(BackendConformance):
        def make(self, folder, **options):
            return backend(folder=folder, max_length=128, **options)

    made = []

    def fresh(**options):
        made.append(Suite().make(folder, **{"seed": 0, **options}))
        return made[-1]

    available = {"fresh": fresh, "tmp_path": folder, **arguments}
    method = getattr(Suite(), test)
    wanted = inspect.signature(method).parameters
    if {"policy", "twin", "data", "prompt", "sampler", "scorer"} & wanted.keys():
        available |= {"policy": fresh(), "twin": fresh()}
        available |= {"data": Suite().data(made[0]), "prompt": Suite().prompt(made[0])}
        available["sampler"] = available["scorer"] = available["policy"].sampler().result()
    try:
        method(**{name: available[name] for name in wanted})
    finally:
        for policy in made:
            policy.close()
