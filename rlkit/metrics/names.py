"""The standard names of metrics, and the reduction of several numbers of one name to one.

A name determines its own reduction. In this order: an ending ":sum", ":mean", ":max" or ":min", which every metric of
a loss has; the table ``NAMES``; the last word, where it is sum, max or min ("sampler/mismatch/ratio_max"). All others
are means, which are not summed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import attrs

__all__ = ["NAMES", "Name", "add", "averaged", "combine", "general", "parts", "reduction", "standard", "with_ending"]

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]
_REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "max", "min")


@attrs.frozen
class Name:
    """A standard name.

    Attributes:
        pattern: the name; ``<...>`` is a part that depends on the run, and may hold slashes where it is last.
        meaning: the meaning of the number, with its unit.
        reduction: the reduction of several of them: "sum", "mean", "max" or "min"; "word": its last word says so.
    """

    pattern: str
    meaning: str
    reduction: str = "mean"

    def matches(self, name: str) -> bool:
        """Return whether ``name`` matches this pattern.

        >>> Name("env/<name>/reward", "").matches("env/sums/reward")
        True
        """
        return re.fullmatch(_expression(self.pattern), name, re.DOTALL) is not None


@functools.cache
def _expression(pattern: str) -> str:
    pieces = [piece for piece in re.split(r"(<[^>]+>)", pattern) if piece]
    last = len(pieces) - 1
    written = [
        (".+" if i == last else "[^/]+") if piece.startswith("<") else re.escape(piece)
        for i, piece in enumerate(pieces)
    ]
    return "".join(written)


NAMES: tuple[Name, ...] = tuple(
    Name(*row)
    for row in (
        ("env/<name>/reward", "mean reward of the episodes"),
        ("env/<name>/reward/<which>", "min, max and std (n - 1) of the same", "word"),
        ("env/<name>/episodes", "finished episodes", "sum"),
        ("env/<name>/terminated", "of these, ended by the environment", "sum"),
        ("env/<name>/truncated", "of these, cut short by a limit", "sum"),
        ("env/<name>/truncated/<limit>", "by which limit", "sum"),
        ("env/<name>/cut", "turns that ended at max_tokens", "sum"),
        ("env/<name>/empty", "turns without a token", "sum"),
        ("env/<name>/turns", "mean turns of an episode"),
        ("env/<name>/tokens", "mean sampled tokens per episode"),
        ("env/<name>/tokens/<which>", "min, max and std (n - 1) of the same", "word"),
        ("env/<name>/info/<what>", "mean of what the environment said about the last step"),
        ("env/<name>/failed", "episodes that failed", "sum"),
        ("env/<name>/failed/<kind>", "by the error's class, or timeout", "sum"),
        ("env/<name>/timed_out", "failed since the environment gave no answer in time", "sum"),
        ("env/<name>/close_failed", "environments that could not be closed", "sum"),
        ("env/<name>/rewritten", "turns whose prompt did not begin with the earlier tokens", "sum"),
        ("env/<name>/unforced", "turns of agents that are not the call or the JSON that was asked for", "sum"),
        ("env/<name>/retried", "attempts beyond an episode's first", "sum"),
        ("env/<name>/refilled", "episodes played in place of failed ones", "sum"),
        ("env/<name>/abandoned", "episodes dropped because enough others were complete", "sum"),
        ("env/<name>/groups", "groups kept", "sum"),
        ("env/<name>/dropped_groups", "groups with too few episodes left", "sum"),
        ("env/<name>/mixed_groups", "groups whose members had different first prompts", "sum"),
        ("rollout/episodes", "finished episodes of all environments", "sum"),
        ("rollout/reward", "mean reward over all of them"),
        ("rollout/reward/<which>", "min, max and std (n - 1) of the same", "word"),
        ("rollout/tokens", "mean sampled tokens per episode, over all environments"),
        ("rollout/tokens/<which>", "min, max and std (n - 1) of the same", "word"),
        ("rollout/cut", "the fraction of turns that ended at max_tokens"),
        ("rollout/with_signal", "the fraction of groups, of two or more, whose rewards differ"),
        ("rollout/ended/<why>", "the fraction that was terminated, or cut by that limit"),
        ("sampler/requests", "requests to the sampler", "sum"),
        ("sampler/samples", "samples it returned", "sum"),
        ("sampler/tokens", "tokens in them", "sum"),
        ("sampler/prompt_tokens", "tokens of the prompts sent", "sum"),
        ("sampler/retried", "requests made again", "sum"),
        ("sampler/errors", "requests that failed for good", "sum"),
        ("sampler/version", "optimizer steps that the policy that sampled had taken"),
        ("sampler/lag", "rounds of training between sampling and now; in flight, the mean over tokens"),
        ("sampler/lag/max", "of the oldest token, where weights are updated in flight", "word"),
        ("sampler/mixed", "the share of turns, not of episodes, that several policies drew, likewise"),
        ("sampler/mismatch/kl", "KL of the sampler from the trainer on what the newest policy sampled, nats per token"),
        ("sampler/mismatch/<which>", "ratio_min and ratio_max of trainer / sampler over the same tokens", "word"),
        ("train/correction/<which>", "mean, min and max of the weights that correct for the sampler", "word"),
        ("train/loss", "the loss, summed over the batch", "sum"),
        ("train/grad_norm", "global norm of the gradient before clipping"),
        ("train/learning_rate", "of the optimizer's step"),
        ("train/tokens", "sampled tokens in the batch", "sum"),
        ("train/with_signal", "the fraction of trajectories whose advantages are not all 0"),
        ("train/datums", "datums in the batch", "sum"),
        (
            "train/advantage/<which>",
            "mean, min, max and std (n - 1) over datums of their tokens' mean advantage",
            "word",
        ),
        ("train/entropy", "estimate of the policy's entropy, nats per token"),
        ("train/kl_v1", "KL of the sampler from the trainer, unbiased, nats per token"),
        ("train/kl_v2", "the same, half the mean square of the log-ratio"),
        ("train/kl_k3", "the same, unbiased and never negative"),
        ("train/kl_reference", "KL of the policy from the reference, nats per token"),
        ("train/clip_fraction/low", "fraction of tokens whose ratio is below 0.8"),
        ("train/clip_fraction/high", "fraction of tokens whose ratio is above 1.2"),
        ("train/effective_sample_size", "fraction of the batch that importance weights leave, in (0, 1]"),
        ("train/ratio/<which>", "min, max, mean and std of the ratio trainer / sampler over tokens", "word"),
        ("train/<loss's own>", "other numbers that a loss reports", "word"),
        ("filter/<name>", "groups or samples that a filter dropped", "sum"),
        ("eval/mean", "mean score over the environments"),
        (
            "eval/<name>/<what>",
            "mean, low and high of the interval, success, pass@k, episodes, failed; a harness's scores",
            "word",
        ),
        ("time/step", "seconds of the whole step", "sum"),
        ("time/rollout", "of it, playing the episodes", "sum"),
        ("time/train", "of it, forward_backward and optim_step", "sum"),
        ("time/eval", "of it, evaluating", "sum"),
        ("time/checkpoint", "of it, saving", "sum"),
        ("time/env", "seconds in environments, summed over episodes that ran side by side", "sum"),
        ("time/close", "seconds of closing them, summed likewise", "sum"),
        ("time/sampler", "seconds that episodes waited for the sampler, summed likewise", "sum"),
        ("time/sampler/requests", "seconds of the sampler's requests, summed likewise", "sum"),
        ("time/<part>", "seconds of another part of the step", "sum"),
        ("upload/<what>", "trajectories sent, failed, dropped and waiting at present"),
        ("tracking/<tracker>/<what>", "calls that a tracker failed at, dropped, refused so far"),
    )
)
"""Every standard name, the particular before the general."""

_OF = "env/<name>/"
_COUNTED = "|".join(_expression(each.pattern.removeprefix(_OF)) for each in NAMES if each.pattern.startswith(_OF))
_ENVIRONMENT = re.compile(f"(env)/(.+?)/({_COUNTED})|(env)/([^/]+)/(.+)|(eval)/(.+)/([^/]+)", re.DOTALL)


def parts(name: str) -> tuple[str, str, str] | None:
    """Return ("env" or "eval", the environment, the rest) of an environment's metric; None for another.

    An environment's name may hold slashes: it is the shortest one that is followed by a standard name.

    >>> parts("env/owner/name/info/turns"), parts("eval/owner/name/pass@4"), parts("eval/mean")
    (('env', 'owner/name', 'info/turns'), ('eval', 'owner/name', 'pass@4'), None)
    """
    match = _ENVIRONMENT.fullmatch(name)
    if match is None:
        return None
    kind, environment, what = (group for group in match.groups() if group is not None)
    return kind, environment, what


def general(name: str) -> str:
    """Return the name with "*" in the place of the environment.

    >>> general("env/owner/name/reward"), general("train/loss")
    ('env/*/reward', 'train/loss')
    """
    split = parts(name)
    return name if split is None else f"{split[0]}/*/{split[2]}"


def standard(name: str) -> Name | None:
    """Return the entry of the table that ``name`` belongs to, or None.

    >>> standard("env/sums/truncated/max_turns").meaning
    'by which limit'
    >>> standard("my/own") is None
    True
    """
    name = general(name)
    return next((each for each in NAMES if each.matches(name)), None)


def reduction(name: str) -> Reduction:
    """Return the reduction of numbers of that name: over parts of a batch, environments, or steps.

    Means of steps cannot be combined without their weights: over steps the last one is used.

    >>> [reduction(x) for x in ("loss:sum", "env/a/failed", "env/a/reward/max", "train/ratio_min", "env/a/tokens/std")]
    ['sum', 'sum', 'max', 'min', 'mean']
    """
    said = name.rpartition(":")[2] if ":" in name else ""
    if said not in _REDUCTIONS:
        entry = standard(name)
        said = entry.reduction if entry is not None else "word"
        if said == "word":
            said = re.split(r"[/_:]", name)[-1]
    return said if said in _REDUCTIONS else "mean"


def combine(how: Reduction, values: Iterable[float]) -> float:
    """Combine several numbers of equal weight, at least one, into one.

    >>> [combine(how, [1.0, 2.0]) for how in ("sum", "mean", "max", "min")]
    [3.0, 1.5, 2.0, 1.0]
    """
    listed = list(values)
    if how in ("max", "min"):
        return max(listed) if how == "max" else min(listed)
    return math.fsum(listed) / (len(listed) if how == "mean" else 1)


def with_ending(name: str) -> str:
    """Return a loss's metric with the ending that says its reduction: that of its last word, else ":mean".

    >>> [with_ending(name) for name in ("count:sum", "ratio_max", "entropy")]
    ['count:sum', 'ratio_max:max', 'entropy:mean']
    """
    if name.endswith(tuple(f":{each}" for each in _REDUCTIONS)):
        return name
    said = re.split(r"[/_:]", name)[-1]
    return f"{name}:{said if said in ('max', 'min') else 'mean'}"


def add(into: dict[str, float], more: Mapping[str, float], weight: float = 1.0) -> None:
    """Put the metrics of one more part of a batch into ``into``; a mean counts ``weight`` times, see ``averaged``.

    >>> whole = {"loss:sum": 1.0, "ratio:max": 1.5}
    >>> add(whole, {"loss:sum": 2.0, "ratio:max": 1.25, "size:mean": 4.0}, 3)
    >>> whole
    {'loss:sum': 3.0, 'ratio:max': 1.5, 'size:mean': 12.0}
    """
    for name, value in more.items():
        how = reduction(name)
        number = value * weight if how == "mean" else value
        if name in into:
            number = combine("sum" if how == "mean" else how, (into[name], number))
        into[name] = number


def averaged(metrics: Mapping[str, float], weight: float) -> dict[str, float]:
    """Return the metrics that ``add`` collected, with means divided by their total weight."""
    return {name: value / weight if reduction(name) == "mean" else value for name, value in metrics.items()}
