"""rlkit: reinforcement-learning post-training of language models, in which the user owns the loop."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from rlkit import errors
from rlkit._runtime import PACKAGE
from rlkit._runtime import VERSION as __version__  # noqa: N811
from rlkit.backends import connect, reference_logprobs, sampler
from rlkit.errors import *  # noqa: F403
from rlkit.errors import __all__ as _errors
from rlkit.futures import Future
from rlkit.registry import Registry
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Lora, Sample, SamplingParams

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
    "reference_logprobs",
    "sampler",
    *_errors,
]

if TYPE_CHECKING:  # what is imported on first use, for checkers and editors
    from rlkit import advantages as advantages
    from rlkit import answers as answers
    from rlkit import backends as backends
    from rlkit import chat as chat
    from rlkit import cli as cli
    from rlkit import config as config
    from rlkit import corrections as corrections
    from rlkit import credit as credit
    from rlkit import critics as critics
    from rlkit import envs as envs
    from rlkit import evaluation as evaluation
    from rlkit import filters as filters
    from rlkit import futures as futures
    from rlkit import gateway as gateway
    from rlkit import losses as losses
    from rlkit import metrics as metrics
    from rlkit import recipes as recipes
    from rlkit import registry as registry
    from rlkit import report as report
    from rlkit import rewards as rewards
    from rlkit import rollouts as rollouts
    from rlkit import runs as runs
    from rlkit import schedules as schedules
    from rlkit import server as server
    from rlkit import storage as storage
    from rlkit import testing as testing
    from rlkit import tools as tools
    from rlkit import tracking as tracking
    from rlkit import trajectory as trajectory
    from rlkit import types as types
    from rlkit import uploads as uploads
    from rlkit.critics import critic as critic
    from rlkit.evaluation import evaluate as evaluate
    from rlkit.rollouts import rollout as rollout
    from rlkit.runs import Run as Run
    from rlkit.server import serve as serve
else:
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
        if name in _rooms():
            return importlib.import_module(f"rlkit.{name}")
        raise AttributeError(f"module 'rlkit' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, *_NAMES, *_rooms()})

    def _rooms() -> set[str]:
        return {module.name for module in pkgutil.iter_modules([str(PACKAGE)]) if not module.name.startswith("_")}
