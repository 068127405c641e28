"""``rlkit.serve`` and the command."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import httpx
import numpy as np
import pytest

import rlkit
from rlkit import cli
from tests.each import for_each
from tests.server.sdk import datum, prompt, tinker, types


@contextlib.contextmanager
def connected(server, key="tml-anything"):
    client = tinker.ServiceClient(base_url=server.url, api_key=key)
    yield client
    client.close("success").result(timeout=60)


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    """A model of two layers, with options of the backend and of the service."""
    options = {"folder": tmp_path_factory.mktemp("saves"), "micro_batch_tokens": 512, "idle": 700.0, "max_rank": 8}
    with rlkit.serve("local", model=tiny("llama"), seed=0, **options) as server:
        yield server


@pytest.fixture
def service(server):
    with connected(server) as client:
        yield client


@pytest.fixture(scope="module")
def toy():
    with rlkit.serve("toy") as server:
        yield server


@pytest.fixture
def training(toy):
    """A model on the toy."""
    with connected(toy) as client:
        yield client.create_lora_training_client("toy").result()


def test_a_backend_in_training(tmp_path, tiny):
    """A LoRA on a transformer learns through the plain SDK, with the numbers that the backend itself gives."""
    connect = functools.partial(rlkit.connect, "local", model=tiny("llama"), folder=tmp_path, seed=0)
    data = [datum([5, 6, 7, 8, 9, 10], weights=1.0), datum([3, 4, 5], weights=0.5)]
    pairs = [rlkit.Datum.supervised([5], [6, 7, 8, 9, 10]), rlkit.Datum.supervised([3], [4, 5], weights=0.5)]
    lora = rlkit.Lora(rank=4, seed=3, train_unembed=True)  # as the SDK asks for it; the model ties its head
    with rlkit.serve(connect, names=("tiny",)) as server, connect(lora=lora) as local, connected(server) as service:
        training = service.create_lora_training_client("tiny", rank=4, seed=3).result()
        for _ in range(4):
            there = training.forward_backward(data, "cross_entropy").result()
            here = local.forward_backward(pairs, "cross_entropy").result()
            assert there.metrics["loss:sum"] == pytest.approx(here.metrics["loss:sum"], rel=1e-6)
            for a, b in zip(there.loss_fn_outputs, here.selected, strict=True):
                np.testing.assert_allclose(a["logprobs"].to_numpy(), b, atol=2**-18)
            training.optim_step(types.AdamParams(learning_rate=0.01, eps=1e-8)).result()
            local.optim_step(rlkit.Adam(learning_rate=0.01)).result()
        wide = []  # [N, K] targets, which a backend takes as given ones
        for x in data:
            inputs = {name: value.to_numpy().reshape(-1, 1) for name, value in x.loss_fn_inputs.items()}
            wide.append(types.Datum(x.model_input, inputs))
        there, here = (training.forward_backward(x, "cross_entropy").result() for x in (wide, data))
        assert there.metrics["loss:sum"] == pytest.approx(here.metrics["loss:sum"], rel=1e-5)
        assert there.loss_fn_outputs[0]["logprobs"].shape == [5, 1]


def test_what_a_server_has(server, service, tiny):
    """Clients name the model by its folder or by the last part of it. What it has not is refused, and they go on."""
    folder, settings = tiny("llama"), server.service.models._base._settings
    assert (settings["micro_batch_tokens"], server.service.idle, server.service.max_rank) == (512, 700.0, 8)
    assert server.names == (Path(folder).name, folder)
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    listed = rest.get_server_capabilities().result().supported_models
    assert [model.model_name for model in listed] == list(server.names)
    with pytest.raises(tinker.BadRequestError, match=Path(folder).name):
        service.create_lora_training_client("meta/other", rank=2).result()
    training, one = service.create_lora_training_client(folder, rank=2).result(), types.SamplingParams(max_tokens=1)
    assert training.get_tokenizer().encode("hello 12", add_special_tokens=False)
    sampler = training.save_weights_and_get_sampling_client().result()
    found = sampler.sample(prompt([5, 6]), 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=300).result()
    assert len(dict(found.topk_prompt_logprobs[1])) > 100  # as many as the vocabulary has
    assert dict(found.topk_prompt_logprobs[1])[6] == pytest.approx(found.prompt_logprobs[1], abs=1e-5)
    training.optim_step(types.AdamParams()).result()  # without a gradient it is zero
    training.forward_backward([datum([5, 6, 7], weights=1.0)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="accumulated"):
        training.save_state("pending").result()
    training.optim_step(types.AdamParams()).result()
    training.save_state("done").result()
    # The loss that is not published, where a client first shows that it wants it.
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    with pytest.raises(tinker.BadRequestError, match="loss_fn='importance_sampling'.*tinker-cookbook"):
        sampler.sample(prompt([5, 6]), 1, one).result()
    data = [datum([5, 6, 7], logprobs=-1.0, advantages=1.0)]
    with pytest.raises(tinker.BadRequestError, match="only the hosted service has it"):
        training.forward_backward(data, "stable_reinforce").result()
    training.forward_backward(data, "importance_sampling").result()


def test_closing():
    """Ends its threads and connections, and may be done twice."""
    before = set(threading.enumerate())
    with rlkit.serve("toy") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/api/v1/healthz").status_code == 200
        server.close()
        with pytest.raises(httpx.TransportError):
            client.get("/api/v1/healthz")
    assert [t for t in set(threading.enumerate()) - before if t.is_alive()] == []


def test_the_command(tmp_path):
    """`rlkit serve` serves until it is interrupted, and ends cleanly."""
    command = [sys.executable, "-W", "error", "-m", "rlkit", "serve", "--backend", "toy", "--name", "toy"]
    command += ["--port", "0", "--folder", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        try:
            service = tinker.ServiceClient(base_url=process.stdout.readline().split()[-1], api_key="tml-local")
            training = service.create_lora_training_client("toy").result(timeout=120)
            path = training.save_state("a").result(timeout=120).path
            service.close("success").result(timeout=120)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
    assert path in (tmp_path / "tinker.json").read_text()


def test_a_second_signal_ends_the_command():
    """Though what was begun is not done yet."""
    program = """import threading, time; from rlkit import cli; wait = threading.Event.wait
threading.Event.wait = lambda self: print("ready", flush=True) or wait(self)
cli._wait_for_signal(); time.sleep(600)"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            for said in ("ready", "closing, once what was begun is done"):
                while not process.stdout.readline().startswith(said):
                    assert process.poll() is None
                process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == -signal.SIGTERM
        finally:
            process.kill()


def test_options_on_the_command_line(monkeypatch, capsys):
    """`rlkit serve --option KEY=VALUE`; what is refused is refused with one line and status 2."""
    for arguments, message in (
        ("--backend nothing", "nothing"),
        ("--backend toy --host 0.0.0.0", "give a key="),
        *((f"--backend toy --option {bad}", "--option") for bad in ("idle", "=3", "seed=3")),
    ):
        assert cli.main(["serve", *arguments.split()]) == 2
        error = capsys.readouterr().err
        assert (message in error, error.count("\n")) == (True, 1)
    serve = mock.Mock(side_effect=rlkit.ConfigError("enough"))
    monkeypatch.setattr("rlkit.server.serve", serve)
    cli.main(["serve", "--backend", "toy", "--tokenizer", "here", "--option", "idle=60", "--option", "dtype=bfloat16"])
    assert serve.call_args.args == ("toy",)
    assert {"idle": 60, "dtype": "bfloat16", "tokenizer_id": "here"}.items() <= serve.call_args.kwargs.items()


@for_each(
    ("backend", "options", "message"),
    [
        ("nothing", {}, "nothing"),
        (3, {}, r"serve\(backend\): got 3.* for each client"),  # so is one backend: it cannot serve many clients
        (dict, {}, r"serve\(backend\)"),
        (functools.partial(rlkit.connect, "toy"), {"model": "toy"}, r"serve\(model\)"),
        ("toy", {"names": "toy"}, r"serve\(names\)"),
        ("toy", {"names": [""]}, r"serve\(names\)"),
        ("toy", {"host": None}, r"serve\(host\)"),
        ("toy", {"host": "0.0.0.0"}, "give a key="),  # noqa: S104  # it is refused
        ("toy", {"host": "example.com"}, "give a key="),
        ("toy", {"port": 65536}, r"serve\(port\)"),
        *(("toy", {"key": key}, "tml-") for key in ("secret", "tml-short", 5)),
        ("toy", {"nams": ["toy"]}, "no option 'nams'"),
        ("toy", {"idle": "600"}, "idle: got '600'.*; expected a finite number >= 60"),
        ("toy", {"patience": -1.0}, "patience: got -1"),
        ("toy", {"max_rank": 0}, "max_rank: got 0"),
        ("toy", {"max_samplers": 1.5}, "max_samplers: got 1.5"),
        *(
            ("local", {"model": "x", x: "y"}, f"no option '{x}'.* dtype.* idle")
            for x in ("lora", "init_from", "config")
        ),
    ],
)
def test_bad_arguments(backend, options, message):
    """Raise before a model is made."""
    with pytest.raises(rlkit.RlkitError, match=message):
        rlkit.serve(backend, **options)
