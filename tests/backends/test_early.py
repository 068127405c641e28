"""What is found out before a model is loaded: model, device, and whether the hub answers."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import rlkit
from rlkit.backends import early, hub
from tests.sockets import refusing_port

torch = pytest.importorskip("torch")

CALLS = """
import sys
import rlkit

for call in (
    lambda: rlkit.connect("local"),
    lambda: rlkit.connect("local", model="smolm2-135m-instruct"),
    lambda: rlkit.connect("local", model=sys.argv[1]),
    lambda: rlkit.sampler("local", model=3),
    lambda: rlkit.sampler("local", seed=0),
    lambda: rlkit.critic("local", tokenizer=None, model=""),
    lambda: rlkit.critic("local", tokenizer=None),
):
    try:
        call()
    except rlkit.ConfigError as error:
        assert str(error).startswith("model: "), error
    else:
        raise AssertionError("a model was found")
    assert not {"torch", "transformers"} & sys.modules.keys()
for option in ({"max_rows": 0}, {"dtype": "float8"}, {"merge": 1}, {"shard": 1}):
    try:
        rlkit.connect("local", model="smollm2-135m-instruct", **option)
    except rlkit.ConfigError as error:
        assert str(error).startswith(f"{min(option)}: got "), error
    else:
        raise AssertionError(f"{option} passed")
    assert not {"torch", "transformers"} & sys.modules.keys()
"""


def test_a_wrong_option_is_answered_before_anything_heavy_is_imported(tmp_path):
    subprocess.run([sys.executable, "-c", CALLS, str(tmp_path)], check=True, timeout=60)


def test_an_option_that_is_misspelled_is_named_first():
    """Not the model, which is what was misspelled."""
    with pytest.raises(rlkit.ConfigError, match="no option 'modell'; did you mean 'model'"):
        rlkit.connect("local", modell="x")


def test_a_missing_device_is_answered_with_those_that_exist_and_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    build = re.escape(f"torch {torch.__version__}")

    def refused(device, reason):
        with pytest.raises(rlkit.ConfigError) as raised:
            early.device_of(device)
        assert re.search(reason, str(raised.value)), raised.value

    for device, name in (("cuda", "CUDA"), ("cuda:1", "CUDA"), ("mps", "MPS"), ("xpu", "XPU")):
        refused(device, rf"got '{device}'; expected one of cpu \({build} is built without {name};")
    refused("meta", "expected one of cpu$")
    refused("tpu", "a device type that torch does not know; expected one of cpu$")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    refused("cuda", rf"{build} is built with CUDA but finds no device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refused("cuda:2", r"got 'cuda:2'; expected one of cpu, cuda:0, cuda:1$")
    refused("xpu", "expected one of cpu, cuda:0, cuda:1 .* without XPU")


@pytest.fixture
def endpoint(monkeypatch, tmp_path):
    """Sets the hub's address, with an empty cache; its folder."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def point(address):
        monkeypatch.setattr(constants, "ENDPOINT", address)

    return point


@pytest.fixture
def nobody():
    """An address where nobody listens."""
    with refusing_port() as port:
        yield f"http://127.0.0.1:{port}"


def test_a_hub_that_does_not_answer_is_asked_once(endpoint, nobody, monkeypatch):
    """One error in two lines, whether it refuses, is silent, fails or may not be asked; a 404 is an answer."""
    endpoint(nobody)
    with pytest.raises(rlkit.ConfigError, match=r"model: 'a/b' is not on this machine, and .* does not answer \(Conn"):
        rlkit.connect("local", model="a/b")
    with pytest.raises(rlkit.ConfigError) as raised:
        hub.hub_source("a/b", "tokenizer", "tokenizer_config.json")
    assert str(raised.value).startswith("tokenizer: 'a/b' is not on this machine")
    assert str(raised.value).count("\n") == 1
    monkeypatch.setattr(hub, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "does not answer" in hub.hub_trouble()
    monkeypatch.setattr(hub, "_PATIENCE", 20.0)
    for status, right in ((404, True), (302, True), (401, True), (503, False)):

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self, status=status):
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            endpoint(f"http://127.0.0.1:{server.server_port}")
            assert (hub.hub_trouble() == "") is right, status
            thread.join()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.hub_trouble() == "HF_HUB_OFFLINE is set"


def test_a_model_in_the_hubs_cache_loads_without_the_hub(endpoint, nobody, tiny, tmp_path):
    """Its tokenizer too; the adapter names the id, not a folder of this machine."""
    pytest.importorskip("peft")
    from rlkit.backends.tokenizers import tokenizer_from

    endpoint(nobody)
    cached = tmp_path / "cache" / "models--a--b"
    shutil.copytree(tiny("qwen2"), cached / "snapshots" / "c1899de2")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("c1899de2")
    with rlkit.connect("local", model="a/b", lora=rlkit.Lora(rank=2), device="cpu", folder=tmp_path) as policy:
        saved = Path(policy.save("x").result())
        ids = policy.tokenizer.encode("hello")
    assert json.loads((saved / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"] == "a/b"
    assert json.loads((saved / "state.json").read_text("utf-8"))["model"] == "a/b"
    assert tokenizer_from("a/b").encode("hello").tolist() == ids.tolist()
