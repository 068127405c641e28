"""Fixtures that several tests share."""

from __future__ import annotations

import functools
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test asks a hub

import pytest

import tests.properties  # noqa: F401  # loads the profile of every property
from tests.slow import mark_slow

# programs of environments that have what they import
collect_ignore_glob = ["agents/clients/*", "envs/openenv_server.py", "envs/verifiers_tasksets/*"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; programs that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Make temporary folders in one that is removed at the end; those of ``tmp_path`` stay where pytest has them."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="rlkit-")
    config.add_cleanup(functools.partial(shutil.rmtree, tempfile.tempdir, ignore_errors=True))


def pytest_collection_modifyitems(items):
    mark_slow(items)


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


@pytest.fixture(scope="session")
def openreward_url(tmp_path_factory):
    """Where a server of OpenReward environments listens, in another process; started once."""
    pytest.importorskip("openreward", reason="openreward is not installed: pip install 'rlkit-lm[openreward]'")
    server = Path(__file__).parent / "envs/openreward_server.py"
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(server)], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    try:
        port = process.stdout.readline().strip()  # its imports take 20 s of a processor
        assert port.isdigit(), log.read_text()
        drain = threading.Thread(target=process.stdout.read, daemon=True)  # it goes on to log there
        drain.start()
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
                connection.request("GET", "/state")
                connection.getresponse().read()
                connection.close()
                break
            except ConnectionError:  # bound, and not listening yet
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
