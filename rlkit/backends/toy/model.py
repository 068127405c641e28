"""The log-linear model: fixed features of a prefix, trained weights, and the gradient with respect to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit.types import Datum

__all__ = ["Distributions", "Features", "base_weights"]


class Features:
    """Fixed random features of a prefix: what the last tokens are, and a fading memory of all before."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        rng = np.random.default_rng(0)
        scale = 1.0 / np.sqrt(2.0)
        self._recent = [rng.normal(0, scale, (vocab_size, width)) for _ in range(3)]
        self._memory = rng.normal(0, 0.5, (vocab_size, width))
        self.size = width + 1

    def start(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the state of ``n`` empty prefixes: the last three tokens (-1: none), and the memory."""
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
        """[n], the sum of p^2 over the vocabulary."""
        return np.asarray((self._probs**2).sum(-1))

    @property
    def sum_p2_logp(self) -> np.ndarray:
        """[n], the sum of p^2 log p over the vocabulary."""
        return np.asarray((self._probs**2 * self.logprobs).sum(-1))

    def chosen(self, datum: Datum) -> np.ndarray:
        """float32 [n], the logprobs of the datum's own tokens."""
        return np.take_along_axis(self.logprobs, datum.tokens[datum.mask][:, None], 1)[:, 0].astype(np.float32)

    def driver(self, datum: Datum, name: str) -> np.ndarray:
        """Return what a loss is driven by: logprobs [n], or those of the datum's ``target_tokens`` [n, K]."""
        if name == "logprobs":
            return self.chosen(datum)
        targets = datum.inputs["target_tokens"][datum.mask]
        chosen = np.take_along_axis(self.logprobs, np.maximum(targets, 0), 1)
        return np.where(targets >= 0, chosen, 0.0).astype(np.float32)

    def gradient(self, datum: Datum, name: str, driver: np.ndarray, entropy: np.ndarray | None) -> np.ndarray:
        """D loss / d W [F, V], from d loss / d driver and d loss / d entropy."""
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
    """Small random weights, and a bias towards letters, digits, spaces and the end token."""
    weights = np.random.default_rng(1).normal(0, 0.05, (features, vocab_size))
    likely = [*b"abcdefghijklmnopqrstuvwxyz0123456789 ", 257]
    weights[-1] += np.where(np.isin(np.arange(vocab_size), likely), 2.0, -2.0)
    return weights
