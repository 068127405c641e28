"""GEM's environments, with the real package: the same as GEM plays them, but apart from each other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import subprocess
import sys

import numpy as np
import pytest

import rlkit
from rlkit.envs import Action, TaskSettings, gem
from rlkit.envs.calling import Guarded

package = pytest.importorskip("gem", reason="gem-llm is not installed")
pytest.importorskip("reasoning_gym")
GUESS = "game:GuessTheNumber-v0-easy"
GAMES = [
    GUESS,
    "game:GuessTheNumber-v0-random",
    "game:Mastermind-v0-easy",
    "game:Minesweeper-v0-easy",
    "game:FifteenPuzzle-v0-easy",
    "game:Sudoku-v0-easy",
    "game:TowerofHanoi-v0-easy",
    "game:Game2048-v0-easy",
    "game:Sokoban-v0-easy",
    "rg:chain_sum",
]


def process_state():
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return random.getstate(), name, keys.tobytes(), rest


def actions(number):
    """Some that are well formed for one of the games, and some that are for none."""
    words = [
        "\\boxed{3}",
        "\\boxed{up}",
        "\\boxed{1 2}",
        "\\boxed{reveal 1 1}",
        "\\boxed{A B}",
        "\\boxed{left}",
        "\\boxed{7}",
    ]
    return [Action(words[(number + i) % len(words)]) for i in range(6)]


def plain(env_id, seed, moves):
    """What GEM itself plays, in a process of its own, whose generators it may do with as it likes."""
    source = f"""
import json, random, gem, gem.envs
env = gem.make({env_id!r}, **{options_of(env_id)!r})
out = [env.reset(seed={seed})[0]]
for move in {[str(move) for move in moves]!r}:
    observation, reward, terminated, truncated, info = env.step(move)
    out.append([observation, float(reward), bool(terminated), bool(truncated)])
    if terminated or truncated:
        break
print("RESULT" + json.dumps(out))
"""
    import json

    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout.rpartition("RESULT")[2])


def options_of(env_id):
    return {"seed": 0} if env_id.startswith("rg:") else {}


def played(env, seed, moves):
    env._complete = True  # what GEM says, without what stands around it
    out = [env.reset(seed)]
    for move in moves:
        result = env.step(move)
        out.append([result.observation, float(result.reward), result.terminated, result.truncated])
        if result.terminated or result.truncated:
            break
    return out


@pytest.mark.parametrize("env_id", GAMES)
def test_it_plays_as_gem_does(env_id):
    """The same seed and moves lead to the observations and rewards of GEM itself, in a process of its own."""
    moves = actions(0)
    assert played(gem(env_id)[0].make(), 12, moves) == plain(env_id, 12, moves)


@pytest.mark.parametrize("env_id", GAMES)
def test_the_processs_generators_are_not_touched(env_id):
    tasks = gem(env_id)
    before = process_state()
    played(tasks[0].make(), tasks[0].seed, actions(1))
    assert process_state() == before


@pytest.mark.parametrize("env_id", ["game:Game2048-v0-easy", "game:Minesweeper-v0-easy", "game:FifteenPuzzle-v0-easy"])
def test_interleaved_environments_do_not_disturb_each_other(env_id):
    """Games that draw while they are played, moved in turn and in threads, go as they go alone."""
    tasks = gem(env_id)
    seeds = [task.seed for task in tasks[:8]]
    alone = [played(tasks[i].make(), seed, actions(i)) for i, seed in enumerate(seeds)]
    envs = [tasks[i].make() for i in range(8)]
    for env in envs:
        env._complete = True
    together = [[env.reset(seed)] for env, seed in zip(envs, seeds, strict=True)]
    for move in range(6):
        for i, env in enumerate(envs):
            if len(together[i]) > 1 and (together[i][-1][2] or together[i][-1][3]):
                continue
            result = env.step(actions(i)[move])
            together[i].append([result.observation, float(result.reward), result.terminated, result.truncated])
            random.random()  # somebody else draws, too
    assert together == alone
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: played(tasks[i].make(), seeds[i], actions(i)), range(8)))
    assert found == alone


def test_seeds_make_the_difference():
    tasks = gem("game:Sudoku-v0-easy", size=20)
    boards = [task.make().reset(task.seed) for task in tasks]
    assert len(set(boards)) > 15
    assert [task.make().reset(task.seed) for task in gem("game:Sudoku-v0-easy", size=20)] == boards


def test_no_seed_is_in_two_splits():
    """Whatever seeds the sets themselves have; and within a set each task has its own."""
    seeds = {
        split: {task.seed for seed in (0, 1, 2**40) for task in gem(GUESS, split=split, seed=seed, size=300)}
        for split in ("train", "test", "validation")
    }
    assert not seeds["train"] & seeds["test"]
    assert not seeds["train"] & seeds["validation"]
    assert not seeds["test"] & seeds["validation"]
    assert all(len(found) == 900 for found in seeds.values())
    assert all(0 <= seed < 2**32 for found in seeds.values() for seed in found)


def test_sets_of_problems_are_the_splits_own():
    """An rg: environment draws from a set of 500; each split has another, with no seed of an item in common."""
    ranges = {}
    for split in ("train", "test", "validation"):
        base = gem("rg:chain_sum", split=split)[0].make()._env.ds.seed
        ranges[split] = set(range(base, base + 500))
    assert not ranges["train"] & ranges["test"]
    assert not ranges["train"] & ranges["validation"]
    assert not ranges["test"] & ranges["validation"]


def test_what_is_said():
    """The first observation and the next ones, with GEM's own suffix; success is worth 1."""
    task = gem(GUESS, name="guess", settings=TaskSettings(max_turns=4))[0]
    env = task.make()
    first = env.reset(task.seed)
    assert first.startswith("You are playing Guess The Number.")
    assert first.endswith("\nEnter your next guess.")
    target = env._env.game_number
    wrong = 1 if target != 1 else 2
    result = env.step(Action(f"\\boxed{{{wrong}}}"))
    assert result.observation.endswith("Enter your next guess.")
    assert (result.reward, result.terminated) == (0.0, False)
    assert env.step(Action(f"\\boxed{{{target}}}")).reward == 1.0
    assert (task.name, task.settings.max_turns) == ("guess", 4)


def test_options_reach_the_environment():
    env = gem(GUESS, max_number=3, max_turns=1)[0].make()
    assert "between 1 and 3" in env.reset(0)


def test_wrappers_by_name():
    env = gem(GUESS, wrappers=["concat"])[0].make()
    env.reset(5)
    said = env.step(Action("\\boxed{5}")).observation
    assert said.startswith("You are playing")
    assert said.count("Enter your next guess.") == 1


def test_a_wrapper_that_is_a_function():
    class Shouting(package.core.EnvWrapper):
        def reset(self, seed=None):
            observation, info = self.env.reset(seed=seed)
            return observation.upper(), info

        def step(self, action):
            return self.env.step(action)

    assert gem(GUESS, wrappers=[Shouting])[0].make().reset(3).startswith("YOU ARE PLAYING")


def test_the_python_tool():
    """Code runs in a process of its own, and the episode goes on."""
    env = gem(GUESS, wrappers=["python_tool"])[0].make()
    assert "```python...```" in env.reset(5)
    result = env.step(Action("<python>print(6 * 7)</python>"))
    assert "42" in result.observation
    assert not result.terminated


def test_a_wrapper_that_needs_a_tokenizer():
    class Tokenizer:
        def apply_chat_template(self, messages, **_):
            return "|".join(message["content"] for message in messages)

    with pytest.raises(rlkit.ConfigError, match="tokenizer"):
        gem(GUESS, wrappers=["concat_chat"])
    env = gem(GUESS, wrappers=["concat_chat"], tokenizer=Tokenizer())[0].make()
    env.reset(5)
    assert "|\\boxed{5}|" in env.step(Action("\\boxed{5}")).observation


def test_a_scorer_that_raises_scores_nothing():
    env = gem("rg:prime_factorization")[0].make()
    env.reset(3)
    result = env.step(Action("\\boxed{é * é}"))
    assert (result.reward, result.terminated) == (0.0, True)
    assert "ValueError" in result.info["scorer_error"]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("game:GuessTheNumber",), {}, rlkit.UnknownNameError, "There are: .*game:GuessTheNumber-v0-easy"),
        ((GUESS,), {"wrappers": ["conact"]}, rlkit.UnknownNameError, "There are: .*concat"),
        ((GUESS,), {"size": 0}, rlkit.ConfigError, "size"),
        ((GUESS,), {"seed": 1.5}, rlkit.ConfigError, "seed"),
        ((GUESS,), {"split": "dev"}, rlkit.ConfigError, "split"),
        ((GUESS,), {"name": ""}, rlkit.ConfigError, "name"),
    ],
)
def test_what_is_wrong_is_told_at_once(arguments, options, error, message):
    with pytest.raises(error, match=message):
        gem(*arguments, **options)


def test_an_environment_whose_packages_are_missing(monkeypatch):
    """Told when the tasks are made, not when they are played."""
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.delitem(sys.modules, "gem.envs.game_env.wordle", raising=False)
    with pytest.raises(rlkit.ConfigError, match="nltk"):
        gem("game:Wordle-v0-easy")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(rlkit.ConfigError, match="gem-llm"):
        gem(GUESS)


def test_logging_stays_as_it_was():
    """GEM's import sets up the root logger; through rlkit it does not. In a process that has not imported it yet."""
    source = f"""
import logging
from rlkit.envs import gem
gem({GUESS!r})[0].make()
root = logging.getLogger()
print(root.handlers, root.level)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == f"[] {logging.WARNING}\n"


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
    async def scene():
        task = gem(GUESS)[3]
        env = await Guarded.opened(task)
        await env.reset(task.seed)
        result = await env.step(Action("no number"))
        assert await env.close() is None
        return result

    result = asyncio.run(scene())
    assert (result.reward, result.terminated) == (-0.1, True)
