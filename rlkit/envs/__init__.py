"""Environments: what they are, sets of tasks to play in them, and adapters for the ones that exist."""

from __future__ import annotations

from rlkit.envs.from_agent import agent
from rlkit.envs.from_function import function
from rlkit.envs.from_gem import gem
from rlkit.envs.from_gymnasium import gymnasium
from rlkit.envs.from_harbor import harbor
from rlkit.envs.from_mcp import mcp
from rlkit.envs.from_openenv import openenv
from rlkit.envs.from_openreward import openreward
from rlkit.envs.from_reasoning_gym import reasoning_gym
from rlkit.envs.from_textarena import textarena
from rlkit.envs.from_verifiers import verifiers
from rlkit.envs.mixtures import Mixture, mixture
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
    "harbor",
    "mcp",
    "mixture",
    "openenv",
    "openreward",
    "reasoning_gym",
    "textarena",
    "verifiers",
]

Settings = TaskSettings  # its older name

for _public in (
    Action,
    StepResult,
    agent,
    function,
    gem,
    gymnasium,
    harbor,
    mcp,
    mixture,
    openenv,
    openreward,
    reasoning_gym,
    textarena,
    verifiers,
):
    _public.__module__ = __name__  # where users import them from
