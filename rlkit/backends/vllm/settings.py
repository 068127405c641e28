"""``Vllm``: which servers sample, and how they are started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from rlkit import _check
from rlkit.backends.samplers import TrainedPolicy
from rlkit.backends.vllm._client import check_url
from rlkit.backends.vllm._server import RANKS, server_options
from rlkit.errors import ConfigError
from rlkit.types import Lora

if TYPE_CHECKING:
    from rlkit.backends.vllm._engine import VllmEngine

__all__ = ["Vllm", "read_sampler"]

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
        start: seconds that a server may take until it answers, whether it is started here or one of ``urls`` that is
            about to start, or comes back. None: 900 for one that is started here; one of ``urls`` has to listen
            within 3 at connect, and to be ready, or back, within 60.
        deadline: seconds that an answer may take.
        restarts: how often a server that died is started again, or, if it is somebody else's, waited for.
        tolerance: the mean absolute difference of its logprobs from the trainer's at most; None is 1e-3 in float32 and
            0.03 in bfloat16.

    Raises:
        ConfigError: an option is of the wrong type or out of range.
    """

    python: str | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    memory: float | None = None
    devices: str | None = None
    urls: Sequence[str] = ()
    key: str | None = attrs.field(default=None, repr=False)
    folder: str | None = None
    start: float | None = None
    deadline: float = 1800.0
    restarts: int = 3
    tolerance: float | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("arguments", "urls"):
            value = getattr(self, name)
            texts = not isinstance(value, str) and all(isinstance(x, str) for x in value)
            _check.require(texts, f"Vllm({name})", value, "a list of strings")
        for i, url in enumerate(self.urls):
            check_url(f"Vllm(urls)[{i}]", url)
        if self.memory is not None:
            _check.real("Vllm(memory)", self.memory, above=0.0, high=1.0, why="a share of the GPU's memory")
        if self.devices is not None:
            listed = isinstance(self.devices, str) and bool(_DEVICES.fullmatch(self.devices))
            _check.require(listed, "Vllm(devices)", self.devices, "GPUs as in CUDA_VISIBLE_DEVICES, such as '1'")
        for name in ("memory", "devices") if self.urls else ():
            if getattr(self, name) is not None:
                raise ConfigError(f"Vllm({name}) cannot be combined with urls=: it places a server that rlkit starts")
        _check.optional(_check.real, "Vllm(start)", self.start, above=0.0, why="seconds")
        _check.real("Vllm(deadline)", self.deadline, above=0.0, why="seconds")
        _check.integer("Vllm(restarts)", self.restarts, low=0)
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
        if lora.rank > RANKS[-1]:
            raise ConfigError("lora.rank", f"is {lora.rank}", f"at most {RANKS[-1]}", "vLLM's largest")
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

    def command(
        self,
        model: str,
        dtype: str,
        lora: Lora,
        modules: Sequence[str],
        max_length: int,
        name: str,
        placement: Sequence[str] = (),
        *,
        device: str,
    ) -> list[str]:
        """Return the command of a server, but for its address.

        Args:
            model: a folder or a hub id.
            dtype: of the base.
            lora: the adapters' shape.
            modules: last parts of the names of those that have adapters.
            max_length: tokens of a sequence at most.
            name: what requests call the base model.
            placement: options for the GPU.
            device: the trainer's, as torch spells it.

        Raises:
            ConfigError: as ``interpreter`` does.
        """
        # `vllm serve` does the same, where the package is called vllm; builds for CPUs have another name.
        return [
            *(self.interpreter(), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model, "--served-model-name", name),
            *server_options(dtype, lora, modules, max_length, device=device),
            *placement,
            *self.arguments,
        ]

    def interpreter(self) -> str:
        """Return the Python that has vLLM.

        Raises:
            ConfigError: none is named, or it does not exist.
        """
        python = self.python or os.environ.get(_PYTHON)
        if not python:
            raise ConfigError(
                f"sampler='vllm': which Python has vllm? Give sampler=Vllm(python=...), or set {_PYTHON}; vLLM needs "
                "a separate environment: python -m venv vllm && vllm/bin/pip install vllm"
            )
        if not Path(python).exists():
            raise ConfigError(f"sampler='vllm': no Python at {python}")
        return python


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
