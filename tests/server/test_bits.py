"""What a program for the plain SDK gets: on the fake, on the fake with calls cut into requests, and over a socket.

bits.json is what rlkit's first server gave, with HTTP of its own, to the program in bits.py. Tokens, paths and lists
are compared as they are, floats to a few digits, since another processor rounds otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

tinker = pytest.importorskip("tinker")
from rlkit._web import WebServer  # noqa: E402
from rlkit.server import Service  # noqa: E402
from rlkit.server._models import toy_models  # noqa: E402
from rlkit.testing import FakeTinker  # noqa: E402
from tests.server.bits import play  # noqa: E402

EXPECTED = json.loads(Path(__file__).with_name("bits.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")  # load_state, which old programs use


def differences(found, expected, where=""):
    """The places at which they differ."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [x for key in expected for x in differences(found[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return [
            x for i, pair in enumerate(zip(found, expected, strict=True)) for x in differences(*pair, f"{where}[{i}]")
        ]
    close = isinstance(expected, float) and found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    return [] if close or found == expected else [f"{where}: {found} instead of {expected}"]


def applied(service):
    return [[x.operation, x.model_id.partition(":")[2], x.seq_id] for x in service.applied]


@pytest.mark.parametrize("chunk", [1024, 2])
def test_in_process(chunk):
    with FakeTinker(seed=0, config={"fwdbwd_max_chunk_len": chunk}) as fake:
        found = play(fake.service_client(), fake.rest_client())
        assert differences(json.loads(json.dumps(found)), EXPECTED["results"]) == []
        assert applied(fake.service) == EXPECTED["applied"][str(chunk)]


def test_over_a_socket():
    service = Service(toy_models(), names=["toy"], seed=0)
    with (
        FakeTinker(),  # lends its tokenizer
        service,
        WebServer(service.app, "127.0.0.1", 0, name="test", patience=5) as server,
    ):
        where = {"base_url": server.url, "api_key": "tml-any"}
        client = tinker.ServiceClient(**where)
        found = play(client, tinker.RestClient(**where))
        client.close("success").result()
        assert differences(json.loads(json.dumps(found)), EXPECTED["results"]) == []
        assert applied(service) == EXPECTED["applied"]["1024"]
