"""Check that two processes can sum an array with torch.distributed, as training on several processes does.

``python -m rlkit._commands._ranks RANK FILE BACKEND`` is one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import attrs

__all__ = ["AddedUp", "add_up"]

SIZE, NUMBERS, ROUNDS = 2, 8 * 2**20, 3  # processes, float32 numbers, and how often: the fastest counts


@attrs.frozen
class AddedUp:
    """The result of the sum.

    Attributes:
        ready: seconds until both had imported torch and found one another.
        seconds: that one sum of ``nbytes`` took.
        nbytes: of the array.
    """

    ready: float
    seconds: float
    nbytes: int = 4 * NUMBERS


def add_up(backend: str, *, deadline: float = 120.0) -> AddedUp:
    """Start two processes and make them sum an array.

    Args:
        backend: "gloo", on CPUs, or "nccl", on the first two GPUs.
        deadline: seconds for all of it.

    Raises:
        RuntimeError: one of them failed, or the sum is wrong; the message has the end of its output.
        TimeoutError: not in time.
    """
    began = time.monotonic()
    paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109  # "" in a notebook
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory(prefix="rlkit-ranks-") as folder:  # of mode 0700; a TCPStore would be open to all
        processes = [
            subprocess.Popen(  # noqa: S603  # this interpreter, this file
                [sys.executable, "-P", "-m", __name__, str(rank), f"{folder}/store", backend],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank in range(SIZE)
        ]
        try:
            said = [process.communicate(timeout=max(0.1, began + deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"two processes did not sum an array within {deadline:g} s") from error
        finally:
            for process in processes:
                with process:  # which closes its pipes and waits
                    process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError((errors.strip().splitlines() or [f"ended with status {process.returncode}"])[-1])
    told = json.loads(said[0][0])
    if not told["right"]:
        raise RuntimeError("the sum is wrong")
    return AddedUp(time.monotonic() - began - ROUNDS * told["seconds"], told["seconds"])


def main(rank: int, file: str, backend: str) -> None:
    """Sum an array with the other process; print how long it took."""
    import torch
    import torch.distributed as dist

    wait = timedelta(seconds=60)
    dist.init_process_group(backend, store=dist.FileStore(file), rank=rank, world_size=SIZE, timeout=wait)
    place = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    seconds, right = float("inf"), True
    for _ in range(ROUNDS):
        array = torch.full((NUMBERS,), float(rank + 1), device=place)
        began = time.perf_counter()
        dist.all_reduce(array)
        right = right and bool((array == 3.0).all())  # which waits for a GPU
        seconds = min(seconds, time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"seconds": seconds, "right": right}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
