"""Environments: their protocol, sets of tasks to play in them, and adapters for existing ones.

The adapters of optional packages are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit._runtime import lazy_names
from rlkit.envs import calling as calling
from rlkit.envs._from_function import function
from rlkit.envs._from_gymnasium import gymnasium
from rlkit.envs._mixtures import Mixture, mixture
from rlkit.envs.protocol import (
    Action,
    Env,
    Harness,
    Message,
    Observation,
    StepResult,
    Task,
    Tasks,
    TaskSettings,
    TaskSource,
)

if TYPE_CHECKING:
    from rlkit.envs._from_agent import agent
    from rlkit.envs._from_gem import gem
    from rlkit.envs._from_mcp import mcp
    from rlkit.envs._from_openenv import openenv
    from rlkit.envs._from_openreward import openreward
    from rlkit.envs._from_reasoning_gym import reasoning_gym
    from rlkit.envs._from_verifiers import verifiers

__all__ = [
    "Action",
    "Env",
    "Harness",
    "Message",
    "Mixture",
    "Observation",
    "StepResult",
    "Task",
    "TaskSettings",
    "TaskSource",
    "Tasks",
    "agent",
    "function",
    "gem",
    "gymnasium",
    "mcp",
    "mixture",
    "openenv",
    "openreward",
    "reasoning_gym",
    "verifiers",
]

for _public in (Action, StepResult, function, gymnasium, mixture):
    _public.__module__ = __name__  # where users import them from

if not TYPE_CHECKING:  # adapters of optional packages, which import this package's modules
    _ADAPTERS = ("agent", "gem", "mcp", "openenv", "openreward", "reasoning_gym", "verifiers")
    __getattr__, __dir__ = lazy_names(__name__, {name: f"rlkit.envs._from_{name}" for name in _ADAPTERS}, renamed=True)
