"""The service on a socket."""

from __future__ import annotations

import concurrent.futures
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
from rlkit.server import ExactModels, serve
from tests.each import for_each
from tests.server.sdk import datum, prompt

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402


@pytest.fixture(scope="module")
def server():
    with serve(ExactModels(), names=("toy",)) as server:
        yield server


def connected(server):
    address = urllib.parse.urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def said(server, data):
    """All that the server answers to ``data`` until it closes."""
    with connected(server) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_keep_alive(server):
    """Many requests share a connection."""
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    for _ in range(3):
        connection.request("GET", "/api/v1/healthz")
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())) == (200, {"status": "ok"})
    connection.close()


def test_requests_in_a_row(server):
    """A second request that comes with the first is answered after it."""
    one = b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert said(server, one * 3).count(b"HTTP/1.1 200 OK") == 3
    last = b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert said(server, last + one).count(b"HTTP/1.1 200 OK") == 1


@for_each(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\nbroken\r\n\r\n", 400),
        (b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 70_000, 400),
        (b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\n\r\n", 403),
        (b"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\ncontent-encoding: zstd\r\n\r\n", 400),
        (b"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\ncontent-length: \xb2\r\n\r\n", 400),
        (b"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"PATCH /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
        (b"GET http://[::1/api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET //[x]/api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    ],
)
def test_bad_requests(server, data, status):
    assert said(server, data).startswith(f"HTTP/1.1 {status} ".encode())


HEALTH = "/api/v1/healthz"


def asked(server, path=HEALTH, *, method="GET", body=None, **headers):
    """The status of one request."""
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    try:
        connection.request(method, path, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:9", 200),
        ("127.8.8.8", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1", 403),
        ("[::2]", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_made_to_lead_here(server, host, status):
    """Without a key, a page that had its own name resolve to this machine is refused by the name it asks for."""
    assert asked(server, host=host) == status
    with serve(ExactModels(), names=("toy",), key="tml-right-key-1") as keyed:
        assert asked(keyed, host=host, x_api_key="tml-right-key-1") == 200  # the page does not have the key


@for_each("site", ["cross-site", "same-site", "anything"])
@for_each(("method", "path"), [("GET", HEALTH), ("GET", "/api/v1/checkpoints"), ("POST", HEALTH)])
def test_requests_of_other_sites(server, site, method, path):
    """Browsers say where a request comes from; a page of another site cannot have one answered, GET included."""
    assert asked(server, path, method=method, sec_fetch_site=site) == 403


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_an_address_that_a_user_types(server, site):
    assert asked(server, sec_fetch_site=site) == 200


def refused_after_the_head(server, size, **headers):
    """The status of the answer to a head alone: of the body that it promises nothing is sent."""
    lines = [f"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n"]
    lines += [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    with connected(server) as connection:
        connection.sendall("".join([*lines, "\r\n"]).encode())
        try:
            answer = connection.recv(65536)
        except TimeoutError:
            return None
    return int(answer.split()[1])


def test_nothing_is_read_before_the_key_is_checked(server):
    """Nor for a page, nor from a name that is not this machine's."""
    size = 50 * 2**20
    with serve(ExactModels(), names=("toy",), key="tml-right-key-1") as keyed:
        assert refused_after_the_head(keyed, size) == 401
        assert refused_after_the_head(keyed, size, x_api_key="tml-wrong-key-1") == 401
        assert keyed._reading == 0
    assert refused_after_the_head(server, size, origin="http://evil.example") == 403


def test_bodies_are_bounded():
    """A large one is read once somebody has a session, and of all at a time only so many bytes."""
    with serve(ExactModels(), names=("toy",)) as server:
        assert refused_after_the_head(server, 65 * 2**20) == 413
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        training = client.create_lora_training_client("toy").result()
        assert refused_after_the_head(server, 257 * 2**20) == 413
        with connected(server) as first, connected(server) as second:
            head = f"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: {250 * 2**20}\r\n\r\n".encode()
            for connection in (first, second):
                connection.sendall(head)
            until(lambda: server._reading == 500 * 2**20)
            assert refused_after_the_head(server, 13 * 2**20) == 503
            assert asked(server, "/api/v1/telemetry", method="POST", body=b"{}") == 200
        until(lambda: server._reading == 0)
        training.forward([datum([1, 2, 3], weights=1.0)], "cross_entropy").result()
        client.close("success").result()
        until(lambda: refused_after_the_head(server, 65 * 2**20) == 413)


def until(condition, seconds=10.0):
    """Waits for it, and fails where it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_refused_client_reads_the_answer(server):
    """Also one that goes on to send what it promised."""
    with serve(ExactModels(), names=("toy",), key="tml-right-key-1") as keyed:
        for _ in range(5):
            assert asked(keyed, "/api/v1/optim_step", method="POST", body=b"x" * 2**22) == 401


@pytest.mark.parametrize(
    "data", [b"", b"GET /", b"POST /api/v1/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nabc"]
)
def test_clients_that_go_away(server, data):
    assert said(server, data) == b""
    test_keep_alive(server)


def test_one_packet(server):
    """An answer is sent in one piece: in two the second mostly waits 0.04 s for the first to be acknowledged."""
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    times = []
    for _ in range(80):
        start = time.perf_counter()
        connection.request("POST", "/api/v1/telemetryx", body=b"{}")
        connection.getresponse().read()
        times.append(time.perf_counter() - start)
    connection.close()
    assert np.quantile(times, 0.3) < 0.02


def test_long_poll(server):
    """A result that is on its way is waited for, and other requests are answered meanwhile."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
    training = service.create_lora_training_client("toy").result()
    run = server.service._state.runs[training.model_id]
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
        serve(ExactModels(), host="0.0.0.0")  # noqa: S104  # it is refused
    with pytest.raises(rlkit.ConfigError, match="give a key="):
        serve(ExactModels(), host="example.com")
    for key in ("secret", "tml-short", 5):
        with pytest.raises(rlkit.ConfigError, match="tml-"):
            serve(ExactModels(), key=key)


def test_a_key():
    with serve(ExactModels(), names=("toy",), key="tml-right-key-1") as server:
        with pytest.raises(tinker.AuthenticationError, match="API key"):
            tinker.ServiceClient(base_url=server.url, api_key="tml-wrong-key-1").create_lora_training_client("toy")
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-right-key-1")
        service.create_lora_training_client("toy").result()
        service.close("success").result()


def test_a_taken_port(server):
    port = urllib.parse.urlsplit(server.url).port
    with pytest.raises(rlkit.BackendError, match="cannot listen"):
        serve(ExactModels(), port=port)


def _ended(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_closing_ends_its_threads():
    """And may be done twice."""
    before = set(threading.enumerate())
    for pause in (0.0, 0.0, 0.05):
        server = serve(ExactModels(), names=("toy",))
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


def test_clients_in_threads(server):
    """A service client in each of eight threads."""

    def work(k):
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        training = service.create_lora_training_client("toy").result()
        for _ in range(3):
            training.forward_backward([datum([k, k, k], weights=1.0)], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        loss = training.forward([datum([k, k, k], weights=1.0)], "cross_entropy").result().metrics["loss:sum"]
        service.close("success").result()
        return loss

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(60, 68))) < 5.0
