"""EleutherAI's lm-eval: its command line, and the file of results that it writes.

Multiple choice is scored through ``/v1/completions`` (``local-completions``), which echoes a prompt's logprobs; the
harness then asks the gateway for tokens, so that it does not need its own tokenizer. Chats go through
``/v1/chat/completions`` (``local-chat-completions``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlkit.errors import ConfigError, EnvError
from rlkit.harnesses._types import Call, Harness, Score, mapping, number, options, parsed, taken, whole

__all__ = ["LM_EVAL"]

_PATHS = {"local-completions": "/v1/completions", "local-chat-completions": "/v1/chat/completions"}
_OURS = {
    "tasks": "tasks=",
    "output_path": "folder=",
}
_CONCURRENT = 8  # requests at a time, which the policy batches
_SECONDS = 3600  # for one request; the deadline is for all of them


def command(call: Call) -> list[str]:
    """Return the arguments of the interpreter.

    Raises:
        ConfigError: an option that rlkit sets, or that this policy cannot follow.
    """
    arguments = [(name.replace("-", "_"), value) for name, value in call.arguments]
    taken(arguments, _OURS)
    given = {"model": "local-completions", "log_samples": "true", **dict(arguments)}
    model = given.pop("model")
    if model not in _PATHS:
        raise ConfigError("argument model", f"is {model!r}", " or ".join(_PATHS))
    if model == "local-chat-completions":  # which refuses texts
        given.setdefault("apply_chat_template", "true")
    of_model = {
        "base_url": call.url + _PATHS[model],
        "model": call.model,
        "num_concurrent": str(_CONCURRENT),
        "timeout": str(_SECONDS),
        "max_length": str(call.max_length),
    }
    more = given.pop("model_args", "")
    if (
        model == "local-completions"
        and given.get("apply_chat_template", "false") != "false"
        and "tokenizer" not in more
    ):
        of_model |= _templates(call)
    model_args = ",".join([*(f"{name}={value}" for name, value in of_model.items()), *filter(None, [more])])
    words = ["-m", "lm_eval", "--model", model, "--model_args", model_args]
    words += ["--tasks", ",".join(call.tasks), "--output_path", str(call.folder)]
    return words + options(given.items())


def _templates(call: Call) -> dict[str, str]:
    """Return the options that make the harness render chats as text; with the gateway's tokens it cannot."""
    if call.tokenizer is None:
        why = "transformers cannot load this policy's tokenizer, so the harness cannot render chats as text"
        expected = "model=local-chat-completions, or model_args=tokenizer_backend=huggingface,tokenizer=FOLDER"
        raise ConfigError("argument apply_chat_template", "is set", expected, why)
    return {"tokenizer_backend": "huggingface", "tokenizer": call.tokenizer}


def environment(call: Call) -> Mapping[str, str]:
    """Return the environment variables that it reads."""
    return {"OPENAI_API_KEY": call.key}


def read(folder: Path) -> list[Score]:
    """Return the scores in its newest file of results.

    Raises:
        EnvError: there is no such file, or it has no number.
    """
    files = sorted(folder.rglob("results_*.json"), key=lambda path: path.name)
    if not files:
        raise EnvError(f"{folder}: lm-eval wrote no results_*.json")
    results = parsed(files[-1])
    where = str(files[-1])
    counted = results.get("n-samples")
    scores = []
    for task, values in mapping(results.get("results"), f"{where}: results").items():
        count = counted.get(task) if isinstance(counted, dict) else None
        samples = whole(count.get("effective")) if isinstance(count, dict) else None
        named = mapping(values, f"{where}: results[{task!r}]")
        for name, value in named.items():
            metric, comma, of_filter = name.partition(",")
            score = number(value)
            if score is None or not comma or metric.endswith("_stderr"):
                continue  # its alias, its length, a group that has no mean
            shown = metric if of_filter == "none" else name
            stderr = number(named.get(f"{metric}_stderr,{of_filter}"))
            scores.append(Score(task, shown, score, stderr, samples))
    if not scores:
        raise EnvError(f"{where}: has no score")
    return scores


LM_EVAL = Harness("lm-eval", "lm_eval", "lm_eval[api]", command, environment, read)
