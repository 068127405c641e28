"""Credit assignment against numbers worked by hand, and laws of its weights and minibatches."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import DataError, advantages, credit
from rlkit.advantages import discounted_returns
from rlkit.credit import assign
from rlkit.trajectory import Group, Trajectory, Turn
from tests.each import for_each


def trajectory(rewards, lengths, *, logprob=-1.0, messages=()):
    """Turns with these rewards and numbers of tokens; each prompt goes on from what was before."""
    prompt, turns = [5, 6], []
    for reward, n in zip(rewards, lengths, strict=True):
        turns.append(Turn(rlkit.Sample(prompt, range(7, 7 + n), [logprob] * n), reward))
        prompt = [*prompt, *range(7, 7 + n), 1]
    return Trajectory(turns, terminated=True, messages=messages)


GROUPS = [
    Group([trajectory([1.0], [2]), trajectory([0.0], [3])]),
    Group([trajectory([0.5, 1.5], [1, 2]), trajectory([1.0, 0.0], [2, 1])]),
]


class Frozen:
    """A model that gives every token the same number."""

    max_length = 99
    tokenizer = attrs.make_class("Tokenizer", [])()
    tokenizer.__dict__["vocab_size"] = 99

    def __init__(self, number):
        self.number, self.asked = number, []

    def logprobs(self, tokens, *, temperature=1.0):
        self.asked.append((len(tokens), temperature))
        return rlkit.Future.of(np.full(len(tokens), self.number, np.float32))

    def values(self, data):
        return rlkit.Future.of([np.where(datum.mask, self.number, 0.0) for datum in data])


def listed(batch):
    return [a.round(4).tolist() for a in batch.advantages]


def test_group_level():
    """The reward is the episode's; each of its tokens gets the group's advantage, and the datums carry it."""
    batch = credit.assign(GROUPS, "dr_grpo")
    assert listed(batch) == [[0.5] * 2, [-0.5] * 3, [0.5] * 3, [-0.5] * 3]
    assert [d.select(d.inputs["advantages"]).tolist() for d in batch.data] == listed(batch)
    assert [float(d.inputs["weights"]) for d in batch.data] == pytest.approx([1 / 11] * 4)
    assert batch.metrics == pytest.approx({"train/advantage_std": (1 / 4 - 1 / 22**2) ** 0.5, "train/with_signal": 1.0})
    assert [(item.group, item.length) for item in batch.items] == [(0, 2), (0, 3), (1, 3), (1, 3)]
    assert [item.trajectory for item in batch.items] == [t for g in GROUPS for t in g.trajectories]


@for_each(
    ("groups", "estimator", "options", "expected"),
    [
        (GROUPS[:1], "opo", {}, [[0.6] * 2, [-0.4] * 3]),  # lengths weigh the baseline: (1 * 2 + 0 * 3) / 5 is 0.4
        (GROUPS[:1], "dr_grpo", {"entropy_coef": 0.25}, [[0.75] * 2, [-0.25] * 3]),  # -0.25 log q is added to each
        # What is still to come is the credit of a turn.
        (GROUPS, discounted_returns, {"level": "turn", "config": {"gamma": 0.5}}, [
            [1.0] * 2, [0.0] * 3, [1.25, 1.5, 1.5], [1.0, 1.0, 0.0]]),
        # ReMax: what is still to come, less the greedy reward.
        (GROUPS[1:], "remax", {"level": "token", "baseline": [1.0, 1.0]}, [[1.0, 0.5, 0.5], [0.0, 0.0, -1.0]]),
    ],
)  # fmt: skip
def test_levels(groups, estimator, options, expected):
    assert listed(credit.assign(groups, estimator, **options)) == expected


def test_turns_with_states_and_steps():
    """GiGPO: episodes 2 and 1 are half from their mean; first turns, told the same, return 2 and 1, the second ones,
    which were told other things, nothing. Step-wise GRPO gives each turn of an episode the same."""
    said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "1"}]
    other = [*said[:2], {"role": "tool", "content": "2"}]
    group = Group([trajectory([0.5, 1.5], [1, 2], messages=said), trajectory([1.0, 0.0], [2, 1], messages=other)])
    batch = credit.assign([*GROUPS[:1], group], "gigpo", level="turn", config={"scale": "none"})
    assert listed(batch)[2:] == [[1.0, 0.5, 0.5], [-1.0, -1.0, -0.5]]
    batch = credit.assign([group], "step_wise_grpo", level="turn", config={"step_norm": True})
    assert listed(batch) == [[0.3536] * 3, [-0.3536] * 3]
    longer = Group([trajectory([1.0, 1.0, 1.0], [1, 1, 1]), trajectory([0.0], [2])])  # 3 and 0 in all
    batch = credit.assign([longer], "step_wise_grpo", level="turn", config={"scale": "none"})
    assert listed(batch) == [[1.5] * 3, [-1.5] * 2]


def test_a_critic():
    """GAE with gamma 1, lambda 1 and values of 0.5: the returns are what is still to come; the advantages are that less
    the values, normalised over the batch's tokens unless that is refused."""
    raw = np.array([2.0, 1.5, 1.5, 1.0, 1.0, 0.0])
    batch = credit.assign(GROUPS[1:], "gae", level="token", config={"lam": 1.0}, critic=Frozen(0.5))
    assert np.concatenate([d.select(d.inputs["returns"]) for d in batch.data]).tolist() == raw.tolist()
    assert np.concatenate([d.select(d.inputs["old_values"]) for d in batch.data]).tolist() == [0.5] * 6
    assert np.concatenate(batch.advantages) == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), abs=1e-6)
    plain = credit.assign(GROUPS[1:], "gae", level="token", config={"lam": 1.0}, critic=Frozen(0.5), normalize=False)
    assert np.concatenate(plain.advantages).tolist() == (raw - 0.5).tolist()
    rising = Frozen(0.0)
    rising.values = lambda data: rlkit.Future.of([np.where(d.mask, np.arange(len(d)) / 8, 0.0) for d in data])
    batch = credit.assign(GROUPS[1:], "gae", level="token", config={"lam": 1.0}, critic=rising)
    raw -= np.concatenate([d.select(d.inputs["old_values"]) for d in batch.data])
    assert np.concatenate(batch.advantages) == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), abs=1e-6)


def test_a_kl_penalty_is_taken_off_rewards():
    """k1 of a reference that finds each token half a nat less likely: 0.05 per token off the episode's reward; at the
    level of turns and tokens off each of theirs."""
    beside = {"reference": Frozen(-1.5), "kl_coef": 0.1}
    batch = credit.assign(GROUPS[:1], "dr_grpo", **beside)
    assert listed(batch)[0] == [round(((1 - 0.1) - (0 - 0.15)) / 2, 4)] * 2
    assert batch.metrics["train/kl_reference"] == pytest.approx(0.5)
    assert batch.data[0].select(batch.data[0].inputs["reference_logprobs"]).tolist() == [-1.5, -1.5]
    turns = credit.assign(GROUPS[1:], discounted_returns, level="turn", config={"gamma": 0.0}, **beside)
    assert listed(turns)[0] == [0.45, 1.4, 1.4]
    squared = credit.assign(GROUPS[:1], "dr_grpo", kl_estimator="k2", **beside)
    assert listed(squared)[0] == [round((1 - 0.025 + 0.0375) / 2, 4)] * 2
    without = credit.assign(GROUPS[:1], "dr_grpo", reference=Frozen(-1.5))
    assert listed(without)[0] == [0.5, 0.5]


def test_a_teacher_and_what_it_reads_first():
    """log teacher - log q per token; nothing where the teacher has nothing to say, and it is not asked there."""
    teacher = Frozen(-0.25)
    estimate = {"level": "token", "teacher": teacher}
    batch = credit.assign(GROUPS[:1], "on_policy_distillation", **estimate)
    assert listed(batch) == [[0.75] * 2, [0.75] * 3]
    assert batch.metrics["train/kl_teacher"] == pytest.approx(-0.75)
    assert teacher.asked == [(4, 1.0), (5, 1.0)]
    batch = credit.assign(GROUPS[:1], "on_policy_distillation", prefixes=[None, [1, 2]], **estimate)
    assert listed(batch) == [[0.0] * 2, [0.75] * 3]
    assert teacher.asked[2:] == [(7, 1.0)]
    assert batch.metrics["train/with_signal"] == 0.5


def test_rewards_and_weights_of_ones_own():
    """A number goes to the last token, an array to each; weights per trajectory or per token."""
    batch = credit.assign(GROUPS[:1], discounted_returns, level="turn", rewards=[3.0, [1.0, 0.0, 1.0]], weights=[2, 3])
    assert listed(batch) == [[3.0] * 2, [2.0] * 3]
    assert [float(d.inputs["weights"]) for d in batch.data] == [2.0, 3.0]
    batch = credit.assign(GROUPS[:1], "dr_grpo", weights=[0.5, [1.0, 2.0, 3.0]], rewards=np.array([1.0, 3.0]))
    assert listed(batch)[0] == [-1.0, -1.0]
    assert batch.data[1].select(batch.data[1].inputs["weights"]).tolist() == [1.0, 2.0, 3.0]
    assert "weights" not in credit.assign(GROUPS, weights=None).data[0].inputs


@pytest.mark.parametrize(("estimator", "level", "count"), [("grpo", "group", 3), (discounted_returns, "turn", 2)])
def test_what_was_not_scored_teaches_nothing(estimator, level, count):
    """A group's estimator gives it 0; those over turns and tokens do not see it; what has no tokens is left out."""
    group = Group([trajectory([r], [2]) for r in (1.0, float("nan"), 0.5)] + [trajectory([0.5], [0])])
    batch = credit.assign([group], estimator, level=level)
    assert len(batch.items) == len(batch.data) == count
    assert [a.size for a in batch.advantages] == [2, 2, 2, 0]
    assert not batch.advantages[1].any()
    assert batch.advantages[2].any()
    centred = advantages.per_group(lambda rewards: rewards - np.nanmean(rewards))  # gives NaN for it
    assert [float(a[0]) for a in credit.assign([group], centred).advantages[:3]] == [0.25, 0.0, -0.25]


def test_nothing_to_train():
    """Groups without a token make an empty batch."""
    batch = credit.assign([Group([trajectory([1.0], [0])])])
    assert (batch.items, batch.data, batch.metrics, batch.advantages[0].size) == ([], [], {}, 0)
    assert list(batch.minibatches(2)) == []


def test_split_trajectories_keep_their_credit():
    """Where a template rewrote the history there are two datums; together they have the trajectory's arrays."""
    turns = [Turn(rlkit.Sample([5], [7, 8], [-1.0, -2.0]), 0.0), Turn(rlkit.Sample([9], [7], [-3.0]), 1.0)]
    group = Group([Trajectory(turns, terminated=True), trajectory([0.0], [1])])
    with pytest.raises(rlkit.DataError, match="needs 2 datums"):
        credit.assign([group])
    batch = credit.assign([group], discounted_returns, level="turn", config={"gamma": 0.5}, split="allow")
    first, second, _ = batch.data
    assert first.select(first.inputs["advantages"]).tolist() == [0.5, 0.5]
    assert second.select(second.inputs["advantages"]).tolist() == [1.0]
    assert [float(d.inputs["weights"]) for d in batch.data] == pytest.approx([1 / 4] * 3)
    assert [len(item.data) for item in batch.items] == [2, 1]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(0, 10), st.integers(1, 3), st.integers(0, 2**31)
)
def test_minibatches_part_a_batch(lengths, size, epochs, seed):
    """Each epoch has each item once, in parts that differ by one item at most; a part's token-mean weights add to 1."""
    batch = credit.assign([Group([trajectory([float(i)], [n]) for i, n in enumerate(lengths)])])
    parts = list(credit.minibatches(batch.items, size, epochs=epochs, seed=(seed, 1)))
    count = len(parts) // epochs
    assert count == -(-len(lengths) // (size or len(lengths)))
    for epoch in range(epochs):
        own = parts[epoch * count : (epoch + 1) * count]
        assert sorted(id(item) for part in own for item in part) == sorted(id(item) for item in batch.items)
        assert max(map(len, own)) - min(map(len, own)) <= 1
    assert [len(data) for data in batch.minibatches(size)] == [
        len(part) for part in credit.minibatches(batch.items, size)
    ]
    for data in batch.minibatches(size, epochs=epochs, seed=(seed, 1)):
        assert sum(float(d.inputs["weights"]) * d.mask.sum() for d in data) == pytest.approx(1.0, abs=1e-5)


def test_seeds_of_minibatches():
    """Both ways to minibatches begin with seed 0, and one number is a seed."""
    batch = credit.assign([Group([trajectory([float(i)], [1]) for i in range(9)])], weights=None)

    def drawn(**seed):
        return [[d.inputs["advantages"].max() for d in data] for data in batch.minibatches(2, **seed)]

    items = credit.minibatches(batch.items, 2, seed=(0,))
    assert drawn() == [[item.data[0].inputs["advantages"].max() for item in part] for part in items]
    assert drawn(seed=3) == drawn(seed=(3,)) != drawn()


def test_modes_of_weights():
    """ "prompt-mean" weighs by groups, "-norm" needs a constant; datums of one item share its weight."""
    batch = credit.assign(GROUPS, weights="prompt-mean")
    assert [float(d.inputs["weights"]) for d in batch.data] == pytest.approx([1 / 10, 1 / 10, 1 / 12, 1 / 12])
    batch = credit.assign(GROUPS, weights="seq-mean-token-sum-norm", constant=8.0)
    assert [float(d.inputs["weights"]) for d in batch.data] == pytest.approx([1 / 32] * 4)


@for_each(
    ("arguments", "message"),
    [
        ({"estimator": "gae", "level": "token"}, r"estimator: needs 'values'; expected critic="),
        ({"estimator": "on_policy_distillation", "level": "token"}, "'teacher_logprobs'; expected teacher="),
        ({"estimator": "remax", "level": "token"}, "'baseline'; expected baseline="),
        ({"baseline": [1.0] * 4}, "baseline: is given; expected an estimator that takes it"),
        ({"critic": 3}, "critic: got 3"),
        ({"kl_estimator": "k9"}, "kl_estimator: got 'k9'"),
        ({"config": ["scale"]}, r"assign\(config\): got"),
        ({"config": {"rewards": [1.0]}}, r"assign\(config\): has 'rewards'"),
        ({"estimator": lambda rewards: [r * np.nan for r in rewards]}, r"estimator: returned nan at \[0\]"),
        (
            {"estimator": lambda rewards: [r[:, None] for r in rewards]},
            r"estimator: returned an array of shape \(2, 1\)",
        ),
        ({"level": "word"}, "level: got 'word'"),
        ({"kl_coef": 0.1}, "kl_coef: is 0.1; expected reference="),
        ({"kl_coef": -1.0, "reference": Frozen(0.0)}, "kl_coef: got -1"),
        ({"entropy_coef": -1.0}, "entropy_coef: got -1"),
        ({"weights": [1.0]}, "weights: has length 1; expected 4"),
        ({"weights": "token-men"}, "weights: got 'token-men'.*'token-mean'"),
        *[
            (
                {"estimator": "gae", "level": level},
                r"'values', which is per token; expected level='token' \(and critic=",
            )
            for level in ("group", "turn")
        ],
        *[
            ({"estimator": name, "level": level}, rf"^level='{level}': {name} compares the samples of a group")
            for name in ("grpo", "rloo", "dr_grpo", "maxrl")
            for level in ("turn", "token")
        ],
        ({"rewards": [1.0, [1.0], 0.0, 0.0]}, r"rewards\[1\]: has shape \(1,\); expected \(3,\)"),
        ({"estimator": lambda rewards: [np.zeros(1)]}, "estimator: returned an array of shape"),
        ({"estimator": lambda rewards: rewards[:1], "level": "turn"}, "one advantage per turn"),
        (
            {"estimator": lambda *, rewards: (rewards, rewards), "level": "token"},
            "critic: is None; expected a critic, or an estimator",
        ),
        ({"groups": [1]}, r"groups\[0\]: got 1"),
        ({"estimator": "grpoo"}, "did you mean 'grpo'"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(rlkit.RlkitError, match=message):
        _ = credit.assign(**{"groups": GROUPS, **arguments}).data


def samples_of(rewards, tokens=2):
    return Group.of_samples([rlkit.Sample([5], list(range(tokens)), [-0.5] * tokens) for _ in rewards], rewards)


def test_a_function_of_one_group():
    """Groups of any sizes do not see each other; the undecorated function is told of the decorator."""

    def best_only(rewards, *, scale=1.0):
        return scale * np.where(rewards == rewards.max(), rewards - rewards.mean(), 0.0)

    groups = [samples_of([0.0, 1.0, 0.0, 0.5]), samples_of([0.0, 0.0, 3.0])]
    batch = assign(groups, advantages.per_group(best_only), config={"scale": 2.0})
    assert [float(a[0]) for a in batch.advantages] == [0, 1.25, 0, 0, 0, 0, 4.0]
    with pytest.raises(AttributeError) as caught:
        assign(groups, best_only)
    assert "per_group" in caught.value.__notes__[0]
    for wrong in (lambda rewards: None, lambda rewards: 1.0, lambda rewards: [1.0] * len(rewards)):
        with pytest.raises(DataError, match="per_group"):
            assign(groups, wrong)

    @advantages.per_group
    def best(rewards):
        return rewards if len(rewards) == 2 else rewards.max()

    with pytest.raises(DataError, match=r"^best\(rewards\[1\]\): returned an array of shape \(\)"):
        best([[1.0, 2.0], [1.0, 2.0, 3.0]])


def test_lengths_of_one_group():
    """A setting named lengths is cut as the rewards are, by assign and by by_group."""

    @advantages.per_group
    def per_token(rewards, *, lengths):
        assert rewards.shape == lengths.shape
        return rewards / lengths

    batch = assign([samples_of([2.0, 4.0]), samples_of([6.0, 6.0, 9.0], tokens=3)], per_token)
    assert [float(a[0]) for a in batch.advantages] == [1.0, 2.0, 2.0, 2.0, 3.0]
    flat = advantages.by_group(per_token, [2.0, 6.0, 4.0], ["a", "b", "a"], lengths=[2, 3, 2])
    assert flat.tolist() == [1.0, 2.0, 2.0]


def test_weights_of_turns_are_multiplied():
    """By those of the batch, by a number, and by an array per token."""
    whole = trajectory([0.5, 1.5], [1, 2])
    first, second = whole.turns
    played = attrs.evolve(whole, turns=[attrs.evolve(first, weight=0.5), second])
    groups = [Group([played, trajectory([1.0, 0.0], [2, 1])])]

    def weights(batch):
        return [d.select(d.inputs["weights"]).tolist() for d in batch.data if d.inputs["weights"].ndim]

    assert weights(assign(groups, "grpo", weights="token-sum")) == [[0.5, 1.0, 1.0]]
    assert weights(assign(groups, "grpo", weights="token-mean"))[0] == pytest.approx([0.5 / 6, 1 / 6, 1 / 6])
    assert weights(assign(groups, "grpo", weights=[3.0, 1.0])) == [[1.5, 3.0, 3.0]]
    assert weights(assign(groups, "grpo", weights=[[2.0, 4.0, 6.0], 1.0])) == [[1.0, 4.0, 6.0]]
    plain = credit.weigh(assign([Group([whole])], "grpo", weights=None).items, "token-sum")
    assert plain[0].inputs["weights"].ndim == 0
