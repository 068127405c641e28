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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlkit._runtime import VERSION, is_loopback, warn
from rlkit.errors import CheckpointError, ConfigError, RlkitError, UnsupportedError

if TYPE_CHECKING:
    from rlkit.backends import Sampler
    from rlkit.backends.protocol import Tokenizer
    from rlkit.envs import Task
    from rlkit.runs import Record

__all__ = ["main"]

_Add: TypeAlias = Callable[..., argparse.Action]  # a parser's add_argument
_Parser = functools.partial(argparse.ArgumentParser, formatter_class=argparse.RawDescriptionHelpFormatter)
_URLS = ("http://", "https://")
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
    _COMMANDS[name][1](parser.add_argument)
    return name, parser.parse_intermixed_args(words[1:])


# Options of several commands.


def _add_import(add: _Add) -> None:
    text = "a module in this folder or installed that registers your environments, rewards, algorithms or losses"
    add("--import", dest="modules", action="append", default=[], metavar="MODULE", help=text)


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


def _add_checkpoint(add: _Add) -> None:
    add("--step", type=int, help="the checkpoint of a run (default: the newest complete one)")
    add("--role", default="policy", help="the policy of the run (default: policy)")


def _add_assignments(add: _Add, option: str, text: str) -> None:
    add(option, metavar="KEY=VALUE", action="append", default=[], help=text)


def _parse_assignments(option: str, texts: Sequence[str]) -> dict[str, object]:
    """Return values by name; JSON is parsed, everything else is text.

    >>> _parse_assignments("--set", ["size=3", "name=a b", "deep=true"])
    {'size': 3, 'name': 'a b', 'deep': True}
    """
    values: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(option, f"is {text!r}", "KEY=VALUE")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def _open_policy(policy: str | None, options: argparse.Namespace, **more: Any) -> Sampler:
    """Open a policy, frozen; None is the backend's own model."""
    from rlkit.backends import sampler
    from rlkit.runs import sampler as saved_sampler

    if policy:
        folder = Path(policy)
        if policy.startswith(_URLS):
            return sampler(policy, **more)
        if "://" in policy or (folder / "state.json").is_file() or (folder / "checkpoints").is_dir():
            return saved_sampler(policy, role=options.role, step=options.step, **more)
    model = None if options.backend == "toy" else policy  # the toy is one model, which has no name
    return sampler(options.backend, model=model, **more)


def _add_train(add: _Add) -> None:
    add("config", metavar="CONFIG", help="the YAML file of settings")
    add("overrides", metavar="key=value", nargs="*", default=[], help="override the file: algorithm.optimizer.lr=1e-4")
    _add_import(add)
    add("--check", action="store_true", help="only check the settings and the names in them")
    add("--keys", action=_Keys, nargs=0, help="print every key with its type and default")


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


def _add_eval(add: _Add) -> None:
    text = "a run's folder, a path that save() returned, a model, or the URL of a vLLM server"
    add("policy", metavar="POLICY", help=text)
    add("tasks", metavar="TASKS", nargs="+", help="names of reasoning-gym tasks, .jsonl files, or your environments")
    _add_import(add)
    add("--backend", default="local", help="the backend of a model (default: local)")
    _add_checkpoint(add)
    text = "the tokenizer of a served model: a folder or a hub id (default: that of the model which the server names)"
    add("--tokenizer", help=text)
    add("--size", type=int, default=100, help="maximal number of tasks of each kind (default: 100)")
    add("--split", default="test", help="split of generated tasks (default: test)")
    _add_assignments(add, "--set", "a setting of generated tasks, or a file's prompt_key or response_key")
    add("--reward", help="for a file's rows: a name in rlkit.recipes.rewards (default: answer_reward)")
    add("-n", type=int, default=1, help="episodes per task (default: 1)")
    add("-k", type=int, nargs="+", default=[], help="values of k for pass@k, each at most n")
    add("--greedy", action="store_true", help="sample at temperature 0")
    add("--temperature", type=float, default=1.0, help="sampling temperature (default: 1)")
    add("--max-tokens", type=int, default=512, help="maximal tokens per turn (default: 512)")
    add("--success", type=float, default=1.0, help="least reward of a success (default: 1)")
    add("--seed", type=int, default=0, help="seed of tasks and sampling (default: 0)")
    add("--out", metavar="FOLDER", help="write metrics and trajectories there, for `rlkit report`")


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
    given = {name: getattr(options, name) for name in ("n", "k", "greedy", "success", "seed")}
    progress = True if importlib.util.find_spec("rich") is not None else None
    with _open_policy(options.policy, options, **tokenizer) as sampler:
        evaluation = evaluate_sync(sampler, tasks, params=params, progress=progress, **given)
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
    names = structure(Format, {"response_key": "answer", **keys}, "--set")
    tasks: list[Task] = []
    for path in options.tasks:
        source: dict[str, Any] = {"default_workflow_type": path, "split": options.split, "workflow_args": args}
        if path in files:
            source = {"default_workflow_type": "simple_workflow", "path": path}
        elif path not in recipes.environments:
            generated = {"size": size, "seed": options.seed, **args}
            source |= {"default_workflow_type": "reasoning_gym", "path": path, "workflow_args": generated}
        taskset = Taskset(name=Path(path).stem, format=names, default_reward_fn_type=options.reward, **source)
        tasks += make_tasks(taskset, ExplorerInput(), "TASKS")[:size]
    return tasks


_KEY = "RLKIT_SERVER_KEY"
_SHORTEST_KEY = 12  # characters
_SAVES = "rlkit-saves"


def _add_serve(add: _Add) -> None:
    text = "a directory, a hub id, smollm2-135m-instruct; with --openai also a run's folder, a path from save(), a URL"
    add("--model", help=text)
    add("--backend", default="local", help="local, toy, or another installed one (default: local)")
    add("--openai", action="store_true", help="serve the OpenAI and Anthropic APIs instead of Tinker's")
    add("--name", help="the model's name for clients (default: the last part of --model)")
    add("--host", default="127.0.0.1", help=f"address; other than loopback needs a key in ${_KEY}, and TLS in front")
    add("--port", type=int, default=8000, help="port, 0 for any free one (default: 8000)")
    add("--folder", help=f"folder for saved states (default: {_SAVES})")
    add("--tokenizer", help="the name by which clients load the tokenizer (default: the place it was loaded from)")
    text = "an option of rlkit.connect, such as dtype=bfloat16, or of rlkit.serve, such as idle=7200"
    _add_assignments(add, "--option", text)
    add("--seed", type=int, help="seed of samples without a seed")
    _add_checkpoint(add)


def _serve(options: argparse.Namespace) -> int:
    """Serve a model of this machine to programs, until it is interrupted.

    rlkit serve --model M             the Tinker API: programs of its SDK train LoRAs here (TINKER_BASE_URL)
    rlkit serve --openai --model M    the endpoints of OpenAI and Anthropic, to sample a model, a run or a saved policy
    """
    elsewhere = {"folder": None, "tokenizer": None} if options.openai else {"step": None, "role": "policy"}
    for name, default in elsewhere.items():
        if getattr(options, name) != default:
            raise ConfigError(f"--{name}", "is given", f"it {'without' if options.openai else 'with'} --openai")
    more = _parse_assignments("--option", options.option)
    taken = {name: f"--{name}" for name in ("backend", "host", "model", "port", "seed")}
    if options.openai:
        taken |= {"role": "--role", "step": "--step"}
    else:
        taken |= {"folder": "--folder", "key": f"${_KEY}", "names": "--name", "tokenizer_id": "--tokenizer"}
    for name in more.keys() & taken:
        raise ConfigError(f"--option {name}: set it with {taken[name]}")
    if options.seed is not None:
        more["seed"] = options.seed
    return (_serve_openai if options.openai else _serve_tinker)(options, os.environ.get(_KEY) or None, more)


def _serve_tinker(options: argparse.Namespace, key: str | None, more: dict[str, Any]) -> int:
    from rlkit.server import serve

    more |= {name: getattr(options, name) for name in ("model", "host", "port")}
    names = None if options.name is None else [options.name]
    folder = options.folder or _SAVES
    with serve(options.backend, key=key, names=names, folder=folder, tokenizer_id=options.tokenizer, **more) as server:
        shown = "tml-local" if key is None else f"<what is in ${_KEY}>"
        print(f"serving {server.names[0]} at {server.url}", flush=True)
        print(f"clients: TINKER_BASE_URL={server.url} TINKER_API_KEY={shown}", flush=True)
        _wait_for_signal()
    return 0


def _serve_openai(options: argparse.Namespace, key: str | None, more: dict[str, Any]) -> int:
    from rlkit.gateway import Gateway

    if key is None and not is_loopback(options.host):
        raise ConfigError("--host", f"{options.host} can be reached from other machines", f"a key in ${_KEY}")
    if key is not None and len(key) < _SHORTEST_KEY:
        raise ConfigError(f"${_KEY}", "is too short", f"at least {_SHORTEST_KEY} characters")
    model = options.model or options.backend
    name = options.name or ("policy" if model.startswith(_URLS) else Path(model).name)
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
    """Wait for SIGINT or SIGTERM; a second one ends the program at once."""
    stop, numbers = threading.Event(), (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    print("closing, once what was begun is done; a second signal ends it at once", flush=True)


def _add_report(add: _Add) -> None:
    add("folders", metavar="RUN", nargs="+", help="the run's folder; several runs share one page")
    add("--out", metavar="FILE", help="the file to write (default: report.html in the first folder)")
    text = "a model whose tokenizer shows tokens as text (default: that of the first run's newest checkpoint)"
    add("--tokenizer", metavar="MODEL", help=text)


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


def _add_checkpoints(add: _Add) -> None:
    add("folder", metavar="RUN", help="the run's folder")
    _add_checkpoint(add)
    add("--export", metavar="FOLDER", help="a new folder")
    add("--merged", action="store_true", help="merge the adapter into its base")


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


def _add_doctor(add: _Add) -> None:
    add("--offline", action="store_true", help="do not contact a service")
    add("--deadline", type=float, default=20.0, help="time limit of the service's answer (default: 20)")
    add("--device", help="check the local backend on a device: cpu, cuda, cuda:1, mps")


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
