"""Run a command on a machine that stands still now and then: a verdict that depends on speed changes there.

    python benchmarks/stalls.py --seconds 2 --every 6 -- python -m pytest tests/rollouts -m "not slow"

All processes of the command are stopped together for ``--seconds``, again and again, at moments that ``--seed`` draws.
Clocks go on, so whatever waits for less time than that sees its time run out. A machine that many share does the same,
and a test that fails here fails there some day: its deadline is shorter than what it waits for may take.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import time

import psutil


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return the process and all that descend from it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def send(processes: list[psutil.Process], number: int) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def main() -> int:
    """Run the command; return its status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="how long it stands still each time")
    parser.add_argument("--every", type=float, default=6.0, help="how long it runs in between, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    running = subprocess.Popen(options.command)
    root, stalls = psutil.Process(running.pid), 0
    while running.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(draw.uniform(0.0, 2.0) * options.every)
            break
        stopped = family(root)
        send(stopped, signal.SIGSTOP)
        send([process for process in family(root) if process not in stopped], signal.SIGSTOP)  # started meanwhile
        time.sleep(options.seconds)
        send(family(root)[::-1], signal.SIGCONT)
        stalls += 1
    print(f"stalls: {stalls} of {options.seconds:g} s", file=sys.stderr)
    return running.wait()


if __name__ == "__main__":
    sys.exit(main())
