"""The commands about runs: ``rlkit checkpoints`` and ``rlkit report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlkit
from rlkit import cli
from rlkit.runs import Retention, Run
from tests.models.build import build


@pytest.fixture
def folder(tmp_path):
    """A run of three steps on the toy, with metrics."""
    with Run(tmp_path / "run", seed=0, retention=Retention(last=5)) as run:
        policy = run.connect("toy")
        for step in run.steps(3):
            loss = policy.forward_backward([rlkit.Datum([65, 66], [0, 1])], "cross_entropy")
            policy.optim_step(rlkit.Adam()).result()
            run.log({"train/loss": loss.result().metrics["loss:sum"]})
            run.checkpoint(policy, metrics={"score": step / 10})
    return tmp_path / "run"


def test_checkpoints_are_listed_and_verified(folder, capsys):
    assert cli.main(["checkpoints", str(folder)]) == 0
    lines = [f"step {step:<8} whole  score {score}" for step, score in ((1, 0), (2, 0.1), (3, 0.2))]
    assert capsys.readouterr().out.splitlines() == lines
    damaged = rlkit.runs.records(folder)[0].path
    (damaged / "state.json").write_text("{}")
    assert cli.main(["checkpoints", str(folder)]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert str(damaged) in first
    assert rest == lines[1:]


def test_folders_without_a_checkpoint(tmp_path, capsys):
    """A run without any is fine. A folder above runs has a folder named checkpoints too, and is not a run."""
    Run(tmp_path / "run", trackers=()).close()
    assert cli.main(["checkpoints", str(tmp_path / "run")]) == 0
    assert "run has no checkpoint yet" in capsys.readouterr().out
    (tmp_path / "above" / "checkpoints" / "rlkit").mkdir(parents=True)
    assert cli.main(["checkpoints", str(tmp_path / "above")]) == 2
    assert "is not a run" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's, of every adapter on a tied head
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_export(tmp_path, capsys):
    import peft
    import torch
    import transformers

    model = build("llama", tmp_path / "model")
    with Run(tmp_path / "run", seed=0, trackers=()) as run:
        policy = run.connect("local", model=str(model), lora=rlkit.Lora(rank=4, train_unembed=True))
        data = [rlkit.Datum([3, 4, 5, 6], [0, 1, 1, 1])]
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        run.checkpoint(policy)
        own = policy.forward(data).result().selected[0]
    export = ["checkpoints", str(tmp_path / "run"), "--export"]
    assert cli.main([*export, str(tmp_path / "adapter")]) == 0
    said = capsys.readouterr().out.splitlines()[1:]
    assert said[0] == str(tmp_path / "adapter")
    assert "adapter on a tied output head: merge with --merged; vLLM cannot serve it" in said[1]
    assert f"its base is {model}, a folder on this machine" in said[2]
    assert cli.main([*export, str(tmp_path / "whole"), "--merged"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    for found in (
        peft.PeftModel.from_pretrained(base, tmp_path / "adapter"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
    ):
        with torch.no_grad():
            logprobs = found(torch.tensor([[3, 4, 5, 6]])).logits[0].log_softmax(-1)
        scored = [logprobs[i, t].item() for i, t in enumerate([4, 5, 6])]
        assert scored == pytest.approx(own.tolist(), abs=1e-4)
    assert cli.main([*export, str(tmp_path / "adapter")]) == 2
    assert cli.main([*export, str(tmp_path / "x"), "--step", "9"]) == 2
    assert "of step 9" in capsys.readouterr().err


def test_an_exported_adapter_names_a_base_that_others_have(tmp_path, monkeypatch):
    """The hub id, where the base lies in the hub's cache or came out of the package; the rest of the config stays."""
    from rlkit.backends.local.export import save_adapter

    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "rlkit"))
    for folder, name in (
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2", "Qwen/Qwen3-0.6B"),
        ("rlkit/models/smollm2-135m-instruct-b179-v1", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("mine", str(tmp_path / "mine")),
    ):
        place = build("llama", tmp_path / folder)
        with rlkit.connect("local", model=str(place), lora=rlkit.Lora(rank=2), folder=tmp_path / "saves") as policy:
            path = Path(policy.save("a").result())
        notes = save_adapter(str(path), str(tmp_path / place.name / "adapter"))
        found = json.loads((tmp_path / place.name / "adapter" / "adapter_config.json").read_text("utf-8"))
        saved = json.loads((path / "adapter_config.json").read_text("utf-8"))
        assert found == saved | {"base_model_name_or_path": name}
        assert len(notes) == 1, notes  # of the base; its head has no adapter
        assert name in notes[0]


def test_report(folder, tmp_path, monkeypatch, capsys):
    """The tokenizer is that of ``--tokenizer``, of the newest checkpoint's model, or none."""
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "</html>" in (tmp_path / "page.html").read_text()
    model, given = str(build("llama", tmp_path / "model")), []
    with Run(tmp_path / "local", seed=0, trackers=()) as run:
        run.connect("local", model=model, lora=rlkit.Lora(rank=2))
        run.checkpoint()
    (tmp_path / "empty").mkdir()

    def write(folders, out, *, tokenizer):
        given.append((folders, out, getattr(tokenizer, "name", type(tokenizer).__name__)))

    monkeypatch.setattr("rlkit.report.write", write)
    toy, local, empty = (str(tmp_path / name) for name in ("run", "local", "empty"))
    for words in ([toy], [local, local, "--out", "x.html"], [empty], [empty, "--tokenizer", model]):
        assert cli.main(["report", *words]) == 0
    expected = [(toy, None, "ByteTokenizer"), ([local, local], "x.html", model), (empty, None, "NoneType")]
    assert given == [*expected, (empty, None, model)]
    with pytest.warns(UserWarning, match="the runs have the models"):  # ids of one are no tokens of the other
        assert cli.main(["report", local, toy]) == 0
    assert given[-1] == ([local, toy], None, "NoneType")
    Path(model).rename(tmp_path / "moved")
    with pytest.warns(UserWarning, match="name the model with --tokenizer"):
        assert cli.main(["report", local]) == 0
    assert given[-1] == (local, None, "NoneType")
