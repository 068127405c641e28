"""``ToyBackend``: a softmax language model over bytes that learns in milliseconds, for tests and tutorials.

Everything but its size is as in the other backends: order, accumulation, snapshots, saving, failures.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlkit import _check
from rlkit.backends import saves
from rlkit.backends.inprocess import InProcessBackend
from rlkit.backends.sampling import SeedStream, Stop, checked_prompt, checked_request, draw, streams
from rlkit.errors import BackendError, CheckpointError, ConfigError
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Lora, Sample, SamplingParams

__all__ = ["ByteTokenizer", "ToyBackend"]

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


class ByteTokenizer:
    """UTF-8 bytes as tokens, and three special ones: <|im_start|> 256, <|im_end|> 257 (the end), <|endoftext|> 258."""

    vocab_size = 259
    eos_ids = (257,)
    chat_template = "<|im_start|>{role}\\n{content}<|im_end|>\\n"

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """int64 [T]; special-token strings become control tokens only with ``special=True``."""
        if not isinstance(text, str):
            raise ConfigError(_check.problem("encode(text)", f"got {_check.shown(text)}", "a string"))
        ids: list[int] = []
        while text:
            cut = min((text.find(s) for s in _SPECIAL if special and s in text), default=len(text))
            ids += text[:cut].encode()
            text = text[cut:]
            for i, name in enumerate(_SPECIAL):
                if text.startswith(name):
                    ids.append(256 + i)
                    text = text[len(name) :]
                    break
        return np.array(ids, np.int64)

    def decode(self, tokens: Any, skip_special: bool = True) -> str:
        """The text of int [T]; bytes that are not UTF-8 become U+FFFD."""
        out = bytearray()
        for token in _check.token_ids("decode(tokens)", tokens, vocab_size=self.vocab_size):
            if token < 256:
                out.append(int(token))
            elif not skip_special:
                out += _SPECIAL[token - 256].encode()
        return out.decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> np.ndarray:
        """int64 [T]: each message between <|im_start|> and <|im_end|>, then the head of the assistant's."""
        if variables:
            raise ConfigError(f"the toy's chat template takes no variables; got {sorted(variables)}")
        start, end = [256], [257, 10]
        parts = [start + list(f"{m['role']}\n{m['content']}".encode()) + end for m in messages]
        if add_generation_prompt:
            parts.append([*start, *b"assistant\n"])
        return np.array([token for part in parts for token in part], np.int64)


class _Features:
    """Fixed random features of a prefix: what the last tokens are, and a fading memory of all before."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        rng = np.random.default_rng(0)
        scale = 1.0 / np.sqrt(2.0)
        self._recent = [rng.normal(0, scale, (vocab_size, width)) for _ in range(3)]
        self._memory = rng.normal(0, 0.5, (vocab_size, width))
        self.size = width + 1

    def start(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """State of ``n`` empty prefixes: the last three tokens (-1: none), and the memory."""
        return np.full((n, 3), -1), np.zeros((n, self.size - 1))

    def read(self, state: tuple[np.ndarray, np.ndarray], tokens: np.ndarray) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Features [n, size] after ``tokens`` [n] were read, and the new state."""
        recent, memory = state
        recent = np.concatenate([tokens[:, None], recent[:, :2]], axis=1)
        summed = memory.copy()
        for table, column in zip(self._recent, recent.T, strict=True):
            summed += np.where(column[:, None] >= 0, table[column], 0.0)
        features = np.ones((tokens.size, self.size))
        features[:, :-1] = np.tanh(summed)
        return features, (recent, 0.8 * memory + self._memory[tokens])

    def all(self, tokens: np.ndarray) -> np.ndarray:
        """[T, size]: row i are the features after token i."""
        state, rows = self.start(1), []
        for token in tokens:
            features, state = self.read(state, np.array([token]))
            rows.append(features[0])
        return np.stack(rows)


class ToyBackend(InProcessBackend):
    """A log-linear language model over bytes: p(next token | prefix) = softmax(features(prefix) @ W).

    The features are fixed and W [65, 259] is trained, in float64. Unlike a large model it knows nothing at first but
    that text is mostly letters, digits and spaces.

    Args:
        model, lora: accepted, so that a call for another backend works here too; ignored.
        seed: of sampling; None for a fresh one.
        folder: where ``save`` writes, ``rlkit-saves`` by default.
        resume_from: a saved path: weights, optimizer, version and the stream of sampling seeds.
        init_from: a saved path: weights only.
        max_length: longest sequence, in tokens.

    >>> import rlkit
    >>> policy = ToyBackend(seed=0)
    >>> datum = rlkit.Datum.supervised(policy.tokenizer.encode("Q:"), policy.tokenizer.encode("A"))
    >>> for _ in range(20):
    ...     loss = policy.forward_backward([datum], "cross_entropy")
    ...     step = policy.optim_step(rlkit.Adam(learning_rate=0.1))
    >>> loss.result().metrics["loss:sum"] < 0.1
    True
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        lora: Lora | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        resume_from: str | None = None,
        init_from: str | None = None,
        max_length: int = 1024,
    ) -> None:
        del model, lora
        if resume_from is not None and init_from is not None:
            raise ConfigError("connect: got both resume_from= and init_from=; give one of them")
        entropy = np.random.SeedSequence().entropy if seed is None else _check.integer("seed", seed, low=0)
        _check.integer("max_length", max_length, low=2)
        tokenizer = ByteTokenizer()
        self._features = _Features(tokenizer.vocab_size)
        self._base_weights = _base_weights(self._features.size, tokenizer.vocab_size)
        self._weights = self._base_weights.copy()
        self._moments = [np.zeros_like(self._weights), np.zeros_like(self._weights)]
        self._moment_steps = 0
        self._gradient = np.zeros_like(self._weights)
        self._seeds = SeedStream(int(entropy or 0))
        version = self._load(resume_from or init_from, optimizer=resume_from is not None)
        super().__init__("toy", tokenizer=tokenizer, max_length=max_length, folder=folder)
        self.version = version

    def _run(
        self, data: Sequence[Datum], loss: Any, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        import torch

        from rlkit.backends.outputs import output

        yield from ()
        rows = [self._forward(datum) for datum in data]
        gradient = np.zeros_like(self._weights)
        found = None
        if loss is not None:
            driver = [torch.from_numpy(row.driver(datum, loss.driver)) for row, datum in zip(rows, data, strict=True)]
            entropy = [torch.from_numpy(row.entropy.astype(np.float32)) for row in rows] if loss.entropy else None
            found = loss.gradient(driver, data, entropy=entropy)
            for i, row in enumerate(rows):
                extra = found.entropy[i].numpy() if found.entropy is not None else None
                gradient += row.gradient(data[i], loss.driver, found.driver[i].numpy(), extra)
        if backward:
            if not np.isfinite(gradient).all():
                raise BackendError("forward_backward: the gradient is not finite")
            self._gradient = self._gradient + gradient
        extras = {"entropy": [row.entropy for row in rows]} if "entropy" in want else {}
        return output(data, [row.chosen(datum) for row, datum in zip(rows, data, strict=True)], extras, [found])

    def _forward(self, datum: Datum) -> _Row:
        before = np.flatnonzero(datum.mask) - 1
        features = self._features.all(datum.tokens)[before]
        return _Row(features, self._weights, datum.temperature or 1.0)

    def _step(self, params: Adam) -> Mapping[str, float]:
        gradient = self._gradient
        with np.errstate(over="ignore"):
            norm = float(np.sqrt(np.square(gradient.astype(np.float32)).sum(dtype=np.float32)))
        if not np.isfinite(norm):
            raise BackendError(f"optim_step: the gradient's norm is {norm}; nothing was changed, discard() drops it")
        if params.grad_clip_norm > 0:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        self._moment_steps += 1
        first, second = self._moments
        first = params.beta1 * first + (1 - params.beta1) * gradient
        second = params.beta2 * second + (1 - params.beta2) * gradient**2
        scale = np.sqrt(second / (1 - params.beta2**self._moment_steps)) + params.eps
        update = first / (1 - params.beta1**self._moment_steps) / scale
        decayed = self._weights * (1 - params.learning_rate * params.weight_decay)
        self._weights = decayed - params.learning_rate * update  # a new array: snapshots keep the old one
        self._moments = [first, second]
        self._drop()
        return {"grad_norm:mean": norm}

    def _drop(self) -> None:
        self._gradient = np.zeros_like(self._weights)

    def _snapshot(self) -> ToySampler:
        return ToySampler(self, self._weights, self.version)

    def _base(self) -> ToySampler:
        return ToySampler(self, self._base_weights, 0)

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, Any]:
        arrays = {"weights": self._weights}
        if optimizer:
            arrays |= {"first": self._moments[0], "second": self._moments[1]}
        np.savez(folder / "toy.npz", allow_pickle=False, **arrays)
        state: dict[str, Any] = {"optimizer": optimizer, "seed": str(self._seeds.entropy), "requests": self._seeds.count}
        return state | {"moment_steps": self._moment_steps}

    def _load(self, path: str | None, *, optimizer: bool) -> int:
        if path is None:
            return 0
        folder, state = saves.read(path, backend="toy")
        with np.load(folder / "toy.npz", allow_pickle=False) as arrays:
            self._weights = arrays["weights"]
            if not optimizer:
                return 0
            if not state["optimizer"]:
                raise CheckpointError(f"{folder} was saved without its optimizer; use init_from= for the weights alone")
            self._moments = [arrays["first"], arrays["second"]]
        self._moment_steps = state["moment_steps"]
        self._seeds = SeedStream(int(state["seed"]), state["requests"])
        return int(state["version"])


class _Row:
    """The distributions at one datum's masked-in tokens, and how gradients flow back from them."""

    def __init__(self, features: np.ndarray, weights: np.ndarray, temperature: float) -> None:
        logits = (features @ weights) / temperature
        logits -= logits.max(-1, keepdims=True, initial=-np.inf)
        self.logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))  # [n, V]
        self._probs = np.exp(self.logprobs)
        self.entropy = -(self._probs * self.logprobs).sum(-1)  # [n]
        self._features = features
        self._temperature = temperature

    def chosen(self, datum: Datum) -> np.ndarray:
        """float32 [n], the logprobs of the datum's own tokens."""
        return np.take_along_axis(self.logprobs, datum.tokens[datum.mask][:, None], 1)[:, 0].astype(np.float32)

    def driver(self, datum: Datum, name: str) -> np.ndarray:
        """What a loss is driven by: logprobs [n], or those of the datum's ``target_tokens`` [n, K]."""
        if name == "logprobs":
            return self.chosen(datum)
        targets = datum.inputs["target_tokens"][datum.mask]
        found = np.take_along_axis(self.logprobs, np.maximum(targets, 0), 1)
        return np.where(targets >= 0, found, 0.0).astype(np.float32)

    def gradient(self, datum: Datum, name: str, driver: np.ndarray, entropy: np.ndarray | None) -> np.ndarray:
        """d loss / d W [F, V], from d loss / d driver and d loss / d entropy."""
        columns = datum.tokens if name == "logprobs" else datum.inputs["target_tokens"]
        columns = columns[datum.mask].reshape(driver.shape[0], -1)
        driver = np.where(columns >= 0, driver.reshape(columns.shape), 0.0).astype(np.float64)
        by_logits = -self._probs * driver.sum(-1, keepdims=True)
        np.add.at(by_logits, (np.arange(len(columns))[:, None], np.maximum(columns, 0)), driver)
        if entropy is not None:
            by_logits -= entropy[:, None] * self._probs * (self.logprobs + self.entropy[:, None])
        return self._features.T @ (by_logits / self._temperature)


class ToySampler:
    """A frozen toy policy."""

    def __init__(self, backend: ToyBackend, weights: np.ndarray, version: int) -> None:
        self.tokenizer = backend.tokenizer
        self.max_length = backend.max_length
        self.version = version
        self._features = backend._features  # noqa: SLF001  # the two halves of one backend
        self._seeds = backend._seeds  # noqa: SLF001
        self._weights: np.ndarray | None = weights

    def sample(
        self, prompt: Any, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``."""
        weights = self._open()
        tokens = checked_request(prompt, params, n, seed, self.tokenizer.vocab_size, self.max_length)
        return Future.of(self._sampled(weights, tokens, params, streams(self._seeds.next() if seed is None else seed, n)))

    def logprobs(self, tokens: Any, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``."""
        weights = self._open()
        array = checked_prompt("logprobs(tokens)", tokens, self.tokenizer.vocab_size, self.max_length)
        temperature = _check.real("logprobs(temperature)", temperature, above=0.0)
        out = np.zeros(array.size, np.float32)
        if array.size > 1:
            row = _Row(self._features.all(array[:-1]), weights, temperature)
            out[1:] = np.take_along_axis(row.logprobs, array[1:, None], 1)[:, 0]
        return Future.of(out)

    def close(self) -> None:
        """Frees the snapshot."""
        self._weights = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> np.ndarray:
        if self._weights is None:
            raise BackendError("this sampler is closed")
        return self._weights

    def _sampled(
        self, weights: np.ndarray, prompt: np.ndarray, params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> list[Sample]:
        import torch

        n = len(rngs)
        stop = Stop(params.stop, self.tokenizer)
        state = self._features.start(n)
        features = np.zeros((n, self._features.size))
        for token in prompt:
            features, state = self._features.read(state, np.full(n, token))
        tokens: list[list[int]] = [[] for _ in rngs]
        logprobs: list[list[float]] = [[] for _ in rngs]
        ended = [False] * n
        for _ in range(min(params.max_tokens, self.max_length - prompt.size)):
            logits = np.matmul(features[:, None, :], weights)[:, 0]  # a product per row: no row depends on another
            uniforms = np.array([rng.random() for rng in rngs])
            drawn, lp = draw(torch.from_numpy(logits), [params] * n, uniforms)
            for i in np.flatnonzero(~np.array(ended)):
                tokens[i].append(int(drawn[i]))
                logprobs[i].append(float(lp[i]))
                ended[i] = stop(tokens[i])
            if all(ended):
                break
            features, state = self._features.read(state, drawn)
        drawn_as = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        reasons = ["stop" if end else "length" for end in ended]
        return [
            Sample(prompt, t, lp, reason, **drawn_as, version=self.version)  # type: ignore[arg-type]
            for t, lp, reason in zip(tokens, logprobs, reasons, strict=True)
        ]


def _base_weights(features: int, vocab_size: int) -> np.ndarray:
    """Small random weights, and a bias towards letters, digits, spaces and the end token."""
    weights = np.random.default_rng(1).normal(0, 0.05, (features, vocab_size))
    likely = [*b"abcdefghijklmnopqrstuvwxyz0123456789 ", 257]
    weights[-1] += np.where(np.isin(np.arange(vocab_size), likely), 2.0, -2.0)
    return weights
