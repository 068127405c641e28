"""One turn: an answer and its reward."""

from __future__ import annotations

import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def right(self, trace):
        """Whether the answer stands in the reply."""
        if "crash" in trace.nodes[-1].message.content:
            raise ValueError("the calculator is gone")
        return float(self.data.answer in trace.nodes[-1].message.content)

    @vf.metric
    async def letters(self, trace):
        return float(len(trace.nodes[-1].message.content))


class Sums(vf.Taskset[SumsTask]):
    def load(self):
        print("what is printed does no harm")
        for i in range(4):
            yield SumsTask(SumsData(prompt=f"{i} + {i} =", answer=str(2 * i)), self.config.task)


__all__ = ["Sums"]
