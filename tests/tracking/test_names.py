"""Names of metrics: the table in docs/tracking.md has what the library emits, and a name says its reduction."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.advantages import grpo
from rlkit.envs import StepResult, Task
from rlkit.metrics.names import add, averaged, general, reduction, split_name
from rlkit.rollouts import rollout_sync
from rlkit.tracking import train_metrics
from rlkit.trajectory import datums
from tests.properties import examples
from tests.rollouts.parts import RandomSampler

PAGE = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| .+ \| (sum|mean|max|min|word) \|$", PAGE, re.MULTILINE)
SOURCES = "".join(path.read_text() for path in (Path(rlkit.__file__).parent / "rollouts").glob("*.py"))
COUNTED = [
    (how, f"{'' if '/' in name else 'env/x/'}{re.sub(r'{[^}]*}', 'x', name.replace('{env}', 'env/x'))}")
    for how, name in re.findall(r'(add|mean|_count)\(f?"([a-z_{}./]+)"', SOURCES)
    if not name.endswith(("{name}", "{count}"))  # these come from elsewhere
]


def unknown(names):
    patterns = [re.sub("<[^>]+>", ".+", re.sub("<name>", "[^/]+", pattern)) for pattern, _ in ROWS]
    return [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)]


def test_a_name_says_how_its_numbers_become_one():
    expected = {
        "sum": "loss:sum my:max:sum env/a/failed env/a/truncated/max filter/ratio_max time/step my/tokens_sum",
        "mean": "size:mean env/a/reward env/a/reward/std env/a/info/max sampler/version my/number upload/sent",
        "max": "ratio:max env/a/tokens/max sampler/lag/max train/ratio/max train/own_max my/ratio_max",
        "min": "ratio:min env/a/tokens/min sampler/mismatch/ratio_min train/advantage/min my/min",
    }
    found = {how: " ".join(name for name in names.split() if reduction(name) == how) for how, names in expected.items()}
    assert found == expected


def test_the_table_says_the_same():
    """Of every name in it; "word": the last word decides. What rollouts add up is a sum, what they average is not."""
    assert len(ROWS) > 60
    for word in ("max", "min", "std"):
        says = {re.sub("<[^>]+>", word, name): word if how == "word" else how for name, how in ROWS}
        expected = {name: "mean" if how == "std" else how for name, how in says.items()}
        expected["sampler/lag/max"] = "max"
        assert {name: reduction(name) for name in expected} == expected
    added = [(how, name) for how, name in COUNTED if not name.startswith("rollout/ended/") and not name.endswith("/x")]
    assert len(added) > 20
    assert [name for how, name in added if (reduction(name) == "sum") != (how != "mean")] == []


class Moody:
    def reset(self, seed):
        return "Go"

    def step(self, action):
        if len(action) % 5 == 0:
            raise ValueError("no")
        return StepResult("more", 0.5, terminated=len(action) % 3 == 0, info={"length": len(action), "deep/er": 1})

    def close(self):
        raise OSError("cannot")


def test_what_rollouts_and_training_report_is_in_the_table():
    params = rlkit.SamplingParams(max_tokens=6)
    got = rollout_sync(RandomSampler(), [Task(Moody, "moody")] * 6, n=6, max_turns=2, min_n=1, params=params)
    rewards = [t.reward for group in got for t in group.trajectories]
    for where in ("rollout", "env/moody"):
        found = [got.metrics[f"{where}/reward{which}"] for which in ("", "/min", "/max", "/std")]
        assert found == pytest.approx([np.mean(rewards), min(rewards), max(rewards), np.std(rewards, ddof=1)])
    signals = [np.ptp(group.rewards) > 0 for group in got]
    assert (len(set(signals)), got.metrics["rollout/with_signal"]) == (2, np.mean(signals))
    stops = [turn.stop_reason for group in got for t in group.trajectories for turn in t.turns]
    assert got.metrics["rollout/cut"] == stops.count("length") / len(stops)
    policy = rlkit.connect("toy", seed=0)
    advantages = np.concatenate([grpo(group.rewards) for group in got])
    trajectories = [t for group in got for t in group.trajectories]
    data = [d for t, a in zip(trajectories, advantages, strict=True) for d in datums(t, a, split="allow")]
    output = policy.forward_backward(data, "ppo").result()
    trained = train_metrics(data, output, policy.optim_step(rlkit.Adam()).result())
    assert unknown([*got.metrics, *trained, *(name for _, name in COUNTED)]) == []
    assert trained["train/tokens"] == sum(t.token_count for t in trajectories)
    assert trained["train/grad_norm"] > 0
    means = [d.select(d.inputs["advantages"]).mean() for d in data]
    expected = {"mean": np.mean(means), "min": min(means), "max": max(means), "std": np.std(means, ddof=1)}
    assert {which: trained[f"train/advantage/{which}"] for which in expected} == pytest.approx(expected, abs=1e-6)
    with pytest.raises(rlkit.DataError, match="the batch that produced the output"):
        train_metrics(data[1:], output)
    data = [rlkit.Datum.supervised([1, 2], [3, 4])]  # without a sampler there are no distances
    found = train_metrics(data, policy.forward_backward(data, "cross_entropy").result())
    assert {"train/loss", "train/tokens", "train/datums"} <= found.keys()
    assert not any("kl" in name or "ratio" in name for name in found)


SEGMENT = st.text(st.characters(exclude_characters="/"), min_size=1).map(lambda text: f"e{text}")  # no counter's name
WHATS = [name.removeprefix("env/<name>/") for name, _ in ROWS if name.startswith("env/")]


@given(st.lists(SEGMENT, min_size=1, max_size=3).map("/".join), st.sampled_from(WHATS), SEGMENT)
def test_an_environments_name_may_hold_slashes(environment, what, segment):
    """As those of a hub do: the name ends where what is counted of it begins, also where that holds slashes."""
    what = re.sub("<.*>", lambda _: f"{segment}/{segment}", what)
    assert split_name(f"env/{environment}/{what}") == ("env", environment, what)
    assert general(f"env/{environment}/{what}") == f"env/*/{what}"
    assert split_name(f"eval/{environment}/mean") == ("eval", environment, "mean")


@examples(30)
@given(st.lists(st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=4), min_size=1, max_size=4))
def test_parts_of_a_batch_make_its_whole(parts):
    def of(values):
        return {"a:sum": sum(values), "a:mean": sum(values) / len(values), "a:max": max(values), "a:min": min(values)}

    whole: dict[str, float] = {}
    for part in parts:
        add(whole, of(part), len(part))
    flat = [value for part in parts for value in part]
    assert averaged(whole, len(flat)) == pytest.approx(of(flat))
