"""The server of these tests: the one that RLKIT_SERVER_URL names, or SkyRL's, started by the Python that has it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from tests.realserver.server import RealServer

URL, PYTHON = os.environ.get("RLKIT_SERVER_URL"), os.environ.get("RLKIT_SERVER_PYTHON")


@pytest.fixture(scope="session")
def server(tiny, tmp_path_factory):
    """Its ``url`` and ``model``."""
    pytest.importorskip("tinker")
    if URL:
        yield SimpleNamespace(url=URL, model=os.environ["RLKIT_SERVER_MODEL"], tail=str)
    elif PYTHON:
        with RealServer(PYTHON, tiny("llama"), tmp_path_factory.mktemp("server")) as server:
            yield server
    else:
        pytest.skip("make test-server installs SkyRL's server and runs this; make test-server URL= MODEL= asks another")


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    if not URL:
        monkeypatch.setenv("TINKER_API_KEY", "tml-any-key-is-let-in")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the end of the server's log where a test fails."""
    report = (yield).get_result()
    if report.failed and (server := getattr(item, "funcargs", {}).get("server")) is not None:
        report.sections.append(("log of the server", server.tail()))
