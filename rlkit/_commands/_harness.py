"""``rlkit eval --harness``: a harness that others wrote, on a policy that is served to it."""

from __future__ import annotations

import argparse

from rlkit._commands import _policy

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
_FOLDER = "rlkit-evals"  # of what is no run's


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit eval --harness``."""
    group = parser.add_argument_group("benchmarks of others")
    group.add_argument("--harness", metavar="NAME", help="lm-eval or inspect, which runs as it is")
    group.add_argument("--tasks", dest="named", metavar="A,B", help="as the harness names them")
    text = "an option of the harness's own command line, such as limit=50; true gives the option alone"
    group.add_argument("--harness-arg", metavar="KEY=VALUE", action="append", default=[], help=text)
    text = "the interpreter of the environment that has the harness (default: this one)"
    group.add_argument("--python", metavar="PATH", help=text)
    group.add_argument("--deadline", type=float, metavar="SECONDS", help="for all of it (default: a day)")
    parser.set_defaults(defaults={name: parser.get_default(name) for name in (*_OF_EVAL, *_OURS)})


def refuse(options: argparse.Namespace, names: tuple[str, ...] = _OURS, why: str = "is of --harness NAME") -> None:
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

    refuse(options, _OF_EVAL, f"is not of --harness {options.harness}; give what it takes by --harness-arg KEY=VALUE")
    if options.tasks:
        raise ConfigError("TASKS", f"are {' '.join(options.tasks)}", "--tasks A,B", "the harness names its own")
    tasks = [name for name in (options.named or "").split(",") if name]
    if not tasks:
        raise ConfigError("--tasks", "is missing", "A,B", "what the harness is to play")
    arguments = [_split(text) for text in options.harness_arg]
    _policy.check("POLICY", options.policy, options.backend, options.tokenizer)
    from rlkit import harnesses  # what follows takes seconds
    from rlkit.runs.record import newest
    from rlkit.tracking import Jsonl

    harnesses.installed(options.harness, options.python)  # before a model is loaded
    step, policy, folder = 0, options.policy, options.out or _FOLDER
    if _policy.is_run(policy):
        record = newest(policy, role=options.role, step=options.step)
        step, policy, folder = record.step, record.policy(options.role), options.out or policy
    with _policy.asked_for(options, policy) as sampler:
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
