"""Games of TextArena: for one player, or against opponents that are functions of what they see."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import ModuleType
from typing import Protocol, cast

from rlkit import _check, _runtime
from rlkit.envs import _adapters
from rlkit.envs._adapters import Stream, package, shield
from rlkit.envs.protocol import Action, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, EnvError, UnknownNameError

__all__ = ["textarena"]

Opponent = Callable[[str], "str | Awaitable[str]"]
_Seen = list[tuple[int, str, object]]


class _State(Protocol):
    role_mapping: Mapping[int, str]


class _Game(Protocol):
    """What TextArena calls an environment."""

    @property
    def state(self) -> _State: ...
    def reset(self, num_players: int, seed: int | None = None) -> None: ...
    def get_observation(self) -> tuple[int, _Seen]: ...
    def step(self, action: str) -> tuple[bool, Mapping[str, object]]: ...
    def close(self) -> tuple[Mapping[int, float] | None, Mapping[int, Mapping[str, object]]]: ...


def textarena(
    env_id: str,
    *,
    opponent: Opponent | None = None,
    players: int | None = None,
    player: int | None = None,
    size: int = 1024,
    seed: int = 0,
    split: str = "train",
    name: str | None = None,
    settings: TaskSettings | None = None,
    **options: object,
) -> Tasks:
    """Return tasks of one of TextArena's games, each with its own seed.

    The first observation is the game's prompt, each further one what has been said since: a conversation holds the rest
    already, so the wrappers that repeat it are left out; those that format actions stay. The policy's own words are not
    said again. The reward comes at the end and is the game's for the policy's side; what an invalid move costs is the
    game's affair, too.

    TextArena seeds and draws from the process's random generators. Here each game has its own generators, and
    neither the process's nor other games notice.

    Args:
        env_id: such as "Wordle-v0"; see ``textarena.pprint_registry_detailed()``.
        opponent: for all other sides: all that the side has seen, as text -> what it says. A function, ``async`` or
            not, or one of ``textarena.agents``. None: a game for one player.
        players: how many sides there are; None: 1 without an opponent, 2 with one.
        player: which side the policy plays, in [0, players); None: each in its turn, by the task's seed, the same one
            for all episodes of a task.
        size: how many tasks, in [1, 2^30].
        seed: >= 0; another seed, other tasks.
        split: "train", "test" or "validation": no seed is in two of them.
        name: for metrics; None: ``env_id``.
        settings: what these tasks want to have different.
        options: of the game, over those of its registration: ``max_turns=5, ...``.

    An opponent that raises fails the episode, which is then counted and not trained on. What the game says about the
    policy's side at the end (``invalid_move``, ``turn_count``, ``reason``) is in ``info``.

    Raises:
        UnknownNameError: no such game; the message lists them.
        ConfigError: an argument is out of range, the game cannot be begun (another number of players, word lists of
            nltk that are not there), or textarena is not installed.

    >>> import asyncio
    >>> tasks = textarena("GuessTheNumber-v0")
    >>> env = tasks[0].make()
    >>> asyncio.run(env.reset(tasks[0].seed)).splitlines()[0]
    '[GAME] You are Player 0. You are playing Guess The Number.'
    >>> asyncio.run(env.step(Action("[10]"))).observation
    '[GAME] The target number is lower.'
    """
    registry = _arena("envs.registration").ENV_REGISTRY
    if env_id not in registry:
        raise UnknownNameError(
            f"rlkit.envs.textarena: no game named {env_id!r}{_check.suggest(env_id, sorted(registry))}"
        )
    _check.integer("size", size, low=1, high=2**30)
    _check.require(opponent is None or callable(opponent), "opponent", opponent, "a function of its observation")
    sides = _check.integer("players", (1 if opponent is None else 2) if players is None else players, low=1)
    _check.optional(_check.integer, "player", player, low=0, high=sides - 1)
    if (opponent is None) != (sides == 1):
        raise ConfigError(
            "opponent", f"got {_check.describe(opponent)} for {sides} players", "one only in games of several players"
        )
    seeds = _adapters.seeds(split, seed)
    point = registry[env_id].entry_point
    make = functools.partial(_Env, functools.partial(_made, env_id, options), sides, player, opponent)
    if isinstance(point, str):
        with _starting(env_id, LookupError):  # some games look for word lists while they are imported
            package("textarena", point.partition(":")[0], "the packages named in its error")
    shield(["textarena"])
    with _starting(env_id, Exception, alone=opponent is None):
        make().begin(seeds(0))
    name = env_id if name is None else check_name("name", name)
    return Tasks(lambda _: make(), size, name=name, split=split, seeds=seeds, settings=settings)


def _arena(module: str = "") -> ModuleType:
    return package("textarena", f"textarena.{module}".rstrip("."), _runtime.command("textarena"))


@contextlib.contextmanager
def _starting(env_id: str, errors: type[Exception], *, alone: bool = False) -> Iterator[None]:
    """Raise ConfigError for an error of every episode, before the first: of a module's import, or a game's start."""
    try:
        yield
    except errors as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        hint = (
            "; give opponent=, a function that plays the other sides" if alone and "number of players" in text else ""
        )
        raise ConfigError(f"rlkit.envs.textarena: {env_id!r} cannot be started: {text}{hint}") from error


def _made(env_id: str, options: Mapping[str, object]) -> _Game:
    """Return a game without the wrappers that repeat what has been said."""
    core = _arena("core")
    wrappers = []
    game = _arena().make(env_id, **options)
    while isinstance(game, core.Wrapper):
        if not isinstance(game, core.ObservationWrapper):
            wrappers.append(game)
        game = game.env
    for wrapper in reversed(wrappers):
        wrapper.env = game
        game = wrapper
    return cast("_Game", game)


class _Env:
    """One game, with its own random generators."""

    def __init__(self, make: Callable[[], _Game], sides: int, player: int | None, opponent: Opponent | None) -> None:
        self._make = make
        self._sides = sides
        self._fixed = player
        self._opponent = opponent
        self._stream = Stream(0)
        self._said: dict[int, list[str]] = {}  # what each of the other sides has seen

    async def reset(self, seed: int) -> str:
        self._player = (seed // 4) % self._sides if self._fixed is None else self._fixed
        await asyncio.to_thread(self.begin, seed)
        if await self._others():
            raise EnvError("rlkit.envs.textarena: the game was over before the policy's first move")
        return "\n".join(self._news)

    async def step(self, action: Action) -> StepResult:
        over = await asyncio.to_thread(self._played, action.content) or await self._others()
        if not over:
            return StepResult("\n".join(self._news))
        rewards, told = await asyncio.to_thread(self._game.close)
        reward = None if rewards is None else rewards.get(self._player)
        return StepResult("\n".join(self._news), reward, terminated=True, info=dict(told.get(self._player, {})))

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def begin(self, seed: int) -> None:
        """Make the game and deal."""
        with self._stream.active():
            self._game = self._make()
            self._game.reset(num_players=self._sides, seed=seed)

    def _played(self, action: str) -> bool:
        """Play one move; return whether the game is over."""
        self._news: list[str] = []
        with self._stream.active():
            return bool(self._game.step(action)[0])

    async def _others(self) -> bool:
        """Play the opponents' moves until it is the policy's turn, or the game is over."""
        while True:
            side, seen = await asyncio.to_thread(self._looked)
            if side == self._player:
                self._news = self._lines(side, seen)
                return False
            said = self._said.setdefault(side, [])
            said += self._lines(side, seen, own=True)
            if await asyncio.to_thread(self._played, await self._moved("\n".join(said))):
                return True

    async def _moved(self, seen: str) -> str:
        opponent = cast("Opponent", self._opponent)
        if inspect.iscoroutinefunction(opponent):
            move = await opponent(seen)
        else:
            answer = await asyncio.to_thread(opponent, seen)
            move = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(move, str):
            raise EnvError("rlkit.envs.textarena: opponent", f"gave {_check.describe(move)}", "text")
        return move

    def _looked(self) -> tuple[int, _Seen]:
        with self._stream.active():
            return self._game.get_observation()

    def _lines(self, side: int, seen: _Seen, *, own: bool = False) -> list[str]:
        """Return what a side has newly seen, in TextArena's form; without its own words, unless ``own``."""
        names = self._game.state.role_mapping
        acted = _arena("core").ObservationType.PLAYER_ACTION
        return [
            f"[{'GAME' if sender == -1 else names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in seen
            if own or not (sender == side and kind is acted)
        ]
