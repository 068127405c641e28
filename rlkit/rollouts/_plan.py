"""How episodes are played: everything that ``rollout`` can be told, checked before any work."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlkit import _check, _runtime
from rlkit._check import checked, read_only
from rlkit.envs.protocol import REDUCTIONS, Reduction, TaskSettings
from rlkit.errors import ConfigError, EnvBusy
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.chat import Chat
    from rlkit.rollouts._ray import Ray

__all__ = ["Plan"]

_ENV, _START, _TURN, _PAUSE = range(4)
_LIMIT = 2**31 - 2**16  # every backend takes such a seed as it is, so that one plan samples alike on all of them


def env_seed(seed: int, step: int, group: int) -> int:
    """Return what ``reset`` is given, the same for all of a group; in [0, 2^31), which every generator takes."""
    return _words(seed, _ENV, step, group) >> 33


def start_seed(seed: int, step: int, group: int) -> int:
    """Return the seed of the request that samples the first turns of a whole group; in [0, 2^31)."""
    return _words(seed, _START, step, group) % _LIMIT


def sampling_seed(seed: int, step: int, group: int, member: int, turn: int) -> int:
    """Return the seed of the request that samples one turn of one member; in [0, 2^31)."""
    return _words(seed, _TURN, step, group, member, turn) % _LIMIT


def pauses(seed: int, step: int, group: int, member: int) -> np.random.Generator:
    """Return a generator for the lengths of pauses between attempts."""
    return np.random.default_rng(_words(seed, _PAUSE, step, group, member))


def _words(seed: int, *key: int) -> int:
    """Return 64 bits; the key is spawned from the seed, so that no two places share a stream."""
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return int(state[0])


def _read_executor(value: Ray | str) -> Ray | str:
    """Return an executor, made of its name where that is given."""
    if isinstance(value, str) and value == "threads":
        return value
    from rlkit.rollouts._ray import Ray  # which imports ray when a rollout starts

    if isinstance(value, str) and value == "ray":
        text = 'Plan.executor="ray" will be removed: pass executor=rlkit.rollouts.Ray(), which takes its options'
        _runtime.warn(text, DeprecationWarning)
        return Ray()
    _check.require(isinstance(value, Ray), "Plan.executor", value, '"threads" or rlkit.rollouts.Ray(...)')
    return value


def _listed(value: object) -> object:
    return (value,) if isinstance(value, type) else tuple(value) if isinstance(value, list) else value


@attrs.frozen(kw_only=True)
class Plan(TaskSettings):
    """How episodes are played.

    A task's own ``settings`` override what a ``TaskSettings`` says here.

    Args:
        n: episodes per task, >= 1: a group.
        min_n: a group that lost episodes to failures is kept from this many on, in [1, n]; None: 2, or 1 where n is.
        params: how each turn is sampled; ``params.max_tokens`` is per turn.
        temperature, max_tokens: in place of those of ``params``; None: those.
        chat: how observations become prompts; None: ``rlkit.chat.Chat`` with the sampler's tokenizer.
        seed: >= 0, of environments and sampling.
        max_turns: per episode, >= 1; None: as many as there is room for.
        max_total_tokens: the policy's own tokens in an episode, >= 1; None: what the context holds.
        max_length: prompt and action together, in tokens, >= 2; None: the sampler's context.
        reduction: an episode's reward from all that it got: "sum", "mean", "max", "min" or "last".
        nonterminal_reward: one more reward, after those of its turns, for an episode that did not come to an end of its
            own; None: none.
        nonterminal_override: the reward of such an episode instead of all that; None: unchanged.
        concurrency: episodes played at the same time, >= 1.
        deadline: seconds from the start of an episode, > 0. An episode that reaches it is truncated, not failed. A
            sampler's first request, which may load and merge a model, counts; closing comes on top.
        call_timeout: seconds for one call of an environment, > 0; beyond, the episode has failed. None: half of the
            deadline.
        close_timeout: seconds that closing an environment may take, > 0.
        executor: where environments run: "threads" of this process, or ``rlkit.rollouts.Ray(...)``: worker processes of
            Ray's. "ray" is the older form of ``Ray()``.
        retry: exceptions of environments and samplers after which to try again: ``EnvBusy`` and ``ConnectionError``, of
            which ``EnvLost`` is one.
        attempts: how often in all, >= 1, after pauses that double from half a second on. An environment is made anew
            and its episode begins again, with the same seeds.
        share: of all episodes, in (0, 1]: once so many have ended the rest is given up. Below 1 it prefers short
            episodes, and what is returned depends on timing.
        shared_start: the first turns of a group are sampled in one request, so that its prompt is computed once; a
            member then waits for the first turns of all.
        tags: name -> text, number or bool, given to every trajectory.
        progress: a progress bar, where stderr is a terminal; needs rich. None: if rich is installed.

    Raises:
        ConfigError: naming the field.
        MissingPackageError: ``executor`` is "ray", which is not installed.

    >>> Plan(n=4, max_tokens=100).turn_params.max_tokens
    100
    """

    n: int = checked(8, _check.integer, low=1)
    max_turns: int | None = checked(16, _check.integer, none=True, low=1)
    deadline: float = checked(1800.0, _check.real, above=0.0, why="seconds")
    reduction: Reduction = checked("sum", _check.choice, options=REDUCTIONS)
    params: SamplingParams = attrs.field(factory=SamplingParams)
    chat: Chat | None = None
    seed: int = checked(0, _check.integer, low=0)
    max_length: int | None = checked(None, _check.integer, none=True, low=2)
    concurrency: int = checked(128, _check.integer, low=1)
    call_timeout: float | None = checked(None, _check.real, none=True, above=0.0, why="seconds")
    close_timeout: float = checked(5.0, _check.real, above=0.0, why="seconds")
    executor: Ray | str = attrs.field(default="threads", converter=_read_executor)
    retry: tuple[type[Exception], ...] = attrs.field(default=(EnvBusy, ConnectionError), converter=_listed)
    attempts: int = checked(3, _check.integer, low=1)
    share: float = checked(1.0, _check.real, above=0.0, high=1.0)
    shared_start: bool = checked(True, _check.flag)
    tags: Mapping[str, str | float] = attrs.field(factory=dict, converter=read_only)
    progress: bool | None = checked(None, _check.flag, none=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check.require(isinstance(self.params, SamplingParams), "Plan.params", self.params, "rlkit.SamplingParams(...)")
        if self.chat is not None and not all(callable(getattr(self.chat, name, None)) for name in ("start", "action")):
            raise ConfigError("Plan.chat", f"got {_check.describe(self.chat)}", "an rlkit.chat.Chat")
        tags = self.tags.items() if isinstance(self.tags, Mapping) else [("", None)]
        if not all(isinstance(name, str) and isinstance(tag, (str, bool, int, float)) for name, tag in tags):
            raise ConfigError("Plan.tags", f"got {_check.describe(self.tags)}", "names with text, numbers or bools")
        self._check_retry()
        if self.progress and importlib.util.find_spec("rich") is None:
            raise ConfigError(f"Plan.progress: needs rich, which is not installed: {_runtime.command('rollouts')}")

    def _check_retry(self) -> None:
        expected = "a tuple of exception classes"
        _check.require(isinstance(self.retry, tuple), "Plan.retry", self.retry, expected)
        for i, kind in enumerate(self.retry):
            _check.require(isinstance(kind, type) and issubclass(kind, Exception), f"Plan.retry[{i}]", kind, expected)

    @property
    def turn_params(self) -> SamplingParams:
        """How a turn is sampled that has room for all of its tokens."""
        temperature = self.params.temperature if self.temperature is None else self.temperature
        return attrs.evolve(self.params, temperature=temperature, max_tokens=self.max_tokens or self.params.max_tokens)

    def with_options(self, **options: Any) -> Plan:
        """Return a copy with these fields replaced.

        Raises:
            ConfigError: there is no such field, or as for the class.
        """
        _check.check_keywords("rollout", Plan, options)
        return attrs.evolve(self, **options)
