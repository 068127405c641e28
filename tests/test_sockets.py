"""Where the programs that rlkit starts listen: on loopback alone, unless an address is asked for.

Ranks of ``processes=`` and of torchrun are in tests/backends/local/distributed/test_launch.py, Ray in
tests/rollouts/test_ray.py.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

import rlkit
from tests.sockets import PROC, listening, open_to_others

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not PROC.exists(), reason="no Linux")

# Files of rlkit that listen, or have others listen. Whoever adds one says here what shows where.
PLACES = {
    "rlkit/_web.py": "test_servers",
    "rlkit/rollouts/_ray.py": "tests/rollouts/test_ray.py",
    "rlkit/backends/vllm/settings.py": "it looks for a free port of loopback, for vLLM",
}
LISTENS = (
    r"create_server\(|\.bind\(\(|\.listen\(|TCPStore\(|start_server\(|uvicorn\.(run|Server)|HTTPServer\(|"
    r"ray\.init\(|\"--port\", str"
)

# Programs of others, whose sockets cannot be bound by who starts them: SECURITY.md names them with their ports.
OTHERS = {
    "torchrun": "29500",
    "Ray": "6379",
    "vLLM": "8000",
    "NCCL": "NCCL_SOCKET_IFNAME",
}


def test_every_place_is_known():
    found = {
        str(path.relative_to(ROOT))
        for folder in ("rlkit", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(LISTENS, path.read_text("utf-8"))
    }
    assert found == PLACES.keys()


def test_stores_of_torch_open_no_port_to_others():
    """A TCPStore listens on every address, unless it is given a socket; ranks on one machine share a file."""
    wrong = [
        f"{path}:{node.lineno}"
        for folder in ("rlkit", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if "TCPStore" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "TCPStore"
        if not any(
            k.arg == "master_listen_fd" or (k.arg == "is_master" and ast.unparse(k.value) == "False")
            for k in node.keywords
        )
    ]
    assert wrong == []


def test_every_listener_sends_at_once():
    """asyncio sets TCP_NODELAY on sockets that name their protocol alone; else an answer in two packets takes 40 ms."""
    texts = {name: (ROOT / name).read_text("utf-8") for name in PLACES}
    listeners = [name for name, text in texts.items() if re.search(r"create_server\(|\.listen\(", text)]
    wrong = []
    for name in listeners:
        text = (ROOT / name).read_text("utf-8")
        if not re.search(r"setsockopt\(socket\.IPPROTO_TCP, socket\.TCP_NODELAY, 1\)|proto=socket\.IPPROTO_TCP", text):
            wrong.append(name)
    assert wrong == []


def test_what_cannot_be_bound_is_named():
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    assert [name for name, port in OTHERS.items() if not re.search(rf"{name}\b[^.]*\b{port}\b", text)] == []


def test_servers():
    """A gateway, `rlkit serve` and `rlkit serve --openai`, which is a gateway."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    from rlkit.gateway import Gateway
    from rlkit.server import serve

    before = listening(os.getpid())
    with rlkit.connect("toy") as policy, Gateway(policy.sampler().result()) as gateway, serve("toy") as server:
        ports = {int(each.url.rpartition(":")[2]) for each in (gateway, server)}
        found = listening(os.getpid()) - before
        assert {(address, port) for address, port, _ in found} == {("127.0.0.1", port) for port in ports}
        with serve("toy", host="0.0.0.0", key="tml-a-long-key-1"):  # noqa: S104  # asked for
            assert [address for address, _, _ in open_to_others(os.getpid())] == ["0.0.0.0"]  # noqa: S104
