"""lm-eval and inspect, as they are installed from PyPI, against a policy of rlkit's.

    python tests/install/harnesses.py                                    # makes their environments; make test-harnesses
    python tests/install/harnesses.py --lm-eval PYTHON --inspect PYTHON  # uses environments that have them

The Python that runs this has rlkit with the extras local, gguf and gateway. A LoRA on SmolLM2 takes a few steps in a
run. Then lm-eval scores its checkpoint through the gateway, in each way that it can ask, and the merged model through
its own transformers backend; the scores have to be the same and every logprob equal to 1e-3. Nothing is downloaded but
the packages.
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
def quiz(hint=""):
    asked = {"What is frozen water called?": "ice", "Which animal barks?": "dog", "What is 2 + 2?": "4"}
    end = f"{hint} Answer with one word."
    samples = [Sample(input=f"{question} {end}", target=word) for question, word in asked.items()]
    return Task(dataset=samples, solver=generate(max_tokens=12, temperature=0.0), scorer=includes())
"""


def run(*command, **variables):
    """Run a command, and return what it printed; what it says meanwhile is shown where it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"$ {' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done.stdout


def rlkit_says(*words):
    """Run ``rlkit`` of this Python, and return what it printed."""
    return run(sys.executable, "-m", "rlkit.cli", *words)


def trained(folder):
    """A run of two steps, whose policy differs from its base."""
    import numpy as np

    import rlkit

    with rlkit.Run(folder / "run", seed=0) as run:
        policy = run.connect("local", model="smollm2-135m-instruct", lora=rlkit.Lora(rank=8))
        tokens = policy.tokenizer.encode("Question: Which one is a metal?\nAnswer: wool")
        datum = rlkit.Datum(tokens, np.arange(len(tokens)) >= len(tokens) - 2, {})
        for _ in run.steps(2):
            policy.forward_backward([datum], "cross_entropy")
            run.log(policy.optim_step(rlkit.Adam(learning_rate=1e-3)).result())
        run.checkpoint(policy)
    rlkit_says("checkpoints", folder / "run", "--export", folder / "merged", "--merged")
    return folder / "run", folder / "merged"


def answers(folder, task="small_choice"):
    """What lm-eval noted for each question: (logprob, greedy) of each choice, or the text."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [[response[0] for response in row["resps"]] for row in rows]


def scores(folder):
    """Task -> metric -> score, of lm-eval's own file."""
    (path,) = folder.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    return {t: {k: v for k, v in row.items() if "," in k} for t, row in results.items()}


def same(one, other):
    """The scores of two evaluations are equal, and every choice's logprob to ``CLOSE``, greedy or not alike."""
    assert scores(one)["small_choice"] == scores(other)["small_choice"], (scores(one), scores(other))
    worst = 0.0
    for choices, others in zip(answers(one), answers(other), strict=True):
        assert len(choices) == len(others) == 4
        for (logprob, greedy), (other_logprob, other_greedy) in zip(choices, others, strict=True):
            assert greedy == other_greedy
            worst = max(worst, abs(float(logprob) - float(other_logprob)))
    assert worst < CLOSE, worst
    return worst


@contextlib.contextmanager
def served(*words):
    """``rlkit serve --openai``; yields its URL. Ctrl-C ends it in order."""
    command = [sys.executable, "-m", "rlkit.cli", "serve", "--openai", "--port", "0", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def lm_eval(python, folder, *words):
    """Run lm-eval by hand."""
    words = [*words, "--include_path", folder / "tasks", "--log_samples"]
    run(python, "-m", "lm_eval", *words, OPENAI_API_KEY="")


def multiple_choice(python, folder, run_folder, merged):
    """Its own transformers backend and the gateway agree: tokens, texts, batches, and through ``rlkit eval``."""
    own = folder / "own"
    args = f"pretrained={merged},dtype=float32"
    lm_eval(
        python,
        folder,
        "--model",
        "hf",
        "--model_args",
        args,
        "--device",
        "cpu",
        "--tasks",
        "small_choice",
        "--output_path",
        own,
    )
    ways = {
        "tokens from the gateway": "num_concurrent=4",
        "tokens of its own, batched": f"tokenizer_backend=huggingface,tokenizer={merged}",
        "texts": f"tokenizer_backend=huggingface,tokenizer={merged},tokenized_requests=False,num_concurrent=2",
    }
    with served("--model", run_folder, "--name", "mine") as url:
        for i, (way, more) in enumerate(ways.items()):
            args, out = f"base_url={url}/v1/completions,model=mine,{more}", folder / f"way-{i}"
            batch = ["--batch_size", "3"] if "batched" in way else []
            lm_eval(
                python,
                folder,
                "--model",
                "local-completions",
                "--model_args",
                args,
                *batch,
                "--tasks",
                "small_choice",
                "--output_path",
                out,
            )
            print(f"  {way}: {same(own, out):.1e}", flush=True)
    said = rlkit_says(
        "eval",
        run_folder,
        "--harness",
        "lm-eval",
        "--tasks",
        "small_choice",
        "--harness-arg",
        f"include_path={folder / 'tasks'}",
        "--python",
        python,
    )
    out = Path(said.strip().splitlines()[-1].rpartition(" in ")[2])
    print(f"  rlkit eval: {same(own, out):.1e}", flush=True)
    in_run(run_folder, "small_choice", "acc", scores(own)["small_choice"]["acc,none"])
    assert re.search(r"^small_choice: acc \S+ \(stderr \S+\)  8 samples$", said, re.MULTILINE), said


def generation(python, folder, run_folder, merged):
    """Greedy texts through both endpoints are those of its own transformers backend."""
    args, texts = f"pretrained={merged},dtype=float32", {}
    chats = ["--apply_chat_template"]
    lm_eval(
        python,
        folder,
        "--model",
        "hf",
        "--model_args",
        args,
        "--device",
        "cpu",
        "--tasks",
        "small_words",
        *chats,
        "--output_path",
        folder / "own-words",
    )
    for model in ("local-completions", "local-chat-completions"):
        words = [
            "--harness-arg",
            f"model={model}",
            "--harness-arg",
            f"include_path={folder / 'tasks'}",
            "--harness-arg",
            "apply_chat_template=true",
        ]
        said = rlkit_says(
            "eval", run_folder, "--harness", "lm-eval", "--tasks", "small_words", *words, "--python", python
        )
        texts[model] = Path(said.strip().splitlines()[-1].rpartition(" in ")[2])
        assert answers(texts[model], "small_words") == answers(folder / "own-words", "small_words"), model
        assert scores(texts[model]) == scores(folder / "own-words")
        assert scores(texts[model])["small_words"]["exact_match,last_word"] > 0, texts[model]  # else it says little
        print(f"  {model}: {said.splitlines()[0]}", flush=True)


def quiz(python, folder, run_folder, merged):
    """A task of inspect with a scorer; what is not a score is said in one line."""
    task = f"{folder / 'tasks' / 'quiz.py'}@quiz"
    said = rlkit_says(
        "eval",
        run_folder,
        "--harness",
        "inspect",
        "--tasks",
        task,
        "--harness-arg",
        "T=hint=Think.",
        "--python",
        python,
    )
    assert re.search(r"^quiz/includes: accuracy \S+ \(stderr \S+\)  3 samples$", said, re.MULTILINE), said
    in_run(run_folder, "quiz/includes", "accuracy", float(said.split()[2]), places=4)
    print(f"  {said.splitlines()[0]}", flush=True)


def in_run(run_folder, task, metric, value, places=12):
    """The score is among the run's metrics, at the checkpoint's step."""
    from rlkit.harnesses import results
    from rlkit.tracking import read_metrics

    rows = [row for row in read_metrics(run_folder) if f"eval/{task}/{metric}" in row["metrics"]]
    assert rows[-1]["step"] == 2
    for name in (metric, f"{metric}_stderr"):
        assert f"eval/{task}/{name}" in rows[-1]["metrics"]
    assert float(f"{rows[-1]['metrics'][f'eval/{task}/{metric}']:.{places}g}") == float(f"{value:.{places}g}")
    assert results(run_folder)[-1].step == 2


def environment(folder, *packages):
    """An environment with these packages; the path of its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    for line in packages:
        subprocess.run([str(python), "-m", "pip", "install", "-q", *line.split()], check=True)
    return python


def main():
    """Everything, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lm-eval", metavar="PYTHON", help="of an environment with lm_eval[api,hf]")
    parser.add_argument("--inspect", metavar="PYTHON", help="of an environment with inspect-ai and openai")
    parser.add_argument("--keep", type=Path, help="a new folder for all files, which is left there")
    options = parser.parse_args()
    pinned = Path(__file__).resolve().parents[2] / "constraints.txt"
    version = dict(line.split("==") for line in pinned.read_text().splitlines() if "==" in line)
    folder = Path(tempfile.mkdtemp(prefix="rlkit-harnesses-")) if options.keep is None else options.keep.resolve()
    try:
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
        data = folder / "tasks" / "questions.json"
        data.write_text(
            json.dumps([dict(zip(("question", "choices", "answer"), each, strict=True)) for each in QUESTIONS])
        )
        for name, text in (("small_choice", CHOICE), ("small_words", WORDS)):
            (folder / "tasks" / f"{name}.yaml").write_text(text.replace("DATA", json.dumps(str(data))))
        (folder / "tasks" / "quiz.py").write_text(QUIZ)
        # torch alone first, so that a build for CPUs is taken where there is one
        packages = [f"torch=={version['torch']}", f"lm_eval[api,hf] transformers=={version['transformers']}"]
        lm_python = options.lm_eval or environment(folder / "lm-eval", *packages)
        inspect_python = options.inspect or environment(folder / "inspect", "inspect-ai openai")
        places = (folder, *trained(folder))
        for program, python in ((multiple_choice, lm_python), (generation, lm_python), (quiz, inspect_python)):
            began = time.monotonic()
            print(program.__name__, flush=True)
            program(python, *places)
            print(f"{program.__name__:26}{time.monotonic() - began:6.1f} s", flush=True)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
