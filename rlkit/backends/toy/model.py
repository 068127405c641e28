"""The log-linear model: fixed features of a prefix, trained weights, and the gradient with respect to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._rows import TokenIds
from rlkit.errors import BackendError, CheckpointError, ConfigError
from rlkit.types import Adam, Datum

__all__ = ["AdamState", "ByteTokenizer", "Distributions", "Features", "Weights", "base_weights"]

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_CONTROL = re.compile("|".join(map(re.escape, _SPECIAL)).encode())


class ByteTokenizer:
    """UTF-8 bytes as tokens, and three special ones: <|im_start|> 256, <|im_end|> 257 (the end), <|endoftext|> 258."""

    vocab_size = 259
    eos_ids = (257,)
    chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    added_tokens = MappingProxyType(dict.fromkeys(_SPECIAL, True))
    named_tokens = MappingProxyType({"eos_token": "<|im_end|>"})

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return int64 [T]; special-token strings become control tokens only with ``special=True``."""
        _check.require(isinstance(text, str), "encode(text)", text, "a string")
        data = text.encode()
        ids = np.frombuffer(data, np.uint8).astype(np.int64)
        if not special:
            return ids
        keep = np.ones(ids.size, np.bool_)
        for match in _CONTROL.finditer(data):
            ids[match.start()] = 256 + _SPECIAL.index(match[0].decode())
            keep[match.start() + 1 : match.end()] = False
        return ids[keep]

    def decode(self, tokens: TokenIds, skip_special: bool = True) -> str:
        """Return the text of int [T]; bytes that are not UTF-8 become U+FFFD."""
        out = bytearray()
        for token in _check.token_ids("decode(tokens)", tokens, vocab_size=self.vocab_size):
            if token < 256:
                out.append(int(token))
            elif not skip_special:
                out += _SPECIAL[token - 256].encode()
        return out.decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **variables: object
    ) -> np.ndarray:
        """Return int64 [T]: each message between <|im_start|> and <|im_end|>, then the head of the assistant's."""
        if variables:
            raise ConfigError(f"apply_chat_template: the toy's template takes no variables; got {sorted(variables)}")
        checked = _check.messages("apply_chat_template(messages)", messages)
        start, end = [256], [257, 10]
        parts = [start + list(f"{m['role']}\n{m['content']}".encode()) + end for m in checked]
        if add_generation_prompt:
            parts.append([*start, *b"assistant\n"])
        return np.array([token for part in parts for token in part], np.int64)


@attrs.frozen(eq=False)
class AdamState:
    """Weights and their moments; arrays are replaced, never written, so that snapshots can keep them."""

    value: np.ndarray
    first: np.ndarray
    second: np.ndarray
    steps: int = 0

    @classmethod
    def started(cls, value: np.ndarray) -> AdamState:
        """Return the state before the first step."""
        return cls(value, np.zeros_like(value), np.zeros_like(value))

    def stepped(self, gradient: np.ndarray, params: Adam) -> tuple[AdamState, float]:
        """Return the state after one more step, and the gradient's norm before it was clipped.

        Raises:
            BackendError: the norm is not finite in float32.
        """
        with np.errstate(over="ignore"):
            norm = float(np.sqrt(np.square(gradient.astype(np.float32)).sum(dtype=np.float32)))
        if not np.isfinite(norm):
            raise BackendError(f"optim_step: the gradient's norm is {norm}; nothing was changed; discard() drops it")
        if params.grad_clip_norm > 0:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        steps = self.steps + 1
        first = params.beta1 * self.first + (1 - params.beta1) * gradient
        second = params.beta2 * self.second + (1 - params.beta2) * gradient**2
        scale = np.sqrt(second / (1 - params.beta2**steps)) + params.eps
        update = first / (1 - params.beta1**steps) / scale
        decayed = self.value * (1 - params.learning_rate * params.weight_decay)
        return AdamState(decayed - params.learning_rate * update, first, second, steps), norm


class Weights:
    """float64 weights with the gradient that is accumulated.

    Attributes:
        state: the weights and their moments.
        gradient: what is accumulated.
    """

    def __init__(self, state: AdamState) -> None:
        self.state = state
        self.gradient = np.zeros_like(state.value)

    @property
    def value(self) -> np.ndarray:
        """Return the weights, which are never written to."""
        return self.state.value

    def add(self, gradient: np.ndarray) -> None:
        """Accumulate ``gradient``, or raise BackendError where it is not finite."""
        if not np.isfinite(gradient).all():
            raise BackendError("forward_backward: the gradient is not finite")
        self.gradient = self.gradient + gradient

    def clear(self) -> None:
        """Drop the gradient."""
        self.gradient = np.zeros_like(self.value)

    def step(self, params: Adam) -> Mapping[str, float]:
        """Take one AdamW step, and clear the gradient.

        Raises:
            BackendError: the gradient's norm is not finite in float32; nothing was changed.
        """
        self.state, norm = self.state.stepped(self.gradient, params)
        self.clear()
        return {"grad_norm:mean": norm}

    def write(self, file: Path, *, optimizer: bool) -> dict[str, object]:
        """Write ``file`` (npz); return the state's other fields.

        Raises:
            CheckpointError: something is not finite; nothing was written.
        """
        arrays = {"weights": self.value}
        if optimizer:
            arrays |= {"first": self.state.first, "second": self.state.second}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise CheckpointError(f"save: {name} is not finite; nothing was saved, and earlier saves are unchanged")
        np.savez(file, allow_pickle=False, **arrays)
        return {"optimizer": optimizer, "moment_steps": self.state.steps}

    def read(self, file: Path, state: Mapping[str, Any], *, optimizer: bool) -> None:
        """Restore what was written.

        Raises:
            CheckpointError: it is of another shape, or was saved without its optimizer.
        """
        with np.load(file, allow_pickle=False) as arrays:
            if arrays["weights"].shape != self.value.shape:
                raise CheckpointError(f"{file} has shape {arrays['weights'].shape}; expected {self.value.shape}")
            if not optimizer:
                self.state = AdamState.started(arrays["weights"])
                return
            if not state["optimizer"]:
                raise CheckpointError(
                    f"{file.parent} was saved without its optimizer; use init_from= for the weights alone"
                )
            self.state = AdamState(arrays["weights"], arrays["first"], arrays["second"], int(state["moment_steps"]))


State: TypeAlias = tuple[np.ndarray, np.ndarray]  # of n prefixes: the last three tokens [n, 3], the memory [n, width]


class Features:
    """Fixed random features of a prefix: what the last tokens are, and a fading memory of all before."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        rng = np.random.default_rng(0)
        scale = 1.0 / np.sqrt(2.0)
        self._recent = [rng.normal(0, scale, (vocab_size, width)) for _ in range(3)]
        self._memory = rng.normal(0, 0.5, (vocab_size, width))
        self.size = width + 1

    def start(self, n: int) -> State:
        """Return the state of ``n`` empty prefixes: the last three tokens (-1: none), and the memory."""
        return np.full((n, 3), -1), np.zeros((n, self.size - 1))

    def read(self, state: State, tokens: np.ndarray) -> tuple[np.ndarray, State]:
        """Return features [n, size] after ``tokens`` [n] were read, and the new state."""
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
        state, rows = self.start(1), []
        for token in tokens:
            features, state = self.read(state, np.array([token]))
            rows.append(features[0])
        return np.stack(rows)


class Distributions:
    """The distributions at one datum's masked-in tokens, and how gradients flow back from them."""

    def __init__(self, features: np.ndarray, weights: np.ndarray, temperature: float) -> None:
        logits = (features @ weights) / temperature
        logits -= logits.max(-1, keepdims=True, initial=-np.inf)
        self.logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))  # [n, V]
        self._probs = np.exp(self.logprobs)
        self.entropy = -(self._probs * self.logprobs).sum(-1)  # [n]
        self._features = features
        self._temperature = temperature

    @property
    def sum_p2(self) -> np.ndarray:
        """Return [n], the sum of p^2 over the vocabulary."""
        return np.asarray((self._probs**2).sum(-1))

    @property
    def sum_p2_logp(self) -> np.ndarray:
        """Return [n], the sum of p^2 log p over the vocabulary."""
        return np.asarray((self._probs**2 * self.logprobs).sum(-1))

    def chosen(self, datum: Datum) -> np.ndarray:
        """Return float32 [n], the logprobs of the datum's own tokens."""
        return np.take_along_axis(self.logprobs, datum.tokens[datum.mask][:, None], 1)[:, 0].astype(np.float32)

    def driver(self, datum: Datum, name: str) -> np.ndarray:
        """Return the logprobs that a loss depends on: [n], or those of the datum's ``target_tokens`` [n, K]."""
        if name == "logprobs":
            return self.chosen(datum)
        targets = datum.inputs["target_tokens"][datum.mask]
        chosen = np.take_along_axis(self.logprobs, np.maximum(targets, 0), 1)
        return np.where(targets >= 0, chosen, 0.0).astype(np.float32)

    def gradient(self, datum: Datum, name: str, driver: np.ndarray, entropy: np.ndarray | None) -> np.ndarray:
        """Return d loss / d W [F, V], from d loss / d driver and d loss / d entropy."""
        columns = datum.tokens if name == "logprobs" else datum.inputs["target_tokens"]
        columns = columns[datum.mask].reshape(driver.shape[0], -1 if driver.size else 0)
        driver = np.where(columns >= 0, driver.reshape(columns.shape), 0.0).astype(np.float64)
        by_logits = -self._probs * driver.sum(-1, keepdims=True)
        np.add.at(by_logits, (np.arange(len(columns))[:, None], np.maximum(columns, 0)), driver)
        if entropy is not None:
            by_logits -= entropy[:, None] * self._probs * (self.logprobs + self.entropy[:, None])
        gradient: np.ndarray = self._features.T @ (by_logits / self._temperature)
        return gradient


def base_weights(features: int, vocab_size: int) -> np.ndarray:
    """Return small random weights, with a bias towards letters, digits, spaces and the end token."""
    weights = np.random.default_rng(1).normal(0, 0.05, (features, vocab_size))
    likely = [*b"abcdefghijklmnopqrstuvwxyz0123456789 ", 257]
    weights[-1] += np.where(np.isin(np.arange(vocab_size), likely), 2.0, -2.0)
    return weights
