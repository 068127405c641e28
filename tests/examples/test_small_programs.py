"""examples/sft.py, dpo.py and distill.py: they learn, go on, run on the other backends, and refuse mistakes."""

from __future__ import annotations

import json
import re

import pytest

import rlkit
from rlkit.tracking import read_metrics
from tests.examples.programs import FOLDER, load, refused, script

pytest.importorskip("torch")
pytest.importorskip("omegaconf")
pytest.importorskip("jinja2")


def run(name, folder, *overrides):
    program = load(name)
    settings = rlkit.config.load(program.Settings, overrides=[f"folder={folder}", *overrides])
    return program.train(settings)


def test_sft(tmp_path):
    """The held-out loss falls, also for data of one's own; the run goes on."""
    before, after = run("sft", tmp_path / "a")
    assert after < before - 1.0
    talk = [
        {"role": "system", "content": "Hi"},
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B"},
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 10) + "\n")
    options = [f"data={tmp_path / 'talks.jsonl'}", "batch_size=4"]
    first = run("sft", tmp_path / "b", *options, "max_steps=5")
    with pytest.warns(RuntimeWarning, match="max_steps"):
        second = run("sft", tmp_path / "b", *options, "max_steps=10")
    assert second[0] == first[1]
    assert second[1] < second[0] < first[0]


def test_programs_train_the_end_that_the_template_writes():
    """Not one of the model's end tokens by its place in a list, which may be another than the template's."""
    found = [path.name for path in FOLDER.rglob("*.py") if "eos_ids" in path.read_text("utf-8")]
    assert found == []


def test_dpo(tmp_path):
    """The chosen answers gain on the rejected ones; another loss over pairs does too."""
    assert run("dpo", tmp_path / "a")[-1] == 1.0
    margins = [row["metrics"]["train/margin"] for row in read_metrics(tmp_path / "a")]
    assert margins[0] == pytest.approx(0, abs=1e-4), "policy and reference are the same at first"
    assert margins[-1] > 1
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "A?", "chosen": "b", "rejected": "c"}))
    assert run("dpo", tmp_path / "b", "loss=simpo", "loss_config.beta=2.0", f"data={data}", "max_steps=8")[-1] == 1.0


def test_distill(tmp_path):
    """The student comes near the teacher."""
    kls = run("distill", tmp_path / "a", "max_steps=15", "samples=4", "learning_rate=0.1")
    assert kls[-1] < 0.5 * kls[0]


@pytest.mark.parametrize("name", ["sft", "dpo", "distill"])
def test_on_local_and_on_tinker(name, tmp_path, tiny, monkeypatch):
    """Two steps on each of the other backends."""
    pytest.importorskip("peft")
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit.testing import FakeTinker

    local = ["backend=local", f"model={tiny('llama')}", "max_steps=2", "lora_rank=4"]
    if name == "distill":
        local += ["teacher=local", f"teacher_model={tiny('llama')}", "samples=2"]
    assert run(name, tmp_path / "local", *local)
    with FakeTinker(seed=0) as fake:
        monkeypatch.setenv("TINKER_BASE_URL", fake.base_url)
        monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
        assert run(name, tmp_path / "tinker", "backend=tinker", "model=toy", "max_steps=2")


@pytest.mark.parametrize(
    ("name", "overrides", "match"),
    [
        ("sft", ["steps=3"], "steps: unknown setting; did you mean 'max_steps'"),
        ("sft", ["data=nothing.jsonl"], "data: is 'nothing.jsonl'; expected a file that exists"),
        ("sft", ["batch_size=0"], "at least 1"),
        ("sft", ["backend=local", "model=/nowhere/at/all"], "/nowhere/at/all"),
        ("dpo", ["loss=ppo"], "'ppo' is none over pairs"),
        ("dpo", ["loss_config.gamma=1"], "no such setting"),
        ("dpo", ["data=nothing.txt"], "expected a file that ends in .jsonl"),
        ("distill", ["teacher=local"], "give teacher_model"),
        ("distill", ["teacher_path=/nowhere/at/all"], "/nowhere/at/all"),
        ("distill", ["prompts=[]"], "at least one"),
    ],
)
def test_mistakes(name, overrides, match, tmp_path, monkeypatch):
    """One sentence and a status that is not 0."""
    monkeypatch.chdir(tmp_path)
    refused(load(name), [f"folder={tmp_path / 'run'}", *overrides], match)


def test_another_tokenizer(tmp_path, tiny):
    pytest.importorskip("peft")
    refused(load("distill"), [f"folder={tmp_path}", "backend=local", f"model={tiny('llama')}"], "another tokenizer")


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("sft", "", "is empty"),
        ("sft", "{", "line 1, column 2"),
        ("sft", "{}", "row 0: has the fields"),
        (
            "sft",
            '{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}',
            "row 0: messages",
        ),
        ("dpo", "{}", "row 0: has the fields"),
        ("dpo", '{"prompt": "", "chosen": "a", "rejected": "b"}\n{"prompt": "", "chosen": 1, "rejected": ""}', "row 1"),
    ],
)
def test_files_that_hold_something_else(name, text, match, tmp_path):
    """The row is named, before there is a run."""
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    refused(load(name), [f"data={path}", f"folder={tmp_path / 'x'}"], match)
    assert not (tmp_path / "x").exists()


def test_a_single_conversation(tmp_path):
    """Nothing is held out of it, rather than everything."""
    talk = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}))
    assert run("sft", tmp_path / "run", f"data={tmp_path / 'talk.jsonl'}", "max_steps=1") == []


@pytest.mark.parametrize("name", ["sft", "dpo", "distill"])
def test_help(name, capsys):
    """How it is called and what can be set; nothing is done."""
    load(name).main(["--help"])
    told = capsys.readouterr().out
    assert f"python examples/{name}.py" in told
    assert re.search(rf"^folder +str = runs/{name} +the run's", told, re.MULTILINE)


def test_they_are_short_and_scripts(tmp_path):
    for name in ("sft", "dpo", "distill"):
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 130
    assert "accuracy" in script("dpo", "max_steps=1", f"folder={tmp_path}")
