"""The real server as a fixture. ``make test-server`` installs it and runs these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.realserver.server import RealServer

STOCK = "RLKIT_STOCK_CONFORMANCE"  # also the suite against the server as it is, where results depend on the order
PYTHON = "RLKIT_SERVER_PYTHON"  # the Python that has the server; set by make test-server


@pytest.fixture(scope="session")
def real_server(tiny, tmp_path_factory) -> Iterator:
    """``real_server(mode)`` is a running server over the two-layer Llama, started once."""
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"${PYTHON} is not set: `make test-server` installs a real server and runs this")
    pytest.importorskip("tinker")
    running: dict[str, RealServer] = {}

    def get(mode: str) -> RealServer:
        if mode not in running:
            server = RealServer(python, tiny("llama"), tmp_path_factory.mktemp(f"server-{mode}"), mode=mode)
            running[mode] = server.__enter__()
        return running[mode]

    yield get
    for server in running.values():
        server.close()


@pytest.fixture(scope="session")
def stock(real_server) -> RealServer:
    """The server as it is installed, with what the SDK needs and no correction."""
    return real_server("stock")


@pytest.fixture(scope="module")
def fresh_stock(tiny, tmp_path_factory) -> Iterator[RealServer]:
    """The same, started anew: it keeps gradients that models before left in their places."""
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"${PYTHON} is not set: `make test-server` installs a real server and runs this")
    pytest.importorskip("tinker")
    with RealServer(python, tiny("llama"), tmp_path_factory.mktemp("server-fresh"), mode="stock") as server:
        yield server


@pytest.fixture(scope="session")
def own(real_server) -> RealServer:
    """The server with complete answers, and its own gradient: the mean over sequences of token means."""
    return real_server("own")


@pytest.fixture(scope="session")
def summing(real_server) -> RealServer:
    """The server with gradients that are sums, as the Tinker API documents them."""
    return real_server("sum")


def pytest_collection_modifyitems(items):
    """The first calls compile for minutes where the machine is busy."""
    for item in items:
        if "realserver" in item.path.parts:
            item.add_marker(pytest.mark.timeout(1800))
        if "TestStockServer" in item.nodeid and not os.environ.get(STOCK):
            item.add_marker(pytest.mark.skip(reason=f"${STOCK} is not set: what one model leaves disturbs the next"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure shows the end of the server's log."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for name in ("stock", "own", "summing"):
            server = item.funcargs.get(name) if hasattr(item, "funcargs") else None
            if server is not None:
                report.sections.append((f"log of the server, {name}", server.tail()))
