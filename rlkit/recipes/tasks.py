"""Tasks from settings: problems that are generated, rows of a file with a reward, or your own environment.

``environments`` holds functions that make tasks from a ``Taskset``, ``rewards`` functions that score an answer;
``register`` of each adds one, and its name can then be used in ``default_workflow_type`` and
``default_reward_fn_type``.

Tasks from rows have a prompt and an answer each. Their workflows have the names of Trinity-RFT's configurations; where
Trinity-RFT adds a system prompt to the rows of a workflow, so does rlkit, since rewards are comparable only with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs

from rlkit import _check, answers, envs
from rlkit._interaction import Message
from rlkit.envs import Tasks, TaskSettings, TaskSource
from rlkit.errors import ConfigError, DataError
from rlkit.recipes import data
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

_MASKED = ("math_boxed_workflow", "async_math_boxed_workflow")


@attrs.frozen
class _Workflow:
    """Tasks of one turn from rows with a prompt and an answer.

    Attributes:
        reward: its name, unless ``default_reward_fn_type`` names another; None: the reward is 0.
        system: the system prompt where neither the format nor the row has one.
        suffix: a text appended to each prompt.
        args: the keys of ``workflow_args`` that it accepts.
    """

    reward: str | None
    system: str | None = None
    suffix: str = ""
    args: Sequence[str] = ()

    def __call__(self, taskset: Taskset) -> Tasks:
        """Make the tasks.

        With ``use_base`` a prompt is a text for a base model, without a chat template: "System:...", "User:",
        "Assistant:".
        """
        form, source, args = taskset.format, str(taskset.path), taskset.workflow_args
        rows = data.read_rows(taskset.path, where="path", split=taskset.split, subset=taskset.subset_name)
        for key in args:
            if key not in self.args:
                raise ConfigError(f"workflow_args.{key}: unknown setting{_check.suggest(key, self.args)}")
        think = _check.flag("workflow_args.with_think", args.get("with_think", False))
        plain = _check.flag("workflow_args.use_base", args.get("use_base", False))
        raw = plain or form.raw
        reward, score = self._bind(taskset)
        system = None if self.system == _R1 and reward != self.reward else _THINK_BOXED if think else self.system
        if form.system_prompt is not None:  # the chat adds it to what is rendered
            system = (form.system_prompt or None) if raw else None
        built, unread = [], set[str]()
        for row, where in data.each_row(rows, source):
            key = form.messages_key if form.prompt_key not in row and form.messages_key in row else form.prompt_key
            asked = data.get_field(row, key, where)
            messages = data.read_prompt(asked, f"{where}: {key}")
            answer = None
            if reward is not None:
                given = data.get_field(row, form.response_key, where)
                answer = read_answer(reward, given, f"{where}: {form.response_key}")
            unread |= data.unread_fields(row, (key, form.response_key, form.system_prompt_key), messages)
            messages = _complete_prompt(data.with_system(messages, row, form, where), system, self.suffix, where)
            prompt: object = messages
            if raw:
                prompt = data.raw_prompt(_as_text(messages, where) if plain else _join(messages))
            elif isinstance(asked, str) and len(messages) == 1:  # a text stays one, as rows of your own code are
                prompt = _join(messages)
            built.append({"prompt": prompt, "answer": answer})
        data.name_unread(unread, source)
        return envs.function(built, score, name=taskset.name, split=taskset.split)

    def _bind(self, taskset: Taskset) -> tuple[str | None, Callable[..., float]]:
        """Return the name of the reward and its function, which gets the settings of the workflow that it takes."""
        reward, args = self.reward and (taskset.default_reward_fn_type or self.reward), taskset.workflow_args
        if reward is None:
            return None, _score_nothing
        names = ("with_think", "format_score_coef") if reward in ("math_boxed_reward", "algebra_boxed_reward") else ()
        return reward, bind_reward(reward, {**{x: args[x] for x in names if x in args}, **taskset.reward_fn_args})


def _join(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def _complete_prompt(messages: list[Message], system: str | None, suffix: str, where: str) -> list[Message]:
    """Return a prompt with a system message, if it has none, and a text appended to its last message."""
    last = messages[-1]
    if suffix and last["role"] != "user":
        why = "the workflow appends a text to it"
        raise DataError(where, f"ends with the role {last['role']!r}", "a message of the user", why)
    messages = [*messages[:-1], {**last, "content": f"{last['content']}{suffix}"}]
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


_PLAIN = {"system": "System:{}\n", "user": "User:\n{}\n", "assistant": "Assistant:\n{}\n"}


def _as_text(messages: Sequence[Message], where: str) -> str:
    """Return a prompt for a base model: each message after the name of its role."""
    for message in messages:
        if message["role"] not in _PLAIN or "tool_calls" in message:
            what = f"has a message of the role {message['role']!r}, or a tool call"
            raise DataError(where, what, "texts of system, user, assistant")
    return "".join(_PLAIN[m["role"]].format(m["content"]) for m in messages) + "Assistant:\n"


def _score_nothing(action: str) -> float:  # noqa: ARG001
    return 0.0


_QUESTIONS = _Workflow("answer_reward", _QWEN, f"\n{_BOXED}", ("temperature",))
_ASYNC = {
    "simple_workflow": _Workflow("answer_reward"),
    "math_workflow": _Workflow("math_reward", _R1),
    "math_boxed_workflow": _Workflow("math_boxed_reward", _BOXED, args=("with_think", "format_score_coef", "use_base")),
    "math_eval_workflow": _QUESTIONS,
}
WORKFLOWS = {
    **_ASYNC,
    **{f"async_{name}": workflow for name, workflow in _ASYNC.items()},
    "on_policy_distill_workflow": _Workflow(None, args=("temperature",)),  # for a teacher to score
    "on_policy_distill_math_workflow": _QUESTIONS,
}

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
    """Held-out tasks, the number of episodes of each task, and the sampling."""

    tasks: Tasks
    count: int
    params: SamplingParams


def held_out_tasks(buffer: Buffer, params: SamplingParams) -> list[HeldOut]:
    """Return the held-out tasks. Since their answers do not train, each may sample with its own top_p or top_k."""
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


def masked_tasksets(inputs: ExplorerInput) -> frozenset[str]:
    """Return the names of the task sets whose workflow does not train on answers that were cut."""
    played = [each for each in (inputs.taskset, *inputs.tasksets) if each is not None]
    return frozenset(x.name for x in played if (x.default_workflow_type or inputs.default_workflow_type) in _MASKED)


def rendered_forms(inputs: ExplorerInput) -> list[Format]:
    """Return the formats of the task sets whose prompts a chat template renders."""
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
        inner = str(error).startswith(("path", "split", "workflow_args", "reward_fn_args"))
        raise ConfigError(f"{where}{'.' if inner else ': '}{error}") from error
    if not isinstance(tasks, Tasks):
        raise ConfigError(where, f"{kind!r} made {_check.describe(tasks)}", "rlkit.envs.Tasks")
    sampling = taskset.rollout_args
    wanted = TaskSettings(temperature=sampling.temperature, max_tokens=sampling.max_tokens)
    if wanted != TaskSettings():
        tasks.settings = tasks.settings.over(wanted)
    if taskset.max_tasks is not None:
        tasks = tasks[: _check.integer(f"{where}.max_tasks", taskset.max_tasks, low=1)]
    return tasks


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
    return envs.gem(taskset.path or "", name=taskset.name, split=taskset.split, **taskset.workflow_args)


@environments.register("openreward")
def _openreward(taskset: Taskset) -> Tasks:
    """Make tasks of an environment on a server; ``workflow_args`` are arguments of ``rlkit.envs.openreward``."""
    return envs.openreward(taskset.path or "", split=taskset.split, **taskset.workflow_args)


for _name, _make in WORKFLOWS.items():
    environments.register(_name)(_make)
