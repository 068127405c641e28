"""Which base a policy is on, which modules it adapts, and that its sampler is the policy in bfloat16 too."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import rlkit

pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from rlkit.backends.early import device_of  # noqa: E402
from rlkit.backends.local.model.base import load_base  # noqa: E402
from rlkit.backends.local.model.lora import lora_targets  # noqa: E402
from rlkit.backends.local.model.probe import is_causal  # noqa: E402
from tests.models.families import FAMILIES  # noqa: E402
from tests.models.family import build  # noqa: E402

SMALL = rlkit.Adam(learning_rate=1e-5)


def connect(model, **options):
    return rlkit.connect(
        "local", model=model, **{"seed": 0, "lora": rlkit.Lora(rank=4, train_unembed=True), "device": "cpu", **options}
    )


def copied(source, folder):
    """A copy of a model with its time of change, as tools that mirror folders make it."""
    return Path(shutil.copytree(source, folder, dirs_exist_ok=True))


def rewrite(folder, factor=2.0):
    """Other weights in the same files, of the same size."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(factor)
    model.save_pretrained(folder)


def slope(policy, steps):
    """How much of the trainer's change in logprobs the sampler shows after so many small steps: 1 is all of it."""
    rng = np.random.default_rng(0)
    data = [rlkit.Datum.supervised(rng.integers(3, 200, 5), rng.integers(3, 200, 60)) for _ in range(4)]

    def logprobs():
        trainer = np.concatenate(policy.forward(data).result().selected)
        sampler = policy.sampler().result()
        return trainer, np.concatenate([sampler.logprobs(d.tokens).result()[d.mask] for d in data])

    before = logprobs()
    for _ in range(steps):
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(SMALL).result()
    trainer, sampler = (after - first for after, first in zip(logprobs(), before, strict=True))
    return float(trainer @ sampler / (trainer @ trainer))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_small_step_reaches_the_sampler_in_bfloat16(tiny, kind, steps):
    """At a learning rate of 1e-5 the sampler is the policy, though such a step is lost in a bfloat16 weight."""
    with connect(tiny(kind), dtype="bfloat16") as policy:
        assert abs(slope(policy, steps) - 1) < 1e-3
    with connect(tiny(kind), dtype="bfloat16", merge=True) as merged:
        assert abs(slope(merged, steps) - 1) > 0.05  # what the default is chosen for
    with connect(tiny(kind)) as exact:
        assert exact._settings["merge"]
        assert abs(slope(exact, steps) - 1) < 0.02


def test_a_model_that_was_rewritten_is_read_again(tiny, tmp_path):
    """The base is what is on disk now, also while a backend has what was there before."""
    folder = copied(tiny("llama"), tmp_path / "model")
    tokens = np.arange(3, 20)
    with connect(folder) as old:
        before = old.base_sampler().result().logprobs(tokens).result()
        rewrite(folder)
        with connect(folder) as new:
            assert new.base is not old.base
            fresh = new.base_sampler().result().logprobs(tokens).result()
        assert np.abs(fresh - before).max() > 1e-3
        assert np.array_equal(old.base_sampler().result().logprobs(tokens).result(), before)
    weights = folder / "model.safetensors"
    with connect(folder) as one:
        os.utime(weights, ns=(1, 1))
        with connect(folder) as two:
            assert two.base is not one.base  # of equal size, so only the time tells


def test_a_relative_path_is_one_model_per_working_directory(tiny, tmp_path, monkeypatch):
    """``model="model"`` is the directory that it names here and now; a save keeps where that was."""
    folders = [copied(tiny("llama"), tmp_path / name / "model") for name in ("a", "b")]
    rewrite(folders[1])
    monkeypatch.chdir(tmp_path / "a")
    with connect("model", folder=tmp_path / "saves") as a:
        path = a.save("x").result()
        monkeypatch.chdir(tmp_path / "b")
        with connect("model") as b, connect(str(tmp_path / "b" / "model")) as same:
            assert b.base is not a.base
            assert b.base is same.base
        with rlkit.connect("local", resume_from=path, device="cpu") as resumed:
            assert resumed.base is a.base
    assert json.loads((Path(path) / "state.json").read_text("utf-8"))["model"] == str(tmp_path / "a" / "model")


@pytest.mark.filterwarnings("ignore:CUDA reports that you have 2 available devices")  # torch believes the patch
def test_a_model_is_read_straight_to_its_device(tiny, monkeypatch):
    """Not to the CPU first, which needs the memory twice and takes the time twice."""
    asked, model = [], tiny("llama")  # made before torch believes in GPUs

    class Seen(Exception):
        pass

    def from_pretrained(path, **options):
        asked.append(options["device_map"])
        raise Seen

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(rlkit.ConfigError, match="Seen"):
        load_base(model, "float32", "cuda:1")
    assert asked == [{"": torch.device("cuda:1")}]


def test_a_device_has_one_name(tiny, monkeypatch):
    """ "cpu" and "cpu:0" are one base; "cuda" is the current one of them."""
    base = load_base(tiny("llama"), "float32", "cpu")
    assert load_base(tiny("llama"), "float32", "cpu:0") is base
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device_of("cuda") == device_of("cuda:3") == device_of(None) != device_of("cuda:0")
    assert device_of("mps") == device_of("mps:0")


@pytest.mark.parametrize("device", ["cuda", "cuda:9", "mps", "meta", "cpu:1", "tpu", ""])
def test_a_device_that_is_not_there(tiny, device):
    """It is what the error names, not the model."""
    with pytest.raises(rlkit.ConfigError, match="^device: got "):
        rlkit.connect("local", model=tiny("llama"), device=device)


@pytest.mark.parametrize("damage", ["no weights", "bad config", "unknown type", "no tokenizer", "an encoder"])
def test_a_model_that_cannot_be_loaded(tiny, tmp_path, damage):
    """Whatever a library raises is a ConfigError that says which model and why."""
    folder = copied(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "bad config":
        (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}), "utf-8")
    elif damage == "unknown type":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_thing"}), "utf-8")
    elif damage == "no tokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
    else:
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
        bert = transformers.BertConfig(**shape, vocab_size=config["vocab_size"], is_decoder=False)
        transformers.BertLMHeadModel(bert).save_pretrained(folder)
    with pytest.raises(rlkit.ConfigError, match="model") as caught:
        connect(folder)
    assert str(folder) in str(caught.value)


def test_target_modules_by_short_and_full_name(tiny):
    """A name is the end of a path, at a dot; each has to be there; a module of no effect is none."""
    base = load_base(tiny("llama"), "float32", "cpu")
    full = "model.layers.1.self_attn.q_proj"
    assert lora_targets(base, rlkit.Lora(target_modules=(full,))) == [full]
    assert lora_targets(base, rlkit.Lora(target_modules=("self_attn.q_proj",)))[1] == full
    with pytest.raises(rlkit.ConfigError, match="no such linear module; did you mean 'q_proj'"):
        lora_targets(base, rlkit.Lora(target_modules=("attn.q_proj",)))
    mamba = load_base(tiny("mamba"), "float32", "cpu")
    assert not any(name.endswith("dt_proj") for name in lora_targets(mamba, rlkit.Lora()))
    with pytest.raises(rlkit.ConfigError, match=r"dt_proj.*has no effect"):
        lora_targets(mamba, rlkit.Lora(target_modules=("in_proj", "dt_proj")))


def test_experts_without_adapters(tiny):
    """They are told of once, and asking for the MLP alone is answered with the reason."""
    with pytest.warns(UserWarning, match="mixtral model: its experts get no adapter; the trained modules are k_proj"):
        policy = connect(tiny("mixtral"))
    path = policy.save("x").result()
    policy.close()
    rlkit.connect("local", resume_from=path, device="cpu").close()  # without a second warning
    with pytest.raises(rlkit.UnsupportedError, match="its experts are stacked parameters"):
        connect(tiny("mixtral"), lora=rlkit.Lora(train_attn=False, train_unembed=False))
    with pytest.raises(rlkit.ConfigError, match="has no effect|no such linear module"):
        connect(tiny("mixtral"), lora=rlkit.Lora(target_modules=("gate_up_proj",)))


@pytest.mark.parametrize(
    "lora",
    [
        rlkit.Lora(train_attn=False, train_unembed=False),
        rlkit.Lora(target_modules=("gate_proj", "up_proj", "down_proj")),
        rlkit.Lora(target_modules=("model.layers.0.mlp.down_proj",)),
        rlkit.Lora(target_modules=("o_proj", "gate_proj")),
    ],
)
def test_names_that_peft_takes_for_experts(tmp_path, lora):
    """Dense layers that peft cannot adapt without touching the experts are refused when they are asked for."""
    folder = build(FAMILIES["deepseek_v3"], tmp_path)
    with pytest.raises(rlkit.ConfigError, match="deepseek_v3.*(with its experts|Cannot convert)"):
        connect(str(folder), lora=lora)
    with pytest.raises(rlkit.ConfigError, match="TopkRouter.*has no effect"):
        connect(str(folder), lora=rlkit.Lora(target_modules=("mlp.gate",)))


def test_a_router_is_adapted_only_by_name(tmp_path):
    """By default it is left as it is; one that is a plain linear module may be named."""
    base = load_base(str(build(FAMILIES["qwen2_moe"], tmp_path)), "float32", "cpu")
    router = [name for name in base.linear if name.endswith("shared_expert_gate")]
    assert router
    assert not set(router) & set(lora_targets(base, rlkit.Lora()))
    assert sorted(lora_targets(base, rlkit.Lora(target_modules=("shared_expert_gate",)))) == sorted(router)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_depends_on_other_tokens_is_seen(tiny, dtype):
    """On later ones of its row, or on those of another."""
    base = load_base(tiny("llama"), dtype, "cpu")
    for dim, causal in ((None, True), (1, False), (0, False)):
        model = base.tree()
        if dim is not None:
            model.lm_head.register_forward_pre_hook(lambda _, x, dim=dim: (x[0] + 9 * x[0].mean(dim, keepdim=True),))
        assert is_causal(model, base.text) == causal
