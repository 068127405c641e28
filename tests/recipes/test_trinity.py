"""An algorithm of Trinity-RFT's name has its numbers, or a run says which setting differs: advantages and gradients.

trinity.json holds what Trinity's own classes compute, with nothing set, for one batch (which version: "source" there).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

import torch

import rlkit
from rlkit import losses, recipes
from rlkit.credit import Item
from rlkit.recipes import algorithms
from rlkit.recipes import method as batch
from rlkit.recipes.job import NOTE
from rlkit.recipes.method import NAMES, differences, notes, resolve
from rlkit.recipes.settings import Algorithm
from rlkit.trajectory import Group, Trajectory, Turn
from tests.each import for_each
from tests.recipes.problems import loaded

REFERENCE = json.loads(Path(__file__).with_name("trinity.json").read_text("utf-8"))
GIVEN = REFERENCE["batch"]
CASES = REFERENCE["algorithms"]
PLAYED = [name for name, case in CASES.items() if case["advantages"] is not None]
STEP = 7
BESIDE = {"reference": "reference_logprobs", "teacher": "teacher_logprobs", "critic": "values"}


class Frozen:
    """A sampler, or a critic, with one number for each of a trajectory's tokens; the prompt says which it is."""

    def __init__(self, rows, places):
        self.rows, self.places = rows, places

    def logprobs(self, tokens, *, temperature=1.0):
        assert temperature == 1.0
        found = np.zeros(len(tokens), np.float32)
        found[self.places[tokens[0]]] = self.rows[tokens[0]]
        return rlkit.Future.of(found)

    def values(self, data):
        return rlkit.Future.of([self.logprobs(datum.tokens).result() for datum in data])


def played(multi, size=4):
    """The batch as groups of trajectories, and where the policy's tokens are in each."""
    groups, places = [], []
    flat = [[entry for group in GIVEN[part] for entry in group] for part in ("turns", "states", "rewards")]
    for i, (lengths, states, reward) in enumerate(zip(*flat, strict=True)):
        lengths, states = (lengths, states) if multi else ([sum(lengths)], states[:1])
        prompt, at, turns, where, said = [i], 0, [], [], []
        for k, (n, state) in enumerate(zip(lengths, states, strict=True)):
            where += range(len(prompt), len(prompt) + n)
            sample = rlkit.Sample(prompt, [50] * n, GIVEN["sampling_logprobs"][i][at : at + n])
            turns.append(Turn(sample, reward if k == len(lengths) - 1 else 0.0))
            said += [{"role": "user", "content": state}, {"role": "assistant", "content": "x"}]
            prompt, at = [*prompt, *[50] * n, 60], at + n
        places.append(where)
        if i % size == 0:
            groups.append([])
        groups[-1].append(Trajectory(turns, terminated=True, messages=said))
    return [Group(mine, number=i) for i, mine in enumerate(groups)], places


def gradients(name, own=()):
    """(advantages, gradient) of an algorithm on the batch, as a step computes them."""
    method = resolve(Algorithm(algorithm_type=name, **settings(own)))
    logprobs = [np.array(row) for row in GIVEN["logprobs"]]
    found = None
    if method.recipe.data in ("rollouts", "mixed"):
        groups, places = played(method.recipe.level == "turn", 1 if name == "raft" else 4)
        beside = {
            key: Frozen(GIVEN[rows], places)
            for key, rows in (
                ("reference", "reference_logprobs"),
                ("teacher", "teacher_logprobs"),
                ("critic", "values"),
            )
            if key in (*method.recipe.needs, "reference" if method.wants_reference else "")
        }
        credited = batch.assign_credit(method, groups, **beside)
        items, found = list(credited.items), credited.advantages
    else:
        rows = REFERENCE["pair"] if name == "dpo" else range(len(logprobs))
        data = [rlkit.Datum([i, *[50] * len(logprobs[i])], [0] + [1] * len(logprobs[i])) for i in rows]
        if method.wants_reference:
            data = [d.with_inputs(reference_logprobs=GIVEN["reference_logprobs"][d.tokens[0]]) for d in data]
        items = [Item(data)] if name == "dpo" else [Item([d], i) for i, d in enumerate(data)]
        logprobs = [logprobs[i] for i in rows]
    if method.recipe.data == "mixed":
        shown = [rlkit.Datum([0, *[50] * len(x)], [0] + [1] * len(x)) for x in GIVEN["expert_logprobs"]]
        items = [Item([d.with_inputs(expert=0.0) for d in item.data], item.group) for item in items]
        if method.wants_reference:
            given = zip(shown, GIVEN["expert_reference_logprobs"], strict=True)
            shown = [d.with_inputs(reference_logprobs=row) for d, row in given]
        items += batch.experts([[d] for d in shown])
        logprobs += [np.array(x) for x in GIVEN["expert_logprobs"]]
    data = batch.weigh(method, items, constant=9.0, mu=None if method.mu is None else method.mu(STEP))
    prepared = losses.prepare(method.loss, method.loss_args)
    result = prepared.gradient([torch.tensor(x) for x in logprobs], data)
    return found, [x.numpy() for x in result.driver]


def settings(own):
    """Keys of the section algorithm, as a file has them."""
    found: dict = {}
    for key, value in dict(own).items():
        where, _, name = key.rpartition(".")
        if where:
            found.setdefault(where, {})[name] = value
        else:
            found[key] = value
    return found


def told(name):
    """What a run's lines say that Trinity has, as settings."""
    plain = Algorithm(algorithm_type=name)
    return {key: theirs for key, (_, theirs) in differences(plain, resolve(plain)).items() if key != "repeat_times"}


def test_every_algorithm_of_theirs_is_here():
    """By name; cpt is sft on all tokens of a text."""
    assert {*CASES, "cpt"} == set(NAMES) <= set(algorithms.registry)
    assert resolve(Algorithm(algorithm_type="cpt")).loss == resolve(Algorithm(algorithm_type="sft")).loss


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    """Advantages and gradients within 1e-6 of theirs; what differs is told, and set to their value it is theirs."""
    changed = {key: value for key, value in told(name).items() if not key.startswith("kl_")}
    own = {"repeat_times": 1} if name == "raft" else {}
    found, gradient = gradients(name, {**changed, **own})
    if CASES[name]["advantages"] is not None:
        expected = np.concatenate(CASES[name]["advantages"])
        assert np.concatenate(found) == pytest.approx(expected, abs=1e-6, rel=1.1e-6)  # GiGPO divides by 1 + 1e-6 there
    assert np.concatenate(gradient) == pytest.approx(np.concatenate(CASES[name]["gradient"]), abs=1e-6)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"mix", "mix_chord", "dpo"}))
def test_numbers_with_the_kl_term(name):
    """As above, for the term that each has unless told otherwise; that of rows and pairs is told in words."""
    expected = np.concatenate(CASES[name]["gradient"])
    if CASES[name]["kl_gradient"] is not None:
        expected = expected + np.concatenate(CASES[name]["kl_gradient"])
    own = {"repeat_times": 1} if name == "raft" else {}
    _, gradient = gradients(name, {**told(name), **own})
    assert np.concatenate(gradient) == pytest.approx(expected, abs=1e-6)


@for_each("name", CASES)
def test_what_is_told(name):
    """Each default of theirs is ours, or one of the lines; a line says nothing that is not so."""
    own, lines = CASES[name]["settings"], told(name)
    assert (lines.get("kl_loss_fn_args.kl_coef") == 0.001) == (own["kl_loss_fn"] != "none")
    assert NAMES[name] == own["kl_loss_fn"]
    assert own["kl_loss_fn_args"]["kl_coef"] == 0.001
    assert own["entropy_loss_fn_args"]["entropy_coef"] == 0.0
    for key, value in lines.items():
        where, _, inner = key.rpartition(".")
        args = own[where] if where else own
        inner = "clip_range" if inner == "clip_range_high" and inner not in args else inner
        if inner in args or inner != "clip_ratio_c":  # not given to PPO there, whose constructor then has it
            assert args[inner] == value
    changed = resolve(Algorithm(algorithm_type=name, **settings(lines)))
    again = Algorithm(algorithm_type=name, **settings(lines))
    assert set(differences(again, changed)) <= {"repeat_times"}
    given = resolve(Algorithm(algorithm_type=name))
    for key in lines:
        assert settings({key: lines[key]})
        _, before = gradients(name)
        _, after = gradients(name, {key: lines[key]})
        assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True)), key
    assert given.kl_loss == 0


def test_what_changes_training_is_said_last(tmp_path, caplog):
    """Harmless keys are one line; in a file for Trinity other defaults follow, and what is not followed."""
    caplog.set_level(logging.INFO, "rlkit.recipes")
    task = "buffer.explorer_input.taskset"
    given = ["algorithm.kl_loss_fn_args.kl_coef=0", "algorithm.repeat_times=4"]
    recipes.check(loaded(tmp_path, *given, "buffer.total_epochs=1"))
    assert caplog.messages == []
    given += [f"{task}.data_selector={{selector_type: shuffle}}", "cluster={node_num: 1}", "trainer.save_strategy=x"]
    given += [f"{task}.task_selector={{selector_type: difficulty_based}}"]
    given += ["buffer.trainer_input.experience_buffer={replay_buffer: {enable: true}, capacity: 3}"]
    recipes.check(loaded(tmp_path, *given))
    unsupported = "changes training in Trinity-RFT, but is not supported"
    begins = (
        "without effect: 3 keys, none of which changes training; --verbose lists them",
        "algorithm.policy_loss_fn_args.clip_ratio_c is not set: rlkit uses off, Trinity-RFT 0.6.0 uses 3.0",
        f"{unsupported}: {task}.task_selector (tasks are shuffled by the run's seed",
        f"{unsupported}: buffer.trainer_input.experience_buffer.replay_buffer (a batch",
    )
    assert len(caplog.messages) == len(begins)
    assert all(said.startswith(text) for said, text in zip(caplog.messages, begins, strict=True))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING", "WARNING"]
    off = "buffer.trainer_input.experience_buffer={replay_buffer: {enable: false}}"
    caplog.clear()
    recipes.check(loaded(tmp_path, "algorithm.repeat_times=4", off))
    assert caplog.messages == []


def test_names_of_newer_files_are_refused(tmp_path):
    """An algorithm and a reward that are not here, by name."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n", "utf-8")
    task = f"{{path: {rows}, default_reward_fn_type: rlcr_reward, default_workflow_type: simple_workflow}}"
    for more, part in (
        ("algorithm.algorithm_type=m2po", "no algorithm named 'm2po'"),
        (f"buffer.explorer_input.taskset={task}", "no reward function named 'rlcr_reward'"),
    ):
        with pytest.raises(rlkit.UnknownNameError) as refusal:
            recipes.check(recipes.load(overrides=["algorithm.algorithm_type=grpo", "backend=toy", more]))
        assert part in str(refusal.value)


def test_lines_of_a_run(tmp_path, caplog):
    """One for each, in the log; none for what is set, or for an algorithm of rlkit's own name."""
    caplog.set_level(NOTE, "rlkit.recipes")
    recipes.check(loaded(tmp_path, "algorithm.repeat_times=4", algorithm="cispo"))
    lines = [record.message for record in caplog.records if "Trinity-RFT" in record.message]
    assert lines == ["algorithm.kl_loss_fn_args.kl_coef is not set: rlkit uses 0.0, Trinity-RFT 0.6.0 uses 0.001"]
    caplog.clear()
    recipes.check(
        loaded(tmp_path, *["algorithm.kl_loss_fn_args.kl_coef=0", "algorithm.repeat_times=4"], algorithm="cispo")
    )
    recipes.check(loaded(tmp_path, algorithm="dr_grpo"))
    assert not [record for record in caplog.records if "Trinity-RFT" in record.message]


def test_differences_in_words():
    """What no setting changes is a line too."""
    for name, word in (("dapo", "operator"), ("raft", "every episode"), ("dpo", "added up")):
        given = Algorithm(algorithm_type=name)
        assert any(word in line for line in notes(given, resolve(given)))
    given = Algorithm(algorithm_type="grpo", loss_agg_mode="seq-mean-token-sum-norm")
    assert any("the batch's width" in line for line in notes(given, resolve(given)))
    given = Algorithm(algorithm_type="mix", kl_loss_fn_args={"kl_coef": 0.1})
    assert any("one mean over both" in line for line in notes(given, resolve(given)))
