"""Ranks that Ray places: the same training, in the user's placement group; and one that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit import ConfigError
from rlkit.backends.local.distributed import Processes
from rlkit.backends.local.distributed.settings import read_processes

pytest.importorskip("peft")

ROOT = str(Path(__file__).parents[4])

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import rlkit
import ray
from rlkit import _ray_cluster
from rlkit.backends.local.distributed import Processes

_ray_cluster.connected()
group = ray.util.placement_group([{"CPU": 1}])
lora, adam = rlkit.Lora(rank=2, seed=3), rlkit.Adam(learning_rate=0.01)
common = {"device": "cpu", "folder": sys.argv[2], "seed": 0}
data = [rlkit.Datum([5, 6, 7 + k], [0, 1, 1]) for k in range(4)]


def trained(policy, steps=2):
    for _ in range(steps):
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(adam).result()
    return np.concatenate(policy.forward(data).result().selected)


def serving():
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\\0")
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            above = Path("/proc", parent, "cmdline").read_bytes()
        except OSError:
            continue
        if b"rlkit.backends.local._serve" in words and b"ray::" in above:
            found.append(int(place.name))
    return found


with rlkit.connect("local", model=sys.argv[1], lora=lora, **common) as alone:
    expected = trained(alone)
placed = Processes(2, ray={"placement_group": group})
policy = rlkit.connect("local", model=sys.argv[1], lora=lora, processes=placed, **common)
apart = np.abs(trained(policy) - expected).max()
print("apart", apart < 1e-6, apart, flush=True)
path = policy.save("here").result()
(rank,) = serving()
os.kill(rank, signal.SIGKILL)
try:
    while True:
        policy.forward(data).result()
except rlkit.RankLost as error:
    print("lost", error, flush=True)
policy.close()
again = rlkit.connect("local", resume_from=path, processes=placed, device="cpu", folder=sys.argv[2])
print("again", again.version, flush=True)
(rank,) = serving()
again.close()
for _ in range(600):
    if not serving():
        break
    time.sleep(0.1)
print("left", serving())
"""


def test_ray_places_ranks(tiny, tmp_path):
    """Two steps as on one process; a killed rank is named, and the remedy works; nothing is left."""
    pytest.importorskip("ray")
    if not sys.platform.startswith("linux"):
        pytest.skip("it looks for processes in /proc")
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", PROGRAM, tiny("llama"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    apart, lost, again, left = done.stdout.splitlines()
    assert apart.startswith("apart True")
    assert "rank 1 is gone" in lost
    assert (again, left) == ("again 2", "left []")


def test_options_are_checked(monkeypatch):
    """Before Ray is asked."""
    pytest.importorskip("ray")
    for options, text in (({"cpus": 1}, "cpus"), ({"num_gpus": -1}, "num_gpus"), (3, "a dict")):
        with pytest.raises(ConfigError, match=text):
            Processes(2, ray=options)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun"):
        read_processes(Processes(2, ray={}))
