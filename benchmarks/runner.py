"""The parent's end of sides.py: processes that do one thing when told, and say what it took."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import workload

HERE = Path(__file__).parent


class Side:
    """One process.

    Args:
        name: a class of sides.py.
        dtype: "float32" or "bfloat16".
        threads: of torch.
        python: the interpreter, if not this one.
        model: another one than the workload's, a directory.
        root: of another checkout of rlkit, if not the one that is imported.
    """

    def __init__(
        self,
        name: str,
        dtype: str,
        threads: int = 1,
        python: str = sys.executable,
        model: str = workload.MODEL,
        root: Path | None = None,
    ) -> None:
        from rlkit.backends.local.hub import model_path

        command = [python, str(HERE / "sides.py"), name, dtype, str(threads), model_path(model)]
        self.name = name
        environment = os.environ | ({} if root is None else {"PYTHONPATH": str(root.resolve())})
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)
        self.versions = self._read()

    def do(self, job: str, **arguments) -> dict:
        """CPU seconds and what else the job says, and the peak of the process's resident memory so far, in GB."""
        self.process.stdin.write(json.dumps([job, arguments]) + "\n")
        self.process.stdin.flush()
        found = self._read()
        print(f"{self.name} {job} {arguments}: {found}", file=sys.stderr, flush=True)
        return found

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the side {self.name} ended with status {self.process.wait()}")
        return json.loads(line)


def interleaved(sides: list[Side], rounds: int, job: str, **arguments) -> dict[str, dict[str, float]]:
    """Medians of every figure of ``job``, the sides taking turns (A B A B ...)."""
    found: dict[str, list[dict]] = {side.name: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            found[side.name].append(side.do(job, **arguments))
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def machine() -> dict[str, str]:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return {"cpu": model, "python": platform.python_version(), "torch": version("torch")}


def write(name: str, result: dict) -> None:
    """benchmarks/results/NAME.json."""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
