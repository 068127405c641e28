"""Trinity-RFT's own configurations load and train with model and data replaced, or are refused with the true reason.

trinity_files.json holds the keys and values of the files in its repository's examples, benchmark and tests (9 April
2026, version 0.5.2), without what names a machine, a folder or a person; long texts are "a text".
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

import rlkit
from rlkit import recipes
from rlkit.tracking import read_metrics
from tests.each import for_each
from tests.models.build import build
from tests.recipes.problems import table

FILES = json.loads(Path(__file__).with_name("trinity_files.json").read_text("utf-8"))
WORKFLOW = "no environment named"
NEEDS = {  # what each of the others needs -> what the message names, and the files
    "an environment of another package": [
        *(WORKFLOW, "benchmark/config/alfworld-template", "benchmark/config/frozenlake-template"),
        *("examples/RAFT_alfworld/RAFT_alfworld_7B", "examples/RAFT_alfworld/RAFT_reflect_alfworld_7B"),
        *("examples/grpo_alfworld/alfworld", "examples/grpo_alfworld_general_multi_step/alfworld"),
        *("examples/grpo_email_search/email_search", "examples/grpo_frozen_lake/frozen_lake"),
        *("examples/grpo_sciworld/sciworld", "examples/grpo_webshop/webshop"),
    ],
    "an agent of AgentScope": [
        *(WORKFLOW, "examples/agentscope_frozenlake/frozenlake_agent", "examples/agentscope_react/gsm8k"),
        *(f"examples/agentscope_tool_react/agentscopev{x}" for x in ("0_tool_react_dapo", "0_tool_react_gsm8k")),
        "examples/agentscope_tool_react/agentscopev1_tool_react_dapo",
        "examples/agentscope_websearch/agentscopev1_websearch_agent",
    ],
    "a separate workflow": [
        *(WORKFLOW, "examples/bots/bots", "examples/bots/random", "examples/bots/ref_eval_collect"),
        *("examples/learn_to_ask/train", "examples/grpo_toolcall/toolace", "examples/mix_chord/mix_chord_toolace"),
    ],
    "a model that judges": [
        *(WORKFLOW, "examples/grpo_gsm8k_ruler/gsm8k_ruler", "examples/grpo_gsm8k_trainable_ruler/gsm8k_ruler"),
        *("examples/grpo_math/math", "examples/grpo_rubric_as_reward/rubric"),
    ],
    "Data-Juicer, in the pipeline of tasks": [
        *("data_processor.task_pipeline", "examples/dpo_human_in_the_loop/dpo"),
        "examples/grpo_gsm8k_task_pipeline/gsm8k",
    ],
    "Data-Juicer, in that of experiences": [
        *("unknown operator 'data_juicer'", "examples/grpo_gsm8k_experience_pipeline/gsm8k"),
    ],
    "images": ["image_key: is 'images'", "examples/grpo_vlm/vlm", "examples/mix_vlm/mix_vlm"],
    "a model on another server": ["model.external_model", "examples/bench/external_model"],
}
REFUSED = {name: said for said, *names in NEEDS.values() for name in names}
LOADED = [name for name in FILES if name not in REFUSED]
TRUTH = {"target": 12, "numbers": [6, 6]}


def rows(form, *, learnt):
    """A row of the fields that are asked for."""
    row: dict = {}
    for name, value in {"prompt": "6 + 6?", "response": "#### 12", "chosen": "12", "rejected": "13"}.items():
        *path, last = (form.get(f"{name}_key") or name).split(".")
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


def placed(given, folder, stored):
    """The file with a folder of rows for each path, and stored trajectories for a queue."""
    given = copy.deepcopy(given)
    trainer = given.get("buffer", {}).get("trainer_input", {})
    if "://" in trainer.get("experience_buffer", {}).get("path", ""):
        trainer["experience_buffer"]["path"] = str(stored)
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
    inputs, trainer = (given.get("buffer", {}).get(key, {}) for key in ("explorer_input", "trainer_input"))
    inputs |= dict.fromkeys(("default_workflow_type", "default_eval_workflow_type"), "simple_workflow")
    inputs.pop("default_reward_fn_type", None)
    for each in tasksets(given):
        for key in ("default_workflow_type", "default_reward_fn_type", "workflow_args", "reward_fn_args"):
            each.pop(key, None)
        (each.get("format") or {}).pop("image_key", None)
    for each in trainer.get("auxiliary_buffers", {}).values():
        (each.get("format") or {}).pop("image_key", None)
    given.pop("data_processor", None)
    for key in ("external_model", "enable_thinking"):
        given.get("model", {}).pop(key, None)
    return given


def test_the_table_is_whole():
    assert len(FILES) == 60
    assert REFUSED.keys() <= FILES.keys()
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8")
    assert f"{len(LOADED)} of the 60 configurations" in page
    counts = "; ".join(f"{what} ({len(names) - 1})" for what, names in NEEDS.items())
    assert counts in " ".join(page.split())


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run's trajectories, in the place of Trinity's queue between two processes."""
    folder = tmp_path_factory.mktemp("explored")
    more = [f"checkpoint_root_dir={folder}", "algorithm.algorithm_type=grpo", "mode=explore", "buffer.total_steps=1"]
    more += ["buffer.explorer_input.taskset.path=chain_sum", "model.max_response_tokens=4", "backend=toy", "seed=0"]
    (outcome,) = recipes.run(recipes.load(overrides=more))
    return outcome.folder / "trajectories.jsonl"


STEP = ["buffer.batch_size=2", "buffer.train_batch_size=0", "buffer.total_steps=1", "trainer.total_steps=null"]
STEP += ["model.max_response_tokens=4", "model.max_model_len=null", "model.max_prompt_tokens=null"]
STEP += ["explorer.eval_on_startup=false", "explorer.eval_interval=1000", "monitor.monitor_type=null", "seed=0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random model whose context has room for the prompts."""
    return build("llama", tmp_path_factory.mktemp("model") / "llama", max_length=1024)


def one_step(name, folder, backend, stored, model):
    """Train one step of a file, with only the model, the data, and the amount of work replaced."""
    given = placed(FILES[name], folder, stored)
    if given.get("model", {}).get("enable_thinking"):
        template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
        given["model"]["custom_chat_template"] = template
    path = folder / "run.yaml"
    path.write_text(json.dumps(given), "utf-8")
    own_model = contextlib.nullcontext(("local", {"model": str(model)}))
    with own_model if backend == "local" else table.backend(backend, folder) as (kind, options):
        own = [f"options.{key}={value}" for key, value in options.items() if key not in ("model", "base_url")]
        own += [f"backend={kind}", f"model.tinker.enable={json.dumps(kind == 'tinker')}"]
        own += [f"checkpoint_root_dir={folder}"]
        if "base_url" in options:
            own += ["model.tinker.base_model=toy", f"model.tinker.base_url={options['base_url']}"]
        elif "model" in options:
            own += [f"model.model_path={options['model']}", "explorer.rollout_model.dtype=null"]
        own += ["model.critic_model_path=toy"] if kind == "tinker" else []
        if given.get("explorer", {}).get("auxiliary_models"):
            own += [f"explorer.auxiliary_models.0.model_path={options.get('model', 'toy')}"]
        settings = recipes.load(path, [*own, *STEP])
        if (settings.algorithm.repeat_times or 0) > 2:
            settings = recipes.load(path, [*own, *STEP, "algorithm.repeat_times=2"])
        (outcome,) = recipes.run(settings)
    assert settings.algorithm.algorithm_type == FILES[name].get("algorithm", {}).get("algorithm_type", "ppo")
    names = {key for row in read_metrics(outcome.folder) for key in row["metrics"]}
    assert ("env/" in " ".join(names)) if settings.mode == "explore" else "train/updates" in names, names


@pytest.mark.parametrize("backend", ["toy", "local", "fake"])
def test_files_that_train(backend, tmp_path, stored, model):
    """Each trains a step, or evaluates where that is its mode; the failures are listed."""
    failed = {}
    for i, name in enumerate(LOADED):
        folder = tmp_path / str(i)
        folder.mkdir()
        try:
            one_step(name, folder, backend, stored, model)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())


@for_each("name", FILES)
def test_files_load(name, tmp_path_factory, stored):
    """Each file loads, or the error names the one thing that rlkit lacks for it, before anything is connected."""
    folder = tmp_path_factory.mktemp("file")
    own = ["backend=toy", "model.tinker.enable=false", "monitor.monitor_type=null", f"checkpoint_root_dir={folder}"]

    def check(given):
        (folder / "run.yaml").write_text(json.dumps(given), "utf-8")
        return recipes.check(recipes.load(folder / "run.yaml", own))

    given = placed(FILES[name], folder, stored)
    if name in REFUSED:
        with pytest.raises((rlkit.ConfigError, rlkit.UnknownNameError), match=re.escape(REFUSED[name])):
            check(given)
        given = without(given)
    (job,) = check(given)
    assert job.config["algorithm"]["algorithm_type"] == FILES[name].get("algorithm", {}).get("algorithm_type", "ppo")
