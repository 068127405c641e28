"""Tasks from rows: a prompt and an answer each, under the names that Trinity-RFT's configurations have for them.

Where one of these names stands for a system prompt there, the rows get it: rewards are comparable only with it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlkit import _check, envs
from rlkit.envs import Tasks
from rlkit.errors import ConfigError
from rlkit.recipes import rows
from rlkit.recipes.inputs import Taskset
from rlkit.recipes.keys import TABLE
from rlkit.recipes.scoring import bound

__all__ = ["MASKED", "WORKFLOWS", "foreign"]

# arXiv:2501.12948, table 1, as a system prompt
_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e.,\n"
    "<think> reasoning process here </think>\n<answer> answer here </answer>.\n"
)
_BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
_THINK_BOXED = (  # worded otherwise there
    "You solve problems of mathematics. First reason between <think> and </think>, then answer. The final answer, in "
    r"closed form, stands in \boxed{}."
)
_QWEN = "You are a helpful assistant."

MASKED = ("math_boxed_workflow", "async_math_boxed_workflow")
"""Workflows whose answers are not trained on where they were cut."""
_FOREIGN: Mapping[str, str] = TABLE["workflows"]["foreign"]


def foreign(name: str, known: Iterable[str]) -> str | None:
    """Return why a workflow of Trinity's, or a class it would import, is not here; None for mistyped names."""
    if "." in name:
        return "--import brings what a module of yours registers"
    if not name.lower().endswith("workflow") or difflib.get_close_matches(name, list(known), n=1, cutoff=0.92):
        return None
    return next((why for part, why in _FOREIGN.items() if part in name), "no such workflow is here")


def _simple(taskset: Taskset) -> Tasks:
    """Make tasks with a prompt and an answer, scored by ``default_reward_fn_type`` (else answer_reward)."""
    return _rows(taskset, taskset.default_reward_fn_type or "answer_reward")


def _math(taskset: Taskset) -> Tasks:
    """Make tasks with a problem and its answer, R1's system prompt unless another is given; math_reward scores."""
    reward = taskset.default_reward_fn_type or "math_reward"
    return _rows(taskset, reward, system=_R1 if reward == "math_reward" else None)


def _math_boxed(taskset: Taskset) -> Tasks:
    """Do as math_workflow, for answers in a box: math_boxed_reward; with_think, format_score_coef are its own."""
    args = dict(taskset.workflow_args)
    think = _check.flag("workflow_args.with_think", args.pop("with_think", False))
    plain = _check.flag("workflow_args.use_base", args.pop("use_base", False))
    if plain and not taskset.format.raw:
        why = "the prompts of a base model are sent without a template, in each task set"
        raise ConfigError("format.raw", "is false", "true with use_base", why)
    if plain and taskset.format.system_prompt is not None:
        raise ConfigError("format.system_prompt", "is given", "nothing with use_base")
    reward_args = {"with_think": think, "format_score_coef": args.pop("format_score_coef", 0.1)}
    _nothing_left(args)
    reward = taskset.default_reward_fn_type or "math_boxed_reward"
    return _rows(
        taskset,
        reward,
        system=_THINK_BOXED if think else _BOXED,
        args=reward_args if reward == "math_boxed_reward" else {},
        used=("with_think", "format_score_coef", "use_base"),
        plain=plain,
    )


def _asked(taskset: Taskset) -> Tasks:
    """Make tasks with a problem, asked for a boxed answer as Qwen's models are; answer_reward scores them."""
    reward = taskset.default_reward_fn_type or "answer_reward"
    return _rows(taskset, reward, system=_QWEN, behind=f"\n{_BOXED}", used=("temperature",))


def _unscored(taskset: Taskset) -> Tasks:
    """Make tasks of rows with a prompt, for a teacher to score: the reward is 0."""
    return _rows(taskset, None, used=("temperature",))


def _rows(
    taskset: Taskset,
    reward: str | None,
    *,
    system: str | None = None,
    behind: str = "",
    args: Mapping[str, object] | None = None,
    used: tuple[str, ...] = (),
    plain: bool = False,
) -> Tasks:
    """Make tasks of one turn each.

    Args:
        taskset: where the rows are, and how they are read.
        reward: a name; None: it is 0.
        system: the system prompt where neither the format nor the row has one.
        behind: what is put behind each prompt.
        args: settings of the reward beside those given.
        used: keys of ``workflow_args`` that are known.
        plain: whether a row's messages are one text, with who speaks before each.
    """
    form = taskset.format
    rows_read = rows.read(taskset.path, where=".path", split=taskset.split, subset=taskset.subset_name)
    _nothing_left({key: value for key, value in taskset.workflow_args.items() if key not in used})
    score = None if reward is None else bound(reward, {**(args or {}), **taskset.reward_fn_args})
    key = (
        form.messages_key
        if form.messages_key in rows_read[0] and form.prompt_key not in rows_read[0]
        else form.prompt_key
    )
    system = None if form.system_prompt is not None else system
    built = []
    for i in range(len(rows_read)):
        where = f"{taskset.path}: row {i}"
        prompt = rows.field(rows_read[i], key, where)
        answer = None if score is None else rows.field(rows_read[i], form.response_key, where)
        said = system if form.system_prompt_key is None else rows.field(rows_read[i], form.system_prompt_key, where)
        asked = _prompt(prompt, said, behind)
        built.append({"prompt": _plain(asked) if plain else asked, "answer": answer})
    return envs.function(built, _nothing if score is None else score, name=taskset.name, split=taskset.split)


def _prompt(prompt: Any, system: str | None, behind: str) -> Any:
    if system is None and not behind:
        return prompt
    messages = [{"role": "user", "content": f"{prompt}{behind}"}] if isinstance(prompt, str) else list(prompt)
    first = messages[0].get("role") if messages else None
    return messages if system is None or first == "system" else [{"role": "system", "content": system}, *messages]


def _plain(prompt: Any) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = {"system": "System:{}\n", "user": "User:\n{}\n", "assistant": "Assistant:\n{}\n"}
    return "".join(said[m["role"]].format(m["content"]) for m in messages) + "Assistant:\n"


def _nothing(action: str) -> float:  # noqa: ARG001
    return 0.0


def _nothing_left(args: Mapping[str, Any]) -> None:
    for key in args:
        raise ConfigError(f"workflow_args.{key}", "is given", "settings that the workflow has")


_OWN: Mapping[str, Callable[[Taskset], Tasks]] = {
    "simple_workflow": _simple,
    "math_workflow": _math,
    "math_boxed_workflow": _math_boxed,
    "math_eval_workflow": _asked,
    "on_policy_distill_workflow": _unscored,
    "on_policy_distill_math_workflow": _asked,
}
_ASYNC = ("simple_workflow", "math_workflow", "math_boxed_workflow", "math_eval_workflow")
WORKFLOWS = {**_OWN, **{f"async_{name}": _OWN[name] for name in _ASYNC}}
