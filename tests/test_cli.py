"""The command line ``rlkit``."""

from __future__ import annotations

import runpy
import subprocess
import sys
import warnings

import pytest

import rlkit
from rlkit import cli
from tests.each import for_each


def test_version_and_help(monkeypatch, capsys):
    """Each command is listed with one line of help, and has its own help; ``python -m rlkit`` is the same program."""
    for words, status, expected in (
        (["--version"], 0, f"rlkit {rlkit.__version__}\n"),
        (["--help"], 0, "    serve        Serve a model of this machine"),
        (["serve", "--help"], 0, "--port"),
        (["train", "--keys"], 0, "algorithm.optimizer.lr "),
        ([], 2, "    train        Train a policy from a configuration file"),
        (["nothing"], 2, "invalid choice: 'nothing'"),
        (["doctor", "--nothing"], 2, "rlkit doctor: error: unrecognized arguments: --nothing"),
        (["eval", "run"], 2, "the following arguments are required: TASKS"),
        (["serve", "--port", "many"], 2, "usage: rlkit serve"),
    ):
        monkeypatch.setattr(sys, "argv", ["rlkit", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("rlkit", run_name="__main__")
        assert ended.value.code == status, words
        assert expected in capsys.readouterr()[1 if status else 0]


def test_words_may_follow_options():
    _, options = cli._parse(["train", "a.yaml", "x=1", "--check", "y=2"])
    assert (options.config, options.overrides, options.check) == ("a.yaml", ["x=1", "y=2"], True)
    _, options = cli._parse(["eval", "--greedy", "run", "--set", "a=1", "one", "--size", "3", "two"])
    assert (options.policy, options.tasks, options.set, options.size) == ("run", ["one", "two"], ["a=1"], 3)


@for_each(
    ("words", "message"),
    [
        (["serve", "--backend", "nothing"], "nothing"),
        (["serve", "--backend", "toy", "--host", "0.0.0.0"], "RLKIT_SERVER_KEY"),  # noqa: S104  # it is refused
        (["serve", "--backend", "toy", "--port", "0"], "tml-"),  # with a key that is refused, and not shown
        (["serve", "--backend", "toy", "--port", "70000"], "serve(port)"),
        (["serve", "--backend", "toy", "--option", "port=9000"], "--option port: set it with --port"),
        (["serve", "--backend", "toy", "--option", "key=tml-x"], "--option key: set it with $RLKIT_SERVER_KEY"),
        (["serve", "--backend", "toy", "--openai", "--option", "step=1"], "--option step: set it with --step"),
        (["serve", "--model", "/no/such/folder"], "/no/such/folder"),
        (["train", "missing.yaml"], "missing.yaml: no such file"),
        (["train", "a.b=1"], "a.b=1: no such file; write the overrides after the file"),
        (["checkpoints", "nothing"], "nothing is not a run"),
        (["report", "nothing"], "nothing"),
        (["doctor", "--device", "tpu9"], "device: got 'tpu9'"),
    ],
)
def test_errors_are_one_line(capsys, monkeypatch, words, message):
    pytest.importorskip("peft")
    if message == "tml-":
        monkeypatch.setenv("RLKIT_SERVER_KEY", "hunter2")
    else:
        monkeypatch.delenv("RLKIT_SERVER_KEY", raising=False)
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rlkit {words[0]}: ")
    assert message in error
    assert "hunter2" not in error
    assert error.count("\n") == 1


def test_messages_of_other_libraries(monkeypatch, capsys):
    """Errors and warnings are one line each; Ctrl-C is status 130; warnings look as before afterwards."""
    before, endings = warnings.formatwarning, [KeyboardInterrupt("stopped before step 3"), KeyboardInterrupt()]
    endings.append(rlkit.ConfigError("model: cannot be loaded: no network\n  see the manual\n"))
    shown = []

    def run(options):
        shown.append(warnings.formatwarning("a checkpoint is damaged", RuntimeWarning, "run.py", 91))
        raise endings[len(shown) - 1]

    monkeypatch.setitem(cli._COMMANDS, "doctor", (run, cli._add_doctor))
    assert [cli.main(["doctor"]) for _ in range(3)] == [130, 130, 2]
    errors = "rlkit doctor: stopped before step 3\nrlkit doctor: model: cannot be loaded: no network see the manual\n"
    assert capsys.readouterr().err == errors
    assert shown == ["rlkit: a checkpoint is damaged\n"] * 3
    assert warnings.formatwarning is before


def test_the_command_line_is_light(tmp_path):
    """Help, and errors of paths, come without torch, transformers or omegaconf, and leave no file."""
    program = """
import contextlib, sys
from rlkit import cli
for words in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        cli.main(words.split())
print(*{"torch", "transformers", "omegaconf", "tinker", "pytest"} & sys.modules.keys())
"""
    words = ["--help", "eval --help", "train missing.yaml", "checkpoints nothing", "report nothing", "doctor --nothing"]
    command = [sys.executable, "-W", "error", "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.splitlines()[-1:] == [""], done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
