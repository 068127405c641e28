"""Tools of an MCP server as an environment: over a child process's stdio, or in this process. Seconds on the toy.

    pip install mcp
    python examples/mcp_tools.py [--backend local] [--stdio]

The server can also be a URL, or any command that speaks MCP on its stdin and stdout, such as
``["npx", "-y", "@modelcontextprotocol/server-filesystem", folder]``.
"""

from __future__ import annotations

import argparse
import sys

from mcp.server import MCPServer

import rlkit
from rlkit.chat import Chat
from rlkit.envs import Tasks, mcp
from rlkit.rollouts import rollout_sync
from rlkit.tools import ToolCall

STOCK = {"apples": 7, "pears": 5, "plums": 0, "figs": 12}
server = MCPServer("shop")


@server.tool()
def stock(fruit: str) -> int:
    """Says how many pieces of a fruit there are."""
    return STOCK.get(fruit, 0)


def tasks(place: object) -> Tasks:
    """Make one question for each fruit; an answer without a call earns nothing."""

    def reward(text: str, answer: str, calls: list[tuple[ToolCall, str]]) -> float:
        return float(answer in text and len(calls) > 0)

    rows = [{"prompt": f"How many {fruit} are there?", "answer": str(count)} for fruit, count in STOCK.items()]
    return mcp(place, rows, reward, name="shop")


def main(arguments: list[str] | None = None) -> None:
    """Play every question."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="toy", choices=("toy", "local"))
    parser.add_argument("--stdio", action="store_true", help="run the server in a separate process")
    parser.add_argument("--serve", action="store_true", help="be that server")
    args = parser.parse_args(arguments)
    if args.serve:
        server.run("stdio")
        return
    place = [sys.executable, __file__, "--serve"] if args.stdio else server
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
