"""Every algorithm on every backend: what each run's objective was at first and at last, as a table and as JSON.

    python benchmarks/algorithms_table.py [--backends toy local fake] [--algorithms grpo ...] [--out FILE]

Each cell is a run of ``rlkit.recipes`` from settings: 12 steps of 4 tasks (ReMax on the two-layer model: 40 steps),
``repeat_times`` episodes each, on a small problem. Reinforcement has the reward as its objective (writing digits;
letters a to m on the two-layer model, which writes few digits), supervised learning and preferences their loss,
distillation the divergence from its teacher. ``real`` is a server of the Tinker API: its address is in TINKER_BASE_URL
and its model's folder in RLKIT_REAL_MODEL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import rlkit
from rlkit import recipes
from rlkit.envs import StepResult, Tasks
from rlkit.tracking import read_metrics

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "algorithms-table.json"
PROMPTS = ("Call ", "Dial ", "Count ", "Pick ")
RATES = {"toy": 0.05, "fake": 0.05, "local": 0.02, "real": 0.02}
LETTERS = {"toy": "0123456789", "fake": "0123456789", "local": "abcdefghijklm", "real": "abcdefghijklm"}
OBJECTIVES = {
    "sft": "train/loss",
    "cpt": "train/loss",
    "dpo": "train/loss",
    "on_policy_distill": "train/kl_teacher",
    "jsd": "train/kl_teacher",
}
ALIASES = ("grpo_verl", "mix_chord")
TURNS = {"gigpo": 2, "multi_step_grpo": 2}


class Write:
    """Asks for letters of a set, for some turns; the reward is their share of what was written."""

    def __init__(self, prompt: str, letters: str, turns: int) -> None:
        self.prompt, self.letters, self.left = prompt, letters, turns

    def reset(self, seed: int) -> str:  # noqa: ARG002
        return self.prompt

    def step(self, action: str) -> StepResult:
        self.left -= 1
        reward = sum(c in self.letters for c in action) / max(len(action), 1)
        return StepResult("More: ", reward, terminated=self.left == 0)

    def close(self) -> None:
        pass


def write(taskset: recipes.Taskset) -> Tasks:
    """Tasks to write letters of ``workflow_args.letters`` in ``workflow_args.turns`` turns."""
    letters, turns = taskset.workflow_args["letters"], taskset.workflow_args.get("turns", 1)
    return Tasks(lambda i: Write(PROMPTS[i], letters, turns), len(PROMPTS), name=taskset.name, split=taskset.split)


if "write" not in recipes.environments:
    recipes.environments.register("write")(write)


def files(folder: Path, letters: str) -> tuple[Path, Path]:
    """Demonstrations and preferences: letters of the set are right, others are not."""
    rng = np.random.default_rng(0)
    others = "".join(c for c in "abcdefghijklmnopqrstuvwxyz0123456789" if c not in letters)
    pick = lambda of: "".join(of[i] for i in rng.integers(len(of), size=6))  # noqa: E731
    rows = [{"prompt": p, "response": pick(letters)} for p in PROMPTS * 4]
    pairs = [{"prompt": p, "chosen": pick(letters), "rejected": pick(others)} for p in PROMPTS * 4]
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "demonstrations.jsonl", folder / "preferences.jsonl"
    for path, given in zip(paths, (rows, pairs), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in given), "utf-8")
    return paths


def teacher(name: str, options: dict[str, Any], folder: Path, letters: str) -> str:
    """The saved path of a policy that writes letters of the set, made by supervised fine-tuning."""
    with rlkit.connect(name, **options, seed=1, folder=folder / "teacher") as policy:
        tokenizer, rng = policy.tokenizer, np.random.default_rng(1)
        chat = rlkit.chat.Chat(tokenizer)
        texts = [(p, "".join(letters[i] for i in rng.integers(len(letters), size=6))) for p in PROMPTS * 8]
        data = [rlkit.Datum.supervised(chat.start(p).prompt, tokenizer.encode(text), 1 / 192) for p, text in texts]
        for _ in range(20):
            policy.forward_backward(data, "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.02)).result()
        return policy.save("teacher", sampler=True).result()


@contextlib.contextmanager
def backend(name: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """rlkit's name of a backend, and what it is connected with."""
    if name == "toy":
        yield "toy", {}
    elif name == "local":
        sys.path.insert(0, str(ROOT))
        from tests.models.build import build

        model = folder / "model"
        yield "local", {"model": str(model if model.exists() else build("llama", model))}
    elif name == "fake":
        from rlkit.testing import FakeTinker

        with FakeTinker(seed=0) as fake, mock.patch.dict(os.environ, TINKER_API_KEY=fake.api_key):
            yield "tinker", {"model": "toy", "base_url": fake.base_url}
    else:
        yield "tinker", {"model": os.environ["RLKIT_REAL_MODEL"], "tokenizer": os.environ["RLKIT_REAL_MODEL"]}


def settings(algorithm: str, name: str, folder: Path, where: tuple[str, dict[str, Any]], steps: int) -> list[str]:
    """The overrides of a cell."""
    kind, options = where
    demonstrations, preferences = files(folder, LETTERS[name])
    found = {
        "backend": kind,
        "seed": 0,
        "checkpoint_root_dir": folder,
        "name": f"{algorithm}-{name}",
        "algorithm.algorithm_type": algorithm,
        "algorithm.optimizer.lr": RATES[name],
        "algorithm.optimizer.weight_decay": 0.0,
        "buffer.batch_size": 4,
        "buffer.total_steps": steps,
        "model.max_response_tokens": 6,
        "monitor.trajectories": "false",
    }
    found |= {f"options.{key}": value for key, value in options.items() if key != "model"}
    if "model" in options:
        found["model.tinker.base_model" if kind == "tinker" else "model.model_path"] = options["model"]
    if kind == "tinker":
        found["model.tinker.enable"] = "true"
    recipe = recipes.algorithms.registry[algorithm]
    if recipe.rolls_out:
        task = "buffer.explorer_input.taskset"
        found |= {f"{task}.default_workflow_type": "write", f"{task}.name": "write"}
        found |= {f"{task}.workflow_args.letters": f"'{LETTERS[name]}'"}
        found |= {f"{task}.workflow_args.turns": TURNS.get(algorithm, 1)}
    if recipe.data in ("demonstrations", "texts", "pairs"):
        found["buffer.trainer_input.experience_buffer.path"] = preferences if recipe.data == "pairs" else demonstrations
    if recipe.data == "mixed":
        found["buffer.trainer_input.auxiliary_buffers.shown.path"] = demonstrations
    if "critic" in recipe.needs and name != "local":
        found["model.critic_model_path"] = "toy"
    if "teacher" in recipe.needs:
        found["explorer.auxiliary_models"] = f"[{{path: '{teacher(kind, options, folder, LETTERS[name])}'}}]"
    return [f"{key}={value}" for key, value in found.items()]


def cell(algorithm: str, name: str, folder: Path, *, steps: int = 12) -> dict[str, Any]:
    """A run: its objective over the first and the last three steps, and whether it became better."""
    started = time.process_time()
    try:
        with backend(name, folder) as where:
            (outcome,) = recipes.run(recipes.load(overrides=settings(algorithm, name, folder, where, steps)))
    except rlkit.UnsupportedError as error:
        return {"algorithm": algorithm, "backend": name, "reason": str(error)}
    objective = OBJECTIVES.get(algorithm, "env/write/reward")
    curve = [row["metrics"][objective] for row in read_metrics(outcome.folder) if objective in row["metrics"]]
    first, last = float(np.mean(curve[:2])), float(np.mean(curve[-3:]))
    return {
        "algorithm": algorithm,
        "backend": name,
        "objective": objective,
        "first": first,
        "last": last,
        "better": last > first if objective.endswith("reward") else last < first,
        "seconds": round(time.process_time() - started, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row per algorithm, a column per backend."""
    names = list(dict.fromkeys(row["backend"] for row in rows))
    lines = ["| algorithm | objective | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 2)]
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        mine = {row["backend"]: row for row in rows if row["algorithm"] == algorithm}
        objective = next((row["objective"] for row in mine.values() if "objective" in row), "").rpartition("/")[2]
        cells = [shown(mine.get(name)) for name in names]
        lines.append(f"| {algorithm} | {objective} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "reason" in row:
        return row["reason"]
    return f"{row['first']:.2f} → {row['last']:.2f}" + ("" if row["better"] else " (not better)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", default=["toy", "local", "fake"], choices=list(RATES))
    parser.add_argument("--algorithms", nargs="+", default=[n for n in recipes.algorithms.registry if n not in ALIASES])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    before = json.loads(given.out.read_text("utf-8")) if given.out.exists() else []
    for name in given.backends:
        for algorithm in given.algorithms:
            with tempfile.TemporaryDirectory() as folder:
                row = cell(algorithm, name, Path(folder), steps=given.steps)
            print(f"{algorithm:18} {name:6} {shown(row)}  {row.get('seconds', '')}", flush=True)
            before = [r for r in before if (r["algorithm"], r["backend"]) != (algorithm, name)] + [row]
            given.out.write_text(json.dumps(before, indent=1) + "\n", "utf-8")
    print(table(before))


if __name__ == "__main__":
    main()
