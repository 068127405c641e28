"""``rlkit eval --harness``: run a third-party evaluation harness on a served policy."""

from __future__ import annotations

import argparse

from rlkit._commands import _shared

__all__ = ["add_options", "refuse", "run"]

_OF_EVAL = (
    "size",
    "split",
    "set",
    "reward",
    "n",
    "k",
    "greedy",
    "temperature",
    "max_tokens",
    "success",
    "seed",
    "modules",
)
_OURS = ("named", "harness_arg", "python", "deadline")
_FOLDER = "rlkit-evals"  # the folder for policies that are not a run's


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit eval --harness``."""
    group = parser.add_argument_group("external benchmarks")
    group.add_argument("--harness", metavar="NAME", help="the harness to run, unmodified: lm-eval or inspect")
    group.add_argument("--tasks", dest="named", metavar="A,B", help="the harness's names of the tasks")
    text = "an option of the harness's command line, such as limit=50; true passes the option without a value"
    group.add_argument("--harness-arg", metavar="KEY=VALUE", action="append", default=[], help=text)
    text = "the interpreter of the environment that has the harness (default: this one)"
    group.add_argument("--python", metavar="PATH", help=text)
    group.add_argument("--deadline", type=float, metavar="SECONDS", help="limit for the evaluation (default: a day)")
    parser.set_defaults(defaults={name: parser.get_default(name) for name in (*_OF_EVAL, *_OURS)})


def refuse(options: argparse.Namespace, names: tuple[str, ...] = _OURS, why: str = "requires --harness NAME") -> None:
    """Raise ConfigError for options that have no meaning here."""
    from rlkit.errors import ConfigError

    shown = {"named": "tasks", "modules": "import", "n": "n", "k": "k"}
    for name in names:
        if getattr(options, name) != options.defaults[name]:
            dashes = "-" if len(name) == 1 else "--"
            raise ConfigError(f"{dashes}{shown.get(name, name).replace('_', '-')} {why}")


def run(options: argparse.Namespace) -> int:
    """Run the harness, put its scores into the run, and print a line for each."""
    from rlkit.errors import ConfigError

    refuse(options, _OF_EVAL, f"does not apply to --harness {options.harness}; use --harness-arg KEY=VALUE")
    if options.tasks:
        raise ConfigError("TASKS", f"are {' '.join(options.tasks)}", "--tasks A,B", "with --harness")
    tasks = [name for name in (options.named or "").split(",") if name]
    if not tasks:
        raise ConfigError("--tasks", "is missing", "A,B", "the tasks to evaluate")
    arguments = [_split(text) for text in options.harness_arg]
    _shared.check("POLICY", options.policy, options.backend, options.tokenizer)
    from rlkit import harnesses  # what follows takes seconds
    from rlkit.runs.checkpoints import find_checkpoint
    from rlkit.tracking import Jsonl

    harnesses.installed(options.harness, options.python)  # before a model is loaded
    step, policy, folder = 0, options.policy, options.out or _FOLDER
    if _shared.is_run(policy):
        record = find_checkpoint(policy, role=options.role, step=options.step)
        step, policy, folder = record.step, record.policy(options.role), options.out or policy
    with _shared.asked_for(options, policy) as sampler:
        result = harnesses.evaluate(
            options.harness,
            sampler,
            tasks,
            folder=folder,
            arguments=arguments,
            python=options.python,
            step=step,
            **({} if options.deadline is None else {"deadline": options.deadline}),
        )
    Jsonl(folder).log(result.metrics, step)
    for score in result.scores:
        error = "" if score.stderr is None else f" (stderr {score.stderr:.2g})"
        count = "" if score.samples is None else f"  {score.samples} samples"
        print(f"{score.task}: {score.metric} {score.value:.4g}{error}{count}")
    print(f"the scores are in {result.folder}")
    return 0


def _split(text: str) -> tuple[str, str]:
    from rlkit.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals or not name.strip("-"):
        raise ConfigError("--harness-arg", f"is {text!r}", "KEY=VALUE")
    return name.lstrip("-"), value
