"""Models of the table of families."""

from __future__ import annotations

import functools

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """``folders(name)`` is the folder of a family's model, made once."""
    from tests.models.families import FAMILIES
    from tests.models.family import build

    return functools.cache(lambda name: str(build(FAMILIES[name], tmp_path_factory.mktemp("model"))))
