"""``Vllm``: which servers sample, and how one is started."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from rlkit import _check
from rlkit._process import Program
from rlkit.backends.samplers import TrainedPolicy
from rlkit.backends.vllm._client import check_key, check_url
from rlkit.errors import BackendError, ConfigError
from rlkit.types import Lora

if TYPE_CHECKING:
    from rlkit.backends.vllm._engine import VllmEngine

__all__ = ["VARIABLES", "Vllm", "free_port", "prepare_server", "read_sampler", "server_options"]

_log = logging.getLogger(__name__)

VARIABLES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}  # that every server needs
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
_PORTS = range(20_000, 32_000)
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")  # of this environment, not of the server's

_PYTHON = "RLKIT_VLLM_PYTHON"
_DEVICES = re.compile(r"[\w-]+(,[\w-]+)*")


@attrs.frozen(kw_only=True)
class Vllm:
    """vLLM as the sampler: ``connect("local", ..., sampler=Vllm(...))``; ``sampler="vllm"`` is all defaults.

    Args:
        python: the interpreter of an environment that has vllm; None is the one that RLKIT_VLLM_PYTHON names.
        arguments: further ones of the server's command line, which may replace those that are given.
        environment: variables of the server, besides this process's.
        memory: the share of each GPU's whole memory that a server started here may take, in (0, 1]. None: on the
            trainer's GPU half of what is free there at connect, and vLLM's default on others.
        devices: the GPUs of a server started here, as in CUDA_VISIBLE_DEVICES ("1", "2,3"); None: the trainer's.
        urls: of servers that already run, so that none is started. They need ``--enable-lora
            --logprobs-mode processed_logprobs`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, the same base model, and
            sight of ``folder``.
        key: the API key of such servers.
        folder: where adapters are written for the servers; None for a temporary one.
        start: seconds that a server may take until it answers; None: 900 for one that is started here, 10 for ``urls``.
        deadline: seconds that an answer may take.
        tolerance: the mean absolute difference of its logprobs from the trainer's at most; None is 1e-3 in float32 and
            0.03 in bfloat16.

    Raises:
        ConfigError: an option is of the wrong type or out of range.
    """

    python: str | Path | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    memory: float | None = None
    devices: str | None = None
    urls: Sequence[str] = ()
    key: str | None = attrs.field(default=None, repr=False)
    folder: str | Path | None = None
    start: float | None = None
    deadline: float = 1800.0
    tolerance: float | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("arguments", "urls"):
            value = getattr(self, name)
            texts = isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value)
            _check.require(texts, f"Vllm({name})", value, "a list of strings")
        pairs = self.environment.items() if isinstance(self.environment, Mapping) else [(0, 0)]
        texts = all(isinstance(x, str) for pair in pairs for x in pair)
        _check.require(texts, "Vllm(environment)", self.environment, "a mapping of strings to strings")
        for name in ("python", "folder"):
            value = getattr(self, name)
            _check.require(value is None or isinstance(value, (str, Path)), f"Vllm({name})", value, "a path or None")
        check_key("Vllm(key)", self.key)
        for i, url in enumerate(self.urls):
            check_url(f"Vllm(urls)[{i}]", url)
        if self.memory is not None:
            _check.real("Vllm(memory)", self.memory, above=0.0, high=1.0, why="a share of the GPU's memory")
        if self.devices is not None:
            listed = isinstance(self.devices, str) and bool(_DEVICES.fullmatch(self.devices))
            _check.require(listed, "Vllm(devices)", self.devices, "GPUs as in CUDA_VISIBLE_DEVICES, such as '1'")
        for name in ("python", "arguments", "environment", "memory", "devices") if self.urls else ():
            if getattr(self, name):
                raise ConfigError(f"Vllm({name}) cannot be combined with urls=: it is for a server that rlkit starts")
        _check.optional(_check.real, "Vllm(start)", self.start, above=0.0, why="seconds")
        _check.real("Vllm(deadline)", self.deadline, above=0.0, why="seconds")
        if self.tolerance is not None:
            _check.real("Vllm(tolerance)", self.tolerance, above=0.0)

    def check(self, lora: Lora, given: object) -> None:
        """Check that vLLM is there and can serve such an adapter. See ``OpensEngine``.

        Raises:
            ConfigError: it cannot.
        """
        if lora.train_unembed and lora.target_modules is None:
            rank = lora.rank
            named = "Vllm(...)" if isinstance(given, Vllm) else repr(given)
            raise ConfigError(
                f"sampler={named}: vLLM does not support adapters on the output head, which Lora(rank={rank}) has on "
                f"this model; give lora=Lora(rank={rank}, train_unembed=False), in a recipe "
                f"model.lora_configs=[{{lora_rank: {rank}, train_unembed: false}}], or leave sampler out"
            )
        if lora.rank > _RANKS[-1]:
            raise ConfigError("lora.rank", f"is {lora.rank}", f"at most {_RANKS[-1]}", "vLLM's largest")
        if not self.urls:
            self.interpreter()

    def open(self, policy: TrainedPolicy) -> VllmEngine:
        """Return servers that sample the policy. See ``OpensEngine``.

        Raises:
            ConfigError: vLLM cannot serve such a policy, or a server serves another model.
            BackendError: a server does not answer, or samples something else than the policy.
        """
        from rlkit.backends.vllm._engine import open_engine

        return open_engine(self, policy)

    def interpreter(self) -> str:
        """Return the Python that has vLLM.

        Raises:
            ConfigError: none is named, or it does not exist.
        """
        python = str(self.python or os.environ.get(_PYTHON) or "")
        if not python:
            raise ConfigError(
                f"sampler='vllm': which Python has vllm? Give sampler=Vllm(python=...), or set {_PYTHON}; vLLM needs "
                "a separate environment: python -m venv vllm && vllm/bin/pip install vllm"
            )
        if not Path(python).exists():
            raise ConfigError(f"sampler='vllm': no Python at {python}")
        return python


def server_options(policy: TrainedPolicy) -> list[str]:
    """Return what every server has to be started with, besides the model."""
    rank = next((rank for rank in _RANKS if rank >= policy.lora.rank), policy.lora.rank)
    return [
        *("--dtype", policy.dtype, "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"),
        # Without it the head is prepared for adapters, too, and vLLM for CPUs (0.32) dies of two prompts at once
        # whose logprobs are asked for.
        *("--lora-target-modules", *sorted(policy.modules)),
        # One token is sampled after every text that is scored.
        *("--max-cpu-loras", "4", "--max-model-len", str(policy.max_length + 1)),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"),
        # vLLM for CPUs (0.32) dies of a prompt that is computed in parts and sampled with a seed: it turns the
        # generator back, which a CPU's cannot.
        *(["--no-enable-chunked-prefill"] if policy.device == "cpu" else []),
    ]


def prepare_server(
    settings: Vllm, policy: TrainedPolicy, *, grace: float, ending: Sequence[str] = ()
) -> tuple[Program, str, str]:
    """Return the program of a server that is still to be started, the URL where it will listen, and its key.

    Args:
        settings: of the server.
        policy: which it is to sample.
        grace, ending: see ``Program``.

    Raises:
        ConfigError: no interpreter is named, or the trainer's GPU has too little memory.
        BackendError: this machine has no free port.
    """
    key, port = settings.environment.get("VLLM_API_KEY") or secrets.token_hex(16), free_port()
    placed, variables = place_server(policy.device, settings.memory, settings.devices)
    command = [
        # `vllm serve` does the same, where the package is called vllm; builds for CPUs have another name.
        *(settings.interpreter(), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", policy.model, "--served-model-name", "base"),
        *(*server_options(policy), *placed, *settings.arguments),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    environment |= VARIABLES | {"VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": key} | variables
    environment |= settings.environment
    return Program(command, environment=environment, grace=grace, ending=ending), f"http://127.0.0.1:{port}", key


def free_port() -> int:
    """Return a free port of this machine.

    It is below those that systems give to connections: a server that is started takes it only when it has loaded much.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise BackendError("sampler='vllm': this machine has no free port")


def place_server(device: str, memory: float | None, devices: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the options and the environment variables that place a server.

    vLLM reserves its share of a GPU when it starts, 0.9 by default, and does not start where less is free. So on the
    trainer's GPU it gets half of what the loaded trainer left, which keeps the other half for training.

    Args:
        device: the trainer's, as torch spells it.
        memory: the share of each GPU that the server may take, of its whole memory; None for the default.
        devices: the GPUs of the server, as in CUDA_VISIBLE_DEVICES; None for the trainer's.

    Raises:
        ConfigError: the trainer's GPU has less memory free than that.
    """
    variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    if device.partition(":")[0] == "cuda":
        own = _visible_name(device)
        variables = variables or {"CUDA_VISIBLE_DEVICES": own}
        if own in variables["CUDA_VISIBLE_DEVICES"].split(","):
            memory = _share(device, memory)
    return [] if memory is None else ["--gpu-memory-utilization", f"{memory:g}"], variables


def _visible_name(device: str) -> str:
    """Return what CUDA_VISIBLE_DEVICES calls a device of this process."""
    import torch

    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[index] if index < len(names) else str(index)


def _share(device: str, memory: float | None) -> float:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    most = math.floor(100 * free / total) / 100
    share = math.floor(50 * free / total) / 100 if memory is None else memory
    if not 0 < share <= most:
        found = f"is {share:g}, {share * total / 1e9:.1f} GB of {device}, where the trainer runs"
        raise ConfigError("Vllm(memory)", found, f"at most {most:g}", f"{free / 1e9:.1f} GB of it are free")
    _log.info(
        "vLLM may take %.1f of %.1f GB of %s; %.1f GB stay free for training (Vllm(memory=))",
        *(share * total / 1e9, total / 1e9, device, (free - share * total) / 1e9),
    )
    return share


def read_sampler(sampler: str | Sequence[str]) -> Vllm:
    """Return the settings of the short forms of ``connect(sampler=)``: "vllm", a URL, or several.

    Raises:
        ConfigError: another text, or a list of other things than URLs, or of none.
    """
    where = "connect(sampler)"
    if isinstance(sampler, str):
        if sampler == "vllm":
            return Vllm()
        check_url(where, sampler, "'vllm', a URL, or several")
        return Vllm(urls=[sampler])
    _check.require(sampler, where, sampler, "at least one URL", "'vllm' starts a server")
    for i, url in enumerate(sampler):
        check_url(f"{where}[{i}]", url)
    return Vllm(urls=sampler)
