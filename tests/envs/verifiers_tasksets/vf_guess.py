"""Several turns: an environment of its own, whose game is the user."""

from __future__ import annotations

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    target: int


class GuessTask(vf.Task[GuessData]):
    pass


class Guess(vf.Taskset[GuessTask]):
    def load(self):
        for target in (3, 7):
            yield GuessTask(GuessData(prompt="A digit?", target=target), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, max_turns=3)


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            while not segment.terminated:
                if str(task.data.target) in segment.last_reply:
                    won = 1.0
                    break
                segment = await game.turn("No. Another?")
        game.trace.record_reward("won", won, 1.0)


__all__ = ["Guess", "GuessEnv"]
