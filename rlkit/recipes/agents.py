"""Tasks of an agent from settings: rows, the command or function that plays them, and a reward of its result."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rlkit import envs
from rlkit.envs import Action, Tasks
from rlkit.errors import ConfigError
from rlkit.recipes import rows
from rlkit.recipes.inputs import Taskset
from rlkit.recipes.scoring import bound

__all__ = ["agent"]

_FUNCTION = re.compile(r"[\w.]+:[\w.]+")


def agent(taskset: Taskset) -> Tasks:
    """Make tasks of an agent; ``workflow_args`` are ``run`` and other arguments of ``rlkit.envs.agent``."""
    args = dict(taskset.workflow_args)
    run = _run(args.pop("run", None))
    tasks = rows.read(taskset.path, where=".path", split=taskset.split, subset=taskset.subset_name)
    score = bound(taskset.default_reward_fn_type or "answer_reward", taskset.reward_fn_args)
    key = taskset.format.response_key
    rows.field(tasks[0], key, f"{taskset.path}: row 0")

    def reward(result: object, task: Mapping[str, object]) -> float:
        return score(Action(str(result)), rows.field(task, key, f"{taskset.path}: a row"))

    return envs.agent(run, reward, tasks, name=taskset.name, split=taskset.split, **args)


def _run(run: object) -> Callable[..., object] | list[str]:
    """Return the command, as a list or in one text, or the function that ``module:name`` is."""
    if isinstance(run, (list, tuple)) and run:
        return [str(part) for part in run]
    if not isinstance(run, str) or not run.strip():
        raise ConfigError("workflow_args.run", f"is {run!r}", "a command, or module:function")
    if _FUNCTION.fullmatch(run) is None:
        return shlex.split(run)
    module, _, name = run.partition(":")
    if str(Path.cwd()) not in sys.path:  # as of --import
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"workflow_args.run: {run!r} cannot be imported: {error}") from error
    return function
