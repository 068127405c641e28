"""The base of the conformance tests: the backend under test, its data, and the measurement of a gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pytest

from rlkit.backends.protocol import Sampler, TrainerBackend
from rlkit.futures import Future
from rlkit.types import OPTIONAL_OPTIONS, Adam, Datum, Sample, SamplingParams

__all__ = ["STEP", "ConformanceBase", "Data", "Fresh", "Unchecked", "check_refused", "max_difference", "require"]

Data: TypeAlias = list[Datum]
Fresh: TypeAlias = Callable[..., TrainerBackend]
Unchecked: TypeAlias = Any  # tests pass arguments that the types forbid, and ask what a protocol does not promise
STEP = Adam(learning_rate=0.02)


class ConformanceBase:
    """Base of the conformance tests.

    Attributes:
        skips: name of a test, or of one of its cases ("test_clipping[0.5]") -> why this backend cannot pass it.
        tolerance: largest difference of two logprobs that should be equal.
        exact: a sample does not depend, bit for bit, on other requests in progress.
        recovers: after a failure is read, calls are accepted again.
        tempered: it has logprobs at temperatures other than 1; a backend without them refuses to train at them.
        offers: of min_p and the penalties, those that its samplers support; they refuse the others.
    """

    skips: ClassVar[dict[str, str]] = {}
    tolerance: ClassVar[float] = 1e-4
    exact: ClassVar[bool] = True
    recovers: ClassVar[bool] = True
    tempered: ClassVar[bool] = True
    offers: ClassVar[Collection[str]] = frozenset(OPTIONAL_OPTIONS)

    def make(self, folder: Path, **options: object) -> TrainerBackend:
        """Make a new backend that saves under ``folder``."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make(folder, **options)")

    @pytest.fixture(autouse=True)
    def _declared_skip(self, request: pytest.FixtureRequest) -> None:
        unknown = [name for name in self.skips if not hasattr(self, name.partition("[")[0])]
        assert not unknown, f"skips names tests that do not exist: {unknown}"
        whole = getattr(request.node, "originalname", request.node.name)
        reason = self.skips.get(request.node.name, self.skips.get(whole))
        if reason is not None:
            assert reason.strip(), "a skip needs a reason"
            pytest.skip(reason)

    @pytest.fixture
    def policy(self, tmp_path: Path) -> Iterator[TrainerBackend]:
        with self.make(tmp_path, seed=0) as policy:
            yield policy

    @pytest.fixture(name="data")
    def _data(self, policy: TrainerBackend) -> Data:
        return self.data(policy)

    @pytest.fixture(name="prompt")
    def _prompt(self, policy: TrainerBackend) -> np.ndarray:
        return self.prompt(policy)

    @pytest.fixture
    def fresh(self, tmp_path: Path) -> Iterator[Fresh]:
        """Make backends that start alike, and close them."""
        made: list[TrainerBackend] = []

        def make(**options: object) -> TrainerBackend:
            made.append(self.make(tmp_path, **{"seed": 0, **options}))
            return made[-1]

        yield make
        for policy in made:
            policy.close()

    @pytest.fixture
    def twin(self, fresh: Fresh) -> TrainerBackend:
        """Return a backend that starts as ``policy`` did."""
        return fresh()

    @pytest.fixture
    def sampler(self, policy: TrainerBackend) -> Iterator[Sampler]:
        with policy.sampler().result() as sampler:
            yield sampler

    @staticmethod
    def prompt(policy: TrainerBackend, text: str = "hello 12") -> np.ndarray:
        return np.asarray(policy.tokenizer.encode(text))

    def samples(self, policy: TrainerBackend, *, temperature: float = 1.0, tokens: int = 6) -> list[Sample]:
        """Return three samples of each of three prompts of different lengths, equal for backends that start alike."""
        params = SamplingParams(max_tokens=tokens, temperature=temperature, stop=())
        with policy.sampler().result() as sampler:
            prompts = [
                self.prompt(policy, text) for text in ("ab", "hello 12", "1 + 2 = 3, and so on and on and on and on")
            ]
            futures = [sampler.sample(p, params, n=3, seed=i) for i, p in enumerate(prompts)]
            return [sample for future in futures for sample in future.result()]

    def data(self, policy: TrainerBackend, **inputs: Unchecked) -> list[Datum]:
        """Return those samples as datums, with advantages of both signs and sampling logprobs off the policy's."""
        rng = np.random.default_rng(7)
        data = []
        for sample in self.samples(policy):
            n = sample.tokens.size
            near = sample.logprobs + rng.normal(0, 0.15, n).astype(np.float32)
            data.append(sample.datum(rng.normal(size=n), sampling_logprobs=np.minimum(near, -1e-3), **inputs))
        return data

    def trained(
        self, policy: TrainerBackend, data: Sequence[Datum], steps: int = 1, step: Adam = STEP
    ) -> Future[Mapping[str, float]]:
        """Ask for steps of ppo, one or more; return the last one's result to come."""
        for _ in range(steps - 1):
            policy.forward_backward(data, "ppo")
            policy.optim_step(step)
        policy.forward_backward(data, "ppo")
        return policy.optim_step(step)

    def after(self, policy: TrainerBackend, data: Sequence[Datum], *, scale: float = 1e-3) -> list[np.ndarray]:
        """Step once along the plain gradient; return the logprobs of ``data`` there.

        Without moments and with an eps far above the gradient, AdamW is gradient descent, so that two backends end
        up alike only if they had the same gradient.
        """
        policy.optim_step(Adam(learning_rate=scale * 1e8, beta1=0.0, beta2=0.0, eps=1e8)).result()
        return self.logprobs(policy, data)

    @staticmethod
    def following(sampler: Sampler, tokens: np.ndarray) -> np.ndarray:
        """Return float64 [V]: the logprobs of all tokens behind these."""
        futures = [sampler.logprobs(np.append(tokens, token)) for token in range(sampler.tokenizer.vocab_size)]
        return np.array([future.result()[-1] for future in futures], np.float64)

    @staticmethod
    def logprobs(policy: TrainerBackend, data: Sequence[Datum]) -> list[np.ndarray]:
        arrays: list[np.ndarray] = policy.forward(data).result().selected
        return arrays


def max_difference(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """Return the largest absolute difference of two lists of arrays."""
    assert len(a) == len(b)
    assert all(x.shape == y.shape for x, y in zip(a, b, strict=True))
    return max((float(np.abs(x - y).max(initial=0.0)) for x, y in zip(a, b, strict=True)), default=0.0)


def require(condition: object, why: str) -> None:
    """Skip a test of what the backend does not have."""
    if not condition:
        pytest.skip(why)


def check_refused(
    error: type[Exception], match: str | None, call: Callable[..., object], *args: Unchecked, **kwargs: Unchecked
) -> None:
    """Check that a call raises this error, with this part of its message."""
    with pytest.raises(error, match=match):
        call(*args, **kwargs)
