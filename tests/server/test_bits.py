"""What a program for the plain SDK gets: on the fake, on the fake with calls cut into requests, and over a socket.

bits.json is what rlkit's first server gave, with HTTP of its own, to the program in bits.py. Tokens, paths and lists
are compared as they are, floats to a few digits, since another processor rounds otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit._web import WebServer
from rlkit.server import Service
from rlkit.testing import FakeTinker
from tests.server.bits import play
from tests.server.sdk import tinker

EXPECTED = json.loads(Path(__file__).with_name("bits.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # load_state, which old programs use


def differences(found, expected, where=""):
    """The places at which they differ."""
    pairs = []
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        pairs = [(found[key], expected[key], f"{where}.{key}") for key in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = [(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(found, expected, strict=True))]
    elif found != (pytest.approx(expected, rel=1e-4, abs=1e-5) if isinstance(expected, float) else expected):
        return [f"{where}: {found} instead of {expected}"]
    return [x for pair in pairs for x in differences(*pair)]


def compare(service, found, chunk):
    applied = [[x.operation, x.model_id.partition(":")[2], x.seq_id] for x in service.applied]
    assert differences(found, EXPECTED["results"]) == []
    assert applied == EXPECTED["applied"][str(chunk)]


@pytest.mark.parametrize("chunk", [1024, 2])
def test_in_process(chunk):
    with FakeTinker(seed=0, config={"fwdbwd_max_chunk_len": chunk}) as fake:
        compare(fake.service, play(fake.service_client(), fake.rest_client()), chunk)


def test_over_a_socket():
    service = Service(names=["toy"], seed=0)
    # The fake lends its tokenizer.
    with FakeTinker(), service, WebServer(service.app, "127.0.0.1", 0, name="test", patience=5) as server:
        where = {"base_url": server.url, "api_key": "tml-any"}
        client = tinker.ServiceClient(**where)
        found = play(client, tinker.RestClient(**where))
        client.close("success").result()
        compare(service, found, 1024)
