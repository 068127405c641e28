"""Score a policy on held-out tasks: mean, confidence interval, pass@k.

rlkit eval RUN chain_sum                                  the newest checkpoint of a run, on a reasoning-gym task
rlkit eval smollm2-135m-instruct chain_sum leg_counting   an untrained model, on two of them
rlkit eval policies/step-00000200-... questions.jsonl     a saved path, on rows with "prompt" and "answer"
rlkit eval RUN rows.jsonl --set prompt_key=question --set response_key=reward_model.ground_truth
rlkit eval RUN digits --import my_tasks                   your own environment, as `rlkit train` knows it
rlkit eval RUN --harness lm-eval --tasks arc_easy,piqa    benchmarks of lm-eval; their scores go into the run
rlkit eval RUN --harness inspect --tasks quiz.py@quiz     a task of inspect
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit._commands import _harness, _shared
from rlkit._commands._shared import settings

if TYPE_CHECKING:
    from rlkit.envs import Task

__all__ = ["add_options", "run"]


_KEYS = ("prompt_key", "response_key", "messages_key", "system_prompt_key")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit eval``."""
    parser.add_argument("policy", metavar="POLICY", help=_shared.KINDS)
    parser.add_argument(
        "tasks", metavar="TASKS", nargs="*", help="names of reasoning-gym tasks, .jsonl files, or your environments"
    )
    parser.set_defaults(words="tasks")
    _shared.add_option(parser)
    parser.add_argument("--backend", default="local", help="the backend of a model (default: local)")
    _shared.add_options(parser)
    text = "the tokenizer of a served model: a folder or a hub id (default: that of the model which the server names)"
    parser.add_argument("--tokenizer", help=text)
    parser.add_argument("--size", type=int, default=100, help="maximal number of tasks of each kind (default: 100)")
    parser.add_argument("--split", default="test", help="split of generated tasks (default: test)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of generated tasks, or a file's prompt_key or response_key",
    )
    parser.add_argument("--reward", help="for a file's rows: a name in rlkit.recipes.rewards (default: answer_reward)")
    parser.add_argument("-n", type=int, default=1, help="episodes per task (default: 1)")
    parser.add_argument("-k", type=int, nargs="+", default=[], help="values of k for pass@k, each at most n")
    parser.add_argument("--greedy", action="store_true", help="sample at temperature 0")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximal tokens per turn (default: 512)")
    parser.add_argument("--success", type=float, default=1.0, help="least reward of a success (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and sampling (default: 0)")
    parser.add_argument("--out", metavar="FOLDER", help="write metrics and trajectories there, for `rlkit report`")
    _harness.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Play the tasks, and print a line for each kind of task."""
    if options.harness is not None:
        return _harness.run(options)
    _harness.refuse(options)
    _check_files(options)
    _shared.check("POLICY", options.policy, options.backend, options.tokenizer)
    from rlkit.evaluation import evaluate_sync  # the rest takes seconds
    from rlkit.types import SamplingParams

    _shared.imported(options)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
    tasks = _tasks(options)
    print(f"{len(tasks)} tasks, {options.n} episodes each", file=sys.stderr, flush=True)
    with _shared.asked_for(options, options.policy) as sampler:
        evaluation = evaluate_sync(
            sampler,
            tasks,
            n=options.n,
            k=options.k,
            greedy=options.greedy,
            success=options.success,
            params=params,
            seed=options.seed,
            progress=True if importlib.util.find_spec("rich") is not None else None,
        )
        if options.out is not None:
            from rlkit.tracking import Jsonl

            log = Jsonl(options.out)
            log.log(evaluation.metrics, 0)
            log.log_trajectories(evaluation.rollouts, 0)
            log.close()
    for name, score in evaluation.scores.items():
        tries = "".join(f"  pass@{k} {value:.3f}" for k, value in score.pass_at_k.items())
        print(f"{name}: mean {score.mean:.3f} (95 % interval {score.low:.3f} to {score.high:.3f}){tries}", end="  ")
        print(f"{score.tasks} tasks, {score.episodes} episodes, {score.failed} failed")
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Raise ConfigError for tasks that are not named, or a file of tasks that does not exist."""
    from rlkit.errors import ConfigError

    if not options.tasks:
        expected = "reasoning-gym tasks, .jsonl files or your environments; with --harness, --tasks A,B"
        raise ConfigError("TASKS", "are missing", expected)
    for path in options.tasks:
        if Path(path).suffix in (".jsonl", ".json", ".csv", ".parquet") and not Path(path).exists():
            raise ConfigError("TASKS", f"is {path!r}", "a file that exists")


def _tasks(options: argparse.Namespace) -> list[Task]:
    """Return all tasks of the names and files given."""
    from rlkit import _check, recipes
    from rlkit.config import structure
    from rlkit.errors import ConfigError
    from rlkit.recipes.settings import ExplorerInput, Format, Taskset
    from rlkit.recipes.tasks import make_tasks

    size = _check.integer("--size", options.size, low=1)
    files = [path for path in options.tasks if Path(path).suffix]
    if options.reward is not None and not files:
        why = "generated tasks score themselves"
        raise ConfigError("--reward", f"is {options.reward!r}", "a file of rows to score", why)
    args = settings("--set", options.set)
    form = {name: args.pop(name) for name in _KEYS if name in args} if files else {}
    if args and len(files) == len(options.tasks):
        raise ConfigError(
            "--set", f"is {options.set[0]!r}", f"for files, {' or '.join(_KEYS)}, which name their fields"
        )
    tasks: list[Task] = []
    for path in options.tasks:
        source, split, workflow, given = (
            path,
            options.split,
            "reasoning_gym",
            {"size": size, "seed": options.seed, **args},
        )
        if path in recipes.environments:
            source, workflow, given = None, path, args
        elif path in files:  # which is what it is
            split, workflow, given = "train", "simple_workflow", {}
        taskset = Taskset(
            name=Path(path).stem,
            path=source,
            split=split,
            format=structure(Format, {"response_key": "answer", **form}, "--set"),
            default_reward_fn_type=options.reward,
            default_workflow_type=workflow,
            workflow_args=given,
        )
        tasks += make_tasks(taskset, ExplorerInput(), "TASKS")[:size]
    return tasks
