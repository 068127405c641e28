"""Estimators on 100,000 groups and 1,000,000 tokens in one call, beside a Python loop, and verl where it is installed.

    python benchmarks/estimators.py [--rounds 7]

The two sides take turns in one process after a warm-up; medians of CPU seconds. The table goes to the screen, the
figures to benchmarks/results/estimators.json.

Rows named "labels" give the same numbers in one array with a label each, so that no list is built. docs/algorithms.md
says what bounds the rows that stay below ten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlkit.advantages import by_group, discounted_returns, gae, grpo, rebn, rloo, token_weights

RNG = np.random.default_rng(0)
GROUPS = [RNG.random(n) for n in RNG.integers(4, 17, 100_000)]  # ragged
MATRIX = RNG.random((100_000, 8))
ROWS = [RNG.random(n) for n in RNG.integers(50, 151, 10_000)]  # about 1,000,000 tokens
SHORT = [RNG.random(n) for n in RNG.integers(5, 16, 100_000)]  # as many, where splitting into arrays costs most
FLAT, LABELS = np.concatenate(GROUPS), np.repeat(np.arange(len(GROUPS)), [group.size for group in GROUPS])
FLAT_SHORT, SHORT_LABELS = np.concatenate(SHORT), np.repeat(np.arange(len(SHORT)), [row.size for row in SHORT])
NAMES = [f"prompt-{label}" for label in LABELS]
VALUES = [RNG.random(row.size) for row in ROWS]
LENGTHS = np.array([row.size for row in ROWS])


def grpo_loop(groups: list[np.ndarray]) -> list[np.ndarray]:
    return [(r - r.mean()) / (r.std(ddof=1) + 1e-6) if r.max() > r.min() else np.zeros_like(r) for r in groups]


def rloo_loop(groups: list[np.ndarray]) -> list[np.ndarray]:
    return [(r - r.mean()) * (r.size / (r.size - 1)) for r in groups]


def returns_loop(rows: list[np.ndarray], gamma: float = 0.9) -> list[np.ndarray]:
    out = []
    for row in rows:
        total, returns = 0.0, np.empty_like(row)
        for t in range(row.size - 1, -1, -1):
            total = row[t] + gamma * total
            returns[t] = total
        out.append(returns)
    return out


def by_slices(loop: Callable[[list[np.ndarray]], list[np.ndarray]], flat: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """A loop over the slices of equal neighbouring labels, in one array again."""
    return np.concatenate(loop(np.split(flat, np.flatnonzero(np.diff(labels)) + 1)))


def by_dictionary(
    loop: Callable[[list[np.ndarray]], list[np.ndarray]], flat: np.ndarray, labels: Sequence[str]
) -> np.ndarray:
    """A loop over the groups of equal labels, wherever they stand."""
    places: dict[str, list[int]] = {}
    for i, label in enumerate(labels):
        places.setdefault(label, []).append(i)
    result = np.empty_like(flat)
    for index, row in zip(places.values(), loop([flat[index] for index in places.values()]), strict=True):
        result[index] = row
    return result


def gae_loop(
    rows: list[np.ndarray], values: list[np.ndarray], gamma: float = 0.99, lam: float = 0.95
) -> list[np.ndarray]:
    out = []
    for row, value in zip(rows, values, strict=True):
        total, after, advantages = 0.0, 0.0, np.empty_like(row)
        for t in range(row.size - 1, -1, -1):
            total = row[t] + gamma * after - value[t] + gamma * lam * total
            after, advantages[t] = value[t], total
        out.append(advantages)
    return out


def rebn_loop(rows: list[np.ndarray]) -> list[np.ndarray]:
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    deviation = (sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)) ** 0.5
    return [(row - mean) / (deviation + 1e-9) for row in rows]


def weights_loop(lengths: np.ndarray) -> list[float]:
    used = sum(1 for n in lengths if n)
    return [1.0 / (used * n) if n else 0.0 for n in lengths]


CASES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "grpo, ragged": (lambda: grpo(GROUPS), lambda: grpo_loop(GROUPS)),
    "grpo, matrix": (lambda: grpo(MATRIX), lambda: grpo_loop(list(MATRIX))),
    "rloo, ragged": (lambda: rloo(GROUPS), lambda: rloo_loop(GROUPS)),
    # the same numbers in one array with labels, where neither side has to build 100,000 arrays
    "grpo, labels": (lambda: by_group("grpo", FLAT, LABELS), lambda: by_slices(grpo_loop, FLAT, LABELS)),
    "rloo, labels": (lambda: by_group("rloo", FLAT, LABELS), lambda: by_slices(rloo_loop, FLAT, LABELS)),
    "rloo, labels of text": (lambda: by_group("rloo", FLAT, NAMES), lambda: by_dictionary(rloo_loop, FLAT, NAMES)),
    "discounted_returns": (lambda: discounted_returns(ROWS, gamma=0.9), lambda: returns_loop(ROWS)),
    "discounted_returns, short": (lambda: discounted_returns(SHORT, gamma=0.9), lambda: returns_loop(SHORT)),
    "discounted_returns, labels": (
        lambda: by_group("discounted_returns", FLAT_SHORT, SHORT_LABELS, gamma=0.9),
        lambda: by_slices(returns_loop, FLAT_SHORT, SHORT_LABELS),
    ),
    "gae": (lambda: gae(ROWS, values=VALUES, gamma=0.99, lam=0.95), lambda: gae_loop(ROWS, VALUES)),
    "rebn": (lambda: rebn(ROWS), lambda: rebn_loop(ROWS)),
    "token_weights": (lambda: token_weights(LENGTHS, "seq-mean-token-mean"), lambda: weights_loop(LENGTHS)),
}


def peers() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """verl's functions on the same matrix, where verl can be imported."""
    try:
        import torch
        from verl.trainer.ppo import core_algos
    except ImportError:
        return {}
    rewards = torch.from_numpy(MATRIX.reshape(-1, 1))
    mask = torch.ones_like(rewards)
    index = np.repeat(np.arange(MATRIX.shape[0]), MATRIX.shape[1])
    rows = torch.from_numpy(RNG.random((10_000, 100)))
    arrays, full = rows.numpy(), torch.ones_like(rows)
    return {
        "grpo beside verl": (
            lambda: grpo(MATRIX),
            lambda: core_algos.compute_grpo_outcome_advantage(rewards, mask, index),
        ),
        "gae beside verl": (
            lambda: gae(arrays, values=arrays, gamma=0.99, lam=0.95),
            lambda: core_algos.compute_gae_advantage_return(rows, rows, full, 0.99, 0.95),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    found = {}
    for name, sides in (CASES | peers()).items():
        for side in sides:
            side()  # warm-up
        took: list[list[float]] = [[], []]
        for _ in range(rounds):
            for side, times in zip(sides, took, strict=True):
                start = time.process_time()
                side()
                times.append(time.process_time() - start)
        ours, theirs = (statistics.median(times) for times in took)
        found[name] = {"rlkit_ms": 1e3 * ours, "other_ms": 1e3 * theirs, "ratio": theirs / ours}
        print(f"{name:26} rlkit {1e3 * ours:8.1f} ms   other {1e3 * theirs:9.1f} ms   ratio {theirs / ours:6.1f}")
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "estimators.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
