"""How processes are started: from any program, from a prompt, and by torchrun."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.backends.local.distributed import Processes, world
from rlkit.backends.local.distributed.launch import call_torchrun
from rlkit.backends.local.distributed.settings import read_processes
from tests.sockets import PROC, listening, open_to_others, refusing_port

pytest.importorskip("peft")

ROOT = str(Path(__file__).parents[4])

LOOP = """
import sys
import rlkit
print("began", flush=True)
policy = rlkit.connect("local", model=sys.argv[1], device="cpu", folder=sys.argv[2], lora=rlkit.Lora(rank=2), seed=0)
print("only here", flush=True)
output = policy.forward_backward([rlkit.Datum([5, 6, 7 + k], [0, 1, 1]) for k in range(4)], "cross_entropy")
policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
print(policy.save("x").result())
again = rlkit.connect("local", resume_from=policy.save("x").result(), device="cpu", processes=2)
policy.close()
print(again.version, repr(output.result().metrics["tokens:sum"]))
again.close()
print("done")
"""

# torchrun's own store listens on every address; see tests/test_sockets.py.
LISTENING = """
import os
from tests.sockets import open_to_others
print("listening", [each for each in open_to_others(os.getppid()) if "torch.distributed.run" not in each[2]])
"""


def environment():
    return os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def test_torchrun(tiny, tmp_path):
    """Both processes run the script until connect; then one goes on, and the other leaves with status 0."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP.replace("output =", LISTENING + "output =", 1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, tiny("llama"), str(tmp_path)], capture_output=True, text=True, env=environment(), timeout=250
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert done.stdout.count("began") == 2  # on one line perhaps: both write there, unbuffered the end of a line later
    assert (lines.count("only here"), lines.count("done")) == (1, 1)
    assert "1 8.0" in lines
    assert "listening []" in lines
    assert len(list(tmp_path.glob("x-*"))) == 2


RUN = """
import os, signal, sys
import rlkit
with rlkit.Run(sys.argv[2], seed=0, trackers=()) as run:
    begins = run.step
    if sys.argv[3] == "idle":
        raise SystemExit
    policy = run.connect("local", model=sys.argv[1], device="cpu", lora=rlkit.Lora(rank=2))
    for step in run.steps(4):
        if step == 2 and begins == 0 and sys.argv[3] == "killed":
            pids = [int(x) for x in open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()]
            os.kill(next(pid for pid in pids if pid != os.getpid()), signal.SIGKILL)
        output = policy.forward_backward([rlkit.Datum([5, 6, 7 + k], [0, 1, 1]) for k in range(4)], "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
        run.checkpoint(policy)
    print("began with", begins, "ended with", repr(output.result().metrics["loss:sum"]))
"""


@pytest.mark.skipif(not PROC.exists(), reason="no Linux")
def test_runs_under_torchrun(tiny, tmp_path):
    """One process opens the folder; torchrun's restart resumes, whatever was said before it; nobody is waited for."""
    script, found = tmp_path / "run.py", {}
    script.write_text(RUN)
    for how in ("killed", "whole", "idle"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", str(script), tiny("llama"), str(tmp_path / how), how]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=250)
        assert done.returncode == 0, done.stderr
        found[how] = [line for line in done.stdout.splitlines() if "began" in line]
    assert found["idle"] == []
    (whole,), (killed,) = found["whole"], found["killed"]
    assert whole.startswith("began with 0 ended with")
    assert killed == whole.replace("with 0", "with 2")


@pytest.mark.skipif(not PROC.exists(), reason="no Linux")
def test_they_listen_on_loopback_alone(connect):
    """Each rank's gloo; torch's store is a file that no other user can open."""
    connect(2)
    assert len(listening(os.getpid())) >= 2
    assert open_to_others(os.getpid()) == []
    folder = Path(world._world.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "store").stat().st_size


def test_from_a_prompt(tiny, tmp_path):
    """Without a file, without ``if __name__ == "__main__"``, and left without ``close``: as notebooks are.

    What hides a module of Python's in a folder that was added to the path does no harm, as it does none here.
    """
    for name in ("json", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    text = LOOP.replace("seed=0)", "seed=0, processes=2)", 1).replace("again.close()", "")
    text = text.replace("import rlkit", "import rlkit; sys.path.insert(0, sys.argv[2])")
    code = f"import sys; sys.argv[1:] = {[tiny('llama'), str(tmp_path)]!r}\n{text}"
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=code,
        capture_output=True,
        text=True,
        env=environment() | {"TMPDIR": str(tmp_path)},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines.count("began"), lines.count("done"), lines.count("1 8.0")) == (1, 1, 1), done.stderr
    assert list(tmp_path.glob("rlkit-ranks-*")) == []  # the store's folder


def test_errors_are_shown_as_on_one_process(tiny, tmp_path):
    """Torch has each line of an error begin with the rank, which is of no use to who sees one."""
    code = LOOP.replace("seed=0)", "seed=0, processes=2)", 1).partition("output =")[0] + "policy.forward([3])"
    command = [sys.executable, "-c", code, tiny("llama"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=250)
    assert done.returncode == 1
    assert "\nrlkit.errors." in done.stderr, done.stderr
    assert "[rank0]" not in done.stderr


def test_what_is_cheap_is_checked_before_ranks_are_started(tiny, tmp_path, monkeypatch):
    """Such as the interpreter that has vLLM."""
    monkeypatch.delenv("RLKIT_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(
        "rlkit.backends.local.distributed.settings.Processes.open", lambda *arguments: pytest.fail("ranks were started")
    )
    options = {"device": "cpu", "folder": tmp_path, "lora": rlkit.Lora(rank=2, train_unembed=False), "processes": 2}
    for shard in (False, True):
        with pytest.raises(rlkit.ConfigError, match="which Python has vllm"):
            rlkit.connect("local", model=tiny("llama"), sampler="vllm", shard=shard, **options)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, Processes])
def test_refused(value, tiny):
    """What is no number of processes is refused in the call."""
    with pytest.raises(rlkit.ConfigError, match="processes"):
        rlkit.connect("local", model=tiny("llama"), processes=value)


def test_settings():
    """A number, or ``Processes``; one is this process alone."""
    assert read_processes(None) is None
    assert read_processes(1) is None
    assert read_processes(3) == Processes(3)
    assert type(Processes(np.int64(2), threads=np.int64(1)).threads) is int
    for option in ({"deadline": 0}, {"start": -1.0}, {"threads": 0}):
        with pytest.raises(rlkit.ConfigError, match=r"Processes\."):
            Processes(2, **option)


def test_another_number_than_torchruns(monkeypatch):
    """Under torchrun a number is torchrun's, or 1."""
    for name, text in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, text)
    assert read_processes(None) == Processes(4)
    assert read_processes(1) is None
    with pytest.raises(rlkit.ConfigError, match="torchrun started 4"):
        read_processes(2)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as operators of clusters set it for every program
    assert read_processes(None) is None
    assert read_processes(2) == Processes(2)
    for name in ("RANK", "WORLD_SIZE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "one")
            with pytest.raises(rlkit.ConfigError, match=f"{name} .*'one'"):
                read_processes(None)


def test_ranks_that_do_not_come_are_named(monkeypatch):
    """Where another launcher than torchrun sets the variables, which may have started one rank alone."""
    with refusing_port() as port:
        there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for change, words in (({}, f"MASTER_PORT={port}, RANK=0, WORLD_SIZE=2"), ({"MASTER_PORT": "x"}, "MASTER_PORT=x")):
        for name, text in {**there, **change}.items():
            monkeypatch.setenv(name, text)
        with pytest.raises(RuntimeError, match=words):
            call_torchrun(2, 1.0, {})


def test_other_backends_share_the_processes(connect):
    """Several backends may be open at once, on the same number of processes."""
    connect(2)
    with pytest.raises(rlkit.ConfigError, match="close the other backends"):
        connect(3)
