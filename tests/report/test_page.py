"""The page as a file: what it holds, and that nothing in it can run or call out."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import re
import shutil
import stat
import subprocess
from importlib.resources import files

import numpy as np
import pytest

from rlkit import CheckpointError, ConfigError, Sample, storage
from rlkit.report import page, write
from rlkit.tracking import Jsonl
from rlkit.trajectory import Failure, Group, Trajectory, Turn
from tests.report import build

UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"  # dist/uPlot.iife.min.js of uplot 1.6.32
POISON = "</script><script>document.title='taken'</script><!-- <img src=x onerror=alert(1)> {{ 7*7 }} \u2028 \ud800"


def asset(name):
    return files("rlkit.report").joinpath("assets", name).read_text("utf-8")


def data(path, name):
    """What a script element of the page holds: JSON, or JSON packed with gzip and base64."""
    text = path.read_text().partition(f'id="{name}">')[2].partition("<")[0]
    return json.loads(text if name == "about" else gzip.decompress(base64.b64decode(text)))


def records(path):
    return [record for i in range(path.read_text().count('id="part-')) for record in data(path, f"part-{i}")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return build.run(tmp_path_factory.mktemp("run"))


def poisoned(folder):
    """A run in which everything that can hold text holds markup."""
    text = POISON.encode("utf-8", "replace")
    messages = [{"role": POISON, "content": POISON}, {"role": "assistant", "content": [{"text": POISON}]}]
    messages += [{"role": "tool", "name": POISON, "content": POISON, "tool_calls": [{"name": POISON}, None]}]
    named = {"env": POISON, "ended": POISON, "tags": {POISON: POISON}, "metrics": {POISON: 1.0}, "messages": messages}
    trajectory = Trajectory([Turn(Sample([65], list(text), [-0.5] * len(text)), 1.0, {POISON: 1.0})], **named)
    group = Group([trajectory] * 3, failures=[Failure(POISON, POISON, POISON, "step")], env=POISON)
    storage.append(folder / "trajectories.jsonl", [group])
    Jsonl(folder).log({f"env/{POISON.replace('/', '')}/reward": 1.0, POISON: 2.0, "train/loss": math.nan}, 0)
    for name in ("config.json", "run.json"):
        (folder / name).write_text(json.dumps({POISON: [POISON, {POISON: POISON}], "text": POISON}))
    return folder


def test_poison_is_text(tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    path = write(poisoned(folder), tokenizer=build.TOKENIZER)
    text = path.read_text()
    assert text.count("<script>") == text.count("</style>") == 1
    assert text.count("<script") == text.count("</script") == 4  # about, one part, index and the script itself
    assert "<img" not in text
    assert "title='taken'" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text  # the folder's name
    assert text.count("&lt;/script&gt;&lt;script&gt;document.title=&#39;taken&#39;") > 6  # settings and metrics
    index, charts, record = data(path, "index"), data(path, "about")["charts"], records(path)[0]
    assert [message["content"] for message in record["messages"]] == [POISON] * 3
    assert (record["failures"], record["tags"]) == ([f"{POISON}: {POISON}"], {POISON: POISON})
    assert POISON in index["columns"]["env"]
    assert POISON in charts


def test_the_page_makes_no_requests(run):
    """Its policy allows its own script and style alone, by their digests, and no attribute holds an address."""
    text = write(run).read_text()
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1])
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"\b(src|href|action|srcset|style|on\w+)\s*=", markup)
    assert not re.search(r"@import|url\(", asset("page.css"))


def test_the_script_makes_no_markup_from_data():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|\.write|eval\(|Function\(|fetch\(|<!--", asset("page.js"))
    assert re.findall(r"{{ (\w+)\S* \| safe }}", asset("page.html.j2")) == ["style", "part", "index", "script"]
    assert asset("page.html.j2").count("safe") == 4
    assert hashlib.sha256(asset("uplot.min.js").encode()).hexdigest() == UPLOT
    assert "MIT License" in asset("uplot.LICENSE")
    if shutil.which("node"):
        subprocess.run(["node", "--check", files("rlkit.report") / "assets" / "page.js"], check=True)


def test_the_page_holds_the_run(run):
    path = write(run, tokenizer=build.TOKENIZER)
    text = path.read_text()
    assert (path, stat.S_IMODE(path.stat().st_mode)) == (run / "report.html", 0o600)
    assert "3 steps in" in text
    assert "hush-hush" not in text
    assert "adam.learning_rate</th><td>0.0001</td>" in text
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    assert titles[:2] == ["env/*/reward (mean)", "eval/*/mean (mean)"]
    assert {"train/loss (sum)", "env/*/tokens/max (max)", "my/own (mean)"} <= set(titles)
    assert "1 value not finite, first at step 1" in text
    index, charts = data(path, "index"), data(path, "about")["charts"]
    assert (index["groups"], index["total"], index["unread"]) == (5, 5, 0)
    reward = [(curve["env"], curve["x"]) for curve in charts["env/*/reward"]["curves"]]
    assert reward == [("sums", [0, 1, 2]), ("more-sums", [0, 1, 2])]
    assert [curve["end"] for curve in charts["eval/*/mean"]["curves"]] == ["", "low", "high"]
    for text in ("T", "✓", "é", "🙂"):  # parts of a character are decoded together
        assert index["texts"][",".join(map(str, text.encode()))] == text
    trajectories = [t for group in storage.read(run / "trajectories.jsonl") for t in group.trajectories]
    columns = index["columns"]
    assert columns["reward"] == [trajectory.reward for trajectory in trajectories]
    assert columns["group"] == [1 + i for i in range(5) for _ in range(4)]
    for i, (record, trajectory) in enumerate(zip(records(path), trajectories, strict=True)):
        before = []
        for turn, original in zip(record["turns"], trajectory.turns, strict=True):  # prompts as they were sent
            assert before[: turn["kept"]] + turn["added"] == original.prompt.tolist()
            assert [x / 1000 for x in turn["logprobs"]] == pytest.approx(original.logprobs.tolist(), abs=5.1e-4)
            before = [*original.prompt.tolist(), *turn["tokens"]]
        assert columns["question"][i] == record["messages"][0]["content"]
        assert record["messages"][-1]["content"].startswith(columns["answer"][i])


def test_values_of_tokens(tmp_path):
    """One number or one for each token; what does not fit the tokens is left out, what is not finite is empty."""
    turns = [Turn(Sample([1], [2, 3], [-0.5, -1.0], versions=[2, 4])), Turn(Sample([1, 2, 3], [4], [-0.25], version=4))]
    record = storage.to_record(Group([Trajectory(turns, ended="length")] * 4))
    given = [(-0.5, [-0.5, -0.75, -1.25]), ([0.5, "NaN", 2.0], [-0.5, "-Infinity", -0.25]), ([0.5], -1.0), ("x", None)]
    extras = [{"advantages": advantages, "trainer_logprobs": trainer} for advantages, trainer in given]
    record["trajectories"] = [raw | extra for raw, extra in zip(record["trajectories"], extras, strict=True)]
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(record) + "\n")
    path = write(tmp_path)
    assert [record["advantages"] for record in records(path)] == [-500, [500, None, 2000], None, None]
    assert [record["trainer"] for record in records(path)] == [[-500, -750, -1250], [-500, None, -250], None, None]
    assert [turn["versions"] for turn in records(path)[0]["turns"]] == [[2, 4], None]
    assert records(path)[0]["version"] == "2 to 4"
    columns = data(path, "index")["columns"]
    assert columns["gap"] == [1.0, 0.0, None, None]  # -1.25 for -0.25
    assert columns["advantage"][0] == -0.5


def test_two_runs(tmp_path):
    runs = [build.run(tmp_path / name, 6, seed=seed) for seed, name in enumerate("ab")]
    path = write(runs, tmp_path / "both.html", max_groups=6)
    text, about, columns = path.read_text(), data(path, "about"), data(path, "index")["columns"]
    assert about["runs"] == ["a", "b"]
    assert [curve["run"] for curve in about["charts"]["train/loss"]["curves"]] == [0, 1]
    assert re.search(r'class="different">\s*<th scope="row">seed</th><td>0</td><td>1</td>', text)
    assert re.search(r'<tr>\s*<th scope="row">model</th><td>toy</td><td>toy</td>', text)
    assert columns["run"] == ["a"] * 12 + ["b"] * 12
    assert len(set(columns["group"])) == 6


def test_long_runs_are_shown_in_part(tmp_path):
    """Groups evenly spaced over the run, the first among them; a long curve keeps its extremes and both ends."""
    build.run(tmp_path, 100, n=1, per_step=1)
    for most, steps in ((1000, range(100)), (25, range(0, 100, 4)), (1, [0])):
        index = data(write(tmp_path, max_groups=most), "index")
        assert index["columns"]["step"] == list(steps)
        assert (index["groups"], index["total"]) == (len(steps), 100)
    values = np.random.default_rng(0).normal(size=6000).tolist()
    thinned = page._thin(list(enumerate(values)))
    assert len(thinned) <= page._MOST_POINTS
    assert {0, 5999, np.argmin(values), np.argmax(values)} <= {step for step, _ in thinned}


def test_an_empty_run_and_lines_that_cannot_be_read(tmp_path):
    for text in ("3", "Infinity", "[" * 5000, "{", "\ud800", '{"clip": Infinity, "x": [NaN, 1e999]}'):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        path = write(tmp_path, tmp_path / "x.html")
        assert "0 steps" in path.read_text()
        assert data(path, "index")["columns"]["step"] == []
    build.run(tmp_path, 2, n=1)
    with (tmp_path / "trajectories.jsonl").open("a") as file:
        file.write('{"format": "rlkit.group", "version": 99}\n\n{"a": 1}\n[1]\n{"format": "rlkit.gro')
    index = data(write(tmp_path), "index")
    assert (index["groups"], index["unread"], index["total"]) == (2, 4, 6)


def test_what_is_not_a_run_is_refused(tmp_path):
    for folder in (tmp_path / "nothing", tmp_path, [tmp_path, tmp_path]):
        with pytest.raises(CheckpointError, match="is not a run's folder"):
            write(folder)
    (tmp_path / "config.json").write_text("{}")
    for name, values in {"folder": (None, [], [3]), "out": (3,), "max_groups": (0,), "tokenizer": (3,)}.items():
        for value in values:
            with pytest.raises(ConfigError, match=name):
                write(**{"folder": tmp_path, name: value})
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path, tmp_path / "no" / "such" / "folder.html")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
