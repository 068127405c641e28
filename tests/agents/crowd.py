"""Two hundred clients of the openai SDK at once, ten times, against one gateway; some leave, one is killed.

    python -m tests.agents.crowd [--sessions 200] [--rounds 10]

Nothing hangs, every request is counted in its session, what waits for clients that left is cancelled, and the memory of
the gateway's process does not grow.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import rlkit
from rlkit.backends.protocol import Sampler
from rlkit.gateway import Gateway, Session
from tests.agents.check import ROOT
from tests.agents.environments import HERE, made, variables

SECONDS = 180  # of a round
GROWTH = 16 * 2**20  # bytes, from the third round on


class Patient:
    """A sampler that never answers who says WAIT.

    Attributes:
        asked: requests that are not answered, one each.
        cancelled: those that were given up.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.tokenizer, self.max_length, self.version = sampler.tokenizer, sampler.max_length, sampler.version
        self.asked: list[None] = []
        self.cancelled: list[None] = []
        self._sampler = sampler

    def sample(self, prompt, params, *, n=1, seed=None):
        """Ask the other sampler, or leave the answer open."""
        if "WAIT" not in self.tokenizer.decode(prompt):
            return self._sampler.sample(prompt, params, n=n, seed=seed)
        self.asked.append(None)
        inner: concurrent.futures.Future[list[rlkit.Sample]] = concurrent.futures.Future()
        return rlkit.Future.wrap(inner, on_drop=self._gave_up)

    def _gave_up(self) -> None:
        self.cancelled.append(None)  # whatever thread this is, it locks nothing

    def logprobs(self, tokens, *, temperature=1.0):
        """Ask the other sampler."""
        return self._sampler.logprobs(tokens, temperature=temperature)


def memory() -> int:
    """Return the bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait for something; whether it came."""
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    return condition()


def start(python: Path, sessions: Sequence[Session], ways: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start the clients of some sessions, in one process."""
    people = [(s.base_url, s.api_key, way) for s, way in zip(sessions, ways, strict=True)]
    (folder / "people.json").write_text(json.dumps(people), "utf-8")
    command = [str(python), str(HERE / "clients" / "crowd.py"), str(folder / "people.json")]
    return subprocess.Popen(command, env=variables(folder / "home"), start_new_session=True)


def play(gateway: Gateway, python: Path, count: int, folder: Path) -> None:
    """Let one round of clients talk; every tenth leaves, and of those every other one from a stream."""
    sessions = [gateway.session(seed=i) for i in range(count)]
    ways = [["leave", "leave-stream"][i // 10 % 2] if i % 10 == 0 else "talk" for i in range(count)]
    process = start(python, sessions, ways, folder)
    try:
        assert process.wait(SECONDS) == 0, "a client failed"
    finally:
        process.kill()
    for session, way in zip(sessions, ways, strict=True):
        name, wanted = ("turns", 3) if way == "talk" else ("cancelled", 1)
        assert until(lambda s=session, n=name, w=wanted: s.metrics[n] == w), (way, dict(session.metrics))
        assert session.metrics["requests"] == wanted, (way, dict(session.metrics))
        assert len(session.branches) == (way == "talk")
        session.close()


def kill(gateway: Gateway, sampler: Patient, python: Path, folder: Path) -> None:
    """Kill clients in the middle of their episodes."""
    sessions = [gateway.session() for _ in range(8)]
    before = len(sampler.cancelled)
    assert len(sampler.asked) == before, "what waited for clients that left is still on its way"
    process = start(python, sessions, ["wait"] * 8, folder)
    try:
        assert until(lambda: len(sampler.asked) == before + 8, 60), "the clients did not ask"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert until(lambda: len(sampler.cancelled) == before + 8), "what the dead waited for is still on its way"
    assert until(lambda: all(session.metrics["cancelled"] == 1 for session in sessions))
    for session in sessions:
        session.close()


def main() -> int:
    """0: all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-agents", help="of the environments")
    options = parser.parse_args()
    python = made(options.folder.resolve(), "sdk") / "python"
    sizes = []
    with (
        tempfile.TemporaryDirectory(prefix="rlkit-crowd-") as folder,
        rlkit.connect("toy", seed=0) as policy,
        policy.sampler().result() as toy,
    ):
        sampler = Patient(toy)
        with Gateway(sampler) as gateway:
            for i in range(options.rounds):
                began = time.monotonic()
                play(gateway, python, options.sessions, Path(folder))
                sizes.append(memory())
                print(f"round {i + 1:2}  {time.monotonic() - began:5.1f} s  {sizes[-1] / 2**20:6.1f} MB", flush=True)
            kill(gateway, sampler, python, Path(folder))
    grown = sizes[-1] - sizes[min(2, len(sizes) - 1)]
    print(f"{grown / 2**20:+.1f} MB since the third round; killed clients are counted")
    return int(grown > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
