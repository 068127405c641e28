"""``rlkit doctor --device``: what it finds, what it leaves out, and that a wrong number is one."""

from __future__ import annotations

import getpass
import json
import re
import socket
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit import _selfcheck  # noqa: E402
from rlkit._selfcheck import numbers  # noqa: E402
from rlkit._selfcheck.report import processor, scrubbed  # noqa: E402
from rlkit.backends.local.model import probe  # noqa: E402
from rlkit.cli import main  # noqa: E402


def test_a_cpu_passes(tmp_path, capsys, monkeypatch):
    """Numbers, speed, launches and parts of the limits are in the report; whose machine it is is not."""
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "report.json"
    assert main(["doctor", "--device", "cpu", "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out.count("\n  ok ") == 6 * len(numbers.COMPARISONS)  # three architectures in two dtypes
    for comparison in numbers.COMPARISONS:
        assert comparison.otherwise in told.out
    assert "all numbers are right" in told.out
    report = json.loads(out.read_text("utf-8"))
    assert report["right"]
    assert report["parts"]["launches"]["training"] > report["parts"]["launches"]["decoding"] > 10
    assert report["parts"]["speed"]["decoding 8 rows"]["tokens per second"] > 0
    assert 0 < report["parts"]["speed"]["training"]["of the products' limit"] < 1
    for text in (told.out, out.read_text("utf-8")):
        assert str(tmp_path) not in text
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
        assert f"/{getpass.getuser()}/" not in text
    assert list((tmp_path / "cache" / "devices").iterdir())


def test_wrong_numbers_are_told(tmp_path, capsys, monkeypatch):
    """A check that fails, one that raises and one that there was no time for: exit status 1, and nothing is noted."""
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))

    def raises(*_):
        raise OSError(f"{tmp_path} does not compute")

    found, bounds = (
        {"right": lambda _: 0.5, "wrong": lambda _: 2.0, "broken": raises},
        {"float32": 1.0, "bfloat16": 1.0},
    )
    comparisons = [numbers.Comparison(title, f"{title} matters", of, bounds) for title, of in found.items()]
    monkeypatch.setattr(numbers, "COMPARISONS", comparisons)
    monkeypatch.setattr(_selfcheck, "KINDS", {"Qwen3": ("qwen3", {})})
    for name in ("roofline", "measured"):
        monkeypatch.setattr(_selfcheck.speed, name, raises)
    monkeypatch.setattr(_selfcheck, "of_a_layer", lambda *_: {})
    assert main(["doctor", "--device", "cpu"]) == 1
    told = capsys.readouterr().out
    for line in (
        "Wrong\n  (else: wrong matters)\n",
        "\n  ok     Qwen3, float32: 0.5 apart (at most 1)\n",
        "\n  WRONG  Qwen3, float32: 2 apart (at most 1)\n",
        "\n  WRONG  Qwen3, bfloat16: OSError: <path> does not compute\n",
        "\n  failed: OSError: <path> does not compute\n",
    ):
        assert line in told
    assert main(["doctor", "--device", "cpu", "--minutes", "0"]) == 1
    assert "  -      Qwen3, float32: skipped" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_a_difference_is_found(tmp_path, monkeypatch):
    """The check of logprobs, with a trainer that is off by a thousandth."""
    model = numbers.build("tiny", tmp_path / "model")
    right = numbers._plain_logprobs
    monkeypatch.setattr(numbers, "_plain_logprobs", lambda *arguments: right(*arguments) + 0.001)
    comparison = numbers.COMPARISONS[0]
    value = comparison.distance(numbers.Setup(model, tmp_path, "cpu", "float32"))
    assert comparison.bounds["float32"] < value == pytest.approx(0.001, rel=0.01)


def test_the_processor_has_a_name(tmp_path):
    """As Linux tells it; elsewhere whatever the platform says."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz \nmodel name\t: Other\n")
    assert processor(cpuinfo) == "Some CPU @ 3 GHz"
    assert processor(tmp_path / "none")


def test_options_of_the_self_check(capsys):
    """A shape that there is none, and a file for a report without a self-check."""
    assert main(["doctor", "--device", "cpu", "--shape", "9B"]) == 2
    assert "one of tiny, 0.6B, 7B" in capsys.readouterr().err
    assert main(["doctor", "--out", "x.json"]) == 2
    assert "requires --device" in capsys.readouterr().err
    assert main(["doctor", "--device", "tpu9"]) == 2


def test_what_cannot_be_checked_is_refused_at_once(tmp_path, capsys):
    """Before minutes are spent: a device that is not there, a report that could not be written."""
    for arguments in (["--device", "cuda:9"], ["--device", "meta"], ["--device", "cpu", "--out", str(tmp_path)]):
        assert main(["doctor", *arguments]) == 2
        assert capsys.readouterr().err.startswith("rlkit doctor: ")


def test_a_device_that_was_not_checked_is_told_once(tmp_path, monkeypatch):
    """By ``connect``, with the command; never after the check has passed, and never for a CPU."""
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path))
    device = torch.device("mps", 0)
    monkeypatch.setattr(probe, "_warned", set())
    with pytest.warns(UserWarning, match="rlkit doctor --device mps:0"):
        probe.warn_untried(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe.warn_untried(device)
        probe.note_tried(device)
        monkeypatch.setattr(probe, "_warned", set())
        probe.warn_untried(device)
        probe.warn_untried(torch.device("cpu"))


def test_texts_are_scrubbed():
    """Folders of every system, and the host's name."""
    assert scrubbed(r"no C:\Users\me\x.bin nor /home/me/x: all") == "no <path> nor <path>: all"
    assert scrubbed(f"on {socket.gethostname()}!") == "on <name>!"
    assert np.all([len(scrubbed("x" * n)) <= 500 for n in (10, 5000)])
