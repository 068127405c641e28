"""Trinity-RFT's own configurations load and train with model and data replaced, or are refused with the true reason.

trinity_files.json holds the keys and values of the files in its repository's examples, benchmark and tests (9 April
2026, version 0.5.2), without what names a machine, a folder or a person; long texts are "a text".
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

import rlkit
from rlkit import recipes

FILES = json.loads(Path(__file__).with_name("trinity_files.json").read_text("utf-8"))
_ENVIRONMENT = "(an environment of another package: wrap it, and add it with rlkit.recipes.environments.register)"
_AGENT = "(an agent with a loop of its own: default_workflow_type: agent plays one, with workflow_args.run)"
_JUDGE = "(a model that judges: a reward that asks one can be added with rlkit.recipes.rewards.register)"
_OWN = "(register your workflows with rlkit.recipes.environments.register in a module, and load it with --import)"
_CALLS = "(tool calls are compared: rlkit.envs.function with a reward over rlkit.tools.parse, added with rlkit"
REFUSED = {  # what the message says
    "benchmark/config/alfworld-template": _ENVIRONMENT,
    "benchmark/config/frozenlake-template": _ENVIRONMENT,
    "examples/RAFT_alfworld/RAFT_alfworld_7B": _ENVIRONMENT,
    "examples/RAFT_alfworld/RAFT_reflect_alfworld_7B": _ENVIRONMENT,
    "examples/agentscope_frozenlake/frozenlake_agent": _OWN,
    "examples/agentscope_react/gsm8k": _AGENT,
    "examples/agentscope_tool_react/agentscopev0_tool_react_dapo": _AGENT,
    "examples/agentscope_tool_react/agentscopev0_tool_react_gsm8k": _AGENT,
    "examples/agentscope_tool_react/agentscopev1_tool_react_dapo": _AGENT,
    "examples/agentscope_websearch/agentscopev1_websearch_agent": _AGENT,
    "examples/async_gsm8k/trainer": "path: is 'sqlite:///gsm8k.db', Trinity-RFT's queue between two processes",
    "examples/bench/external_model": "model.external_model",
    "examples/bots/bots": _OWN,
    "examples/bots/random": _OWN,
    "examples/bots/ref_eval_collect": "(rlkit has no such workflow)",
    "examples/dpo_human_in_the_loop/dpo": "data_processor.task_pipeline",
    "examples/entropy/clipb": "multiplies rlkit.corrections.clip_b into the weights",
    "examples/entropy/clipv": "multiplies rlkit.corrections.clip_v into the weights",
    "examples/grpo_alfworld/alfworld": _ENVIRONMENT,
    "examples/grpo_alfworld_general_multi_step/alfworld": _ENVIRONMENT,
    "examples/grpo_email_search/email_search": _ENVIRONMENT,
    "examples/grpo_frozen_lake/frozen_lake": _ENVIRONMENT,
    "examples/grpo_gsm8k_experience_pipeline/gsm8k": "Data-Juicer's operators are not run",
    "examples/grpo_gsm8k_ruler/gsm8k_ruler": _JUDGE,
    "examples/grpo_gsm8k_task_pipeline/gsm8k": "data_processor.task_pipeline",
    "examples/grpo_gsm8k_trainable_ruler/gsm8k_ruler": _JUDGE,
    "examples/grpo_math/math": "(a reward model: a reward that asks one can be added with rlkit.recipes.rewards",
    "examples/grpo_rubric_as_reward/rubric": _JUDGE,
    "examples/grpo_sciworld/sciworld": _ENVIRONMENT,
    "examples/grpo_toolcall/toolace": _CALLS,
    "examples/grpo_vlm/vlm": "image_key: is 'images'; expected no value (text only)",
    "examples/grpo_webshop/webshop": _ENVIRONMENT,
    "examples/learn_to_ask/train": _OWN,
    "examples/mix_chord/mix_chord_toolace": _CALLS,
    "examples/mix_vlm/mix_vlm": "image_key: is 'images'; expected no value (text only)",
}
STILL = {  # refused for what the run itself needs, with the tasks replaced by rows and what is Data-Juicer's left out
    "examples/async_gsm8k/trainer": REFUSED["examples/async_gsm8k/trainer"],
    "examples/bench/external_model": "model.external_model",
    "examples/entropy/clipb": "multiplies rlkit.corrections.clip_b into the weights",
    "examples/entropy/clipv": "multiplies rlkit.corrections.clip_v into the weights",
}
TRUTH = {"target": 12, "numbers": [6, 6]}


def rows(form, *, learnt):
    """A row of the fields that are asked for."""
    row: dict = {}
    for key, default, value in (
        ("prompt_key", "prompt", "6 + 6?"),
        ("response_key", "response", "#### 12"),
        ("chosen_key", "chosen", "12"),
        ("rejected_key", "rejected", "13"),
    ):
        *path, last = (form.get(key) or default).split(".")
        at = row
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    said = [{"role": "user", "content": "6 + 6?"}, {"role": "assistant", "content": "12"}]
    return {**row, form.get("messages_key", "messages"): said[: 2 if learnt else 1]}


def tasksets(given):
    """The task sets of a file."""
    found = given.get("buffer", {}).get("explorer_input", {})
    return [x for x in (found.get("taskset"), *found.get("tasksets", []), *found.get("eval_tasksets", [])) if x]


def placed(given, folder):
    """The file with a folder of rows behind each path."""
    given = copy.deepcopy(given)
    trainer = given.get("buffer", {}).get("trainer_input", {})
    read = [trainer[key] for key in ("experience_buffer",) if trainer.get(key, {}).get("storage_type") == "file"]
    for i, each in enumerate([*tasksets(given), *read, *trainer.get("auxiliary_buffers", {}).values()]):
        place = folder / str(i)
        place.mkdir()
        row = rows(each.get("format") or {}, learnt=i >= len(tasksets(given)))
        reward = each.get("default_reward_fn_type")
        if reward == "countdown_reward":
            row[(each.get("format") or {}).get("response_key", "response")] = TRUTH
        for split in ("train", "test"):
            (place / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 4, "utf-8")
        each["path"] = str(place)
        each.pop("subset_name", None)
    return given


def without(given):
    """The file with rows in the place of foreign tasks, and without what is Data-Juicer's."""
    given = copy.deepcopy(given)
    given.get("buffer", {}).get("explorer_input", {}).update(
        default_workflow_type="simple_workflow", default_eval_workflow_type="simple_workflow"
    )
    given.get("buffer", {}).get("explorer_input", {}).pop("default_reward_fn_type", None)
    for each in tasksets(given):
        for key in ("default_workflow_type", "default_reward_fn_type", "workflow_args", "reward_fn_args"):
            each.pop(key, None)
        (each.get("format") or {}).pop("image_key", None)
    for each in given.get("buffer", {}).get("trainer_input", {}).get("auxiliary_buffers", {}).values():
        (each.get("format") or {}).pop("image_key", None)
    given.pop("data_processor", None)
    return given


def loaded(given, folder, *more):
    """Its settings, on the toy, which is given a template with a switch where it is to think."""
    if given.get("model", {}).get("enable_thinking"):
        given["model"]["custom_chat_template"] = (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
        )
    path = folder / "run.yaml"
    path.write_text(json.dumps(given), "utf-8")
    own = ["backend=toy", "model.tinker.enable=false", "monitor.monitor_type=null", "seed=0"]
    return recipes.load(path, [*own, f"checkpoint_root_dir={folder}", *more])


def test_the_table_is_whole():
    assert len(FILES) == 60  # as docs/recipes.md says, and how many are refused
    assert REFUSED.keys() <= FILES.keys()
    assert len(REFUSED) == 35


@pytest.mark.parametrize("name", [name for name in FILES if name not in REFUSED])
def test_files_that_load(name, tmp_path):
    """As they are, but for the model and the data: checked, and one step is trained."""
    given = placed(FILES[name], tmp_path)
    more = ["buffer.batch_size=2", "buffer.train_batch_size=0", "buffer.total_steps=1", "trainer.total_steps=null"]
    more += ["model.max_response_tokens=4", "model.max_model_len=null", "model.max_prompt_tokens=null"]
    more += ["explorer.eval_on_startup=false", "explorer.eval_interval=1000"]
    settings = loaded(given, tmp_path, *more)
    if settings.algorithm.repeat_times and settings.algorithm.repeat_times > 2:
        settings = loaded(given, tmp_path, *more, "algorithm.repeat_times=2")
    (job,) = recipes.check(loaded(given, tmp_path))
    assert job.config["algorithm"]["algorithm_type"] == FILES[name].get("algorithm", {}).get("algorithm_type", "ppo")
    if "teacher" not in job.method.recipe.needs and settings.mode != "bench":
        (outcome,) = recipes.run(settings)
        assert (outcome.folder / "metrics.jsonl").stat().st_size


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(name, tmp_path):
    """For what they really need; with that left out, no other key of theirs is in the way."""
    given = placed(FILES[name], tmp_path)
    with pytest.raises((rlkit.ConfigError, rlkit.UnknownNameError)) as refusal:
        recipes.check(loaded(given, tmp_path))
    assert REFUSED[name] in str(refusal.value)
    assert "did you mean" not in str(refusal.value)
    if name in STILL:
        return
    recipes.check(loaded(without(given), tmp_path))
