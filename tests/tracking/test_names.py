"""Standard names: what the library emits stands in the table, and the table in the documentation."""

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
from rlkit.metrics.names import Name, add, averaged, general, parts, reduction
from rlkit.rollouts import rollout_sync
from rlkit.tracking import train_metrics
from rlkit.trajectory import datums
from tests.each import for_each
from tests.properties import examples
from tests.rollouts.parts import RandomSampler

PAGE = Path(__file__).parents[2] / "docs" / "tracking.md"


class Moody:
    """Fails, ends, is cut, and says things."""

    def reset(self, seed):
        self.seed = seed
        return "Go"

    def step(self, action):
        if len(action) % 5 == 0:
            raise ValueError("no")
        return StepResult("more", 0.5, terminated=len(action) % 3 == 0, info={"length": len(action), "deep/er": 1})

    def close(self):
        if self.seed % 2:
            raise OSError("cannot")


def test_what_rollouts_count_is_standard():
    tasks = [Task(Moody, "moody", index=i) for i in range(6)]
    params = rlkit.SamplingParams(max_tokens=6)
    got = rollout_sync(RandomSampler(), tasks, n=6, max_turns=2, min_n=1, params=params)
    assert got.metrics["env/moody/failed"] > 0
    assert got.metrics["env/moody/truncated/max_turns"] > 0
    unknown = [name for name in got.metrics if standard(name) is None]
    assert unknown == []
    rewards = [t.reward for group in got for t in group.trajectories]
    tokens = [t.token_count for group in got for t in group.trajectories]
    for where in ("rollout", "env/moody"):
        for what, values in (("reward", rewards), ("tokens", tokens)):
            found = [got.metrics[f"{where}/{what}{which}"] for which in ("", "/min", "/max", "/std")]
            assert found == pytest.approx([np.mean(values), min(values), max(values), np.std(values, ddof=1)])
    assert got.metrics["rollout/episodes"] == got.metrics["env/moody/episodes"] == len(rewards)
    ended = {name: value for name, value in got.metrics.items() if name.startswith("rollout/ended/")}
    cut = np.mean([t.ended == "max_turns" for group in got for t in group.trajectories])
    assert ended == pytest.approx({"rollout/ended/max_turns": cut, "rollout/ended/terminated": 1 - cut})
    particular = {standard(name).pattern for name in got.metrics}
    assert "time/<part>" not in particular  # each of them has an entry of its own


def test_every_name_in_the_sources_of_rollouts_is_standard():
    """Those that this run did not happen to count, too."""
    sources = (Path(rlkit.__file__).parent / "rollouts").glob("*.py")
    found = {
        name
        for path in sources
        for name in re.findall(r'(?:add|mean|_count)\(f?"([a-z_{}./]+)"', path.read_text())
        if not name.endswith(("{name}", "{count}"))  # these come from elsewhere, and are in the test above
    }
    found = {re.sub(r"\{[^}]*\}", "x", name.replace("{env}", "env/x")) for name in found}
    counted = {name if "/" in name else f"env/x/{name}" for name in found}
    assert len(counted) > 20
    assert [name for name in counted if standard(name) is None] == []


def test_what_rollouts_average_is_not_added_up():
    """What a counter adds up is a sum over steps, too, and what it averages is not."""
    text = "".join(path.read_text() for path in (Path(rlkit.__file__).parent / "rollouts").glob("*.py"))
    wrong, count = [], 0
    for how, name in re.findall(r'(add|mean|_count)\(f?"([a-z_{}./]+)', text):
        name = re.sub(r"\{[^}]*\}", "x", name.replace("{env}", "env/x"))
        name = name if "/" in name else f"env/x/{name}"
        if not name.endswith("/x") and not name.startswith("rollout/ended/"):  # counted, and divided at the end
            count += 1
            wrong += [name] if (reduction(name) == "sum") != (how != "mean") else []
    assert count > 30
    assert wrong == []


def test_what_training_reports_is_standard():
    policy = rlkit.connect("toy", seed=0)
    got = rollout_sync(policy.sampler().result(), Moody, n=8, max_turns=2, min_n=1)
    advantages = np.concatenate([grpo(group.rewards) for group in got])
    trajectories = [t for group in got for t in group.trajectories]
    data = [d for t, a in zip(trajectories, advantages, strict=True) for d in datums(t, a, split="allow")]
    output = policy.forward_backward(data, "ppo").result()
    found = train_metrics(data, output, policy.optim_step(rlkit.Adam()).result())
    assert [name for name in found if standard(name) is None] == []
    assert abs(found["train/kl_v1"]) < 1e-6  # the toy's trainer and sampler agree
    assert found["train/entropy"] > 0
    assert found["train/grad_norm"] > 0
    assert found["train/tokens"] == sum(t.token_count for t in trajectories)
    means = [d.select(d.inputs["advantages"]).mean() for d in data]
    expected = {"mean": np.mean(means), "min": min(means), "max": max(means), "std": np.std(means, ddof=1)}
    assert {which: found[f"train/advantage/{which}"] for which in expected} == pytest.approx(expected, abs=1e-6)
    with pytest.raises(rlkit.DataError, match="the batch that produced the output"):
        train_metrics(data[1:], output)


def test_training_without_a_sampler_has_no_distances():
    """Supervised data: what the loss reports, and nothing about a sampler."""
    policy = rlkit.connect("toy", seed=0)
    data = [rlkit.Datum.supervised([1, 2], [3, 4])]
    found = train_metrics(data, policy.forward_backward(data, "cross_entropy").result())
    assert {"train/loss", "train/tokens", "train/datums"} <= found.keys()
    assert not any("kl" in name or "ratio" in name for name in found)


@for_each(
    ("name", "pattern"),
    [
        ("env/a/reward", "env/<name>/reward"),
        ("env/a/failed/ValueError", "env/<name>/failed/<kind>"),
        ("env/a/info/b/c", "env/<name>/info/<what>"),
        ("train/loss", "train/loss"),
        ("train/my_own", "train/<loss's own>"),
        ("time/env", "time/env"),
        ("eval/sums/pass@4", "eval/<name>/<what>"),
    ],
)
def test_the_particular_comes_before_the_general(name, pattern):
    assert standard(name).pattern == pattern


SEGMENT = st.text(st.characters(exclude_characters="/"), min_size=1).map(lambda text: f"e{text}")  # no counter's name
WHATS = [each.pattern.removeprefix("env/<name>/") for each in NAMES if each.pattern.startswith("env/")]


@given(st.lists(SEGMENT, min_size=1, max_size=3).map("/".join), st.sampled_from(WHATS), SEGMENT)
def test_an_environments_name_may_hold_slashes(environment, what, segment):
    """As those of a hub do: the name ends where what is counted of it begins, also where that holds slashes."""
    what = re.sub("<.*>", lambda _: f"{segment}/{segment}", what)
    assert parts(f"env/{environment}/{what}") == ("env", environment, what)
    assert general(f"env/{environment}/{what}") == f"env/*/{what}"
    assert standard(f"env/{environment}/{what}") == standard(f"env/x/{what}")
    assert parts(f"eval/{environment}/mean") == ("eval", environment, "mean")


@for_each("name", ["", "env", "env/a", "env/a/b/other", "env//reward", "reward", "Train/loss"])
def test_other_names_are_not_standard(name):
    assert standard(name) is None


def test_the_page_has_the_table():
    rows = re.findall(
        r"^\| `([^`]+)` \| (.+) \| (sum|mean|max|min|word) \|$",
        PAGE.read_text().partition("## Names\n")[2].partition("### ")[0],
        flags=re.MULTILINE,
    )
    assert [Name(*row) for row in rows] == list(NAMES)


def test_names_elsewhere_are_of_names_here():
    """The first column of the table of other systems' names holds standard ones, or what a program logs."""
    rows = PAGE.read_text().partition("### Names elsewhere")[2].split("|---|---|---|---|\n")[1].splitlines()
    assert len(rows) > 20
    for row in rows:
        here, *others = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(others) == 3
        assert any(others), row
        first = None
        for name in re.findall(r"`([^`]+)`", here):
            first = name if not name.startswith("/") else first
            full = name if not name.startswith("/") else re.sub(r"/(mean|min)$", "", first) + name
            assert standard(re.sub(r"<[^>]+>", "x", full)) is not None, full


def test_a_name_says_how_its_numbers_become_one():
    expected = {
        "sum": "loss:sum my:max:sum env/a/failed env/a/truncated/max filter/ratio_max time/step my/tokens_sum",
        "mean": "size:mean env/a/reward env/a/reward/std env/a/info/max sampler/version my/number upload/sent",
        "max": "ratio:max env/a/tokens/max sampler/lag/max train/ratio/max train/own_max my/ratio_max",
        "min": "ratio:min env/a/tokens/min sampler/mismatch/ratio_min train/advantage/min my/min",
    }
    found = {how: " ".join(name for name in names.split() if reduction(name) == how) for how, names in expected.items()}
    assert found == expected


@examples(30)
@given(st.lists(st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=4), min_size=1, max_size=4))
def test_parts_of_a_batch_make_its_whole(parts):
    """However a batch is cut: micro-batches, ranks, chunks on a service."""

    def of(values):
        return {"a:sum": sum(values), "a:mean": sum(values) / len(values), "a:max": max(values), "a:min": min(values)}

    whole: dict[str, float] = {}
    for part in parts:
        add(whole, of(part), len(part))
    flat = [value for part in parts for value in part]
    assert averaged(whole, len(flat)) == pytest.approx(of(flat))
