"""Environments of GEM (gem-llm): games, generated problems and data sets with gymnasium's five values."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from rlkit import _check
from rlkit.envs import _adapters
from rlkit.envs._adapters import Stream, package, shield
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, UnknownNameError

__all__ = ["gem"]

_INSTALL = (
    "pip install --no-deps --ignore-requires-python gem-llm==0.1.0 && pip install msgspec reasoning-gym requests regex"
)
_lock = threading.Lock()


def gem(
    env_id: str,
    *,
    wrappers: Sequence[str | Callable[[object], object]] = (),
    tokenizer: object = None,
    size: int = 1024,
    seed: int = 0,
    split: str = "train",
    dataset_split: str | None = None,
    name: str | None = None,
    settings: TaskSettings | None = None,
    **options: object,
) -> Tasks:
    """Return tasks of one of GEM's environments, each with its own seed.

    GEM seeds and draws from the process's random generators. Here each environment has its own generators: what it
    draws is what GEM would draw after that seed, the process's are not touched, and environments do not disturb each
    other, however they are interleaved.

    Args:
        env_id: such as "game:GuessTheNumber-v0-easy"; see ``gem.print_envs()``.
        wrappers: names of GEM's own ("python_tool", "concat", ...) or functions of an environment, the innermost first.
            The "concat" ones say all that was said before in each observation; a conversation does that already.
        tokenizer: what the wrappers "concat_chat" and "concat_chat_on_reset" need.
        size: how many tasks, in [1, 2^30].
        seed: >= 0; another seed, other tasks.
        split: "train", "test" or "validation": no seed is in two of them. An environment over a data set takes its
            items from ``dataset_split``, whatever this is.
        dataset_split: of an environment over a data set; None: the one that GEM has registered.
        name: for metrics; None: ``env_id``.
        settings: what these tasks want to have different.
        options: of the environment: ``max_turns=5, ...``.

    What GEM would put around an observation (``info["prefix"]`` and ``info["suffix"]``) is put there, unless a wrapper
    has done it.

    Raises:
        UnknownNameError: no such environment or wrapper; the message lists them.
        ConfigError: an argument is out of range, or a package is not installed.

    >>> tasks = gem("game:GuessTheNumber-v0-easy")
    >>> env = tasks[0].make()
    >>> print(env.reset(tasks[0].seed).partition(chr(10))[0])
    You are playing Guess The Number.
    >>> env.step(Action("I guess."))
    StepResult(observation='At turn 1, you did not provide a valid guess...', reward=-0.1, terminated=True, ...)
    """
    registry = _imported().envs.registration.ENV_REGISTRY
    if env_id not in registry:
        known = ", ".join(sorted(registry))
        raise UnknownNameError(f"rlkit.envs.gem: no environment named {env_id!r}. There are: {known}")
    wrapping = tuple(_wrapper(wrapper, tokenizer) for wrapper in wrappers)
    _check.integer("size", size, low=1, high=2**30)
    seeds = _adapters.seeds(split, seed)
    point = registry[env_id].entry_point
    module = point.partition(":")[0] if isinstance(point, str) else point.__module__
    modules = (module, *{getattr(wrapper, "__module__", None) or "gem" for wrapper in wrapping})
    _shield(modules)
    if env_id.startswith("rg:"):  # reset draws from a set of 500, which is the split's own
        options = {"seed": _adapters.SPLITS.index(split) * 2**28 + seed % 2**18 * 2**10} | options
    if dataset_split is not None:
        options = options | {"split": dataset_split}
    make = functools.partial(_Env, env_id, options, wrapping, modules)
    name = env_id if name is None else check_name("name", name)
    return Tasks(lambda _: make(), size, name=name, split=split, seeds=seeds, settings=settings)


@functools.cache
def _shield(modules: tuple[str, ...]) -> None:
    """Give what GEM and these modules draw to the environments' own streams: in each process that plays them."""
    for module in modules:
        package("gem", module, "the packages named in its error")
    shield(["gem", "reasoning_gym"], modules)


def _imported() -> ModuleType:
    """Import GEM without what its import does to logging."""
    root = logging.getLogger()
    with _lock:
        handlers, level = list(root.handlers), root.level
        try:
            module = package("gem", "gem", _INSTALL)
            package("gem", "gem.envs", _INSTALL)
        finally:
            for handler in root.handlers:
                if handler not in handlers:
                    root.removeHandler(handler)
            root.setLevel(level)
    return module


def _wrapper(wrapper: object, tokenizer: object) -> Callable[[object], object]:
    if callable(wrapper):
        return wrapper
    factory = package("gem", "gem.wrappers.wrapper_factory", _INSTALL)
    if wrapper not in factory.WRAPPER_FACTORY:
        known = ", ".join(sorted(factory.WRAPPER_FACTORY))
        raise UnknownNameError(f"rlkit.envs.gem: no wrapper named {wrapper!r}. There are: {known}")
    made: Callable[[object], object] = factory.WRAPPER_FACTORY[wrapper]
    if wrapper in factory.TOKENIZER_REQUIRED:
        if tokenizer is None:
            raise ConfigError("tokenizer", "is None", f"a tokenizer, for the wrapper {wrapper!r}")
        return functools.partial(made, tokenizer=tokenizer)  # type: ignore[call-arg]
    return made


class _Env:
    """One of GEM's environments, with its own random generators."""

    def __init__(
        self,
        env_id: str,
        options: dict[str, object],
        wrapping: tuple[Callable[[object], object], ...],
        modules: tuple[str, ...],
    ) -> None:
        _shield(modules)
        self._id = env_id
        self._stream = Stream(0)
        with self._stream.active():
            env = _imported().make(env_id, **options)
            for wrap in wrapping:
                env = wrap(env)
        self._env = env
        self._complete = any(type(layer).__name__ == "ObservationWrapper" for layer in _layers(env))

    def reset(self, seed: int) -> Observation:
        with self._stream.active():
            observation, info = self._env.reset(seed=seed)
        return self._said(observation, info)

    def step(self, action: Action) -> StepResult:
        try:
            with self._stream.active():
                observation, reward, terminated, truncated, info = self._env.step(str(action))
        except Exception as error:
            if not self._id.startswith("rg:"):
                raise
            return StepResult("", 0.0, True, info={"scorer_error": f"{type(error).__name__}: {error}"[:200]})
        return StepResult(self._said(observation, info), reward, terminated, truncated, info)

    def close(self) -> None:
        pool = getattr(self._env.unwrapped, "mp_pool", None)  # some graders work in a process
        if pool is not None:
            pool.terminate()

    def _said(self, observation: Observation, info: Mapping[str, str]) -> Observation:
        if self._complete or not isinstance(observation, str):
            return observation
        parts = (info.get("prefix", ""), observation, info.get("suffix", ""))
        return "\n".join(part.removesuffix("\n") for part in parts if part)


def _layers(env: object) -> list[object]:
    """Return the environment and what it wraps."""
    layers = [env]
    while (inner := vars(layers[-1]).get("env")) is not None:
        layers.append(inner)
    return layers
