"""rlkit: reinforcement-learning post-training of language models, in which the user owns the loop."""

from __future__ import annotations

import importlib
from typing import Any

from rlkit import errors
from rlkit.backends import connect, sampler
from rlkit.errors import *  # noqa: F403
from rlkit.errors import __all__ as _errors
from rlkit.futures import Future
from rlkit.registry import Registry
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Lora, Sample, SamplingParams

__version__ = "0.1.0"

__all__ = [  # noqa: PLE0604
    "Adam",
    "Datum",
    "ForwardBackwardOutput",
    "Future",
    "Lora",
    "Registry",
    "Sample",
    "SamplingParams",
    "__version__",
    "connect",
    "errors",
    "sampler",
    *_errors,
]

_SUBMODULES = {
    "advantages",
    "answers",
    "chat",
    "corrections",
    "critics",
    "envs",
    "evaluation",
    "filters",
    "losses",
    "metrics",
    "report",
    "rewards",
    "rollouts",
    "runs",
    "schedules",
    "storage",
    "testing",
    "tools",
    "tracking",
    "trajectory",
    "uploads",
}  # imported on first use: losses needs torch


_NAMES = {
    "Run": "rlkit.runs",
    "critic": "rlkit.critics",
    "evaluate": "rlkit.evaluation",
    "rollout": "rlkit.rollouts",
    "serve": "rlkit.server",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"rlkit.{name}")
    raise AttributeError(f"module 'rlkit' has no attribute {name!r}")
