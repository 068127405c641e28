"""``rlkit serve --openai``: a policy before any client, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from rlkit import cli

httpx = pytest.importorskip("httpx", reason="needs the extra gateway")
pytest.importorskip("uvicorn", reason="needs the extra gateway")


@contextlib.contextmanager
def served(*words, **variables):
    """(URL, all that was printed) of a server, which Ctrl-C ends in order."""
    command = [sys.executable, "-m", "rlkit.cli", "serve", "--openai", "--port", "0", *words]
    environment = os.environ | variables
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            told = "".join(process.stdout.readline() for _ in range(3))
            found = re.search(r"http://[\d.]+:\d+", told)
            yield (found[0] if found else None), told
        finally:
            process.send_signal(signal.SIGINT)
            _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0
        assert complaints == ""


def test_a_run_is_served(tmp_path):
    """Its newest checkpoint, or the one of ``--step``; logprobs are the policy's."""
    with rlkit.Run(tmp_path / "first", seed=0, retention=rlkit.runs.Retention(last=9), trackers=()) as run:
        policy = run.connect("toy")
        for _ in run.steps(2):
            policy.forward_backward([rlkit.Datum.supervised([72], list(b"i!"))], "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.5)).result()
            run.checkpoint(policy)
    folder = str(tmp_path / "first")
    for words, step in (([], None), (["--step", "1", "--name", "mine"], 1)):
        name = "mine" if words else "first"
        with served("--model", folder, *words) as (url, told):
            assert told.splitlines() == [
                f"serving {name} at {url}/v1",
                f"clients: OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none",
                f"         ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY=none",
            ]
            assert [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == [name]
            body = {"model": name, "prompt": "Hi!", "max_tokens": 1, "logprobs": 0, "echo": True}
            (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
        with rlkit.runs.sampler(folder, step=step) as sampler:
            expected = sampler.logprobs(list(b"Hi!")).result()[1:]
        assert choice["logprobs"]["token_logprobs"][1:3] == pytest.approx(expected.tolist(), abs=1e-5)


def test_what_is_served_is_scored(tiny, tmp_path, monkeypatch, capsys):
    """The server names the model's folder, by its absolute path, and so a URL alone is a policy."""
    monkeypatch.chdir(Path(tiny("llama")).parent)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    score = [str(tmp_path / "rows.jsonl"), "--max-tokens", "2"]
    with served("--model", Path(tiny("llama")).name, "--option", "device=cpu") as (url, _):
        (card,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert card["root"] == tiny("llama")
        monkeypatch.chdir(tmp_path)
        for words in ([], ["--tokenizer", tiny("llama")]):
            assert cli.main(["eval", url, *score, *words]) == 0, capsys.readouterr().err
            assert "1 tasks, 1 episodes, 0 failed" in capsys.readouterr().out
        assert cli.main(["eval", url, *score, "--tokenizer", "nothing"]) == 2
        assert "tokenizer: nothing holds none" in capsys.readouterr().err


def test_other_machines_need_a_key(capsys, monkeypatch):
    monkeypatch.delenv("RLKIT_SERVER_KEY", raising=False)
    everywhere = ["serve", "--openai", "--backend", "toy", "--host", "0.0.0.0", "--port", "0"]  # noqa: S104
    assert cli.main(everywhere) == 2
    assert "a key in $RLKIT_SERVER_KEY" in capsys.readouterr().err
    monkeypatch.setenv("RLKIT_SERVER_KEY", "hunter2")
    assert cli.main(everywhere) == 2
    error = capsys.readouterr().err
    assert "at least 12 characters" in error
    assert "hunter2" not in error


def test_a_key(tmp_path):
    """Clients must give it, by either API's header; it is not printed."""
    key = "a-key-of-the-test"
    with served("--backend", "toy", "--host", "0.0.0.0", RLKIT_SERVER_KEY=key) as (url, told):  # noqa: S104
        assert key not in told
        assert "OPENAI_API_KEY=<what is in $RLKIT_SERVER_KEY>" in told
        url = url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        body = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={**headers, "host": "gpu.example.org"})
            assert answer.json()["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--openai", "--model", "nothing"], "model: no directory 'nothing'"),
        (["--openai", "--backend", "toy", "--folder", "x"], "--folder: is given; expected it without --openai"),
        (["--openai", "--backend", "toy", "--tokenizer", "x"], "--tokenizer: is given; expected it without --openai"),
        (["--backend", "toy", "--step", "3"], "--step: is given; expected it with --openai"),
        (["--openai", "--backend", "toy", "--option", "x=1"], "x"),
        (["--openai", "--backend", "toy", "--port", "70000"], "Gateway(port)"),
    ],
)
def test_errors_are_one_line(words, message, capsys):
    assert cli.main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlkit serve: ")
    assert message in error
    assert error.count("\n") == 1
