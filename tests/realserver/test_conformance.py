"""The Tinker backend conforms, over the real SDK and a real server, but for what this server does otherwise."""

from __future__ import annotations

import pytest

import rlkit
from rlkit.testing import BackendConformance
from rlkit.testing.conformance._harness import worst

pytest.importorskip("tinker", reason="needs the extra tinker")


NO_SCORES = dict.fromkeys(
    (
        "test_top_logprobs_are_the_largest",
        "test_targets_of_minus_one_are_none",
        "test_a_teacher_of_the_top_k_is_imitated",
    ),
    "its JAX engine answers 400 to topk_prompt_logprobs, and gives no logprobs of targets",
)


class TestRealServer(BackendConformance):
    """With gradients that are sums: see ``launch.py``. As it is the server gives the mean over sequences of token
    means, which is no sum, and has no meaning for a loss that is sent as weights of both signs."""

    recovers = False  # as on the hosted service, a policy ends with a call that failed
    tempered = False  # it has the logprobs of temperature 1 alone
    offers = ()  # the API has neither min_p nor penalties
    exact = False  # JAX's sums depend on the shape of the batch
    skips = {
        "test_snapshots_never_change": "sampling loads a snapshot into the place of the policy that it was taken of: "
        "an older one takes the place of what was trained since, and one that was loaded is trained with the policy",
        "test_live_samplers": "as before: it asks an older snapshot; test_live_samplers_switch_by_request has the rest",
        "test_resume_is_exact": "no metadata is kept with a saved state, and the stream of seeds is lost with it; "
        "test_resume_is_exact_but_for_seeds has the rest of this test",
        "test_truncation_renormalises": "logprobs under top_k and top_p are those of the whole distribution",
        **NO_SCORES,
    }

    @pytest.fixture(autouse=True)
    def _server(self, summing):
        self.server = summing

    def make(self, folder, **options):
        if "resume_from" not in options and "init_from" not in options:
            options |= {"model": self.server.model, "lora": rlkit.Lora(rank=4)}
        return rlkit.connect("tinker", base_url=self.server.url, max_length=128, deadline=1200.0, **options)

    def test_live_samplers_switch_by_request(self, policy):
        """Requests behind an update are drawn by the newest weights, which every token says."""
        prompt, params = self.prompt(policy), rlkit.SamplingParams(max_tokens=6, stop=())
        with policy.live_sampler().result() as live:
            assert live.switches == "request"
            start, first = policy.version, live.sample(prompt, params, seed=1).result()[0]
            self.trained(policy, self.data(policy), 1)
            assert live.update().result() == live.version == policy.version == start + 1
            second = live.sample(prompt, params, seed=1).result()[0]
            assert [{*sample.token_versions.tolist()} for sample in (first, second)] == [{start}, {start + 1}]
            expected = policy.sampler().result().logprobs(prompt).result()
            assert worst([live.logprobs(prompt).result()], [expected]) < self.tolerance

    def test_resume_is_exact_but_for_seeds(self, fresh):
        """A resumed run goes on as the uninterrupted one does: weights, moments and version."""
        policy = fresh()
        data = self.data(policy)
        self.trained(policy, data, 2)
        resumed = fresh(seed=None, resume_from=policy.save("two").result())
        assert worst(self.logprobs(policy, data), self.logprobs(resumed, data)) == 0.0
        for backend in (policy, resumed):
            self.trained(backend, data, 2)
        assert worst(self.logprobs(policy, data), self.logprobs(resumed, data)) == 0.0
        assert policy.sampler().result().version == resumed.sampler().result().version == 4


class TestStockServer(TestRealServer):
    """The server as it is installed, with the shims of the SDK alone: what does not hold there is its own arithmetic.

    Its gradients are means over sequences of means over tokens, so that neither calls nor weights add up; and a new
    model starts with the gradient that another left in its place, so that two policies are not always alike.
    """

    _MEANS = "its gradient is a mean over sequences of means over their tokens, where the API's is a sum"
    _LEFT = "a model may start with the gradient that one before it left in its place"
    skips = {
        **TestRealServer.skips,
        "test_two_calls_equal_one": _MEANS,
        "test_weights_multiply_every_term": _MEANS,
        "test_order_under_pipelining": _LEFT,
        "test_cancelled_awaits_lose_no_call": _LEFT,
    }

    @pytest.fixture(autouse=True)
    def _server(self, stock):
        self.server = stock
