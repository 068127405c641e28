"""examples/openreward.py against the SDK's own server on this machine: every backend, resumed, uploaded, refused."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

import rlkit
from rlkit.rollouts import rollout_sync
from rlkit.storage import read
from tests.examples.programs import FOLDER, curve, cut, load, refused, script

pytest.importorskip("torch")
pytest.importorskip("omegaconf")
pytest.importorskip("jinja2")
pytest.importorskip("openreward", reason="openreward is not installed: pip install 'rlkit-lm[openreward]'")
pytest.importorskip("jsonschema")
pytest.importorskip("dotenv", reason="needs the extra examples")
program = load("openreward")
CALL = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("OPENREWARD_API_KEY", "OPENREWARD_API_URL", "WANDB_API_KEY", "WANDB_MODE", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(tmp_path, openreward_url):
    """``settings(variant, **more)`` writes a file for an environment of the server and returns its path."""

    def written(variant="digits", *, top=(), **more):
        environment = {
            "base_url": openreward_url,
            "variant": variant,
            "splits": {"train": {}},
            "num_rollouts": 4,
            **more,
        }
        content = {"model_name": "toy", "batch_size": 2, "max_response_tokens": 8, "learning_rate": 0.05}
        path = tmp_path / "settings.yaml"
        path.write_text(json.dumps({**content, **dict(top), "environments": {variant: environment}}))
        return path

    return written


def run(path, folder, *overrides):
    program.main(["--config_path", str(path), "--overrides", f"log_path={folder}", *overrides])
    return curve(folder)


def rewards(rows, name="digits"):
    return [metrics[f"env/{name}/reward"] for _, metrics in rows]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_it_learns(loss, settings, tmp_path):
    """The reward rises with each of the losses."""
    rows = run(settings(), tmp_path / "run", "backend=toy", "max_steps=5", "learning_rate=0.1", f"loss_fn={loss}")
    found = rewards(rows)
    assert np.mean(found[-2:]) > found[0] + 0.25
    assert {"train/kl_v1", "train/entropy", "train/groups_without_signal"} <= rows[0][1].keys()


@pytest.mark.parametrize("how", ["direct", "centered"])
def test_other_advantages(how, settings, tmp_path):
    """The rewards themselves, and centred without division."""
    options = ["backend=toy", "max_turns=6", "max_steps=6", "learning_rate=0.1", f"advantage_calculation={how}"]
    found = rewards(run(settings(), tmp_path / "run", *options))
    assert np.mean(found[-2:]) > found[0] + 0.15


@pytest.fixture
def caller(tmp_path):
    """The saved state of a policy that has half learned to call the tool ``go``."""
    policy = rlkit.connect("toy", seed=0, folder=tmp_path / "caller")
    said = np.array([*policy.tokenizer.encode(CALL), policy.tokenizer.eos_ids[0]])
    datum = rlkit.Datum.supervised(policy.tokenizer.encode("<|im_start|>assistant\n", special=True), said)
    for _ in range(28):
        policy.forward_backward([datum], "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
    return policy.save("step-00000003").result()


def test_tools_over_several_turns(settings, tmp_path, caller):
    """Calls are made, answered and trained on; the run goes on from the step in the name of the state it began with."""
    path = settings("doors", reward_reduction="sum", nonterminal_reward=-1.0)
    options = [
        "backend=toy",
        "max_turns=6",
        "max_steps=6",
        "max_response_tokens=64",
        f"resume_from={caller}",
        "learning_rate=0.02",
    ]
    rows = run(path, tmp_path / "run", *options)
    assert [step for step, _ in rows] == list(range(3, 6))
    played = [t for group in read(tmp_path / "run/trajectories.jsonl") for t in group.trajectories]
    assert min(len(t.turns) for t in played if t.terminated) == 3
    opened = {round(3 * (t.reward + 1), 6) for t in played if not t.terminated}
    assert opened <= {0, 1, 2}, "a cut episode keeps what its doors were worth"
    assert max(len(t.turns) for t in played) > 3, "a call that cannot be read is answered, and made again"
    assert np.mean(rewards(rows, "doors")) > 0.6
    assert any("train/loss" in metrics for _, metrics in rows)


def test_the_settings_of_each_environment(tmp_path, openreward_url):
    """Splits, orders, counts, group sizes, temperatures, reductions and bounds of several environments at once."""
    content = {
        "model_name": "toy",
        "batch_size": 4,
        "max_response_tokens": 4,
        "max_turns": 2,
        "environments": {
            "sums": {
                "base_url": openreward_url,
                "splits": {"train": {"shuffle": False, "num_samples": 4}, "test": {"num_samples": 1}},
                "num_rollouts": 3,
                "temperature": 0.5,
                "nonterminal_reward": -0.5,
                "min_reward": -0.25,
            },
            "digits": {
                "base_url": openreward_url,
                "variant": "digits",
                "splits": {"train": {"num_samples": 3}},
                "num_rollouts": 2,
            },
        },
    }
    path = tmp_path / "several.yaml"
    path.write_text(json.dumps(content))
    run(path, tmp_path / "run", "backend=toy", "num_epochs=2", "save_every=1")
    groups = list(read(tmp_path / "run/trajectories.jsonl"))
    assert len(groups) == 16, "two passes over eight tasks, four in a step"
    assert [g.index for g in groups if g.env == "sums:train"] == [0, 1, 2, 3, 0, 1, 2, 3]
    digits = [g.index for g in groups if g.env == "digits"]
    assert sorted(digits[:3]) == sorted(digits[3:])
    assert len({*digits}) == 3
    assert {*digits} != {0, 1, 2}, "three of all six in an order of the seed's, not the first three"
    sums = [g for g in groups if g.env.startswith("sums")]
    assert {len(g) for g in sums} == {3}
    assert {t.turns[0].sample.temperature for g in sums for t in g.trajectories} == {0.5}
    assert {float(t.reward) for g in sums for t in g.trajectories} == {-0.5}
    loaded = rlkit.config.load(program.Settings, path)
    assert program.bounded(sums[0], loaded).tolist() == [-0.25] * 3


@pytest.mark.parametrize("backend", ["toy", "local"])
def test_cut_off_and_run_again(backend, settings, tmp_path, tiny, monkeypatch):
    """The curve of a run that crashed in two of its steps is that of the one that did not, number by number."""
    options = [f"backend={backend}", "max_steps=4", "save_every=2", "environments.digits.num_rollouts=3"]
    if backend == "local":
        pytest.importorskip("peft")
        options += [f"model_name={tiny('llama')}", "lora_rank=4"]
    whole = run(settings(), tmp_path / "whole", *options)
    for at in (2, 1):
        with monkeypatch.context() as patched:
            stopped = cut(patched, program, at)
            with pytest.raises(stopped):
                run(settings(), tmp_path / "cut", *options)
    assert run(settings(), tmp_path / "cut", *options) == whole
    kept = [[(g.step, g.env, g.index) for g in read(tmp_path / f"{n}/trajectories.jsonl")] for n in ("whole", "cut")]
    assert kept[0] == kept[1]


def test_on_tinker(settings, tmp_path, monkeypatch):
    """Unchanged on the service, here one in this process; a temperature other than 1 too."""
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0) as fake:
        monkeypatch.setenv("TINKER_BASE_URL", fake.base_url)
        (tmp_path / ".env").write_text(f"TINKER_API_KEY={fake.api_key}  # from the console\n")
        monkeypatch.setenv("TINKER_API_KEY", "")  # so that what the program sets is undone
        monkeypatch.delenv("TINKER_API_KEY")
        rows = run(settings(temperature=0.8), tmp_path / "run", "max_steps=6", "learning_rate=0.1", "save_every=3")
        state = rlkit.runs.records(tmp_path / "run")[-1].policy("policy")
        assert state.startswith("tinker://")
        more = run(settings(), tmp_path / "next", "max_steps=8", f"resume_from={state}")
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        refused(program, arguments(settings(), tmp_path / "wrong"), "(?i)key|401|auth")
    found = rewards(rows)
    assert np.mean(found[-2:]) > found[0] + 0.2
    assert [step for step, _ in more] == [6, 7]


def arguments(path, folder, *overrides):
    return ["--config_path", str(path), "--overrides", f"log_path={folder}", *overrides]


@pytest.fixture
def uploads(monkeypatch):
    """What a fake of OpenReward's API is sent."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.headers["x-api-key"], body["events"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OPENREWARD_API_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OPENREWARD_API_KEY", "canary-key")
    yield seen
    server.shutdown()
    server.server_close()
    thread.join()


def test_trajectories_are_uploaded_and_kept(settings, tmp_path, uploads, capsys):
    """All of them, under the environment's own name; the key is in no file of the run."""
    run(settings(), tmp_path / "run", "backend=toy", "max_steps=2", "openreward_run_name=first")
    starts = [e for key, events in uploads for e in events if e["eventType"] == "rollout"]
    assert len(starts) == 2 * 2 * 4
    assert {(e["runName"], e["environment"]) for e in starts} == {("first", "digits")}
    assert {key for key, _ in uploads} == {"canary-key"}
    assert "'upload/sent': 16.0" in capsys.readouterr().out
    assert not any(b"canary-key" in file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())


def test_secrets_come_from_the_environment(settings, tmp_path, monkeypatch):
    """The environment's tools have them, the settings and the run do not."""
    monkeypatch.setenv("JUDGE_KEY", "canary-judge")
    path = settings("keys", secrets={"judge_key": ["judge.example"]}, nonterminal_reward=0.0)
    run(path, tmp_path / "run", "backend=toy", "max_steps=1", "batch_size=1", "max_turns=2")
    assert not any(b"canary-judge" in file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())
    refused(program, arguments(settings("keys", secrets={"other": None}), tmp_path / "x"), "variable OTHER is not set")
    refused(program, arguments(settings("keys", secrets={"judge_key": None}), tmp_path / "x"), "hosts .* are unknown")
    with pytest.raises(SystemExit) as error:
        program.main(arguments(settings("keys", secrets={"judge_key": "canary-file"}), tmp_path / "x"))
    assert "a key is no setting" in error.value.code
    assert "canary-file" not in error.value.code


def test_what_is_counted_and_tried_again(settings, tmp_path, monkeypatch):
    """Episodes in flight, further attempts after any failure, whole batches of an epoch, as in OpenReward's trainer."""
    plans = []

    def spy(sampler, tasks, *, plan, step):
        plans.append((plan, len(tasks)))
        return rollout_sync(sampler, tasks, plan=plan, step=step)

    monkeypatch.setattr(program, "rollout_sync", spy)
    options = ["backend=toy", "max_active_tasks=3", "max_rollout_retries=2", "rollout_timeout=60", "num_epochs=2"]
    rows = run(settings(), tmp_path / "run", *options, "batch_size=4")
    assert len(rows) == 2, "six tasks are one whole batch of four, twice"
    plan, size = plans[0]
    assert (plan.concurrency, plan.attempts, plan.retry, size) == (3, 3, (Exception,), 4)
    assert (plan.deadline, plan.call_timeout, plan.max_turns) == (60.0, 60.0, None)
    run(settings(), tmp_path / "more", "backend=toy", "max_steps=1", "max_active_tasks=3", "max_rollout_concurrency=5")
    assert plans[-1][0].concurrency == 5
    message = "batch_size: is 7; expected at most the 6 tasks of an epoch"
    refused(program, arguments(settings(), tmp_path / "x", "backend=toy", "num_epochs=3", "batch_size=7"), message)
    assert rows[0][1]["train/learning_rate"] == 0.05


@pytest.mark.parametrize(("reminder", "turns"), [([], 3), (["reminder=null"], 1)])
def test_a_turn_without_a_call_is_answered(settings, tmp_path, reminder, turns):
    """By a reminder that tools are to be called, until there are no turns left; null ends the episode there."""
    path = settings("doors", nonterminal_reward=0.0)
    run(path, tmp_path / "run", "backend=toy", "max_steps=1", "max_turns=3", *reminder)
    played = [t for group in read(tmp_path / "run/trajectories.jsonl") for t in group.trajectories]
    assert {len(t.turns) for t in played} == {turns}
    said = [message["content"] for message in played[0].messages if message["role"] == "user"]
    assert ("no tool call" in said[-1]) == (not reminder)


def test_the_documents_settings_load():
    """The file beside the program, and its command line's dotted names."""
    path = FOLDER / "openreward.yaml"
    found = rlkit.config.load(
        program.Settings, path, ["batch_size=64", "environments.GeneralReasoning/WhoDunIt.num_rollouts=4"]
    )
    assert (found.batch_size, found.learning_rate, found.loss_fn, found.backend) == (64, 1e-5, "ppo", "tinker")
    environment = found.environments["GeneralReasoning/WhoDunIt"]
    assert (environment.num_rollouts, environment.max_failing_rollouts, environment.nonterminal_reward) == (4, 2, 0.0)
    assert environment.splits["train"] == program.Split(shuffle=True, num_samples=None)
    assert program.names_of(found) == {"GeneralReasoning:WhoDunIt": "GeneralReasoning/WhoDunIt"}, "a slash is a level"


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["batchsize=3"], "batchsize: unknown setting; did you mean 'batch_size'"),
        (["batch_size=many"], "batch_size: is 'many'; expected a value of type int"),
        (
            ["environments.digits.num_rolouts=3"],
            r"environments.digits.num_rolouts: unknown setting",
        ),
        (["environments.digits.max_failing_rollouts=3"], "expected 2 or more to compare"),
        (["environments.digits.temperature=0"], "all rollouts are alike"),
        (["environments.digits.top_p=0.9"], "no ratio to train with"),
        (["environments.digits.min_reward=2", "environments.digits.max_reward=1"], "low: got 2.0"),
        (["environments.digits.variant=nothing"], "nothing"),
        (["environments.digits.splits.dev.shuffle=true"], "no split named 'dev'. There are: train, test"),
        (["environments.digits.base_url=http://127.0.0.1:9"], "127.0.0.1:9"),
        (["loss_fn=gspo"], "loss_fn: is 'gspo'; expected one of 'importance_sampling', 'ppo', 'cispo', 'dro'"),
        (["loss_fn_config.clip=0.1"], "has no such setting; did you mean .dual_clip"),
        (["system_prompt_template='Use {tools}.'"], "leave {tools} out"),
        (["save_every=0"], "save_every: is 0"),
        (["thinking=true"], "Chat.thinking"),
        (["backend=local", "model_name=/nowhere/at/all"], "/nowhere/at/all"),
        (["resume_from=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_mistakes(overrides, match, settings, tmp_path):
    """One sentence and a status that is not 0, before anything is sampled."""
    refused(program, arguments(settings(), tmp_path / "run", "backend=toy", *overrides), match)
    folder = tmp_path / "run"
    assert not (folder / "metrics.jsonl").exists() or curve(folder) == []


def test_no_file_and_no_key(settings, tmp_path, monkeypatch):
    refused(program, arguments(tmp_path / "nothing.yaml", tmp_path), "nothing.yaml cannot be read")
    pytest.importorskip("tinker", reason="needs the extra tinker")
    monkeypatch.setenv("HOME", str(tmp_path))
    refused(program, arguments(settings(), tmp_path / "run"), "no API key; set TINKER_API_KEY")
    refused(program, ["--config_path", str(FOLDER / "openreward.yaml")], "needs an API key; set OPENREWARD_API_KEY")


def test_as_a_script_although_it_is_named_as_the_package(settings, tmp_path):
    """The command of its docstring."""
    script("openreward", *arguments(settings(), tmp_path / "run", "backend=toy", "max_steps=1"))
    assert len(curve(tmp_path / "run")) == 1
