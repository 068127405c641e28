"""Tasks from settings: problems that are generated, rows of a file with a reward, or your own environment.

``environments`` holds functions that make tasks from a ``Taskset``, ``rewards`` functions that score an answer;
``register`` of each adds one, and its name can then be used in ``default_workflow_type`` and
``default_reward_fn_type``.

Tasks from rows: a prompt and an answer each, under the names that Trinity-RFT's configurations have for them.

If one of these names implies a system prompt there, the rows get it: rewards are comparable only with it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from rlkit import _check, answers, envs
from rlkit._interaction import Message
from rlkit.envs import Tasks, TaskSettings, TaskSource
from rlkit.errors import ConfigError, DataError
from rlkit.recipes.data import (
    each_row,
    get_field,
    name_unread,
    raw_prompt,
    read_prompt,
    read_rows,
    unread_fields,
    with_system,
)
from rlkit.recipes.scoring import bind_reward, read_answer, rewards
from rlkit.recipes.settings import Buffer, ExplorerInput, Format, Taskset
from rlkit.registry import Registry
from rlkit.types import OPTIONAL_OPTIONS, SamplingParams

__all__ = ["WORKFLOWS", "environments", "make_tasks", "rewards"]

# arXiv:2501.12948, table 1, as a system prompt
_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e.,\n"
    "<think> reasoning process here </think>\n<answer> answer here </answer>.\n"
)
_BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
_THINK_BOXED = (  # with another wording there
    "You solve problems of mathematics. First reason between <think> and </think>, then answer. The final answer, in "
    r"closed form, stands in \boxed{}."
)
_QWEN = "You are a helpful assistant."

MASKED = ("math_boxed_workflow", "async_math_boxed_workflow")
"""Workflows whose answers are not trained on where they were cut."""


def _make_simple(taskset: Taskset) -> Tasks:
    """Make tasks with a prompt and an answer, scored by ``default_reward_fn_type`` (else answer_reward)."""
    return _make_rows(taskset, taskset.default_reward_fn_type or "answer_reward")


def _make_math(taskset: Taskset) -> Tasks:
    """Make tasks with a problem and its answer, R1's system prompt unless another is given; math_reward scores."""
    reward = taskset.default_reward_fn_type or "math_reward"
    return _make_rows(taskset, reward, system=_R1 if reward == "math_reward" else None)


def _make_math_boxed(taskset: Taskset) -> Tasks:
    """Do as math_workflow, for answers in a box: math_boxed_reward; with_think, format_score_coef are its own.

    With ``use_base`` a prompt is a text for a base model, without a chat template: "System:...", "User:", "Assistant:".
    """
    args = dict(taskset.workflow_args)
    think = _check.flag("workflow_args.with_think", args.pop("with_think", False))
    plain = _check.flag("workflow_args.use_base", args.pop("use_base", False))
    reward_args = {"with_think": think, "format_score_coef": args.pop("format_score_coef", 0.1)}
    _refuse_args(args)
    reward = taskset.default_reward_fn_type or "math_boxed_reward"
    return _make_rows(
        taskset,
        reward,
        system=_THINK_BOXED if think else _BOXED,
        args=reward_args if reward in ("math_boxed_reward", "algebra_boxed_reward") else {},
        used=("with_think", "format_score_coef", "use_base"),
        plain=plain,
    )


def _make_boxed_questions(taskset: Taskset) -> Tasks:
    """Make tasks with a problem, asked for a boxed answer as Qwen's models are; answer_reward scores them."""
    reward = taskset.default_reward_fn_type or "answer_reward"
    return _make_rows(taskset, reward, system=_QWEN, suffix=f"\n{_BOXED}", used=("temperature",))


def _make_unscored(taskset: Taskset) -> Tasks:
    """Make tasks of rows with a prompt, for a teacher to score: the reward is 0."""
    return _make_rows(taskset, None, used=("temperature",))


def _make_rows(
    taskset: Taskset,
    reward: str | None,
    *,
    system: str | None = None,
    suffix: str = "",
    args: Mapping[str, object] | None = None,
    used: tuple[str, ...] = (),
    plain: bool = False,
) -> Tasks:
    """Make tasks of one turn each.

    Args:
        taskset: the source and the format of the rows.
        reward: a name; None: it is 0.
        system: the system prompt where neither the format nor the row has one.
        suffix: a text appended to each prompt.
        args: settings of the reward besides those given.
        used: keys of ``workflow_args`` that are known.
        plain: whether a row's messages, the system prompt first, are one text, each after the name of its role.
    """
    form, source = taskset.format, str(taskset.path)
    given = read_rows(taskset.path, where=".path", split=taskset.split, subset=taskset.subset_name)
    _refuse_args(key for key in taskset.workflow_args if key not in used)
    score = None if reward is None else bind_reward(reward, {**(args or {}), **taskset.reward_fn_args})
    if form.system_prompt is not None:  # the chat adds it to what is rendered
        system = (form.system_prompt or None) if plain or form.raw else None
    built, unread = [], set[str]()
    for row, where in each_row(given, source):
        key = form.messages_key if form.prompt_key not in row and form.messages_key in row else form.prompt_key
        asked = get_field(row, key, where)
        messages = read_prompt(asked, f"{where}: {key}")
        answer = None if score is None else get_field(row, form.response_key, where)
        if reward is not None:
            answer = read_answer(reward, answer, f"{where}: {form.response_key}")
        unread |= unread_fields(row, (key, form.response_key, form.system_prompt_key), messages)
        messages = _complete_prompt(with_system(messages, row, form, where), system, suffix, where)
        if plain or form.raw:
            texts = "".join(message["content"] for message in messages)
            prompt: object = raw_prompt(_as_text(messages, where) if plain else texts)
        else:  # a text stays one, as rows of your own code are
            prompt = messages[0]["content"] if isinstance(asked, str) and len(messages) == 1 else messages
        built.append({"prompt": prompt, "answer": answer})
    name_unread(unread, source)
    return envs.function(built, _score_nothing if score is None else score, name=taskset.name, split=taskset.split)


def _complete_prompt(messages: list[Message], system: str | None, suffix: str, where: str) -> list[Message]:
    """Return a prompt with a system message, where it has none, and a text appended to its last message."""
    if suffix:
        if messages[-1]["role"] != "user":
            what = f"ends with the role {messages[-1]['role']!r}"
            raise DataError(where, what, "a question of the user", "the workflow appends a text to it")
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{suffix}"}]
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


_PLAIN = {"system": "System:{}\n", "user": "User:\n{}\n", "assistant": "Assistant:\n{}\n"}


def _as_text(messages: Sequence[Message], where: str) -> str:
    """Return a prompt for a base model: each message after the name of its role."""
    for message in messages:
        if message["role"] not in _PLAIN or "tool_calls" in message:
            raise DataError(where, f"has a message of the role {message['role']!r}", "texts of system, user, assistant")
    return "".join(_PLAIN[m["role"]].format(m["content"]) for m in messages) + "Assistant:\n"


def _score_nothing(action: str) -> float:  # noqa: ARG001
    return 0.0


def _refuse_args(args: Iterable[str]) -> None:
    for key in args:
        raise ConfigError(f"workflow_args.{key}", "is given", "only settings of the workflow")


_SYNC: Mapping[str, Callable[[Taskset], Tasks]] = {
    "simple_workflow": _make_simple,
    "math_workflow": _make_math,
    "math_boxed_workflow": _make_math_boxed,
    "math_eval_workflow": _make_boxed_questions,
    "on_policy_distill_workflow": _make_unscored,
    "on_policy_distill_math_workflow": _make_boxed_questions,
}
_ASYNC = ("simple_workflow", "math_workflow", "math_boxed_workflow", "math_eval_workflow")
WORKFLOWS = {**_SYNC, **{f"async_{name}": _SYNC[name] for name in _ASYNC}}

environments = Registry("environment", entry_point_group="rlkit.environments")
"""Name -> function of a ``Taskset`` that returns ``rlkit.envs.Tasks``."""


def training_tasks(buffer: Buffer) -> TaskSource:
    """Return the tasks of ``buffer.explorer_input``: those of its taskset, or a mixture of its tasksets.

    Raises:
        ConfigError: there are no tasks, or a task set cannot be made.
        UnknownNameError: no environment or reward has that name.
    """
    inputs = buffer.explorer_input
    if (inputs.taskset is None) == (not inputs.tasksets):
        what = "has neither taskset nor tasksets" if inputs.taskset is None else "has both taskset and tasksets"
        raise ConfigError("buffer.explorer_input", what, "exactly one of them")
    if inputs.taskset is not None:
        return make_tasks(inputs.taskset, inputs, "buffer.explorer_input.taskset")
    parts = {}
    for i, each in enumerate(inputs.tasksets):
        where = f"buffer.explorer_input.tasksets[{i}]"
        if each.name in parts:
            raise ConfigError(f"{where}.name", f"is {each.name!r}", "a unique name")
        for name, neutral in (("top_p", 1.0), ("top_k", -1), *OPTIONAL_OPTIONS.items()):
            if getattr(each.rollout_args, name) not in (None, neutral):
                what, why = f"is {getattr(each.rollout_args, name)}", f"set model.{name} for all task sets"
                raise ConfigError(f"{where}.rollout_args.{name}", what, "null", why)
        parts[each.name] = make_tasks(each, inputs, where)
    return envs.mixture(parts)


@attrs.frozen
class HeldOut:
    """The held-out tasks, the episodes of each, and their sampling."""

    tasks: Tasks
    count: int
    params: SamplingParams


def held_out_tasks(buffer: Buffer, params: SamplingParams) -> list[HeldOut]:
    """Return the held-out tasks. Their answers are not trained on, so each may truncate its distribution."""
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


def rendered_forms(inputs: ExplorerInput) -> list[Format]:
    """Return the rendering of the task sets' prompts, without those that are sent unchanged."""
    forms = []
    for each in [*([] if inputs.taskset is None else [inputs.taskset]), *inputs.tasksets, *inputs.eval_tasksets]:
        of_evaluation = inputs.default_eval_workflow_type if each in inputs.eval_tasksets else None
        kind = each.default_workflow_type or of_evaluation or inputs.default_workflow_type or _kind(each)
        if kind not in WORKFLOWS or not (each.format.raw or each.workflow_args.get("use_base")):
            forms.append(each.format)
    return forms


def make_tasks(taskset: Taskset, given: ExplorerInput, where: str) -> Tasks:
    """Return the tasks of one task set; ``where``, its place in the settings, begins messages."""
    kind = taskset.default_workflow_type or given.default_workflow_type or _kind(taskset)
    reward = taskset.default_reward_fn_type or given.default_reward_fn_type
    taskset = attrs.evolve(taskset, default_workflow_type=kind, default_reward_fn_type=reward)
    make = environments[kind]
    try:
        tasks: Tasks = make(taskset)
    except (ConfigError, TypeError) as error:
        text = str(error)
        raise ConfigError(
            f"{where}{text}" if text.startswith((".path", ".split", ".subset")) else _prefix(where, text)
        ) from error
    if not isinstance(tasks, Tasks):
        raise ConfigError(where, f"{kind!r} made {_check.describe(tasks)}", "rlkit.envs.Tasks")
    sampling = taskset.rollout_args
    wanted = TaskSettings(temperature=sampling.temperature, max_tokens=sampling.max_tokens)
    if wanted != TaskSettings():
        tasks.settings = tasks.settings.over(wanted)
    if taskset.max_tasks is not None:
        tasks = tasks[: _check.integer(f"{where}.max_tasks", taskset.max_tasks, low=1)]
    return tasks


def _prefix(where: str, text: str) -> str:
    inner = text.startswith(("workflow_args", "reward_fn_args"))
    return f"{where}.{text}" if inner else f"{where}: {text}"


def _kind(taskset: Taskset) -> str:
    """Return the default environment: a generator if the path is a bare name, else rows with a reward."""
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
        args["extract"] = functools.partial(_extract_text, function)
    if not taskset.path:
        raise ConfigError("path", "is not given", "a generator's name, such as gsm_symbolic")
    tasks = envs.reasoning_gym(taskset.path, split=taskset.split, **args)
    tasks.name = taskset.name
    return tasks


def _extract_text(function: Callable[[str], object], text: str) -> str | None:
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
    """Make tasks of an environment on a server; ``workflow_args`` are arguments of ``rlkit.envs.openreward``."""
    return envs.openreward(taskset.path or "", split=taskset.split, **taskset.workflow_args)


for _name, _make in WORKFLOWS.items():
    environments.register(_name)(_make)
