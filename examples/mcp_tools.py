"""Tools of an MCP server as an environment: over a child process's stdio, or in this process. Seconds on the toy.

    pip install 'mcp>=2'
    python examples/mcp_tools.py [--backend local] [--stdio]

``McpEnv`` is all there is to it: a session is opened in ``reset`` and left in ``close``, which rlkit runs in one task,
as the SDK wants it. ``Client`` takes a URL, ``StdioServerParameters`` or a server of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.server import MCPServer

import rlkit
from rlkit.chat import Chat
from rlkit.envs import Action, StepResult, Tasks
from rlkit.rollouts import rollout_sync
from rlkit.tools import Malformed, error_message, read_calls, tool_message

STOCK = {"apples": 7, "pears": 5, "plums": 0, "figs": 12}
server = MCPServer("shop")


@server.tool()
def stock(fruit: str) -> int:
    """Says how many pieces of a fruit there are."""
    return STOCK.get(fruit, 0)


class McpEnv:
    """A question that is answered with the help of a server's tools; a turn without a call is the answer."""

    def __init__(self, server: Any, question: str, reward: Callable[[str], float]) -> None:
        self.server, self.question, self.reward = server, question, reward
        self.stack = contextlib.AsyncExitStack()

    async def reset(self, seed: int) -> str:  # noqa: ARG002
        """Opens a session and asks it for its tools."""
        self.client = await self.stack.enter_async_context(Client(self.server))
        found = (await self.client.list_tools()).tools
        functions = [{"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in found]
        self.tools = [{"type": "function", "function": function} for function in functions]
        return self.question

    async def step(self, action: Action) -> StepResult:
        """Makes the calls of a turn; the policy is told what they give, or what is wrong with them."""
        calls = read_calls(action, "hermes", self.tools).in_order
        if not calls:
            return StepResult(reward=self.reward(action.content), terminated=True)
        return StepResult([await self.called(call) for call in calls])

    async def called(self, call: Any) -> dict[str, Any]:
        """The message that answers a call."""
        if isinstance(call, Malformed):
            return error_message(call)
        try:
            result = await self.client.call_tool(call.name, dict(call.arguments))
        except MCPError as error:
            return tool_message(call, f"error: {error}")
        return tool_message(call, "\n".join(block.text for block in result.content if block.type == "text"))

    async def close(self) -> None:
        """Leaves the session, which ends a server that it started."""
        await self.stack.aclose()


def tasks(place: Any) -> Tasks:
    """One question for each fruit."""

    def make(index: int) -> McpEnv:
        fruit, count = list(STOCK.items())[index]
        return McpEnv(place, f"How many {fruit} are there?", lambda answer: float(str(count) in answer))

    return Tasks(make, len(STOCK), name="shop")


def main(arguments: list[str] | None = None) -> None:
    """Plays every question."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="toy", choices=("toy", "local"))
    parser.add_argument("--stdio", action="store_true", help="the server in a process of its own")
    parser.add_argument("--serve", action="store_true", help="be that server")
    args = parser.parse_args(arguments)
    if args.serve:
        server.run("stdio")
        return
    place = StdioServerParameters(command=sys.executable, args=[__file__, "--serve"]) if args.stdio else server
    model = {"model": "smollm2-135m-instruct"} if args.backend == "local" else {}
    with rlkit.connect(args.backend, seed=0, **model) as policy, policy.sampler().result() as sampler:
        chat = Chat(policy.tokenizer, tool_format="hermes")
        params = rlkit.SamplingParams(max_tokens=48)
        groups = rollout_sync(sampler, list(tasks(place)), n=2, params=params, chat=chat, max_turns=4)
    for group in groups:
        print(group.trajectories[0].messages[-1]["content"][:60], group.rewards)
    print(f"sessions that could not be closed: {groups.metrics['env/shop/close_failed']:.0f}")


if __name__ == "__main__":
    main()
