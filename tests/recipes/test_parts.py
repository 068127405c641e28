"""The parts of a recipe, each against numbers worked by hand or by another way."""

from __future__ import annotations

import re
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

import rlkit
from rlkit.credit import Item
from rlkit.recipes import data, loop, tasks
from rlkit.recipes.algorithms import best_of_group, resolve
from rlkit.recipes.settings import Algorithm, Buffer, ExplorerInput, Sampling, Taskset
from rlkit.trajectory import Group, Trajectory, Turn
from tests.each import for_each


def trajectory(rewards, lengths, *, logprob=-1.0, messages=()):
    """Turns with these rewards and numbers of tokens; each prompt goes on from what was before."""
    prompt, turns = [5, 6], []
    for reward, n in zip(rewards, lengths, strict=True):
        sample = rlkit.Sample(prompt, range(7, 7 + n), [logprob] * n)
        turns.append(Turn(sample, reward))
        prompt = [*prompt, *range(7, 7 + n), 1]
    return Trajectory(turns, terminated=True, messages=messages)


def _buffer(taskset, **more):
    return Buffer(explorer_input=ExplorerInput(taskset=taskset, **more))


GROUPS = [
    Group([trajectory([1.0], [2]), trajectory([0.0], [3])]),
    Group([trajectory([0.5, 1.5], [1, 2]), trajectory([1.0, 0.0], [2, 1])]),
]


def credited(groups=GROUPS, beside=None, **settings):
    """Advantages of a method, as lists."""
    found = loop.assign_credit(resolve(Algorithm(**settings)), groups, **(beside or {}))
    return [a.round(4).tolist() for a in found.advantages]


def test_per_group():
    """The episode's sum, less the group's mean, for every token; and -coef log q for the bonus of entropy."""
    assert credited(algorithm_type="dr_grpo") == [[0.5] * 2, [-0.5] * 3, [0.5] * 3, [-0.5] * 3]
    found = credited(algorithm_type="dr_grpo", entropy_loss_fn_args={"entropy_coef": 0.25})
    assert found == [[0.75] * 2, [-0.25] * 3, [0.75] * 3, [-0.25] * 3]
    resolve(Algorithm(algorithm_type="sft", entropy_loss_fn_args={"entropy_coef": 0}))
    with pytest.raises(rlkit.ConfigError, match="which sft does not have"):
        resolve(Algorithm(algorithm_type="sft", entropy_loss_fn_args={"entropy_coef": 0.1}))


def test_per_turn():
    """GiGPO: episodes 2 and 1 are half from their mean; first turns, told the same, return 2 and 1, the second ones,
    which were told other things, nothing."""
    said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "1"}]
    others = [*said[:2], {"role": "tool", "content": "2"}]
    group = Group([trajectory([0.5, 1.5], [1, 2], messages=said), trajectory([1.0, 0.0], [2, 1], messages=others)])
    found = credited([group], algorithm_type="gigpo", advantage_fn_args={"fnorm": "none"})
    assert found == [[1.0, 0.5, 0.5], [-1.0, -1.0, -0.5]]
    found = credited([group], algorithm_type="multi_step_grpo", advantage_fn_args={"enable_step_norm": True})
    assert found == [[0.3536] * 3, [-0.3536] * 3]


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=4))
def test_best_of_group(groups):
    for rewards, chosen in zip(groups, best_of_group([np.array(g) for g in groups]), strict=True):
        assert chosen.sum() == 1.0
        assert rewards[int(chosen.argmax())] == max(rewards)


def test_weights_of_a_mixed_batch():
    """Rollouts are a mean over their tokens, demonstrations over theirs; mu goes with every datum."""
    method = resolve(Algorithm(algorithm_type="mix"))
    own = rlkit.Datum([1, 2, 3, 4], [0, 1, 1, 1], {"expert": 0.0})
    shown = rlkit.Datum([1, 2, 3], [0, 1, 1])
    items = [Item([own]), *loop.make_expert_items([[shown], [shown]])]
    data = loop.weigh(method, items, constant=9.0, mu=0.3)
    assert [float(d.inputs["weights"]) for d in data] == pytest.approx([1 / 3, 1 / 4, 1 / 4])
    assert [float(d.inputs["mu"]) for d in data] == pytest.approx([0.3] * 3)
    method = resolve(Algorithm(algorithm_type="dr_grpo"))
    assert loop.weigh(method, items[:1], constant=9.0, mu=None)[0].inputs["weights"] == pytest.approx(1 / 9)
    method = resolve(Algorithm(algorithm_type="dpo"))
    pair = loop.weigh(method, [Item([shown, shown])] * 2, constant=9.0, mu=None)
    assert [float(d.inputs["weights"]) for d in pair] == [0.5] * 4


def test_the_best_of_each_group_trains():
    """RAFT: one item per group; the advantages of the others are there, and 0. What was not scored is never best."""
    assert [chosen.tolist() for chosen in best_of_group([[np.nan, 0.0], [np.nan]])] == [[0.0, 1.0], [0.0]]
    found = loop.assign_credit(resolve(Algorithm(algorithm_type="raft")), GROUPS)
    assert [item.trajectory.reward for item in found.items] == [1.0, 2.0]
    assert [a.tolist() for a in found.advantages] == [[1.0] * 2, [0.0] * 3, [1.0] * 3, [0.0] * 3]


LOW, HIGH, RING_LOW, RING_HIGH = (f"{kind}_{side}_threshold" for kind in ("clip", "ring") for side in ("low", "high"))
NAMES = [  # an algorithm and a loss, the settings of the loss there, and what they are here
    ("grpo", {"clip_range": 0.2}, "ppo", {LOW: 0.8, HIGH: 1.2}),
    ("grpo", {"clip_range_low": 0.1, "clip_range": 0.2}, "ppo", {LOW: 0.9, HIGH: 1.2}),
    ("grpo", {"clip_range_low": 1.5, "clip_range_high": None}, "ppo", {LOW: 0.0}),
    ("grpo", {"epsilon_low": 0.1, "epsilon_high": 0.3}, "ppo", {LOW: 0.9, HIGH: 1.3}),
    ("grpo", {"clip_range_high": 0.28, "clip_ratio_c": 3.0, "temperature": 1.0}, "ppo", {HIGH: 1.28, "dual_clip": 3.0}),
    ("grpo sppo", {"epsilon": 0.25}, "sppo", {LOW: 0.8, HIGH: 1.25}),
    (
        *("grpo rec", {"epsilon_low_prime": 0.6, "epsilon_high_prime": 2.0, "temp": 2.0}, "rec"),
        {RING_LOW: 0.4, RING_HIGH: 3.0, "temperature": 2.0},
    ),
    ("mix", {"enable_phi_function": True}, "mix", {"phi": True}),
    ("mix mix_chord", {}, "mix", {"phi": True, "dual_clip": 3.0}),
    ("dapo ppo", {}, "ppo", {HIGH: 1.28}),
    ("grpo cispo", {}, "cispo", {LOW: 0.0, HIGH: 1.28}),
    ("grpo sapo", {}, "sapo", {"detached": True}),
    ("grpo", {"enable_sequence_masking": True, "delta_sequence_masking": 0.2}, "opsm", {"delta": 0.2}),
    ("grpo", {"fallback_to_policy_gradient": True, "clip_range": 0.2}, "reinforce", {}),
    ("grpo", {"fallback_to_policy_gradient": False, "delta_sequence_masking": 0.1}, "ppo", {}),
    (
        *("grpo cispo", {"enable_mask_clip": True, "mask_clip_range_high": 0.28}, "cispo"),
        {LOW: 0.0, HIGH: 1.28, "unified_mask": True},
    ),
    ("topr", {"advantage_threshold": 0.5}, "topr", {"threshold": 0.5}),
    ("rec", {"clip_mode": "ring"}, "rec", {"clip_mode": "ring", RING_LOW: 0.6, RING_HIGH: 1.4}),
]


@for_each(("names", "given", "loss", "args"), NAMES)
def test_names_of_settings(names, given, loss, args):
    name, named = names.split() if " " in names else (names, None)
    method = resolve(Algorithm(algorithm_type=name, policy_loss_fn=named, policy_loss_fn_args=given))
    assert method.loss == loss
    assert dict(method.loss_args) == pytest.approx(args)


def test_penalties():
    """Of an older policy there is none at the time of the penalty, so that the corrected one is k3, as in Trinity."""
    kinds = {"k2": "k2", "k3": "k3", "abs": "abs", "low_var_kl": "clamped", "corrected_k3": "k3", None: "k1"}
    for name, estimator in kinds.items():
        given = Algorithm(algorithm_type="grpo", kl_penalty_fn=name, kl_penalty_fn_args={"kl_coef": 0.1})
        assert (resolve(given).penalty, resolve(given).kl_penalty) == (estimator, 0.1)


def test_two_parts_of_a_mixed_loss():
    args = {"sft_loss_agg_mode": "seq-mean-token-mean", "train_batch_size_expert": 64, "ngpus_trainer": 4}
    method = resolve(Algorithm(algorithm_type="mix_chord", policy_loss_fn_args=args))
    assert (method.recipe.weights, method.expert_weights) == ("token-mean", "seq-mean-token-mean")
    assert len(method.unused) == 2
    method = resolve(Algorithm(algorithm_type="mix", policy_loss_fn_args={"grpo_loss_agg_mode": "token-sum"}))
    assert (method.recipe.weights, method.expert_weights) == ("token-sum", "token-mean")


def test_shares_of_the_expert():
    assert resolve(Algorithm(algorithm_type="mix", policy_loss_fn_args={"mu": 0.3})).mu(7) == 0.3
    args = {"mu_warmup_steps": 2, "mu_decay_steps": 4, "mu_peak": 0.8, "mu_valley": 0.2}
    chord = resolve(Algorithm(algorithm_type="mix", policy_loss_fn_args=args))
    assert [chord.mu(step) for step in (0, 1, 2, 4, 6)] == pytest.approx([0.0, 0.4, 0.8, 0.5, 0.2])
    default = resolve(Algorithm(algorithm_type="mix", policy_loss_fn_args={"mu_peak": 0.8, "mu_valley": 0.2}))
    assert [default.mu(step) for step in (0, 50, 100)] == pytest.approx([0.8, 0.5, 0.2])
    with pytest.raises(rlkit.ConfigError, match="mu already has a schedule"):
        resolve(Algorithm(algorithm_type="mix_chord", policy_loss_fn_args={"mu": 0.3}))


def test_a_hub_without_its_package_or_a_network(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(rlkit.ConfigError, match="a data set on a hub needs datasets"):
        data.read_rows("openai/gsm8k", where="here")

    def load(name, subset, split, trust_remote_code):
        assert trust_remote_code is False
        if name == "openai/gsm8k":
            raise ConnectionError("no route")
        return [{"question": name, "answer": f"{subset} {split}"}]

    config = types.SimpleNamespace(HF_DATASETS_CACHE=str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load, config=config))
    monkeypatch.setattr(data, "hub_trouble", lambda: "the hub does not answer")
    with pytest.raises(
        rlkit.ConfigError, match="'a/b' is not on this machine, and the hub does not answer; expected a"
    ):
        data.read_rows("a/b", where="here")
    (tmp_path / "a___b").mkdir()
    assert data.read_rows("a/b", where="here", subset="main")[0]["answer"] == "main train"
    monkeypatch.setattr(data, "hub_trouble", lambda: "")
    with pytest.raises(rlkit.ConfigError, match="which needs a network: no route"):
        data.read_rows("openai/gsm8k", where="here")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "response": ["1", "2"]}), path)
    assert [row["response"] for row in data.read_rows(str(path), where="here")] == ["1", "2"]


def test_generated_problems():
    """A bare name is a generator of reasoning-gym; its settings, and how the answer is found."""
    pytest.importorskip("reasoning_gym")
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "extract": "last_number", "size": 20}
    found = tasks.training_tasks(_buffer(Taskset(name="sums", path="chain_sum", workflow_args=args, max_tasks=5)))
    assert len(found) == 5
    env = found[0].make()
    question = env.reset(0)
    right = sum(int(x.replace(" ", "")) for x in re.findall(r"[+-]?\s*\d+", question.rpartition(": ")[2]))
    assert env.step(rlkit.envs.Action(f"I think it is {right}")).reward == 1.0
    with pytest.raises(rlkit.ConfigError, match="buffer.explorer_input.taskset"):
        tasks.training_tasks(_buffer(Taskset(path="chain_sum", workflow_args={"min_term": 2})))
    with pytest.raises(rlkit.ConfigError, match="gsm_symbolicc"):
        tasks.training_tasks(_buffer(Taskset(path="gsm_symbolicc")))


def test_several_environments(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' * 2, "utf-8")
    two = [Taskset(name=name, path=str(path), rollout_args=Sampling(temperature=0.5)) for name in ("one", "two")]
    found = tasks.training_tasks(_buffer(None, tasksets=two)).batch(0, 4)
    assert sorted(task.name for task in found) == ["one", "one", "two", "two"]
    assert found[0].settings.temperature == 0.5
    with pytest.raises(rlkit.ConfigError, match="a unique name"):
        tasks.training_tasks(_buffer(None, tasksets=[two[0], two[0]]))


@pytest.mark.parametrize(("name", "count"), [("grpo", 3), ("gigpo", 2), ("reinforceplusplus", 2)])
def test_what_was_not_scored_teaches_nothing(name, count):
    """A group's estimator gives it 0; those over turns and tokens do not see it; what has no tokens is left out."""
    group = Group([trajectory([r], [2]) for r in (1.0, 0.0, float("nan"))] + [trajectory([0.5], [0])])
    found = loop.assign_credit(resolve(Algorithm(algorithm_type=name)), [group])
    assert len(found.items) == count
    assert [a.size for a in found.advantages] == [2, 2, 2, 0]
    assert all(np.isfinite(a).all() for a in found.advantages)
    assert not found.advantages[2].any()
