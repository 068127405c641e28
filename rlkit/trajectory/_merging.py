"""From a trajectory to the datums that train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlkit import _check
from rlkit.errors import DataError
from rlkit.trajectory.types import Trajectory, Turn
from rlkit.types import Datum

__all__ = ["datums"]


def datums(trajectory: Trajectory, advantages: object = None, *, split: str = "raise", **inputs: object) -> list[Datum]:
    """Return the datums that train a trajectory: its tokens exactly as they were sent and sampled.

    Turns whose prompt begins with the previous prompt and action are merged into one datum, so the cost is linear in
    the length of the conversation. A turn whose prompt does not (a template rewrote the history, or the environment
    replaced it), or that was drawn at another temperature, or otherwise than the policy would (top_p, a penalty, ...),
    starts a new one. The mask is True at the actions' tokens and nowhere else; a datum without any is left out.

    Args:
        trajectory: T turns with n_1 ... n_T action tokens.
        advantages: one number for the trajectory; or [T], one per turn; or a sequence of T arrays [n_i], one number
            per action token (``trajectory.per_turn`` cuts a flat array).
        split: "raise": a DataError where more than one datum is needed, because losses on sequences, such as gspo, act
            per datum and would see parts; "allow".
        inputs: further inputs in the same forms, ``weights=`` for example: what ``token_weights`` gives for
            ``trajectory.token_count`` goes to every datum of the trajectory. Per token also [n_i, K]. A single
            number other than an advantage stays one number per datum. An explicit ``sampling_logprobs=`` takes the
            place of the recorded ones and says that truncation and penalties have been corrected for. ``weights`` are
            multiplied by those of the turns, and are there without being given where a turn has one other than 1.

    Returns:
        One datum or, with split="allow", as many as needed, none where no action has a token. Each has
        ``sampling_logprobs`` and what was given, and ``versions`` where several policies drew its tokens.

    Raises:
        DataError: what was given has none of the forms, or a split is needed.
        ConfigError: split is unknown.

    >>> from rlkit import Sample
    >>> from rlkit.trajectory import Trajectory, Turn, datums
    >>> first = Turn(Sample([5, 6], [7], [-0.5]))
    >>> second = Turn(Sample([5, 6, 7, 1], [8, 9], [-1.0, -2.0]))  # begins with 5 6 7
    >>> (datum,) = datums(Trajectory([first, second]), [0.5, -1.0], weights=0.25)
    >>> datum.tokens, datum.mask.astype(int), datum.inputs["advantages"]
    (array([5, 6, 7, 1, 8, 9]), array([0, 0, 1, 0, 1, 1]), array([ 0. ,  0. ,  0.5,  0. , -1. , -1. ], dtype=float32))

    Peers: one datum per turn, quadratic in the length of the conversation, is what several libraries train; others put
    advantages on the last tokens, tool replies included.
    """
    _check.choice("split", split, ("raise", "allow"))
    _check.require(isinstance(trajectory, Trajectory), "trajectory", trajectory, "an rlkit Trajectory", error=DataError)
    taken = {"tokens", "mask", "inputs", "temperature", "truncated"} & inputs.keys()
    if taken:
        raise DataError(f"datums: {min(taken)!r} comes from the trajectory and cannot be given")
    if advantages is not None:
        inputs["advantages"] = advantages
    turns = trajectory.turns
    weighted = any(turn.weight != 1.0 for turn in turns)
    if weighted:
        inputs.setdefault("weights", 1.0)
    forms = {name: _per_token(name, value, turns) for name, value in inputs.items()}
    if weighted:
        forms["weights"] = _times(forms["weights"], turns)
    runs = _runs(turns)
    if len(runs) > 1 and split == "raise":
        raise DataError(
            f"datums: turn {runs[1][0]} {_difference(turns, runs[1][0])}, so this trajectory needs"
            f' {len(runs)} datums, and losses on sequences would see parts; split="allow" accepts that'
        )
    return [_merged([turns[i] for i in run], run, forms) for run in runs]


def _runs(turns: Sequence[Turn]) -> list[list[int]]:
    """Return indices of turns, cut where one cannot share a datum with the one before; each run ends with a token."""
    runs: list[list[int]] = []
    for i, turn in enumerate(turns):
        if i and _continues(turns[i - 1], turn):
            runs[-1].append(i)
        else:
            runs.append([i])
    for run in runs:
        while run and not turns[run[-1]].tokens.size:
            run.pop()
    return [run for run in runs if run]


def _continues(before: Turn, turn: Turn) -> bool:
    drawn_alike = (
        turn.sample.temperature == before.sample.temperature and turn.sample.reshapes == before.sample.reshapes
    )
    return drawn_alike and _same_tokens(before, turn)


def _same_tokens(before: Turn, turn: Turn) -> bool:
    """Return whether the turn's prompt begins with the prompt and the action of the one before."""
    p, n = before.prompt.size, before.tokens.size
    return (
        turn.prompt.size >= p + n
        and np.array_equal(turn.prompt[:p], before.prompt)
        and np.array_equal(turn.prompt[p : p + n], before.tokens)
    )


def _difference(turns: Sequence[Turn], index: int) -> str:
    """Return for a message why a turn cannot share a datum with the one before it."""
    before, turn = turns[index - 1], turns[index]
    if not _same_tokens(before, turn):
        return "does not continue the tokens of the turn before it"
    if turn.sample.temperature != before.sample.temperature:
        how = f"temperature {turn.sample.temperature:g}, the turn before it at {before.sample.temperature:g}"
        return f"was drawn at {how}"
    names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    pairs = [(name, getattr(turn.sample, name), getattr(before.sample, name)) for name in names]
    what = ", ".join(f"{name} {value:g} (before: {other:g})" for name, value, other in pairs if value != other)
    return f"was drawn with {what}"


def _merged(turns: Sequence[Turn], run: Sequence[int], forms: Mapping[str, np.ndarray | list[np.ndarray]]) -> Datum:
    last = turns[-1]
    tokens = np.concatenate([last.prompt, last.tokens])
    mask = np.zeros(tokens.size, bool)
    for turn in turns:
        mask[turn.prompt.size : turn.prompt.size + turn.tokens.size] = True
    inputs: dict[str, np.ndarray] = {}
    for name, parts in forms.items():
        inputs[name] = np.concatenate([parts[i] for i in run]) if isinstance(parts, list) else parts
    truncated = last.sample.reshapes and "sampling_logprobs" not in inputs
    inputs.setdefault("sampling_logprobs", np.concatenate([turn.logprobs for turn in turns]))
    versions = np.concatenate([turn.sample.token_versions for turn in turns])
    if (versions != versions[0]).any():
        inputs.setdefault("versions", versions)
    return Datum(tokens, mask, inputs, temperature=last.sample.temperature, truncated=truncated)


def _tokens_of_turns(where: str, values: Sequence[object] | np.ndarray, turns: Sequence[Turn]) -> list[np.ndarray]:
    return [_tokens_of(f"{where}[{i}]", x, turn) for i, (x, turn) in enumerate(zip(values, turns, strict=True))]


def _per_token(name: str, value: object, turns: Sequence[Turn]) -> np.ndarray | list[np.ndarray]:
    """Return a number as a rank-0 array; everything else as one array [n_i] or [n_i, K] per turn."""
    where = f"datums({name})"
    count = len(turns)
    expected = f"a number, [{count}] (one per turn), or {count} arrays (one entry per action token)"
    _check.require(not isinstance(value, (str, bytes, Mapping)), where, value, expected, error=DataError)
    if isinstance(value, (list, tuple)) and any(isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) for x in value):
        if len(value) != count:
            raise DataError(where, f"has {len(value)} arrays", f"{count}", "one per turn")
        return _tokens_of_turns(where, value, turns)
    array = _check.as_array(where, value, expected)
    if array.ndim >= 2 and array.shape[0] == count:
        return _tokens_of_turns(where, array, turns)
    if array.ndim == 1 and array.size == count:
        _finite(where, array)
        return [np.full(turn.tokens.size, x) for x, turn in zip(array, turns, strict=True)]
    if array.ndim:
        hint = "split a flat array of tokens with trajectory.per_turn(x)"
        raise DataError(where, f"has shape {array.shape}", expected, hint)
    _finite(where, array)
    return [np.full(turn.tokens.size, array) for turn in turns] if name == "advantages" else array


def _times(weights: np.ndarray | list[np.ndarray], turns: Sequence[Turn]) -> list[np.ndarray]:
    """Return the weights, one for all or one array [n_i] per turn, times those of the turns."""
    parts = weights if isinstance(weights, list) else [np.full(turn.tokens.size, weights) for turn in turns]
    return [part * turn.weight for part, turn in zip(parts, turns, strict=True)]


def _tokens_of(where: str, value: object, turn: Turn) -> np.ndarray:
    array = _check.as_array(where, value, f"[{turn.tokens.size}]")
    if array.ndim not in (1, 2) or array.shape[0] != turn.tokens.size:
        what, expected = f"has shape {array.shape}", f"({turn.tokens.size},)"
        raise DataError(where, what, expected, "one entry per token of this turn's action")
    _finite(where, array)
    return array


def _finite(where: str, array: np.ndarray) -> None:
    bad = np.argwhere(~np.isfinite(array))
    if bad.size or (array.ndim == 0 and not np.isfinite(array)):
        index = "".join(f"[{i}]" for i in bad[0])
        raise DataError(where + index, f"is {array[tuple(bad[0])]}", "a finite number")
