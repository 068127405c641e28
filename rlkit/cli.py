"""The command line: ``rlkit train``, ``eval``, ``serve``, ``report``, ``checkpoints`` and ``doctor``.

Each command is a function whose docstring is its help, and a function that adds its options. What a command needs is
imported when it runs.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit._runtime import VERSION, warn
from rlkit.errors import CheckpointError, ConfigError, RlkitError, UnsupportedError

if TYPE_CHECKING:
    from rlkit.backends import Sampler
    from rlkit.backends.protocol import Tokenizer
    from rlkit.envs import Task
    from rlkit.runs import Record

__all__ = ["main"]

_Parser = functools.partial(argparse.ArgumentParser, formatter_class=argparse.RawDescriptionHelpFormatter)
_DESCRIPTION = "rlkit: reinforcement-learning post-training of language models, in which the user owns the loop."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit status.

    Args:
        arguments: without the program's name; None for those of this process.

    A command that raises one of rlkit's errors prints it in one line on standard error and returns 2, as for a command
    line that cannot be parsed.
    """
    name, options = _parse(list(sys.argv[1:] if arguments is None else arguments))
    format_warning, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        return _COMMANDS[name][0](options)
    except RlkitError as error:
        print(f"rlkit {name}: {' '.join(str(error).split())}", file=sys.stderr)  # some have several lines
        return 2
    except KeyboardInterrupt as error:
        if str(error):
            print(f"rlkit {name}: {error}", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = format_warning


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning without the place in rlkit that raised it."""
    return f"rlkit: {message}\n"


def _parse(words: list[str]) -> tuple[str, argparse.Namespace]:
    """Return the name of the command and its options, or exit."""
    helps = {name: inspect.cleandoc(run.__doc__ or "") for name, (run, _) in _COMMANDS.items()}
    listed = "\n".join(f"    {name:13}{text.partition('.')[0]}" for name, text in helps.items())
    parser = _Parser(prog="rlkit", description=f"{_DESCRIPTION}\n\ncommands:\n{listed}")
    parser.add_argument("--version", action="version", version=f"rlkit {VERSION}")
    parser.add_argument("command", choices=_COMMANDS, metavar="command", help="one of these; `rlkit command --help`")
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    name = parser.parse_args(words[:1]).command
    parser = _Parser(prog=f"rlkit {name}", description=helps[name])
    _COMMANDS[name][1](parser)
    return name, parser.parse_intermixed_args(words[1:])


# Options of several commands.


def _add_import(parser: argparse.ArgumentParser) -> None:
    text = "a module in this folder or installed that registers your environments, rewards, algorithms or losses"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=text)


def _import_modules(names: Sequence[str]) -> None:
    """Import modules, also from the folder that the program was started in."""
    if names and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # the module exists, and imports one that does not
                raise
            raise ConfigError(f"--import {name}: no such module in this folder or installed") from error


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, help="the checkpoint of a run (default: the newest complete one)")
    parser.add_argument("--role", default="policy", help="the policy of the run (default: policy)")


def _add_assignments(parser: argparse.ArgumentParser, option: str, text: str) -> None:
    parser.add_argument(option, metavar="KEY=VALUE", action="append", default=[], help=text)


def _parse_assignments(option: str, texts: Sequence[str], taken: Collection[str] = ()) -> dict[str, object]:
    """Return values by name; JSON is parsed, everything else is text. Names in ``taken`` have their own option.

    >>> _parse_assignments("--set", ["size=3", "name=a b", "deep=true"])
    {'size': 3, 'name': 'a b', 'deep': True}
    """
    values: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(option, f"is {text!r}", "KEY=VALUE")
        if name in taken:
            raise ConfigError(f"{option} {text}: use the option --{name}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def _is_url(policy: str | None) -> bool:
    return policy is not None and policy.startswith(("http://", "https://"))


def _open_policy(policy: str | None, options: argparse.Namespace, **more: Any) -> Sampler:
    """Open a policy, frozen; None is the backend's own model."""
    from rlkit.backends import sampler
    from rlkit.runs import sampler as saved_sampler

    if policy is not None and _is_url(policy):
        return sampler(policy, **more)
    folder = Path(policy or "")
    if policy and ("://" in policy or (folder / "state.json").is_file() or (folder / "checkpoints").is_dir()):
        return saved_sampler(policy, role=options.role, step=options.step, **more)
    model = None if options.backend == "toy" else policy  # the toy is one model, which has no name
    return sampler(options.backend, model=model, **more)


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the YAML file of settings")
    text = "override the file: algorithm.optimizer.lr=1e-4"
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)
    _add_import(parser)
    parser.add_argument("--check", action="store_true", help="only check the settings and the names in them")
    parser.add_argument("--keys", action=_Keys, nargs=0, help="print every key with its type and default")


class _Keys(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the settings, and end the program as ``--help`` does."""
        from rlkit import config, recipes

        print(config.describe(recipes.Settings))
        parser.exit()


def _train(options: argparse.Namespace) -> int:
    """Train a policy from a configuration file: one stage or several, or explore, or evaluate.

    The keys are those of Trinity-RFT's configurations; docs/recipes.md explains each. A second call resumes the run.
    """
    if not Path(options.config).exists():
        hint = "; write the overrides after the file" if "=" in options.config else ""
        raise ConfigError(f"{options.config}: no such file{hint}")
    from rlkit import recipes
    from rlkit.recipes.job import NOTE, check_rows

    _import_modules(options.modules)
    settings = recipes.load(options.config, options.overrides)
    logging.basicConfig(format="%(message)s")
    level = NOTE if options.check else logging.CRITICAL
    level = min(level, logging.getLevelNamesMapping()[settings.log.level])
    logging.getLogger("rlkit.recipes").setLevel(level)
    if options.check:
        for job in recipes.check(settings):
            check_rows(job)
        print("the settings are right")
        return 0
    for outcome in recipes.run(settings, trackers=["console"]):
        print(outcome.folder)
    return 0


_FILE_KEYS = ("prompt_key", "response_key", "messages_key", "system_prompt_key")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    text = "a run's folder, a path that save() returned, a model, or the URL of a vLLM server"
    parser.add_argument("policy", metavar="POLICY", help=text)
    text = "names of reasoning-gym tasks, .jsonl files, or your environments"
    parser.add_argument("tasks", metavar="TASKS", nargs="+", help=text)
    _add_import(parser)
    parser.add_argument("--backend", default="local", help="the backend of a model (default: local)")
    _add_checkpoint(parser)
    text = "the tokenizer of a served model: a folder or a hub id (default: that of the model which the server names)"
    parser.add_argument("--tokenizer", help=text)
    parser.add_argument("--size", type=int, default=100, help="maximal number of tasks of each kind (default: 100)")
    parser.add_argument("--split", default="test", help="split of generated tasks (default: test)")
    _add_assignments(parser, "--set", "a setting of generated tasks, or a file's prompt_key or response_key")
    parser.add_argument("--reward", help="for a file's rows: a name in rlkit.recipes.rewards (default: answer_reward)")
    parser.add_argument("-n", type=int, default=1, help="episodes per task (default: 1)")
    parser.add_argument("-k", type=int, nargs="+", default=[], help="values of k for pass@k, each at most n")
    parser.add_argument("--greedy", action="store_true", help="sample at temperature 0")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=512, help="maximal tokens per turn (default: 512)")
    parser.add_argument("--success", type=float, default=1.0, help="least reward of a success (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and sampling (default: 0)")
    parser.add_argument("--out", metavar="FOLDER", help="write metrics and trajectories there, for `rlkit report`")


def _eval(options: argparse.Namespace) -> int:
    """Score a policy on held-out tasks: mean, confidence interval, pass@k.

    rlkit eval RUN chain_sum                                  the newest checkpoint of a run, on a reasoning-gym task
    rlkit eval smollm2-135m-instruct chain_sum leg_counting   an untrained model, on two of them
    rlkit eval policies/step-00000200-... questions.jsonl     a saved path, on rows with "prompt" and "answer"
    rlkit eval RUN rows.jsonl --set prompt_key=question --set response_key=reward_model.ground_truth
    rlkit eval RUN digits --import my_tasks                   your own environment, as `rlkit train` knows it
    """
    from rlkit.evaluation import evaluate_sync
    from rlkit.types import SamplingParams

    _import_modules(options.modules)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
    tasks = _make_tasks(options)
    print(f"{len(tasks)} tasks, {options.n} episodes each", file=sys.stderr, flush=True)
    tokenizer = {} if options.tokenizer is None else {"tokenizer": options.tokenizer}
    with _open_policy(options.policy, options, **tokenizer) as sampler:
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


def _make_tasks(options: argparse.Namespace) -> list[Task]:
    """Return all tasks of the names and files that ``rlkit eval`` was given."""
    from rlkit import _check, recipes
    from rlkit.config import structure
    from rlkit.recipes.settings import ExplorerInput, Format, Taskset
    from rlkit.recipes.tasks import make_tasks

    size = _check.integer("--size", options.size, low=1)
    files = [path for path in options.tasks if Path(path).suffix]
    if options.reward is not None and not files:
        why = "generated tasks score themselves"
        raise ConfigError("--reward", f"is {options.reward!r}", "a file of rows to score", why)
    args = _parse_assignments("--set", options.set)
    keys = {name: args.pop(name) for name in _FILE_KEYS if name in args} if files else {}
    if args and len(files) == len(options.tasks):
        expected = f"for files, {' or '.join(_FILE_KEYS)}, which name their fields"
        raise ConfigError("--set", f"is {options.set[0]!r}", expected)
    tasks: list[Task] = []
    for path in options.tasks:
        if path in recipes.environments:
            source, split, workflow, given = None, options.split, path, args
        elif path in files:
            source, split, workflow, given = path, "train", "simple_workflow", {}
        else:
            given = {"size": size, "seed": options.seed, **args}
            source, split, workflow = path, options.split, "reasoning_gym"
        taskset = Taskset(
            name=Path(path).stem,
            path=source,
            split=split,
            format=structure(Format, {"response_key": "answer", **keys}, "--set"),
            default_reward_fn_type=options.reward,
            default_workflow_type=workflow,
            workflow_args=given,
        )
        tasks += make_tasks(taskset, ExplorerInput(), "TASKS")[:size]
    return tasks


_KEY = "RLKIT_SERVER_KEY"
_SHORTEST_KEY = 12  # characters
_SAVES = "rlkit-saves"


def _add_serve(parser: argparse.ArgumentParser) -> None:
    text = "a directory, a hub id, smollm2-135m-instruct; with --openai also a run's folder, a path from save(), a URL"
    parser.add_argument("--model", help=text)
    parser.add_argument("--backend", default="local", help="local, toy, or another installed one (default: local)")
    parser.add_argument("--openai", action="store_true", help="serve the OpenAI and Anthropic APIs instead of Tinker's")
    parser.add_argument("--name", help="the model's name for clients (default: the last part of --model)")
    text = f"address; other than loopback needs a key in ${_KEY}, and TLS in front"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for any free one (default: 8000)")
    parser.add_argument("--folder", help=f"folder for saved states (default: {_SAVES})")
    text = "the name by which clients load the tokenizer (default: the place it was loaded from)"
    parser.add_argument("--tokenizer", help=text)
    text = "an option of rlkit.connect, such as dtype=bfloat16, or of rlkit.server.Service, such as idle=7200"
    _add_assignments(parser, "--option", text)
    parser.add_argument("--seed", type=int, help="seed of session ids and of samples without a seed")
    _add_checkpoint(parser)


def _serve(options: argparse.Namespace) -> int:
    """Serve a model of this machine to programs, until it is interrupted.

    rlkit serve --model M             the Tinker API: programs of its SDK train LoRAs here (TINKER_BASE_URL)
    rlkit serve --openai --model M    the endpoints of OpenAI and Anthropic, to sample a model, a run or a saved policy
    """
    elsewhere = {"folder": None, "tokenizer": None} if options.openai else {"step": None, "role": "policy"}
    for name, default in elsewhere.items():
        if getattr(options, name) != default:
            raise ConfigError(f"--{name}", "is given", f"it {'without' if options.openai else 'with'} --openai")
    return (_serve_openai if options.openai else _serve_tinker)(options, os.environ.get(_KEY) or None)


def _serve_tinker(options: argparse.Namespace, key: str | None) -> int:
    from rlkit.server import serve

    with serve(
        options.backend,
        model=options.model,
        host=options.host,
        port=options.port,
        key=key,
        names=None if options.name is None else [options.name],
        folder=options.folder or _SAVES,
        tokenizer_id=options.tokenizer,
        **_parse_assignments("--option", options.option, taken=("seed",)),
        seed=options.seed,
    ) as server:
        shown = "tml-local" if key is None else f"<what is in ${_KEY}>"
        print(f"serving {server.names[0]} at {server.url}", flush=True)
        print(f"clients: TINKER_BASE_URL={server.url} TINKER_API_KEY={shown}", flush=True)
        _wait_for_signal()
    return 0


def _serve_openai(options: argparse.Namespace, key: str | None) -> int:
    from rlkit._hosts import is_loopback
    from rlkit.gateway import Gateway

    if key is None and not is_loopback(options.host):
        raise ConfigError("--host", f"{options.host} can be reached from other machines", f"a key in ${_KEY}")
    if key is not None and len(key) < _SHORTEST_KEY:
        raise ConfigError(f"${_KEY}", "is too short", f"at least {_SHORTEST_KEY} characters")
    name = options.name or ("policy" if _is_url(options.model) else Path(options.model or options.backend).name)
    more = _parse_assignments("--option", options.option, taken=("seed",))
    if options.seed is not None:
        more["seed"] = options.seed
    with (
        _open_policy(options.model, options, **more) as sampler,
        Gateway(sampler, model=name, host=options.host, port=options.port, open=True, key=key) as gateway,
    ):
        shown = "none" if key is None else f"<what is in ${_KEY}>"
        print(f"serving {name} at {gateway.url}/v1", flush=True)
        print(f"clients: OPENAI_BASE_URL={gateway.url}/v1 OPENAI_API_KEY={shown}", flush=True)
        print(f"         ANTHROPIC_BASE_URL={gateway.url} ANTHROPIC_API_KEY={shown}", flush=True)
        _wait_for_signal()
    return 0


def _wait_for_signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", metavar="RUN", nargs="+", help="the run's folder; several runs share one page")
    parser.add_argument("--out", metavar="FILE", help="the file to write (default: report.html in the first folder)")
    text = "a model whose tokenizer shows tokens as text (default: that of the first run's newest checkpoint)"
    parser.add_argument("--tokenizer", metavar="MODEL", help=text)


def _report(options: argparse.Namespace) -> int:
    """Write a run as one HTML page: curves, settings, and what the model did."""
    from rlkit import report

    folders = options.folders
    tokenizer = _find_tokenizer(options.tokenizer, folders)
    print(report.write(folders if len(folders) > 1 else folders[0], options.out, tokenizer=tokenizer))
    return 0


def _find_tokenizer(model: str | None, folders: Sequence[str]) -> Tokenizer | None:
    """Return the tokenizer of a model, else of the policy that the runs have in common; None where it is unknown."""
    from rlkit.backends.early import SMOLLM2
    from rlkit.backends.tokenizers import ByteTokenizer, tokenizer_from

    try:
        models = {_find_model(folder) for folder in folders} if model is None else {model}
        if len(models) > 1:
            raise ConfigError("report", f"the runs have the models {sorted(map(str, models))}", "one model")
        (found,) = models
        if found == SMOLLM2:
            from rlkit.backends.local.model.hub import model_path

            found = model_path(found)
        return None if found is None else ByteTokenizer() if found == "toy" else tokenizer_from(found)
    except RlkitError as error:
        if model is not None:
            raise
        warn(f"the page shows no texts of tokens; name the model with --tokenizer: {error}")  # it is useful without
        return None


def _find_model(folder: str) -> str | None:
    """Return the model of the policy in a run's newest checkpoint; None if that names none."""
    from rlkit.backends import saves
    from rlkit.runs import records

    saved = [record.policy("policy") for record in records(folder, verify=False)]
    if not saved or saved[-1] is None or "://" in saved[-1]:
        return None
    _, state = saves.read(saved[-1], backend=None)
    return "toy" if state["backend"] == "toy" else state.get("model")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    _add_checkpoint(parser)
    parser.add_argument("--export", metavar="FOLDER", help="a new folder")
    parser.add_argument("--merged", action="store_true", help="merge the adapter into its base")


def _checkpoints(options: argparse.Namespace) -> int:
    """List, verify and export the checkpoints of a run.

    rlkit checkpoints RUN                            lists them, and says whether each is whole
    rlkit checkpoints RUN --export FOLDER            the newest policy as a peft adapter
    rlkit checkpoints RUN --export FOLDER --merged   the same merged into its base, as a standalone model

    The exit status is 1 if a checkpoint is damaged.
    """
    from rlkit.runs import records

    folder = Path(options.folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = records(folder)
    damaged = [warning.message for warning in caught if warning.category is RuntimeWarning]
    print(*(f"{message}\n" for message in damaged), sep="", end="")
    for record in whole:
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
        print(f"step {record.step:<8} whole  {numbers}".rstrip())
    if not whole and not damaged:
        if not (folder / "run.json").is_file():  # `rlkit train` keeps runs below checkpoints/, too
            raise CheckpointError(f"{folder} is not a run: it has no run.json and no checkpoint")
        print(f"{folder} has no checkpoint yet: call run.checkpoint(policy) at the end of a step")
    if options.export is not None:
        print(*_export(whole, options), sep="\n")
    return 1 if damaged else 0


def _export(whole: list[Record], options: argparse.Namespace) -> list[str]:
    """Return the written folder, and a line for each obstacle to its use by other libraries."""
    chosen = [record for record in whole if options.step in (None, record.step)]
    path = chosen[-1].policy(options.role) if chosen else None
    if path is None:
        which = "is complete" if options.step is None else f"of step {options.step} is complete"
        raise CheckpointError(f"no checkpoint {which} and has a {options.role!r}")
    if "://" in path:
        raise UnsupportedError(f"{path} is on a service; export it with `tinker checkpoint download`")
    from rlkit.backends.local.export import save_adapter, save_merged

    if options.merged:
        return [save_merged(path, options.export)]
    return [options.export, *save_adapter(path, options.export)]


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offline", action="store_true", help="do not contact a service")
    parser.add_argument("--deadline", type=float, default=20.0, help="time limit of the service's answer (default: 20)")
    parser.add_argument("--device", help="check the local backend on a device: cpu, cuda, cuda:1, mps")


def _doctor(options: argparse.Namespace) -> int:
    """Print what is installed, which device is available, and whether a Tinker key works.

    With --device the local backend's tests run there, in about half a minute: the conformance suite of rlkit.testing,
    and logprobs and gradients against transformers and peft. The exit status is 1 if a key does not work or a test
    fails.
    """
    from rlkit import _doctor

    if options.device is not None:
        return _doctor.check_device(options.device)
    _doctor.print_versions()
    return _doctor.check_tinker(options.deadline, offline=options.offline)


_COMMANDS = {
    "checkpoints": (_checkpoints, _add_checkpoints),
    "doctor": (_doctor, _add_doctor),
    "eval": (_eval, _add_eval),
    "report": (_report, _add_report),
    "serve": (_serve, _add_serve),
    "train": (_train, _add_train),
}


if __name__ == "__main__":
    sys.exit(main())
