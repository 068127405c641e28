"""The loop: exact resume, minibatches, schedules, samplers and references, modes, stages."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

import rlkit
from rlkit import corrections, recipes
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.backends.toy import ToySampler
from rlkit.credit import Item
from rlkit.recipes.algorithms import resolve
from rlkit.recipes.job import _choose_correction, build_job
from rlkit.recipes.loop import _estimate_distributions, correct, mask_by_entropy
from rlkit.recipes.settings import Algorithm
from rlkit.runs import Run, records
from rlkit.storage import read
from tests.each import for_each
from tests.recipes.problems import curve, loaded, played, table


class Stopped(Exception):
    """The run was cut off, for a test."""


@contextlib.contextmanager
def cut_at(monkeypatch, step):
    """A run within is cut off in that step, after training and before it is logged."""
    log = Run.log

    def cut(self, metrics, step_=None, **options):
        if self.step == step:
            raise Stopped
        log(self, metrics, step_, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "log", cut)
        with pytest.raises(Stopped):
            yield


def fingerprint(outcome, name="local"):
    """Of what a run ended with: metrics, trajectories, weights."""
    with rlkit.connect(name, init_from=outcome.path) as policy:
        probe = policy.forward([rlkit.Datum([65, 66, 67, 68], [0, 1, 1, 1])]).result().logprobs[0]
    trajectories = (outcome.folder / "trajectories.jsonl").read_bytes()
    return curve(outcome), hashlib.sha256(trajectories).hexdigest(), hashlib.sha256(probe.tobytes()).hexdigest()


HARD = ["algorithm.algorithm_type=ppo", "algorithm.repeat_times=3", "buffer.batch_size=2", "buffer.train_batch_size=3"]
HARD += ["algorithm.kl_penalty_fn_args.kl_coef=0.01", "algorithm.entropy_loss_fn_args.entropy_coef=0.01"]
HARD += ["algorithm.optimizer.lr_scheduler_type=cosine", "trainer.epochs=2", "trainer.save_interval=2"]
HARD += ["synchronizer.sync_offset=1", "synchronizer.sync_interval=2", "monitor.trajectories=true"]


def test_a_run_that_was_cut_off_is_the_whole_one(tmp_path, monkeypatch):
    """On the two-layer model, with a critic, batches under way, minibatches, penalties and a schedule: bit for bit."""
    whole = fingerprint(played(tmp_path / "whole", *HARD, backend="local", steps=4))
    for step in (1, 3):
        with cut_at(monkeypatch, step):
            played(tmp_path / "cut", *HARD, backend="local", steps=4)
    again = fingerprint(played(tmp_path / "cut", *HARD, backend="local", steps=4))
    assert [step for step, _ in again[0]] == [0, 1, 2, 3]
    assert again == whole


def test_a_run_that_is_done_is_left_alone(tmp_path):
    first = played(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.is_file()}
    assert played(tmp_path) == first
    words = r"different settings: algorithm\.algorithm_type from 'grpo' to 'rloo'.*set another name="
    with pytest.raises(rlkit.ConfigError, match=words):
        played(tmp_path, "algorithm.algorithm_type=rloo")
    with pytest.raises(rlkit.ConfigError, match="continue_from_checkpoint"):
        played(tmp_path, "continue_from_checkpoint=false", steps=4)
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*") if path.is_file()} == before


def test_minibatches_and_epochs(tmp_path):
    """32 trajectories by 12 are three updates, twice over are six; each sees every trajectory once per epoch."""
    rows = curve(played(tmp_path, "buffer.train_batch_size=12", "trainer.epochs=2", steps=2))
    assert [numbers["train/updates"] for _, numbers in rows] == [6, 6]
    assert [numbers["train/datums"] for _, numbers in rows] == pytest.approx([32 / 3] * 2)
    with rlkit.connect("toy", resume_from=str(next((tmp_path / "rlkit/grpo-toy/policies").glob("step-*")))) as policy:
        assert policy.version == 12


def test_minibatches_of_a_mixed_batch(tmp_path):
    (numbers,) = steps_of(played(tmp_path, "buffer.train_batch_size=5", algorithm="mix", steps=1))
    assert numbers["train/updates"] > 1
    assert abs(numbers["sampler/mismatch/kl"]) < 1e-9


def test_later_epochs_are_off_policy(tmp_path):
    (_, one), (_, two) = (
        curve(played(tmp_path / str(epochs), f"trainer.epochs={epochs}", steps=1), "train/kl_v2")[0]
        for epochs in (1, 2)
    )
    assert one["train/kl_v2"] < 1e-12
    assert two["train/kl_v2"] > 1e-6


@for_each(("interval", "offset"), [(1, 0), (2, 1), (1, 2)])
def test_which_snapshot_samples(tmp_path, interval, offset):
    more = [f"synchronizer.sync_interval={interval}", f"synchronizer.sync_offset={offset}", "monitor.trajectories=true"]
    more += ["algorithm.repeat_times=2", "buffer.batch_size=1", f"name={interval}-{offset}"]
    outcome = played(tmp_path, *more, steps=6)
    versions = {group.step: group.version for group in read(outcome.folder / "trajectories.jsonl")}
    expected = {step: max(step - offset, 0) // interval * interval for step in range(6)}
    assert versions == expected


def test_learning_rates(tmp_path):
    cosine = [0.2 + 0.4 * (1 + math.cos(math.pi * k / 5)) for k in range(5)]
    for overrides, expected in (
        ("", [1.0] * 5),
        ("lr_warmup_steps=2", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("lr_warmup_steps_ratio=0.4 lr_scheduler_type=linear min_lr_ratio=0", [0.5, 1.0, 1.0, 2 / 3, 1 / 3]),
        ("lr_scheduler_type=cosine min_lr_ratio=0.2", cosine),
    ):
        job = build_job(loaded(tmp_path, *[f"algorithm.optimizer.{x}" for x in overrides.split()], steps=5))
        rates = [job.rate(step) / job.settings.algorithm.optimizer.lr for step in range(5)]
        assert rates == pytest.approx(expected), overrides
    adam = job.adam(0)
    assert (adam.beta1, adam.beta2, adam.weight_decay, adam.grad_clip_norm) == (0.9, 0.999, 0.0, 1.0)


def test_the_reference_is_asked_only_where_it_counts(tmp_path, monkeypatch):
    asked = []
    logprobs = ToySampler.logprobs
    monkeypatch.setattr(ToySampler, "logprobs", lambda self, *a, **k: asked.append(1) or logprobs(self, *a, **k))
    played(tmp_path / "without", steps=2)
    assert not asked
    rows = curve(played(tmp_path / "with", "algorithm.kl_loss_fn_args.kl_coef=0.1", steps=2), "train/kl_reference")
    assert len(asked) == 64
    assert abs(rows[0][1]["train/kl_reference"]) < 1e-6  # the policy is the reference at first
    assert abs(rows[1][1]["train/kl_reference"]) > 1e-4


@pytest.mark.parametrize("part", ["kl_loss_fn", "kl_penalty_fn"])
def test_a_kl_term_holds_the_policy_back(tmp_path, part):
    name, found, few = "train/kl_reference", [], ["buffer.batch_size=2"]
    for coef in (1e-6, 3.0):
        rows = curve(played(tmp_path / str(coef), *few, f"algorithm.{part}_args.kl_coef={coef}", steps=8), name)
        found.append(rows[-1][1][name])
    assert found[1] < 0.5 * found[0]


@pytest.mark.parametrize("kind", ["default", "exact"])
def test_an_entropy_bonus_keeps_entropy_up(tmp_path, kind):
    entropies = []
    for coef in (0.0, 0.5):
        more = [f"algorithm.entropy_loss_fn={kind}", f"algorithm.entropy_loss_fn_args.entropy_coef={coef}"]
        rows = curve(played(tmp_path / str(coef), *more, steps=6), "train/entropy")
        entropies.append(rows[-1][1]["train/entropy"])
    assert entropies[1] > entropies[0] + 0.3


def test_explore_and_train_from_what_was_stored(tmp_path):
    explored = played(tmp_path / "explore", "mode=explore", "monitor.trajectories=true")
    stored = explored.folder / "trajectories.jsonl"
    groups = list(read(stored))
    assert [group.version for group in groups] == [0] * 12
    assert all("train/loss" not in numbers for _, numbers in curve(explored))
    more = ["mode=train", f"buffer.trainer_input.experience_buffer.path={stored}", "buffer.explorer_input.taskset=null"]
    trained = played(tmp_path / "train", *more, "algorithm.algorithm_type=gspo", steps=3)
    losses = [numbers["train/loss"] for _, numbers in curve(trained)]
    assert len(set(losses)) == 3
    assert not (trained.folder / "trajectories.jsonl").stat().st_size


@pytest.mark.parametrize("mode", ["both", "bench"])
def test_what_is_refused_when_it_connects_leaves_nothing(tmp_path, mode):
    held = "buffer.explorer_input.eval_tasksets=[{name: held, path: chain_sum, split: test, max_tasks: 1}]"
    root = tmp_path / "new"
    settings = loaded(tmp_path, held, f"checkpoint_root_dir={root}", f"mode={mode}", "options.nothing=1")
    with pytest.raises(rlkit.ConfigError, match="no option 'nothing'"):
        recipes.run(settings)
    assert not root.exists()


def test_bench_evaluates_every_checkpoint(tmp_path):
    task = "{name: held, default_workflow_type: write, workflow_args: {letters: '0123456789'}, repeat_times: 4}"
    more = [f"buffer.explorer_input.eval_tasksets=[{task}]", "explorer.eval_interval=3"]
    saved = ["trainer.save_interval=3", "trainer.max_checkpoints_to_keep=0"]
    outcome = played(tmp_path, *more, *saved, steps=6)
    during = {step: numbers["eval/held/mean"] for step, numbers in curve(outcome, "eval/held/mean") if numbers}
    assert list(during) == [0, 3, 6]
    (benched,) = recipes.run(loaded(tmp_path, *more, "mode=bench", steps=6))
    rows = [json.loads(line) for line in (outcome.folder / "bench" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6]
    assert [row["metrics"]["eval/held/mean"] for row in rows] == [during[3], during[6]]
    assert benched.metrics["eval/held/mean"] > during[0] + 0.2


STAGES = """
stages:
  - stage_name: imitate
    algorithm: {algorithm_type: sft, optimizer: {lr: 0.02}}
    buffer: {batch_size: 8, total_steps: 3, trainer_input: {experience_buffer: {path: DEMONSTRATIONS}}}
  - stage_name: reinforce
    algorithm: {algorithm_type: grpo, repeat_times: 4, optimizer: {lr: 0.05}, kl_loss_fn_args: {kl_coef: 0.01}}
  - stage_name: distil
    init_from: stage:imitate
    algorithm: {algorithm_type: on_policy_distill, repeat_times: 4, optimizer: {lr: 0.05}}
    explorer: {auxiliary_models: [{path: "stage:reinforce"}]}
"""


@pytest.mark.parametrize("name", ["toy", "fake"])
def test_stages(tmp_path, name, monkeypatch):
    if name == "fake":
        pytest.importorskip("tinker", reason="needs the extra tinker")
    path = tmp_path / "stages.yaml"
    path.write_text(STAGES.replace("DEMONSTRATIONS", str(tmp_path / "demonstrations.jsonl")), "utf-8")
    with table.backend(name, tmp_path) as where:
        own = [*table.settings("grpo", name, tmp_path, where, 4), "buffer.batch_size=2"]
        with cut_at(monkeypatch, 3):  # in the second stage; then run again
            recipes.run(recipes.load(path, own))
        outcomes = recipes.run(recipes.load(path, own))
    assert [outcome.stage for outcome in outcomes] == ["imitate", "reinforce", "distil"]
    imitated, reinforced, distilled = (curve(outcome) for outcome in outcomes)
    assert imitated[-1][1]["train/loss"] < imitated[0][1]["train/loss"]
    assert reinforced[0][1]["env/write/reward"] > 0.5  # it begins where imitation ended
    assert reinforced[0][1]["train/kl_reference"] == pytest.approx(0.0, abs=1e-6)  # which is its reference, too
    assert distilled[-1][1]["train/kl_teacher"] < distilled[0][1]["train/kl_teacher"]


def test_a_teacher_with_another_tokenizer(tmp_path, tiny):
    more = ["algorithm.algorithm_type=on_policy_distill"]
    more += [f"explorer.auxiliary_models=[{{backend: local, model_path: '{tiny('llama')}'}}]"]
    with pytest.raises(rlkit.ConfigError, match=r"auxiliary_models\[0\]: encodes texts differently") as raised:
        played(tmp_path, *more)
    assert "the same tokenizer" in str(raised.value)
    assert same_tokenizer(*[rlkit.connect("toy").tokenizer] * 2) == ""


def test_a_teacher_on_another_backend(tmp_path):
    """The exact model behind the service teaches the toy, whose tokens it has."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    with table.backend("fake", tmp_path) as where:
        path = table.teacher(*where, tmp_path, "0123456789")
        given = f"[{{backend: tinker, path: '{path}', options: {{base_url: '{where[1]['base_url']}'}}}}]"
        more = ["algorithm.algorithm_type=jsd", "buffer.batch_size=2", f"explorer.auxiliary_models={given}"]
        outcome = played(tmp_path, *more, steps=4)
    rows = [numbers["train/kl_teacher"] for _, numbers in curve(outcome)]
    assert rows[-1] < 0.8 * rows[0]


def test_a_run_as_a_teacher(tmp_path):
    run = played(tmp_path / "run", "trainer.save_interval=1", "trainer.max_checkpoints_to_keep=0", steps=2).folder

    def taught_by(path):
        teacher = f"explorer.auxiliary_models=[{{path: '{path}'}}]"
        more = ["algorithm.algorithm_type=on_policy_distill", "seed=9", f"checkpoint_root_dir={tmp_path / path.name}"]
        return curve(played(tmp_path, *more, teacher, steps=1))

    first, newest = [Path(record.policy("policy")) for record in records(run)]
    assert taught_by(run) == taught_by(newest) != taught_by(first)


def test_groups_that_teach_nothing_are_played_again(tmp_path):
    """Rewards of 0 and 1 in pairs are often alike: dapo plays others, a threshold alone leaves them out."""
    one = ["model.max_response_tokens=1"]
    rows = curve(played(tmp_path, "algorithm.algorithm_type=dapo", "algorithm.repeat_times=2", *one, steps=2))
    assert all(numbers["filter/zero_variance"] > 0 for _, numbers in rows)
    threshold = "algorithm.advantage_fn_args.std_threshold=0.2"
    plain = curve(played(tmp_path / "grpo", "algorithm.repeat_times=2", threshold))
    assert plain[0][1]["filter/zero_variance"] > 0
    assert plain[0][1]["train/datums"] == 8 - 2 * plain[0][1]["filter/zero_variance"]


def steps_of(outcome):
    """The metrics of a run's optimizer steps."""
    return [metrics for _, metrics in curve(outcome) if "train/loss" in metrics]


def test_the_sampler_is_compared_with_the_trainer(tmp_path):
    """At every step, on what the newest policy sampled; the toy's two are one program."""
    rows = steps_of(played(tmp_path / "fresh", steps=2))
    assert all(abs(row["sampler/mismatch/kl"]) < 1e-9 for row in rows)
    assert all(abs(row["sampler/mismatch/ratio_max"] - 1) < 1e-4 for row in rows)
    older = steps_of(played(tmp_path / "older", "synchronizer.sync_offset=1", steps=3))
    assert ["sampler/mismatch/kl" in row for row in older] == [True, False, False]


def test_corrections_multiply_weights(tmp_path):
    """Of what was sampled alone, by the ratio before the first update; where there is nothing to correct, by 1."""
    for row in steps_of(played(tmp_path / "run", "algorithm.correction=token_tis", steps=2)):
        assert [row["train/correction/min"], row["train/correction/max"]] == pytest.approx([1, 1], abs=1e-4)
    sampled = rlkit.Datum([1, 2, 3], [0, 1, 1], {"sampling_logprobs": [-1.0, -2.0], "weights": 0.5})
    shown = rlkit.Datum([1, 2, 3], [0, 1, 1], {"sampling_logprobs": [-1.0, -2.0]})
    items = [Item([sampled], 0, object()), Item([shown], 1)]
    now = [np.array([-1.0 + np.log(1.5), -2.0 - np.log(4)]), np.zeros(2)]
    corrected, metrics = correct("token_tis", items, now)
    (datum,) = corrected[0].data
    assert datum.select(datum.inputs["weights"]) == pytest.approx([0.75, 0.125])
    assert "weights" not in corrected[1].data[0].inputs
    assert (metrics["train/correction/min"], metrics["train/correction/max"]) == pytest.approx((0.25, 1.5))

    def auto(name="auto", elsewhere=True, **settings):
        return _choose_correction(name, resolve(Algorithm(**settings)), elsewhere=elsewhere)

    assert auto(algorithm_type="opmd") == "token_tis"
    assert auto(algorithm_type="opmd", elsewhere=False) is None
    assert auto(algorithm_type="opmd", name="none") is None
    assert auto(algorithm_type="grpo") is None  # its ratio is to what the sampler reported
    assert auto(algorithm_type="grpo", bypass_old_logprobs=False) == "token_tis"  # no longer
    assert auto(algorithm_type="grpo", bypass_old_logprobs=False, policy_loss_fn="decoupled_ppo") is None
    assert auto(algorithm_type="raft") is auto(algorithm_type="sft") is None
    with pytest.raises(rlkit.ConfigError, match=r"algorithm\.correction"):
        played(tmp_path / "none", "algorithm.correction=tis", steps=1)


def test_entropy_masks_drop_tokens(tmp_path):
    """As ``clip_b`` and ``clip_v`` say for the policy before the update; a row of demonstrations stays."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(6), size=5)
    exact = {"entropy": -(p * np.log(p)).sum(-1), "sum_p2": (p**2).sum(-1), "sum_p2_logp": (p**2 * np.log(p)).sum(-1)}
    signs = [-1.0, -1.0, -1.0, 1.0]
    datum = rlkit.Datum([7, 0, 1, 2, 3], [0, 1, 1, 1, 1], {"advantages": signs, "weights": 0.5})
    now = np.log(p[[1, 2, 3, 4], [0, 1, 2, 3]]).astype(np.float32)

    class Sampler(contextlib.nullcontext):
        def __enter__(self):
            return self

        def top_logprobs(self, tokens, k):
            order = np.argsort(-p, axis=1)
            return rlkit.Future.of((order, np.take_along_axis(np.log(p), order, 1).astype(np.float32)))

    policy = types.SimpleNamespace(sampler=lambda: rlkit.Future.of(Sampler()))
    found = _estimate_distributions(policy, [datum])
    for name, values in exact.items():
        assert found[name][0] == pytest.approx(values[1:], abs=1e-5), name
    for kind, args in (("clipb", {"mu": 0.5}), ("clipv", {"mu": 0.5, "max_fraction": 0.5})):
        method = resolve(Algorithm(algorithm_type="grpo", advantage_fn=kind, advantage_fn_args=args))
        names = ("entropy",) if kind == "clipb" else tuple(exact)
        given = {name: [exact[name][1:]] for name in names} | {"logprobs": [now], "advantages": [signs]}
        (factors,) = getattr(corrections, method.entropy_mask)(**given, **args)
        shown = rlkit.Datum([7, 0], [0, 1], {"advantages": [0.0]})
        pair, beside = [Item([datum], 0, object()), Item([shown], 1)], {k: [*x, np.ones(1)] for k, x in found.items()}
        items, metrics = mask_by_entropy(method, pair, [now, np.zeros(1)], beside)
        left = items[0].data[0]
        assert left.mask.tolist() == [False, *(factors > 0)]
        assert left.inputs["advantages"].tolist() == [0.0, *(factors * signs)]
        assert items[0].length == factors.sum()  # what a mean over tokens divides by
        assert metrics["train/entropy_mask/mean"] == pytest.approx(factors.mean())
        assert 0 < factors.mean() < 1
        assert items[1].data[0].mask.tolist() == [False, True]
        each = [rlkit.Datum([7, token], [0, 1], {"advantages": [sign]}) for token, sign in enumerate(signs)]
        one = [Item([datum], token, object()) for token, datum in enumerate(each)]
        split = {name: list(np.split(rows[0], 4)) for name, rows in found.items()}
        left, _ = mask_by_entropy(method, one, np.split(now, 4), split)
        assert [item.group for item in left] == np.flatnonzero(factors).tolist()  # one without tokens is left out
    rows = steps_of(played(tmp_path, "algorithm.advantage_fn=clipb", "algorithm.advantage_fn_args.mu=0.1", steps=1))
    assert 0 < rows[0]["train/entropy_mask/mean"] < 1
