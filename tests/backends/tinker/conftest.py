"""A service in this process, and policies on it."""

from __future__ import annotations

import pytest

import rlkit
from rlkit.testing import FakeTinker

STEP = rlkit.Adam(learning_rate=0.05)


@pytest.fixture
def fake():
    with FakeTinker(seed=0, names=("toy", "toy-large")) as fake:
        yield fake


@pytest.fixture
def policy(fake):
    with connect(fake) as policy:
        yield policy


def connect(fake, **options):
    where = {"base_url": fake.base_url, "api_key": fake.api_key}
    return rlkit.connect("tinker", **{**where, "model": "toy", "seed": 0, "deadline": 30.0, **options})
