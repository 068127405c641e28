"""Saved states: whole, exact, and the only handle is the path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlkit
from rlkit.backends.protocol import TrainerBackend
from rlkit.testing.conformance.harness import Harness, worst

STEP = rlkit.Adam(learning_rate=0.02)


class SavingTests(Harness):
    """save, resume_from and init_from."""

    def trained(self, policy: TrainerBackend, data: Any, steps: int) -> None:
        for _ in range(steps):
            policy.forward_backward(data, "ppo")
            policy.optim_step(STEP)

    def test_resume_is_exact(self, fresh: Callable[..., TrainerBackend]) -> None:
        """A resumed run goes on as the uninterrupted one does: weights, moments, version and sampling."""
        policy = fresh()
        data = self.data(policy)
        params = rlkit.SamplingParams(max_tokens=8, stop=())
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
        with pytest.raises(rlkit.CheckpointError, match="optimizer"):
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
        with pytest.raises(rlkit.BackendError, match="accumulated"):
            policy.save("x")

    @pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/abs", "a\0b", ".hidden", "x" * 101, None, 3])
    def test_names_are_labels(self, policy: TrainerBackend, tmp_path: Path, name: Any) -> None:
        """A label that could leave the folder is refused, and nothing is written."""
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(rlkit.ConfigError, match=r"save\(name\)"):
            policy.save(name)
        assert sorted(tmp_path.rglob("*")) == before

    def test_missing_path(self, fresh: Callable[..., TrainerBackend], tmp_path: Path) -> None:
        """A path with nothing there is a CheckpointError."""
        with pytest.raises(rlkit.CheckpointError):
            fresh(resume_from=str(tmp_path / "nothing"))
        with pytest.raises(rlkit.ConfigError, match="both"):
            fresh(resume_from="a", init_from="b")
