"""The command line ``rlkit``."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

import rlkit
from rlkit import cli


def test_version_and_help(capsys):
    """Every command is listed with one line of help, and has its own."""
    for arguments, expected in (
        (["--version"], rlkit.__version__),
        (["--help"], "serve"),
        (["serve", "--help"], "--port"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


def test_the_package_is_the_command(monkeypatch, capsys):
    """``python -m rlkit``."""
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("rlkit", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rlkit {rlkit.__version__}\n"


def test_keys_of_training(capsys):
    """Every key that a configuration may have, generated from the classes."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--keys"])
    assert ended.value.code == 0
    told = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "float = 1e-06" in told["algorithm.optimizer.lr"]
    assert "seed" in told


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["serve", "--nothing"], ["serve", "--port", "many"]])
def test_wrong_command_lines(arguments, capsys):
    """Status 2 and a message on standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: rlkit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "nothing"], "nothing"),
        (["--backend", "toy", "--host", "0.0.0.0"], "RLKIT_SERVER_KEY"),  # noqa: S104  # it is refused
        (["--backend", "toy", "--port", "70000"], "serve(port)"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    """An error of rlkit's is one line and status 2."""
    if "--model" in arguments:
        pytest.importorskip("peft")
    assert cli.main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlkit serve: ")
    assert message in error
    assert error.count("\n") == 1


def test_errors_of_other_libraries_are_one_line_too(monkeypatch, capsys):
    """Whatever an error's message took over from where it is from."""
    from rlkit._commands import doctor

    def failed(_):
        raise rlkit.ConfigError("model: cannot be loaded: no network\n  see the manual\n")

    monkeypatch.setattr(doctor, "run", failed)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "rlkit doctor: model: cannot be loaded: no network see the manual\n"


def test_a_bad_key_is_refused(monkeypatch, capsys):
    """What is in the variable has to be a key; the message does not show it."""
    monkeypatch.setenv("RLKIT_SERVER_KEY", "hunter2")
    assert cli.main(["serve", "--backend", "toy", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "tml-" in error
    assert "hunter2" not in error


def test_the_command_line_is_light():
    """Reading it imports nothing heavy."""
    code = (
        "import rlkit.cli, sys; rlkit.cli._parser(); sys.exit(bool({'torch', 'tinker', 'pytest'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


def test_warnings_are_one_line(monkeypatch, capsys):
    """Without where in rlkit they were raised; afterwards they look as before."""
    import warnings

    from rlkit._commands import doctor

    shown = []

    def warned(_):
        shown.append(warnings.formatwarning("a checkpoint is damaged", RuntimeWarning, "run.py", 91))
        return 0

    before = warnings.formatwarning
    monkeypatch.setattr(doctor, "run", warned)
    assert cli.main(["doctor"]) == 0
    assert shown == ["rlkit: a checkpoint is damaged\n"]
    assert warnings.formatwarning is before


def test_words_that_no_command_knows(capsys):
    """Behind an option, too."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--nothing"])
    assert caught.value.code == 2
    assert "doctor: unrecognized arguments: --nothing" in capsys.readouterr().err


def test_without_a_command(capsys):
    """The whole help, with every command, and status 2."""
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert all(f"    {name}" in told for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "missing.yaml"], "missing.yaml: no such file"),
        (["train", "a.b=1"], "a.b=1: no such file; write the overrides after the file"),
        (["eval", "nothing", "chain_sum"], "POLICY: nothing: no such folder"),
        (["eval", "./runs/first", "chain_sum"], "POLICY: ./runs/first: no such folder"),
        (
            ["eval", "smollm2-135m-instruct", "questions.jsonl"],
            "TASKS: is 'questions.jsonl'; expected a file that exists",
        ),
        (
            ["eval", "smollm2-135m-instruct", "chain_sum", "--tokenizer", "x"],
            "--tokenizer: is given; expected the option only with a URL",
        ),
        (["checkpoints", "nothing"], "nothing is not a run"),
        (["report", "nothing"], "nothing"),
    ],
)
def test_paths_are_looked_at_before_anything_heavy_is_imported(arguments, words, tmp_path):
    """A path that is missing is answered without torch, transformers or omegaconf having been imported."""
    program = f"""
import sys
from rlkit import cli
status = cli.main({arguments!r})
assert not {{"torch", "transformers", "omegaconf"}} & sys.modules.keys()
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_a_folder_above_runs(tmp_path, monkeypatch, capsys):
    """A folder that has a folder named checkpoints is no run for that: nothing is written or removed there."""
    (tmp_path / "checkpoints" / "rlkit").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["checkpoints", ".", "--keep", "1"]) == 2
    assert "is not a run: it has no run.json" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
