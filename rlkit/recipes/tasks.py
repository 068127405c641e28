"""Tasks from settings: problems that are generated, rows of a file with a reward, or an environment of your own.

``environments`` holds what makes tasks from a ``Taskset``, ``rewards`` what scores an answer; ``register`` of each adds
one, and its name can then stand in ``default_workflow_type`` and ``default_reward_fn_type``.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import attrs

from rlkit import _check, answers, envs
from rlkit._drawn import NEW_OPTIONS
from rlkit.envs import Tasks, TaskSettings, TaskSource
from rlkit.errors import ConfigError
from rlkit.recipes.inputs import Buffer, ExplorerInput, Taskset
from rlkit.recipes.scoring import rewards
from rlkit.recipes.workflows import WORKFLOWS, foreign
from rlkit.registry import Registry
from rlkit.types import SamplingParams

__all__ = ["HeldOut", "environments", "held_out_tasks", "make_tasks", "rewards", "training_tasks"]

environments = Registry("environment", entry_point_group="rlkit.environments")
"""Name -> function of a ``Taskset`` that gives ``rlkit.envs.Tasks``."""


def training_tasks(buffer: Buffer) -> TaskSource:
    """Return the tasks of ``buffer.explorer_input``: those of its taskset, or a mixture of its tasksets.

    Raises:
        ConfigError: there are none, or one cannot be made.
        UnknownNameError: no environment or reward has that name.
    """
    inputs = buffer.explorer_input
    if (inputs.taskset is None) == (not inputs.tasksets):
        what = "has neither taskset nor tasksets" if inputs.taskset is None else "has both taskset and tasksets"
        raise ConfigError("buffer.explorer_input", what, "one of them")
    if inputs.taskset is not None:
        return make_tasks(inputs.taskset, inputs, "buffer.explorer_input.taskset")
    parts = {}
    for i, each in enumerate(inputs.tasksets):
        where = f"buffer.explorer_input.tasksets[{i}]"
        if each.name in parts:
            raise ConfigError(f"{where}.name", f"is {each.name!r}", "a name that no other has")
        for name, neutral in (("top_p", 1.0), ("top_k", -1), *NEW_OPTIONS.items()):
            if getattr(each.rollout_args, name) not in (None, neutral):
                what, why = f"is {getattr(each.rollout_args, name)}", f"model.{name} is for all"
                raise ConfigError(f"{where}.rollout_args.{name}", what, "null", why)
        parts[each.name] = make_tasks(each, inputs, where)
    return envs.mixture(parts)


@attrs.frozen
class HeldOut:
    """What is evaluated on: the tasks, episodes of each, and how they are sampled."""

    tasks: Tasks
    count: int
    params: SamplingParams


def held_out_tasks(buffer: Buffer, params: SamplingParams) -> list[HeldOut]:
    """Return the held-out tasks. No ratio is taken of their answers, so each may cut its distribution as it likes."""
    inputs, held_out = buffer.explorer_input, []
    for i, each in enumerate(inputs.eval_tasksets):
        where = f"buffer.explorer_input.eval_tasksets[{i}]"
        kind = each.default_workflow_type or inputs.default_eval_workflow_type
        count = 1 if each.repeat_times is None else _check.integer(f"{where}.repeat_times", each.repeat_times, low=1)
        try:
            sampled = attrs.evolve(params, **each.rollout_args.cut)
        except ConfigError as error:
            raise ConfigError(f"{where}.rollout_args: {error}") from error
        tasks = make_tasks(attrs.evolve(each, default_workflow_type=kind), inputs, where)
        held_out.append(HeldOut(tasks, count, sampled))
    return held_out


def make_tasks(taskset: Taskset, given: ExplorerInput, where: str) -> Tasks:
    """Return the tasks of one task set; ``where`` it stands begins the messages."""
    kind = taskset.default_workflow_type or given.default_workflow_type or _kind(taskset)
    reward = taskset.default_reward_fn_type or given.default_reward_fn_type
    taskset = attrs.evolve(taskset, default_workflow_type=kind, default_reward_fn_type=reward)
    why = foreign(kind, environments) if kind not in environments else None
    if why is not None:
        what, expected = f"is {kind!r}", "a name of rlkit.recipes.environments, where yours can be registered"
        raise ConfigError(f"{where}.default_workflow_type", what, expected, why)
    make = environments[kind]
    try:
        tasks: Tasks = make(taskset)
    except (ConfigError, TypeError) as error:
        text = str(error)
        raise ConfigError(
            f"{where}{text}" if text.startswith((".path", ".split", ".subset")) else _at(where, text)
        ) from error
    if not isinstance(tasks, Tasks):
        raise ConfigError(where, f"{kind!r} made {_check.shown(tasks)}", "rlkit.envs.Tasks")
    sampling = taskset.rollout_args
    wanted = TaskSettings(temperature=sampling.temperature, max_tokens=sampling.max_tokens)
    if wanted != TaskSettings():
        tasks.settings = tasks.settings.over(wanted)
    if taskset.max_tasks is not None:
        tasks = tasks[: _check.integer(f"{where}.max_tasks", taskset.max_tasks, low=1)]
    return tasks


def _at(where: str, text: str) -> str:
    inner = text.startswith(("workflow_args", "reward_fn_args"))
    return f"{where}.{text}" if inner else f"{where}: {text}"


def _kind(taskset: Taskset) -> str:
    """Return the environment, where none is named: a generator if the path is a bare name, else rows with a reward."""
    path = taskset.path or ""
    bare = bool(path) and "/" not in path and "." not in path
    return "reasoning_gym" if taskset.storage_type == "reasoning_gym" or bare else "simple_workflow"


@environments.register("reasoning_gym")
def _reasoning_gym(taskset: Taskset) -> Tasks:
    """Make tasks of reasoning-gym, by the name in ``path``; ``workflow_args`` are its settings, and ``extract``."""
    args = dict(taskset.workflow_args)
    extract = args.pop("extract", None)
    if extract is not None:
        known = {name: getattr(answers, name) for name in ("boxed", "last_number", "between_tags")}
        function = known[_check.choice("workflow_args.extract", extract, tuple(known))]
        args["extract"] = functools.partial(_as_text, function)
    if not taskset.path:
        raise ConfigError("path", "is not given", "a generator's name, such as gsm_symbolic")
    tasks = envs.reasoning_gym(taskset.path, split=taskset.split, **args)
    tasks.name = taskset.name
    return tasks


def _as_text(function: Any, text: str) -> str | None:
    answer = function(text)
    return None if answer is None else str(answer)


@environments.register("gem")
def _gem(taskset: Taskset) -> Tasks:
    """Make tasks of GEM, by the id in ``path``; ``workflow_args`` are arguments of ``rlkit.envs.gem``."""
    if importlib.util.find_spec("gem") is None:
        raise ConfigError("rlkit.envs.gem needs gem-llm: docs/environments.md says how to install it")
    return envs.gem(taskset.path or "", name=taskset.name, split=taskset.split, **taskset.workflow_args)


@environments.register("openreward")
def _openreward(taskset: Taskset) -> Tasks:
    """Make tasks of an environment behind a server; ``workflow_args`` are arguments of ``rlkit.envs.openreward``."""
    return envs.openreward(taskset.path or "", split=taskset.split, **taskset.workflow_args)


environments["agent"] = "rlkit.recipes.agents:agent"


for _name, _make in WORKFLOWS.items():
    environments.register(_name)(_make)
