"""The UK AI Security Institute's inspect: its command line, and the logs that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlkit.errors import EnvError
from rlkit.harnesses._types import Call, Harness, Json, Score, listed, mapping, number, options, parsed, taken, whole

__all__ = ["INSPECT"]

_SERVICE = "rlkit"  # of its provider openai-api, which reads the key from RLKIT_API_KEY
_KEPT = "folder="
_OURS = {
    "model": "rlkit's model: the policy is evaluated",
    "model-base-url": "no value: the policy sets it",
    "log-dir": _KEPT,
    "log-format": _KEPT,
}
_MAIN = ("accuracy", "mean")  # the metric that its "stderr" belongs to


def command(call: Call) -> list[str]:
    """Return the arguments of the interpreter.

    Raises:
        ConfigError: an option that rlkit sets.
    """
    arguments = [(name.replace("_", "-"), value) for name, value in call.arguments]
    taken(arguments, _OURS)
    words = ["-m", "inspect_ai", "eval", *call.tasks]
    words += [f"--model=openai-api/{_SERVICE}/{call.model}", f"--model-base-url={call.url}/v1"]
    words += [f"--log-dir={call.folder}", "--log-format=json"]
    if "display" not in dict(arguments):
        words.append("--display=plain")
    for name, value in arguments:
        if len(name) == 1:  # -T, -M, -S, each KEY=VALUE
            words += [f"-{name}", value]
        else:
            words += options([(name, value)])
    return words


def environment(call: Call) -> Mapping[str, str]:
    """Return the environment variables that it reads."""
    return {"RLKIT_API_KEY": call.key}


def read(folder: Path) -> list[Score]:
    """Return the scores in its logs, one for each task.

    Raises:
        EnvError: there is no log, a task did not succeed, or none has a score.
    """
    scores: list[Score] = []
    logs = sorted(folder.glob("*.json"), key=lambda path: path.name)
    if not logs:
        raise EnvError(f"{folder}: inspect wrote no log")
    for path in logs:
        log = parsed(path)
        task = str(mapping(log.get("eval"), f"{path}: eval").get("task"))
        if log.get("status") != "success":
            error = log.get("error")
            why = f": {error.get('message')}" if isinstance(error, dict) else ""
            raise EnvError(f"{path}: the task {task} ended as {log.get('status')!r}{why}")
        results = log.get("results")
        if isinstance(results, dict):
            scores += _scores(task, results, str(path))
    if not scores:
        raise EnvError(f"{folder}: no task has a score; does the task have a scorer?")
    return scores


def _scores(task: str, results: Json, where: str) -> list[Score]:
    samples = whole(results.get("completed_samples"))
    scores = []
    for each in listed(results.get("scores"), f"{where}: results.scores"):
        of = mapping(each, f"{where}: results.scores")
        values = {}
        for name, metric in mapping(of.get("metrics"), f"{where}: metrics").items():
            value = number(mapping(metric, f"{where}: metrics[{name!r}]").get("value"))
            if value is not None:
                values[name] = value
        stderr = values.pop("stderr", None)
        main = next((name for name in _MAIN if name in values), next(iter(values), None))
        for name, value in values.items():
            scores.append(Score(f"{task}/{of.get('name')}", name, value, stderr if name == main else None, samples))
    return scores


INSPECT = Harness("inspect", "inspect_ai", "inspect-ai openai", command, environment, read)
