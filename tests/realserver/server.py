"""A real server of the Tinker API as a child process, with its log and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from rlkit.backends.vllm._server import free_port

LAUNCH = Path(__file__).with_name("launch.py")
# One sequence per micro-batch: JAX compiles for each number of rows, and the result does not depend on it.
SETTINGS = {
    "max_lora_adapters": 32,
    "max_lora_rank": 32,
    "train_micro_batch_size": 1,
    "sample_max_num_sequences": 32,
    "loss_chunk_size": 256,
}


class RealServer:
    """SkyRL's server on a free port of 127.0.0.1, over one base model. A context manager.

    Args:
        python: with the server in it.
        model: the base model's folder.
        folder: for its states, its log and its database.
        mode: "stock", "own" or "sum": what of it is corrected, see ``launch.py``.
        settings: of its engine, beside ``SETTINGS``.

    Attributes:
        url: for TINKER_BASE_URL.
        model: the base model's folder, which is also its name for clients.
        log: what the server and its engine print.
        checkpoints: where they save.
    """

    def __init__(self, python: str, model: str, folder: Path, *, mode: str, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.checkpoints = folder / "checkpoints"
        self.log = folder / "server.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [python, str(LAUNCH), "--port", str(port), "--mode", mode, "--base-model", model]
        command += ["--backend", "jax", "--backend-config", json.dumps({**SETTINGS, **settings})]
        command += ["--checkpoints-base", str(self.checkpoints), "--database-url", f"sqlite:///{folder / 'tinker.db'}"]
        command += ["--session-timeout-sec", "120", "--session-cleanup-interval-sec", "5"]  # adapters are freed by it
        cache = Path(python).parents[1] / "jax-cache"  # what was compiled once is not compiled again
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RLKIT_", "TINKER_"))},
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
            "PYTHONUNBUFFERED": "1",
        }
        environment.pop("PYTHONPATH", None)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # it ends when this is closed, and so when this process ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a group of its own, which can be ended whole
            )

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and its engine, and waits for both."""
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
        with contextlib.suppress(ProcessLookupError):  # the engine is of the same group, and may be all that is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def adapter(self, path: str, folder: Path) -> Path:
        """Unpacks what ``save_weights_for_sampler`` saved at ``path``: an adapter in peft's format."""
        run, _, name = path.removeprefix("tinker://").partition("/")
        name = name.removeprefix("sampler_weights/")
        with tarfile.open(self.checkpoints / run / "sampler_weights" / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        return folder

    def _wait(self, seconds: float = 600.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}:\n{self.tail()}")
            health = f"{self.url}/api/v1/healthz"
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:  # noqa: S310
                if answer.status == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the server did not answer within {seconds} s:\n{self.tail()}")
