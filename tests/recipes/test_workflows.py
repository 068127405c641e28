"""Tasks from rows: prompts and rewards under Trinity's names, splits, operators, and how evaluations are sampled."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path

import attrs
import pytest
from hypothesis import example, given, strategies

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

import rlkit
from rlkit import recipes
from rlkit.envs import Action
from rlkit.envs._prompts import name_of
from rlkit.recipes import data, loop, scoring, tasks
from rlkit.recipes.job import read_critic_loss, read_operators
from rlkit.recipes.loop import is_truncated
from rlkit.recipes.settings import ExplorerInput, Format, Operator, Taskset
from rlkit.trajectory import Group, Trajectory, Turn
from tests.each import for_each
from tests.recipes.problems import curve, loaded, played

REWARDS = json.loads(Path(__file__).with_name("trinity_rewards.json").read_text("utf-8"))
OTHERWISE = {  # where rlkit decides otherwise: the last box counts, with or without LaTeX around it, as does a number
    ("math_reward", "\\boxed{17} or \\boxed{18}"),
    ("math_reward", "<answer>18"),
    ("accuracy_reward", "\\boxed{17} or \\boxed{18}"),
    ("accuracy_reward", "<think>so</think> <answer>$18$</answer>"),
    ("accuracy_reward", "\\boxed{\\frac{36}{2}}"),
}


@for_each("case", REWARDS["cases"], ids=lambda case: f"{case['reward']}-{len(case['args'])}")
def test_rewards_of_trinity(case):
    pytest.importorskip("math_verify")
    score = scoring.bind_reward(case["reward"], case["args"])
    for text, expected in zip(case.get("texts", REWARDS["texts"]), case["values"], strict=True):
        if (case["reward"], text) not in OTHERWISE:
            assert score(Action(text), case["truth"]) == pytest.approx(expected), text


def test_boxed_and_dapo_rewards_of_trinity():
    """Each response and truth has the score that Trinity's classes give it, which compare texts and compute nothing."""
    scores = [scoring.bind_reward(name, {}) for name in ("math_boxed_reward", "math_dapo_reward")]
    pairs = REWARDS["math"]["pairs"]
    assert [[said, truth, *(score(Action(said), truth) for score in scores)] for said, truth, *_ in pairs] == pairs
    assert scoring.bind_reward("math_boxed_reward_naive_dapo", {})(Action("$7$"), 7) == 1.0


@given(strategies.text(r"\\{}[]()/$%_.,- 17axsqrtfcboxedinf"), strategies.text(r"\\{}/$_.,= 17axsqrtfc"))
@example("\\boxed{" + "{" * 9999 + "\\" + "}" * 9999 + "}", "7")
def test_verdicts_on_any_text(said, truth):
    """Whatever a policy writes has a verdict, and a box that holds the truth itself is right."""
    for name in ("math_boxed_reward", "math_dapo_reward"):
        score = scoring.bind_reward(name, {})
        assert score(Action(said), truth) in (-1.0, 0.0, 1.0)
        assert score(Action(f"\\boxed{{{len(truth)}}}"), len(truth)) == 1.0


def test_rewards_that_compute():
    pytest.importorskip("math_verify")
    for name, wrong in (("algebra_boxed_reward", 0.0), ("algebra_dapo_reward", -1.0)):
        score = scoring.bind_reward(name, {})
        said = ("\\boxed{\\frac{14}{2}}", "\\boxed{8}", "7")
        assert [score(Action(text), "7") for text in said] == [1.0, wrong, wrong]
    assert (
        scoring.bind_reward("answer_reward", {})(Action("It is 1200."), "Twice 600. #### 1,200") == 1.0
    )  # GSM8K's form
    thinking = scoring.bind_reward("algebra_boxed_reward", {"with_think": True, "format_score_coef": 0.25})
    assert [thinking(Action(f"{said}\\boxed{{7}}"), "7") for said in ("", "<think>a</think>")] == [0.75, 1.0]


def test_an_error_in_a_reward_names_it(tmp_path):
    """By the name in the file, or of the function behind settings."""
    env, _ = task(tmp_path, default_reward_fn_type="countdown_reward", row={"prompt": "a", "response": "no JSON"})
    with pytest.raises(json.JSONDecodeError) as caught:
        env.step(Action("<answer>1</answer>"))
    assert "in the reward 'countdown_reward' for " in caught.value.__notes__[0]
    assert name_of(functools.partial(test_operators, 1)) == "'test_operators'"


def test_a_formula_is_read_and_not_run():
    score = scoring.bind_reward("countdown_reward", {})
    row = {"target": 1, "numbers": [9, 9, 9]}
    for text in ("9 ** 9 ** 9", "__import__('os').getpid() + 9 + 9 + 9", "9 if 9 else 9", "((" * 600 + "9 9 9"):
        assert score(Action(f"<answer>{text}</answer>"), row) == 0.1
    with pytest.raises(rlkit.DataError, match="a mapping with target and numbers"):
        score(Action("<answer>9</answer>"), 3)


def test_overlong_answers():
    """DAPO's shaping, by tokens: from 1 down to 0 for the right answer, from -1 to -2 for a wrong one."""
    args = {"enable_overlong_penalty": True, "penalty_factor": 1.0, "max_response_length": 10, "cache_length": 4}
    score = scoring.bind_reward("math_dapo_reward", args)
    right = [score(Action("so </think> \\boxed{7}", tokens=range(n)), "7") for n in (6, 8, 10, 12)]
    assert right == [1.0, 0.5, 0.0, 0.0]
    assert score(Action("\\boxed{7} </think> 8", tokens=range(10)), "7") == -2.0
    with pytest.raises(rlkit.ConfigError, match="reward_fn_args.cache: unknown setting of math_dapo_reward"):
        scoring.bind_reward("math_dapo_reward", {"cache": 4})


def task(folder, kind=None, *, row=None, name="rows.jsonl", **more):
    """The first task of a file, as an environment, and what it is told."""
    path = folder / name
    path.write_text(json.dumps(row or {"prompt": "9 + 9?", "response": "18"}) + "\n", "utf-8")
    form = more.pop("format", Format())
    taskset = Taskset(path=str(path), default_workflow_type=kind, format=form, **more)
    made = tasks.make_tasks(taskset, ExplorerInput(), "tasks")
    env = made[0].make()
    return env, env.reset(0)


def test_prompts_of_workflows(tmp_path):
    """R1's for math_workflow, a box for math_boxed_workflow; none where a system prompt or another reward is given."""
    for kind in ("math_workflow", "async_math_workflow"):
        env, said = task(tmp_path, kind)
        assert [m["role"] for m in said] == ["system", "user"]
        assert "<think> reasoning process here </think>" in said[0]["content"]
        assert env.step(Action("18")).reward == 0.9
    assert task(tmp_path, "math_workflow", default_reward_fn_type="answer_reward")[1] == "9 + 9?"
    assert task(tmp_path, "math_workflow", format=Format(system_prompt="Hi"))[1] == "9 + 9?"
    for args, reward in ({}, 1.0), ({"with_think": True, "format_score_coef": 0.25}, 0.75):
        env, said = task(tmp_path, "math_boxed_workflow", workflow_args=args)
        assert said[0]["content"].endswith(r"\boxed{}.")
        assert env.step(Action(r"\boxed{18}")).reward == reward
    assert task(tmp_path, "on_policy_distill_math_workflow")[1][1]["content"].startswith("9 + 9?\nPlease reason")
    env, said = task(tmp_path, "on_policy_distill_workflow", row={"prompt": "Hi"})
    assert (said, env.step(Action("18")).reward) == ("Hi", 0.0)
    own = {"prompt": "9 + 9?", "response": "18", "who": "You count."}
    _, said = task(tmp_path, "math_workflow", row=own, format=Format(system_prompt_key="who"))
    assert said[0] == {"role": "system", "content": "You count."}
    assert task(tmp_path, "simple_workflow")[1] == "9 + 9?"


def test_prompts_of_base_models(tmp_path):
    """use_base is one text, without a template, beside evaluations that are rendered, each with its system prompt."""
    (job,) = recipes.check(loaded(tmp_path))
    chat = attrs.evolve(job, form=Format(system_prompt="Hi.")).chat(rlkit.connect("toy").tokenizer)
    text = lambda prompt: chat.tokenizer.decode(chat.start(prompt).prompt, skip_special=False)  # noqa: E731
    base = {"kind": "math_boxed_workflow", "workflow_args": {"use_base": True}}
    bare = "User:\n9 + 9?\nAssistant:\n"
    default = f"System:Please reason step by step, and put your final answer within \\boxed{{}}.\n{bare}"
    for form, expected in (
        (Format(), default),
        (Format(raw=True), default),
        (Format(system_prompt="Add."), f"System:Add.\n{bare}"),
        (Format(system_prompt=""), bare),
    ):
        assert text(task(tmp_path, **base, format=form)[1]) == expected
    assert text(task(tmp_path, "simple_workflow", format=Format(raw=True))[1]) == "9 + 9?"
    path = tmp_path / "rows.jsonl"
    taskset, held = ({"path": str(path), "format": {"system_prompt": text}} for text in ("Add.", "Hi."))
    taskset["workflow_args"] = {"use_base": True}
    given = {"default_workflow_type": "math_boxed_workflow", "taskset": taskset, "eval_tasksets": [held]}
    own = f"buffer.explorer_input={json.dumps(given)}"
    more = ["backend=toy", f"checkpoint_root_dir={tmp_path}", "algorithm.algorithm_type=grpo"]
    (job,) = recipes.check(recipes.load(overrides=[own, *more]))
    assert job.form.system_prompt == "Hi."
    with pytest.raises(rlkit.ConfigError, match=r"format.system_prompt: is 'Add.' in one place but 'Hi.' in another"):
        recipes.check(recipes.load(overrides=[own.replace("true", "false"), *more]))


def test_fields_within_fields(tmp_path):
    """A key with dots is a path, unless the row has a field of that very name."""
    form = Format(response_key="reward_model.ground_truth")
    for answer in ({"reward_model": {"ground_truth": "18"}}, {"reward_model.ground_truth": "18"}):
        env, _ = task(tmp_path, row={"prompt": "9 + 9?", **answer}, format=form)
        assert env.step(Action("18")).reward == 1.0
    assert data.get_field({"a.b": 1, "a": {"b": 2}}, "a.b", "x") == 1
    with pytest.raises(rlkit.DataError, match=r"x: has the fields \['a'\]; expected a field 'a\.b' that is not null"):
        data.get_field({"a": {"b": None}}, "a.b", "x")


def write(path, *values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")


def test_folders_of_splits(tmp_path):
    """Files named after splits, shards in order, in a subset's folder or in data."""
    write(tmp_path / "a" / "train.jsonl", {"x": 1})
    write(tmp_path / "a" / "test.jsonl", {"x": 2})

    def read(name, split, **more):
        return [row["x"] for row in data.read_rows(str(tmp_path / name), where="t.path", split=split, **more)]

    assert (read("a", "train"), read("a", "test")) == ([1], [2])
    for i in (1, 0):
        write(tmp_path / "b" / "main" / "data" / f"train-0000{i}-of-00002.jsonl", {"x": i})
    assert read("b", "train", subset="main") == [0, 1]
    what = r"t.split: the folder .* has test.jsonl, train.jsonl; expected dev.jsonl"
    with pytest.raises(rlkit.ConfigError, match=what):
        read("a", "dev")
    write(tmp_path / "c.jsonl", {"x": 1, "split": "train"}, {"x": 2, "split": "test"}, {"x": 3})
    assert (read("c.jsonl", "train"), read("c.jsonl", "test")) == ([1, 3], [2])
    with pytest.raises(rlkit.ConfigError, match="t.split: is 'dev'; expected test or train"):
        read("c.jsonl", "dev")
    write(tmp_path / "gsm_test.jsonl", {"x": 5})
    assert read("gsm_test.jsonl", "test") == read("gsm_test.jsonl", "train") == [5]
    with pytest.raises(rlkit.ConfigError, match="is 'test'; expected train .any other split needs a separate file"):
        read("a/train.jsonl", "test")


def trajectory(reward, stop="stop", n=2):
    return Trajectory([Turn(rlkit.Sample([1], [2] * n, [-1.0] * n, stop_reason=stop), reward)], terminated=True)


def test_operators():
    groups = [Group([trajectory(r) for r in given]) for given in ((1.0, 0.0, -1.0), (1.0, 1.0), (0.0, -1.0))]
    of = lambda *given: read_operators([Operator(name, args) for name, args in given])  # noqa: E731
    left = lambda operators: [g.rewards.tolist() for g in operators.apply(groups)[0]]  # noqa: E731
    assert left(of(("reward_filter", {}))) == [[1.0, 0.0], [1.0, 1.0], [0.0]]
    assert left(of(("reward_filter", {"threshold": 0.5}))) == [[1.0], [1.0, 1.0]]
    assert left(of(("reward_std_filter", {}))) == [[1.0, 0.0, -1.0], [0.0, -1.0]]
    assert left(of(("dapo_dynamic_sampling", {}))) == [[1.0, 0.0, -1.0]]
    assert left(of(("reward_filter", {}), ("reward_std_filter", {}))) == [[1.0, 0.0]]
    assert of(("reward_filter", {})).apply(groups)[1] == {"filter/operators": 2.0}
    assert of(("mask_response_truncated", {})).masks
    assert of(("pass_rate_calculator", {})).unused
    with pytest.raises(rlkit.ConfigError, match=r"operators\[0\].args.thresh: unknown setting; did you mean"):
        of(("reward_filter", {"thresh": 1}))


def test_answers_that_were_cut_do_not_train(tmp_path):
    """They stand in the baseline of their group, and in no update: on the toy, which never ends, nothing is left."""
    assert (is_truncated(trajectory(1.0)), is_truncated(trajectory(1.0, "length"))) == (False, True)
    mask = "data_processor.experience_pipeline.operators=[{name: mask_response_truncated}]"
    ((_, with_all),) = curve(played(tmp_path / "all", "model.max_response_tokens=2", steps=1), "train/datums")
    ((_, numbers),) = curve(played(tmp_path / "mask", mask, "model.max_response_tokens=2", steps=1))
    assert numbers.get("train/datums", 0.0) < with_all["train/datums"]


def test_task_sets_cut_as_they_like(tmp_path, monkeypatch):
    """Evaluations, and episodes that train where the loss takes no ratio."""
    seen, evaluate, play = [], loop.evaluate_sync, loop.play_step
    note = lambda params: seen.append((params.top_p, params.top_k))  # noqa: E731
    monkeypatch.setattr(loop, "evaluate_sync", lambda *a, plan, **k: note(plan.params) or evaluate(*a, plan=plan, **k))
    monkeypatch.setattr(loop, "play_step", lambda *a: note(a[2].params) or play(*a))
    write = {"default_workflow_type": "write", "workflow_args": {"letters": "a"}}
    sets = [{**write, "name": name, "rollout_args": {name: value}} for name, value in (("top_p", 0.5), ("top_k", 1))]
    more = [f"buffer.explorer_input.eval_tasksets={json.dumps(sets)}"]
    played(tmp_path, *more, "buffer.explorer_input.taskset.rollout_args.top_p=0.9", algorithm="raft", steps=1)
    assert seen[:3] == [(0.5, -1), (1.0, 1), (0.9, -1)]


def test_no_thinking_is_what_a_template_without_thinking_does(tmp_path, caplog):
    tokenizer = rlkit.connect("toy").tokenizer
    (job,) = recipes.check(loaded(tmp_path, "model.enable_thinking=false"))
    with caplog.at_level(logging.INFO, "rlkit.recipes"):
        chat = job.chat(tokenizer)
    assert "enable_thinking false" in caplog.text
    assert chat.start("a").prompt.tolist() == rlkit.chat.Chat(tokenizer).start("a").prompt.tolist()
    switch = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}!{% else %}.{% endif %}"
    more = [f"model.custom_chat_template={json.dumps(switch)}", "model.enable_thinking=false"]
    (job,) = recipes.check(loaded(tmp_path, *more))
    assert tokenizer.decode(job.chat(tokenizer).start("a").prompt) == "a."
    (job,) = recipes.check(loaded(tmp_path, "model.enable_thinking=true"))
    with pytest.raises(rlkit.ConfigError, match="thinking"):
        job.chat(tokenizer)


def test_the_critics_settings_of_verl(tmp_path, caplog):
    """Its rate and its clip have their effect; the rest is named."""
    more = ["trainer.trainer_config={critic: {optim: {lr: 0.02}, cliprange_value: 0.5}, actor: {strategy: fsdp}}"]
    with caplog.at_level(logging.INFO, "rlkit.recipes"):
        (job,) = recipes.check(loaded(tmp_path, *more, algorithm="ppo"))
    assert read_critic_loss(job.settings) == (0.02, {"clip": 0.5})
    assert job.adam(0, 0.02).learning_rate == pytest.approx(0.02)
    assert "trainer.trainer_config" in caplog.text
    with pytest.raises(rlkit.ConfigError, match=r"critic.optim.lr: is 0.02; expected algorithm.critic_lr, 0.01"):
        recipes.check(loaded(tmp_path, *more, "algorithm.critic_lr=0.01", algorithm="ppo"))


def test_a_task_sets_temperature_against_the_service(tmp_path):
    own = ["backend=tinker", "model.tinker.base_model=toy", "model.tinker.enable=true"]
    key = "buffer.explorer_input.taskset.rollout_args.temperature"
    assert recipes.check(loaded(tmp_path, *own, f"{key}=1.0"))
    with pytest.raises(rlkit.ConfigError, match="taskset.rollout_args.temperature: is 0.7; expected 1, or options.off"):
        recipes.check(loaded(tmp_path, *own, f"{key}=0.7"))


def test_fields_of_rows_that_are_learnt_from(tmp_path):
    path, right = tmp_path / "rows.jsonl", {"prompt": "a", "response": "b", "chosen": "c", "rejected": "d"}
    for algorithm, field in (("sft", "response"), ("dpo", "rejected"), ("cpt", "prompt"), ("mix", "response")):
        write(path, right, {key: value for key, value in right.items() if key != field})
        part = "auxiliary_buffers.shown" if algorithm == "mix" else "experience_buffer"
        settings = loaded(tmp_path, f"buffer.trainer_input.{part}.path={path}", algorithm=algorithm)
        with pytest.raises(rlkit.DataError, match=f"row 1: has the fields .* a field '{field}'"):
            recipes.check(settings)
