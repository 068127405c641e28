"""Games of TextArena, with the package as it is."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

import rlkit
from rlkit.envs import Action, textarena
from rlkit.envs.calling import Guarded
from rlkit.rollouts import rollout_sync
from tests.each import for_each

ta = pytest.importorskip("textarena", reason="textarena is not installed: pip install 'rlkit-lm[textarena]'")


async def played(task, *moves):
    """The first observation, and the results until the game is over."""
    env = await Guarded.opened(task, timeout=60)
    try:
        first, results = await env.reset(task.seed, timeout=60), []
        for move in moves:
            results.append(await env.step(Action(move), timeout=60))
            if results[-1].terminated:
                break
        return first, results
    finally:
        assert await env.close(timeout=60) is None


def first_free(seen):
    """Takes the first square that is free."""
    free = re.findall("'\\[([0-9])\\]'", seen[seen.rindex("Available") :])
    return f"[{free[0]}]"


def test_one_player():
    """The prompt once, then what is new; the game's own answer to invalid moves, and its reward at the end."""
    task = textarena("GuessTheNumber-v0")[0]
    first, results = asyncio.run(played(task, "[10]", "I think", "really", "never"))
    assert first.startswith("[GAME] You are Player 0. You are playing Guess The Number.")
    assert re.fullmatch(r"\[GAME\] The target number is (lower|higher)\.", results[0].observation)
    assert results[1].observation.startswith("[GAME] You attempted an invalid move.")
    assert "I think" not in results[1].observation, "the policy has said it itself"
    assert [result.terminated for result in results] == [False, False, True]
    assert results[2].info["invalid_move"] is True
    assert 0 < results[2].reward < 1, "how near the last guess was, as this game has it"


def test_the_same_seed_is_the_same_game_whatever_runs_beside_it():
    """As TextArena's own after that seed; the process's generators are not touched."""
    tasks = textarena("GuessTheNumber-v0", seed=3)
    numbers = []
    for task in tasks[:4]:
        game = ta.make("GuessTheNumber-v0-raw")
        state = random.getstate()
        random.seed(task.seed)
        game.reset(num_players=1, seed=task.seed)
        numbers.append(game.game_number)
        random.setstate(state)

    async def scene():
        return await asyncio.gather(*(played(task, f"[{n}]") for task, n in zip(tasks[:4], numbers, strict=True)))

    random.seed(0)
    before = random.getstate()
    for _, results in asyncio.run(scene()):
        assert (results[0].reward, results[0].terminated) == (1.0, True)
    assert random.getstate() == before
    assert len(set(numbers)) > 1


@pytest.mark.parametrize("kind", ["plain", "async", "agent"])
def test_two_players(kind):
    """The opponent sees all that its side has seen; each side in its turn; the rewards are the game's."""
    seen = []

    def plain(text):
        seen.append(text)
        return first_free(text)

    async def later(text):
        await asyncio.sleep(0)
        return plain(text)

    class Agent(ta.Agent):
        def __call__(self, observation):
            return plain(observation)

    tasks = textarena("TicTacToe-v0", opponent={"plain": plain, "async": later, "agent": Agent()}[kind])
    first, results = asyncio.run(played(tasks[0], "[8]", "[7]", "[6]"))
    assert "You are Player 0 in Tic Tac Toe" in first
    assert "[Player 1] [0]" in results[0].observation
    assert [result.reward for result in results] == [0.0, 0.0, 1.0]
    assert results[2].info["reason"] == "Player 0 has won!"
    assert seen[1].startswith(seen[0])
    assert "You are Player 1" in seen[0]
    first, results = asyncio.run(played(tasks[1], "[8]", "[7]", "[6]"))
    assert "[Player 0] [0]" in first, "the policy plays the other side"
    assert results[-1].reward == -1.0


def test_invalid_moves_of_opponents_are_the_games_affair():
    tasks = textarena("TicTacToe-v0", opponent=lambda seen: "I give up", player=0)
    _, results = asyncio.run(played(tasks[0], "[8]"))
    assert (results[0].reward, results[0].terminated) == (1.0, True)
    with pytest.raises(rlkit.EnvError, match="over before the policy's first move"):
        asyncio.run(played(textarena("TicTacToe-v0", opponent=lambda seen: "?", player=1)[0]))


def test_an_opponent_that_fails_fails_the_episode():
    def broken(seen):
        raise OSError("no line")

    with pytest.raises(OSError, match="no line"):
        asyncio.run(played(textarena("TicTacToe-v0", opponent=broken, player=0)[0], "[0]"))
    with pytest.raises(rlkit.EnvError, match="opponent: gave 3"):
        asyncio.run(played(textarena("TicTacToe-v0", opponent=lambda seen: 3, player=0)[0], "[0]"))


def test_three_players():
    tasks = textarena("ThreePlayerTicTacToe-v0", opponent=lambda seen: "[0 0]", players=3, player=0)
    first, results = asyncio.run(played(tasks[0], *["[1 1]"] * 30))
    assert "Player 0" in first
    assert results


@for_each(
    ("arguments", "match"),
    [
        ({"env_id": "Nope-v0"}, "no game named 'Nope-v0'"),
        ({"env_id": "Wordle"}, "no game named 'Wordle'; did you mean 'Wordle-v0'"),
        ({"env_id": "TicTacToe-v0"}, "number of players has to be 2, received 1; give opponent="),
        ({"env_id": "TicTacToe-v0", "opponent": "random"}, "opponent"),
        ({"env_id": "TicTacToe-v0", "opponent": str, "player": 2}, "player"),
        ({"env_id": "TicTacToe-v0", "players": 2}, "opponent"),
        ({"env_id": "GuessTheNumber-v0", "max_turn": 3}, "max_turn"),
        ({"env_id": "GuessTheNumber-v0", "split": "dev"}, "split"),
    ],
)
def test_what_cannot_be_played_is_said_before_the_first_episode(arguments, match):
    with pytest.raises(rlkit.RlkitError, match=match):
        textarena(**arguments)


def test_a_rollout():
    """Groups of one game each, on one side; invalid moves are counted."""
    tasks = textarena("TicTacToe-v0", opponent=first_free, name="toe")
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        params = rlkit.SamplingParams(max_tokens=6)
        groups = rollout_sync(sampler, tasks.batch(0, 3), n=2, params=params, progress=False, max_turns=3)
    assert len(groups) == 3
    assert groups.metrics["env/toe/episodes"] == 6
    assert {reward for group in groups for reward in group.rewards} <= {-1.0, 0.0, 1.0}
