"""Bad input raises a typed error at the call, says where, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.testing.conformance.harness import Harness, worst

PARAMS = rlkit.SamplingParams(max_tokens=2)


class InputTests(Harness):
    """Typed errors, before any work."""

    def test_bad_training_calls(self, policy: Any) -> None:
        """Each names the field and the index, and leaves the policy as it was."""
        data = self.data(policy)
        size = policy.tokenizer.vocab_size
        before = self.logprobs(policy, data)
        beyond = attrs.evolve(data[1], tokens=np.where(data[1].mask, size, data[1].tokens))
        long = rlkit.Datum.supervised([1], np.ones(policy.max_length, np.int64))
        lacking = rlkit.Datum(data[0].tokens, data[0].mask, {"advantages": np.ones(int(data[0].mask.sum()))})
        greedy = attrs.evolve(data[0], temperature=0.0)
        cut = attrs.evolve(data[0], truncated=True)
        run = policy.forward_backward
        table: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (lambda: run([], "ppo"), rlkit.DataError, "empty"),
            (lambda: run(None, "ppo"), rlkit.DataError, "data"),
            (lambda: run(data[0], "ppo"), rlkit.DataError, "list of Datum"),
            (lambda: run("data", "ppo"), rlkit.DataError, "list of Datum"),
            (lambda: run([data[0], None], "ppo"), rlkit.DataError, r"data\[1\]"),
            (lambda: run([data[0], {"tokens": [1]}], "ppo"), rlkit.DataError, r"data\[1\]"),
            (lambda: run([data[0], beyond], "ppo"), rlkit.DataError, r"data\[1\].tokens\[\d+\]"),
            (lambda: run([data[0], long], "cross_entropy"), rlkit.DataError, r"data\[1\].tokens"),
            (lambda: run([data[0], lacking], "ppo"), rlkit.DataError, r"data\[1\].*sampling_logprobs"),
            (lambda: run([greedy], "ppo"), rlkit.DataError, r"data\[0\].*greedily"),
            (lambda: run([cut], "ppo"), rlkit.DataError, r"data\[0\].*top_p"),
            (
                lambda: run([data[0].with_inputs(weights=1.0)], lambda logprobs: logprobs.sum()),
                rlkit.DataError,
                "weights",
            ),
            (lambda: run(data, "pppo"), rlkit.UnknownNameError, "did you mean 'ppo'"),
            (lambda: run(data, None), rlkit.ConfigError, "loss"),
            (lambda: run(data, 3), rlkit.ConfigError, "loss"),
            (lambda: run(data, lambda x: x.sum()), rlkit.ConfigError, "first parameter"),
            (lambda: run(data, lambda logprobs, *rest: logprobs.sum()), rlkit.ConfigError, "rest"),
            (lambda: run(data, lambda logprobs, absent: logprobs.sum()), rlkit.DataError, "absent"),
            (lambda: run(data, "ppo", config={"clip_high": 1.3}), rlkit.ConfigError, "clip_high_threshold"),
            (lambda: run(data, "ppo", config={"clip_low_threshold": 1.5}), rlkit.ConfigError, "clip_low_threshold"),
            (lambda: run(data, "ppo", config={"clip_low_threshold": float("nan")}), rlkit.ConfigError, "clip_low"),
            (lambda: run(data, "ppo", config=3), rlkit.ConfigError, "config"),
            (lambda: run(data, "ppo", want="entropy"), rlkit.ConfigError, "want"),
            (lambda: run(data, "ppo", want=None), rlkit.ConfigError, "want"),
            (lambda: run(data, lambda logprobs: (logprobs.sum(), {"loss:sum": 1.0})), rlkit.ConfigError, "loss:sum"),
            (lambda: run(data, lambda logprobs: (logprobs.sum(), {1: 1.0})), rlkit.ConfigError, "metric 1"),
            (lambda: run(data, "ppo", want=("nothing",)), rlkit.UnsupportedError, "nothing"),
            (lambda: policy.forward(data, config={"beta": 1}), rlkit.ConfigError, "config"),
            (lambda: policy.forward([]), rlkit.DataError, "empty"),
            (lambda: policy.optim_step(None), rlkit.ConfigError, "Adam"),
            (lambda: policy.optim_step({"learning_rate": 1e-4}), rlkit.ConfigError, "Adam"),
        ]
        for call, error, match in table:
            with pytest.raises(error, match=match) as caught:
                call()
            assert isinstance(caught.value, rlkit.RlkitError)
        assert worst(before, self.logprobs(policy, data)) == 0.0
        with pytest.raises(rlkit.BackendError, match="accumulated"):
            policy.optim_step(rlkit.Adam())

    def test_bad_sampling_calls(self, policy: Any) -> None:
        """Prompts and settings are checked before anything is sampled."""
        size = policy.tokenizer.vocab_size
        ids = r"sample\(prompt\)"
        with policy.sampler().result() as sampler:
            table: list[tuple[Callable[[], Any], type[Exception], str]] = [
                (lambda: sampler.sample("text", PARAMS), rlkit.DataError, "encode"),
                (lambda: sampler.sample([], PARAMS), rlkit.DataError, ids),
                (lambda: sampler.sample(None, PARAMS), rlkit.DataError, ids),
                (lambda: sampler.sample([[1, 2]], PARAMS), rlkit.DataError, ids),
                (lambda: sampler.sample([1.5], PARAMS), rlkit.DataError, ids),
                (lambda: sampler.sample([True, False], PARAMS), rlkit.DataError, ids),
                (lambda: sampler.sample([1, -1], PARAMS), rlkit.DataError, r"\[1\]"),
                (lambda: sampler.sample([1, 2, size], PARAMS), rlkit.DataError, r"\[2\]"),
                (lambda: sampler.sample([1] * policy.max_length, PARAMS), rlkit.DataError, "context"),
                (lambda: sampler.sample([1], None), rlkit.ConfigError, "SamplingParams"),
                (lambda: sampler.sample([1], {"max_tokens": 1}), rlkit.ConfigError, "SamplingParams"),
                (lambda: sampler.sample([1], PARAMS, n=0), rlkit.ConfigError, r"sample\(n\)"),
                (lambda: sampler.sample([1], PARAMS, n=True), rlkit.ConfigError, r"sample\(n\)"),
                (lambda: sampler.sample([1], PARAMS, n=1.0), rlkit.ConfigError, r"sample\(n\)"),
                (lambda: sampler.sample([1], PARAMS, seed=-1), rlkit.ConfigError, r"sample\(seed\)"),
                (lambda: sampler.sample([1], PARAMS, seed="a"), rlkit.ConfigError, r"sample\(seed\)"),
                (lambda: sampler.sample([1], rlkit.SamplingParams(stop=(size,))), rlkit.DataError, "stop"),
                (lambda: sampler.logprobs("text"), rlkit.DataError, "encode"),
                (lambda: sampler.logprobs([1, size]), rlkit.DataError, r"\[1\]"),
                (lambda: sampler.logprobs([1] * (policy.max_length + 1)), rlkit.DataError, "context"),
                (lambda: sampler.logprobs([1, 2], temperature=0.0), rlkit.ConfigError, "temperature"),
                (lambda: sampler.logprobs([1, 2], temperature=float("nan")), rlkit.ConfigError, "temperature"),
            ]
            for call, error, match in table:
                with pytest.raises(error, match=match):
                    call()
            assert len(sampler.sample([1], PARAMS).result()) == 1

    def test_entropy_is_exact(self, policy: Any) -> None:
        """``want`` gives the distribution's own entropy and sums, and a loss that names entropy its gradient."""
        data = self.data(policy)
        try:
            output = policy.forward(data, want=("entropy", "sum_p2", "sum_p2_logp")).result()
        except rlkit.UnsupportedError:
            pytest.skip("this backend has no exact entropies, and says so")
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
