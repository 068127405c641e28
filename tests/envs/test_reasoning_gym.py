"""Tasks of reasoning-gym, with the real package."""

from __future__ import annotations

import concurrent.futures
import importlib
import itertools
import random
import sys

import numpy as np
import pytest

import rlkit
from rlkit.envs import Action, TaskSettings, _adapters, reasoning_gym
from tests.each import for_each

pytest.importorskip("reasoning_gym")
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SPLITS = ("train", "test", "validation")


def questions(tasks):
    return [task.make().reset(0) for task in tasks]


def process_state():
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, keys.tobytes(), rest


def begun(name, number=0, **options):
    """The environment of a task, once its question is asked."""
    env = reasoning_gym(name, **options)[number].make()
    env.reset(0)
    return env


@for_each(("name", "config"), [("chain_sum", SMALL), ("spell_backward", {}), ("list_functions", {})])
def test_no_question_is_in_two_splits(name, config):
    """Whatever the seeds: with two terms of one digit there are few questions, and every split meets all of its own."""
    met = [
        {q for seed in (0, 1, 7) for q in questions(reasoning_gym(name, size=150, seed=seed, split=split, **config))}
        for split in SPLITS
    ]
    assert not any(one & other for one, other in itertools.combinations(met, 2))
    assert min(map(len, met)) > 20


@for_each("name", ["chain_sum", "list_functions", "gsm_symbolic", "pool_matrix"])
def test_a_task_is_always_the_same(name):
    """From another set, in another order, from other threads, and under another state of the process's generators."""
    first = questions(reasoning_gym(name, size=8, seed=5, split="test"))
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002
    again = reasoning_gym(name, size=8, seed=5, split="test")
    order = (7, 3, 3, 0, 5, 1, 2, 6, 4)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: again[i].make().reset(99), order))
    assert found == [first[i] for i in order]
    assert questions(reasoning_gym(name, size=8, seed=6, split="test")) != first


@for_each("name", ["pool_matrix", "list_functions", "chain_sum", "sudoku", "countdown"])
def test_the_processs_generators_are_not_touched(name):
    """Two of these generators draw from them, one seeds them."""
    before = process_state()
    begun(name, 1, size=4).step(Action("7"))
    assert process_state() == before


@for_each("name", ["chain_sum", "gcd", "spell_backward", "leg_counting", "list_functions"])
def test_the_generators_own_answer_is_right(name):
    env = begun(name, 2, size=3, split="test")
    answer = env.step(Action("")).info["answer"]
    result = env.step(Action(f"I think <answer>9</answer>, no: <answer> {answer}\n</answer>"))
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert env.step(Action(f"  {answer} ")).reward == 1.0


JUNK = ["", "x", "[1,2", "{'a':", "0" * 500, "\x00", "é" * 50, "9 ** 9", "<answer></answer>", "nan", "1e999", "[[]]"]


@for_each(
    "name",
    ["prime_factorization", "pool_matrix", "complex_arithmetic", "game_of_life_halting", "coin_flip", "word_ladder"],
)
def test_junk_scores_and_does_not_raise(name):
    """prime_factorization's scorer raises on letters, pool_matrix's warns (and warnings are errors here)."""
    env = begun(name, size=2)
    for junk in JUNK:
        result = env.step(Action(junk))
        assert 0.0 <= result.reward < 1.0
        assert result.terminated


def test_a_score_may_be_rounded():
    """This one adds up to 1.0000000000000002."""
    judge = importlib.import_module("reasoning_gym").create_dataset("spell_backward", size=1)
    found = []
    for number in range(14):
        env = begun("spell_backward", number, size=14, seed=11)
        right = env.step(Action("")).info["answer"]
        found.append((env.step(Action(f"{right}x")).reward, judge.score_answer(f"{right}x", {"answer": right})))
    assert all(reward == score for reward, score in found)
    assert 1.0 < max(score for _, score in found) < 1.001


def test_a_scorer_that_raises_says_so():
    result = begun("prime_factorization", size=2).step(Action("é * é"))
    assert result.reward == 0.0
    assert result.info["scorer_error"].startswith("ValueError")


@for_each("number", range(12))
@for_each("name", ["complex_arithmetic", "game_of_life_halting", "coin_flip"])
def test_stricter_scorers_know_what_is_right(name, number):
    """The generator's own answer scores 1, and "0", "nan" or "maybe" nothing to speak of."""
    env = begun(name, number, size=12)
    right = env.step(Action("")).info["answer"]
    assert env.step(Action(str(right))).reward == 1.0
    assert max(env.step(Action(wrong)).reward for wrong in ("0", "nan", "maybe")) < 0.1


def test_template_and_extraction():
    template = "Q: {question}\nOnly {the} number.\nA:"
    settings = TaskSettings(max_tokens=8)
    tasks = reasoning_gym(
        "chain_sum", size=3, template=template, extract=lambda text: text.rpartition(" ")[2], settings=settings, **SMALL
    )
    env = tasks[0].make()
    question = env.reset(0)
    assert question.startswith("Q: State")
    assert question.endswith("=\nOnly {the} number.\nA:")
    answer = env.step(Action("")).info["answer"]
    assert env.step(Action(f"it is {answer}")).reward == 1.0
    assert tasks[0].settings == settings
    assert (tasks.name, tasks.split, tasks[1].seed) == ("chain_sum", "train", None)


@for_each(
    ("name", "options", "message"),
    [
        ("chain_sums", {}, "chain_sums.*did you mean 'chain_sum'"),
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
    errors = []
    for split in SPLITS:
        env = reasoning_gym("chain_sum", size=2, split=split, **SMALL)[0].make()
        same = [{"question": "What is 1 + 1?", "answer": "2"}] * 2000
        monkeypatch.setattr(env._problems, "_dataset", lambda number, same=same: same)
        try:
            env.reset(0)
        except rlkit.ConfigError as error:
            errors.append(str(error))
    assert len(errors) == 2
    assert all("no question for this split" in error for error in errors)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(rlkit.ConfigError, match=r"pip install .*\[reasoning-gym\]"):
        reasoning_gym("chain_sum")


def test_modules_that_are_imported_later_are_shielded(tmp_path, monkeypatch):
    """A generator that imports a module when it first draws takes its numbers from the task's stream, too."""
    (tmp_path / "lazily_drawing").mkdir()
    (tmp_path / "lazily_drawing/__init__.py").write_text("")
    (tmp_path / "lazily_drawing/later.py").write_text("import random\ndef draw(): return random.random()")
    monkeypatch.syspath_prepend(tmp_path)
    _adapters.shield(["lazily_drawing"])
    before = random.getstate()
    with _adapters.Stream(3).active():
        from lazily_drawing import later

        assert later.draw() == random.Random(3).random()
    assert random.getstate() == before
