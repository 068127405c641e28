"""Stands for an interpreter that has lm-eval and inspect, and for those two: ``fake.py -m lm_eval ...``.

What it does is in the name of the task: it writes results as the real ones do, or fails in one of several ways.
"""

import http.client
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.parse


def option(name):
    """The value of ``--name value`` or ``--name=value``."""
    for i, word in enumerate(sys.argv):
        if word == f"--{name}":
            return sys.argv[i + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None


def posted(url, body):
    """The answer to a request."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == 200, text
    return json.loads(text)


def lm_eval():
    """Score one prompt through the completions endpoint, as ``local-completions`` does."""
    args = dict(each.partition("=")[::2] for each in option("model_args").split(","))
    task, folder = option("tasks"), pathlib.Path(option("output_path")) / "policy"
    print(f"fake lm-eval on {task}", flush=True)
    if task == "dies":
        print("no such task", file=sys.stderr)
        sys.exit(1)
    if task == "silent":
        sys.exit(3)
    if task == "killed":
        os.kill(os.getpid(), 9)
    if task == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path(os.environ["FAKE_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    folder.mkdir(parents=True)
    results = folder / "results_2026-01-01T00-00-00.json"
    if task == "nothing":
        return
    if task == "nonsense":
        sys.stdout.buffer.write(b"\xff\xfe\x00 100%|#####|\r")
        results.write_text("[1, 2")
        return
    if task == "empty":
        results.write_text(json.dumps({"results": {task: {"alias": task, "acc,none": "N/A"}}}))
        return
    body = {"model": args["model"], "prompt": [[72, 105, 33]], "max_tokens": 1, "logprobs": 1, "echo": True}
    (choice,) = posted(args["base_url"], {**body, "temperature": 0, "seed": 1234})["choices"]
    logprobs = choice["logprobs"]["token_logprobs"]
    assert len(logprobs) == 4, logprobs
    values = {"alias": task, "acc,none": 0.5, "acc_stderr,none": 0.05, "logprob,none": sum(logprobs[1:-1])}
    values |= {"logprob_stderr,none": "N/A", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.04}
    content = {"results": {task: values}, "n-samples": {task: {"original": 200, "effective": 100}}}
    results.write_text(json.dumps(content | {"arguments": sys.argv[1:]}))


def inspect_ai():
    """Ask one question through the chat endpoint."""
    folder, task = pathlib.Path(option("log-dir")), sys.argv[4]
    name = task.partition("@")[2]
    model = option("model").removeprefix("openai-api/rlkit/")
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = posted(option("model-base-url") + "/chat/completions", body)
    assert os.environ["RLKIT_API_KEY"]
    folder.mkdir(exist_ok=True)
    metrics = {"accuracy": {"name": "accuracy", "value": 0.75}, "stderr": {"name": "stderr", "value": 0.1}}
    results = {"completed_samples": 4, "scores": [{"name": "match", "metrics": metrics}]}
    log = {"version": 2, "status": "error" if name == "fails" else "success", "eval": {"task": name}}
    log |= {"results": results, "error": {"message": "out of questions"}, "said": answer["choices"][0]["message"]}
    (folder / f"2026_{name}.json").write_text(json.dumps(log))


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        print("1.2.3" if "lm_eval" in sys.argv[2] or "inspect_ai" in sys.argv[2] else "")
    else:
        {"lm_eval": lm_eval, "inspect_ai": inspect_ai}[sys.argv[2]]()
