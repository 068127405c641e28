"""Off-policy correction: weights of tokens that another program sampled than the one that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from rlkit import corrections
from rlkit.credit import Item
from rlkit.credit.batch import multiply_weights
from rlkit.recipes.method import Method
from rlkit.types import Datum

__all__ = ["CORRECTIONS", "correct", "correction_of"]

CORRECTIONS: Mapping[str, Callable[..., Sequence[np.ndarray]]] = {
    each.__name__: each
    for each in (
        corrections.token_tis,
        corrections.sequence_tis,
        corrections.icepop,
        corrections.batch_normalized,
        corrections.token_mask,
        corrections.sequence_mask,
        corrections.geometric_sequence_mask,
        corrections.outlier_veto,
    )
}


def correction_of(name: str, method: Method, *, elsewhere: bool) -> str | None:
    """Return which correction a run has.

    Args:
        name: of ``CORRECTIONS``, "none" or "auto".
        method: of the run.
        elsewhere: whether another engine samples than the backend's own, whose numbers are the trainer's.

    Returns:
        None: none. "auto" is ``token_tis`` where another engine samples and the loss does not correct by itself. Losses
        whose ratio is to what the sampler reported do: ppo, gspo, cispo, decoupled_ppo and their like.
    """
    if name != "auto":
        return None if name == "none" else name
    recipe = method.recipe
    corrects = "sampling_logprobs" in method.inputs and method.old_logprobs != "sampling_logprobs"
    learns = recipe.rolls_out and recipe.advantage is not None and recipe.select != "best"  # which imitates
    return "token_tis" if elsewhere and learns and not corrects else None


def correct(
    name: str, items: Sequence[Item], trainer_logprobs: Sequence[np.ndarray]
) -> tuple[list[Item], dict[str, float]]:
    """Multiply the weights of what was sampled by a correction.

    Args:
        name: of ``CORRECTIONS``.
        items: of a step; demonstrations among them stay as they are.
        trainer_logprobs: float32 [n] of each datum, of the policy before it is updated.

    Returns:
        the items; "train/correction/mean", "train/correction/min" and "train/correction/max" over the tokens.
    """
    rest = iter(trainer_logprobs)
    rows = [[next(rest) for _ in item.data] for item in items]
    sampled = [
        (datum, now)
        for item, each in zip(items, rows, strict=True)
        if item.trajectory is not None
        for datum, now in zip(item.data, each, strict=True)
    ]
    then = [datum.select(datum.inputs["sampling_logprobs"]) for datum, _ in sampled]
    weights = CORRECTIONS[name](trainer_logprobs=[now for _, now in sampled], sampling_logprobs=then)
    given = iter(weights)

    def weighted(datum: Datum) -> Datum:
        return multiply_weights(datum, next(given))

    corrected = [
        item if item.trajectory is None else attrs.evolve(item, data=[weighted(datum) for datum in item.data])
        for item in items
    ]
    flat = np.concatenate([np.zeros(0), *weights])
    if not flat.size:
        return corrected, {}
    statistics = {"mean": flat.mean(), "min": flat.min(), "max": flat.max()}
    return corrected, {f"train/correction/{which}": float(value) for which, value in statistics.items()}
