"""Bad input raises a typed error at the call, says where, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np
import pytest

from rlkit.backends.protocol import TrainerBackend
from rlkit.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    RlkitError,
    UnknownNameError,
    UnsupportedError,
)
from rlkit.testing.conformance._harness import Harness, Unchecked, worst
from rlkit.types import Adam, Datum, SamplingParams

PARAMS = SamplingParams(max_tokens=2)
Refusals: TypeAlias = list[tuple[Callable[[], object], type[RlkitError], str]]  # call, its error, part of its message


def check_refused(table: Refusals) -> None:
    """Check that each call raises its error."""
    for call, error, match in table:
        with pytest.raises(error, match=match):
            call()


class InputTests(Harness):
    """Typed errors, before any work."""

    def test_bad_training_calls(self, policy: Unchecked) -> None:
        """Each names the field and the index, and leaves the policy as it was."""
        data = self.data(policy)
        size = policy.tokenizer.vocab_size
        before = self.logprobs(policy, data)
        beyond = attrs.evolve(data[1], tokens=np.where(data[1].mask, size, data[1].tokens))
        long = Datum.supervised([1], np.ones(policy.max_length, np.int64))
        lacking = Datum(data[0].tokens, data[0].mask, {"advantages": np.ones(int(data[0].mask.sum()))})
        greedy = attrs.evolve(data[0], temperature=0.0)
        cut = attrs.evolve(data[0], truncated=True)
        weighted, tall = data[0].with_inputs(weights=1.0), data[0].with_inputs(x=np.ones((len(data[0]), 1)))
        run = policy.forward_backward
        table: Refusals = [
            (lambda: run([], "ppo"), DataError, "empty"),
            (lambda: run(None, "ppo"), DataError, "data"),
            (lambda: run(data[0], "ppo"), DataError, "list of Datum"),
            (lambda: run("data", "ppo"), DataError, "list of Datum"),
            (lambda: run([data[0], None], "ppo"), DataError, r"data\[1\]"),
            (lambda: run([data[0], {"tokens": [1]}], "ppo"), DataError, r"data\[1\]"),
            (lambda: run([data[0], beyond], "ppo"), DataError, r"data\[1\].tokens\[\d+\]"),
            (lambda: run([data[0], long], "cross_entropy"), DataError, r"data\[1\].tokens"),
            (lambda: run([data[0], lacking], "ppo"), DataError, r"data\[1\].*sampling_logprobs"),
            (lambda: run([greedy], "ppo"), DataError, r"data\[0\].*greedily"),
            (lambda: run([cut], "ppo"), DataError, r"data\[0\].*top_p"),
            (lambda: run([weighted], lambda logprobs: logprobs.sum()), DataError, "weights"),
            (lambda: run([tall], lambda logprobs, x: (logprobs * x).sum()), DataError, r"data\[0\].*'x'.*shape"),
            (lambda: run(data, "pppo"), UnknownNameError, "did you mean 'ppo'"),
            (lambda: run(data, None), ConfigError, "loss"),
            (lambda: run(data, 3), ConfigError, "loss"),
            (lambda: run(data, lambda x: x.sum()), ConfigError, "first parameter"),
            (lambda: run(data, lambda logprobs, *rest: logprobs.sum()), ConfigError, "rest"),
            (lambda: run(data, lambda logprobs, absent: logprobs.sum()), DataError, "absent"),
            (lambda: run(data, "ppo", config={"clip_high": 1.3}), ConfigError, "clip_high_threshold"),
            (lambda: run(data, "ppo", config={"clip_low_threshold": 1.5}), ConfigError, "clip_low_threshold"),
            (lambda: run(data, "ppo", config={"clip_low_threshold": float("nan")}), ConfigError, "clip_low"),
            (lambda: run(data, "ppo", config=3), ConfigError, "config"),
            (lambda: run(data, "ppo", want="entropy"), ConfigError, "want"),
            (lambda: run(data, "ppo", want=None), ConfigError, "want"),
            (lambda: run(data, lambda logprobs: (logprobs.sum(), {"loss:sum": 1.0})), ConfigError, "loss:sum"),
            (lambda: run(data, lambda logprobs: (logprobs.sum(), {1: 1.0})), ConfigError, "metric 1"),
            (lambda: run(data, "ppo", want=("nothing",)), UnsupportedError, "nothing"),
            (lambda: policy.forward(data, config={"beta": 1}), ConfigError, "config"),
            (lambda: policy.forward([]), DataError, "empty"),
            (lambda: policy.optim_step(None), ConfigError, "Adam"),
            (lambda: policy.optim_step({"learning_rate": 1e-4}), ConfigError, "Adam"),
        ]
        check_refused(table)
        assert worst(before, self.logprobs(policy, data)) == 0.0
        with pytest.raises(BackendError, match="accumulated"):
            policy.optim_step(Adam())

    def test_bad_sampling_calls(self, policy: Unchecked, sampler: Unchecked) -> None:
        """Prompts and settings are checked before anything is sampled."""
        size = policy.tokenizer.vocab_size
        ids = r"sample\(prompt\)"
        table: Refusals = [
            (lambda: sampler.sample("text", PARAMS), DataError, "encode"),
            (lambda: sampler.sample([], PARAMS), DataError, ids),
            (lambda: sampler.sample(None, PARAMS), DataError, ids),
            (lambda: sampler.sample([[1, 2]], PARAMS), DataError, ids),
            (lambda: sampler.sample([1.5], PARAMS), DataError, ids),
            (lambda: sampler.sample([True, False], PARAMS), DataError, ids),
            (lambda: sampler.sample([1, -1], PARAMS), DataError, r"\[1\]"),
            (lambda: sampler.sample([1, 2, size], PARAMS), DataError, r"\[2\]"),
            (lambda: sampler.sample([1] * policy.max_length, PARAMS), DataError, "context"),
            (lambda: sampler.sample([1], None), ConfigError, "SamplingParams"),
            (lambda: sampler.sample([1], {"max_tokens": 1}), ConfigError, "SamplingParams"),
            (lambda: sampler.sample([1], PARAMS, n=0), ConfigError, r"sample\(n\)"),
            (lambda: sampler.sample([1], PARAMS, n=True), ConfigError, r"sample\(n\)"),
            (lambda: sampler.sample([1], PARAMS, n=1.0), ConfigError, r"sample\(n\)"),
            (lambda: sampler.sample([1], PARAMS, seed=-1), ConfigError, r"sample\(seed\)"),
            (lambda: sampler.sample([1], PARAMS, seed="a"), ConfigError, r"sample\(seed\)"),
            (lambda: sampler.sample([1], SamplingParams(stop=(size,))), DataError, "stop"),
            (lambda: sampler.logprobs("text"), DataError, "encode"),
            (lambda: sampler.logprobs([1, size]), DataError, r"\[1\]"),
            (lambda: sampler.logprobs([1] * (policy.max_length + 1)), DataError, "context"),
            (lambda: sampler.logprobs([1, 2], temperature=0.0), ConfigError, "temperature"),
            (lambda: sampler.logprobs([1, 2], temperature=float("nan")), ConfigError, "temperature"),
        ]
        check_refused(table)
        assert len(sampler.sample([1], PARAMS).result()) == 1

    def test_entropy_is_exact(self, policy: Unchecked) -> None:
        """``want`` gives the distribution's own entropy and sums, and a loss that names entropy its gradient."""
        data = self.data(policy)
        try:
            output = policy.forward(data, want=("entropy", "sum_p2", "sum_p2_logp")).result()
        except UnsupportedError:
            pytest.skip("this backend has no exact entropies and reports that")
        datum = data[0]
        place = int(np.flatnonzero(datum.mask)[0])
        with policy.sampler().result() as sampler:
            futures = [sampler.logprobs(np.append(datum.tokens[:place], t)) for t in range(policy.tokenizer.vocab_size)]
            lps = np.array([future.result()[-1] for future in futures], np.float64)
        of = {name: values[0][place] for name, values in output.outputs.items()}
        assert of["entropy"] == pytest.approx(-(np.exp(lps) * lps).sum(), rel=1e-3)
        assert of["sum_p2"] == pytest.approx(np.exp(2 * lps).sum(), rel=1e-3)
        assert of["sum_p2_logp"] == pytest.approx((np.exp(2 * lps) * lps).sum(), rel=1e-3)
        before = sum(float(h.sum()) for h in output.outputs["entropy"])
        policy.forward_backward(data, lambda logprobs, entropy: -entropy.sum() + 0 * logprobs.sum())
        self.after(policy, data)
        after = sum(float(h.sum()) for h in policy.forward(data, want=("entropy",)).result().outputs["entropy"])
        assert after > before


class SavingTests(Harness):
    """save, resume_from and init_from."""

    def test_resume_is_exact(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A resumed run goes on as the uninterrupted one does: weights, moments, version and sampling."""
        policy = fresh()
        data = self.data(policy)
        params = SamplingParams(max_tokens=8, stop=())
        with policy.sampler().result() as sampler:
            sampler.sample([1, 2], params).result()
        self.trained(policy, data, 2)
        path = policy.save("two").result()
        resumed = fresh(seed=None, resume_from=path)
        assert worst(self.logprobs(policy, data), self.logprobs(resumed, data)) == 0.0
        for backend in (policy, resumed):
            self.trained(backend, data, 2)
        assert worst(self.logprobs(policy, data), self.logprobs(resumed, data)) == 0.0
        a, b = (backend.sampler().result() for backend in (policy, resumed))
        assert a.version == b.version == 4
        drawn = [s.sample([1, 2], params).result()[0].tokens.tolist() for s in (a, b)]
        assert drawn[0] == drawn[1]

    def test_init_takes_weights_only(self, fresh: Callable[..., TrainerBackend]) -> None:
        """init_from starts a fresh optimizer: the weights agree, the next step does not."""
        policy = fresh()
        data = self.data(policy)
        self.trained(policy, data, 2)
        paths = [policy.save("weights", optimizer=optimizer).result() for optimizer in (True, False)]
        others = [fresh(init_from=path) for path in paths]
        for other in others:
            assert worst(self.logprobs(policy, data), self.logprobs(other, data)) == 0.0
            assert other.sampler().result().version == 0
        with pytest.raises(CheckpointError, match="optimizer"):
            fresh(resume_from=paths[1])
        self.trained(policy, data, 1)
        self.trained(others[0], data, 1)
        assert worst(self.logprobs(policy, data), self.logprobs(others[0], data)) > 1e-5

    def test_paths_are_unique(self, policy: TrainerBackend) -> None:
        """Saving twice under one label gives two states."""
        data = self.data(policy)
        first = policy.save("same").result()
        self.trained(policy, data, 1)
        assert policy.save("same").result() != first

    def test_save_with_gradient_pending_raises(self, policy: TrainerBackend) -> None:
        """An accumulated gradient would be lost, so save raises at the call."""
        policy.forward_backward(self.data(policy), "ppo")
        with pytest.raises(BackendError, match="accumulated"):
            policy.save("x")

    @pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/abs", "a\0b", ".hidden", "x" * 101, None, 3])
    def test_names_are_labels(self, policy: TrainerBackend, tmp_path: Path, name: Unchecked) -> None:
        """A label that could leave the folder is refused, and nothing is written."""
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConfigError, match=r"save\(name\)"):
            policy.save(name)
        assert sorted(tmp_path.rglob("*")) == before

    def test_missing_path(self, fresh: Callable[..., TrainerBackend], tmp_path: Path) -> None:
        """A path with nothing there is a CheckpointError."""
        with pytest.raises(CheckpointError):
            fresh(resume_from=str(tmp_path / "nothing"))
        with pytest.raises(ConfigError, match="both"):
            fresh(resume_from="a", init_from="b")
