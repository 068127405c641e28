"""The quickstart's loop on SmolLM2-135M behind the real server, by hand: it takes too long to be a test.

    .venv/bin/python -m tests.realserver.quickstart .venv-server/bin/python --steps 3 --prompts 4 --samples 4

The options behind the server's Python are those of examples/quickstart.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import rlkit
from tests.realserver.server import RealServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.py"


def main(python: str, arguments: list[str]) -> None:
    """Starts the server, and runs the example's own functions on it."""
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    args = example.arguments(["--out", "runs/real-server", *arguments])
    with rlkit.connect("local", model=args.model, lora=rlkit.Lora(rank=1)) as local:
        folder = local.base.path  # converted once into the cache
    start = time.perf_counter()
    small = {
        "max_lora_adapters": 2,
        "max_lora_rank": args.rank,
        "train_micro_batch_size": 8,
        "sample_max_num_sequences": 16,
    }
    with (
        RealServer(python, folder, args.out / "server", mode="sum", **small) as server,
        rlkit.Run(args.out, seed=args.seed) as run,
    ):
        options = {"model": folder, "lora": rlkit.Lora(rank=args.rank), "deadline": 3600.0}
        policy = run.connect("tinker", base_url=server.url, max_length=512, **options)
        print(f"the server was ready after {time.perf_counter() - start:.0f} s")
        example.loop(run, policy, args)
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
