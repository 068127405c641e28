"""Where rlkit's defaults of an algorithm are not those of Trinity-RFT under the same name, as the lines a run logs.

What is set is never spoken of: a setting that a file has means what it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlkit.recipes.algorithms import Recipe
from rlkit.recipes.keys import TABLE
from rlkit.recipes.learning import Algorithm
from rlkit.recipes.method import Method
from rlkit.recipes.names import LOSSES

__all__ = ["NAMES", "VERSION", "differences", "notes"]

VERSION = "0.6.0"
NAMES: Mapping[str, str] = TABLE["differences"]["kl"]
"""Trinity's algorithms -> the KL loss that each has unless told otherwise."""
_CLIPS = ("clip_range", "clip_range_high", "clip_high_threshold")
_NOTES, _KL_NOTES = TABLE["differences"]["notes"], TABLE["differences"]["kl_notes"]


def differences(settings: Algorithm, method: Method) -> dict[str, tuple[object, Any]]:
    """Return keys of the section algorithm that are not set -> (what rlkit has, what Trinity has)."""
    name, row = settings.algorithm_type, method.recipe
    if name not in NAMES:
        return {}
    differing: dict[str, tuple[object, Any]] = {}
    if settings.repeat_times is None and row.rolls_out:
        differing["repeat_times"] = (row.repeat_times, 1)
    for part, kind in (("kl_loss_fn", settings.kl_loss_fn or NAMES[name]), ("kl_penalty_fn", settings.kl_penalty_fn)):
        if kind not in (None, "none") and "kl_coef" not in (getattr(settings, f"{part}_args") or {}):
            differing[f"{part}_args.kl_coef"] = (0.0, 0.001)
    if settings.advantage_fn is None and name == "jsd":
        differing["advantage_fn"] = ("jsd_gradient", "jsd")
    if settings.loss_agg_mode is None and name == "gspo" and settings.policy_loss_fn_args is None:
        differing["loss_agg_mode"] = (row.weights, "token-mean")
    return differing | dict(_of_loss(settings, row, settings.policy_loss_fn_args or {}))


def _of_loss(settings: Algorithm, row: Recipe, given: Mapping[str, object]) -> Iterator[tuple[str, tuple[object, Any]]]:
    where, loss = "policy_loss_fn_args.", row.loss
    same_loss = LOSSES.get(settings.policy_loss_fn or "", settings.policy_loss_fn) in (None, loss)
    if settings.algorithm_type == "dapo" and same_loss and not any(key in given for key in _CLIPS):
        yield f"{where}clip_range_high", (0.28, 0.2)
    if loss in ("ppo", "mix", "opsm") and not {"clip_ratio_c", "dual_clip"} & {*given, *row.loss_args}:
        yield f"{where}clip_ratio_c", (None, 3.0)
    if "loss_agg_mode" in given and settings.loss_agg_mode is None and given["loss_agg_mode"] != "token-mean":
        yield "loss_agg_mode", (f"that of {where[:-1]}, {given['loss_agg_mode']}", "token-mean")


def notes(settings: Algorithm, method: Method) -> list[str]:
    """Return all differences, a line each."""
    lines = [
        f"algorithm.{key} is not set: here it is {_said(ours)}, in Trinity-RFT {VERSION} {_said(theirs)}"
        for key, (ours, theirs) in differences(settings, method).items()
    ]
    name = settings.algorithm_type
    told = [_NOTES[name]] if name in _NOTES else []
    told += [_KL_NOTES[name]] if method.kl_loss > 0 and name in _KL_NOTES else []
    if method.recipe.weights.endswith("-norm") and name in NAMES:
        told += ["sums are divided by model.max_response_tokens and the number of episodes, there by the batch's width"]
    return lines + [f"not as in Trinity-RFT {VERSION}: {text}" for text in told]


def _said(value: object) -> str:
    return "off" if value is None else str(value)
