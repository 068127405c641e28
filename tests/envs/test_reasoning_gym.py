"""Tasks of reasoning-gym, with the real package."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import sys

import numpy as np
import pytest

import rlkit
from rlkit.envs import Action, TaskSettings, reasoning_gym
from rlkit.envs.calling import Guarded
from tests.each import for_each

pytest.importorskip("reasoning_gym")
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SPLITS = ("train", "test", "validation")


def questions(tasks):
    return [task.make().reset(0) for task in tasks]


def process_state():
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, keys.tobytes(), rest


@pytest.mark.parametrize(("name", "config"), [("chain_sum", SMALL), ("spell_backward", {}), ("list_functions", {})])
def test_no_question_is_in_two_splits(name, config):
    """Whatever the seeds: with two terms of one digit there are few questions, and every split meets all of its own."""
    met = {
        split: {
            q for seed in (0, 1, 7) for q in questions(reasoning_gym(name, size=150, seed=seed, split=split, **config))
        }
        for split in SPLITS
    }
    for one, other in (("train", "test"), ("train", "validation"), ("test", "validation")):
        assert not met[one] & met[other]
    assert min(map(len, met.values())) > 20


def test_seeds_alone_do_not_part_splits():
    """What the splits are there for: the package's next seed gives the same items, one place on."""
    import reasoning_gym as package

    first = package.create_dataset("chain_sum", seed=1, size=20)
    second = package.create_dataset("chain_sum", seed=2, size=20)
    assert [item["question"] for item in first][1:] == [item["question"] for item in second][:-1]


def test_splits_have_their_share():
    """Half of all questions to train with: 500 draws each, within 5 standard deviations of the binomial."""
    import zlib

    import reasoning_gym as package

    items = package.create_dataset("base_conversion", seed=3, size=500)
    quarters = np.bincount([zlib.crc32(item["question"].encode()) % 4 for item in items], minlength=4)
    assert np.abs(quarters - 125).max() < 5 * np.sqrt(500 * 0.25 * 0.75)


@pytest.mark.parametrize("name", ["chain_sum", "list_functions", "gsm_symbolic", "pool_matrix"])
def test_a_task_is_always_the_same(name):
    """From another set, in another order, from other threads, and under another state of the process's generators."""
    first = questions(reasoning_gym(name, size=8, seed=5, split="test"))
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002
    again = reasoning_gym(name, size=8, seed=5, split="test")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: again[i].make().reset(99), [7, 3, 3, 0, 5, 1, 2, 6, 4]))
    assert found == [first[i] for i in (7, 3, 3, 0, 5, 1, 2, 6, 4)]
    assert questions(reasoning_gym(name, size=8, seed=6, split="test")) != first


@for_each("name", ["pool_matrix", "list_functions", "chain_sum", "sudoku", "countdown"])
def test_the_processs_generators_are_not_touched(name):
    """Two of these generators draw from them, one seeds them."""
    before = process_state()
    env = reasoning_gym(name, size=4)[1].make()
    env.reset(0)
    env.step(Action("7"))
    assert process_state() == before


def test_the_generators_own_answer_is_right():
    for name in ("chain_sum", "gcd", "spell_backward", "leg_counting", "list_functions"):
        env = reasoning_gym(name, size=3, split="test")[2].make()
        env.reset(0)
        answer = env.step(Action("")).info["answer"]
        result = env.step(Action(f"I think <answer>9</answer>, no: <answer> {answer}\n</answer>"))
        assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
        assert env.step(Action(f"  {answer} ")).reward == 1.0


JUNK = [
    "",
    "x",
    "[1,2",
    "{'a':",
    "0" * 500,
    "\x00",
    "é" * 50,
    "9 ** 9",
    "<answer></answer>",
    "nan",
    "1e999",
    "None",
    "[[]]",
]


@for_each(
    "name",
    [
        "prime_factorization",
        "pool_matrix",
        "complex_arithmetic",
        "game_of_life_halting",
        "coin_flip",
        "word_ladder",
        "game_of_life",
        "circuit_logic",
    ],
)
def test_junk_scores_and_does_not_raise(name):
    """prime_factorization's scorer raises on letters, pool_matrix's warns (and warnings are errors here)."""
    env = reasoning_gym(name, size=2)[0].make()
    env.reset(0)
    for junk in JUNK:
        result = env.step(Action(junk))
        assert 0.0 <= result.reward < 1.0
        assert result.terminated


def test_a_scorer_that_raises_says_so():
    env = reasoning_gym("prime_factorization", size=2)[0].make()
    env.reset(0)
    result = env.step(Action("é * é"))
    assert result.reward == 0.0
    assert result.info["scorer_error"].startswith("ValueError")


@pytest.mark.parametrize("name", ["complex_arithmetic", "game_of_life_halting", "coin_flip"])
def test_stricter_scorers_know_what_is_right(name):
    """The generator's own answer scores 1, and "0", "nan" or "maybe" nothing to speak of."""
    for task in reasoning_gym(name, size=12):
        env = task.make()
        env.reset(0)
        right = env.step(Action("")).info["answer"]
        assert env.step(Action(str(right))).reward == 1.0
        assert max(env.step(Action(wrong)).reward for wrong in ("0", "nan", "maybe")) < 0.1


def test_template_and_extraction():
    tasks = reasoning_gym(
        "chain_sum",
        size=3,
        template="Q: {question}\nOnly {the} number.\nA:",
        extract=lambda text: text.rpartition(" ")[2],
        settings=TaskSettings(max_tokens=8),
        **SMALL,
    )
    env = tasks[0].make()
    question = env.reset(0)
    assert question.startswith("Q: State")
    assert question.endswith("=\nOnly {the} number.\nA:")
    answer = env.step(Action("")).info["answer"]
    assert env.step(Action(f"it is {answer}")).reward == 1.0
    assert tasks[0].settings.max_tokens == 8
    assert (tasks.name, tasks.split, tasks[1].seed) == ("chain_sum", "train", None)


@for_each(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "chain_sums"),
        ("chain_sum", {"min_term": 2}, "min_term"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "max_terms"),
        ("chain_sum", {"size": 0}, "size"),
        ("chain_sum", {"seed": -1}, "seed"),
        ("chain_sum", {"split": "dev"}, "split"),
        ("chain_sum", {"template": "Add."}, "template"),
        ("chain_sum", {"extract": "answer"}, "extract"),
        (3, {}, "name"),
    ],
)
def test_what_is_wrong_is_told_at_once(name, options, message):
    with pytest.raises(rlkit.ConfigError, match=message):
        reasoning_gym(name, **options)


def test_a_task_without_a_question_for_the_split(monkeypatch):
    """With a single question, two splits have none: an error, and no search without an end."""
    one = {"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2}
    tasks = reasoning_gym("chain_sum", size=2, split="test", **one)
    problems = tasks[0].make()._problems
    monkeypatch.setattr(problems, "_dataset", lambda number: [{"question": "What is 1 + 1?", "answer": "2"}] * 2000)
    kinds = dict.fromkeys(SPLITS)
    for split in SPLITS:
        try:
            other = reasoning_gym("chain_sum", size=2, split=split, **one)[0].make()
            monkeypatch.setattr(other._problems, "_dataset", problems._dataset)
            other.reset(0)
        except rlkit.ConfigError as error:
            kinds[split] = str(error)
    assert sorted(kind is None for kind in kinds.values()) == [False, False, True]
    assert "no question for this split" in next(kind for kind in kinds.values() if kind)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(rlkit.ConfigError, match=r"pip install .*\[reasoning-gym\]"):
        reasoning_gym("chain_sum")


def test_as_it_is_played():
    """Through the helper that rollouts use, which checks every answer."""

    async def scene():
        env = await Guarded.opened(reasoning_gym("chain_sum", size=2, **SMALL)[1])
        question = await env.reset(0)
        result = await env.step(Action("no idea"))
        assert await env.close() is None
        return question, result

    question, result = asyncio.run(scene())
    assert "arithmetic" in question
    assert result.reward == 0.0


def test_modules_that_are_imported_later_are_shielded(tmp_path, monkeypatch):
    """A generator that imports a module when it first draws takes its numbers from the task's stream, too."""
    from rlkit.envs import _adapters

    (tmp_path / "lazily_drawing").mkdir()
    (tmp_path / "lazily_drawing" / "__init__.py").write_text("")
    (tmp_path / "lazily_drawing" / "later.py").write_text("import random\ndef draw(): return random.random()")
    monkeypatch.syspath_prepend(tmp_path)
    _adapters.shield(["lazily_drawing"])
    before = random.getstate()
    with _adapters.Stream(3).active():
        from lazily_drawing import later

        assert later.draw() == random.Random(3).random()
    assert random.getstate() == before
