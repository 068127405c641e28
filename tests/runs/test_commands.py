"""The command line about runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlkit
from rlkit.cli import main
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


def test_checkpoints_lists_and_finds_damage(folder, capsys):
    assert main(["checkpoints", str(folder)]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[1] for line in listed.splitlines()] == ["1", "2", "3"]
    assert "score 0.2" in listed
    (rlkit.runs.records(folder)[0].path / "state.json").write_text("{}")
    assert main(["checkpoints", str(folder)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_checkpoints_of_a_run_without_any(tmp_path, capsys):
    Run(tmp_path / "run", trackers=()).close()
    assert main(["checkpoints", str(tmp_path / "run")]) == 0
    assert "run has no checkpoint yet" in capsys.readouterr().out


def test_checkpoints_keep(folder, capsys):
    assert main(["checkpoints", str(folder), "--keep", "1"]) == 0
    assert "removed step 1" in capsys.readouterr().out
    assert [record.step for record in rlkit.runs.records(folder)] == [3]
    assert main(["checkpoints", str(folder), "--keep", "0"]) == 2
    with Run(folder, trackers=()):
        assert main(["checkpoints", str(folder), "--keep", "1"]) == 2
    assert "in use" in capsys.readouterr().err


def test_checkpoints_on_a_service(tmp_path, capsys, monkeypatch):
    """They are deleted there, and each is named; without a key it is said that they are still there."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0) as fake:
        where = {"base_url": fake.base_url, "api_key": fake.api_key}
        with Run(tmp_path / "run", seed=0, retention=Retention(last=5), trackers=()) as run:
            policy = run.connect("tinker", model="toy", **where)
            paths = [run.checkpoint(policy).policy("policy") for _ in run.steps(4)]

        def there():
            return {c.tinker_path for c in fake.rest_client().list_user_checkpoints().result().checkpoints}

        assert there() == set(paths)
        monkeypatch.delenv("TINKER_API_KEY", raising=False)
        monkeypatch.setenv("TINKER_BASE_URL", fake.base_url)
        assert main(["checkpoints", str(tmp_path / "run"), "--keep", "3"]) == 1
        told = capsys.readouterr().out
        assert f"removed step 1\nnot deleted: {paths[0]}\nsince: " in told
        assert there() == set(paths)
        monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
        policy = rlkit.connect("tinker", model="toy", **where)
        policy.delete(paths[1]).result()  # by somebody else
        assert main(["checkpoints", str(tmp_path / "run"), "--keep", "1"]) == 1
        told = capsys.readouterr().out.splitlines()
        assert told[-4:-2] == ["removed step 2", "removed step 3"]
        assert told[-2].startswith(f"not deleted: {paths[1]}: ")
        assert told[-1] == f"deleted {paths[2]}"
        assert there() == {paths[0], paths[3]}
        policy.close()


def test_checkpoints_of_what_is_no_run(tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's, of every adapter on a tied head
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
def test_export(tmp_path, capsys):
    """The adapter loads with peft's own loader; merged, it is a model that needs no adapter."""
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
    assert main(["checkpoints", str(tmp_path / "run"), "--export", str(tmp_path / "adapter")]) == 0
    said = capsys.readouterr().out.splitlines()[1:]
    assert said[0] == str(tmp_path / "adapter")
    assert "adapter on a tied output head: merge with --merged; vLLM cannot serve it" in said[1]
    assert f"its base is {model}, a folder on this machine" in said[2]
    assert main(["checkpoints", str(tmp_path / "run"), "--export", str(tmp_path / "whole"), "--merged"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    for found in (
        peft.PeftModel.from_pretrained(base, tmp_path / "adapter"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
    ):
        with torch.no_grad():
            logprobs = found(torch.tensor([[3, 4, 5, 6]])).logits[0].log_softmax(-1)
        scored = [logprobs[i, t].item() for i, t in enumerate([4, 5, 6])]
        assert scored == pytest.approx(own.tolist(), abs=1e-4)
    assert main(["checkpoints", str(tmp_path / "run"), "--export", str(tmp_path / "adapter")]) == 2
    assert main(["checkpoints", str(tmp_path / "run"), "--export", str(tmp_path / "x"), "--step", "9"]) == 2
    assert "of step 9" in capsys.readouterr().err


def test_an_exported_adapter_names_a_base_that_others_have(tmp_path, monkeypatch):
    """The hub id, where the base lies in the hub's cache or came out of the package; the rest of the config stays."""
    from rlkit.backends.local.export import save_adapter

    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "rlkit"))
    cached = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de2"
    converted = tmp_path / "rlkit" / "models" / "smollm2-135m-instruct-b179-v1"
    own = tmp_path / "mine"
    for place, name in (
        (cached, "Qwen/Qwen3-0.6B"),
        (converted, "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (own, str(own)),
    ):
        build("llama", place)
        with rlkit.connect("local", model=str(place), lora=rlkit.Lora(rank=2), folder=tmp_path / "saves") as policy:
            path = Path(policy.save("a").result())
        notes = save_adapter(str(path), str(tmp_path / place.name / "adapter"))
        found = json.loads((tmp_path / place.name / "adapter" / "adapter_config.json").read_text("utf-8"))
        saved = json.loads((path / "adapter_config.json").read_text("utf-8"))
        assert found == saved | {"base_model_name_or_path": name}
        assert len(notes) == 1, notes  # of the base; its head has no adapter
        assert name in notes[0]


def test_report(folder, capsys, tmp_path):
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "</html>" in (tmp_path / "page.html").read_text()
    with Run(folder) as run:
        assert run.report() == folder / "report.html"


def test_trajectories_are_shown_as_text(tmp_path):
    """The run's policy says how its tokens read, so that the page does."""
    from rlkit.envs import StepResult
    from rlkit.rollouts import rollout_sync

    class Parrot:
        def reset(self, seed):
            return "Say a"

        def step(self, action):
            return StepResult(reward=1.0, terminated=True)

        def close(self):
            pass

    with Run(tmp_path, seed=0) as run:
        policy = run.connect("toy")
        with policy.sampler().result() as sampler:
            groups = rollout_sync(sampler, Parrot, n=2, params=rlkit.SamplingParams(max_tokens=4))
        run.log_trajectories(groups)
    assert (tmp_path / "vocabulary.jsonl").read_text()
    assert len((tmp_path / "trajectories.jsonl").read_text().splitlines()) == 1  # a line for each group


def test_doctor(capsys, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "rlkit" in told
    assert "device" in told
    assert "no key" in told
    tinker = pytest.importorskip("tinker", reason="needs the extra tinker")
    del tinker
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0, names=("toy",)) as fake:
        monkeypatch.setenv("TINKER_BASE_URL", fake.base_url)
        monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
        assert main(["doctor"]) == 0
        assert "the key works: toy" in capsys.readouterr().out
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong-key")
        assert main(["doctor"]) == 1
        told = capsys.readouterr().out
        assert "401" in told
        assert "tml-wrong-key" not in told
        assert main(["doctor", "--offline"]) == 0
