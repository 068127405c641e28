"""Command lines of the harnesses, the files that they write, and scores that are kept."""

from __future__ import annotations

import json
import stat

import pytest

from rlkit import harnesses
from rlkit.errors import CheckpointError, ConfigError, EnvError
from rlkit.harnesses import Result, Score, _running
from rlkit.harnesses._inspect_ai import INSPECT
from rlkit.harnesses._lm_eval import LM_EVAL
from rlkit.harnesses._types import Call


def call(tmp_path, *arguments, tasks=("a", "b"), tokenizer=None):
    split = [tuple(each.split("=", 1)) for each in arguments]
    url = "http://127.0.0.1:1"
    return Call(url, "key", "policy", tasks, split, tmp_path, max_length=99, tokenizer=tokenizer)


def test_command_of_lm_eval(tmp_path):
    """Multiple choice by default; options as they were given; those of the model are added to rlkit's."""
    words = LM_EVAL.command(
        call(tmp_path, "limit=5", "model_args=num_concurrent=1,seed=7", "log_samples=false", "x=true")
    )
    assert words[:4] == ["-m", "lm_eval", "--model", "local-completions"]
    of_model = words[words.index("--model_args") + 1]
    assert of_model.startswith("base_url=http://127.0.0.1:1/v1/completions,model=policy,")
    assert of_model.endswith(",max_length=99,num_concurrent=1,seed=7")
    assert words[words.index("--tasks") + 1] == "a,b"
    assert words[words.index("--output_path") + 1] == str(tmp_path)
    assert words[-2:] == ["--limit=5", "--x"]
    assert LM_EVAL.environment(call(tmp_path)) == {"OPENAI_API_KEY": "key"}


def test_chats_of_lm_eval(tmp_path):
    """By its chat model, or as texts that it writes with the policy's own tokenizer."""
    words = LM_EVAL.command(call(tmp_path, "model=local-chat-completions"))
    assert "/v1/chat/completions" in words[words.index("--model_args") + 1]
    assert "--apply_chat_template" in words
    words = LM_EVAL.command(call(tmp_path, "apply_chat_template=true", tokenizer="owner/name"))
    assert words[words.index("--model_args") + 1].endswith(",tokenizer_backend=huggingface,tokenizer=owner/name")
    own = "model_args=tokenizer_backend=huggingface,tokenizer=other"
    assert LM_EVAL.command(call(tmp_path, "apply_chat_template=true", own))
    with pytest.raises(ConfigError, match="cannot load this policy's tokenizer"):
        LM_EVAL.command(call(tmp_path, "apply_chat_template=true"))


@pytest.mark.parametrize("argument", ["model=hf", "tasks=a", "output_path=b", "output-path=b"])
def test_options_of_lm_eval_that_are_refused(tmp_path, argument):
    with pytest.raises(ConfigError, match="argument (model|tasks|output_path)"):
        LM_EVAL.command(call(tmp_path, argument))


def test_command_of_inspect(tmp_path):
    words = INSPECT.command(
        call(tmp_path, "T=size=3", "max_tokens=8", "no-score=true", "trace=false", tasks=["a.py@b"])
    )
    assert words[:4] == ["-m", "inspect_ai", "eval", "a.py@b"]
    assert {"--model=openai-api/rlkit/policy", "--model-base-url=http://127.0.0.1:1/v1"} <= set(words)
    assert {f"--log-dir={tmp_path}", "--log-format=json", "--display=plain"} <= set(words)
    assert words[-4:] == ["-T", "size=3", "--max-tokens=8", "--no-score"]
    with pytest.raises(ConfigError, match="argument log-dir=x: rlkit sets it"):
        INSPECT.command(call(tmp_path, "log_dir=x"))


def test_results_of_lm_eval(tmp_path):
    """Filters are named but for none; a group without a mean, "N/A" and lengths are no scores."""
    tasks = {
        "arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.125, "sample_len": 12},
        "gsm": {"exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A", "exact_match,loose": 1},
        "group": {"alias": "group", " ": " ", "acc,none": float("nan")},
    }
    content = {"results": tasks, "n-samples": {"arc": {"original": 20, "effective": 12}}}
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "results_2026-01-01.json").write_text("{}")
    (folder / "results_2026-01-02.json").write_text(json.dumps(content))
    assert LM_EVAL.read(tmp_path) == [
        Score("arc", "acc", 0.25, 0.125, 12),
        Score("gsm", "exact_match,strict", 0.5),
        Score("gsm", "exact_match,loose", 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "wrote no results"),
        ("[1, 2", "is not valid JSON"),
        ("[1, 2]", "is list; expected a JSON object"),
        ('{"results": 3}', "results: is int"),
        ('{"results": {"a": 3}}', "results.'a'.: is int"),
        ('{"results": {}}', "has no score"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_nonsense_of_lm_eval(tmp_path, text, words):
    if text is not None:
        (tmp_path / "results_1.json").write_text(text)
    with pytest.raises(EnvError, match=words):
        LM_EVAL.read(tmp_path)


def log(status="success", task="quiz", **results):
    return json.dumps(
        {"status": status, "eval": {"task": task}, "results": results or None, "error": {"message": "why"}}
    )


def test_logs_of_inspect(tmp_path):
    """The standard error is that of the first of accuracy and mean; each scorer is one of its own."""
    metrics = {"accuracy": {"value": 0.5}, "mean": {"value": 0.6}, "stderr": {"value": 0.1}}
    other = {"value_of_it": {"value": 3}, "stderr": {"value": 0.2}, "odd": {"value": None}}
    scores = [{"name": "match", "metrics": metrics}, {"name": "model_graded", "metrics": other}]
    (tmp_path / "1.json").write_text(log(completed_samples=4, scores=scores))
    (tmp_path / "2.json").write_text(log(task="other", scores=[]))
    assert INSPECT.read(tmp_path) == [
        Score("quiz/match", "accuracy", 0.5, 0.1, 4),
        Score("quiz/match", "mean", 0.6, None, 4),
        Score("quiz/model_graded", "value_of_it", 3.0, 0.2, 4),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "wrote no log"),
        (log(status="error"), "quiz ended as 'error': why"),
        (log(status="cancelled"), "quiz ended as 'cancelled'"),
        (log(), "does the task have a scorer"),
        (log(scores=3), "scores: is int; expected a JSON list"),
        (log(scores=[{"name": "a", "metrics": {"b": 3}}]), "metrics.'b'.: is int"),
        ("{}", "eval: is NoneType"),
    ],
)
def test_nonsense_of_inspect(tmp_path, text, words):
    if text is not None:
        (tmp_path / "1.json").write_text(text)
    with pytest.raises(EnvError, match=words):
        INSPECT.read(tmp_path)


def kept(tmp_path, step, score):
    folder = _running.new_folder(tmp_path, "lm-eval", step)
    _running.make(folder)
    result = Result("lm-eval", "0.4.13", step, 5.0, 2.5, [score], folder, [("limit", "5"), ("x", "a=b")])
    _running.keep(result)
    return result


def test_scores_are_kept(tmp_path):
    """What was kept is read again, by step; a file that is damaged is left out."""
    later = kept(tmp_path, 20, Score("arc", "acc", 0.5, 0.1, 10))
    sooner = kept(tmp_path, 3, Score("owner/gsm", "em", 0.25))
    assert harnesses.results(tmp_path) == [sooner, later]
    assert later.metrics == {"eval/arc/acc": 0.5, "eval/arc/acc_stderr": 0.1}
    assert sooner.metrics == {"eval/owner/gsm/em": 0.25}
    assert stat.S_IMODE(later.folder.stat().st_mode) == 0o700
    (later.folder / "scores.json").write_text('{"scores": [], "step": -1}')
    assert harnesses.results(tmp_path) == [sooner]
    assert harnesses.results(tmp_path / "nothing") == []


def test_keys_are_not_kept(tmp_path):
    """As an option of the harness may hold one."""
    folder = _running.new_folder(tmp_path, "lm-eval", 0)
    _running.make(folder)
    result = Result("lm-eval", "1", 0, 0.0, 0.0, [], folder, [("wandb_args", "api_key=0123456789abcdef")])
    assert "0123456789abcdef" not in _running.keep(result).read_text()


def test_folders_that_cannot_be_made(tmp_path):
    (tmp_path / "harness").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        _running.make(_running.new_folder(tmp_path, "lm-eval", 0))
