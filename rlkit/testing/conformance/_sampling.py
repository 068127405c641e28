"""Samples, snapshots, seeds, and the logprobs on both sides; samplers that can teach."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rlkit.backends.protocol import (
    LiveSampler,
    LiveSampling,
    PromptLogprobs,
    Sampler,
    TargetLogprobs,
    TopK,
    TrainerBackend,
)
from rlkit.errors import BackendError, ConfigError, DataError, UnsupportedError
from rlkit.testing.conformance._base import (
    ConformanceBase,
    Data,
    Fresh,
    Unchecked,
    check_refused,
    max_difference,
    require,
)
from rlkit.types import Adam, Sample, SamplingParams

LONG, SHORT = SamplingParams(max_tokens=12, stop=()), SamplingParams(max_tokens=2)
FAR = Adam(learning_rate=0.05)
OPTIONS = {"min_p": 0.2, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}


class SamplingTests(ConformanceBase):
    """A sampler is a frozen policy, and says how likely each of its tokens was."""

    @pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.3])
    def test_sampler_and_trainer_agree(self, policy: TrainerBackend, temperature: float) -> None:
        """The trainer gives a sampled token the logprob that the sampler reported, at its temperature."""
        samples = self.samples(policy, temperature=temperature)
        if temperature != 1.0 and not self.tempered:
            with pytest.raises(UnsupportedError, match=f"temperature {temperature}"):
                self.logprobs(policy, [s.datum(0.0) for s in samples])
            with pytest.raises(UnsupportedError, match="temperature"):
                policy.sampler().result().logprobs(samples[0].prompt, temperature=temperature)
            return
        trained = self.logprobs(policy, [s.datum(0.0) for s in samples])
        assert max_difference(trained, [s.logprobs for s in samples]) < self.tolerance
        first = samples[0]
        sampler = policy.sampler().result()
        scored = sampler.logprobs(np.concatenate([first.prompt, first.tokens]), temperature=temperature).result()
        assert max_difference([scored[first.prompt.size :]], [first.logprobs]) < self.tolerance

    def test_logprobs_are_a_distribution(self, policy: TrainerBackend, sampler: Sampler) -> None:
        """Over all continuations of a prompt, the probabilities sum to 1: the logprob at i is of token i."""
        prompt = self.prompt(policy, "ab")
        assert np.exp(self.following(sampler, prompt)).sum() == pytest.approx(1.0, abs=1e-3)
        assert sampler.logprobs(prompt).result()[0] == 0.0

    def test_samples_follow_the_logprobs(self, prompt: np.ndarray, sampler: Sampler) -> None:
        """Reported probabilities are those of the draws: the mean of 1/p over distinct first tokens is their number."""
        samples = sampler.sample(prompt, SamplingParams(max_tokens=1, stop=()), n=512, seed=5).result()
        first = {int(s.tokens[0]): float(np.exp(s.logprobs[0])) for s in samples}
        counts = {t: sum(int(s.tokens[0]) == t for s in samples) for t in first}
        top = max(first, key=lambda t: first[t])
        p = first[top]
        assert abs(counts[top] / 512 - p) < 5 * np.sqrt(p * (1 - p) / 512) + 1e-9

    def test_seeds_repeat(self, prompt: np.ndarray, sampler: Sampler) -> None:
        """A seed gives the same samples again, and sample i does not depend on how many there are."""
        once, again, few = (sampler.sample(prompt, LONG, n=n, seed=11).result() for n in (9, 9, 2))
        tokens = [sample.tokens.tolist() for sample in once]
        assert [sample.tokens.tolist() for sample in again] == tokens
        assert [sample.tokens.tolist() for sample in few] == tokens[:2]

    def test_samples_of_a_group_differ(self, prompt: np.ndarray, sampler: Sampler) -> None:
        """The samples of one request differ, and so do two requests without a seed."""
        group = sampler.sample(prompt, LONG, n=4, seed=1).result()
        others = [sampler.sample(prompt, LONG).result()[0] for _ in range(2)]
        assert len({tuple(s.tokens.tolist()) for s in [*group, *others]}) == 6

    def test_seed_of_the_backend_repeats(self, fresh: Fresh) -> None:
        """Two backends with one seed sample alike, call by call; another seed samples otherwise."""
        draws = []
        for seed in (3, 3, 4):
            with fresh(seed=seed).sampler().result() as sampler:
                draws.append([sampler.sample([1, 2], LONG).result()[0].tokens.tolist() for _ in range(2)])
        assert draws[0] == draws[1]
        assert draws[0] != draws[2]

    def test_companions_change_nothing(self, policy: TrainerBackend, prompt: np.ndarray, sampler: Sampler) -> None:
        """A sample is the same, to the bit, alone and among requests of other lengths and settings."""
        require(self.exact, "this backend does not guarantee it (exact = False)")
        params = SamplingParams(max_tokens=20, stop=())
        alone = sampler.sample(prompt, params, seed=2).result()[0]
        crowd = [sampler.sample(self.prompt(policy, "x" * k), LONG, n=k % 3 + 1) for k in range(1, 12)]
        shared = sampler.sample(np.append(prompt, prompt), params, n=2)
        among = sampler.sample(prompt, params, n=3, seed=2).result()[0]
        for future in [*crowd, shared]:
            future.result()
        assert alone.tokens.tolist() == among.tokens.tolist()
        assert alone.logprobs.tobytes() == among.logprobs.tobytes()

    def test_greedy_repeats(self, prompt: np.ndarray, sampler: Sampler) -> None:
        """Temperature 0 takes the most probable token and reports its untempered logprob."""
        params = SamplingParams(max_tokens=4, temperature=0.0, stop=())
        a, b = (sampler.sample(prompt, params, seed=seed).result()[0] for seed in (1, 2))
        scored = sampler.logprobs(np.concatenate([a.prompt, a.tokens])).result()[a.prompt.size :]
        assert a.tokens.tolist() == b.tokens.tolist()
        assert max_difference([scored], [a.logprobs]) < self.tolerance

    def test_truncation_renormalises(self, prompt: np.ndarray, sampler: Sampler) -> None:
        """With top_k = 1 every token is certain; with top_p the reported probabilities are those of what is left."""
        greedy = SamplingParams(max_tokens=4, temperature=0.0, stop=())
        only = sampler.sample(prompt, SamplingParams(max_tokens=4, top_k=1, stop=()), n=2).result()
        best = sampler.sample(prompt, greedy).result()[0]
        three = sampler.sample(prompt, SamplingParams(max_tokens=1, top_k=3, stop=()), n=64, seed=0).result()
        tiny = sampler.sample(prompt, SamplingParams(max_tokens=4, top_p=1e-6, stop=())).result()[0]
        assert all(s.tokens.tolist() == best.tokens.tolist() for s in [*only, tiny])
        assert all(np.abs(s.logprobs).max() < 1e-6 for s in [*only, tiny])
        seen = {int(s.tokens[0]): float(np.exp(s.logprobs[0])) for s in three}
        assert len(seen) <= 3
        assert sum(seen.values()) <= 1 + 1e-5
        assert three[0].datum(1.0).truncated

    @pytest.mark.parametrize(("name", "value"), OPTIONS.items())
    def test_options_are_there_or_refused(
        self, policy: TrainerBackend, prompt: np.ndarray, name: str, value: float, sampler: Sampler
    ) -> None:
        """A sampler without an option says so before any work; one that has it records it, and its datum is cut."""
        params = SamplingParams(max_tokens=3, stop=(), **{name: value})  # type: ignore[arg-type]
        if name not in self.offers:
            check_refused(UnsupportedError, name, sampler.sample, prompt, params)
            return
        sample = sampler.sample(prompt, params).result()[0]
        assert sample.sampling_options == params.sampling_options
        assert sample.datum(1.0).truncated
        check_refused(DataError, r"data\[0\].*penalty", policy.forward, [sample.datum(1.0)], "ppo")

    def test_min_p_renormalises(self, prompt: np.ndarray, sampler: Sampler) -> None:
        """With min_p the reported probabilities are those of what is left, none below its share of the largest."""
        require("min_p" in self.offers, "this backend has no min_p")
        params = SamplingParams(max_tokens=1, min_p=0.5, stop=())
        samples = sampler.sample(prompt, params, n=64, seed=0).result()
        whole = self.following(sampler, prompt)
        kept = np.exp(np.where(whole >= whole.max() + np.log(0.5), whole, -np.inf))
        seen = {int(s.tokens[0]): float(np.exp(s.logprobs[0])) for s in samples}
        assert all(p == pytest.approx(kept[token] / kept.sum(), rel=20 * self.tolerance) for token, p in seen.items())

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_penalties_lower_logprobs(self, prompt: np.ndarray, temperature: float, sampler: Sampler) -> None:
        """Presence and frequency come off the logits of the completion's tokens, once and by their number.

        The repetition penalty lowers the logits of the prompt's tokens too, and of no others.
        """
        require(OPTIONS.keys() - {"min_p"} <= {*self.offers}, "this backend lacks a penalty")
        both = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
        params = SamplingParams(max_tokens=3, stop=(), temperature=temperature, **both)  # type: ignore[arg-type]
        repeated = SamplingParams(max_tokens=1, stop=(), temperature=temperature, repetition_penalty=3.0)
        sample = sampler.sample(prompt, params, seed=3).result()[0]
        whole = self.following(sampler, np.append(prompt, sample.tokens[:2]))
        firsts = sampler.sample(prompt, repeated, n=64, seed=4).result()
        before = self.following(sampler, prompt)
        times = np.bincount(sample.tokens[:2], minlength=whole.size)
        whole = whole - 0.5 * times - 1.5 * (times > 0)
        whole -= np.log(np.exp(whole).sum())
        assert sample.logprobs[2] == pytest.approx(whole[sample.tokens[2]], abs=20 * self.tolerance)
        if temperature == 0.0:
            assert sample.tokens[2] == whole.argmax()
        gains = [(int(s.tokens[0]) in prompt, float(s.logprobs[0] - before[s.tokens[0]])) for s in firsts]
        others = [gain for seen, gain in gains if not seen]  # the mass that the prompt's tokens lost
        assert np.ptp(others or [0.0]) < 20 * self.tolerance
        assert all(gain <= max(others, default=np.inf) + self.tolerance for _, gain in gains)

    def test_stops(self, policy: TrainerBackend, prompt: np.ndarray, sampler: Sampler) -> None:
        """A stop id or string ends a sample and is part of it; () lets nothing end it but max_tokens."""
        tokenizer = policy.tokenizer
        full = sampler.sample(prompt, LONG, seed=9).result()[0]
        assert (full.stop_reason, full.tokens.size) == ("length", 12)
        token = int(full.tokens[3])
        place = full.tokens.tolist().index(token)
        by_id = sampler.sample(prompt, SamplingParams(max_tokens=12, stop=(token,)), seed=9).result()[0]
        ends = set(tokenizer.eos_ids)
        until = next((i for i, t in enumerate(full.tokens.tolist()) if t in ends or i == place), place)
        assert (by_id.stop_reason, by_id.tokens.tolist()) == ("stop", full.tokens[: until + 1].tolist())
        text = tokenizer.decode(full.tokens[:until], skip_special=False) if until else ""
        if text and "\ufffd" not in text:
            stop = text[-1]
            by_text = sampler.sample(prompt, SamplingParams(max_tokens=12, stop=(stop,)), seed=9).result()[0]
            assert by_text.stop_reason == "stop"
            assert stop in tokenizer.decode(by_text.tokens, skip_special=False)
            assert stop not in tokenizer.decode(by_text.tokens[:-1], skip_special=False)

    def test_context_ends_a_sample(self, policy: TrainerBackend, sampler: Sampler) -> None:
        """A completion stops with the reason "length" where the model's context ends."""
        prompt = np.ones(policy.max_length - 2, np.int64)
        sample = sampler.sample(prompt, LONG, seed=0).result()[0]
        assert (sample.tokens.size, sample.stop_reason) == (2, "length")

    def test_snapshots_never_change(self, policy: TrainerBackend, data: Data) -> None:
        """An old sampler gives what it gave before the policy was trained; a new one does not."""
        before = policy.sampler().result()
        tokens = data[0].tokens
        first = before.logprobs(tokens).result()
        self.trained(policy, data, step=FAR).result()
        after = policy.sampler().result()
        assert before.logprobs(tokens).result().tobytes() == first.tobytes()
        assert np.abs(after.logprobs(tokens).result() - first).max() > 1e-3
        assert (before.version, after.version) == (0, 1)
        assert after.sample(tokens[:3], LONG).result()[0].version == 1
        trained = policy.forward(data).result().logprobs[0]
        scored = after.logprobs(tokens, temperature=data[0].temperature).result()
        assert max_difference([trained[data[0].mask]], [scored[data[0].mask]]) < self.tolerance

    def test_base_is_never_written(self, policy: TrainerBackend, data: Data) -> None:
        """Training, snapshots and sampling leave the base model as it was, to the bit."""
        base = policy.base_sampler().result()
        first = base.logprobs(data[0].tokens).result()
        for _ in range(3):
            self.trained(policy, data, step=FAR)
            with policy.sampler().result() as sampler:
                sampler.sample(data[0].tokens[:3], LONG).result()
        assert base.logprobs(data[0].tokens).result().tobytes() == first.tobytes()
        assert policy.base_sampler().result().logprobs(data[0].tokens).result().tobytes() == first.tobytes()

    def test_closed_sampler_refuses(self, policy: TrainerBackend) -> None:
        """After close(), and after its context, a sampler raises."""
        with policy.sampler().result() as sampler:
            pass
        check_refused(BackendError, "closed", sampler.sample, [1], LONG)

    def test_live_samplers(self, policy: TrainerBackend) -> None:
        """An update is the policy as of its call; before it nothing changes, and tokens say who drew them."""
        if not isinstance(policy, LiveSampling):
            pytest.skip("it has no live_sampler")
        prompt, before = self.prompt(policy), policy.sampler().result()
        with policy.live_sampler().result() as live:
            assert isinstance(live, LiveSampler)
            assert live.switches in ("token", "request")
            assert live.version == policy.version
            running = live.sample(prompt, LONG, n=2, seed=1)
            self.trained(policy, self.data(policy), step=FAR)
            first, update = live.logprobs(prompt), live.update()
            newest = policy.sampler().result()
            assert update.result() == live.version == newest.version == before.version + 1
            either = [sampler.logprobs(prompt).result() for sampler in (before, newest)]
            assert min(max_difference([first.result()], [x]) for x in either) < self.tolerance
            assert max_difference([live.logprobs(prompt).result()], [either[1]]) < self.tolerance
            assert {s.version for s in live.sample(prompt, LONG, n=2, seed=1).result()} == {newest.version}
            self.check_versions(running.result(), {before.version, newest.version}, live.switches)
            assert live.update().result() == newest.version
        check_refused(BackendError, None, live.update)

    @staticmethod
    def check_versions(samples: Sequence[Sample], versions: set[int], switches: str) -> None:
        """Check which policies drew samples during an update."""
        for sample in samples:
            assert {*sample.token_versions.tolist()} <= versions
            assert switches == "token" or sample.versions is None

    def test_bad_sampling_calls(self, policy: Unchecked, sampler: Unchecked) -> None:
        """Prompts and settings are checked before anything is sampled."""
        size, sample = policy.tokenizer.vocab_size, sampler.sample
        for prompt in ([], None, [[1, 2]], [1.5], [True, False]):
            check_refused(DataError, r"sample\(prompt\)", sample, prompt, SHORT)
        for tokens, match in (("text", "encode"), ([1, -1], r"\[1\]"), ([1, 2, size], r"\[2\]")):
            check_refused(DataError, match, sample, tokens, SHORT)
        check_refused(DataError, "context", sample, [1] * policy.max_length, SHORT)
        for params in (None, {"max_tokens": 1}):
            check_refused(ConfigError, "SamplingParams", sample, [1], params)
        for name, value in (("n", 0), ("n", True), ("n", 1.0), ("seed", -1), ("seed", "a")):
            check_refused(ConfigError, rf"sample\({name}\)", sample, [1], SHORT, **{name: value})
        check_refused(DataError, "stop", sample, [1], SamplingParams(stop=(size,)))
        for tokens, match in (("text", "encode"), ([1, size], r"\[1\]"), ([1] * (policy.max_length + 1), "context")):
            check_refused(DataError, match, sampler.logprobs, tokens)
        for temperature in (0.0, float("nan")):
            check_refused(ConfigError, "temperature", sampler.logprobs, [1, 2], temperature=temperature)
        assert len(sampler.sample([1], SHORT).result()) == 1


class ScoreTests(ConformanceBase):
    """A sampler with ``TopK`` and ``TargetLogprobs`` can teach by the top-k losses."""

    @pytest.fixture
    def scorer(self, sampler: Unchecked) -> Unchecked:
        """Return a sampler that has both protocols."""
        both = isinstance(sampler, TopK) and isinstance(sampler, TargetLogprobs)
        require(both, "its samplers have neither TopK nor TargetLogprobs")
        return sampler

    def test_top_logprobs_are_the_largest(self, policy: Unchecked, scorer: Unchecked) -> None:
        """Of all logprobs at a place, the best first; those at the text's own tokens are ``logprobs``; row 0 is 0."""
        tokens = self.prompt(policy, "hello")
        everything = np.tile(np.arange(policy.tokenizer.vocab_size), (tokens.size, 1))
        ids, logprobs = scorer.top_logprobs(tokens, 5).result()
        whole = scorer.target_logprobs(tokens, everything).result()
        scored = scorer.logprobs(tokens).result()
        if isinstance(scorer, PromptLogprobs):  # both, of one pass
            both = scorer.prompt_logprobs(tokens, 5).result()
            assert max(max_difference(both[:1], [scored]), max_difference(both[2:], [logprobs])) < self.tolerance
            assert [each.dtype for each in both] == [np.float32, np.int64, np.float32]
        assert (ids.dtype, logprobs.dtype, whole.dtype) == (np.int64, np.float32, np.float32)
        assert ids.shape == logprobs.shape == (tokens.size, 5)
        assert not ids[0].any()
        assert not logprobs[0].any()
        assert not whole[0].any()
        places = np.arange(1, tokens.size)
        assert max_difference([np.sort(whole[1:])[:, :-6:-1]], [logprobs[1:]]) < self.tolerance
        assert max_difference([np.take_along_axis(whole[1:], ids[1:], 1)], [logprobs[1:]]) < self.tolerance
        assert max_difference([whole[places, tokens[1:]]], [scored[1:]]) < self.tolerance
        assert np.exp(whole[1:]).sum(-1) == pytest.approx(1.0, abs=1e-3)

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
        require(hasattr(sampler, "masked_logprobs"), "its samplers have no masked_logprobs")
        masked = sampler.masked_logprobs(tokens, mask).result()
        assert masked.dtype == np.float32
        assert max_difference([masked], [np.where(mask, whole, 0.0)]) < self.tolerance
        check_refused(DataError, "mask", sampler.masked_logprobs, tokens, mask[1:])

    def test_bad_targets_are_refused(self, policy: Unchecked, scorer: Unchecked) -> None:
        """At the call, naming the argument."""
        size = policy.tokenizer.vocab_size
        bad: object
        for bad in ([[5.0]] * 3, [[5]], [5, 6, 7], [[-2]] * 3, [[size]] * 3, [[]] * 3):
            check_refused(DataError, "targets", scorer.target_logprobs, [1, 2, 3], bad)
        for k in (0, size + 1, 2.0):
            check_refused(ConfigError, "k", scorer.top_logprobs, [1, 2], k)
            if isinstance(scorer, PromptLogprobs):
                check_refused(ConfigError, "k", scorer.prompt_logprobs, [1, 2], k)

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
