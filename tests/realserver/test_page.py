"""docs/how-to/servers.md, followed to the letter: its command starts a server, and its program trains there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from rlkit.backends.vllm._server import free_port
from tests.realserver.conftest import PYTHON

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh|python|python no-run)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture
def page():
    """The blocks of the page, by what they begin with."""
    text = (ROOT / "docs" / "how-to" / "servers.md").read_text("utf-8")

    def get(kind, beginning):
        (block,) = (block for name, block in BLOCK.findall(text) if name == kind and block.startswith(beginning))
        return block

    return get


def test_its_lines(page, tiny, tmp_path, monkeypatch, capsys):
    """The command, the address and the program of the page, with another model, port and folder."""
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"${PYTHON} is not set: `make test-server` installs a real server and runs this")
    pytest.importorskip("tinker")
    port = str(free_port())
    model = tiny("llama")

    def here(block):
        return block.replace("8000", port).replace(MODEL, model).replace(".venv-server/bin/python", python)

    command = here(page("sh", "# the server"))
    cache = str(Path(python).parents[1] / "jax-cache")
    own = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache}
    for line in re.findall(r"export (.*)", here(page("sh", "ssh "))):
        for name, _, value in (each.partition("=") for each in line.split()):
            monkeypatch.setenv(name, value)
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until = time.monotonic() + 600.0
        with contextlib.ExitStack() as waiting:
            waiting.callback(lambda: print((tmp_path / "log").read_text(errors="replace")[-4000:]))
            while not _answers(f"http://127.0.0.1:{port}/api/v1/healthz"):
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server did not answer"
                time.sleep(0.2)
            names = {"__name__": "page"}
            exec(compile(page("python", "import numpy"), "servers.md", "exec"), names)  # noqa: S102  # our own page
            capsys.readouterr()
            exec(compile(here(page("python no-run", "policy")), "servers.md", "exec"), names)  # noqa: S102
        lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\d ", line)]
        assert [line.split()[0] for line in lines] == ["0", "1", "2"]
        assert names["policy"].sampler().result().version == 3
        assert names["path"].startswith("tinker://")
        names["policy"].close()
        assert list((tmp_path / "skyrl" / "checkpoints").rglob("*.tar.gz"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # the engine is of the same group
        server.wait()


def test_its_table_names_what_the_suite_skips(page):
    """What the table says that the server does not do is what the conformance suite leaves out there."""
    from tests.realserver.test_conformance import TestRealServer, TestStockServer

    del page
    text = (ROOT / "docs" / "how-to" / "servers.md").read_text("utf-8")
    said = {
        "test_snapshots_never_change": "older snapshots",
        "test_live_samplers": "older snapshots",
        "test_resume_is_exact": "seeds after `resume_from=`",
        "test_truncation_renormalises": "logprobs under top-k and top-p",
        "test_top_logprobs_are_the_largest": "top-k and target logprobs",
        "test_targets_of_minus_one_are_none": "top-k and target logprobs",
        "test_a_teacher_of_the_top_k_is_imitated": "top-k and target logprobs",
        "test_two_calls_equal_one": "neither calls nor weights add up",
        "test_weights_multiply_every_term": "neither calls nor weights add up",
        "test_order_under_pipelining": "what another left in its place",
        "test_cancelled_awaits_lose_no_call": "what another left in its place",
    }
    assert said.keys() == TestRealServer.skips.keys() | TestStockServer.skips.keys()
    assert [words for words in said.values() if words not in text] == []


def _answers(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
        return answer.status == 200
    return False
