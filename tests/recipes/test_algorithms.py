"""Every algorithm learns: on the toy, and through the service's client where others refuse or fail."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

from rlkit import recipes
from tests.recipes.problems import curve, played, table

NAMES = [name for name in recipes.algorithms.registry if name not in table.ALIASES]


@pytest.mark.parametrize("name", [*NAMES, "mix_chord"])
def test_on_the_toy(name, tmp_path):
    found = table.cell(name, "toy", tmp_path, steps=4)
    assert found["better"], found


@pytest.mark.parametrize("name", ["sft", "dpo", "mix", "mix_chord", "ppo", "jsd"])
def test_with_a_kl_term(name, tmp_path):
    """What is read, and not played, is scored by the reference too."""
    outcome = played(tmp_path, "algorithm.kl_loss_fn_args.kl_coef=0.1", algorithm=name, steps=2)
    (_, first), (_, second) = curve(outcome, "train/loss")
    assert first["train/loss"] != second["train/loss"]


def test_ratios_to_the_policy_before_the_step(tmp_path):
    """Where sampler and trainer agree, as on the toy, it makes no difference which of them the ratio is to."""
    more = ["trainer.epochs=2", "buffer.train_batch_size=16"]
    two = [
        curve(played(tmp_path / flag, f"algorithm.bypass_old_logprobs={flag}", *more, steps=2), "train/loss")
        for flag in ("true", "false")
    ]
    for (_, a), (_, b) in zip(*two, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)


KEEP = ("env/write/reward", "train/grad_norm", "train/kl_reference", "eval/held/mean", "train/updates")


def test_the_curve_of_the_service_is_the_toys(tmp_path):
    """One recipe and one seed, on the exact model behind the SDK and in this process: the same rewards, exactly."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    more = ["algorithm.kl_loss_fn_args.kl_coef=0.01", "buffer.train_batch_size=16", "synchronizer.sync_offset=1"]
    task = "{name: held, default_workflow_type: write, workflow_args: {letters: '0123456789'}, repeat_times: 2}"
    more += [f"buffer.explorer_input.eval_tasksets=[{task}]", "explorer.eval_interval=2"]
    ours, theirs = (curve(played(tmp_path / name, *more, backend=name), *KEEP) for name in ("toy", "fake"))
    assert len(ours) == 4
    for (step, a), (same, b) in zip(ours, theirs, strict=True):
        assert step == same
        assert a.keys() == b.keys()
        for name in ("env/write/reward", "eval/held/mean", "train/updates"):
            assert a.get(name) == b.get(name), name
        assert a.get("train/grad_norm", 0) == pytest.approx(b.get("train/grad_norm", 0), rel=1e-6)
    rewards = [a["env/write/reward"] for _, a in ours[:3]]
    assert len(set(rewards)) == 3


def test_a_recipe_of_ones_own(tmp_path):
    asked = []

    def mine(rewards):
        asked.append([len(group) for group in rewards])
        return [group - 0.5 for group in rewards]

    row = recipes.Recipe("a test", data="rollouts", advantage=mine, loss="cispo", repeat_times=3)
    recipes.algorithms.register("mine", row)
    try:
        outcome = played(tmp_path, algorithm="mine", steps=2)
    finally:
        del recipes.algorithms.registry["mine"]
    assert asked == [[3, 3, 3, 3]] * 2
    assert len(curve(outcome, "train/loss")) == 2
