"""What metrics are called, all over the library."""

from __future__ import annotations

import functools
import re

import attrs

__all__ = ["NAMES", "Name", "general", "parts", "standard"]


@attrs.frozen
class Name:
    """A standard name.

    Attributes:
        pattern: the name; ``<...>`` stands for a part that depends on the run, and may hold slashes where it is last.
        meaning: what the number is, with its unit.
    """

    pattern: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether ``name`` is of this pattern.

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
        ("env/<name>/reward/<which>", "min, max and std (n - 1) of the same"),
        ("env/<name>/episodes", "episodes carried through"),
        ("env/<name>/terminated", "of these, ended by the environment"),
        ("env/<name>/truncated", "of these, cut short by a limit"),
        ("env/<name>/truncated/<limit>", "by which limit"),
        ("env/<name>/cut", "turns that ended at max_tokens"),
        ("env/<name>/empty", "turns without a token"),
        ("env/<name>/turns", "mean turns of an episode"),
        ("env/<name>/tokens", "mean tokens of the policy's in an episode"),
        ("env/<name>/tokens/<which>", "min, max and std (n - 1) of the same"),
        ("env/<name>/info/<what>", "mean of what the environment said about the last step"),
        ("env/<name>/failed", "episodes that were not carried through"),
        ("env/<name>/failed/<kind>", "by the error's class, or timeout"),
        ("env/<name>/timed_out", "failed since the environment gave no answer in time"),
        ("env/<name>/close_failed", "environments that could not be closed"),
        ("env/<name>/rewritten", "turns whose prompt did not begin with what was before"),
        ("env/<name>/retried", "attempts beyond an episode's first"),
        ("env/<name>/refilled", "episodes played in place of failed ones"),
        ("env/<name>/abandoned", "episodes given up since enough others were complete"),
        ("env/<name>/groups", "groups kept"),
        ("env/<name>/dropped_groups", "groups with too few episodes left"),
        ("env/<name>/mixed_groups", "groups whose members had different first prompts"),
        ("rollout/episodes", "episodes carried through, of all environments"),
        ("rollout/reward", "mean reward over all of them"),
        ("rollout/reward/<which>", "min, max and std (n - 1) of the same"),
        ("rollout/tokens", "mean tokens of the policy's in an episode, over all of them"),
        ("rollout/tokens/<which>", "min, max and std (n - 1) of the same"),
        ("rollout/ended/<why>", "the fraction that was terminated, or cut by that limit"),
        ("sampler/requests", "requests to the sampler"),
        ("sampler/samples", "samples it returned"),
        ("sampler/tokens", "tokens in them"),
        ("sampler/prompt_tokens", "tokens of the prompts sent"),
        ("sampler/retried", "requests made again"),
        ("sampler/errors", "requests that failed for good"),
        ("sampler/version", "optimizer steps that the policy that sampled had taken"),
        ("sampler/lag", "rounds of training between sampling and now; in flight, the mean over tokens"),
        ("sampler/lag/max", "of the oldest token, where weights are updated in flight"),
        ("sampler/mixed", "the share of turns, not of episodes, that several policies drew, likewise"),
        ("sampler/mismatch/kl", "KL of the sampler from the trainer on what the newest policy sampled, nats per token"),
        ("sampler/mismatch/<which>", "ratio_min and ratio_max of trainer / sampler over the same tokens"),
        ("train/correction/<which>", "mean, min and max of the weights that correct for the sampler"),
        ("train/loss", "the loss, summed over the batch"),
        ("train/grad_norm", "global norm of the gradient before clipping"),
        ("train/learning_rate", "of the optimizer's step"),
        ("train/tokens", "tokens of the policy's in the batch"),
        ("train/datums", "datums in the batch"),
        ("train/advantage/<which>", "mean, min, max and std (n - 1) over datums of their tokens' mean advantage"),
        ("train/entropy", "estimate of the policy's entropy, nats per token"),
        ("train/kl_v1", "KL of the sampler from the trainer, unbiased, nats per token"),
        ("train/kl_v2", "the same, half the mean square of the log-ratio"),
        ("train/kl_k3", "the same, unbiased and never negative"),
        ("train/kl_reference", "KL of the policy from the reference, nats per token"),
        ("train/clip_fraction/low", "fraction of tokens whose ratio is below 0.8"),
        ("train/clip_fraction/high", "fraction of tokens whose ratio is above 1.2"),
        ("train/effective_sample_size", "fraction of the batch that importance weights leave, in (0, 1]"),
        ("train/ratio/<which>", "min, max, mean and std of the ratio trainer / sampler over tokens"),
        ("train/<loss's own>", "what a loss reports beside its value"),
        ("filter/<name>", "groups or samples that a filter dropped"),
        ("eval/mean", "mean score over the environments"),
        (
            "eval/<name>/<what>",
            "mean, low and high of the interval, success, pass@k, episodes, failed; a harness's scores",
        ),
        ("time/step", "seconds of the whole step"),
        ("time/rollout", "of it, playing the episodes"),
        ("time/train", "of it, forward_backward and optim_step"),
        ("time/eval", "of it, evaluating"),
        ("time/checkpoint", "of it, saving"),
        ("time/env", "seconds in environments, summed over episodes that ran side by side"),
        ("time/close", "seconds of closing them, summed likewise"),
        ("time/sampler", "seconds that episodes waited for the sampler, summed likewise"),
        ("time/sampler/requests", "seconds of the sampler's requests, summed likewise"),
        ("time/<part>", "seconds of another part of the step"),
        ("upload/<what>", "trajectories sent, failed, dropped, waiting"),
        ("tracking/<tracker>/<what>", "calls that a tracker failed at, dropped, refused"),
    )
)
"""Every standard name, the particular before the general."""

_OF = "env/<name>/"
_COUNTED = "|".join(_expression(each.pattern.removeprefix(_OF)) for each in NAMES if each.pattern.startswith(_OF))
_ENVIRONMENT = re.compile(f"(env)/(.+?)/({_COUNTED})|(env)/([^/]+)/(.+)|(eval)/(.+)/([^/]+)", re.DOTALL)


def parts(name: str) -> tuple[str, str, str] | None:
    """("env" or "eval", the environment, what) of an environment's metric; None of another.

    An environment's name may hold slashes: it is the shortest behind which a standard name ends.

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
