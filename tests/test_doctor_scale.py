"""``rlkit doctor --scale``: what goes beyond one process is really tried, and what does not work is said to be that."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rlkit
from rlkit._commands import _ranks, _scale
from rlkit.cli import main


@pytest.fixture(autouse=True)
def _no_service(monkeypatch):
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "RLKIT_VLLM_PYTHON"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quick(monkeypatch):
    """Nothing but what a test is about."""
    for name in ("_processes", "_vllm", "_ray"):
        monkeypatch.setattr(_scale, name, lambda: "tried")


def test_two_processes_add_up():
    """Really, over gloo: both numbers are in the sum, and it took some time."""
    pytest.importorskip("torch")
    found = _ranks.add_up("gloo")
    assert 0.0 < found.seconds < found.ready
    assert found.nbytes == 32 * 2**20


def test_processes_that_fail(monkeypatch):
    """The last line of what one wrote; and the time is bounded."""
    pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="nobody"):
        _ranks.add_up("nobody")
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        _ranks.add_up("gloo", deadline=0.01)


def test_what_does_not_work_is_said(quick, monkeypatch, capsys):
    """And the exit status is 1; what is not installed is no failure."""
    assert main(["doctor", "--scale"]) == 0
    assert capsys.readouterr().out.count("tried") == 3

    def fail():
        raise OSError("no room")

    monkeypatch.setattr(_scale, "_processes", fail)
    assert main(["doctor", "--scale"]) == 1
    assert "processes     does NOT work: no room" in capsys.readouterr().out


def test_vllm(monkeypatch, tmp_path):
    """Where it is named, it must be there."""
    assert "names no Python with vLLM" in _scale._vllm()
    monkeypatch.setenv("RLKIT_VLLM_PYTHON", sys.executable)
    with pytest.raises(RuntimeError, match="has no vllm"):
        _scale._vllm()
    monkeypatch.setenv("RLKIT_VLLM_PYTHON", str(tmp_path / "nobody"))
    with pytest.raises(OSError, match="nobody"):
        _scale._vllm()
    told = subprocess.CompletedProcess([], 0, stdout="vllm 0.32.0\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: told)
    assert _scale._vllm() == "vllm 0.32.0 of RLKIT_VLLM_PYTHON"


def test_ray():
    """Really, with a worker of its own."""
    pytest.importorskip("ray")
    assert "a worker answered after" in _scale._ray()


def test_servers(quick, capsys):
    """One of vLLM's kind, one of the Tinker API's, one that is not there, and an address that is none."""
    pytest.importorskip("starlette")
    from rlkit.gateway import Gateway

    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        for key, said in ((None, "serves policy"), ("a key of some length", "answers and requires a key")):
            with Gateway(sampler, open=True, key=key) as gateway:
                assert main(["doctor", "--scale", "--server", gateway.url]) == 0
                assert f"server        {gateway.url} {said}" in capsys.readouterr().out
    assert main(["doctor", "--scale", "--server", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9/v1/models cannot be reached" in capsys.readouterr().out
    assert main(["doctor", "--scale", "--server", "127.0.0.1:8000"]) == 2
    assert main(["doctor", "--server", "http://127.0.0.1:8000"]) == 2


def test_a_server_of_the_tinker_api(quick, tmp_path, capsys):
    """``rlkit serve`` is one."""
    pytest.importorskip("tinker")
    with rlkit.serve("toy", folder=str(tmp_path)) as server:
        assert main(["doctor", "--scale", "--server", server.url]) == 0
    assert f"{server.url} speaks the Tinker API" in capsys.readouterr().out


def test_the_plain_doctor_tries_nothing(monkeypatch, capsys):
    """It says what is installed, as fast as before."""

    def never(servers=()):
        raise AssertionError

    monkeypatch.setattr(_scale, "report", never)
    assert main(["doctor", "--offline"]) == 0
    assert "processes" not in capsys.readouterr().out
