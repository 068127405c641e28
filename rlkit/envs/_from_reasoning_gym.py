"""Tasks of reasoning-gym: problems that are generated, and scored by a program."""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType
from typing import Any, Protocol

import attrs
import numpy as np

from rlkit import _check, _runtime
from rlkit.envs import _adapters
from rlkit.envs._adapters import Stream, package, shield
from rlkit.envs.protocol import Action, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError

__all__ = ["reasoning_gym"]

_KINDS = {"train": (0, 1), "test": (2,), "validation": (3,)}  # which quarters of all questions
_TRIES = 200  # all of them miss a quarter with probability (3/4)^200 = 1e-25
_ITEMS = 1024  # that one generator is asked for at most, unless there are more tasks; some make all of them at once
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym(
    name: str,
    *,
    size: int = 500,
    seed: int = 0,
    split: str = "train",
    template: str = "{question}",
    extract: Callable[[str], str | None] | None = None,
    settings: TaskSettings | None = None,
    **config: object,
) -> Tasks:
    """Return tasks of one of reasoning-gym's generators; one turn each.

    No question is in two splits, whatever their sizes and seeds: a hash of its text says which split it belongs to.
    (Seeds alone do not part splits: the generator's item i of seed s is its item 0 of seed s + i, and small tasks have
    few questions.) Repeated questions in one split are the generator's affair.

    Args:
        name: the generator's, such as "chain_sum"; see ``reasoning_gym.factory.DATASETS``.
        size: how many tasks, in [1, 10^6]. They are generated when they are played.
        seed: >= 0; another seed, other tasks.
        split: "train" (half of all questions), "test" or "validation" (a quarter each).
        template: the prompt; ``{question}`` is replaced by the question.
        extract: what is scored of what the policy said; None: the last ``<answer>...</answer>``, or all of it.
        settings: what these tasks want to have different.
        config: the generator's own settings: ``min_terms=2, ...``.

    The reward is the generator's score in [0, 1]. A scorer that raises (some do on junk) or gives anything else scores
    0, and says so in ``info["scorer_error"]``. Three scorers of version 0.1.25 can be satisfied without an answer, as a
    policy would find out, and get a stricter one before them: complex_arithmetic gives "nan" full marks,
    game_of_life_halting whatever is not empty, coin_flip a "0".

    Raises:
        ConfigError: no such generator or setting, an argument is out of range, or reasoning-gym is not installed.

    >>> tasks = reasoning_gym("chain_sum", size=20, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    >>> env = tasks[0].make()
    >>> env.reset(0)
    'State the final answer to the following arithmetic problem: 1 + 1 ='
    >>> env.step(Action("So: <answer>2</answer>")).reward, env.step(Action("7")).reward
    (1.0, 0.0)
    """
    factory = package("reasoning_gym", "reasoning_gym", _runtime.command("reasoning-gym"))
    _check.integer("size", size, low=1, high=10**6)
    _check.integer("seed", seed, low=0)
    _check.choice("split", split, _adapters.SPLITS)
    if not isinstance(template, str) or "{question}" not in template:
        raise ConfigError("template", f"got {_check.describe(template)}", "text that contains {question}")
    _check.require(extract is None or callable(extract), "extract", extract, "a function of a text")
    _check_known(name)
    problems = _Problems(factory, check_name("name", name), size, seed, split, config)
    make = functools.partial(_Problem, problems, template, tagged if extract is None else extract)
    return Tasks(make, size, name=name, split=split, settings=settings)


def _check_known(name: object) -> None:
    """Raise ConfigError, with near names, where reasoning-gym lists its generators and this is none of them."""
    known = getattr(importlib.import_module("reasoning_gym.factory"), "DATASETS", None)
    if isinstance(name, str) and isinstance(known, dict) and known and name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has {len(known)}, such as chain_sum"
        raise ConfigError(f"rlkit.envs.reasoning_gym: no generator named {name!r}; {hint}")


def tagged(text: str) -> str:
    """Return what is in the last ``<answer>`` tag, or else the whole text; without space around it."""
    answers = _TAG.findall(text)
    return (answers[-1] if answers else text).strip()


def _finite(answer: str, _: str) -> bool:
    return not re.search("nan|inf", answer, re.IGNORECASE)


def _same_truth(answer: str, right: str) -> bool:
    return answer.strip().lower() == str(right).lower()


def _near(answer: str, right: str) -> bool:
    answered, wanted = Fraction(answer.replace(",", "")), Fraction(right.replace(",", ""))
    return abs(answered - wanted) <= wanted / 1000


_STRICTER = {"complex_arithmetic": _finite, "game_of_life_halting": _same_truth, "coin_flip": _near}


class _Generator(Protocol):
    def __getitem__(self, index: int) -> Mapping[str, str]: ...
    def score_answer(self, answer: str | None, item: Mapping[str, str]) -> object: ...


class _Problems:
    """The generator's items that belong to a split; each is made when it is first asked for."""

    def __init__(
        self, factory: ModuleType, name: str, size: int, seed: int, split: str, config: Mapping[str, object]
    ) -> None:
        shield(["reasoning_gym"])
        self._given = (factory, name, size, seed, split, config)
        self._size = size
        self._rounds = max(1, _ITEMS // size)  # how many items of one generator there are for each task
        self._new = functools.partial(factory.create_dataset, name, size=size * self._rounds, **config)
        self._name = name
        self._seed = seed
        self._kinds = _KINDS[split]
        self._lock = threading.RLock()  # some generators keep notes
        self._datasets: list[_Generator] = []
        self.item = functools.lru_cache(maxsize=4096)(self._item)
        try:
            self._dataset(0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"rlkit.envs.reasoning_gym: {name!r} with {config}: {error}") from error

    def __reduce__(self) -> tuple[Callable[..., _Problems], tuple[object, ...]]:
        return _restore, self._given

    def _dataset(self, number: int) -> _Generator:
        """Return the number-th generator; they differ in their seeds."""
        while len(self._datasets) <= number:
            state = np.random.SeedSequence([self._seed, len(self._datasets)]).generate_state(1)
            with Stream(0).active():
                self._datasets.append(self._new(seed=int(state[0]) >> 1))
        return self._datasets[number]

    def _item(self, index: int) -> Mapping[str, str]:
        """Return the first of this task's items whose question is of the split."""
        for number in range(_TRIES):
            place = index + number % self._rounds * self._size
            with self._lock, Stream(place).active():
                item = self._dataset(number // self._rounds)[place]
            if zlib.crc32(item["question"].encode()) % 4 in self._kinds:
                return item
        where, what = f"rlkit.envs.reasoning_gym: {self._name!r}", f"found no question for this split in {_TRIES} tries"
        raise ConfigError(where, what, "a task with more questions")

    def score(self, answer: str | None, item: Mapping[str, str]) -> float:
        """Return the generator's score."""
        if self._name in _STRICTER and not _STRICTER[self._name](answer or "", item["answer"]):
            return 0.0
        with Stream(0).active():
            return _check.real("score", self._datasets[0].score_answer(answer, item), low=0.0, high=1.0 + 1e-9)


_restored: dict[str, _Problems] = {}


def _restore(*given: Any) -> _Problems:
    """Return problems that came from another process, made once for all tasks."""
    key = repr(given)
    if key not in _restored:
        _restored[key] = _Problems(*given)
    return _restored[key]


@attrs.define(eq=False, repr=False)
class _Problem:
    """One question."""

    _problems: _Problems
    _template: str
    _extract: Callable[[str], str | None]
    _index: int
    _item: Mapping[str, str] = attrs.field(init=False)

    def reset(self, seed: int) -> str:  # noqa: ARG002  # the index says which question it is
        self._item = self._problems.item(self._index)
        return self._template.replace("{question}", self._item["question"])

    def step(self, action: Action) -> StepResult:
        answer = self._extract(action)
        info = {"answer": self._item["answer"], "extracted": answer}
        try:
            reward = self._problems.score(answer, self._item)
        except Exception as error:  # noqa: BLE001  # whatever a scorer raises, what the policy wrote was not an answer
            return StepResult("", 0.0, True, info=info | {"scorer_error": f"{type(error).__name__}: {error}"[:200]})
        return StepResult("", reward, True, info=info)

    def close(self) -> None:
        pass
