"""lm-eval and inspect, as they are installed from PyPI, against a policy of rlkit's: the lines of docs/evaluation.md.

    python tests/install/harnesses.py                                    # makes their environments; make test-harnesses
    python tests/install/harnesses.py --lm-eval FOLDER --inspect FOLDER  # uses environments that have them

The Python that runs this has rlkit with the extras local, gguf and gateway. A LoRA on SmolLM2 takes a few steps in a
run. Then the page's lines are run, with tasks of this file in place of the page's, and lm-eval scores the merged model
through its own transformers backend: scores and greedy texts have to be the same and every logprob equal to 1e-3.
Nothing is downloaded but the packages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLOSE = 1e-3  # nats, of a choice
QUESTIONS = [
    ("Which animal barks?", ["dog", "cat", "fish", "bird"], 0),
    ("What is frozen water called?", ["steam", "ice", "sand", "wood"], 1),
    ("Which planet do people live on?", ["Mars", "Venus", "Earth", "Jupiter"], 2),
    ("What do bees make?", ["milk", "bread", "salt", "honey"], 3),
    ("Which of these is a fruit?", ["a hammer", "a ripe banana", "a chair", "a river"], 1),
    ("What does a thermometer measure?", ["time", "weight", "temperature", "the speed of light"], 2),
    ("What do plants need to grow?", ["sunlight and water", "sugar", "smoke", "music"], 0),
    ("Which one is a metal?", ["wool", "glass", "paper", "iron"], 3),
]
CHOICE = """task: small_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WORDS = """task: small_words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}} Answer with one word."
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
filter_list:
  - name: last_word
    filter: [{function: regex, regex_pattern: '(\\w+)\\W*$'}, {function: take_first}]
metric_list: [{metric: exact_match, ignore_case: true, ignore_punctuation: true}]
"""
QUIZ = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def quiz():
    asked = {"What is frozen water called?": "ice", "Which animal barks?": "dog", "What is 2 + 2?": "4"}
    samples = [Sample(input=f"{question} Answer with one word.", target=word) for question, word in asked.items()]
    return Task(dataset=samples, solver=generate(max_tokens=12, temperature=0.0), scorer=includes())
"""


def run(folder, command):
    """Run a line in a shell; its output is shown where it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = ["bash", "-c", command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"$ {command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")


def page(**changes):
    """Return the lines of the page: the server's, and those of the three programs, with what is changed in all."""
    text = (ROOT / "docs" / "evaluation.md").read_text("utf-8").partition("## Benchmarks")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for old, new in changes.items():
        assert any(old in block for block in blocks), old
        blocks = [block.replace(old, new) for block in blocks]
    return [blocks[0], *blocks[2:]]


def trained(folder):
    """A run of two steps, whose policy differs from its base, and the merged model."""
    import numpy as np

    import rlkit

    with rlkit.Run(folder / "runs/first", seed=0) as run_:
        policy = run_.connect("local", model="smollm2-135m-instruct", lora=rlkit.Lora(rank=8))
        tokens = policy.tokenizer.encode("Question: Which one is a metal?\nAnswer: wool")
        datum = rlkit.Datum(tokens, np.arange(len(tokens)) >= len(tokens) - 2, {})
        for _ in run_.steps(2):
            policy.forward_backward([datum], "cross_entropy")
            run_.log(policy.optim_step(rlkit.Adam(learning_rate=1e-3)).result())
        run_.checkpoint(policy)
    run(folder, f"{sys.executable} -m rlkit.cli checkpoints runs/first --export merged --merged")


def answers(folder, task):
    """What lm-eval noted for each question: (logprob, greedy) of each choice, or the text."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [[response[0] for response in row["resps"]] for row in rows]


def scores(folder, task):
    """Metric -> score, of lm-eval's own file."""
    (path,) = (path for path in folder.rglob("results_*.json") if task in json.loads(path.read_text())["results"])
    return {k: v for k, v in json.loads(path.read_text())["results"][task].items() if "," in k}


def same(one, other):
    """The scores of two evaluations are equal, and every choice's logprob to ``CLOSE``, greedy or not alike."""
    assert scores(one, "small_choice") == scores(other, "small_choice")
    worst = 0.0
    for choices, others in zip(answers(one, "small_choice"), answers(other, "small_choice"), strict=True):
        assert len(choices) == len(others) == 4
        for (logprob, greedy), (other_logprob, other_greedy) in zip(choices, others, strict=True):
            assert greedy == other_greedy
            worst = max(worst, abs(float(logprob) - float(other_logprob)))
    assert worst < CLOSE, worst
    return worst


@contextlib.contextmanager
def served(folder, line):
    """Run the page's server on another port; yield its address. Ctrl-C ends it in order."""
    command = [sys.executable, "-m", "rlkit.cli", *line.split()[1:], "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = process.stdout.readline()
            found = re.search(r"127\.0\.0\.1:\d+", told)
            assert found, told
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def evaluate(folder):
    """Run the page's lines, and compare what they gave."""
    more = "--include_path tasks --log_samples"
    ours = {"arc_easy --limit 100": f"small_choice {more}", "ifeval": f"small_words {more}"}
    ours |= {"HuggingFaceTB/SmolLM2-135M-Instruct": "merged", "quiz.py@quiz": "tasks/quiz.py@quiz"}
    with served(folder, page()[0]) as address:
        choice, words, quiz = page(**ours, **{"127.0.0.1:8000": address})[1:]
        ways = {  # which lm-eval has beside the page's
            "as on the page": choice,
            "in batches": choice.replace("num_concurrent=8", "num_concurrent=1 --batch_size 3"),
            "as texts": choice.replace("num_concurrent=8", "tokenized_requests=False,num_concurrent=2"),
        }
        own = "benchmarks/bin/lm_eval --model hf --model_args pretrained=merged,dtype=float32 --device cpu"
        run(folder, f"{own} --tasks small_choice {more} --output_path own")
        for i, (way, line) in enumerate(ways.items()):
            run(folder, line.replace("runs/first/lm-eval", f"way-{i}"))
            print(f"  choices {way}: logprobs differ by {same(folder / 'own', folder / f'way-{i}'):.1e}", flush=True)
        run(folder, f"{own} --tasks small_words --apply_chat_template {more} --output_path own-words")
        texts = choice.replace("small_choice", "small_words --apply_chat_template").replace("lm-eval", "text")
        for line, out in ((words, "runs/first/lm-eval"), (texts, "runs/first/text")):
            run(folder, line)
            for read in (answers, scores):
                assert read(folder / out, "small_words") == read(folder / "own-words", "small_words"), out
        print(f"  words: {scores(folder / out, 'small_words')}", flush=True)
        assert scores(folder / out, "small_words")["exact_match,last_word"] > 0  # else it says little
        run(folder, quiz.replace(" --model ", " --log-format=json --model "))
    (log,) = (folder / "runs/first/inspect").glob("*.json")
    results = json.loads(log.read_text())["results"]
    assert results["completed_samples"] == 3
    print(f"  quiz: {results['scores'][0]['metrics']['accuracy']['value']}", flush=True)


def environment(folder, *packages):
    """An environment with these packages."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for line in packages:
        subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", "-q", *line.split()], check=True)
    return folder


def main():
    """Everything, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lm-eval", type=Path, metavar="FOLDER", help="an environment with lm_eval[api,hf]")
    parser.add_argument("--inspect", type=Path, metavar="FOLDER", help="an environment with inspect-ai and openai")
    parser.add_argument("--keep", type=Path, help="a new folder for all files, which is left there")
    options = parser.parse_args()
    version = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    folder = Path(tempfile.mkdtemp(prefix="rlkit-harnesses-")) if options.keep is None else options.keep.resolve()
    try:
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
        data = folder / "tasks" / "questions.json"
        names = ("question", "choices", "answer")
        data.write_text(json.dumps([dict(zip(names, each, strict=True)) for each in QUESTIONS]))
        for name, text in (("small_choice", CHOICE), ("small_words", WORDS)):
            (folder / "tasks" / f"{name}.yaml").write_text(text.replace("DATA", json.dumps(str(data))))
        (folder / "tasks" / "quiz.py").write_text(QUIZ)
        # torch alone first, so that a build for CPUs is taken where there is one
        packages = [f"torch=={version['torch']}", f"lm_eval[api,hf] transformers=={version['transformers']}"]
        programs = folder / "benchmarks" / "bin"
        programs.mkdir(parents=True)
        lm_eval = options.lm_eval or environment(folder / "lm-eval", *packages)
        inspect = options.inspect or environment(folder / "inspect", "inspect-ai openai")
        for each, name in ((lm_eval, "lm_eval"), (inspect, "inspect")):
            (programs / name).symlink_to(each.resolve() / "bin" / name)
        trained(folder)
        began = time.monotonic()
        evaluate(folder)
        print(f"{time.monotonic() - began:.1f} s", flush=True)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
