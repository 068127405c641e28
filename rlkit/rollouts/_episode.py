"""One episode: an environment and a sampler in turn, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

from rlkit.envs.calling import Guarded, call, scores
from rlkit.envs.protocol import Observation, StepResult, Task, TaskSettings
from rlkit.errors import DataError, EnvTimeout
from rlkit.rollouts._asking import Asker, Counters, Lanes, SamplerFailed, Start, attempts, numeric
from rlkit.rollouts._plan import (
    SHORT,
    CannotGoOn,
    Deadline,
    Fault,
    Plan,
    described,
    env_seed,
    pauses,
    sampling_seed,
)
from rlkit.trajectory import Failure, Trajectory, Turn
from rlkit.types import Sample, SamplingParams

if TYPE_CHECKING:
    from rlkit.chat import Chat, Conversation

__all__ = ["HARNESS_PLAYER", "Episode", "HarnessPlayer", "Harnessed", "Played", "Shared", "rewarded", "scored"]

_log = logging.getLogger(__name__)
LONGEST = 1_000_000  # characters or tokens of one observation; beyond, the episode has failed
_KINDS = {"context": "context", "deadline": "timeout"}
_LEFT = {"context": "room in the context", "deadline": "time"}
HARNESS_PLAYER = "rlkit.rollouts._agent_episode:GatewayPlayer"  # imported for the first harness of a rollout


@attrs.frozen(eq=False)
class Played:
    """The result of an episode of a harness.

    Attributes:
        turns: those that count, branch after branch; the last one has the reward.
        ended: why it ended.
        messages: what was said in the branch that ended last.
        result: what the harness said of the episode.
    """

    turns: Sequence[Turn]
    ended: str
    messages: Sequence[Mapping[str, object]]
    result: StepResult


@attrs.frozen(eq=False)
class Harnessed:
    """An episode that a harness is to drive.

    Attributes:
        env: the harness.
        settings: how it is played.
        seed: what the harness is given.
        draws: the seed of sampling.
        pauses: between attempts to sample.
        left: gives the seconds until the deadline.
        deadline: seconds of the whole episode.
    """

    env: Guarded
    settings: TaskSettings
    seed: int
    draws: int
    pauses: np.random.Generator
    left: Callable[[], float]
    deadline: float


class HarnessPlayer(Protocol):
    """Plays the episodes of environments that drive themselves; one for a rollout."""

    async def play(self, given: Harnessed) -> Played:
        """Play one episode.

        Raises:
            Fault: the harness failed, or did not ask the policy.
            SamplerFailed: the sampler cannot be used.
        """

    async def close(self) -> None:
        """End what is left of its episodes."""


@attrs.frozen
class Shared:
    """What all episodes of a rollout share."""

    plan: Plan
    step: int
    chat: Chat
    asker: Asker
    counters: Counters
    find_player: Callable[[], HarnessPlayer]  # imports it for the first harness
    computing: Lanes  # for the sampler's and the chat's calls
    playing: Lanes  # for those of environments


@attrs.define(eq=False, slots=False)
class Episode:
    """One member of a group, whose seeds come from its place in the step; ``play`` gives its trajectory or failure."""

    _shared: Shared
    _task: Task
    _settings: TaskSettings
    _group: int
    _member: int
    _start: Start | None
    _turns: list[Turn] = attrs.field(factory=list, init=False)
    _ends: float = attrs.field(default=0.0, init=False)
    _answer: dict[str, str | float] = attrs.field(factory=dict, init=False)
    error: Exception | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        plan = self._shared.plan
        where = (plan.seed, self._shared.step, self._group)
        self._seed = env_seed(*where) if self._task.seed is None else self._task.seed
        self._pauses = pauses(*where, self._member)
        self._deadline: float = self._settings.deadline or plan.deadline

    async def play(self) -> Trajectory | Failure:
        """Play from the start until an attempt succeeds or none is left; the clock starts here.

        Raises:
            CannotGoOn: the sampler cannot be used, or the executor cannot run this; no matter of this episode alone.
        """
        self._ends = time.monotonic() + self._deadline
        trajectory: Trajectory | None = None
        try:
            async for attempt in attempts(self._shared.plan, self._listed, self._pauses, self._left):
                with attempt:
                    self._count("retried", int(attempt.num > 1))
                    trajectory = await self._attempt()
        except Fault as fault:
            self.error = fault.error
            text = described(fault.error)
            return Failure(self._task.name, fault.kind, text, fault.where, len(self._turns), self._member)
        if trajectory is None:  # pragma: no cover  # the last attempt returns or raises
            raise AssertionError
        return trajectory if self._task.score is not None else rewarded(trajectory, self._member)

    def _listed(self, error: Exception) -> bool:
        return isinstance(error, Fault) and isinstance(error.error, self._shared.plan.retry)

    def _left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def _count(self, name: str, number: float = 1) -> None:
        self._shared.counters.add(f"env/{self._task.name}/{name}", number)

    async def _attempt(self) -> Trajectory:
        plan = self._shared.plan
        self._turns = []
        self._answer = {}
        async with self._within("make"):
            grace = plan.close_timeout / 2
            env = await Guarded.opened(self._task, timeout=self._call(), max_chars=LONGEST, scored=True, grace=grace)
        try:
            ended, messages = await (self._driven(env) if env.plays else self._conversation(env))
        finally:
            self._shared.counters.add("time/env", env.seconds)
            began = time.monotonic()
            problem = await _closed(env, plan.close_timeout)
            self._shared.counters.add("time/close", time.monotonic() - began)
            if problem is not None:
                self._say_once(problem)
            self._count("close_failed", int(problem is not None))
        return self._trajectory(ended, messages)

    def _say_once(self, problem: Exception) -> None:
        """Warn that an environment could not be closed, and may have left something open; later ones are counted."""
        name = f"env/{self._task.name}/close_failed"
        if not self._shared.counters.sums[name]:
            text = f"environment {self._task.name!r}: could not be closed: {type(problem).__name__}: {problem}"
            _log.warning("%s; %s counts such environments", text[:SHORT], name)

    async def _driven(self, env: Guarded) -> tuple[str, tuple[Mapping[str, object], ...]]:
        """Run a harness until the end; return why it ended, and what was said."""
        shared = self._shared
        draws = sampling_seed(shared.plan.seed, shared.step, self._group, self._member, 0)
        given = Harnessed(env, self._settings, self._seed, draws, self._pauses, self._left, self._deadline)
        played = await shared.find_player().play(given)
        self._turns = list(played.turns)
        self._remember(played.result)
        return played.ended, tuple(played.messages)

    async def _conversation(self, env: Guarded) -> tuple[str, tuple[Mapping[str, object], ...]]:
        """Play until the end; return why it ended, and what was said."""
        chat = self._shared.chat
        conversation: Conversation | None = None
        try:
            async with self._within("reset"):
                observation = await env.reset(self._seed, timeout=self._call())
                tools = env.tools
            async with self._within("chat"):
                conversation = await call(chat.start, observation, tools, timeout=self._left(), where="chat")
            while True:
                prompt = conversation.prompt
                ended, params = self._room(prompt)
                if params is None and not self._turns:  # nothing to keep, and not the policy's doing
                    what = f"the first prompt, of {prompt.size} tokens, leaves no {_LEFT[ended]}"
                    raise Fault("chat", DataError(f"rollout: {what}"), kind=_KINDS[ended])
                if params is None:
                    break
                sample = await self._sampled(prompt, params)
                async with self._within("chat"):
                    read = functools.partial(chat.action, prompt=prompt, tools=tools)
                    action = await call(read, sample.tokens, sample.stop_reason, timeout=self._left(), where="chat")
                async with self._within("step"):
                    result = await env.step(action, timeout=self._call())
                turn = Turn(sample, result.reward or 0.0, numeric(result.info), rewards=result.rewards)
                self._turns.append(turn)
                self._remember(result)
                ended = "terminated" if result.terminated else "truncated" if result.truncated else self._over()
                if ended:
                    async with self._within("chat"):
                        conversation.add(action, None)
                    return ended, (*_messages(conversation), *_last(result.observation))
                async with self._within("chat"):
                    await call(conversation.add, action, result.observation, timeout=self._left(), where="chat")
                self._count("rewritten", int(not conversation.extends))
        except Deadline:
            ended = "deadline"
        return ended, _messages(conversation)

    def _remember(self, result: StepResult) -> None:
        """Keep what would have been right, for the logs."""
        if isinstance(answer := result.info.get("answer"), (str, int, float)):
            self._answer = {"answer": answer[:SHORT] if isinstance(answer, str) else answer}

    @contextlib.asynccontextmanager
    async def _within(self, where: str) -> AsyncIterator[None]:
        """Enter a lane for a call; make an environment's or a chat's error a fault, and the end of time a truncation.

        Time that is over before there was one whole turn leaves nothing to keep: that is a fault as well.
        """
        lanes = self._shared.computing if where == "chat" else self._shared.playing
        try:
            async with lanes.lane():
                yield
        except EnvTimeout as error:
            over = self._left() == 0.0
            if over and self._turns:
                raise Deadline from error
            raise Fault(where, error, kind="timeout") from error
        except CannotGoOn:
            raise
        except Exception as error:
            raise Fault(where, error) from error

    def _call(self) -> float:
        """Return the seconds that a call of the environment may take."""
        limit = self._shared.plan.call_timeout
        return min(self._deadline / 2 if limit is None else limit, self._left())

    def _over(self) -> str:
        """Return the limit that has been reached after a turn, "" for none."""
        settings = self._settings
        if settings.max_turns is not None and len(self._turns) >= settings.max_turns:
            return "max_turns"
        if settings.max_total_tokens is not None and self._tokens() >= settings.max_total_tokens:
            return "max_total_tokens"
        return ""

    def _tokens(self) -> int:
        return sum(turn.tokens.size for turn in self._turns)

    def _room(self, prompt: np.ndarray) -> tuple[str, SamplingParams | None]:
        """Return how the next turn is sampled; None, and the limit's name, where there is no room for one."""
        plan, settings = self._shared.plan, self._settings
        context = self._shared.asker.sampler.max_length
        room = min(context, plan.max_length or context) - int(prompt.size)
        if room < 1:
            return "context", None
        if self._left() == 0.0:
            return "deadline", None
        most = min(room, settings.max_tokens or plan.params.max_tokens)
        if settings.max_total_tokens is not None:
            most = min(most, settings.max_total_tokens - self._tokens())
        temperature = plan.params.temperature if settings.temperature is None else settings.temperature
        params = attrs.evolve(plan.params, max_tokens=most, temperature=temperature)
        return "", self._shared.chat.params(params)

    async def _sampled(self, prompt: np.ndarray, params: SamplingParams) -> Sample:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left()):
                sample = None
                if self._start is not None and not self._turns:
                    sample = await self._start.sample(prompt, params, self._member, self._left)
                if sample is None:
                    where = (self._shared.plan.seed, self._shared.step, self._group, self._member, len(self._turns))
                    (sample,) = await self._shared.asker.sample(
                        prompt, params, n=1, seed=sampling_seed(*where), pauses=self._pauses, left=self._left
                    )
        except TimeoutError as error:
            dead = self._shared.asker.dead(began, self._deadline)
            if dead is not None:
                raise SamplerFailed(dead) from error
            if self._turns:
                raise Deadline from error
            raise Fault("sampler", error, kind="timeout") from error
        except DataError as error:
            raise Fault("sampler", error) from error
        finally:
            self._shared.counters.add("time/sampler", time.monotonic() - began)
        return sample

    def _trajectory(self, ended: str, messages: tuple[Mapping[str, object], ...]) -> Trajectory:
        settings = self._settings
        return Trajectory(
            self._turns,
            terminated=ended == "terminated",
            truncated=ended != "terminated",
            ended=ended,
            env=self._task.name,
            index=self._task.index,
            seed=self._seed,
            reduction=settings.reduction or "sum",
            nonterminal_reward=settings.nonterminal_reward,
            nonterminal_override=settings.nonterminal_override,
            tags=self._answer | dict(self._shared.plan.tags),
            messages=messages,
        )


def rewarded(trajectory: Trajectory, member: int) -> Trajectory | Failure:
    """Return the trajectory, or the failure that it is where no reward was given in all of it.

    The worth of such an episode is unknown; 0 would be made up.
    """
    cut = trajectory.nonterminal_override is not None and not trajectory.terminated
    if trajectory.all_rewards.size or cut:
        return trajectory
    text = f"environment {trajectory.env!r}: returned no reward in the whole episode (only None); expected one"
    return Failure(trajectory.env, "no_reward", text, "step", len(trajectory.turns), member)


async def scored(task: Task, members: Mapping[int, Trajectory], chat: Chat, *, timeout: float) -> dict[int, Trajectory]:
    """Return the trajectories, with what ``task.score`` gives for their last actions added to their last rewards.

    Raises:
        EnvError: the scores are not one finite number per trajectory.
        EnvTimeout: they did not come within ``timeout`` seconds.
        Exception: whatever the function raised.
    """
    last = [trajectory.turns[-1] for trajectory in members.values()]
    reads = [functools.partial(chat.action, prompt=turn.prompt) for turn in last]
    actions = [await call(read, t.tokens, t.stop_reason, where="chat") for read, t in zip(reads, last, strict=True)]
    rewards = await scores(task, actions, timeout=timeout)
    return {
        member: attrs.evolve(trajectory, turns=(*trajectory.turns[:-1], _with(turn, reward)))
        for (member, trajectory), turn, reward in zip(members.items(), last, rewards, strict=True)
    }


def _with(turn: Turn, reward: float | None) -> Turn:
    """Return the turn with a reward added to its last one, or as its only one; None adds nothing."""
    if reward is None:
        return turn
    if turn.rewards is None:
        return attrs.evolve(turn, reward=turn.reward + reward)
    last = turn.rewards[-1] if turn.rewards else 0.0
    return attrs.evolve(turn, reward=0.0, rewards=(*turn.rewards[:-1], last + reward))


async def _closed(env: Guarded, timeout: float) -> Exception | None:
    """Wait until it is closed even if the waiting is cancelled meanwhile, which is raised afterwards."""
    try:
        return await env.close(timeout=timeout)
    except asyncio.CancelledError:
        await env.close(timeout=timeout)  # which has begun, and is waited for
        raise


def _last(observation: Observation) -> tuple[Mapping[str, object], ...]:
    """Return what the environment said after the last action, for people."""
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},) if observation else ()
    return () if isinstance(observation, np.ndarray) else tuple(observation)


def _messages(conversation: object) -> tuple[Mapping[str, object], ...]:
    return tuple(dict(message) for message in getattr(conversation, "messages", ()))
