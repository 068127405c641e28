"""The page as a file: what it holds, and that nothing in it can run or call out."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import CheckpointError, ConfigError, Sample
from rlkit.backends.toy import ByteTokenizer
from rlkit.harnesses import Result, Score, _running
from rlkit.report import write
from rlkit.report._curves import MOST_POINTS, counters, panels, table
from rlkit.report._page import _asset
from rlkit.report.episodes import chosen, packed, unpacked
from rlkit.tracking import Jsonl
from rlkit.trajectory import Group, Trajectory, Turn
from tests.properties import examples
from tests.report import build

UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"  # dist/uPlot.iife.min.js of uplot 1.6.32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build.run(tmp_path_factory.mktemp("run"), steps=3, tasks=2, n=3)


def data(page, name="about"):
    return unpacked(page.partition(f'id="{name}">')[2].partition("<")[0])


def test_the_page_holds_the_run(folder):
    path = write(folder)
    assert path == folder / "report.html"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    page = path.read_text()
    about = data(page)
    assert about["steps"] == 3
    assert about["total"] == len(about["index"]["reward"]) == 18
    assert about["environments"] == ["sums", "more-sums"]
    assert about["config"]["adam"] == {"learning_rate": 1e-4}
    assert about["config"]["api_key"] == "***"
    titles = [panel["title"] for panel in about["panels"] if panel["standard"]]
    for wanted in ("Reward", "KL, sampler to trainer", "Entropy", "Clip fraction", "Length", "Truncated"):
        assert wanted in titles
    assert "Where the time goes" in titles
    assert "my/own/number" in [panel["title"] for panel in about["panels"] if not panel["standard"]]
    assert about["counters"]["env/sums"]["episodes"] == 9
    first = data(page, "part-0")[0]
    assert first["messages"][-1]["content"].startswith("The sum of")
    turn = first["turns"][0]
    assert len(turn["t"]) == len(turn["l"])
    assert len(first["trainer"]) == sum(len(turn["t"]) for turn in first["turns"])


def test_prompts_are_kept_as_what_they_add(folder):
    """From k and a of each turn the prompts come back as they were sent."""
    from rlkit import storage

    page = write(folder).read_text()
    groups = list(storage.read(folder / "trajectories.jsonl"))
    records = [record for i in range(page.count('id="part-')) for record in data(page, f"part-{i}")]
    trajectories = [t for group in groups for t in group.trajectories]
    assert len(records) == len(trajectories)
    for record, trajectory in zip(records, trajectories, strict=True):
        before = []
        for kept, turn in zip(record["turns"], trajectory.turns, strict=True):
            prompt = before[: kept["k"]] + kept["a"]
            assert prompt == turn.prompt.tolist()
            assert [x / 1000 for x in kept["l"]] == pytest.approx(turn.logprobs.tolist(), abs=5.1e-4)
            before = prompt + kept["t"]


def test_nothing_is_asked_of_anybody(folder):
    """A policy without sources but the page's own script and style, no addresses in attributes."""
    page = write(folder).read_text()
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1])
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(src|href|action|srcset|on\w+)\s*=", markup)
    assert not re.search(r"@import|url\(", re.search(r"<style>(.*?)</style>", page, flags=re.DOTALL)[1])


def test_the_script_makes_no_markup_from_data():
    for name in ("dom", "data", "charts", "tokens", "filters", "browser", "detail", "main"):
        text = _asset(f"{name}.js")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "fetch("):
            assert word not in text
        assert "</script" not in text
        assert "<!--" not in text


def test_the_plotting_library_is_as_it_was_published():
    assert hashlib.sha256(_asset("uplot.min.js").encode()).hexdigest() == UPLOT
    assert "MIT License" in _asset("uplot.LICENSE")


HOSTILE = "</script><script>document.title='taken'</script><!-- <img src=x onerror=alert(1)> \u2028 \ud800 \x00 &lt;"


def hostile(folder):
    """A run in which everything that can hold text holds markup."""
    tracker = Jsonl(folder)
    text = HOSTILE.encode("utf-8", "replace")
    turn = Turn(Sample([65], list(text), [-0.5] * len(text)), 1.0, {HOSTILE: 1.0})
    messages = [{"role": HOSTILE, "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
    messages.append({"role": "tool", "name": HOSTILE, "content": HOSTILE, "tool_calls": [{"name": HOSTILE}]})
    tags, metrics = {HOSTILE: HOSTILE}, {HOSTILE: 1.0}
    trajectory = Trajectory([turn], env=HOSTILE, ended=HOSTILE, tags=tags, metrics=metrics, messages=messages)
    tracker.log_trajectories([Group([trajectory] * 3, env=HOSTILE)], 0)
    tracker.log({f"env/{HOSTILE.replace('/', '')}/reward": 1.0, HOSTILE: 2.0, "train/loss": math.nan}, 0)
    (folder / "config.json").write_text(json.dumps({HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]}))
    return folder


def test_hostile_text_is_data(tmp_path):
    """Nothing that the run says stands in the page as itself."""
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    page = write(hostile(folder)).read_text()
    assert page.count("<script>") == page.count("<style>") == 1
    assert "taken" not in page
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page  # the folder's name, escaped
    assert "document.title='taken'" in data(page)["index"]["snippet"][0]


@given(st.text())
def test_packing_uses_letters_that_are_no_markup(text):
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed([text]))
    assert unpacked(packed([text])) == [text]


def test_lines_that_can_not_be_read_are_left_out_and_said(tmp_path):
    build.many(tmp_path, 2, n=1, turns=1)
    with (tmp_path / "trajectories.jsonl").open("a") as file:
        file.write('{"format": "rlkit.group", "version": 99}\n{"a": 1}\n[1]\n{"format": "rlkit.gro')
    about = data(write(tmp_path).read_text())
    assert about["unread"] == 4
    assert len(about["index"]["step"]) == 2


def test_a_run_without_trajectories_or_metrics_has_a_page_too(tmp_path):
    (tmp_path / "config.json").write_text("not json")
    about = data(write(tmp_path, tmp_path / "x.html").read_text())
    assert (about["steps"], about["panels"], about["config"], about["total"]) == (0, [], {}, 0)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        write(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is not a run's folder"):
        write(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for given_ in ({"folder": None}, {"out": 3}, {"max_trajectories": 0}, {"max_bytes": 0.5}):
        with pytest.raises(ConfigError):
            write(**{"folder": tmp_path, **given_})
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path, tmp_path / "no" / "such" / "folder.html")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_long_runs_are_shown_in_part(tmp_path):
    build.many(tmp_path, 20, n=4, turns=1, length=10)
    about = data(write(tmp_path, max_trajectories=20).read_text())
    assert about["total"] == 80
    assert len(about["index"]["step"]) == 20
    assert len(set(about["index"]["group"])) == 5


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(1, 1000)), min_size=1, max_size=60),
    st.integers(1, 200),
    st.integers(1, 20_000),
)
def test_which_part_is_shown(sizes, most, most_bytes):
    """Lines in order without repetition, all where all fit, spread over the whole."""
    lines = chosen(sizes, most, most_bytes)
    fits = sum(n for n, _ in sizes) <= most and sum(b for _, b in sizes) <= most_bytes
    assert (lines is None) == fits
    if lines is not None:
        assert 1 <= len(lines) <= len(sizes)
        assert min(lines) == 0
        assert max(lines) < len(sizes)


def test_texts_come_from_a_tokenizer_too(tmp_path):
    build.run(tmp_path, steps=1, tasks=1, n=1, tokenizer=False)
    assert data(write(tmp_path).read_text())["texts"] == {}
    texts = data(write(tmp_path, tokenizer=ByteTokenizer()).read_text())["texts"]
    assert texts[str(ord("T"))] == "T"


def rows(**series):
    steps = range(max(len(values) for values in series.values()))
    named = {name.replace("__", "/"): values for name, values in series.items()}
    metrics = [{name: values[step] for name, values in named.items() if step < len(values)} for step in steps]
    return [{"step": step, "time": 10.0 * step, "metrics": found} for step, found in enumerate(metrics)]


def panel(found, title):
    return next(panel for panel in found if panel["title"] == title)


def test_shares_and_times_are_worked_out():
    """3 of 12 truncated; 2 of 14 failed; 5 s of which 2 and 1 are named."""
    found = panels(
        table(
            rows(
                env__a__episodes=[12.0],
                env__a__truncated=[3.0],
                env__a__failed=[2.0],
                time__step=[5.0],
                time__rollout=[2.0],
                time__train=[1.0],
                time__env=[90.0],
                sampler__tokens=[500.0],
            )
        )
    )
    assert panel(found, "Truncated")["curves"][0]["y"] == [0.25]
    assert panel(found, "Failed")["curves"][0]["y"] == [pytest.approx(2 / 14, rel=1e-5)]
    time = {curve["label"]: curve["y"] for curve in panel(found, "Where the time goes")["curves"]}
    assert time == {"rollout": [2.0], "train": [1.0], "the rest": [2.0]}
    assert panel(found, "Sampling speed")["curves"][0]["y"] == [250.0]


def test_what_was_updated_in_flight(tmp_path):
    """How old tokens were, step by step; the versions of a mixed turn's tokens, and no list for the others."""
    series = {"sampler/lag": [0.5, 1.5], "sampler/lag/max": [1.0, 2.0], "sampler/mixed": [0.25, 0.75]}
    found = table(rows(**{name.replace("/", "__"): values for name, values in series.items()}))
    shown = {p["title"]: [(c["name"], c["y"]) for c in p["curves"]] for p in panels(found) if p["standard"]}
    assert shown == {
        "Age of what is trained": [("sampler/lag", [0.5, 1.5]), ("sampler/lag/max", [1.0, 2.0])],
        "Drawn by several policies": [("sampler/mixed", [0.25, 0.75])],
    }
    assert counters(found) == {"sampler": {"lag": 1.5, "lag/max": 2.0, "mixed": 0.75}}
    turns = [Turn(Sample([5], [6, 7], [-1.0, -1.0], versions=[2, 4])), Turn(Sample([5, 6, 7], [8], [-1.0], version=4))]
    tracker = Jsonl(tmp_path)
    tracker.log_trajectories([Group([Trajectory(turns, terminated=True)])], 4)
    tracker.close()
    (record,) = data(write(tmp_path).read_text(), "part-0")
    assert (record["version"], record["newest"]) == (2, 4)
    assert [turn.get("v") for turn in record["turns"]] == [[2, 4], None]


def test_environments_whose_names_hold_slashes():
    """They have the standard panels, under their whole name."""
    name, metrics = "env/owner/name", {"reward": 0.5, "episodes": 12.0, "truncated": 3.0, "info/reward": 7.0}
    scored = {"eval/owner/name/mean": 0.25, "eval/owner/name/low": 0.1}
    row = {"time": 0.0, "step": 0, "metrics": {f"{name}/{what}": value for what, value in metrics.items()} | scored}
    found = panels(table([row]))
    shown = {each["title"]: [(c["label"], *c["y"]) for c in each["curves"]] for each in found if each["standard"]}
    assert shown == {
        "Reward": [("owner/name", 0.5)],
        "Evaluation": [("owner/name/mean", 0.25)],
        "Truncated": [("owner/name", 0.25)],
    }
    assert counters(table([row])) == {name: metrics}


def test_evaluations_are_shown_once_and_are_no_steps():
    """With one environment the mean over environments is its mean; what follows the last step is no step."""
    row = {"time": 0.0, "step": 0, "metrics": {"train/loss": 1.0}}
    scored = {"eval/mean": 0.25, "eval/sums/mean": 0.25, "eval/sums/success": 0.5}
    found = table([row, {"time": 1.0, "step": 1, "metrics": scored}])
    assert found.last == 0
    assert [curve["name"] for curve in panel(panels(found), "Evaluation")["curves"]] == [
        "eval/mean",
        "eval/sums/success",
    ]
    assert table([{"time": 1.0, "step": 1, "metrics": scored}]).last == 1


def test_scores_of_harnesses_are_in_a_table_and_in_curves(tmp_path):
    """Also those whose line the run's metrics have no more; their time is not the run's."""
    Jsonl(tmp_path, clock=iter((1.0, 3.0)).__next__).log({"train/loss": 1.0}, 0)
    Jsonl(tmp_path, clock=lambda: 2.0).log({"train/loss": 0.5}, 9)
    for step, time, value in ((10, 5e8, 0.5), (5, 6e8, 0.25)):
        folder = _running.new_folder(tmp_path, "lm-eval", step)
        _running.make(folder)
        scores = [Score("arc", "acc", value, 0.05, 100), Score("arc", "f1", value)]
        _running.keep(Result("lm-eval", "1.2", step, time, 60.0, scores, folder))
    about = data(write(tmp_path).read_text())
    first = {"step": 10, "harness": "lm-eval 1.2", "task": "arc", "metric": "acc"}
    assert about["benchmarks"][0] == {**first, "value": 0.5, "stderr": 0.05, "samples": 100}
    assert [(row["step"], row["metric"]) for row in about["benchmarks"]] == [
        (10, "acc"),
        (10, "f1"),
        (5, "acc"),
        (5, "f1"),
    ]
    (curve,) = panel(about["panels"], "Benchmarks")["curves"]
    assert (curve["x"], curve["y"], curve["low"], curve["high"]) == (
        [5, 10],
        [0.25, 0.5],
        [0.152, 0.402],
        [0.348, 0.598],
    )
    assert panel(about["panels"], "eval/arc/f1")["curves"][0]["y"] == [0.25, 0.5]
    assert (about["seconds"], about["steps"]) == (1.0, 10)


def test_every_metric_has_a_panel():
    series = {"train__loss": [1.0], "x": [1.0], "a__b__c__d": [1.0], "env__e__info__k": [2.0], "time__env": [1.0]}
    found = panels(table(rows(**series)))
    assert {curve["name"] for panel in found for curve in panel["curves"]} == {n.replace("__", "/") for n in series}


def test_values_that_are_not_finite_are_said_and_not_drawn():
    (found,) = panels(table(rows(train__loss=[1.0, math.nan, 3.0, math.inf])))
    (curve,) = found["curves"]
    assert (curve["x"], curve["y"], curve["bad"], curve["bad_at"]) == ([0, 2], [1.0, 3.0], 2, [1, 3])


def test_the_last_value_of_a_step_counts_and_steps_rise():
    lines = [{"step": s, "time": 0.0, "metrics": {"a": v}} for s, v in ((1, 1.0), (0, 2.0), (1, 3.0))]
    of = table(lines)
    assert (of.steps["a"], of.values["a"], of.last) == ([0, 1], [2.0, 3.0], 1)


@examples(20)
@given(st.integers(1, 6000), st.integers(0, 2**32 - 1))
def test_thinned_curves_keep_their_extremes(size, seed):
    import numpy as np

    values = np.random.default_rng(seed).normal(size=size).tolist()
    (found,) = panels(table(rows(train__loss=values)))
    (curve,) = found["curves"]
    assert len(curve["x"]) <= MOST_POINTS
    assert curve["x"] == sorted(set(curve["x"]))
    assert (curve["x"][0], curve["x"][-1]) == (0, size - 1)
    assert (min(curve["y"]), max(curve["y"])) == (float(f"{min(values):.6g}"), float(f"{max(values):.6g}"))


def test_counters_over_the_run_are_what_their_names_say():
    """Counts are added up; of extremes the most extreme, of means and what is like them the last one is shown."""
    logged = {
        "env/a/failed": ([1.0, 2.0], 3.0),
        "env/a/failed/ValueError": ([1.0, 1.0], 2.0),
        "env/a/reward": ([0.25, 0.5], 0.5),
        "env/a/reward/max": ([1.0, 0.5], 1.0),
        "env/a/reward/min": ([0.5, 0.25], 0.25),
        "env/a/reward/std": ([0.5, 0.4], 0.4),
        "env/a/tokens/max": ([8.0, 6.0], 8.0),
        "env/a/info/episodes": ([3.0, 4.0], 4.0),
        "sampler/tokens": ([3.0, 4.0], 7.0),
        "sampler/mismatch/kl": ([1e-3, 1e-4], 1e-4),
        "sampler/mismatch/ratio_max": ([1.5, 1.0], 1.5),
        "sampler/mismatch/ratio_min": ([0.5, 1.0], 0.5),
        "sampler/lag/max": ([2.0, 1.0], 2.0),
        "filter/zero_variance": ([1.0, 2.0], 3.0),
        "upload/waiting": ([5.0, 2.0], 2.0),
        "tracking/Wandb/dropped": ([1.0, 2.0], 2.0),
    }
    steps = [{name: values[i] for name, (values, _) in logged.items()} for i in (0, 1)]
    found = counters(table([{"time": 0.0, "step": i, "metrics": metrics} for i, metrics in enumerate(steps)]))
    wrong = []
    for name, (_, expected) in logged.items():
        of, _, counter = name.removeprefix("env/").partition("/")
        shown = found["env/a" if name.startswith("env/") else of][counter]
        wrong += [(name, shown, expected)] if shown != expected else []
    assert wrong == []


def test_rounding_is_folded_as_what_stays_the_same_is():
    """Distances that are none but for rounding, and any curve that is one number in single precision."""
    cases = {
        "sampler/mismatch/kl": ([1.5e-11, 0.0, 3e-12], True),
        "sampler/mismatch/ratio_max": ([1.0000002, 1.0000001, 1.0], True),
        "train/kl_k3": ([1e-9, 2e-9, 1e-3], False),
        "train/entropy": ([0.3, 0.3 + 1e-8, 0.3], True),
        "train/grad_norm": ([1e-9, 2e-9, 3e-9], False),  # small, and not the rounding of something
        "train/learning_rate": ([1e-8, 2e-8, 3e-8], False),
    }
    steps = [{name: values[i] for name, (values, _) in cases.items()} for i in range(3)]
    found = panels(table([{"time": 0.0, "step": i, "metrics": metrics} for i, metrics in enumerate(steps)]))
    flat = {curve["name"]: each["flat"] for each in found for curve in each["curves"]}
    assert flat == {name: expected for name, (_, expected) in cases.items()}
