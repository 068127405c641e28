"""Where the SDK is missing none of these tests runs; elsewhere those of a file share a fake."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("tinker") else ["test_*.py"]


@pytest.fixture(scope="module")
def fake():
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0) as fake:
        yield fake


@pytest.fixture
def training(fake):
    return fake.service_client().create_lora_training_client("toy", rank=8).result()
