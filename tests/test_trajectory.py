"""Trajectories become datums without a token lost or invented."""

from __future__ import annotations

import functools
import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import DataError, Sample
from rlkit.advantages import token_weights
from rlkit.trajectory import Failure, Group, Trajectory, Turn, datums, token_rewards, turn_states
from tests.each import for_each
from tests.properties import examples

VOCABULARY = 259  # the toy's


@st.composite
def trajectories(draw, max_turns=6, split=True):
    """Turns with random tokens, special ones among them; some actions empty, some prompts that rewrite the history."""
    tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)
    prompt = draw(tokens.filter(bool))
    turns = []
    for _ in range(draw(st.integers(1, max_turns))):
        action = draw(tokens)
        logprobs = draw(st.lists(st.floats(-20, 0, width=32), min_size=len(action), max_size=len(action)))
        turns.append(Turn(Sample(prompt, action, logprobs), reward=draw(st.floats(-2, 2))))
        if split and draw(st.integers(0, 3)) == 0:
            prompt = draw(tokens.filter(bool))
        else:
            prompt = [*prompt, *action, *draw(tokens)]
    return Trajectory(turns)


def spans(trajectory, data):
    """For each turn with tokens the datum and the places where its action must stand, found by searching."""
    found, d, place = [], 0, 0
    for turn in trajectory.turns:
        if not turn.tokens.size:
            continue
        whole = np.concatenate([turn.prompt, turn.tokens])
        while not (len(data[d].tokens) >= whole.size and (data[d].tokens[: whole.size] == whole).all()) or (
            whole.size <= place
        ):
            d, place = d + 1, 0
        found.append((turn, d, range(turn.prompt.size, whole.size)))
        place = whole.size
    return found


@examples(300)
@given(trajectories(), st.integers(0, 2**32 - 1))
def test_every_sampled_token_is_trained_once_and_no_other(trajectory, seed):
    """Trained ids, logprobs and advantages are the sampled ones, in order; everything else is masked and 0."""
    rng = np.random.default_rng(seed)
    advantages = [rng.normal(size=turn.tokens.size) for turn in trajectory.turns]
    data = datums(trajectory, advantages, split="allow")
    flat = {"tokens": [], "sampling_logprobs": [], "advantages": []}
    for datum in data:
        flat["tokens"].append(datum.tokens[datum.mask])
        for name in ("sampling_logprobs", "advantages"):
            flat[name].append(datum.inputs[name][datum.mask])
            assert (datum.inputs[name][~datum.mask] == 0).all()
    joined = {name: np.concatenate([*parts, np.zeros(0)]) for name, parts in flat.items()}
    empty = [np.zeros(0)]
    assert (joined["tokens"] == np.concatenate([t.tokens for t in trajectory.turns] + empty)).all()
    assert (joined["sampling_logprobs"] == np.concatenate([t.logprobs for t in trajectory.turns] + empty)).all()
    assert (joined["advantages"] == np.concatenate(advantages + empty).astype(np.float32)).all()
    marked = [np.zeros(len(datum), bool) for datum in data]
    for _, d, place in spans(trajectory, data):
        marked[d][list(place)] = True
    assert all((mark == datum.mask).all() for mark, datum in zip(marked, data, strict=True))


@examples(100)
@given(trajectories(split=False))
def test_turns_that_extend_each_other_share_one_datum(trajectory):
    """It is as long as the last prompt and action that has tokens: the cost is linear."""
    data = datums(trajectory, 1.0)
    filled = [turn for turn in trajectory.turns if turn.tokens.size]
    assert len(data) == bool(filled)
    if filled:
        assert (data[0].tokens == np.concatenate([filled[-1].prompt, filled[-1].tokens])).all()


@pytest.fixture(scope="module")
def toy():
    pytest.importorskip("torch")
    with rlkit.connect("toy", seed=0) as policy:
        yield policy


def gradient(policy, data, loss, **config):
    if not data:
        return 0.0
    policy.forward_backward(data, loss, config=config).result()
    found = policy._weights.gradient.copy()
    policy.discard()
    return found


def oracle_gradient(policy, trajectory, advantages):
    """d/dW of -sum A_t log p(token t | what the sampler had seen), from the sampled actions alone."""
    from rlkit.backends.toy import Features

    features, weights = Features(VOCABULARY), policy._weights.value
    total = np.zeros_like(weights)
    for turn, numbers in zip(trajectory.turns, advantages, strict=True):
        for k, number in enumerate(numbers):
            x = features.all(np.concatenate([turn.prompt, turn.tokens[:k]]))[-1]
            logits = x @ weights
            p = np.exp(logits - logits.max())
            p /= p.sum()
            p[turn.tokens[k]] -= 1.0
            total += number * np.outer(x, p)
    return total


@examples(60)
@given(trajectories(), st.integers(0, 2**32 - 1))
def test_gradients_are_those_of_the_sampled_actions(toy, trajectory, seed):
    """One datum for many turns gives the gradient of losses per token that one datum per turn gives.

    That of "reinforce" is by an oracle that never sees a datum, and exactly 0 where all advantages are.
    """
    rng = np.random.default_rng(seed)
    per_turn = rng.normal(size=len(trajectory.turns))
    weights = [rng.uniform(size=turn.tokens.size) for turn in trajectory.turns]
    turns = list(zip(trajectory.turns, per_turn, weights, strict=True))
    merged = datums(trajectory, per_turn, split="allow", weights=weights)
    single = [turn.sample.datum(a, weights=w) for turn, a, w in turns if turn.tokens.size]
    for loss in ("importance_sampling", "ppo", "cispo", rlkit.losses.with_entropy("reinforce", coef=0.1)):
        assert np.allclose(gradient(toy, merged, loss), gradient(toy, single, loss), rtol=1e-5, atol=1e-9)
    expected = oracle_gradient(toy, trajectory, [a * w for _, a, w in turns])
    assert np.allclose(gradient(toy, merged, "reinforce"), expected, rtol=1e-5, atol=1e-7)
    assert not np.any(gradient(toy, datums(trajectory, 0.0, split="allow"), "reinforce"))


a_turn = functools.partial(Turn, Sample([1], [2], [0.0]))
empty = functools.partial(Trajectory, [])


def two_turns(second=(5, 6, 7, 1), **kwargs):
    first = Turn(Sample([5, 6], [7], [-0.5]), reward=0.25)
    return Trajectory([first, Turn(Sample(second, [8, 9], [-1.0, -2.0], **kwargs), reward=0.5)])


inputs = functools.partial(datums, two_turns())


@for_each(
    ("name", "value", "expected"),
    [
        ("advantages", 2.0, [0, 0, 2, 0, 2, 2]),
        ("weights", 0.5, 0.5),  # a number for something else stays one number
        ("beta", [1, 2], [0, 0, 1, 0, 2, 2]),
        ("advantages", np.array([1.0, -1.0]), [0, 0, 1, 0, -1, -1]),
        ("kl", [[1.0], [2.0, 3.0]], [0, 0, 1, 0, 2, 3]),
        ("advantages", two_turns().per_turn([1.0, 2.0, 3.0]), [0, 0, 1, 0, 2, 3]),
        ("targets", [np.array([[3, 4]]), np.array([[5, 6], [7, 8]])], [[0, 0], [0, 0], [3, 4], [0, 0], [5, 6], [7, 8]]),
    ],
)
def test_forms_of_inputs(name, value, expected):
    """A number, one per turn, one per token, several per token; integers stay integers."""
    (datum,) = datums(two_turns(), **{name: value})
    assert datum.inputs.keys() == {name, "sampling_logprobs"}
    assert datum.inputs[name].tolist() == expected
    assert (datum.inputs[name].dtype == np.int64) == (name in ("beta", "targets"))


@for_each(
    ("name", "value"),
    [
        ("second", (5, 9, 7, 1)),  # does not begin with the first turn
        *(("temperature", 0.5), ("top_p", 0.9), ("top_k", 5), ("top_k", 1), ("min_p", 0.5), ("frequency_penalty", 1.0)),
    ],
)
def test_a_split_has_to_be_allowed(name, value):
    """Losses on sequences act per datum, which has one temperature, and is truncated or not."""
    trajectory = two_turns(**{name: value})
    why = "does not continue" if name == "second" else rf"was drawn (at|with) {name} {value:g}\b"
    with pytest.raises(DataError, match=rf"turn 1 {why}.*2 datums.*split=\"allow\""):
        datums(trajectory, 1.0)
    first, second = datums(trajectory, 1.0, split="allow")
    assert (first.tokens.tolist(), first.temperature, first.truncated) == ([5, 6, 7], 1.0, False)
    assert second.tokens.tolist() == [5, 9 if name == "second" else 6, 7, 1, 8, 9]
    assert second.temperature == (value if name == "temperature" else 1.0)
    assert second.truncated == (name not in ("second", "temperature"))


def test_truncation_corrected_for():
    data = datums(two_turns(top_p=0.9), 1.0, split="allow", sampling_logprobs=[[-1.0], [-1.0, -1.5]])
    assert [d.truncated for d in data] == [False, False]
    assert data[1].inputs["sampling_logprobs"].tolist() == [0, 0, 0, 0, -1.0, -1.5]


def test_weights_of_a_batch_count_trajectories():
    """A sequence is a trajectory: its weight goes to every datum of it, and all tokens add up to one."""
    batch = [two_turns(), two_turns(second=(1, 2)), Trajectory([])]
    weights = token_weights([t.token_count for t in batch], "seq-mean-token-mean")
    data = [datums(t, 1.0, split="allow", weights=w) for t, w in zip(batch, weights, strict=True)]
    assert [len(d) for d in data] == [1, 2, 0]
    sums = [sum(d.mask.sum() * d.inputs["weights"] for d in parts) for parts in data]
    assert np.allclose(sums, [0.5, 0.5, 0])


@for_each(
    ("reduction", "expected", "joined"),  # the second with a reward of -1 for having been cut
    [("sum", 0.75, -0.25), ("mean", 0.375, -0.25 / 3), ("max", 0.5, 0.5), ("min", 0.25, -1), ("last", 0.5, -1)],
)
def test_rewards_are_reduced(reduction, expected, joined):
    def reward(turns, **options):
        return Trajectory(turns, reduction=reduction, **options).reward

    turns = two_turns().turns
    assert reward(turns) == expected
    for end in ("nonterminal_reward", "nonterminal_override"):
        assert reward(turns, **{end: -1.0}, terminated=True) == expected
    assert reward(turns, nonterminal_override=-1.0) == -1
    assert reward(turns, nonterminal_reward=-1.0) == pytest.approx(joined)
    assert reward([]) == 0
    assert reward([], nonterminal_reward=-1.0) == -1
    assert np.isnan(reward([Turn(turn.sample, reward=float("nan")) for turn in turns]))


@for_each(("reduction", "expected"), [("sum", 1.3), ("mean", 0.65), ("max", 1.0), ("min", 0.3), ("last", 1.0)])
def test_rewards_are_reduced_one_by_one(reduction, expected):
    """Look (no reward), peek (.3) and open (1) in two turns: what got none counts for nothing, and calls, not turns."""
    first, second = (turn.sample for turn in two_turns().turns)
    one = [Turn(first, rewards=()), Turn(second, rewards=(0.3, 1.0))]
    other = [Turn(first, rewards=[0.3]), Turn(second, 1.0)]
    for turns in (one, other):
        assert Trajectory(turns, reduction=reduction).reward == pytest.approx(expected)
    assert Trajectory(one).rewards.tolist() == [0.0, 1.3]
    nothing = Trajectory(one[:1], reduction=reduction)
    assert np.isnan(nothing.reward)
    assert nothing.all_rewards.size == 0
    assert attrs.evolve(other[1], reward=0.0, rewards=(2.0,)).reward == 2.0


def test_versions_and_starts_of_a_group():
    old = Trajectory([Turn(Sample([5], [6], [-1.0], version=3)), Turn(Sample([5], [6], [-1.0], version=2))])
    new = Trajectory([Turn(Sample([5], [6], [-1.0], version=4))])
    assert (old.version, Group([new, old]).version, Group([]).version) == (2, 2, 0)
    assert Group([new, old, Trajectory([])]).same_start
    assert not Group([new, Trajectory([Turn(Sample([6], [6], [-1.0]))])]).same_start


@for_each(
    ("make", "wrong", "message"),
    [
        (Turn, {"sample": [1]}, r"Turn\.sample"),
        (a_turn, {"reward": "1"}, r"Turn\.reward"),
        (a_turn, {"reward": float("inf")}, r"Turn\.reward"),
        (a_turn, {"rewards": [1.0, None]}, r"Turn\.rewards\[1\]"),
        (a_turn, {"rewards": "1"}, r"Turn\.rewards"),
        (a_turn, {"reward": 0.5, "rewards": [1.0]}, r"Turn\.reward: is 0.5"),
        (a_turn, {"metrics": {"a": float("nan")}}, r"Turn\.metrics\['a'\]"),
        (a_turn, {"metrics": [1]}, r"Turn\.metrics"),
        *((a_turn, {"weight": wrong}, r"Turn\.weight") for wrong in (-1.0, float("nan"), "all")),
        (Trajectory, {"turns": [1]}, r"Trajectory\.turns\[0\]"),
        (Trajectory, {"turns": 3}, r"Trajectory\.turns"),
        (empty, {"reduction": "median"}, r"Trajectory\.reduction"),
        (empty, {"terminated": 1}, r"Trajectory\.terminated"),
        *((empty, {"tags": {"a": wrong}}, r"Trajectory\.tags\['a'\]") for wrong in ([], None)),
        (empty, {"tags": {1: "x"}}, r"Trajectory\.tags"),
        (empty, {"metrics": {"a": np.nan}}, r"Trajectory\.metrics\['a'\]"),
        (empty, {"metrics": [1.0]}, r"Trajectory\.metrics"),
        (empty, {"index": -1}, r"Trajectory\.index"),
        (empty, {"nonterminal_reward": float("nan")}, r"Trajectory\.nonterminal_reward"),
        (empty, {"nonterminal_override": float("nan")}, r"Trajectory\.nonterminal_override"),
        (empty, {"nonterminal_override": 0.0, "nonterminal_reward": 0.0}, "one of the two"),
        (Group, {"trajectories": [1]}, r"Group\.trajectories\[0\]"),
        (Group, {"trajectories": [], "failures": [1]}, r"Group\.failures\[0\]"),
        (Group, {"trajectories": [], "step": -1}, r"Group\.step"),
        (two_turns().per_turn, {"values": [1.0]}, "length 3"),
        (datums, {"trajectory": [1], "advantages": 1.0}, "trajectory"),
        (inputs, {"split": "yes"}, "split"),
        *((inputs, {name: 1}, name) for name in ("tokens", "mask", "temperature", "truncated", "inputs")),
        (inputs, {"advantages": [1.0, 2.0, 3.0]}, r"s\(advantages\): has shape \(3,\).*2\] \(one per turn\).*per_turn"),
        (inputs, {"advantages": [[1.0], [2.0]]}, r"datums\(advantages\)\[1\]: has shape \(1,\); expected \(2,\)"),
        (inputs, {"advantages": [[1.0]]}, r"has 1 arrays; expected 2"),
        (inputs, {"advantages": [[1.0], [2.0, float("nan")]]}, r"datums\(advantages\)\[1\]\[1\]: is nan"),
        (inputs, {"advantages": [1.0, float("inf")]}, r"datums\(advantages\)\[1\]: is inf"),
        (inputs, {"advantages": float("nan")}, r"datums\(advantages\): is nan"),
        (inputs, {"advantages": "text"}, "got 'text'"),
        (inputs, {"advantages": [None, 1.0]}, r"datums\(advantages\)"),
        (inputs, {"advantages": [[1.0], [[1.0], [1.0, 2.0]]]}, r"datums\(advantages\)\[1\]"),
        (inputs, {"advantages": {"a": 1}}, "got {'a': 1}"),
    ],
)
def test_what_is_wrong_is_named(make, wrong, message):
    with pytest.raises(rlkit.ConfigError if "split" in wrong else DataError, match=message):
        make(**wrong)


def test_groups_as_text_and_pickled():
    group = Group([two_turns()], failures=[Failure("env", "OSError")])
    assert repr(group) == "Group('env', rewards=[0.75], 1 failed)"
    assert repr(group.trajectories[0]) == "Trajectory('env', 2 turns, 3 tokens, reward=0.75, ended='')"
    assert repr(group.trajectories[0].turns[1]) == "Turn(P=4, n=2, reward=0.5)"
    back = pickle.loads(pickle.dumps(group))
    assert repr(back) == repr(group)
    assert (back.trajectories[0].turns[1].prompt == [5, 6, 7, 1]).all()


def test_rewards_of_tokens_are_the_trajectory_s():
    """They add up to its reward, whatever ended it; what a cut episode is given stands at its last token."""
    turns = two_turns().turns
    assert token_rewards(Trajectory(turns)).sum() == Trajectory(turns).reward
    for ended in ({"terminated": True}, {"truncated": True}):
        for extra in ({}, {"nonterminal_reward": -0.25}, {"nonterminal_override": 3.0}, {"reduction": "mean"}):
            trajectory = Trajectory(turns, **ended, **extra)
            each = token_rewards(trajectory)
            assert each.sum() == pytest.approx(trajectory.reward), (ended, extra)
            assert (each[:-1] == token_rewards(Trajectory(turns))[:-1]).all() or not each[:-1].any()
    assert token_rewards(Trajectory(turns, nonterminal_reward=-0.25))[-1] == token_rewards(Trajectory(turns))[-1] - 0.25
    assert token_rewards(Trajectory([])).size == 0


def test_a_trajectory_s_fields():
    """All but the turns are given by name; mappings are copies that cannot be written; no turns have version 0."""
    tags, metrics = {"split": "test"}, {"seconds": 1.0}
    trajectory = Trajectory([], tags=tags, metrics=metrics)
    tags["split"], metrics["seconds"] = "train", 2.0
    assert (trajectory.tags["split"], trajectory.metrics["seconds"]) == ("test", 1.0)
    with pytest.raises(TypeError):
        trajectory.tags["split"] = "train"
    assert trajectory.version == 0
    with pytest.raises(TypeError, match="positional"):
        Trajectory([], True)


def test_turns_with_weights():
    """The weights of turns are those of their tokens, times what is given; unit weights are not written."""
    first = Turn(Sample([5, 6], [7], [-0.5]), weight=0.5)
    second = Turn(Sample([5, 6, 7, 1], [8, 9], [-1.0, -2.0]), weight=2.0)
    branch = Turn(Sample([5, 6, 7, 2], [4], [-1.0]), weight=0.0)
    for weights, expected in (
        ({}, [0, 0, 0.5, 0, 2.0, 2.0]),
        ({"weights": 0.25}, [0, 0, 0.125, 0, 0.5, 0.5]),
        ({"weights": [[2.0], [1.0, 3.0], [1.0]]}, [0, 0, 1.0, 0, 2.0, 6.0]),
    ):
        one, two = datums(Trajectory([first, second, branch]), 1.0, split="allow", **weights)
        assert one.inputs["weights"].tolist() == expected
        assert two.inputs["weights"].tolist() == [0] * 5
    assert "weights" not in datums(Trajectory([attrs.evolve(first, weight=1.0)]), 1.0)[0].inputs


def test_states_of_turns_in_branches():
    """Where messages are not one conversation of these turns, a state is the prompt."""
    turns = [Turn(Sample([5, i], [7], [-0.5])) for i in range(2)]
    said = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    chain = [*said, {"role": "assistant", "content": "d"}]
    assert turn_states(Trajectory(turns, messages=chain)) == [("a",), ("c",)]
    prompts = [turn.prompt.tobytes() for turn in turns]
    assert turn_states(Trajectory(turns, messages=said)) == prompts
    assert turn_states(Trajectory(turns, messages=[*chain, *said])) == prompts


@for_each(
    ("versions", "expected"),
    [({"versions": [3, 4]}, [0, 0, 3, 0, 3, 4]), ({"version": 4}, [0, 0, 3, 0, 4, 4]), ({"version": 3}, None)],
)
def test_turns_of_several_policies_say_so_in_their_datum(versions, expected):
    turns = [Turn(Sample([5, 6], [7], [-0.5], version=3)), two_turns(**versions).turns[1]]
    (datum,) = datums(Trajectory(turns), 1.0)
    assert (datum.inputs["versions"].tolist() if "versions" in datum.inputs else None) == expected
