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
from rlkit.envs import Settings, Tasks, TaskSource
from rlkit.errors import ConfigError
from rlkit.recipes import rows
from rlkit.recipes.inputs import Buffer, ExplorerInput, Taskset
from rlkit.registry import Registry

__all__ = ["environments", "evaluated", "made", "rewards", "trained"]

environments = Registry("environment", entry_point_group="rlkit.environments")
"""Name -> function of a ``Taskset`` that gives ``rlkit.envs.Tasks``."""

rewards = Registry("reward function", entry_point_group="rlkit.rewards")
"""Name -> function ``(action, answer, **reward_fn_args)`` that gives a number."""


def trained(buffer: Buffer) -> TaskSource:
    """The tasks of ``buffer.explorer_input``: those of its taskset, or a mixture of its tasksets.

    Raises:
        ConfigError: there are none, or one can not be made.
        UnknownNameError: no environment or reward has that name.
    """
    given = buffer.explorer_input
    if (given.taskset is None) == (not given.tasksets):
        what = "has neither taskset nor tasksets" if given.taskset is None else "has both taskset and tasksets"
        raise ConfigError(_check.problem("buffer.explorer_input", what, "one of them"))
    if given.taskset is not None:
        return made(given.taskset, given, "buffer.explorer_input.taskset")
    parts = {}
    for i, each in enumerate(given.tasksets):
        where = f"buffer.explorer_input.tasksets[{i}]"
        if each.name in parts:
            raise ConfigError(_check.problem(f"{where}.name", f"is {each.name!r}", "a name that no other has"))
        parts[each.name] = made(each, given, where)
    return envs.mixture(parts)


def evaluated(buffer: Buffer, plan_n: int = 1) -> list[tuple[Tasks, int]]:
    """The held-out tasks, and how many episodes each is played."""
    given, found = buffer.explorer_input, []
    for i, each in enumerate(given.eval_tasksets):
        where = f"buffer.explorer_input.eval_tasksets[{i}]"
        kind = each.default_workflow_type or given.default_eval_workflow_type
        each = attrs.evolve(each, default_workflow_type=kind)
        count = (
            plan_n if each.repeat_times is None else _check.integer(f"{where}.repeat_times", each.repeat_times, low=1)
        )
        found.append((made(each, given, where), count))
    return found


def made(taskset: Taskset, given: ExplorerInput, where: str) -> Tasks:
    """The tasks of one task set; ``where`` it stands begins the messages."""
    kind = taskset.default_workflow_type or given.default_workflow_type or _kind(taskset)
    reward = taskset.default_reward_fn_type or given.default_reward_fn_type
    taskset = attrs.evolve(taskset, default_workflow_type=kind, default_reward_fn_type=reward)
    make = environments[kind]
    try:
        tasks: Tasks = make(taskset)
    except (ConfigError, TypeError) as error:
        text = str(error)
        raise ConfigError(f"{where}{text}" if text.startswith((".path", ".split")) else f"{where}: {text}") from error
    if not isinstance(tasks, Tasks):
        raise ConfigError(_check.problem(where, f"{kind!r} made {_check.shown(tasks)}", "rlkit.envs.Tasks"))
    own = taskset.rollout_args
    for name, neutral in (("top_p", 1.0), ("top_k", -1)):
        if getattr(own, name) not in (None, neutral):
            what = f"is {getattr(own, name)}"
            raise ConfigError(_check.problem(f"{where}.rollout_args.{name}", what, "null", f"model.{name} is for all"))
    wanted = Settings(temperature=own.temperature, max_tokens=own.max_tokens)
    if wanted != Settings():
        tasks.settings = tasks.settings.over(wanted)
    if taskset.max_tasks is not None:
        tasks = tasks[: _check.integer(f"{where}.max_tasks", taskset.max_tasks, low=1)]
    return tasks


def _kind(taskset: Taskset) -> str:
    """The environment, where none is named: a generator if the path is a bare name, else rows with a reward."""
    path = taskset.path or ""
    bare = bool(path) and "/" not in path and "." not in path
    return "reasoning_gym" if taskset.storage_type == "reasoning_gym" or bare else "simple_workflow"


@environments.register("reasoning_gym")
def _reasoning_gym(taskset: Taskset) -> Tasks:
    """A generator of reasoning-gym, by the name in ``path``; ``workflow_args`` are its settings, and ``extract``."""
    args = dict(taskset.workflow_args)
    extract = args.pop("extract", None)
    if extract is not None:
        known = {name: getattr(answers, name) for name in ("boxed", "last_number", "between_tags")}
        function = known[_check.choice("workflow_args.extract", extract, tuple(known))]
        args["extract"] = functools.partial(_as_text, function)
    if not taskset.path:
        raise ConfigError(_check.problem("path", "is not given", "a generator's name, such as gsm_symbolic"))
    tasks = envs.reasoning_gym(taskset.path, split=taskset.split, **args)
    tasks.name = taskset.name
    return tasks


def _as_text(function: Any, text: str) -> str | None:
    found = function(text)
    return None if found is None else str(found)


@environments.register("gem")
def _gem(taskset: Taskset) -> Tasks:
    """A game or data set of GEM, by its id in ``path``; ``workflow_args`` are arguments of ``rlkit.envs.gem``."""
    if importlib.util.find_spec("gem") is None:
        raise ConfigError("rlkit.envs.gem needs gem-llm: docs/environments.md says how to install it")
    return envs.gem(taskset.path or "", name=taskset.name, split=taskset.split, **taskset.workflow_args)


@environments.register("openreward")
def _openreward(taskset: Taskset) -> Tasks:
    """An environment behind a server; ``workflow_args`` are arguments of ``rlkit.envs.openreward``."""
    return envs.openreward(taskset.path or "", split=taskset.split, **taskset.workflow_args)


@environments.register("simple_workflow")
def _simple(taskset: Taskset, reward: str = "math_reward") -> Tasks:
    """Rows with a prompt and an answer, scored by ``default_reward_fn_type`` (math_reward unless given)."""
    form = taskset.format
    given = rows.read(taskset.path, where=".path", split=taskset.split, subset=taskset.subset_name)
    function = rewards[taskset.default_reward_fn_type or reward]
    score = functools.partial(_scored, function, dict(taskset.reward_fn_args))
    key = form.messages_key if form.messages_key in given[0] and form.prompt_key not in given[0] else form.prompt_key
    built = []
    for i in range(len(given)):
        where = f"{taskset.path}: row {i}"
        prompt, answer = rows.field(given[i], key, where), rows.field(given[i], form.response_key, where)
        built.append({"prompt": prompt, "answer": answer})
    return envs.function(built, score, name=taskset.name, split=taskset.split)


@environments.register("math_workflow")
def _math(taskset: Taskset) -> Tasks:
    """Rows with a problem and its answer; the last number, box or tag of what the policy said is compared."""
    return _simple(taskset)


@environments.register("math_boxed_workflow")
def _math_boxed(taskset: Taskset) -> Tasks:
    """As math_workflow, for answers in a box alone."""
    return _simple(taskset, "boxed_reward")


def _scored(function: Any, args: dict[str, Any], action: Any, answer: Any) -> float:
    return float(function(action, answer, **args))


@rewards.register("math_reward")
def _math_reward(action: str, answer: Any) -> float:
    """1 where the answer in a box, a tag, or else the last number is equal to what is right.

    >>> _math_reward("So it is 1,200.", "Six hundred twice. #### 1200")
    1.0
    """
    found = answers.boxed(action) or answers.between_tags(action)
    if found is None:
        number = answers.last_number(action)
        found = None if number is None else str(number)
    return float(found is not None and answers.math_equal(found, _truth(answer)))


@rewards.register("boxed_reward")
def _boxed_reward(action: str, answer: Any) -> float:
    """1 where the answer in a box is equal to what is right."""
    found = answers.boxed(action)
    return float(found is not None and answers.math_equal(found, _truth(answer)))


@rewards.register("exact_match")
def _exact_match(action: str, answer: Any) -> float:
    """1 where the whole text, without white space around it, is the answer."""
    return float(action.strip() == str(answer).strip())


@rewards.register("contains")
def _contains(action: str, answer: Any) -> float:
    """1 where the answer stands somewhere in the text."""
    return float(str(answer).strip() in action)


def _truth(answer: Any) -> str:
    """What is right: behind ``####`` where there is one, as in GSM8K; else the box, or all of it."""
    text = str(answer)
    if "####" in text:
        return text.rpartition("####")[2].strip().replace(",", "")
    return answers.boxed(text) or text.strip()
