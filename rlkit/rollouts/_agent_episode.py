"""An episode that drives itself: its harness asks, and the sampler answers, within limits."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from rlkit.backends.protocol import Sampler
from rlkit.envs.calling import call
from rlkit.envs.protocol import Credit, StepResult
from rlkit.errors import DataError, EnvError, EnvTimeout
from rlkit.rollouts._asking import Asker, Counters, SamplerFailed, numeric
from rlkit.rollouts._episode import Harnessed, Played
from rlkit.rollouts._plan import Fault, Plan
from rlkit.types import Sample, SamplingParams

if TYPE_CHECKING:
    from rlkit.chat import Chat
    from rlkit.gateway import Gateway, Session

__all__ = ["AgentEpisode", "GatewayPlayer"]


class GatewayPlayer:
    """Plays a rollout's episodes of harnesses by a gateway: opened when the first needs it, closed with the rollout."""

    def __init__(self, chat: Chat, plan: Plan, asker: Asker, counters: Counters) -> None:
        self._chat, self._plan, self._asker, self._counters = chat, plan, asker, counters
        self._lock = asyncio.Lock()
        self._gateway: Gateway | None = None

    async def gateway(self) -> Gateway:
        """Return the gateway.

        Raises:
            MissingPackageError: the extra is not installed.
        """
        async with self._lock:
            if self._gateway is None:
                self._gateway = await call(self._opened, where="gateway")
            return self._gateway

    def _opened(self) -> Gateway:
        from rlkit.gateway import Gateway

        sampler = self._asker.sampler
        if self._plan.max_length is not None and self._plan.max_length < sampler.max_length:
            sampler = cast("Sampler", _Shorter(sampler, self._plan.max_length))
        return Gateway(sampler, chat=self._chat)

    async def play(self, given: Harnessed) -> Played:
        """Play one episode; see ``AgentEpisode``."""
        episode = AgentEpisode(given, self._plan, self._asker, self._counters)
        return await episode.play(await self.gateway())

    async def close(self) -> None:
        """Close it, if it was opened; every session ends."""
        if self._gateway is not None:
            await call(self._gateway.close, where="gateway")


class _Shorter:
    """A sampler with a shorter context."""

    def __init__(self, sampler: Sampler, max_length: int) -> None:
        self._sampler = sampler
        self.max_length = max_length

    def __getattr__(self, name: str) -> object:
        return getattr(self._sampler, name)


@attrs.define(eq=False)
class AgentEpisode:
    """An episode in an environment that drives itself.

    Args:
        given: the harness, and how it is played.
        plan: of the rollout.
        asker: asked in the loop of the rollout, whatever loop the session's calls come from.
        counters: of the rollout.
    """

    given: Harnessed
    plan: Plan
    asker: Asker
    counters: Counters
    # requests under way, and since when; seconds in which there was one; and when the last such time began
    _waiting: dict[asyncio.Task[object] | None, float] = attrs.field(factory=dict, init=False)
    _waited: float = attrs.field(default=0.0, init=False)
    _since: float = attrs.field(default=0.0, init=False)
    _over: bool = attrs.field(default=False, init=False)
    _failed: SamplerFailed | None = attrs.field(default=None, init=False)
    _broken: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _loop: asyncio.AbstractEventLoop = attrs.field(factory=asyncio.get_running_loop, init=False)

    async def play(self, gateway: Gateway) -> Played:
        """Play the episode in a session of the gateway.

        Raises:
            Fault: the harness failed, or asked for nothing.
            SamplerFailed: the sampler cannot be used; the harness is ended.
        """
        from rlkit.gateway import Limits

        settings = self.given.settings
        limits = Limits(turns=settings.max_turns, tokens=settings.max_total_tokens)  # time is kept here
        session = gateway.session(params=self._params(), limits=limits, seed=self.given.draws, ask=self._ask)
        try:
            result, ended = await self._result(session)
        finally:
            self._over = True
            session.close()
            for task in list(self._waiting):
                if task is not None:
                    task.cancel()
            self.given.env.seconds = max(0.0, self.given.env.seconds - self._waited)
            for name in ("rewritten", "unforced"):
                self.counters.add(f"env/{self.given.env.name}/{name}", session.metrics[name])
        if not session.turns:
            raise self._nothing(ended)
        return await self._played(session, result, ended)

    async def _result(self, session: Session) -> tuple[StepResult, str]:
        """Return what the harness says of the episode, and why it ended."""
        playing = asyncio.ensure_future(self.given.env.play(session, self.given.seed))
        broken = asyncio.ensure_future(self._broken.wait())
        tasks = [playing, broken]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self.given.left(), return_when=asyncio.FIRST_COMPLETED)
            if self._failed is not None:
                raise self._failed
            if not done:
                return StepResult(), session.ended or self._late()
            result = playing.result()
        except (Fault, SamplerFailed):
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
        if not self._waiting:
            error = EnvTimeout(self._text(f"did not end within {self.given.deadline:g} s"))
            raise Fault("play", error, kind="timeout")
        if dead := self.asker.dead(min(self._waiting.values()), self.given.deadline):
            raise SamplerFailed(dead)
        return "deadline"

    async def _played(self, session: Session, result: StepResult, ended: str) -> Played:
        credit: Credit = getattr(self.given.env.env, "credit", "every")
        try:
            trajectory = await call(functools.partial(session.trajectory, credit=credit), where="credit")
        except Exception as error:
            raise Fault("play", error) from error
        if not trajectory.turns:
            raise Fault("play", EnvError(self._text("has no branch that its credit selects")), kind="no_turns")
        about = numeric(result.info) | {"branches": session.metrics["branches"]}
        *turns, last = (attrs.evolve(turn, rewards=()) for turn in trajectory.turns)  # none but the last has one
        last = attrs.evolve(last, reward=result.reward or 0.0, rewards=result.rewards, metrics=about)
        return Played([*turns, last], ended, trajectory.messages, result)

    def _nothing(self, ended: str) -> Fault:
        """Return the fault of an episode without a turn."""
        if ended == "context":
            return Fault("play", DataError(self._text("sent a prompt that leaves no room")), kind="context")
        if ended == "deadline":
            return Fault("sampler", EnvTimeout(self._text("got no answer in time")), kind="timeout")
        return Fault("play", EnvError(self._text("ended without calling the policy")), kind="no_turns")

    def _text(self, what: str) -> str:
        return f"environment {self.given.env.name!r}: the agent {what}"

    def _params(self) -> SamplingParams:
        params, settings = self.plan.params, self.given.settings
        temperature = params.temperature if settings.temperature is None else settings.temperature
        return attrs.evolve(params, max_tokens=settings.max_tokens or params.max_tokens, temperature=temperature)

    async def _ask(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> list[Sample]:
        """Ask the sampler, from whatever loop a request has come to."""
        from rlkit.gateway import GatewayError

        if not self._over:
            future = asyncio.run_coroutine_threadsafe(self._sampled(prompt, params, n, seed), self._loop)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # the client went away
                    raise
        raise GatewayError(429, "this session has ended", code="session_ended")

    async def _sampled(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> list[Sample]:
        task, began = asyncio.current_task(), time.monotonic()
        if not self._waiting:
            self._since = began
        self._waiting[task] = began
        pauses, left = self.given.pauses, self.given.left
        try:
            return await self.asker.sample(prompt, params, n=n, seed=seed, pauses=pauses, left=left)
        except SamplerFailed as failed:
            self._failed = self._failed or failed
            self._broken.set()
            raise
        finally:
            del self._waiting[task]
            now = time.monotonic()
            self.counters.add("time/sampler", now - began)
            self._waited += 0.0 if self._waiting else now - self._since
