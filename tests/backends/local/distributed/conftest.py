"""Two processes, started once for all tests of this folder."""

from __future__ import annotations

import pytest

import rlkit


@pytest.fixture(scope="package")
def _two_processes(tiny):
    """A backend that stays open, so that the others share its ranks and the base that these have read."""
    with rlkit.connect(
        "local", model=tiny("llama"), lora=rlkit.Lora(rank=1, train_unembed=True), device="cpu", seed=0, processes=2
    ) as one:
        yield one


@pytest.fixture
def connect(tiny, tmp_path, _two_processes):
    """``connect(processes=2, **options)`` opens a backend on the tiny model; closed at the end."""
    made = []

    def make(processes=2, **options):
        if "resume_from" not in options and "init_from" not in options:
            options.setdefault("lora", rlkit.Lora(rank=4, train_unembed=True))
        options = {"seed": 0, "device": "cpu", "folder": tmp_path, "model": tiny("llama"), **options}
        made.append(rlkit.connect("local", processes=processes, **options))
        return made[-1]

    yield make
    for policy in made:
        policy.close()
