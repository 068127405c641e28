"""How episodes are played: everything that ``rollout`` can be told, checked before any work."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rlkit import _check, _install
from rlkit._calls import answered
from rlkit.envs import TaskSettings
from rlkit.errors import ConfigError, EnvBusy
from rlkit.rollouts import executors
from rlkit.trajectory.fields import read_only
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.chat import Chat

__all__ = ["Plan"]


def _listed(value: object) -> object:
    return (value,) if isinstance(value, type) else tuple(value) if isinstance(value, list) else value


@answered
@attrs.frozen(kw_only=True)
class Plan:
    """How episodes are played.

    A task's own ``settings`` stand above what is said here.

    Args:
        n: episodes per task, >= 1: a group.
        min_n: a group that lost episodes to failures is kept from this many on, in [1, n]; None: 2, or 1 where n is.
        params: how each turn is sampled; ``params.max_tokens`` is per turn.
        chat: how observations become prompts; None: ``rlkit.chat.Chat`` with the sampler's tokenizer.
        seed: >= 0, of environments and sampling.
        max_turns: per episode, >= 1; None: as many as there is room for.
        max_total_tokens: the policy's own tokens in an episode, >= 1; None: what the context holds.
        max_length: prompt and action together, in tokens, >= 2; None: the sampler's context.
        reduction: an episode's reward from all that it got: "sum", "mean", "max", "min" or "last".
        nonterminal_reward: one more reward, after those of its turns, for an episode that did not come to an end of its
            own; None: none.
        nonterminal_override: what the reward of such an episode is instead of all that; None: it stays what it is.
        concurrency: episodes played at the same time, >= 1.
        deadline: seconds from the start of an episode, > 0. An episode that reaches it is truncated, not failed. A
            sampler's first request, which may load and merge a model, counts; closing comes on top.
        call_timeout: seconds for one call of an environment, > 0; beyond, the episode has failed. None: half of the
            deadline.
        close_timeout: seconds that closing an environment may take, > 0.
        executor: where environments run: "threads" of this process, or "ray": in worker processes of Ray's, on the
            cluster that ``ray.init`` connected to, else on this machine. Several environments share a worker.
        executor_options: of Ray: "workers", how many, >= 1 (None: as many as the CPUs suffice for); and what each is
            given: "num_cpus", >= 0 (1), "num_gpus", >= 0 (0), "memory" in bytes, which on Linux its environments cannot
            exceed, "resources" by name; "placement_group", Ray's own or its name: where they run, within what it has
            set aside.
        retry: exceptions of environments and samplers after which to try again: ``EnvBusy`` and ``ConnectionError``, of
            which ``EnvLost`` is one.
        attempts: how often in all, >= 1, after pauses that double from half a second on. An environment is made anew
            and its episode begins again, with the same seeds.
        refill: further episodes that a group may play in place of failed ones, >= 0.
        share: of all episodes, in (0, 1]: once so many have ended the rest is given up. Below 1 it prefers short
            episodes, and what is returned depends on timing.
        shared_start: the first turns of a group are sampled in one request, so that its prompt is computed once; a
            member then waits for the first turns of all.
        tags: name -> text, number or bool, given to every trajectory.
        progress: a progress bar on stderr, and lines where it is no terminal; needs rich. None: a bar where stderr is
            a terminal and rich is there.

    Raises:
        ConfigError: naming the field.
        MissingPackageError: ``executor`` is "ray", which is not installed.

    >>> Plan(n=4, max_turns=3).settings.n
    4
    """

    n: int = 8
    min_n: int | None = None
    params: SamplingParams = attrs.field(factory=SamplingParams)
    chat: Chat | None = None
    seed: int = 0
    max_turns: int | None = 16
    max_total_tokens: int | None = None
    max_length: int | None = None
    reduction: str = "sum"
    nonterminal_reward: float | None = None
    nonterminal_override: float | None = None
    concurrency: int = 128
    deadline: float = 1800.0
    call_timeout: float | None = None
    close_timeout: float = 5.0
    executor: str = "threads"
    executor_options: Mapping[str, Any] = attrs.field(factory=dict, converter=read_only)
    retry: tuple[type[Exception], ...] = attrs.field(default=(EnvBusy, ConnectionError), converter=_listed)
    attempts: int = 3
    refill: int = 0
    share: float = 1.0
    shared_start: bool = True
    tags: Mapping[str, str | float] = attrs.field(factory=dict, converter=read_only)
    progress: bool | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("n", "concurrency", "attempts"):
            _check.integer(f"Plan.{name}", getattr(self, name), low=1)
        _check.integer("Plan.seed", self.seed, low=0)
        _check.integer("Plan.refill", self.refill, low=0)
        _check.optional(_check.integer, "Plan.min_n", self.min_n, low=1, high=self.n, why="of n episodes")
        for name, low in (("max_turns", 1), ("max_total_tokens", 1), ("max_length", 2)):
            _check.optional(_check.integer, f"Plan.{name}", getattr(self, name), low=low)
        for name in ("deadline", "close_timeout", "call_timeout"):
            if name != "call_timeout" or self.call_timeout is not None:
                _check.real(f"Plan.{name}", getattr(self, name), above=0.0, why="seconds")
        _check.real("Plan.share", self.share, above=0.0, high=1.0)
        _check.flag("Plan.shared_start", self.shared_start)
        _check.optional(_check.flag, "Plan.progress", self.progress)
        _check.require(isinstance(self.params, SamplingParams), "Plan.params", self.params, "rlkit.SamplingParams(...)")
        if self.chat is not None and not all(callable(getattr(self.chat, name, None)) for name in ("start", "action")):
            raise ConfigError("Plan.chat", f"got {_check.shown(self.chat)}", "an rlkit.chat.Chat")
        tags = self.tags.items() if isinstance(self.tags, Mapping) else [("", None)]
        if not all(isinstance(name, str) and isinstance(tag, (str, bool, int, float)) for name, tag in tags):
            raise ConfigError("Plan.tags", f"got {_check.shown(self.tags)}", "names with text, numbers or bools")
        executors.check(self.executor, self.executor_options)
        self._check_retry()
        if self.progress and importlib.util.find_spec("rich") is None:
            raise ConfigError(f"Plan.progress: needs rich, which is not installed: {_install.command('rollouts')}")
        _ = self.settings  # the rest is checked there

    def _check_retry(self) -> None:
        expected = "a tuple of exception classes"
        _check.require(isinstance(self.retry, tuple), "Plan.retry", self.retry, expected)
        for i, kind in enumerate(self.retry):
            _check.require(isinstance(kind, type) and issubclass(kind, Exception), f"Plan.retry[{i}]", kind, expected)

    @property
    def settings(self) -> TaskSettings:
        """What a task may have otherwise, as a task's settings are written; ``min_n`` depends on the task's n."""
        return TaskSettings(
            n=self.n,
            temperature=self.params.temperature,
            max_tokens=self.params.max_tokens,
            max_turns=self.max_turns,
            max_total_tokens=self.max_total_tokens,
            deadline=self.deadline,
            reduction=self.reduction,  # type: ignore[arg-type]
            nonterminal_reward=self.nonterminal_reward,
            nonterminal_override=self.nonterminal_override,
        )

    def with_options(self, **options: Any) -> Plan:
        """Return a copy with these fields replaced.

        Raises:
            ConfigError: there is no such field, or as for the class.
        """
        _check.options("rollout", Plan, options, kind="Plan")
        return attrs.evolve(self, **options)
