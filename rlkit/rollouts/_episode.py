"""One episode: an environment and a sampler in turn, within limits; what is a fault, and what a limit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sysconfig
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np

from rlkit._runtime import PACKAGE
from rlkit.envs.calling import CallLimit, GuardedEnv, call
from rlkit.envs.protocol import Observation, StepResult, Task
from rlkit.errors import DataError, EnvTimeout
from rlkit.rollouts._counters import Counters, numeric
from rlkit.rollouts._plan import Plan, env_seed, pauses, sampling_seed
from rlkit.rollouts._requests import FirstTurns, Requests, RolloutFailed, retry
from rlkit.trajectory import Failure, Trajectory, Turn
from rlkit.types import Sample, SamplingParams

if TYPE_CHECKING:
    from rlkit.chat import Chat, Conversation
    from rlkit.rollouts._agent_episode import Agents

__all__ = ["Episode", "Fault", "Shared", "describe_error", "find_place", "require_reward"]

Messages: TypeAlias = tuple[Mapping[str, object], ...]
_log = logging.getLogger(__name__)
SHORT = 500  # characters of a message that are kept
LONGEST = 1_000_000  # characters or tokens of one observation; beyond, the episode has failed
_LACKING = {"context": ("context", "room in the context"), "deadline": ("timeout", "time")}  # kind of failure, text


class Fault(Exception):
    """Something that is not the policy's doing; ends an attempt."""

    def __init__(self, where: str, error: Exception, *, kind: str | None = None) -> None:
        super().__init__(where, error)
        self.where = where
        self.error = error
        self.kind = type(error).__name__ if kind is None else kind


class Deadline(Exception):
    """The episode's time is over."""


@attrs.define(eq=False)
class Shared:
    """What all episodes of a rollout share.

    Attributes:
        computing: limits the calls of the sampler and the chat.
        playing: limits those of environments.
        agents: plays harnesses; made for the first of them.
    """

    plan: Plan
    step: int
    chat: Chat
    requests: Requests
    counters: Counters
    computing: CallLimit
    playing: CallLimit
    agents: Agents | None = None

    def find_agents(self) -> Agents:
        """Return what plays harnesses."""
        if self.agents is None:
            from rlkit.rollouts._agent_episode import Agents

            self.agents = Agents(self)
        return self.agents


@attrs.define(eq=False)
class Episode:
    """One member of a group, whose seeds come from its place in the step; ``play`` gives its trajectory or failure.

    Attributes:
        shared: with the other episodes of the rollout.
        task: of the group.
        plan: the rollout's, with the task's settings.
        seed: what the environment is given.
        draws: the seeds of sampling begin with these: plan's seed, step, group and member.
        turns: so far, in this attempt.
        error: what it failed of.
    """

    shared: Shared
    task: Task
    plan: Plan
    _group: int
    _member: int
    _first_turns: FirstTurns | None
    seed: int = attrs.field(init=False)
    draws: tuple[int, int, int, int] = attrs.field(init=False)
    pauses: np.random.Generator = attrs.field(init=False)
    turns: list[Turn] = attrs.field(factory=list, init=False)
    error: Exception | None = attrs.field(default=None, init=False)
    _ends: float = attrs.field(default=0.0, init=False)
    _answer: dict[str, str | float] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.draws = (self.plan.seed, self.shared.step, self._group, self._member)
        self.seed = env_seed(*self.draws[:3]) if self.task.seed is None else self.task.seed
        self.pauses = pauses(*self.draws)

    async def play(self) -> Trajectory | Failure:
        """Play from the start until an attempt succeeds or none is left; the clock starts here.

        Raises:
            RolloutFailed: the sampler cannot be used, or the executor cannot run this; no matter of this episode alone.
        """
        self._ends = time.monotonic() + self.plan.deadline
        try:
            trajectory = await retry(self._attempt, _read_cause, self.plan, self.pauses, self.time_left)
        except Fault as fault:
            self.error = fault.error
            text = describe_error(fault.error)
            return Failure(self.task.name, fault.kind, text, fault.where, len(self.turns), self._member)
        return trajectory if self.task.score is not None else require_reward(trajectory, self._member)

    def time_left(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.0, self._ends - time.monotonic())

    def count(self, name: str, number: float = 1) -> None:
        """Count something of its environment."""
        self.shared.counters.add(f"env/{self.task.name}/{name}", number)

    async def _attempt(self, number: int) -> Trajectory:
        self.count("retried", int(number > 1))
        self.turns = []
        self._answer = {}
        async with self._within("make"):
            grace = self.plan.close_timeout / 2
            timeout = self._call_timeout()
            env = await GuardedEnv.open(self.task, timeout=timeout, max_chars=LONGEST, scored=True, grace=grace)
        try:
            playing = self.shared.find_agents().play(self, env) if env.is_harness else self._converse(env)
            ended, messages = await playing
        finally:
            self.shared.counters.add("time/env", env.seconds)
            await self._close(env)
        return Trajectory(
            self.turns,
            terminated=ended == "terminated",
            truncated=ended != "terminated",
            ended=ended,
            env=self.task.name,
            index=self.task.index,
            seed=self.seed,
            reduction=self.plan.reduction,
            nonterminal_reward=self.plan.nonterminal_reward,
            nonterminal_override=self.plan.nonterminal_override,
            tags=self._answer | dict(self.plan.tags),
            messages=messages,
        )

    async def _converse(self, env: GuardedEnv) -> tuple[str, Messages]:
        """Play until the end; return why it ended, and what was said."""
        async with self._within("reset"):
            observation = await env.reset(self.seed, timeout=self._call_timeout())
            tools = env.tools
        async with self._within("chat"):
            start = self.shared.chat.start
            conversation = await call(start, observation, tools, timeout=self.time_left(), where="chat")
        last: Observation = ""
        try:
            while True:
                ended, params = self._next_turn_params(conversation.prompt)
                if params is None:
                    break
                ended, last = await self._take_turn(env, conversation, params, tools)
                if ended:
                    break
        except Deadline:
            ended = "deadline"
        said = tuple(dict(message) for message in getattr(conversation, "messages", ()))
        return ended, (*said, *_read_messages(last))

    async def _take_turn(
        self, env: GuardedEnv, conversation: Conversation, params: SamplingParams, tools: Sequence[dict[str, object]]
    ) -> tuple[str, Observation]:
        """Sample an action and play it; return why the episode ended, "" if it did not, and its last observation."""
        prompt = conversation.prompt
        sample = await self._sample(prompt, params)
        async with self._within("chat"):
            read = functools.partial(self.shared.chat.action, prompt=prompt, tools=tools)
            action = await call(read, sample.tokens, sample.stop_reason, timeout=self.time_left(), where="chat")
        async with self._within("step"):
            result = await env.step(action, timeout=self._call_timeout())
        self.turns.append(Turn(sample, result.reward or 0.0, numeric(result.info), rewards=result.rewards))
        self.remember_answer(result)
        ended = "terminated" if result.terminated else "truncated" if result.truncated else self._reached_limit()
        if ended:
            async with self._within("chat"):
                conversation.add(action, None)
            return ended, result.observation
        async with self._within("chat"):
            await call(conversation.add, action, result.observation, timeout=self.time_left(), where="chat")
        self.count("rewritten", int(not conversation.extends))
        return "", ""

    def remember_answer(self, result: StepResult) -> None:
        """Keep what would have been right, for the logs."""
        if isinstance(answer := result.info.get("answer"), (str, int, float)):
            self._answer = {"answer": answer[:SHORT] if isinstance(answer, str) else answer}

    @contextlib.asynccontextmanager
    async def _within(self, where: str) -> AsyncIterator[None]:
        """Limit a call; make an environment's or a chat's error a fault, and the end of time a truncation.

        Time that is over before there was one whole turn leaves nothing to keep: that is a fault as well.
        """
        limit = self.shared.computing if where == "chat" else self.shared.playing
        try:
            async with limit.enter():
                yield
        except EnvTimeout as error:
            if self.turns and self.time_left() == 0.0:
                raise Deadline from error
            raise Fault(where, error, kind="timeout") from error
        except RolloutFailed:
            raise
        except Exception as error:
            raise Fault(where, error) from error

    def _call_timeout(self) -> float:
        """Return the seconds that a call of the environment may take."""
        limit = self.plan.call_timeout
        return min(self.plan.deadline / 2 if limit is None else limit, self.time_left())

    def _reached_limit(self) -> str:
        """Return the limit that has been reached after a turn, "" for none."""
        if self.plan.max_turns is not None and len(self.turns) >= self.plan.max_turns:
            return "max_turns"
        if self.plan.max_total_tokens is not None and self._token_count() >= self.plan.max_total_tokens:
            return "max_total_tokens"
        return ""

    def _token_count(self) -> int:
        return sum(turn.tokens.size for turn in self.turns)

    def _next_turn_params(self, prompt: np.ndarray) -> tuple[str, SamplingParams | None]:
        """Return how the next turn is sampled; None, and the limit's name, where there is no room for one."""
        context = self.shared.requests.sampler.max_length
        room = min(context, self.plan.max_length or context) - int(prompt.size)
        ended = "context" if room < 1 else "deadline" if self.time_left() == 0.0 else ""
        if ended and not self.turns:  # nothing to keep, and not the policy's doing
            kind, lacking = _LACKING[ended]
            what = f"the first prompt, of {prompt.size} tokens, leaves no {lacking}"
            raise Fault("chat", DataError(f"rollout: {what}"), kind=kind)
        if ended:
            return ended, None
        params = self.plan.turn_params
        most = min(room, params.max_tokens)
        if self.plan.max_total_tokens is not None:
            most = min(most, self.plan.max_total_tokens - self._token_count())
        return "", self.shared.chat.params(attrs.evolve(params, max_tokens=most))

    async def _sample(self, prompt: np.ndarray, params: SamplingParams) -> Sample:
        began, requests = time.monotonic(), self.shared.requests
        try:
            async with asyncio.timeout(self.time_left()):
                sample = None
                if self._first_turns is not None and not self.turns:
                    sample = await self._first_turns.sample(prompt, params, self._member, self.time_left)
                if sample is None:
                    options = {"n": 1, "seed": sampling_seed(*self.draws, len(self.turns))}
                    (sample,) = await requests.sample(
                        prompt, params, **options, pauses=self.pauses, time_left=self.time_left
                    )
        except TimeoutError as error:
            requests.check_alive(began, self.plan.deadline)
            if self.turns:
                raise Deadline from error
            raise Fault("sampler", error, kind="timeout") from error
        except DataError as error:
            raise Fault("sampler", error) from error
        finally:
            self.shared.counters.add("time/sampler", time.monotonic() - began)
        return sample

    async def _close(self, env: GuardedEnv) -> None:
        """Close it even if the waiting is cancelled meanwhile; warn of the first that may have left something open."""
        began, timeout = time.monotonic(), self.plan.close_timeout
        try:
            problem = await env.close(timeout=timeout)
        except asyncio.CancelledError:
            await env.close(timeout=timeout)  # which has begun, and is waited for
            raise
        self.shared.counters.add("time/close", time.monotonic() - began)
        name = f"env/{self.task.name}/close_failed"
        if problem is not None and not self.shared.counters.sums[name]:
            kind, text = type(problem).__name__, describe_error(problem)
            text = f"environment {self.task.name!r}: could not be closed: {kind}: {text}"
            _log.warning("%s; %s counts such environments", text[:SHORT], name)
        self.count("close_failed", int(problem is not None))


def require_reward(trajectory: Trajectory, member: int) -> Trajectory | Failure:
    """Return the trajectory, or the failure that it is where no reward was given in all of it.

    The worth of such an episode is unknown; 0 would be made up.
    """
    cut = trajectory.nonterminal_override is not None and not trajectory.terminated
    if trajectory.all_rewards.size or cut:
        return trajectory
    text = f"environment {trajectory.env!r}: returned no reward in the whole episode (only None); expected one"
    return Failure(trajectory.env, "no_reward", text, "step", len(trajectory.turns), member)


def _read_cause(error: Exception) -> Exception | None:
    """Return why an attempt failed that may be repeated."""
    return error.error if isinstance(error, Fault) else None


def _read_messages(observation: Observation) -> Messages:
    """Return what the environment said after the last action, for people."""
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},) if observation else ()
    return () if isinstance(observation, np.ndarray) else tuple(observation)


def describe_error(error: BaseException) -> str:
    """Return the error's text with its notes, which say whose it is, shortened; and its place in the user's code."""
    try:
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])[:SHORT]
    except Exception as failure:  # noqa: BLE001  # whatever its own class does there
        text = f"{type(error).__name__}, whose text cannot be had: {type(failure).__name__}"
    where = find_place(error)
    return f"{text}; {where}" if where else text


def find_place(error: BaseException) -> str:
    """Return "at FILE:LINE in FUNCTION" of the innermost frame of the user's; else of a package; else "".

    An error of rlkit's own that was made of another is where that one was.
    """
    cause: BaseException | None = error
    packaged = ""
    for _ in range(8):
        if cause is None:
            break
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            owner = _find_owner(frame.filename)
            if owner == "user":
                return f"at {_shorten(frame.filename)}:{frame.lineno} in {frame.name}"
            if owner == "package" and not packaged:
                packaged = f"at {_shorten(frame.filename)}:{frame.lineno} in {frame.name}"
        cause = cause.__cause__
    return packaged


@functools.lru_cache(maxsize=1024)
def _find_owner(file: str) -> str:
    """Return whose code a file is: "rlkit", "python", "package" or "user"."""
    if file.startswith(("<frozen", "<attrs")):
        return "python"
    if file.startswith(str(PACKAGE) + os.sep):
        return "rlkit"
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        return "package"
    names = ("stdlib", "platstdlib")
    return "python" if file.startswith(tuple(sysconfig.get_path(name) + os.sep for name in names)) else "user"


def _shorten(file: str) -> str:
    """Return a path as its user knows it: relative to the working directory, or to the home."""
    path = Path(file)
    for folder, before in ((Path.cwd, Path()), (Path.home, Path("~"))):
        try:
            return str(before / path.relative_to(folder()))
        except (ValueError, OSError, RuntimeError):  # not within it, or there is none
            continue
    return file
