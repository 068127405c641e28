"""An episode that drives itself: its harness asks, and the sampler answers, within limits."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any, NoReturn, cast

import attrs
import numpy as np

from rlkit.backends.protocol import Sampler
from rlkit.envs.calling import GuardedEnv, call
from rlkit.envs.protocol import Credit, StepResult
from rlkit.errors import DataError, EnvError, EnvTimeout
from rlkit.rollouts._counters import numeric
from rlkit.rollouts._episode import Episode, Fault, Messages, Shared
from rlkit.rollouts._plan import sampling_seed
from rlkit.rollouts._requests import RolloutFailed
from rlkit.types import Sample, SamplingParams

if TYPE_CHECKING:
    from rlkit.gateway import Gateway, Session

__all__ = ["AgentEpisode", "Agents"]


class Agents:
    """Plays a rollout's harnesses through one gateway: opened for the first of them, closed with the rollout."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lock = asyncio.Lock()
        self._gateway: Gateway | None = None

    async def play(self, episode: Episode, env: GuardedEnv) -> tuple[str, Messages]:
        """Play an episode; return why it ended, and what was said in the branch that ended last.

        Raises:
            Fault: the harness failed, or asked for nothing.
            RolloutFailed: the sampler cannot be used; the harness is ended.
            MissingPackageError: the gateway's extra is not installed.
        """
        async with self._lock:
            if self._gateway is None:
                self._gateway = await call(self._open, where="gateway")
        return await AgentEpisode(episode, env).play(self._gateway)

    def _open(self) -> Gateway:
        from rlkit.gateway import Gateway

        sampler, longest = self._shared.requests.sampler, self._shared.plan.max_length
        if longest is not None and longest < sampler.max_length:
            sampler = cast("Sampler", _Shorter(sampler, longest))
        return Gateway(sampler, chat=self._shared.chat)

    async def close(self) -> None:
        """Close the gateway, if it was opened; every session ends."""
        if self._gateway is not None:
            await call(self._gateway.close, where="gateway")


class _Shorter:
    """A sampler with a shorter context."""

    def __init__(self, sampler: Sampler, max_length: int) -> None:
        self._sampler = sampler
        self.max_length = max_length

    def __getattr__(self, name: str) -> object:
        return getattr(self._sampler, name)


def _make_future() -> asyncio.Future[NoReturn]:
    return asyncio.get_running_loop().create_future()


@attrs.define(eq=False)
class AgentEpisode:
    """An episode in a session of the gateway. Its requests are made in the rollout's loop, whichever they come from."""

    _episode: Episode
    _env: GuardedEnv
    # requests under way, and since when; seconds in which there was one; and when the last such time began
    _waiting: dict[asyncio.Task[object] | None, float] = attrs.field(factory=dict, init=False)
    _waited: float = attrs.field(default=0.0, init=False)
    _since: float = attrs.field(default=0.0, init=False)
    _over: bool = attrs.field(default=False, init=False)
    _failed: asyncio.Future[NoReturn] = attrs.field(factory=_make_future, init=False)  # gets the RolloutFailed

    async def play(self, gateway: Gateway) -> tuple[str, Messages]:
        """Play it; see ``Agents.play``."""
        from rlkit.gateway import Limits

        plan = self._episode.plan
        limits = Limits(turns=plan.max_turns, tokens=plan.max_total_tokens)  # time is kept here
        seed = sampling_seed(*self._episode.draws, 0)
        session = gateway.session(params=plan.turn_params, limits=limits, seed=seed, ask=self._ask)
        try:
            result, ended = await self._result(session)
        finally:
            self._over = True
            session.close()
            for task in list(self._waiting):
                if task is not None:
                    task.cancel()
            self._env.seconds = max(0.0, self._env.seconds - self._waited)
            for name in ("rewritten", "unforced"):
                self._episode.count(name, session.metrics[name])
        if not session.turns:
            raise self._no_turns(ended)
        return ended, await self._read_turns(session, result)

    async def _result(self, session: Session) -> tuple[StepResult, str]:
        """Return what the harness says of the episode, and why it ended."""
        playing = asyncio.ensure_future(self._env.play(session, self._episode.seed))
        tasks: list[asyncio.Future[Any]] = [playing, self._failed]
        try:
            timeout = self._episode.time_left()
            done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._failed in done:
                self._failed.result()
            if not done:
                return StepResult(), session.ended or self._late()
            result = playing.result()
        except (Fault, RolloutFailed):
            raise
        except Exception as error:
            if not session.ended and not session.cut:
                raise Fault("play", error) from error
            return StepResult(), session.ended or "max_tokens"  # it met a limit, and had no answer to that
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return result, session.ended or ("terminated" if result.terminated else "truncated")

    def _late(self) -> str:
        """Return why an episode has ended whose time is over: the policy was waited for; else the harness failed."""
        deadline = self._episode.plan.deadline
        if not self._waiting:
            raise Fault("play", EnvTimeout(self._describe(f"did not end within {deadline:g} s")), kind="timeout")
        self._episode.shared.requests.check_alive(min(self._waiting.values()), deadline)
        return "deadline"

    async def _read_turns(self, session: Session, result: StepResult) -> Messages:
        """Keep the turns that count; the last one has the reward. Return what was said in their last branch."""
        credit: Credit = getattr(self._env.env, "credit", "every")
        try:
            trajectory = await call(functools.partial(session.trajectory, credit=credit), where="credit")
        except Exception as error:
            raise Fault("play", error) from error
        if not trajectory.turns:
            raise Fault("play", EnvError(self._describe("has no branch that its credit selects")), kind="no_turns")
        about = numeric(result.info) | {"branches": session.metrics["branches"]}
        *turns, last = (attrs.evolve(turn, rewards=()) for turn in trajectory.turns)  # none but the last has one
        last = attrs.evolve(last, reward=result.reward or 0.0, rewards=result.rewards, metrics=about)
        self._episode.turns = [*turns, last]
        self._episode.remember_answer(result)
        return tuple(trajectory.messages)

    def _no_turns(self, ended: str) -> Fault:
        """Return the fault of an episode without a turn."""
        if ended == "context":
            return Fault("play", DataError(self._describe("sent a prompt that leaves no room")), kind="context")
        if ended == "deadline":
            return Fault("sampler", EnvTimeout(self._describe("got no answer in time")), kind="timeout")
        return Fault("play", EnvError(self._describe("ended without calling the policy")), kind="no_turns")

    def _describe(self, what: str) -> str:
        return f"environment {self._env.name!r}: the agent {what}"

    async def _ask(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> list[Sample]:
        """Ask the sampler, from whatever loop a request has come to."""
        from rlkit.gateway import GatewayError

        if not self._over:
            asked = self._sample(prompt, params, n, seed)
            future = asyncio.run_coroutine_threadsafe(asked, self._failed.get_loop())
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # the client went away
                    raise
        raise GatewayError(429, "this session has ended", code="session_ended")

    async def _sample(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> list[Sample]:
        task, began, shared = asyncio.current_task(), time.monotonic(), self._episode.shared
        if not self._waiting:
            self._since = began
        self._waiting[task] = began
        pauses, time_left = self._episode.pauses, self._episode.time_left
        try:
            return await shared.requests.sample(prompt, params, n=n, seed=seed, pauses=pauses, time_left=time_left)
        except RolloutFailed as failed:
            if not self._failed.done():
                self._failed.set_exception(failed)
            raise
        finally:
            del self._waiting[task]
            now = time.monotonic()
            shared.counters.add("time/sampler", now - began)
            self._waited += 0.0 if self._waiting else now - self._since
