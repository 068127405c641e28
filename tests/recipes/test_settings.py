"""Settings: the two configurations that users come with load, and what is wrong stops before any work."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import re
import sys
from pathlib import Path
from unittest import mock

import attrs
import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

import rlkit
from rlkit import backends, cli, recipes
from rlkit.recipes.job import choose_policy, make_plan
from rlkit.types import SAMPLING_OPTIONS
from tests.each import for_each
from tests.recipes.problems import curve, loaded, table

BODY = "model.lora_configs=[{train_unembed: false}]"  # no adapter on the head
NAMED = "model.lora_configs=[{target_modules: [q_proj]}]"
CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def train(folder, *words):
    """Return the status of the command with these overrides alone."""
    (folder / "run.yaml").write_text("", "utf-8")
    return cli.main(["train", str(folder / "run.yaml"), *words])


def test_the_services_configuration():
    settings = recipes.load(CONFIGS / "gsm8k_tinker.yaml")
    policy = choose_policy(settings)
    assert (policy.backend, policy.seed) == ("tinker", 42)
    assert policy.options == {"model": "meta-llama/Llama-3.2-3B", "lora": rlkit.Lora(rank=32, train_unembed=True)}
    assert str(settings.folder) == "checkpoints/Trinity-RFT-gsm8k/alignment-tinker/tinker-llama3.2-3B-off1"
    given = settings.buffer.batch_size, settings.algorithm.repeat_times, settings.synchronizer.sync_offset
    assert given == (96, 8, 1)
    plan = make_plan(settings, 8)
    assert (plan.n, plan.params.max_tokens, plan.max_length) == (8, 2048, 3072)
    assert {"cluster", "explorer.rollout_model.engine_num"} <= {*settings.without_effect}


def test_the_local_configuration():
    for given, lora in (
        ([], rlkit.Lora(rank=32, alpha=32.0)),
        ([BODY], rlkit.Lora(train_unembed=False)),
        ([NAMED], rlkit.Lora(target_modules=["q_proj"])),
    ):
        settings = recipes.load(CONFIGS / "gsm8k_lora.yaml", given)
        policy = choose_policy(settings)
        assert policy.backend == "local"
        assert policy.options == {"model": "meta-llama/Llama-3.2-3B", "lora": lora, "dtype": "bfloat16"}
    assert "explorer.rollout_model.gpu_memory_utilization" in settings.without_effect


def test_both_run(tmp_path, tiny, caplog):
    """With a small model and a file of GSM8K's form in the place of the real ones, each trains unchanged."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    rows = tmp_path / "rows.jsonl"
    given = [{"question": f"{x} + 1?", "answer": f"One more than {x}. #### {x + 1}"} for x in range(6)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in given), "utf-8")
    task = "buffer.explorer_input.taskset"
    more = [f"{task}.path={rows}", f"{task}.subset_name=null", "buffer.batch_size=2", "buffer.total_steps=2"]
    more += [f"{task}.default_reward_fn_type=answer_reward", "algorithm.repeat_times=2"]
    more += ["model.max_response_tokens=4", "model.max_prompt_tokens=120"]
    more += ["monitor.monitor_type=null", f"checkpoint_root_dir={tmp_path}"]
    with table.backend("fake", tmp_path) as (_, options), caplog.at_level(logging.INFO, "rlkit.recipes"):
        own = ["model.tinker.base_model=toy", f"model.tinker.base_url={options['base_url']}"]
        (outcome,) = recipes.run(recipes.load(CONFIGS / "gsm8k_tinker.yaml", [*more, *own]))
    assert [step for step, _ in curve(outcome)] == [0, 1]
    assert "without effect, since rlkit has no such engines" in caplog.text
    own = [f"model.model_path={tiny('llama')}", "model.lora_configs=[{lora_rank: 4}]"]
    (outcome,) = recipes.run(recipes.load(CONFIGS / "gsm8k_lora.yaml", [*more, *own]))
    assert [step for step, _ in curve(outcome)] == [0, 1]


def test_the_services_key_by_its_other_name(monkeypatch):
    settings = recipes.load(CONFIGS / "gsm8k_tinker.yaml")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("TRINITY_API_KEY", "tml-other")
    assert choose_policy(settings).options["api_key"] == "tml-other"
    monkeypatch.setenv("TINKER_API_KEY", "tml-own")
    assert "api_key" not in choose_policy(settings).options


SPOKEN = "{format: {system_prompt: Hi}, default_workflow_type: write, workflow_args: {letters: a}}"
WRONG = {  # override: what the message says
    "algorithm.repeat_tims=4": "did you mean 'repeat_times'",
    "buffer.batch_size=0": "buffer.batch_size: got 0",
    "mode=serve": "rlkit serve",
    "mode=train": "buffer.trainer_input.experience_buffer.path: is not given",
    "mode=bench": "buffer.explorer_input.eval_tasksets: is empty",
    "algorithm.algorithm_type=gpro": "no algorithm named 'gpro'; did you mean",
    "algorithm.algorithm_type=sft": "buffer.trainer_input.experience_buffer.path: is not given",
    "algorithm.algorithm_type=jsd": "explorer.auxiliary_models: is empty",
    "algorithm.algorithm_type=mix": "auxiliary_buffers: has 0 entries",
    "algorithm.advantage_fn=gro": "no estimator named 'gro'",
    "algorithm.policy_loss_fn=sft": "the loss takes no advantages",
    "algorithm.policy_loss_fn_args.clip_rang=0.2": "algorithm.policy_loss_fn_args.clip_rang: unknown setting",
    "algorithm.policy_loss_fn=decoupled_ppo": "the loss needs 'old_logprobs'",
    "algorithm.policy_loss_fn=value_huber": "algorithm.policy_loss_fn: is 'value_huber'",
    "algorithm.advantage_fn=vtrace": "it needs 'log_ratios', which this run does not",
    "algorithm.kl_loss_fn_args.kl_coef=-1": "kl_coef",
    "algorithm.loss_agg_mode=mean": "mode: got 'mean'",
    "algorithm.optimizer.lr=-1": "algorithm.optimizer.lr: got -1",
    "algorithm.optimizer.betas=[0.9]": "algorithm.optimizer.betas: has 1 entries",
    "algorithm.bypass_old_logprobs=false; algorithm.policy_loss_fn=reinforce": "algorithm.bypass_old_logprobs",
    "trainer.total_steps=9": "trainer.total_steps: is 9; expected buffer.total_steps, 3",
    "model.tinker.enable=true": "backend: is 'toy'",
    "backend=tpu": "no backend named 'tpu'",
    "backend=local; model.model_path=null": "model.model_path: is not given",
    "monitor.monitor_type=wandbb": "no tracker named 'wandbb'",
    "buffer.explorer_input.taskset.default_workflow_type=null": "buffer.explorer_input.taskset.path: is not given",
    "buffer.explorer_input.taskset=null": "has neither taskset nor tasksets",
    "explorer.auxiliary_models=[{path: 'stage:x'}]; algorithm.algorithm_type=jsd": "stage:x",
    f"buffer.explorer_input.eval_tasksets=[{SPOKEN}]": "format.system_prompt: is None in one place but 'Hi' in another",
    "init_from=stage:first": "init_from: is 'stage:first'",
    "algorithm.repeat_times=1": "algorithm.repeat_times: is 1",
    "algorithm.algorithm_type=gigpo; algorithm.repeat_times=1": "algorithm.repeat_times: is 1",
    "name=../../away": "name: is '../../away'; expected a name below checkpoint_root_dir",
    "buffer.explorer_input.taskset.rollout_args.top_p=0.5": "rollout_args.top_p: is 0.5; expected 1.0, sampling",
    "buffer.explorer_input.taskset.rollout_args.temperature=0": "rollout_args.temperature: is 0.0; expected 1.0",
    "buffer.explorer_input.eval_tasksets=[{path: chain_sum, rollout_args: {top_p: 2}}]": "top_p: got 2.0",
    "buffer.explorer_input.taskset.default_workflow_type=mathworkflow": "did you mean 'math_workflow'",
    "options.nothing=1": "no option 'nothing'",
    "algorithm.advantage_fn_args.rank_penalty=0.1": "algorithm.advantage_fn_args.rank_penalty: is 0.1; expected None",
    "algorithm.algorithm_type=rec; algorithm.policy_loss_fn_args.clip_mode=gspo-one-side": "the loss gspo",
    "trainer.trainer_config.critic.optim.lr=-1": "trainer.trainer_config.critic.optim.lr: got -1",
    "explorer.rollout_model.max_respons_tokens=3": "explorer.rollout_model.max_respons_tokens: unknown setting",
    "algorithm.optimizer.optimizer_type=muon": "expected one of 'adam', 'adamw'",
    "algorithm.sample_strategy=staleness_control": "algorithm.sample_strategy: is 'staleness_control'",
    "trainer.trainer_config.critic.optim.weight_decay=1": "weight_decay: is 1; expected no value (set algorithm.opt",
    "trainer.trainer_config.actor_rollout_ref.actor.optim.lr=1": "optim.lr: is 1; expected no value (set algorithm.opt",
    "explorer.rollout_model.max_response_tokens=3": "set model.max_response_tokens instead",
    "seed=-1": "seed: got -1",
    "model.top_p=0.9": "the loss ppo forms a ratio to the sampling policy",
    "model.repetition_penalty=1.1": "model.repetition_penalty: is 1.1; expected 1.0, sampling from the whole",
    "model.presence_penalty=1; algorithm.algorithm_type=raft; backend=tinker; model.model_path=m": "min_p or a penalty",
    "stages=[{stage_name: a}, {stage_name: a}]": "stages[1].stage_name: is 'a'",
}


@for_each("overrides", WRONG)
def test_wrong_settings_stop_before_any_work(overrides, tmp_path, capsys):
    """One sentence on standard error, status 2, and no step is done."""
    given = [*table.settings("grpo", "toy", tmp_path, ("toy", {}), 3), *overrides.split("; ")]
    assert train(tmp_path, *given, "--check") == 2
    checked = capsys.readouterr().err
    assert train(tmp_path, *given) == 2
    error = capsys.readouterr().err
    assert checked == error  # --check finds what the run would
    assert error.startswith("rlkit train: ")
    assert WRONG[overrides] in error
    assert error.count("\n") == 1
    assert all(path.stat().st_size == 0 for path in tmp_path.rglob("metrics.jsonl"))
    assert not list(tmp_path.rglob("policies/*"))


OF_LOCAL = {  # overrides -> what is said
    "options.processes=0": "processes: got 0; expected an integer >= 1",
    "options.sampler=vlm": "connect(sampler): got 'vlm' (str); expected 'vllm', a URL, or several",
    "options.sampler=5": "connect(sampler)",
    "options.sampler=[http://127.0.0.1:9,5]": "connect(sampler)[1]: got 5 (int)",
    "options.sampler=[]": "connect(sampler): got",
    "options.sampler=vllm": "sampler='vllm': vLLM does not support adapters on the output head",
    f"options.sampler=vllm; {BODY}": "set RLKIT_VLLM_PYTHON",
    f"options.sampler=http://127.0.0.1:9; {NAMED}; options.merge=true": "merge, merged_copies, max_rows, prefix_mb and",
    "options.shard=true; options.merge=true": "shard: got True with one process",
    "options.shard=true; options.merge=true; options.processes=2": "cuda_graphs have no effect with shard=True",
    "options.dtype=float8": "dtype: got 'float8'",
    "options.device=nowhere": "device: got 'nowhere'",
    "options.max_rows=0": "max_rows: got 0",
    "options.lora=4": "lora: got 4",
}


def test_all_options_of_the_local_backend_are_checked():
    kind = backends.registry["local"]
    assert inspect.signature(kind.check_options).parameters == inspect.signature(kind).parameters


@for_each("overrides", OF_LOCAL)
def test_the_values_of_the_local_backends_options_are_checked(overrides, tiny, tmp_path, monkeypatch, capsys):
    """By what connect itself checks before it loads anything, and so in the same words; no model is loaded."""
    monkeypatch.delenv("RLKIT_VLLM_PYTHON", raising=False)
    words = overrides.split("; ")
    own = table.settings("grpo", "local", tmp_path, ("local", {"model": tiny("qwen3")}), 3)
    load = mock.Mock(side_effect=AssertionError("a model is loaded"))
    monkeypatch.setattr("rlkit.backends.local.load_policy", load)
    capsys.readouterr()  # of making the model
    assert train(tmp_path, *own, *words, "--check") == 2
    checked = capsys.readouterr().err
    assert OF_LOCAL[overrides] in checked
    assert checked.count("\n") == 1
    with pytest.raises(rlkit.ConfigError) as refused:
        rlkit.connect("local", **choose_policy(recipes.load(overrides=[*own, *words])).options)
    assert checked == f"rlkit train: {refused.value}\n"
    for right in (["options.processes=2", "options.shard=true"], ["options.sampler=http://127.0.0.1:9", BODY]):
        assert train(tmp_path, *own, *right, "--check") == 0, capsys.readouterr().err
    assert not load.called


def test_a_service_that_refuses(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tinker", reason="needs the extra tinker")
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    own = table.settings("grpo", "fake", tmp_path, ("tinker", {"model": "toy", "base_url": "http://127.0.0.1:9"}), 3)
    assert train(tmp_path, *own, "options.deadline=2") == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
    with table.backend("fake", tmp_path) as where:
        monkeypatch.setenv("TINKER_API_KEY", "tml-of-somebody-else")
        assert train(tmp_path, *table.settings("grpo", "fake", tmp_path / "key", where, 3)) == 2
    error = capsys.readouterr().err
    assert "key" in error.lower()
    assert "somebody" not in error


def test_the_example_is_right_and_check_does_no_work(tmp_path, monkeypatch, capsys):
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", str(CONFIGS / "chain_sum.yaml"), "--check"]) == 0
    assert capsys.readouterr().out == "the settings are right\n"
    assert list(tmp_path.iterdir()) == []


def test_refused_keys_that_switch_nothing_on():
    given = ["model.trust_remote_code=false", "explorer.dynamic_timeout={enable: false, ratio: 3.0}"]
    for right in ([*given, "data_processor={}"], ["model.trust_remote_code=${oc.env:RLKIT_UNSET,false}"]):
        assert recipes.load(overrides=right) == recipes.Settings()
    for wrong, said in (
        ("explorer.dynamic_timeout={enable: true}", "explorer.dynamic_timeout"),
        ("model.trust_remote_code=${oc.env:RLKIT_UNSET,true}", "model.trust_remote_code: is 'True'"),
        ("buffer.explorer_input.taskset.format.image_key=images", "buffer.explorer_input.taskset.format.image_key"),
    ):
        with pytest.raises(rlkit.ConfigError, match=said):
            recipes.load(overrides=[wrong])
    key = "buffer.trainer_input.experience_buffer.replay_buffer"
    for switch, found in (("true", (key,)), ("false", ())):
        assert recipes.load(overrides=[f"{key}.enable={switch}"]).not_followed == found


ACCEPTED = {  # a key for what only Trinity has -> one beside it that is refused, and what is said
    "explorer.auxiliary_models.0.enable_lora": ("model_pth", "did you mean 'model_path'?"),
    "buffer.trainer_input.auxiliary_buffers.sft.max_read_timeout": ("pth", "did you mean 'path'?"),
    "stages.0.trainer.use_dynamic_bsz": ("grad_clp", "did you mean 'grad_clip'?"),
    "trainer.save_strategy": ("save_intervall", "did you mean 'save_interval'?"),
    "cluster": ("modell", "did you mean 'model'?"),
}


@for_each("key", ACCEPTED)
def test_keys_for_what_only_trinity_has(key):
    """They are left out and named in ``without_effect``, unless they are null; a slip beside them keeps its hint."""
    where, _, name = key.rpartition(".")

    def given(name, value):
        made = {name: value}
        for part in reversed(where.split(".")) if where else []:
            made = [{"stage_name": "a"} | made if "stages" in where else made] if part == "0" else {part: made}
        return [f"{part}={json.dumps(inner)}" for part, inner in made.items()]

    settings = recipes.load(overrides=given(name, {"a": 1}))
    assert (settings.without_effect, settings.not_followed) == ((key,), ())
    assert attrs.evolve(settings, without_effect=()) == recipes.load(overrides=given(name, None))
    slip, said = ACCEPTED[key]
    with pytest.raises(rlkit.ConfigError, match=re.escape(said)):
        recipes.load(overrides=given(slip, 1))


def test_settings_are_kept_with_the_run(tmp_path):
    settings = loaded(tmp_path, "cluster.node_num=1")
    again = rlkit.config.dump(settings)
    assert again["without_effect"] == ["cluster"]
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps(again), "utf-8")
    assert rlkit.config.dump(recipes.load(path)) == again


def test_what_has_no_effect_is_said(tmp_path, caplog):
    right = table.settings("grpo", "toy", tmp_path, ("toy", {}), 3)
    more = ["trainer.critic_warmup=2", "explorer.auxiliary_models=[{model_path: x}]", "buffer.total_epochs=9"]
    with caplog.at_level("INFO", "rlkit.recipes"):
        assert train(tmp_path, *right, *more, "--check") == 0
    assert "without effect: trainer.critic_warmup (grpo has no critic)" in caplog.text
    assert "without effect: explorer.auxiliary_models (grpo has no teacher)" in caplog.text
    assert "without effect: buffer.total_epochs (total_steps sets the length)" in caplog.text
    assert recipes.check(loaded(tmp_path, "buffer.total_epochs=9"))[0].total == 3


def test_a_run_that_goes_on_with_other_settings_says_which(tmp_path, recwarn):
    right = table.settings("grpo", "toy", tmp_path, ("toy", {}), 2)
    assert train(tmp_path, *right, "buffer.total_steps=1") == 0
    assert not [w for w in recwarn if "has changed" in str(w.message)]
    assert train(tmp_path, *right, "algorithm.algorithm_type=rloo") == 0
    (warned,) = [str(w.message) for w in recwarn if "has changed" in str(w.message)]
    assert "algorithm.algorithm_type from 'grpo' to 'rloo', buffer.total_steps from 1 to 2" in warned


def test_a_module_of_ones_own(tmp_path, monkeypatch, capsys):
    """``--import`` brings what a file of this folder registers; one that does not exist is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    text = (
        "from rlkit import recipes\n\nrecipes.rewards.register('loud')(lambda action, answer: float(action.isupper()))"
    )
    (tmp_path / "own_rewards.py").write_text(text)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n', "utf-8")
    task = "buffer.explorer_input.taskset={path: rows.jsonl, default_reward_fn_type: loud}"
    words = ["backend=toy", "algorithm.algorithm_type=grpo", task, "--check"]
    assert train(tmp_path, *words) == 2
    assert "no reward function named 'loud'" in capsys.readouterr().err
    try:
        assert train(tmp_path, *words, "--import", "own_rewards") == 0
    finally:
        recipes.rewards.pop("loud", None)
    assert train(tmp_path, *words, "--import", "own_reward") == 2
    assert "no such module" in capsys.readouterr().err


def test_every_key_is_read():
    folder, settings = Path(recipes.__file__).parent, importlib.import_module("rlkit.recipes.settings")
    text = "\n".join(path.read_text("utf-8") for path in folder.glob("*.py") if path.stem != "settings")
    kinds = [kind for kind in vars(settings).values() if isinstance(kind, type) and attrs.has(kind)]
    alive = {field.name for kind in kinds for field in attrs.fields(kind)}
    alive -= {"checkpoint_root_dir", "project", "group", "name"}  # Settings.folder
    alive -= {f"{part}_fn_args" for part in ("kl_loss", "kl_penalty", "entropy_loss")}  # read in a loop
    alive -= {*SAMPLING_OPTIONS, "optimizer_type", "sample_strategy"}  # only their types are checked
    assert [key for key in sorted(alive) if not re.search(rf"\.{key}\b|[\"']{key}[\"']", text)] == []
