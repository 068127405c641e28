"""``rlkit serve --openai``: a policy for any client, and the lines of docs/evaluation.md that score it by benchmarks.

``make test-harnesses`` runs those lines with lm-eval and inspect themselves; here a program posts what they post.
"""

from __future__ import annotations

import contextlib
import json
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

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
SECTION = PAGE.partition("## Benchmarks")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)
HI = list(b"Hi!")
CLIENT = """#!{python}
import json, os, sys, httpx

words = sys.argv[1:]
after = lambda name: words[words.index(name) + 1]
user, more = [{{"role": "user", "content": "Hi!"}}], {{"temperature": 0, "seed": 1234}}
if words[0] == "eval":
    url, key, model = after("--model-base-url") + "/chat/completions", os.environ["RLKIT_API_KEY"], after("--model")
    bodies = [{{"model": model.removeprefix("openai-api/rlkit/"), "messages": user, "max_tokens": 4}}]
else:
    args = dict(pair.split("=", 1) for pair in after("--model_args").split(","))
    url, key, more["model"] = args["base_url"], os.environ["OPENAI_API_KEY"], args["model"]
    scored = {{"prompt": [[72, 105, 33]], "logprobs": 1, "echo": True, **more}}
    bodies = [{{**scored, "max_tokens": 1}}, {{**scored, "max_tokens": 0}}]
    if after("--model") == "local-chat-completions":
        bodies = [{{"messages": user, "max_tokens": 4, "stop": ["Q"], **more}}]
with httpx.Client(headers={{"authorization": "Bearer " + key}}, timeout=60) as client:
    print(json.dumps([client.post(url, json=body).raise_for_status().json()["choices"] for body in bodies]))
"""


@contextlib.contextmanager
def served(command, folder, **variables):
    """(URL, all that was printed) of a server, which Ctrl-C ends in order; its port is free."""
    words = [sys.executable, "-m", "rlkit.cli", *command.split()[1:], "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(Path(rlkit.__file__).parents[1])} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=folder, env=environment, **pipes) as process:
        try:
            told = "".join(process.stdout.readline() for _ in range(3))
            found = re.search(r"http://[\d.]+:\d+", told)
            yield (found[0] if found else None), told
        finally:
            process.send_signal(signal.SIGINT)
            _, complaints = process.communicate(timeout=60)
        assert (process.returncode, complaints) == (0, "")


@pytest.fixture
def folder(tmp_path):
    """Where runs/first has two checkpoints, and benchmarks/bin the programs of the page."""
    with rlkit.Run(tmp_path / "runs/first", seed=0, retention=rlkit.runs.Retention(last=9), trackers=()) as run:
        policy = run.connect("toy")
        for _ in run.steps(2):
            policy.forward_backward([rlkit.Datum.supervised([72], list(b"i!"))], "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.5)).result()
            run.checkpoint(policy)
    programs = tmp_path / "benchmarks" / "bin"
    programs.mkdir(parents=True)
    for name in ("lm_eval", "inspect"):
        (programs / name).write_text(CLIENT.format(python=sys.executable))
        (programs / name).chmod(0o755)
    return tmp_path


def test_the_page_scores_a_run(folder):
    """Its lines, in its order, on another port: logprobs of the prompt, and which token was the best there."""
    serve, install, *programs = BLOCKS
    assert "lm_eval[api,hf]" in install
    assert "inspect-ai" in install
    with served(serve.replace("--port 8000", ""), folder) as (url, told):
        assert told.splitlines() == [
            f"serving first at {url}/v1",
            f"clients: OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=none",
            f"         ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY=none",
        ]
        lines = [block.replace("http://127.0.0.1:8000", url) for block in programs]
        run = {"cwd": folder, "capture_output": True, "text": True, "check": True, "timeout": 60}
        said = [json.loads(subprocess.run(["bash", "-c", each], **run).stdout) for each in lines]
    ((one,), (none,)), ((generated,),), ((asked,),) = said
    with rlkit.runs.sampler(folder / "runs/first") as sampler:
        expected = sampler.logprobs(HI).result()[1:].tolist()
        best = sampler.top_logprobs(HI, 1).result()[1][1:, 0].tolist()
    for choice, drawn in ((one, 1), (none, 0)):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:3] == pytest.approx(expected, abs=1e-5)
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:3]] == pytest.approx(best, abs=1e-5)
        assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 3 + drawn
    assert generated["message"]["role"] == asked["message"]["role"] == "assistant"


def test_what_is_served_is_scored(tiny, tmp_path, monkeypatch, capsys):
    """The server names the model's folder, by its absolute path, and so a URL alone is a policy."""
    model = Path(tiny("llama"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    score = [str(tmp_path / "rows.jsonl"), "--max-tokens", "2"]
    with served(f"rlkit serve --openai --model {model.name} --option device=cpu", model.parent) as (url, _):
        monkeypatch.chdir(tmp_path)
        for words in ([], ["--tokenizer", str(model)]):
            assert cli.main(["eval", url, *score, *words]) == 0, capsys.readouterr().err
            assert "1 tasks, 1 episodes, 0 failed" in capsys.readouterr().out
        assert cli.main(["eval", url, *score, "--tokenizer", "nothing"]) == 2
        assert "tokenizer: nothing holds none" in capsys.readouterr().err


def test_a_step_is_served_to_other_machines_with_a_key(folder, capsys, monkeypatch):
    """Clients give the key, by either API's header; it is not printed."""
    everywhere = "rlkit serve --openai --model runs/first --step 1 --host 0.0.0.0"
    for key, said in (("", "a key in $RLKIT_SERVER_KEY"), ("hunter2", "at least 12 characters")):
        monkeypatch.setenv("RLKIT_SERVER_KEY", key)
        assert cli.main(["serve", "--openai", "--backend", "toy", "--host", "0.0.0.0", "--port", "0"]) == 2  # noqa: S104
        error = capsys.readouterr().err
        assert said in error
        assert "hunter2" not in error
    key = "a-key-of-the-test"
    with served(everywhere, folder, RLKIT_SERVER_KEY=key) as (url, told):
        assert key not in told
        assert "OPENAI_API_KEY=<what is in $RLKIT_SERVER_KEY>" in told
        url = url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        assert httpx.get(f"{url}/v1/models").status_code == 401
        body = {"model": "first", "prompt": "Hi!", "max_tokens": 0, "logprobs": 0, "echo": True}
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            with httpx.Client(base_url=url, headers={**headers, "host": "gpu.example.org"}, timeout=60) as client:
                assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["first"]
                (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    with rlkit.runs.sampler(folder / "runs/first", step=1) as sampler:
        expected = sampler.logprobs(HI).result()[1:].tolist()
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)


def test_errors_are_one_line(capsys):
    toy, without = "--openai --backend toy", "is given; expected it without --openai"
    for words, message in {
        "--openai --model nothing": "model: no directory 'nothing'",
        f"{toy} --folder x": f"--folder: {without}",
        f"{toy} --tokenizer x": f"--tokenizer: {without}",
        "--backend toy --step 3": "--step: is given; expected it with --openai",
        f"{toy} --option x=1": "x",
        f"{toy} --port 70000": "Gateway(port)",
    }.items():
        assert cli.main(["serve", *words.split()]) == 2, words
        error = capsys.readouterr().err
        assert (error.startswith("rlkit serve: "), message in error, error.count("\n")) == (True, True, 1), words
