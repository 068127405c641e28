"""What a program for the plain SDK gets: on the fake, on the fake with calls cut into requests, and over a socket.

bits.json is what rlkit's first server gave, with HTTP of its own, to the program in bits.py. Tokens, paths and lists
are compared as they are, floats to a few digits, since another processor rounds otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit._web import WebServer
from rlkit.testing import FakeTinker
from rlkit.testing._faketinker import RecordingService
from tests.server.bits import play
from tests.server.sdk import tinker

EXPECTED = json.loads(Path(__file__).with_name("bits.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # load_state, which old programs use


def flatten(value, where=""):
    """Every leaf by its place."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    leaves = {} if isinstance(value, (dict, list)) and value else {where: value}
    return leaves | {place: leaf for key, x in items for place, leaf in flatten(x, f"{where}.{key}").items()}


def compare(service, found, chunk):
    applied = [[x.operation, x.model_id.partition(":")[2], x.seq_id] for x in service.applied]
    found, expected = flatten(found), flatten(EXPECTED["results"])
    assert found.keys() == expected.keys()
    bounds = {place: pytest.approx(x, 1e-4, 1e-5) if isinstance(x, float) else x for place, x in expected.items()}
    assert [(place, found[place], x) for place, x in bounds.items() if found[place] != x] == []
    assert applied == EXPECTED["applied"][str(chunk)]


@pytest.mark.parametrize("chunk", [1024, 2])
def test_in_process(chunk):
    with FakeTinker(seed=0, config={"fwdbwd_max_chunk_len": chunk}) as fake:
        compare(fake.service, play(fake.service_client(), fake.rest_client()), chunk)


def test_over_a_socket():
    service = RecordingService(names=["toy"], seed=0)
    with service, WebServer(service.app, "127.0.0.1", 0, name="test", patience=5) as server:
        where = {"base_url": server.url, "api_key": "tml-any"}
        client = tinker.ServiceClient(**where)
        found = play(client, tinker.RestClient(**where))
        client.close("success").result()
        compare(service, found, 1024)
