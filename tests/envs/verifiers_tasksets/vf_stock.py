"""Tools: a server of the taskset's."""

from __future__ import annotations

import verifiers.v1 as vf


class StockData(vf.TaskData):
    answer: str


class StockTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def stock(self, fruit: str) -> int:
        """Says how many pieces of a fruit there are."""
        return {"pears": 5}.get(fruit, 0)


class StockTask(vf.Task[StockData]):
    @classmethod
    def toolsets(cls, config):
        return [StockTools(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace):
        return float(self.data.answer in (trace.nodes[-1].message.content or ""))

    @vf.metric
    async def tools(self, trace):
        return float(sum(node.message.role == "tool" for node in trace.nodes))


class Stock(vf.Taskset[StockTask]):
    def load(self):
        for _ in range(2):
            yield StockTask(StockData(prompt="How many pears?", answer="5"), self.config.task)


__all__ = ["Stock"]

if __name__ == "__main__":
    StockTools.run()
