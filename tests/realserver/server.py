"""A real server of the Tinker API as a child process: SkyRL's, by the command of docs/how-to/servers.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tarfile
import time
import urllib.request
from pathlib import Path

from rlkit.backends.vllm.settings import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "servers.md").read_text("utf-8")
COMMAND = re.search(r"^```sh\n# the server[^\n]*\n(.*?)\n```$", PAGE, flags=re.MULTILINE | re.DOTALL)[1]
# Adapters are freed when a session is silent.
MORE = " --session-timeout-sec 120 --session-cleanup-interval-sec 5"


class RealServer:
    """SkyRL's server on a free port of 127.0.0.1, at ``url``, over one base model. A context manager.

    Args:
        python: with the server in it.
        model: the base model's folder, which is also its name for clients.
        folder: for its states, its log and its database.
        settings: of its engine, in place of those of the page.
    """

    def __init__(self, python, model, folder, **settings):
        folder.mkdir(parents=True, exist_ok=True)
        self.model, self._folder, self._log = model, folder, folder / "server.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        given = re.search(r"'({.*?})'", COMMAND, re.DOTALL)[1]
        changes = {".venv-server/bin/python": python, "Qwen/Qwen3-0.6B": model, "8000": str(port)}
        changes |= {"$HOME/skyrl": str(folder), "sleep infinity | ": ""}  # the pipe below in its place
        changes |= {given: json.dumps({**json.loads(given), "max_lora_adapters": 32, **settings})}
        command = COMMAND + MORE
        for old, new in changes.items():
            assert old in command, old
            command = command.replace(old, new)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLKIT_", "TINKER_", "PYTHONPATH"))}
        environment |= {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        # What was compiled once is not compiled again.
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(Path(python).parents[1] / "jax-cache")}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
        # It ends when its standard input is closed, and so when this process ends; its group can be ended whole.
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(["bash", "-c", command], cwd=ROOT, env=environment, stdout=log, **pipes)

    def __enter__(self):
        end = time.monotonic() + 600.0
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"the server did not start:\n{self.tail()}")
            time.sleep(0.2)
        return self

    def __exit__(self, *exc):
        self.close()

    def _answers(self):
        health = f"{self.url}/api/v1/healthz"
        with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5) as answer:  # noqa: S310
            return answer.status == 200
        return False

    def close(self):
        """End the server and its engine, and wait for both."""
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=15)
        with contextlib.suppress(ProcessLookupError):  # the engine is of the same group, and may be all that is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self):
        """Return the end of the log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    def adapter(self, path, folder):
        """Unpack what ``save_weights_for_sampler`` saved at ``path``: an adapter in peft's format."""
        run, _, name = path.removeprefix("tinker://").partition("/")
        name = name.removeprefix("sampler_weights/")
        with tarfile.open(self._folder / "checkpoints" / run / "sampler_weights" / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        return folder
