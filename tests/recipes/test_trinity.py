"""An algorithm of Trinity-RFT's name has its numbers once the defaults that differ are set: advantages and gradients.

trinity.json holds what Trinity's own classes compute, with nothing set, for one batch (which version: "source" there).
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

import torch

import rlkit
from rlkit import losses, recipes
from rlkit.credit import Item
from rlkit.recipes import loop
from rlkit.recipes.algorithms import resolve
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
    given = [f"algorithm.{key}={value}" for key, value in {"algorithm_type": name, **dict(own)}.items()]
    method = resolve(recipes.load(overrides=given).algorithm)
    logprobs = [np.array(row) for row in GIVEN["logprobs"]]
    found = None
    if method.recipe.data in ("rollouts", "mixed"):
        groups, places = played(method.recipe.level == "turn", 1 if name == "raft" else 4)
        beside = {
            key: Frozen(GIVEN[rows], places)
            for key, rows in BESIDE.items()
            if key in (*method.recipe.needs, "reference" if method.wants_reference else "")
        }
        credited = loop.assign_credit(method, groups, **beside)
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
        items += loop.make_expert_items([[d] for d in shown])
        logprobs += [np.array(x) for x in GIVEN["expert_logprobs"]]
    data = loop.weigh(method, items, constant=9.0, mu=None if method.mu is None else method.mu(STEP))
    prepared = losses.prepare(method.loss, method.loss_args)
    result = prepared.gradient([torch.tensor(x) for x in logprobs], data)
    return found, [x.numpy() for x in result.driver]


CLIPPED = {"grpo", "grpo_verl", "rloo", "reinforceplusplus", "gigpo", "multi_step_grpo", "ppo", "on_policy_distill"}
CLIPPED |= {"jsd", "mix", "dapo"}
OTHERS = {
    "dapo": {"policy_loss_fn_args.clip_range_high": 0.2},
    "gspo": {"loss_agg_mode": "token-mean"},
    "jsd": {"advantage_fn": "jsd"},
}


def defaults_of_theirs(name):
    """Settings that make an algorithm Trinity's; docs/recipes.md has the same table."""
    found = {"kl_loss_fn_args.kl_coef": 0.001} if CASES[name]["settings"]["kl_loss_fn"] != "none" else {}
    return found | ({"policy_loss_fn_args.clip_ratio_c": 3.0} if name in CLIPPED else {}) | OTHERS.get(name, {})


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    """Advantages and gradients within 1e-6 of theirs; with the defaults that differ set to theirs."""
    changed = {key: value for key, value in defaults_of_theirs(name).items() if not key.startswith("kl_")}
    own = {"repeat_times": 1} if name == "raft" else {}
    found, gradient = gradients(name, {**changed, **own})
    if CASES[name]["advantages"] is not None:
        expected = np.concatenate(CASES[name]["advantages"])
        assert np.concatenate(found) == pytest.approx(expected, abs=1e-6, rel=1.1e-6)  # GiGPO divides by 1 + 1e-6 there
    assert np.concatenate(gradient) == pytest.approx(np.concatenate(CASES[name]["gradient"]), abs=1e-6)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"mix", "mix_chord", "dpo"}))
def test_numbers_with_the_kl_term(name):
    """As above, for the term that each has unless told otherwise; that of rows and pairs differs (docs/recipes.md)."""
    expected = np.concatenate(CASES[name]["gradient"])
    if CASES[name]["kl_gradient"] is not None:
        expected = expected + np.concatenate(CASES[name]["kl_gradient"])
    own = {"repeat_times": 1} if name == "raft" else {}
    _, gradient = gradients(name, {**defaults_of_theirs(name), **own})
    assert np.concatenate(gradient) == pytest.approx(expected, abs=1e-6)


@for_each("name", CASES)
def test_the_table_of_defaults(name):
    """Each entry is Trinity's default, and changes the gradient here; the page has it."""
    own, given = CASES[name]["settings"], defaults_of_theirs(name)
    assert own["kl_loss_fn_args"]["kl_coef"] == 0.001
    assert own["entropy_loss_fn_args"]["entropy_coef"] == 0.0
    for key, value in given.items():
        where, _, inner = key.rpartition(".")
        args = own[where] if where else own
        inner = "clip_range" if inner == "clip_range_high" and inner not in args else inner
        if inner in args or inner != "clip_ratio_c":  # not given to PPO there, whose constructor then has it
            assert args[inner] == value
        _, before = gradients(name)
        _, after = gradients(name, {key: value})
        assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True)), key
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8")
    rows = page.partition("Defaults that differ")[2].partition("\n\nWith")[0]
    (row,) = re.findall(rf"^\| [^|]*`{name}`[^|]*\| (.*?) \|", rows, re.MULTILINE)
    assert row == ("; ".join(f"`{key}` {value}" for key, value in given.items()) or "none")


def test_what_changes_training_is_said_last(tmp_path, caplog):
    """Harmless keys are one line; then what is not followed."""
    caplog.set_level(logging.INFO, "rlkit.recipes")
    task, buffer = "buffer.explorer_input.taskset", "buffer.trainer_input.experience_buffer"
    recipes.check(loaded(tmp_path, "buffer.total_epochs=1"))
    assert caplog.messages == []
    given = [f"{task}.data_selector={{selector_type: shuffle}}", "cluster={node_num: 1}", "trainer.save_strategy=x"]
    given += [f"{task}.task_selector={{selector_type: difficulty_based}}"]
    recipes.check(loaded(tmp_path, *given, f"{buffer}={{replay_buffer: {{enable: true}}, capacity: 3}}"))
    (harmless, not_followed) = caplog.messages
    assert harmless.startswith("without effect, ")
    assert {*harmless.partition(": ")[2].split(", ")} == {"cluster", "trainer.save_strategy", f"{buffer}.capacity"}
    assert not_followed.startswith("changes training in Trinity-RFT, but is not supported")
    assert not_followed.endswith(f": {task}.task_selector, {buffer}.replay_buffer")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    caplog.clear()
    recipes.check(loaded(tmp_path, f"{buffer}={{replay_buffer: {{enable: false}}}}"))
    assert caplog.messages == []
