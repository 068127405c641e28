"""Top-k and target logprobs, for samplers that have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlkit
from rlkit.backends.protocol import MaskedLogprobs, PromptLogprobs, TargetLogprobs, TopK
from rlkit.testing.conformance.harness import Harness, worst


class ScoreTests(Harness):
    """A sampler with ``TopK`` and ``TargetLogprobs`` can teach by the top-k losses."""

    def scorer(self, policy: Any) -> Any:
        """Return a sampler that has both protocols."""
        sampler = policy.sampler().result()
        if not (isinstance(sampler, TopK) and isinstance(sampler, TargetLogprobs)):
            pytest.skip("its samplers have neither TopK nor TargetLogprobs")
        return sampler

    def test_top_logprobs_are_the_largest(self, policy: Any) -> None:
        """Of all logprobs at a place, the best first; those at the text's own tokens are ``logprobs``; row 0 is 0."""
        tokens = self.prompt(policy, "hello")
        everything = np.tile(np.arange(policy.tokenizer.vocab_size), (tokens.size, 1))
        with self.scorer(policy) as sampler:
            ids, logprobs = sampler.top_logprobs(tokens, 5).result()
            whole = sampler.target_logprobs(tokens, everything).result()
            scored = sampler.logprobs(tokens).result()
            both = sampler.prompt_logprobs(tokens, 5).result() if isinstance(sampler, PromptLogprobs) else None
        if both is not None:  # of one pass
            assert worst(both[:1], [scored]) < self.tolerance
            assert worst(both[2:], [logprobs]) < self.tolerance
            assert [each.dtype for each in both] == [np.float32, np.int64, np.float32]
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

    def test_targets_of_minus_one_are_none(self, policy: Any) -> None:
        """Their logprob is 0, as is that of the first token's targets; one token alone has none at all."""
        with self.scorer(policy) as sampler:
            scores = sampler.target_logprobs([1, 2, 3], [[5, -1], [-1, 6], [7, 8]]).result()
            assert (scores == 0).tolist() == [[True, True], [True, False], [False, False]]
            assert not sampler.target_logprobs([1], [[5]]).result().any()
            assert not sampler.top_logprobs([1], 2).result()[1].any()

    def test_masked_logprobs_are_those_of_the_whole_text(self, policy: Any) -> None:
        """Where the mask is true, but for the first token; 0 elsewhere."""
        tokens = self.prompt(policy, "hello there")
        mask = np.arange(tokens.size) % 2 == 0
        with policy.sampler().result() as sampler:
            whole = sampler.logprobs(tokens).result()
            if not isinstance(sampler, MaskedLogprobs):
                pytest.skip("its samplers have no MaskedLogprobs")
            masked = sampler.masked_logprobs(tokens, mask).result()
            assert masked.dtype == np.float32
            assert worst([masked], [np.where(mask, whole, 0.0)]) < self.tolerance
            with pytest.raises(rlkit.DataError, match="mask"):
                sampler.masked_logprobs(tokens, mask[1:])

    def test_bad_targets_are_refused(self, policy: Any) -> None:
        """At the call, naming the argument."""
        size = policy.tokenizer.vocab_size
        with self.scorer(policy) as sampler:
            bad: object
            for bad in ([[5.0]] * 3, [[5]], [5, 6, 7], [[-2]] * 3, [[size]] * 3, [[]] * 3):
                with pytest.raises(rlkit.DataError, match="targets"):
                    sampler.target_logprobs([1, 2, 3], bad)
            for k in (0, size + 1, 2.0):
                with pytest.raises(rlkit.ConfigError, match="k"):
                    sampler.top_logprobs([1, 2], k)
                if isinstance(sampler, PromptLogprobs):
                    with pytest.raises(rlkit.ConfigError, match="k"):
                        sampler.prompt_logprobs([1, 2], k)  # type: ignore[arg-type]  # on purpose

    def test_a_teacher_of_the_top_k_is_imitated(self, policy: Any) -> None:
        """The loss against the policy's own top k is 0, and its gradient vanishes where k is the vocabulary."""
        (sample,) = self.samples(policy)[:1]
        text = np.concatenate([sample.prompt, sample.tokens])
        k = min(policy.tokenizer.vocab_size, 1000)
        with self.scorer(policy) as sampler:
            ids, logprobs = sampler.top_logprobs(text, k).result()
        datum = sample.datum()
        chosen = {"target_tokens": datum.select(ids), "teacher_logprobs": datum.select(logprobs)}
        output = policy.forward([datum.with_inputs(**chosen)], "topk_forward_kl").result()
        assert output.metrics["loss:sum"] == pytest.approx(0.0, abs=sample.tokens.size * k * self.tolerance / 100)
