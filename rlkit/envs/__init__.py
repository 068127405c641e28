"""Environments: what they are, sets of tasks to play in them, and adapters for the ones that exist."""

from __future__ import annotations

from rlkit.envs.protocol import Action, Env, Message, Observation, Settings, StepResult, Task, Tasks, TaskSource

__all__ = ["Action", "Env", "Message", "Observation", "Settings", "StepResult", "Task", "TaskSource", "Tasks"]
