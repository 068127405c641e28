"""benchmarks/cost_model.py: what it says travels is counted where it travels, and what is computed by torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import rlkit
from benchmarks import cost_model
from benchmarks.cost_model import DEVICES, MODELS, Device, Model, Work
from rlkit.backends.samplers import ADAPTER

torch = pytest.importorskip("torch")
httpx = pytest.importorskip("httpx")
pytest.importorskip("transformers", reason="needs the extra local")
Gateway = pytest.importorskip("rlkit.gateway", reason="needs the extra gateway").Gateway


def model_of(config):
    """The cost model's view of a model of transformers, in float32."""
    return Model(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.vocab_size,
        tied=config.tie_word_embeddings,
        width_bytes=4,
    )


class Receives:
    """A sampling engine that keeps what it is sent, and samples nothing."""

    def __init__(self):
        self.adapters = []

    def load_adapter(self, adapter, version):
        self.adapters.append(adapter)

    def sampler(self, version):
        return None if not self.adapters else self.base_sampler()

    def base_sampler(self):
        return rlkit.connect("toy").base_sampler().result()

    def close(self):
        pass


@pytest.mark.parametrize("unembed", [True, False])
def test_an_adapters_bytes(tiny, tmp_path, unembed):
    """The gradient that ranks add up, and the file that each sampler reads, which has names besides: exactly."""
    work = Work(lora_rank=3, unembed=unembed, ranks=2, samplers=2)
    engine = Receives()
    with rlkit.connect(
        "local", model=tiny("llama"), lora=rlkit.Lora(rank=3, train_unembed=unembed), sampler=engine
    ) as policy:
        model = model_of(policy.base.model.config)
        policy.sampler().result()
        norms = sum(p.nbytes for name, p in policy.base.model.named_parameters() if "norm" in name)
        assert model.nbytes == policy.base.nbytes - norms
    moved = cost_model.bytes_moved(model, work)
    (adapter,) = engine.adapters
    numbers = sum(tensor.nbytes for tensor in adapter.tensors.values())
    assert moved["gradient"] == numbers
    assert moved["adapter"] == 2 * numbers
    adapter.save(tmp_path)
    file = (tmp_path / ADAPTER).read_bytes()
    names = 8 + int.from_bytes(file[:8], "little")
    assert len(file) == names + numbers


def test_bytes_between_processes(tiny, monkeypatch):
    """Two ranks, two groups: what is summed and given back, and tensors that go there and come from there."""
    from rlkit.backends.local.distributed import leader, world

    sent, collective = Counter(), Counter()
    pack, receive = world.pack, world._receive

    def packing(part):
        sent[part[0]["order"]] += sum(tensor.nbytes for tensor in part[1])
        return pack(part)

    def receiving(*where):
        part = receive(*where)
        sent["answer"] += sum(tensor.nbytes for tensor in part[1])
        return part

    def counting(name, original):
        def count(tensor, *where, **options):
            collective[name] += tensor.nbytes
            return original(tensor, *where, **options)

        return count

    monkeypatch.setattr(world, "pack", packing)
    monkeypatch.setattr(world, "_receive", receiving)
    for name in ("reduce", "broadcast"):
        monkeypatch.setattr(leader.dist, name, counting(name, getattr(leader.dist, name)))
    work = Work(prompts=2, group=3, prompt=7, completion=5, lora_rank=3, ranks=2)
    data = [
        rlkit.Sample(np.arange(7) + 10 * k, np.arange(5) + 50 * k + g, [-1.0] * 5).datum(1.0)
        for k in (1, 2)
        for g in range(3)
    ]
    lora = rlkit.Lora(rank=3, train_unembed=False)
    with rlkit.connect("local", model=tiny("llama"), lora=lora, device="cpu", processes=2) as policy:
        model = model_of(policy.base.model.config)
        collective.clear()  # of connecting
        policy.forward_backward(data, "importance_sampling").result()
        policy.optim_step(rlkit.Adam()).result()
    moved = cost_model.bytes_moved(model, work)
    assert collective == {"reduce": moved["gradient"], "broadcast": moved["gradient"]}
    assert sent["forward"] == pytest.approx(moved["datums"], rel=0.1)  # the last token of each is not computed
    assert sent["answer"] + sent["backward"] == moved["logprobs"]  # to the loss, and back
    assert sent["answer"] == sent["backward"]


def test_bytes_of_sampling():
    """JSON of a gateway, with the ids of a small vocabulary."""
    work = Work(prompts=1, group=4, prompt=200, completion=50)
    moved = cost_model.bytes_moved(MODELS["7B"], work)
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler, Gateway(sampler) as gateway:
        session = gateway.session(seed=4)
        how = {"n": 4, "logprobs": 0, "max_tokens": 50, "ignore_eos": True, "return_token_ids": True}
        with httpx.Client(base_url=session.root_url) as client:
            answer = client.post("/v1/completions", json={"prompt": [65] * 200, **how}).json()
    compact = lambda value: len(json.dumps(value, separators=(",", ":")))  # noqa: E731
    assert compact([12345] * 200) == pytest.approx(moved["prompts"], rel=0.05)
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == [65] * 200
        choice["prompt_token_ids"] = [12345] * 200
    assert compact(answer) == pytest.approx(moved["samples"], rel=0.1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
def test_operations(tiny):
    """The products of the library's own model with peft's adapters, forward and backward, as torch counts them."""
    import peft
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    base = transformers.AutoModelForCausalLM.from_pretrained(tiny("llama"), attn_implementation="eager")
    model = model_of(base.config)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=list(names)))
    work = Work(prompts=1, group=1, prompt=11, completion=6, lora_rank=3)
    embedded = torch.randn(1, work.computed, model.width, requires_grad=True)

    def products(call):
        with FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops()

    def train():
        adapted(inputs_embeds=embedded, logits_to_keep=work.completion).logits.sum().backward()

    def sample():
        with torch.no_grad(), adapted.disable_adapter():
            adapted(inputs_embeds=embedded, logits_to_keep=work.completion)

    attention = 4 * model.layers * model.heads * model.head_dim * work.computed**2  # which the model leaves out
    expected = cost_model.operations(model, work)
    assert products(train) - 3 * attention == expected["training"]
    assert products(sample) - attention == expected["sampling"]


def test_seconds_against_a_measurement():
    """W of benchmarks/scaling.md on a core with 90 GFLOP/s: 26.2 s and 38.1 s were measured there, 64.3 in all."""
    work = Work(prompts=8, group=8, prompt=58, completion=64, lora_rank=32)
    core = Device(products=90e9, memory=10e9, link=1e9)
    found = cost_model.seconds(MODELS["SmolLM2-135M"], work, core)
    assert 0.5 < found["sampling"] / 26.2 < 1.0  # least is less than measured
    assert 0.5 < found["training"] / 38.1 < 1.0
    assert found["tokens per second"] == pytest.approx(4096 / (found["sampling"] + found["training"]))


def test_what_grows_with_what():
    """Ranks, rank of the adapter, size of the group: each where it should, and nowhere else."""
    model, one = MODELS["7B"], Work()
    moved = cost_model.bytes_moved
    assert all(moved(model, one)[name] == 0 for name in ("gradient", "datums", "logprobs"))
    two, twice = Work(ranks=2), Work(ranks=2, lora_rank=64)
    assert moved(model, twice)["gradient"] == 2 * moved(model, two)["gradient"]
    assert moved(model, twice)["logprobs"] == moved(model, two)["logprobs"]
    larger = Work(ranks=2, group=16)
    assert moved(model, larger)["samples"] == 2 * moved(model, two)["samples"]
    assert moved(model, larger)["prompts"] == moved(model, two)["prompts"]
    assert moved(model, larger)["gradient"] == moved(model, two)["gradient"]
    sharded = Work(ranks=4, gathers=2)
    assert moved(model, sharded)["weights, received by each rank"] == 3 * model.nbytes


def test_the_pages_tables():
    """What docs/how-to/scale.md says of an H100 is what comes out."""
    text = (Path(__file__).parents[1] / "docs" / "how-to" / "scale.md").read_text("utf-8")
    for name in ("0.6B", "7B", "32B"):
        (row,) = re.findall(rf"^\| {re.escape(name)}: sampling \+ training \| (.*) \|$", text, re.MULTILINE)
        found = [cost_model.seconds(MODELS[name], Work(ranks=n, samplers=n), DEVICES["H100"]) for n in (1, 2, 4, 8)]
        assert row.split(" | ") == [f"{each['sampling']:.1f} + {each['training']:.1f}" for each in found]
    moved = cost_model.bytes_moved(MODELS["7B"], Work(ranks=8, samplers=8, gathers=1))
    sizes = {
        "gradient of the adapter": f"{2 * moved['gradient'] / 1e6:.0f} MB",
        "datums to the other ranks": f"{moved['datums'] / 1e6:.1f} MB",
        "logprobs to the loss": f"{moved['logprobs'] / 1e6:.1f} MB",
        "the adapter, to each sampler": f"{moved['adapter'] / 8 / 1e6:.0f} MB",
        "prompts to samplers": f"{(moved['prompts'] + moved['samples']) / 1e6:.0f} MB",
        "sharded weights": f"{moved['weights, received by each rank'] / 1e9:.1f} GB",
    }
    for beginning, size in sizes.items():
        (row,) = re.findall(rf"^\| {beginning}.*\| (.*) \|$", text, re.MULTILINE)
        assert row == size
