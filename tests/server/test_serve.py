"""``rlkit.serve``, and programs for the plain SDK that know nothing of rlkit on it, over a model of two layers."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import rlkit
from tests.each import for_each
from tests.server.sdk import datum, prompt

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")
from tinker import types  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples" / "plain_sdk"


def program(name):
    """``main`` of one of the examples."""
    spec = importlib.util.spec_from_file_location(f"plain_sdk_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if "import rlkit" in line]
    return module.main


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saves")
    with rlkit.serve("local", model=tiny("llama"), folder=folder, seed=0) as server:
        yield server


@pytest.fixture
def service(server):
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    yield client
    client.close("success").result(timeout=30)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers for it
def test_programs_at_once(server, monkeypatch):
    """Supervised, GRPO, resume and a loss of one's own, four clients at the same time: each learns its own."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    name = server.names[0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        supervised = pool.submit(program("supervised"), [name])
        grpo = pool.submit(program("grpo"), [name])
        resume = pool.submit(program("resume"), [name])
        custom = pool.submit(program("custom_loss"), [name, "--steps", "5"])
        losses, said = supervised.result()
        rewards = grpo.result()
        whole, again = resume.result()
        margins = custom.result()
    assert losses[-1] < 0.25 * losses[0]
    assert said.startswith(" on")
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert again == whole
    assert whole[-1] < 0.5 * whole[0]
    assert margins[0] == pytest.approx(0.0, abs=1e-5)
    assert margins == sorted(margins)
    assert margins[-1] > 2.0


def test_names(server, service, tiny):
    """Clients name the model by its folder or by the last part of it, and no other."""
    folder = tiny("llama")
    assert server.names == (Path(folder).name, folder)
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    listed = rest.get_server_capabilities().result().supported_models
    assert [model.model_name for model in listed] == list(server.names)
    training = service.create_lora_training_client(folder, rank=2).result()
    assert training.get_tokenizer().encode("hello 12", add_special_tokens=False)
    with pytest.raises(tinker.BadRequestError, match=Path(folder).name):
        service.create_lora_training_client("meta/other", rank=2).result()


def test_what_a_local_backend_cannot_give(server, service):
    """Is refused by name, and the client goes on."""
    training = service.create_lora_training_client(server.names[0], rank=2).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    one = types.SamplingParams(max_tokens=1)
    found = sampler.sample(prompt([5, 6]), 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=300).result()
    assert len(dict(found.topk_prompt_logprobs[1])) > 100  # as many as the vocabulary has
    assert dict(found.topk_prompt_logprobs[1])[6] == pytest.approx(found.prompt_logprobs[1], abs=1e-5)
    training.optim_step(types.AdamParams()).result()  # without a gradient it is zero
    training.forward_backward([datum([5, 6, 7], weights=1.0)], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="accumulated"):
        training.save_state("pending").result()
    training.optim_step(types.AdamParams()).result()
    training.save_state("done").result()


@for_each(
    ("backend", "options", "message"),
    [
        ("nothing", {}, "nothing"),
        (3, {}, r"serve\(backend\): got 3"),
        ("toy", {"names": "toy"}, r"serve\(names\)"),
        ("toy", {"names": [""]}, r"serve\(names\)"),
        ("toy", {"host": None}, r"serve\(host\)"),
        ("toy", {"port": 65536}, r"serve\(port\)"),
        ("toy", {"nams": ["toy"]}, "no option 'nams'"),
        ("toy", {"idle": "600"}, "idle: got '600'.*; expected a finite number > 0"),
        ("toy", {"patience": -1.0}, "patience: got -1"),
        ("toy", {"max_rank": 0}, "max_rank: got 0"),
        ("toy", {"max_samplers": 1.5}, "max_samplers: got 1.5"),
        (functools.partial(rlkit.connect, "toy"), {"model": "toy"}, r"serve\(model\)"),
    ],
)
def test_bad_arguments(backend, options, message):
    """Raise before a model is made."""
    with pytest.raises(rlkit.RlkitError, match=message):
        rlkit.serve(backend, **options)


def test_options_of_the_backend_and_of_the_service(tiny, tmp_path):
    """Each goes where it belongs; what neither has is refused with what there is."""
    options = {"dtype": "bfloat16", "device": "cpu", "micro_batch_tokens": 64, "idle": 7.0, "max_rank": 2}
    with rlkit.serve("local", model=tiny("llama"), folder=tmp_path, **options) as server:
        service = server.service
        assert (service.idle, service.max_rank) == (7.0, 2)
        backend = service.models._base
        assert str(backend.base.model.dtype) == "torch.bfloat16"
        assert backend._settings["micro_batch_tokens"] == 64
    for name in ("lora", "init_from", "dtyp", "config"):
        with pytest.raises(rlkit.ConfigError, match=rf"no option '{name}'.* dtype.* idle"):
            rlkit.serve("local", model="x", **{name: "y"})


def test_options_on_the_command_line(monkeypatch, capsys):
    """`rlkit serve --option KEY=VALUE`."""
    from rlkit import cli

    seen = {}

    def serve(backend, **options):
        seen.update(options, backend=backend)
        raise rlkit.ConfigError("enough")

    monkeypatch.setattr("rlkit.server.serve", serve)
    arguments = ["serve", "--backend", "toy", "--tokenizer", "here"]
    assert cli.main([*arguments, "--option", "idle=60", "--option", "dtype=bfloat16"]) == 2
    assert (seen["idle"], seen["dtype"], seen["tokenizer_id"], seen["backend"]) == (60, "bfloat16", "here", "toy")
    for bad in ("idle", "=3", "seed=3"):
        assert cli.main([*arguments, "--option", bad]) == 2
        assert "--option" in capsys.readouterr().err


def test_the_loss_that_is_not_published(server, service):
    """Is refused with what to use instead, where a client first shows that it wants it, and the client goes on."""
    training = service.create_lora_training_client(server.names[0], rank=2).result()
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
    with pytest.raises(tinker.BadRequestError, match="loss_fn='importance_sampling'.*tinker-cookbook"):
        sampler.sample(prompt([5, 6]), 1, types.SamplingParams(max_tokens=1)).result()
    data = [datum([5, 6, 7], logprobs=-1.0, advantages=1.0)]
    with pytest.raises(tinker.BadRequestError, match="only the hosted service has it"):
        training.forward_backward(data, "stable_reinforce").result()
    training.forward_backward(data, "importance_sampling").result()


def test_a_backend_is_not_a_function_that_makes_them():
    """One backend cannot serve many clients."""
    with rlkit.connect("toy") as policy, pytest.raises(rlkit.ConfigError, match="for each client"):
        rlkit.serve(policy)
