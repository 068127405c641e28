"""The service on a socket."""

from __future__ import annotations

import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import numpy as np
import pytest

import rlkit
from rlkit import cli
from tests.server.sdk import datum, prompt

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

from rlkit.server import serve  # noqa: E402


@pytest.fixture(scope="module")
def server():
    with serve("toy") as server:
        yield server


def connected(server):
    address = urllib.parse.urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def test_keep_alive(server):
    """Many requests share a connection."""
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    for _ in range(3):
        connection.request("GET", "/api/v1/healthz")
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())) == (200, {"status": "ok"})
    connection.close()


def test_long_poll(server):
    """A result that is on its way is waited for, and other requests are answered meanwhile."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
    training = service.create_lora_training_client("toy").result()
    run = server.service.runs[training.model_id]
    gate, whole = threading.Event(), run.model.step
    run.model.step = lambda params: gate.wait(60) and whole(params)
    step = training.optim_step(types.AdamParams())
    time.sleep(0.3)
    assert not step.future().done()
    test_keep_alive(server)
    gate.set()
    step.result(timeout=60)
    service.close("success").result()


def test_a_large_call(server):
    """Thousands of datums: cut into requests, and put together in order."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
    training = service.create_lora_training_client("toy").result()
    data = [datum([k % 250, (k * 7) % 250, 3], weights=1.0) for k in range(2500)]
    result = training.forward(data, "cross_entropy").result(timeout=60)
    assert len(result.loss_fn_outputs) == 2500
    one = training.forward(data[1777:1778], "cross_entropy").result()
    np.testing.assert_allclose(
        result.loss_fn_outputs[1777]["logprobs"].to_numpy(), one.loss_fn_outputs[0]["logprobs"].to_numpy(), atol=1e-6
    )
    total = -sum(x["logprobs"].to_numpy().sum() for x in result.loss_fn_outputs)
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    service.close("success").result()


def test_many_samples_at_once(server):
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
    sampler = service.create_sampling_client(base_model="toy").result()
    futures = [sampler.sample(prompt([65, k]), 2, types.SamplingParams(max_tokens=3, seed=k)) for k in range(150)]
    found = [f.result(timeout=30).sequences for f in futures]
    assert all(len(x) == 2 for x in found)
    again = sampler.sample(prompt([65, 99]), 2, types.SamplingParams(max_tokens=3, seed=99)).result()
    assert [s.tokens for s in found[99]] == [s.tokens for s in again.sequences]
    service.close("success").result()


def test_off_loopback_wants_a_key():
    with pytest.raises(rlkit.ConfigError, match="give a key="):
        serve("toy", host="0.0.0.0")  # noqa: S104  # it is refused
    with pytest.raises(rlkit.ConfigError, match="give a key="):
        serve("toy", host="example.com")
    for key in ("secret", "tml-short", 5):
        with pytest.raises(rlkit.ConfigError, match="tml-"):
            serve("toy", key=key)


def test_a_key():
    with serve("toy", key="tml-right-key-1") as server:
        with pytest.raises(tinker.AuthenticationError, match="API key"):
            tinker.ServiceClient(base_url=server.url, api_key="tml-wrong-key-1").create_lora_training_client("toy")
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-right-key-1")
        service.create_lora_training_client("toy").result()
        service.close("success").result()


def _ended(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_closing_ends_its_threads():
    """And may be done twice."""
    before = set(threading.enumerate())
    for pause in (0.0, 0.0, 0.05):
        server = serve("toy")
        with connected(server) as idle:
            time.sleep(pause)
            server.close()
            server.close()
            assert _ended(idle)
        with pytest.raises(ConnectionError):
            connected(server)
    left = [t for t in set(threading.enumerate()) - before if t.is_alive()]
    assert left == []


def test_a_backend_in_training(tmp_path, tiny):
    """A LoRA on a transformer learns through the plain SDK, with the numbers that the backend itself gives."""
    folder = tiny("llama")
    connect = functools.partial(rlkit.connect, "local", model=folder, folder=tmp_path, seed=0)
    data = [datum([5, 6, 7, 8, 9, 10], weights=1.0), datum([3, 4, 5], weights=0.5)]
    lora = rlkit.Lora(rank=4, seed=3, train_unembed=True)  # as the SDK asks for it; the model ties its head
    with serve(connect, names=("tiny",), folder=tmp_path) as server, connect(lora=lora) as local:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        training = service.create_lora_training_client("tiny", rank=4, seed=3).result()
        pairs = [rlkit.Datum.supervised([5], [6, 7, 8, 9, 10]), rlkit.Datum.supervised([3], [4, 5], weights=0.5)]
        for _ in range(4):
            there = training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.01, eps=1e-8)).result()
            here = local.forward_backward(pairs, "cross_entropy").result()
            local.optim_step(rlkit.Adam(learning_rate=0.01)).result()
            found = there.result()
            assert found.metrics["loss:sum"] == pytest.approx(here.metrics["loss:sum"], rel=1e-6)
            for a, b in zip(found.loss_fn_outputs, here.selected, strict=True):
                np.testing.assert_allclose(a["logprobs"].to_numpy(), b, atol=2**-18)
        # Targets that are not the next token, and K of them.
        wide = types.Datum(prompt([5, 6, 7]), {"target_tokens": np.array([[6, 9], [7, 9], [1, 2]])})
        forward = training.forward([wide], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert forward[0, 0] == pytest.approx(found.loss_fn_outputs[0]["logprobs"].to_numpy()[0], abs=2.0)
        moved = training.forward_backward([wide], "cross_entropy").result()
        assert moved.loss_fn_outputs[0]["logprobs"].shape == [3, 2]
        training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        after = training.forward([wide], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert after.sum() > forward.sum()
        path = training.save_state("a").result().path
        again = service.create_training_client_from_state_with_optimizer(path).result()
        assert (
            again.forward(data, "cross_entropy").result().metrics
            == training.forward(data, "cross_entropy").result().metrics
        )
        sampler = training.save_weights_and_get_sampling_client().result()
        sequence = sampler.sample(prompt([5]), 1, types.SamplingParams(max_tokens=4, seed=1)).result().sequences[0]
        scored = sampler.compute_logprobs(prompt([5, *sequence.tokens])).result()[1:]
        assert sequence.logprobs == pytest.approx(scored, abs=1e-4)
        training.optim_step(types.AdamParams()).result()  # without a gradient it is zero
        service.close("success").result()


def test_the_command(tmp_path):
    """`rlkit serve` serves until it is interrupted, and ends cleanly."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "rlkit",
        "serve",
        "--backend",
        "toy",
        "--name",
        "toy",
        "--port",
        "0",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            url = process.stdout.readline().split()[-1]
            service = tinker.ServiceClient(base_url=url, api_key="tml-local")
            training = service.create_lora_training_client("toy").result(timeout=120)
            training.forward_backward([datum([1, 2, 3], weights=1.0)], "cross_entropy").result(timeout=120)
            training.optim_step(types.AdamParams()).result(timeout=120)
            path = training.save_state("a").result(timeout=120).path
            service.close("success").result(timeout=120)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
    assert path in (tmp_path / "tinker.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--backend", "nothing"], "nothing"), (["--backend", "toy", "--host", "0.0.0.0"], "give a key=")],  # noqa: S104
)
def test_the_command_refuses(arguments, message, capsys):
    """With one line and status 2."""
    assert cli.main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
