"""``Vllm``: which servers sample, and how they are started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import attrs

from rlkit import _check
from rlkit.backends.vllm.build import build_options, check_build
from rlkit.errors import ConfigError
from rlkit.types import Lora

__all__ = ["Vllm", "check_served", "check_url", "server_options", "vllm_of"]

_PYTHON = "RLKIT_VLLM_PYTHON"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for


@attrs.frozen(kw_only=True)
class Vllm:
    """vLLM as the sampler: ``connect("local", ..., sampler=Vllm(...))``; ``sampler="vllm"`` is all defaults.

    Args:
        python: the interpreter of an environment that has vllm; None is the one that RLKIT_VLLM_PYTHON names.
        arguments: further ones of the server's command line, which may replace those that are given.
        environment: variables of the server, beside this process's.
        urls: of servers that are there already, so that none is started. They need ``--enable-lora
            --enable-scale-out --logprobs-mode processed_logprobs`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, the same
            base model, and sight of ``folder``.
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
        _check.optional(_check.real, "Vllm(start)", self.start, above=0.0, why="seconds")
        _check.real("Vllm(deadline)", self.deadline, above=0.0, why="seconds")
        _check.integer("Vllm(restarts)", self.restarts, low=0)
        if self.tolerance is not None:
            _check.real("Vllm(tolerance)", self.tolerance, above=0.0)

    def command(
        self, model: str, dtype: str, lora: Lora, modules: Sequence[str], max_length: int, name: str
    ) -> list[str]:
        """Return the command of a server, but for its address.

        Args:
            model: a folder or a hub id.
            dtype: of the base.
            lora: the adapters' shape.
            modules: last parts of the names of those that have adapters.
            max_length: tokens of a sequence at most.
            name: what requests call the base model.

        Raises:
            ConfigError: as ``interpreter`` does.
        """
        python, options = self.interpreter()
        # `vllm serve` does the same, where the package is called vllm; builds for CPUs have another name.
        return [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", name),
            *server_options(dtype, lora, modules, max_length),
            *options,
            *self.arguments,
        ]

    def interpreter(self) -> tuple[str, list[str]]:
        """Return the Python that has vLLM, and the options that its build has to be started with.

        Raises:
            ConfigError: it is not said which interpreter has vllm, or it has none.
        """
        python = self.python or os.environ.get(_PYTHON)
        if not python:
            raise ConfigError(
                f"sampler='vllm': which Python has vllm? Give sampler=Vllm(python=...), or set {_PYTHON}; it wants an "
                "environment of its own: python -m venv vllm && vllm/bin/pip install vllm"
            )
        return python, build_options(*check_build(python))


def server_options(dtype: str, lora: Lora, modules: Sequence[str], max_length: int) -> list[str]:
    """Return what every server has to be started with; see ``Vllm.command``."""
    rank = next((rank for rank in _RANKS if rank >= lora.rank), lora.rank)
    return [
        *("--dtype", dtype, "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"),
        # Without it the head is prepared for adapters, too, and vLLM for CPUs (0.32) dies of two prompts at once
        # whose logprobs are asked for.
        *("--lora-target-modules", *sorted(modules)),
        # One token is sampled behind every text that is scored.
        *("--max-cpu-loras", "4", "--max-model-len", str(max_length + 1), "--enable-scale-out"),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"),
    ]


def vllm_of(sampler: object) -> Vllm | None:
    """Return what ``connect(sampler=)`` says about vLLM; None: it is something else.

    Raises:
        ConfigError: a string that is neither "vllm" nor a URL, or a list of other things than URLs, or of none.
    """
    where = "connect(sampler)"
    if isinstance(sampler, Vllm):
        return sampler
    if isinstance(sampler, str):
        if sampler == "vllm":
            return Vllm()
        check_url(where, sampler, "'vllm', a URL, or several")
        return Vllm(urls=[sampler])
    if isinstance(sampler, (list, tuple)):
        _check.require(sampler, where, sampler, "at least one URL", "'vllm' starts a server")
        for i, url in enumerate(sampler):
            check_url(f"{where}[{i}]", url)
        return Vllm(urls=sampler)
    return None


def check_url(where: str, url: object, expected: str = "a URL") -> None:
    """Check that a URL names a server.

    Raises:
        ConfigError: it does not.

    >>> check_url("connect(sampler)", "https://")
    Traceback (most recent call last):
    rlkit.errors.ConfigError: connect(sampler): got 'https://' (str); expected a URL (such as http://127.0.0.1:8000)
    """
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        good = False
    spaced = isinstance(url, str) and any(char.isspace() for char in url)
    _check.require(good and not spaced, where, url, expected, "such as http://127.0.0.1:8000")


def check_served(lora: Lora, vllm: Vllm | None, sampler: object) -> None:
    """Check that vLLM is there and can serve such an adapter, where it is to, before anything is loaded or started.

    Args:
        lora: the adapters' shape.
        vllm: what ``vllm_of`` made of ``sampler``.
        sampler: what the user gave.

    Raises:
        ConfigError: it cannot.
    """
    if vllm is None:
        return
    if lora.train_unembed and lora.target_modules is None:
        named = "Vllm(...)" if isinstance(sampler, Vllm) else repr(sampler)
        raise ConfigError(
            f"sampler={named}: vLLM serves no adapter on the output head, which Lora(rank={lora.rank}) has; give "
            f"lora=Lora(rank={lora.rank}, train_unembed=False), in a recipe model.lora_configs=[{{lora_rank: "
            f"{lora.rank}, train_unembed: false}}], or leave sampler out"
        )
    if lora.rank > _RANKS[-1]:
        raise ConfigError(_check.problem("lora.rank", f"is {lora.rank}", f"at most {_RANKS[-1]}", "vLLM's largest"))
    if not vllm.urls:
        vllm.interpreter()
