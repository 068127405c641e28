"""Weights to download, by the SDK and by its command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import rlkit
from rlkit.server import ExactModels, serve
from tests.server.sdk import datum, prompt

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")
from tinker import types  # noqa: E402

KEY = "tml-right-key-1"


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    with rlkit.serve("local", model=tiny("llama"), folder=folder, key=KEY, seed=0) as server:
        yield server


@pytest.fixture
def training(server):
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    training = service.create_lora_training_client(server.names[0], rank=4, seed=1).result()
    training.forward_backward([datum([5, 6, 7, 8], weights=1.0)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    yield training
    service.close("success").result()


def read(url):
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310  # of the server above
        return answer.read()


def refused(url):
    with pytest.raises(urllib.error.HTTPError) as error:
        read(url)
    error.value.close()
    return error.value.code


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers for it
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")  # meant, and saved as it is trained
def test_the_adapter_is_the_policy(server, training, tiny, tmp_path):
    """In peft's format: loaded by peft, it gives the policy's logprobs."""
    import peft
    import torch
    import transformers

    path = training.save_weights_external("mine").result().path
    assert path == f"tinker://{training.model_id}/external_weights/mine"
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    found = rest.get_external_weights_urls(path).result()
    assert set(found.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    for name, url in found.urls.items():
        (tmp_path / name).write_bytes(read(url))
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()
    tokens = [5, 6, 7, 8]
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [float(logprobs[i, t]) for i, t in enumerate(tokens[1:])]
    scored = training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt(tokens)).result()
    assert scored[1:] == pytest.approx(expected, abs=1e-4)
    kinds = [c.checkpoint_type for c in rest.list_checkpoints(training.model_id).result().checkpoints]
    assert kinds == ["external"]
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    with pytest.raises(tinker.BadRequestError, match="saved for download"):
        service.create_training_client_from_state(path).result()
    service.close("success").result()


def test_addresses_are_signed(server, training, monkeypatch):
    """They need no key, are good for one file and for an hour; with anything changed they are refused."""
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    path = training.save_weights_external("signed").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    url, other = urls["adapter_config.json"], urls["adapter_model.safetensors"]
    assert json.loads(read(url))["r"] == 4
    assert refused(url.replace("signature=", "signature=0")) == 401  # no key, and not signed
    assert refused(url.replace("adapter_config.json", "adapter_model.safetensors")) == 401
    assert refused(url.replace("expires=1", "expires=2")) == 401
    assert refused(url.partition("?")[0]) == 401
    for bad in ("..%2fstate.json", "state.json", "%2e%2e/%2e%2e/tinker.json"):
        assert refused(url.replace("adapter_config.json", bad)) == 401
    with_key = urllib.request.Request(url.partition("?")[0], headers={"x-api-key": KEY})  # noqa: S310
    with pytest.raises(urllib.error.HTTPError, match="403") as error:
        urllib.request.urlopen(with_key, timeout=60)  # noqa: S310
    error.value.close()
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr("rlkit.server._storage.time.time", lambda: now + 4000)
        assert refused(other) == 401
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert refused(other) == 404


def test_the_command_line(server, training, tmp_path):
    """`tinker checkpoint download` of a state that was saved to train from; what it exports for that is gone after."""
    path = training.save_state("state").result().path
    command = [str(Path(sys.executable).with_name("tinker")), "checkpoint", "download", path, "--output", str(tmp_path)]
    if not Path(command[0]).exists():
        command[:1] = [sys.executable, "-m", "tinker.cli"]
    environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    left = [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    assert not [x for x in left if x.endswith("/download")]


def test_nothing_is_encrypted():
    """Who asks for it is refused, and the client goes on."""
    with serve(ExactModels(), names=["toy"]) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-x")
        training = service.create_lora_training_client("toy").result()
        with pytest.raises(tinker.BadRequestError, match="does not encrypt"):
            training.save_weights_external("b", age_encryption_recipients=["age1x"]).result()
        path = training.save_weights_external("c").result().path
        rest = tinker.RestClient(base_url=server.url, api_key="tml-x")
        assert rest.get_external_weights_urls(path).result().urls.keys() == {"toy.npz"}
        service.close("success").result()
