"""The toy backend: a language model over bytes that learns in milliseconds. Read it before you write a backend.

The model is tiny: p(next token | prefix) = softmax(features(prefix) @ W). Everything else is as in the other backends:
order of calls, accumulation, snapshots, saving, failures. This file shows each duty of a backend once:

- ``ToyBackend._run``: the logprobs of each datum's own tokens; ``loss.gradient`` turns them into d loss / d logprobs,
  and the chain rule into d loss / d W, which is added to the gradient whole or not at all;
- ``_step``, ``_drop``, ``_write``: the optimizer, forgetting the gradient, and the files of a saved state;
- ``_snapshot``, ``_base``: samplers that later steps do not change, since an array of weights is never written to;
  ``_live``: one that ``update`` gives newer weights, here by opening the next snapshot;
- the attribute ``_seeds``: the stream of seeds that a saved state continues;
- ``ToySampler``: samples that say how they were drawn, with the logprob of each token under the distribution that it
  was drawn from. It refuses the options that it lacks by name (``lacks=``).

Your backend is a subclass of ``InProcessBackend`` with the seven methods above, all of them. ``_run`` is a generator;
it returns ``assemble_output`` of the logprobs [n] and the parts of the loss. ``rlkit.backends.trainer`` checks the
calls, runs the methods one after the other in a thread, counts ``version``, and keeps the order after a failure.
``@rlkit.backends.registry.register("name")`` makes ``connect`` find the class once its module is imported.
``rlkit.testing.BackendConformance`` tests whether it is right: ``offers = ()`` in its subclass says that your samplers
refuse min_p and penalties, as these do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._check import TokenIds
from rlkit._runtime import Resource
from rlkit._seeds import SeedStream, resolve_seed, streams
from rlkit.backends import saves
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.backends.requests import Stop, check_prompt, check_request, check_targets
from rlkit.backends.samplers import SuccessiveSampler
from rlkit.backends.tokenizers import ByteTokenizer
from rlkit.backends.trainer import (
    InProcessBackend,
    InProcessCritic,
    assemble_output,
    check_start_options,
    check_tokenizer,
)
from rlkit.errors import BackendError, CheckpointError
from rlkit.futures import Future
from rlkit.types import OPTIONAL_OPTIONS, Adam, Datum, ForwardBackwardOutput, Lora, Sample, SamplingParams

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["ByteTokenizer", "Features", "ToyBackend", "ToyCritic", "ToySampler", "Weights", "base_weights", "draw"]

State: TypeAlias = tuple[np.ndarray, np.ndarray]  # of n prefixes: the last three tokens [n, 3], the memory [n, width]


class Features:
    """Fixed random features of a prefix: its last three tokens, and a fading memory of all before."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        rng = np.random.default_rng(0)
        scale = 1.0 / np.sqrt(2.0)
        self._recent = [rng.normal(0, scale, (vocab_size, width)) for _ in range(3)]
        self._memory = rng.normal(0, 0.5, (vocab_size, width))
        self.size = width + 1  # the last one is always 1

    def start(self, n: int) -> State:
        """Return the state of ``n`` empty prefixes: the last three tokens (-1: none), and the memory."""
        return np.full((n, 3), -1), np.zeros((n, self.size - 1))

    def read(self, state: State, tokens: np.ndarray) -> tuple[np.ndarray, State]:
        """Return the features [n, size] after ``tokens`` [n] were read, and the new state."""
        recent, memory = state
        recent = np.concatenate([tokens[:, None], recent[:, :2]], axis=1)
        summed = memory.copy()
        for table, column in zip(self._recent, recent.T, strict=True):
            summed += np.where(column[:, None] >= 0, table[column], 0.0)
        features = np.ones((tokens.size, self.size))
        features[:, :-1] = np.tanh(summed)
        return features, (recent, 0.8 * memory + self._memory[tokens])

    def all(self, tokens: np.ndarray) -> np.ndarray:
        """Return [T, size]: row i are the features after token i."""
        state, rows = self.start(1), np.empty((len(tokens), self.size))
        for i in range(len(tokens)):
            rows[i : i + 1], state = self.read(state, tokens[i : i + 1])
        return rows

    def before(self, datum: Datum) -> np.ndarray:
        """Return [n, size]: the features before each of the datum's own tokens, which predict it."""
        rows: np.ndarray = self.all(datum.tokens)[np.flatnonzero(datum.mask) - 1]
        return rows


def base_weights(features: int, vocab_size: int) -> np.ndarray:
    """Return small random weights, with a bias towards letters, digits, spaces and the end token."""
    weights = np.random.default_rng(1).normal(0, 0.05, (features, vocab_size))
    likely = [*b"abcdefghijklmnopqrstuvwxyz0123456789 ", 257]
    weights[-1] += np.where(np.isin(np.arange(vocab_size), likely), 2.0, -2.0)
    return weights


class Weights:
    """float64 weights with AdamW's moments, and the accumulated gradient.

    Arrays are replaced, never written to: a snapshot keeps ``value`` and needs no copy.
    """

    def __init__(self, value: np.ndarray) -> None:
        self.value = value
        self.first = self.second = self.gradient = np.zeros_like(value)
        self.steps = 0

    def add(self, gradient: np.ndarray) -> None:
        """Accumulate ``gradient``, or raise BackendError where it is not finite."""
        if not np.isfinite(gradient).all():
            raise BackendError("forward_backward: the gradient is not finite")
        self.gradient = self.gradient + gradient

    def clear(self) -> None:
        """Drop the gradient."""
        self.gradient = np.zeros_like(self.value)

    def step(self, params: Adam) -> Mapping[str, float]:
        """Take one AdamW step, clear the gradient, and return its norm before it was clipped.

        Raises:
            BackendError: the norm is not finite in float32; nothing was changed.
        """
        gradient = self.gradient
        with np.errstate(over="ignore"):
            norm = float(np.sqrt(np.square(gradient.astype(np.float32)).sum(dtype=np.float32)))
        if not np.isfinite(norm):
            raise BackendError(f"optim_step: the gradient's norm is {norm}; nothing was changed; discard() drops it")
        if params.grad_clip_norm > 0:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        self.steps += 1
        self.first = params.beta1 * self.first + (1 - params.beta1) * gradient
        self.second = params.beta2 * self.second + (1 - params.beta2) * gradient**2
        scale = np.sqrt(self.second / (1 - params.beta2**self.steps)) + params.eps
        update = self.first / (1 - params.beta1**self.steps) / scale
        decayed = self.value * (1 - params.learning_rate * params.weight_decay)
        self.value = decayed - params.learning_rate * update
        self.clear()
        return {"grad_norm:mean": norm}

    def write(self, file: Path, *, optimizer: bool) -> dict[str, object]:
        """Write ``file`` (npz); return the state's other fields.

        Raises:
            CheckpointError: something is not finite; nothing was written.
        """
        arrays = {"weights": self.value}
        if optimizer:
            arrays |= {"first": self.first, "second": self.second}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise CheckpointError(f"save: {name} is not finite; nothing was saved, and earlier saves are unchanged")
        np.savez(file, allow_pickle=False, **arrays)
        return {"optimizer": optimizer, "moment_steps": self.steps}

    def read(self, file: Path, state: Mapping[str, Any], *, optimizer: bool) -> None:
        """Restore the content of ``file``.

        Raises:
            CheckpointError: its shape is another one, or it was saved without its optimizer.
        """
        with np.load(file, allow_pickle=False) as arrays:
            if arrays["weights"].shape != self.value.shape:
                raise CheckpointError(f"{file} has shape {arrays['weights'].shape}; expected {self.value.shape}")
            if optimizer and not state["optimizer"]:
                what = f"{file.parent} was saved without its optimizer"
                raise CheckpointError(f"{what}; use init_from= for the weights alone")
            self.value = arrays["weights"]
            if optimizer:
                self.first, self.second, self.steps = arrays["first"], arrays["second"], int(state["moment_steps"])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logits [n, V] less the logarithm of the sum of their exponentials."""
    above = logits - logits.max(-1, keepdims=True, initial=-np.inf)
    logprobs: np.ndarray = above - np.log(np.exp(above).sum(-1, keepdims=True))
    return logprobs


def entropy(logprobs: np.ndarray) -> np.ndarray:
    """Return the entropies [n] of distributions [n, V]."""
    entropies: np.ndarray = -(np.exp(logprobs) * logprobs).sum(-1)
    return entropies


# The outputs that ``want`` may ask for, [n], from logprobs [n, V]; ``backends/trainer.py`` defines them.
_OUTPUTS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "entropy": entropy,
    "sum_p2": lambda logprobs: (np.exp(logprobs) ** 2).sum(-1),
    "sum_p2_logp": lambda logprobs: (np.exp(logprobs) ** 2 * logprobs).sum(-1),
}


def pick(logprobs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the logprobs of ``ids`` [n, K] out of [n, V], float32 [n, K]; 0 where an id is -1."""
    picked = np.take_along_axis(logprobs, np.maximum(ids, 0), 1)
    return np.where(ids >= 0, picked, 0.0).astype(np.float32)


def draw(logits: np.ndarray, params: SamplingParams, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row, and return its logprob under the distribution that it was drawn from.

    Args:
        logits: float64 [n, V].
        params: of all rows, without min_p and penalties.
        uniforms: float64 [n] in [0, 1): row i takes the first token whose cumulated probability exceeds its share.

    Returns:
        int64 [n], float32 [n].

    >>> draw(np.log([[0.5, 0.25, 0.25]] * 3), SamplingParams(), np.array([0.4, 0.6, 0.9]))[0]
    array([0, 1, 2])
    """
    logprobs = log_softmax(logits / (params.temperature or 1.0))  # 0 is greedy
    if params.truncates:
        logprobs = np.stack([_cut(row, params) for row in logprobs])
    cumulated = np.exp(logprobs).cumsum(-1)
    total = cumulated[:, -1]
    share = np.minimum(uniforms * total, np.nextafter(total, 0.0))
    tokens = logprobs.argmax(-1) if params.temperature == 0 else (cumulated > share[:, None]).argmax(-1)
    return tokens, logprobs[np.arange(len(tokens)), tokens].astype(np.float32)


def _cut(logprobs: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Keep the top_k most probable tokens [V], then the fewest of them that reach top_p of the mass that is left.

    Tokens as probable as the last one that is kept stay, too.
    """
    descending = -np.sort(-logprobs)
    if params.top_k > 0:
        descending = descending[: params.top_k]
    mass = np.exp(descending)
    kept = mass.cumsum() - mass < params.top_p * mass.sum()
    return log_softmax(np.where(logprobs >= descending[kept][-1], logprobs, -np.inf))


@attrs.define(eq=False, repr=False, slots=False)
class ToySampler(Resource):
    """A frozen toy policy. It computes in the call, so its futures are done when they are returned."""

    _instead = "open one in each process: rlkit.sampler('toy', path=...)"

    _weights: np.ndarray | None
    _features: Features
    _seeds: SeedStream
    tokenizer: Tokenizer = attrs.field(kw_only=True)
    max_length: int = attrs.field(kw_only=True)
    version: int = attrs.field(kw_only=True)

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``."""
        weights = self._open()
        size, most, lacks = self.tokenizer.vocab_size, self.max_length, tuple(OPTIONAL_OPTIONS)
        prompt = check_request(prompt, params, n, seed, vocab_size=size, max_length=most, lacks=lacks)
        rngs = streams(self._seeds.of(seed, params), n)  # one per sample: sample i is the same for any n
        ends, state = Stop(params.stop, self.tokenizer), self._features.start(n)
        features = np.zeros((n, self._features.size))
        for token in prompt:
            features, state = self._features.read(state, np.full(n, token))
        tokens: list[list[int]] = [[] for _ in rngs]
        logprobs: list[list[float]] = [[] for _ in rngs]
        ended = np.zeros(n, bool)
        for _ in range(min(params.max_tokens, most - prompt.size)):
            logits = np.matmul(features[:, None, :], weights)[:, 0]  # a product per row: no row depends on another
            drawn, scores = draw(logits, params, np.array([rng.random() for rng in rngs]))
            for i in np.flatnonzero(~ended):
                tokens[i].append(int(drawn[i]))
                logprobs[i].append(float(scores[i]))
                ended[i] = ends(tokens[i])
            if ended.all():
                break
            features, state = self._features.read(state, drawn)
        made = {"version": self.version, **params.sampling_options}
        rows = zip(tokens, logprobs, ended, strict=True)
        return Future.of([Sample(prompt, row, lp, "stop" if end else "length", **made) for row, lp, end in rows])

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``."""
        temperature = _check.temperature("logprobs(temperature)", temperature, zero=False)
        array, rows = self._score("logprobs(tokens)", tokens, temperature)
        return Future.of(pick(rows, array[:, None])[:, 0])

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """See ``TopK``."""
        _check.integer("top_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")
        _, rows = self._score("top_logprobs(tokens)", tokens)
        ids = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        ids[0] = 0
        return Future.of((ids, pick(rows, ids)))

    def target_logprobs(self, tokens: TokenIds, targets: ArrayLike) -> Future[np.ndarray]:
        """See ``TargetLogprobs``."""
        array, rows = self._score("target_logprobs(tokens)", tokens)
        return Future.of(pick(rows, check_targets(targets, array.size, self.tokenizer.vocab_size)))

    def _score(self, where: str, tokens: TokenIds, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return ``tokens`` as int64 [T], and float32 [T, V]: the logprobs of every token at each place; row 0 is 0."""
        weights, size = self._open(), self.tokenizer.vocab_size
        array = check_prompt(where, tokens, size, self.max_length)
        rows = np.zeros((array.size, size), np.float32)
        rows[1:] = log_softmax(self._features.all(array[:-1]) @ weights / temperature)
        return array, rows

    @property
    def nbytes(self) -> int:
        """Return the bytes that the snapshot keeps, 0 once it is closed."""
        return 0 if self._weights is None else self._weights.nbytes

    def close(self) -> None:
        """Free the snapshot."""
        self._weights = None

    def __repr__(self) -> str:
        return f"<ToySampler version {self.version}{', closed' if self._weights is None else ''}>"

    def _open(self) -> np.ndarray:
        if self._weights is None:
            raise BackendError("this sampler is closed")
        return self._weights


class ToyBackend(InProcessBackend):
    """A log-linear language model over bytes: p(next token | prefix) = softmax(features(prefix) @ W).

    The features are fixed and W [65, 259] is trained, in float64. Unlike a large model it knows nothing at first but
    that text is mostly letters, digits and spaces. Its samplers have neither min_p nor penalties.

    Args:
        model, lora: accepted, so that a call for another backend works here too; ignored.
        seed: of sampling; None for a fresh one.
        folder: where ``save`` writes, ``rlkit-saves`` by default.
        resume_from: a saved path: weights, optimizer, version and the stream of sampling seeds.
        init_from: a saved path: weights only.
        max_length: longest sequence, in tokens; None: that of the saved policy, 1024 for a new one.

    >>> import rlkit
    >>> policy = ToyBackend(seed=0)
    >>> datum = rlkit.Datum.supervised(policy.tokenizer.encode("Q:"), policy.tokenizer.encode("A"))
    >>> for _ in range(20):
    ...     loss = policy.forward_backward([datum], "cross_entropy")
    ...     step = policy.optim_step(rlkit.Adam(learning_rate=0.1))
    >>> loss.result().metrics["loss:sum"] < 0.1
    True
    """

    _seeds: SeedStream

    def __init__(
        self,
        *,
        model: str | None = None,
        lora: Lora | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        resume_from: str | None = None,
        init_from: str | None = None,
        max_length: int | None = None,
    ) -> None:
        path, resumes = check_start_options("connect", model, lora, folder, resume_from, init_from)
        _check.optional(_check.integer, "max_length", max_length, low=2)
        tokenizer = ByteTokenizer()
        self._features = Features(tokenizer.vocab_size)
        self._base_weights = base_weights(self._features.size, tokenizer.vocab_size)
        self._weights = Weights(self._base_weights)
        self._seeds = SeedStream(resolve_seed(seed))
        version, length = 0, 1024
        if path is not None:
            saved, state = saves.read(path, backend="toy")
            with saves.restoring(saved):
                self._weights.read(saved / "toy.npz", state, optimizer=resumes)
                length = int(state.get("max_length", length))
                if resumes:  # the next request draws as if the policy had never been closed
                    self._seeds = SeedStream(int(state["seed"]), state["requests"])
                    version = int(state["version"])
        length = length if max_length is None else max_length
        super().__init__("toy", tokenizer=tokenizer, max_length=length, folder=folder, version=version)

    def _run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        yield from ()  # a large model yields between micro-batches, so that sampling goes on
        predicted = [self._predict(datum) for datum in data]
        logprobs = [lp for _, lp in predicted]
        outputs = {name: [_OUTPUTS[name](lp) for lp in logprobs] for name in want}
        own = [pick(lp, d.tokens[d.mask][:, None])[:, 0] for lp, d in zip(logprobs, data, strict=True)]
        if loss is None:
            return assemble_output(data, own, outputs)
        import torch

        ids = [d.inputs["target_tokens"] if loss.driver == "target_logprobs" else d.tokens[:, None] for d in data]
        ids = [row[d.mask] for row, d in zip(ids, data, strict=True)]
        driver = own if loss.driver == "logprobs" else [pick(lp, row) for lp, row in zip(logprobs, ids, strict=True)]
        entropies = [torch.from_numpy(entropy(lp).astype(np.float32)) for lp in logprobs] if loss.entropy else None
        part = loss.gradient([torch.from_numpy(x) for x in driver], data, entropy=entropies)
        if backward:
            gradient = np.zeros_like(self._weights.value)
            for i, ((features, lp), row) in enumerate(zip(predicted, ids, strict=True)):
                by_logits = pass_back(lp, row, part.driver[i].numpy())
                if part.entropy is not None:  # dH / d logits = -p (log p + H)
                    by_logits -= part.entropy[i].numpy()[:, None] * np.exp(lp) * (lp + entropy(lp)[:, None])
                gradient += features.T @ (by_logits / (data[i].temperature or 1.0))
            self._weights.add(gradient)
        return assemble_output(data, own, outputs, [part])

    def _predict(self, datum: Datum) -> tuple[np.ndarray, np.ndarray]:
        """Return the features [n, F] before each of the datum's own tokens, and the logprobs [n, V] of all tokens."""
        features = self._features.before(datum)
        return features, log_softmax(features @ self._weights.value / (datum.temperature or 1.0))

    def _step(self, params: Adam) -> Mapping[str, float]:
        return self._weights.step(params)

    def _drop(self) -> None:
        self._weights.clear()

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, object]:
        state = self._weights.write(folder / "toy.npz", optimizer=optimizer)
        return state | {"max_length": self.max_length, "seed": str(self._seeds.entropy), "requests": self._seeds.count}

    def _snapshot(self) -> ToySampler:
        return self._sample_from(self._weights.value, self.version)

    def _base(self) -> ToySampler:
        return self._sample_from(self._base_weights, 0)

    def _live(self, *, recompute: bool) -> SuccessiveSampler:
        del recompute  # no keys and values are kept

        def update(live: SuccessiveSampler) -> Future[int]:
            return self._queue.enqueue("update", lambda: live.switch_to(self._snapshot()))

        # Switches at a token: a request is one call, so none is running when the weights change.
        return SuccessiveSampler(self._snapshot(), update, switches="token")

    def saved_sampler(self, path: str) -> Future[Sampler]:
        """Open a sampler of a saved state. See ``SavedSamplers``."""

        def job() -> ToySampler:
            folder, state = saves.read(path, backend="toy")
            with saves.restoring(folder):
                weights = Weights(self._base_weights)
                weights.read(folder / "toy.npz", state, optimizer=False)
                return self._sample_from(weights.value, int(state.get("version", 0)))

        return self._queue.enqueue("saved_sampler", job)

    def _sample_from(self, weights: np.ndarray, version: int) -> ToySampler:
        return ToySampler(
            weights, self._features, self._seeds, tokenizer=self.tokenizer, max_length=self.max_length, version=version
        )


def pass_back(logprobs: np.ndarray, ids: np.ndarray, by_driver: np.ndarray) -> np.ndarray:
    """Return d loss / d logits [n, V] from d loss / d (logprobs of ``ids`` [n, K]): d log p_i / d logits = 1_i - p."""
    by_ids = np.where(ids >= 0, by_driver.reshape(ids.shape), 0.0).astype(np.float64)
    by_logits: np.ndarray = -np.exp(logprobs) * by_ids.sum(-1, keepdims=True)
    np.add.at(by_logits, (np.arange(len(ids))[:, None], np.maximum(ids, 0)), by_ids)
    return by_logits


class ToyCritic(InProcessCritic):
    """V(prefix) = features(prefix) . w: the last three tokens, and a fading memory of those before.

    Needs no files and no model, and reads any tokens; it takes 2 kB for each entry of the vocabulary. It can
    distinguish little.

    Args:
        tokenizer: the policy's.
        model, lora: accepted, so that a call for another critic works here too; ignored.
        seed: accepted, without effect: it draws no random numbers.
        folder: where ``save`` writes, ``rlkit-saves`` by default.
        resume_from: a saved path: weights, optimizer and version.
        init_from: a saved path: weights only.
        max_length: longest datum, in tokens.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        model: str | None = None,
        lora: Lora | None = None,
        seed: int | None = None,  # noqa: ARG002
        folder: str | Path | None = None,
        resume_from: str | None = None,
        init_from: str | None = None,
        max_length: int = 2**20,
    ) -> None:
        path, resumes = check_start_options("critic", model, lora, folder, resume_from, init_from)
        _check.integer("max_length", max_length, low=2)
        tokenizer = check_tokenizer(tokenizer, None)
        self._features = Features(tokenizer.vocab_size)
        self._weights = Weights(np.zeros(self._features.size))
        version = 0
        if path is not None:
            saved, state = saves.read(path, backend="toy-critic")
            with saves.restoring(saved):
                self._weights.read(saved / "critic.npz", state, optimizer=resumes)
                version = int(state["version"]) if resumes else 0
        super().__init__("toy-critic", tokenizer=tokenizer, max_length=max_length, folder=folder, version=version)

    def _compute_values(
        self, data: Sequence[Datum], loss: PreparedLoss | None, *, backward: bool
    ) -> Generator[None, None, tuple[Sequence[np.ndarray], Sequence[LossGradient]]]:
        yield from ()
        features = [self._features.before(datum) for datum in data]
        values = [rows @ self._weights.value for rows in features]
        if loss is None:
            return values, []
        import torch

        part = loss.gradient([torch.from_numpy(x) for x in values], data)
        if backward:
            by_weights = [rows.T @ g.numpy().astype(float) for rows, g in zip(features, part.driver, strict=True)]
            self._weights.add(np.sum(by_weights, axis=0))
        return values, [part]

    def _step(self, params: Adam) -> Mapping[str, float]:
        return self._weights.step(params)

    def _drop(self) -> None:
        self._weights.clear()

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, object]:
        return self._weights.write(folder / "critic.npz", optimizer=optimizer)
