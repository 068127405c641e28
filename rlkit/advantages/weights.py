"""How much each token of a sequence counts: the aggregation of a loss, as the ``weights`` of its datums (rule R3)."""

from __future__ import annotations

import numpy as np

from rlkit import _check, _rows
from rlkit._calls import answered
from rlkit._forms import Arrays, Labels, RowsLike
from rlkit.advantages._registry import register
from rlkit.errors import ConfigError, DataError

__all__ = ["token_weights"]

_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)


@register("token_weights")
@answered
def token_weights(
    lengths: RowsLike, mode: str = "token-mean", *, constant: float | None = None, groups: Labels | None = None
) -> Arrays:
    """Return the weight of each token of a sequence, so that a plain sum over tokens is the wanted mean over the batch.

    With n_i tokens in sequence i, S sequences that have any, and P prompts:

    - "token-mean": 1 / sum of n; every token counts alike.
    - "token-sum": 1.
    - "seq-mean-token-sum": 1 / S.
    - "seq-mean-token-mean": 1 / (S n_i); every sequence counts alike.
    - "seq-mean-token-sum-norm": 1 / (S constant); a fixed length instead of the sequence's own (Dr. GRPO).
    - "prompt-mean": 1 / (P sum of n over the prompt's sequences); every prompt counts alike.

    Args:
        lengths: [S] integers >= 0: trained tokens of each sequence; a sequence is a whole trajectory, whose datums
            all get its weight. Empty sequences get 0 and are not counted.
        mode: one of the above, "token-mean" by default.
        constant: > 0, for "seq-mean-token-sum-norm" and only there.
        groups: [S] labels that say which prompt a sequence belongs to, for "prompt-mean" and only there.

    Returns:
        float64 [S]. Give it to the datums of the whole batch; micro-batches then add up exactly.

    Raises:
        DataError: lengths are no integers >= 0, or labels are not as many.
        ConfigError: the mode is unknown, or constant or groups are missing or not asked for.

    >>> token_weights([1, 3])
    array([0.25, 0.25])
    >>> token_weights([1, 3, 0], "seq-mean-token-mean")
    array([0.5       , 0.16666667, 0.        ])
    >>> token_weights([1, 3, 4], "prompt-mean", groups=["a", "a", "b"])
    array([0.125, 0.125, 0.125])

    Source: arXiv:2503.14476 (token mean), arXiv:2503.20783 (constant length). Peers: verl agrees in all modes; TRL
    calls them grpo (seq-mean-token-mean), dapo (token-mean), dr_grpo (constant length); ROLL and Trinity divide by
    the constant alone.
    """
    _check.choice("mode", mode, _MODES)
    _extra("constant", constant, mode, "seq-mean-token-sum-norm")
    _extra("groups", groups, mode, "prompt-mean")
    n = _lengths(lengths)
    filled = n > 0
    if mode == "token-mean":
        share = n.sum()
    elif mode == "token-sum":
        share = 1.0
    elif mode == "seq-mean-token-sum":
        share = filled.sum()
    elif mode == "seq-mean-token-mean":
        share = filled.sum() * n
    elif mode == "seq-mean-token-sum-norm":
        share = filled.sum() * _check.real("constant", constant, above=0.0)
    else:
        codes, _ = _rows.labels("groups", groups, n.size, "one label per sequence")
        per_prompt = np.bincount(codes, n)
        share = np.count_nonzero(per_prompt) * per_prompt[codes]
    with np.errstate(divide="ignore"):  # by 0 where there is no token
        return np.where(filled, 1.0 / share, 0.0)


def _extra(name: str, value: object, mode: str, owner: str) -> None:
    if (value is None) == (mode == owner):
        what = "is missing" if value is None else f"was given with mode={mode!r}"
        raise ConfigError(name, what, f'a value with mode="{owner}", and only there')


def _lengths(lengths: RowsLike) -> np.ndarray:
    n = _rows.vector("lengths", lengths)
    if n.size == 0:
        raise DataError("lengths", "is empty", "at least one sequence")
    bad = np.flatnonzero(~((n >= 0) & (n == np.floor(n)) & (n < 2**53)))
    if bad.size:
        raise DataError(f"lengths[{bad[0]}]", f"is {n[bad[0]]}", "an integer >= 0")
    return n
