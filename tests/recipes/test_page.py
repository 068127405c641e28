"""The page of the recipes says what the code says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

from rlkit import recipes
from tests.recipes.problems import table
from tests.test_examples import load

ROOT = Path(__file__).parents[2]


def test_its_tables_are_up_to_date():
    """docs/recipes.md is what ``python docs/recipes.py`` writes, in a process where nobody registered more."""
    command = [sys.executable, str(ROOT / "docs" / "recipes.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_measured_cell_is_better():
    cells = json.loads(table.RESULTS.read_text("utf-8"))
    names = sorted(name for name in recipes.algorithms.registry if name not in table.ALIASES)
    for backend in ("toy", "local", "fake"):
        assert sorted(cell["algorithm"] for cell in cells if cell["backend"] == backend and cell["better"]) == names


def test_the_example(tmp_path, monkeypatch, capsys):
    """The program that is to be copied runs to its end, and what it trains learns; run again, it is done."""
    monkeypatch.chdir(tmp_path)
    registries = (recipes.algorithms.registry, recipes.environments, recipes.rewards)
    kept = [(registry, dict(registry)) for registry in registries]
    try:
        example = load("config_driven")
        assert example.main(["--help"]) == []
        assert "rlkit train --keys" in capsys.readouterr().out
        digits = [
            str(ROOT / "examples/configs/digits.yaml"),
            "algorithm.algorithm_type=first_wins",
            "buffer.total_steps=5",
        ]
        assert example.main(digits) == example.main(digits)
        example.main([str(ROOT / "examples" / "configs" / "stages.yaml")])
    finally:
        for registry, names in kept:
            for name in registry.keys() - names.keys():
                del registry[name]
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    ends = [(line[-4 if len(line) > 4 else 0], float(line[-3]), float(line[-1])) for line in words]
    assert {name for name, *_ in ends} >= {"env/digits/reward", "train/kl_teacher", "eval/held_out/mean"}
    for name, before, after in ends:
        assert after > before or not name.startswith(("env/", "eval/")), name
        assert after < before or name != "train/kl_teacher"
