"""A coding harness: a file is to be written by its shell."""

from __future__ import annotations

import verifiers.v1 as vf


class FileTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def written(self, trace, runtime):
        result = await runtime.run(["cat", "answer.txt"], {})
        return float("42" in result.stdout)


class File(vf.Taskset[FileTask]):
    def load(self):
        for _ in range(2):
            yield FileTask(vf.TaskData(prompt="Write 42 into answer.txt."), self.config.task)


__all__ = ["File"]
