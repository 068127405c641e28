"""GEM's environments, with the real package: the same as GEM plays them, but apart from each other."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import logging
import random
import subprocess
import sys

import numpy as np
import pytest

import rlkit
from rlkit.envs import Action, TaskSettings, gem
from tests.each import for_each
from tests.envs import parts

package = pytest.importorskip("gem", reason="gem-llm is not installed")
pytest.importorskip("reasoning_gym")
GUESS = "game:GuessTheNumber-v0-easy"
EASY = ("Mastermind", "Minesweeper", "FifteenPuzzle", "Sudoku", "TowerofHanoi", "Game2048", "Sokoban")
GAMES = [GUESS, "game:GuessTheNumber-v0-random", *(f"game:{name}-v0-easy" for name in EASY), "rg:chain_sum"]
SPLITS = ("train", "test", "validation")


def process_state():
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, keys.tobytes(), rest


def boxed(text):
    return Action(f"\\boxed{{{text}}}")


def actions(number):
    """Some that are well formed for one of the games, and some that are for none."""
    words = ["3", "up", "1 2", "reveal 1 1", "A B", "left", "7"]
    return [boxed(words[(number + i) % len(words)]) for i in range(6)]


def output(source):
    """What Python code prints in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def plain(env_id, seed, moves):
    """What GEM itself plays, in a process whose generators it may do with as it likes."""
    printed = output(f"""
import json, gem, gem.envs
env = gem.make({env_id!r}, **{{"seed": 0}} if {env_id.startswith("rg:")} else {{}})
out = [env.reset(seed={seed})[0]]
for move in {[str(move) for move in moves]!r}:
    observation, reward, terminated, truncated, info = env.step(move)
    out.append([observation, float(reward), bool(terminated), bool(truncated)])
    if terminated or truncated:
        break
print("RESULT" + json.dumps(out))
""")
    return json.loads(printed.rpartition("RESULT")[2])


def playing(env, seed, moves):
    env._complete = True  # what GEM says, without what stands around it
    yield env.reset(seed)
    for move in moves:
        result = env.step(move)
        yield [result.observation, float(result.reward), result.terminated, result.truncated]
        if result.terminated or result.truncated:
            break


@pytest.mark.parametrize("env_id", GAMES)
def test_it_plays_as_gem_does(env_id):
    """The same seed and moves lead to the observations and rewards of GEM itself, in a process of its own."""
    moves = actions(0)
    assert list(playing(gem(env_id)[0].make(), 12, moves)) == plain(env_id, 12, moves)


@pytest.mark.parametrize("env_id", GAMES)
def test_the_processs_generators_are_not_touched(env_id):
    task = gem(env_id)[0]
    before = process_state()
    list(playing(task.make(), task.seed, actions(1)))
    assert process_state() == before


@for_each("env_id", ["game:Game2048-v0-easy", "game:Minesweeper-v0-easy", "game:FifteenPuzzle-v0-easy"])
def test_interleaved_environments_do_not_disturb_each_other(env_id):
    """Games that draw while they are played, moved in turn and in threads, go as they go alone."""
    tasks = gem(env_id)[:8]

    def play(i):
        return playing(tasks[i].make(), tasks[i].seed, actions(i))

    alone = [list(play(i)) for i in range(8)]
    rounds = []
    for answers in itertools.zip_longest(*map(play, range(8))):
        rounds.append(answers)
        random.random()  # somebody else draws, too
    assert [[answer for answer in game if answer is not None] for game in zip(*rounds, strict=True)] == alone
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: list(play(i)), range(8))) == alone


def test_seeds_make_the_difference():
    """Each task has its own, and no seed is in two splits, whatever seeds the sets themselves have."""
    boards, again = ([task.make().reset(task.seed) for task in gem("game:Sudoku-v0-easy", size=20)] for _ in range(2))
    assert len(set(boards)) > 15
    assert again == boards
    sets = itertools.product(SPLITS, (0, 1, 2**40))
    seeds = {task.seed for split, seed in sets for task in gem(GUESS, split=split, seed=seed, size=300)}
    assert len(seeds) == 9 * 300
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_sets_of_problems_are_the_splits_own():
    """An rg: environment draws from a set of 500; each split and seed has another, without a common seed of an item."""
    sets = [gem("rg:chain_sum", split=split, seed=seed)[0].make()._env.ds for split in SPLITS for seed in (0, 1)]
    assert len({number for each in sets for number in range(each.seed, each.seed + 500)}) == 6 * 500


def test_what_is_said():
    """The first observation and the next ones, with GEM's own suffix; success is worth 1. Options reach the game."""
    assert "between 1 and 3" in gem(GUESS, max_number=3, max_turns=1)[0].make().reset(0)
    task = gem(GUESS, name="guess", settings=TaskSettings(max_turns=4))[0]
    assert (task.name, task.settings.max_turns) == ("guess", 4)
    env = task.make()
    first = env.reset(task.seed)
    assert first.startswith("You are playing Guess The Number.")
    assert first.endswith("\nEnter your next guess.")
    target = env._env.game_number
    result = env.step(boxed(1 if target != 1 else 2))
    assert result.observation.endswith("Enter your next guess.")
    assert (result.reward, result.terminated) == (0.0, False)
    assert env.step(boxed(target)).reward == 1.0


class Shouting(package.core.EnvWrapper):
    def reset(self, seed=None):
        observation, info = self.env.reset(seed=seed)
        return observation.upper(), info

    def step(self, action):
        return self.env.step(action)


class Tokenizer:
    def apply_chat_template(self, messages, **_):
        return "|".join(message["content"] for message in messages)


def test_wrappers():
    """By name, as a function, and with a tokenizer where it needs one."""
    env = gem(GUESS, wrappers=["concat"])[0].make()
    env.reset(5)
    said = env.step(boxed(5)).observation
    assert said.startswith("You are playing")
    assert said.count("Enter your next guess.") == 1
    assert gem(GUESS, wrappers=[Shouting])[0].make().reset(3).startswith("YOU ARE PLAYING")
    env = gem(GUESS, wrappers=["concat_chat"], tokenizer=Tokenizer())[0].make()
    env.reset(5)
    assert "|\\boxed{5}|" in env.step(boxed(5)).observation


def test_the_python_tool():
    """Code runs in a process of its own, and the episode goes on."""
    env = gem(GUESS, wrappers=["python_tool"])[0].make()
    assert "```python...```" in env.reset(5)
    result = env.step(Action("<python>print(6 * 7)</python>"))
    assert "42" in result.observation
    assert not result.terminated


def test_a_scorer_that_raises_scores_nothing():
    env = gem("rg:prime_factorization")[0].make()
    env.reset(3)
    result = env.step(boxed("é * é"))
    assert (result.reward, result.terminated) == (0.0, True)
    assert "ValueError" in result.info["scorer_error"]


@for_each(
    ("env_id", "options", "error", "message"),
    [
        ("game:GuessTheNumber", {}, rlkit.UnknownNameError, "There are: .*game:GuessTheNumber-v0-easy"),
        (GUESS, {"wrappers": ["conact"]}, rlkit.UnknownNameError, "There are: .*concat"),
        (GUESS, {"wrappers": ["concat_chat"]}, rlkit.ConfigError, "tokenizer"),
        (GUESS, {"size": 0}, rlkit.ConfigError, "size"),
        (GUESS, {"seed": 1.5}, rlkit.ConfigError, "seed"),
        (GUESS, {"split": "dev"}, rlkit.ConfigError, "split"),
        (GUESS, {"name": ""}, rlkit.ConfigError, "name"),
    ],
)
def test_what_is_wrong_is_told_at_once(env_id, options, error, message):
    with pytest.raises(error, match=message):
        gem(env_id, **options)


def test_packages_that_are_missing(monkeypatch):
    """Told when the tasks are made, not when they are played: those of one environment, and GEM itself."""
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.delitem(sys.modules, "gem.envs.game_env.wordle", raising=False)
    with pytest.raises(rlkit.ConfigError, match="nltk"):
        gem("game:Wordle-v0-easy")
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(rlkit.ConfigError, match="gem-llm"):
        gem(GUESS)


def test_logging_stays_as_it_was():
    """GEM's import sets up the root logger; through rlkit it does not. In a process that has not imported it yet."""
    found = output(f"""
import logging
from rlkit.envs import gem
gem({GUESS!r})[0].make()
root = logging.getLogger()
print(root.handlers, root.level)
""")
    assert found == f"[] {logging.WARNING}\n"


def test_gem_itself_is_as_before():
    """Outside of our environments GEM still draws from, and seeds, the process's generators."""
    gem("game:FifteenPuzzle-v0-easy")[0].make()
    state = random.getstate()
    env = package.make("game:FifteenPuzzle-v0-easy")
    env.reset(seed=3)
    first = [list(row) for row in env.board]
    random.seed(99)
    env.reset(seed=3)
    assert [list(row) for row in env.board] == first
    random.setstate(state)


def test_as_it_is_played():
    task = gem(GUESS)[3]
    _, (result,), _ = parts.played(task, "no number", seed=task.seed)
    assert (result.reward, result.terminated) == (-0.1, True)
