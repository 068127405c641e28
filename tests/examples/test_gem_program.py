"""examples/gem.py: games of several turns on every backend, resumed, and stopped by mistakes before any work."""

from __future__ import annotations

import os
import re
import signal

import attrs
import numpy as np
import pytest

import rlkit
from rlkit.tracking import read_metrics
from tests.examples.programs import FOLDER, curve, cut, load, refused, script

pytest.importorskip("torch")
pytest.importorskip("omegaconf")
pytest.importorskip("jinja2")
gem = pytest.importorskip("gem", reason="gem-llm is not installed")
program = load("gem")

DIGITS = "test:Digits-v0"
SMALL = [
    "num_env=8",
    "batch_size=12",
    "max_tokens=4",
    "prefill=",
    "template=no",
    f"env_id={DIGITS}",
    "learning_rate=0.05",
]


class Digits(gem.Env):
    """Two turns, each paid for by its share of digits."""

    def reset(self, seed=None):
        super().reset(seed)
        self.turns = 0
        return f"Game {seed % 3}. Say digits.", {}

    def step(self, action):
        self.turns += 1
        reward = sum(c.isdigit() for c in action) / 4
        return "Again.", reward, self.turns == 2, False, {}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    from gem.envs.registration import ENV_REGISTRY, register

    register(DIGITS, Digits)
    yield
    del ENV_REGISTRY[DIGITS]


def run(folder, *arguments):
    program.main([*SMALL, f"log_dir={folder}", *arguments])
    return curve(folder)


@pytest.mark.parametrize("name", ["gem", "guess_the_number"])
def test_as_a_script_although_it_is_named_as_the_package(name, tmp_path):
    """The command of its docstring, and the other program that plays GEM from the same folder."""
    if name == "gem":
        options = ["backend=toy", "max_steps=1", "num_env=4", "batch_size=4", f"log_dir={tmp_path}"]
        assert "holds metrics.jsonl" in script(name, *options)
    else:
        script(name, "--model", "toy", "--steps", "1", "--episodes", "4", "--folder", tmp_path)
    assert (
        curve(tmp_path)[0][1]["env/game:GuessTheNumber-v0-easy/episodes" if name == "gem" else "env/guess/episodes"]
        == 4
    )


@pytest.mark.parametrize("credit", ["returns", "grpo", "step_wise", "gigpo"])
def test_it_learns(credit, tmp_path):
    """The return rises with each way to give credit, and so does the score on games it does not train on."""
    group = [] if credit == "returns" else ["group_size=4"]
    rows = run(tmp_path, "backend=toy", "max_steps=10", "eval_every=10", "eval_size=8", f"credit={credit}", *group)
    returns = [metrics[f"env/{DIGITS}/reward"] for step, metrics in rows if step < 10]
    scores = [metrics["eval/mean"] for _, metrics in rows if "eval/mean" in metrics]
    assert np.mean(returns[-3:]) > returns[0] + 0.3
    assert scores[-1] > scores[0] + 0.3
    assert {"train/entropy", "train/kl_v1", "train/kl_v2", "train/loss", "time/step"} - {"time/step"} <= rows[0][
        1
    ].keys()
    assert rows[0][1]["train/turns"] == 12


def test_the_table_of_settings():
    """docs/programs.md says every setting's default, beside that of GEM's own script."""
    page = (FOLDER.parent / "docs" / "programs.md").read_text("utf-8").partition("| setting | here | there |")[2]
    rows = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \| ([^|]*) \| ([^|]*) \|", page.partition("\n\n")[0], re.MULTILINE)
    said = {name: here.strip() for names, here, _ in rows for name in re.findall("`([^`]+)`", names)}
    own = {field.name: field.default for field in attrs.fields(program.Settings)}
    assert said == {
        name: f"`{value}`" if isinstance(value, str) else {"True": "true", "None": "none"}.get(str(value), str(value))
        for name, value in own.items()
    }
    there = {name for names, _, value in rows if value != "not there" for name in re.findall("`([^`]+)`", names)}
    assert there == {
        *("model_name", "batch_size", "learning_rate", "lora_rank", "max_tokens", "seed", "max_steps", "save_every"),
        *("env_id", "num_env", "env_wrappers", "template", "gamma", "use_rebn"),
        *("wandb_project", "wandb_name", "log_dir"),
    }


def test_what_is_counted_is_counted_over_all_waves(tmp_path):
    """Two waves of 8 episodes are 16 episodes, and the means are over all of them."""
    run(tmp_path, "backend=toy", "max_steps=1", "batch_size=32")
    (metrics,) = [row["metrics"] for row in read_metrics(tmp_path)]
    played = [t for group in groups(tmp_path) for t in group.trajectories]
    assert len(played) == 16
    assert metrics["rollout/episodes"] == metrics[f"env/{DIGITS}/episodes"] == 16
    rewards = [t.reward for t in played]
    found = [metrics[f"rollout/reward{which}"] for which in ("", "/min", "/max", "/std")]
    assert found == pytest.approx([np.mean(rewards), min(rewards), max(rewards), np.std(rewards, ddof=1)])
    assert metrics["sampler/samples"] == sum(len(t.turns) for t in played)
    assert metrics["time/sample"] + metrics["time/train"] == pytest.approx(metrics["time/step"])
    assert metrics["train/learning_rate"] == 0.05


def test_returns_that_are_all_alike_are_no_step(tmp_path, monkeypatch):
    """No gradient and no optimizer step, which would move the parameters by its momentum."""
    backend = type(rlkit.connect("toy"))
    monkeypatch.setattr(Digits, "step", lambda self, action: ("", 0.5, True, False, {}))
    monkeypatch.setattr(backend, "optim_step", lambda self, adam: pytest.fail("a step"))
    rows = run(tmp_path, "backend=toy", "max_steps=2")
    assert [metrics["train/turns"] for _, metrics in rows] == [12, 12]
    assert not any("train/loss" in metrics for _, metrics in rows)


def test_what_is_trained(tmp_path, monkeypatch):
    """12 of 16 turns are drawn; their advantages have mean 0 and deviation 1; the others have no weight."""
    seen = []
    backend = type(rlkit.connect("toy"))
    monkeypatch.setattr(backend, "forward_backward", spy(backend.forward_backward, seen))
    run(tmp_path, "backend=toy", "max_steps=1", "env_wrappers=concat", "loss=ppo")
    assert {loss for _, loss in seen} == {"ppo"}
    data = seen[0][0]
    assert len(data) == 12, "with a concat wrapper every turn is a prompt, and a datum, of its own"
    advantages = [float(d.inputs["advantages"][d.mask][0]) for d in data]
    assert (np.mean(advantages), np.std(advantages, ddof=1)) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert all((d.inputs["weights"][d.mask] == 1).all() for d in data)


def spy(function, seen):
    def wrapped(self, data, loss, **options):
        seen.append((data, loss))
        return function(self, data, loss, **options)

    return wrapped


def test_turns_that_were_not_drawn_have_no_weight(tmp_path, monkeypatch):
    """In a conversation an episode is one datum, whose turns are weighed."""
    seen = []
    backend = type(rlkit.connect("toy"))
    monkeypatch.setattr(backend, "forward_backward", spy(backend.forward_backward, seen))
    run(tmp_path, "backend=toy", "max_steps=1", "use_rebn=false", "gamma=0.5")
    ((data, _),) = seen
    assert 6 <= len(data) <= 8
    turns = [t.turns for group in groups(tmp_path) for t in group.trajectories]
    weights = [d.inputs["weights"][d.mask] for d in data]
    assert sum(w.sum() > 0 for w in weights) == len(data)
    starts = {t[0].prompt.tobytes() + t[0].tokens.tobytes(): t for t in turns}
    count = 0
    for d in data:
        first = int(np.flatnonzero(d.mask)[0])
        (t,) = [t for key, t in starts.items() if d.tokens[: first + t[0].tokens.size].tobytes() == key]
        n = t[0].tokens.size
        expected = [t[0].reward + 0.5 * t[1].reward] * n + [t[1].reward] * t[1].tokens.size
        np.testing.assert_allclose(d.inputs["advantages"][d.mask], expected, atol=1e-6)
        w = d.inputs["weights"][d.mask]
        count += int(w[0]) + int(w[-1])
    assert count == 12


def groups(folder):
    from rlkit.storage import read

    return list(read(folder / "trajectories.jsonl"))


@pytest.mark.parametrize("backend", ["toy", "local"])
def test_cut_off_and_run_again(backend, tmp_path, tiny, monkeypatch):
    """The curve of a run that crashed in two of its steps is that of the one that did not, number by number."""
    options = [f"backend={backend}", "max_steps=4", "save_every=2", "eval_every=2", "eval_size=4", "lora_rank=4"]
    if backend == "local":
        pytest.importorskip("peft")
        options += [f"model_name={tiny('llama')}"]
    whole = run(tmp_path / "whole", *options)
    for at in (2, 1):
        with monkeypatch.context() as patched:
            stopped = cut(patched, program, at)
            with pytest.raises(stopped):
                run(tmp_path / "cut", *options)
    assert run(tmp_path / "cut", *options) == whole
    assert [step for step, _ in whole] == [0, 1, 2, 3, 4]


def test_interrupted(tmp_path, monkeypatch, capsys):
    """Ctrl-C lets the step finish, saves it, says how to go on, and ends with 130."""
    whole = program.step

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return whole(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(program, "step", interrupted)
        with pytest.raises(SystemExit) as error:
            run(tmp_path, "backend=toy", "max_steps=3")
    assert error.value.code == 130
    assert "gem.py: stopped before step 1; run again to continue" in capsys.readouterr().err
    assert [step for step, _ in run(tmp_path, "backend=toy", "max_steps=3")] == [0, 1, 2]


def test_on_tinker(tmp_path, monkeypatch):
    """Unchanged on the service, here one in this process: it learns, goes on after a crash, and refuses a wrong key."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit.testing import FakeTinker

    options = ["backend=tinker", "max_steps=8", "model_name=toy", "save_every=3"]
    with FakeTinker(seed=0) as fake:
        monkeypatch.setenv("TINKER_BASE_URL", fake.base_url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        refused(program, [*SMALL, *options, f"log_dir={tmp_path}"], "(?i)key|401|auth")
        monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
        with monkeypatch.context() as patched:
            stopped = cut(patched, program, 5)
            with pytest.raises(stopped):
                run(tmp_path, *options)
        rows = run(tmp_path, *options)
    assert [step for step, _ in rows] == list(range(8))
    returns = [metrics[f"env/{DIGITS}/reward"] for _, metrics in rows]
    assert np.mean(returns[-2:]) > returns[0] + 0.2
    assert all(abs(metrics["train/kl_v1"]) < 1e-3 for _, metrics in rows)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["batchsize=3"], "batchsize: unknown setting; did you mean 'batch_size'"),
        (["batch_size=many"], "batch_size: is 'many'; expected a value of type int"),
        (["max_steps"], "override: is 'max_steps'"),
        (["credit=grpo"], "credit=grpo compares episodes of a group; group_size is 1"),
        (["group_size=5"], "num_env=8 is no multiple of group_size=5"),
        (["num_env=0"], "num_env: is 0; expected at least 1"),
        (["backend=cuda"], "backend: is 'cuda'; expected one of 'toy', 'local', 'tinker'"),
        (["env_id=game:GuesTheNumber"], "no environment named 'game:GuesTheNumber'"),
        (["env_wrappers=concat_chat"], "leave concat_chat out"),
        (["env_wrappers=concat,nothing"], "no wrapper named 'nothing'"),
        (["loss=pppo"], "no loss named 'pppo'; did you mean 'ppo'"),
        (["learning_rate=-1"], "learning_rate"),
        (["backend=local", "model_name=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_mistakes(arguments, match, tmp_path):
    """One sentence and a status that is not 0, before anything is sampled."""
    refused(program, [*SMALL, "backend=toy", f"log_dir={tmp_path}", *arguments], match)
    assert not (tmp_path / "metrics.jsonl").exists() or curve(tmp_path) == []


def test_help(capsys):
    """Every setting with its default and meaning."""
    program.main(["help"])
    said = capsys.readouterr().out
    assert "use_rebn" in said
    assert all(name in said for name in rlkit.config.dump(program.Settings()))
    assert len((FOLDER / "gem.py").read_text().splitlines()) < 260
