"""Live samplers that are updated in the middle of a request."""

from __future__ import annotations

import time

import numpy as np

import rlkit

PROMPT = [40, 50, 60, 41, 51]
ADAM = rlkit.Adam(learning_rate=0.05)


def step(policy, seed=0):
    """One optimizer step on a text of its own; not waited for."""
    import torch

    with torch.enable_grad():  # a backend's thread may be sampling
        policy.forward_backward([rlkit.Datum.supervised(PROMPT, [70 + seed % 20, 71, 72])], "cross_entropy")
    return policy.optim_step(ADAM)


class Updating:
    """Has a policy trained and a live sampler updated at some of the calls of what draws tokens.

    It submits what the backend's thread then carries out between two tokens; until that has happened tokens are slow,
    since they have their share of the time beside training.

    Args:
        at: number of a call -> how many steps are trained before the update.

    Attributes:
        frozen: version -> a snapshot of it, of all versions that the live sampler had.
        then: called once, before the first token that is drawn after an update.
    """

    def __init__(self, policy, live, at):
        step(policy).result()  # what is imported at first use
        live.update().result()
        self.policy, self.live, self.at = policy, live, at
        self.calls, self.update, self.then = 0, None, None
        self.frozen = {live.version: policy.sampler().result()}

    def __call__(self, decode):
        def decoding(*args, **options):
            self.calls += 1
            if self.calls in self.at:
                for seed in range(self.at[self.calls]):
                    step(self.policy, seed + self.calls)
                self.frozen[max(self.frozen) + self.at[self.calls]] = self.policy.sampler()
                self.update = self.live.update()
            elif self.update is not None and not self.update.done():
                time.sleep(0.03)
            elif self.update is not None and self.then is not None:
                then, self.then = self.then, None
                then()
            return decode(*args, **options)

        return decoding

    def check(self, sample, rtol=0.0, atol=0.0):
        """Each token's logprob is that of the version that drew it, and of no other; several drew some."""
        text = np.concatenate([sample.prompt, sample.tokens])
        versions = sample.token_versions
        assert (np.diff(versions) >= 0).all()
        assert sample.version == versions[0]
        assert {*versions.tolist()} <= {*self.frozen}
        for version, sampler in self.frozen.items():
            sampler = sampler if hasattr(sampler, "logprobs") else sampler.result()
            assert sampler.version == version
            theirs = sampler.logprobs(text).result()[sample.prompt.size :]
            own = versions == version
            np.testing.assert_allclose(sample.logprobs[own], theirs[own], rtol=rtol, atol=atol)
            if (~own).any():
                assert np.abs(sample.logprobs[~own] - theirs[~own]).max() > 1e-3 + 5 * atol
