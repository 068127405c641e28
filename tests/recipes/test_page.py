"""The page of the recipes says what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

ROOT = Path(__file__).parents[2]


def test_its_tables_are_up_to_date():
    """docs/recipes.md is what ``python docs/recipes.py`` writes, in a process where nobody registered more."""
    command = [sys.executable, str(ROOT / "docs" / "recipes.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_measured_cell_is_better():
    """The table has every algorithm on every backend, and each run's objective became better."""
    import json

    from rlkit import recipes
    from tests.recipes.problems import table

    cells = json.loads(table.RESULTS.read_text("utf-8"))
    names = [name for name in recipes.algorithms.registry if name not in table.ALIASES]
    for backend in ("toy", "local", "fake"):
        mine = {cell["algorithm"]: cell for cell in cells if cell["backend"] == backend}
        assert sorted(mine) == sorted(names)
        assert all(cell["better"] for cell in mine.values())


def test_the_example(tmp_path, monkeypatch, capsys):
    """The program that is to be copied runs to its end, and what it trains learns; run again, it is done."""
    from rlkit import recipes
    from tests.test_examples import load

    monkeypatch.chdir(tmp_path)
    kept = [
        (registry, dict(registry)) for registry in (recipes.algorithms.registry, recipes.environments, recipes.rewards)
    ]
    try:
        example = load("config_driven")
        assert example.main(["--help"]) == []
        assert "rlkit train --keys" in capsys.readouterr().out
        digits = str(ROOT / "examples" / "configs" / "digits.yaml")
        first = example.main([digits, "algorithm.algorithm_type=first_wins", "buffer.total_steps=5"])
        assert example.main([digits, "algorithm.algorithm_type=first_wins", "buffer.total_steps=5"]) == first
        example.main([str(ROOT / "examples" / "configs" / "stages.yaml")])
    finally:
        for registry, names in kept:
            for name in registry.keys() - names.keys():
                del registry[name]
    said = capsys.readouterr().out.splitlines()
    ends = [
        (line.split()[-4 if len(line.split()) > 4 else 0], float(line.split()[-3]), float(line.split()[-1]))
        for line in said
    ]
    assert {name for name, *_ in ends} >= {"env/digits/reward", "train/kl_teacher", "eval/held_out/mean"}
    for name, before, after in ends:
        if name.startswith(("env/", "eval/")):
            assert after > before, name
        if name == "train/kl_teacher":
            assert after < before
