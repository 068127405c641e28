"""A small MCP server for the tests: ``mcp_server.py`` over stdio, ``mcp_server.py --http`` prints its port first."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp_types import CallToolResult, ImageContent, TextContent
from pydantic import BaseModel

server = MCPServer("shop")
STOCK = {"apples": 7, "pears": 5}
sold: list[str] = []


class Price(BaseModel):
    amount: float
    currency: str


@server.tool()
def stock(fruit: str) -> int:
    """Says how many pieces of a fruit there are."""
    return STOCK[fruit]


@server.tool()
def sell(fruit: str) -> str:
    sold.append(fruit)
    return f"sold {len(sold)}"


@server.tool()
def price(fruit: str) -> Price:
    return Price(amount=0.5, currency="EUR")


@server.tool(structured_output=False)
def picture(fruit: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text="a pear"), ImageContent(data="aGk=", mime_type="image/png")])


@server.tool()
def pid() -> int:
    return os.getpid()


@server.tool()
def token() -> str:
    return os.environ.get("TOKEN", "none") + " " + os.environ.get("OPENAI_API_KEY", "none")


@server.tool()
def die() -> str:
    """Leaves a process behind, writes its number to the file CHILD, and is killed."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["CHILD"]).write_text(str(child.pid))
    print("out of memory", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@server.tool()
async def sleep(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    if "--http" in sys.argv:
        import uvicorn

        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()  # whoever reads the port may connect
            print(listening.getsockname()[1], flush=True)
            config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
            uvicorn.Server(config).run(sockets=[listening])
    else:
        print("the server is up", file=sys.stderr, flush=True)
        server.run("stdio")
