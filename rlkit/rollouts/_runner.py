"""Groups of episodes, a bounded number at a time, handed over as they are complete."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Self

import attrs

from rlkit.backends.protocol import Sampler
from rlkit.envs.calling import call
from rlkit.envs.protocol import Task, TaskSettings
from rlkit.errors import BackendError, BackendTimeout, ConfigError, EnvTimeout
from rlkit.rollouts._asking import Asker, Counters, Lanes, Start
from rlkit.rollouts._episode import HARNESS_PLAYER, Episode, HarnessPlayer, Shared, rewarded, scored
from rlkit.rollouts._plan import CannotGoOn, Plan, described, pauses, start_seed
from rlkit.trajectory import Failure, Group, Trajectory

if TYPE_CHECKING:
    from rlkit.chat import Chat

__all__ = ["Progress", "Runner"]


class Progress:
    """A bar of rich that counts episodes, where stderr is a terminal and it is wanted.

    Args:
        total: episodes, or None where that is unknown.
        wanted: None: if rich is installed.
    """

    def __init__(self, total: int | None, wanted: bool | None) -> None:
        self._bar: Any = None
        if wanted is None:
            wanted = importlib.util.find_spec("rich") is not None
        if wanted and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("episodes", total=total)

    def episode(self, *, failed: int) -> None:
        """Count one more that has ended."""
        if self._bar is not None:
            text = f"episodes ({failed} failed)" if failed else "episodes"
            self._bar.update(self._task, advance=1, description=text)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


_log = logging.getLogger(__name__)


_START = 2**31  # the member's number where a whole group is meant


@attrs.define(eq=False)
class _Gathering:
    """A group on its way."""

    number: int
    task: Task
    settings: TaskSettings
    start: Start | None
    wanted: int  # how many trajectories make it worth keeping
    open: int  # members that have not ended
    trajectories: dict[int, Trajectory] = attrs.field(factory=dict)
    failures: list[Failure] = attrs.field(factory=list)

    def group(self, step: int) -> Group:
        return Group(
            [self.trajectories[member] for member in sorted(self.trajectories)],
            failures=sorted(self.failures, key=lambda failure: failure.member),
            env=self.task.name,
            index=self.task.index,
            number=self.number,
            step=step,
        )


class Runner:
    """Plays the tasks of one step; they are read as there is room for more, so an endless iterator is fine."""

    def __init__(self, sampler: Sampler, tasks: Iterable[Task], plan: Plan, step: int, counters: Counters) -> None:
        if plan.share < 1.0 and not isinstance(tasks, Sequence):
            raise ConfigError("Plan.share", f"is {plan.share}", "1.0", "the number of tasks is unknown")
        self._tasks, self._plan, self._step = tasks, plan, step
        self._counters, self._sampler = counters, sampler
        self._ready: asyncio.Queue[Group | None]
        self._shared: Shared
        self._player: HarnessPlayer | None = None
        self._slots: asyncio.Semaphore
        self._room: asyncio.Semaphore
        self._gatherings: dict[int, _Gathering] = {}
        self._members: set[asyncio.Task[None]] = set()
        self._ended, self._enough, self._kept = 0, math.inf, 0
        self._failed: list[Failure] = []
        self._cause: Exception | None = None
        self._told: set[tuple[str, str]] = set()  # a warning for each kind of failure

    async def groups(self) -> AsyncGenerator[Group, None]:
        """Return the groups that are kept, as they are complete.

        Ending it early gives up what is under way. Whatever ends it, environments are closed before it returns.

        Raises:
            BackendError: the sampler failed, or no group was left at all.
        """
        plan = self._plan
        self._ready = asyncio.Queue()
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._room = asyncio.Semaphore(2 * plan.concurrency)  # groups that were not taken yet
        computing, playing = Lanes(2, 0.25), Lanes(8, 0.02)
        asker = Asker(self._sampler, plan, self._counters, computing)
        chat = await call(self._chat, where="chat")  # in a thread: it may import and compile
        self._shared = Shared(plan, self._step, chat, asker, self._counters, self._find_player, computing, playing)
        self._counters.mean("sampler/version", self._sampler.version)
        with Progress(self._total(), plan.progress) as self._progress:
            supervisor = asyncio.create_task(self._supervise())
            supervisor.add_done_callback(lambda _: self._ready.put_nowait(None))
            try:
                while (group := await self._ready.get()) is not None:
                    self._room.release()
                    yield group
                await supervisor
            except BaseExceptionGroup as failed:
                error = _first(failed)
                raise error from error.__cause__
            finally:
                supervisor.cancel()
                await asyncio.wait([supervisor])
                if not supervisor.cancelled():
                    supervisor.exception()  # whoever reads on has been told
                if self._player is not None:
                    await self._player.close()

    def _chat(self) -> Chat:
        if self._plan.chat is not None:
            return self._plan.chat
        from rlkit.chat import Chat

        return Chat(self._sampler.tokenizer)

    def _find_player(self) -> HarnessPlayer:
        """Return what plays the episodes of harnesses, made for the first of them."""
        if self._player is None:
            shared = self._shared
            self._player = resolve_name(HARNESS_PLAYER)(shared.chat, shared.plan, shared.asker, shared.counters)
        return self._player

    def _total(self) -> int | None:
        if not isinstance(self._tasks, Sequence):
            return None
        return sum(task.settings.over(self._plan.settings).n or 1 for task in self._tasks)

    async def _supervise(self) -> None:
        if self._plan.share < 1.0:
            self._enough = math.ceil(self._plan.share * (self._total() or 0))
        try:
            executor, tasks = self._plan.executor, self._tasks
            placed = nullcontext(tasks) if isinstance(executor, str) else executor.place(self._plan, tasks)
            async with placed as tasks, asyncio.TaskGroup() as members:
                for number, task in enumerate(tasks):
                    await self._room.acquire()
                    await self._launch(members, number, task)
        finally:
            for gathering in self._gatherings.values():
                if gathering.start is not None:
                    gathering.start.give_up()
        for gathering in list(self._gatherings.values()):  # those cut short by share
            await self._complete(gathering)
        if not self._kept and self._failed:
            raise self._nothing_left() from self._cause

    async def _launch(self, members: asyncio.TaskGroup, number: int, task: Task) -> None:
        """Start a group's members as slots become free; none any more once enough episodes have ended."""
        plan = self._plan
        settings = task.settings.over(plan.settings)
        n = settings.n or 1
        start = None
        if plan.shared_start and n > 1:
            where = (plan.seed, self._step, number)
            start = Start(self._shared.asker, n, start_seed(*where), pauses(*where, _START))
        least = 2 if plan.min_n is None else plan.min_n
        least = min(n, least if settings.min_n is None else settings.min_n)
        gathering = _Gathering(number, task, settings, start, least, n)
        self._gatherings[number] = gathering
        for member in range(n):
            await self._slots.acquire()
            if self._ended >= self._enough:
                self._slots.release()
                self._counters.add(f"env/{task.name}/abandoned", n - member)
                return
            playing = members.create_task(self._member(gathering, member))
            self._members.add(playing)
            playing.add_done_callback(self._members.discard)

    async def _member(self, gathering: _Gathering, member: int) -> None:
        """Play one member."""
        task, number, start = gathering.task, gathering.number, gathering.start
        episode = Episode(self._shared, task, gathering.settings, number, member, start)
        try:
            outcome = await episode.play()
        except BaseException:
            self._counters.add(f"env/{task.name}/abandoned")
            raise
        finally:
            self._slots.release()
        if isinstance(outcome, Failure):
            self._fail(gathering, outcome, episode.error)
        else:
            gathering.trajectories[member] = outcome
            if task.score is None:
                self._counters.trajectory(outcome)
        self._ended += 1
        last = self._ended == self._enough
        self._progress.episode(failed=len(self._failed))
        gathering.open -= 1
        if gathering.open == 0:
            await self._complete(gathering)
        if last:  # cancelled once: a member that is closing its environment is left to it
            for playing in self._members - {asyncio.current_task()}:
                playing.cancel()

    def _fail(self, gathering: _Gathering, failure: Failure, error: Exception | None) -> None:
        self._counters.failure(failure)
        if (failure.env, failure.kind) not in self._told:
            self._told.add((failure.env, failure.kind))
            text = "%s: an episode failed in %s, %s: %s; env/%s/failed counts them"
            _log.warning(text, failure.env, failure.where, failure.kind, failure.message, failure.env)
        gathering.failures.append(failure)
        self._failed.append(failure)
        self._cause = self._cause or error

    async def _score(self, gathering: _Gathering) -> None:
        """Score a group's episodes together; if that cannot be done, all of them have failed."""
        task = gathering.task
        seconds = (gathering.settings.deadline or self._plan.deadline) / 2
        timeout = seconds if self._plan.call_timeout is None else self._plan.call_timeout
        try:
            members = dict(sorted(gathering.trajectories.items()))
            gathering.trajectories = await scored(task, members, self._shared.chat, timeout=timeout)
        except Exception as error:  # noqa: BLE001  # the score is the environment's, and so are its faults
            kind = "timeout" if isinstance(error, EnvTimeout) else type(error).__name__
            for member, trajectory in gathering.trajectories.items():
                turns = len(trajectory.turns)
                self._fail(gathering, Failure(task.name, kind, described(error), "score", turns, member), error)
            gathering.trajectories = {}
        for member, trajectory in list(gathering.trajectories.items()):
            outcome = rewarded(trajectory, member)
            if isinstance(outcome, Failure):
                self._fail(gathering, outcome, None)
                del gathering.trajectories[member]
            else:
                self._counters.trajectory(trajectory)

    async def _complete(self, gathering: _Gathering) -> None:
        """Hand a group over, if enough of it is there."""
        if gathering.task.score is not None:
            await self._score(gathering)
        del self._gatherings[gathering.number]
        group = gathering.group(self._step)
        enough = len(group) >= gathering.wanted
        self._counters.group(group, kept=enough)
        if enough:
            self._kept += 1
            self._ready.put_nowait(group)
        else:
            self._room.release()

    def _nothing_left(self) -> BackendError:
        kinds = [f"{failure.kind} in {failure.where}" for failure in self._failed]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        first = self._failed[0].message
        text = f"rollout: no group is left; {len(kinds)} episodes failed: {counts}; the first error: {first}"
        asked = all(failure.kind == "timeout" and failure.where == "sampler" for failure in self._failed)
        return BackendTimeout(text) if asked else BackendError(text)


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return why the rollout cannot go on, as it was raised; a single error as it is; else all."""
    leaf: BaseException = failed.subgroup(CannotGoOn) or failed
    while isinstance(leaf, BaseExceptionGroup) and (leaf is not failed or len(failed.exceptions) == 1):
        leaf = leaf.exceptions[0]
    return leaf.error if isinstance(leaf, CannotGoOn) else leaf
