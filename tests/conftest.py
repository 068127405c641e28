"""Fixtures that several tests share."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test asks a hub

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``tiny(kind)`` is the folder of a random two-layer model, made once."""
    pytest.importorskip("transformers")
    from tests.models.build import build

    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = build(kind, tmp_path_factory.mktemp(kind))
        return str(made[kind])

    return folder
