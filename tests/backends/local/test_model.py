"""The local backend's own promises: adapters, tied heads, one base, one merged copy, batching."""

from __future__ import annotations

import concurrent.futures
import gc
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import attrs
import numpy as np
import pytest

import rlkit

pytest.importorskip("peft")
from rlkit.backends.early import SMOLLM2
from rlkit.backends.local.export import save_merged
from rlkit.backends.local.model import forward, output_head
from tests.backends.local import white_box

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def test_an_adapter_names_a_base_that_other_libraries_load(tiny, tmp_path, monkeypatch, capfd):
    """Where the model lies, from any working directory, for a name that rlkit alone knows too; loading shows no bar."""
    folder = shutil.copytree(tiny("qwen2"), tmp_path / "qwen2")
    monkeypatch.setattr("rlkit.backends.local.model.base.model_path", lambda model: "qwen2")
    monkeypatch.chdir(tmp_path)
    with rlkit.connect("local", model=SMOLLM2, lora=rlkit.Lora(rank=2), device="cpu", folder=tmp_path) as policy:
        path = policy.save("a").result()
    said = json.loads((Path(path) / "adapter_config.json").read_text("utf-8"))
    assert said["base_model_name_or_path"] == str(folder)
    assert "Loading" not in capfd.readouterr().err


PARAMS = rlkit.SamplingParams(max_tokens=8, stop=())
STEP = rlkit.Adam(learning_rate=0.02)


@pytest.fixture
def connect(tiny, tmp_path):
    made = []

    def make(kind="llama", **options):
        lora = rlkit.Lora(rank=4, train_unembed=True)  # a tied head too, which is the harder case
        options = {"seed": 0, "lora": lora, "device": "cpu", "folder": tmp_path, **options}
        if {"resume_from", "init_from"} & options.keys():
            options.pop("lora")
        made.append(rlkit.connect("local", model=tiny(kind), **options))
        return made[-1]

    yield make
    for policy in made:
        policy.close()


def train(policy, steps=2):
    """A few steps on fixed data; returns it."""
    rng = np.random.default_rng(0)
    data = []
    for k in range(4):
        datum = rlkit.Datum.supervised(rng.integers(3, 200, 4 + k), rng.integers(3, 200, 5))
        data.append(datum.with_inputs(weights=1.0))
    for _ in range(steps):
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(STEP)
    return data


def score(model, tokens):
    """float32 [T - 1]: logprobs of tokens[1:] by the model's own forward."""
    tokens = torch.from_numpy(np.array(tokens))
    with torch.no_grad():
        logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0].numpy()


def digest(model):
    """SHA-256 over every parameter and buffer."""
    total = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        total.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")  # the adapter is on the head alone
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")  # peft finds it out by itself
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral"])
def test_saved_adapter_is_pefts_own(connect, kind):
    """PeftModel.from_pretrained on a fresh base gives the logprobs of the trained policy, tied heads included."""
    policy = connect(kind)
    data = train(policy)
    path = policy.save("adapter").result()
    base = transformers.AutoModelForCausalLM.from_pretrained(policy.base.path)
    model = peft.PeftModel.from_pretrained(base, path).eval()
    expected = policy.forward(data).result().logprobs
    for datum, lp in zip(data, expected, strict=True):
        assert np.abs(score(model, datum.tokens) - lp[1:])[datum.mask[1:]].max() < 1e-5


@pytest.mark.filterwarnings("error:Model has .tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_the_default_adapter_is_one_that_peft_merges(connect):
    """``merge_and_unload`` gives the policy's logprobs, with a tied head (llama, gpt2, gemma2) and an own (qwen3)."""
    for kind, head in (("llama", False), ("gpt2", False), ("gemma2", False), ("qwen3", True)):
        policy = connect(kind, lora=rlkit.Lora(rank=4))
        data = train(policy)
        path = policy.save("adapter").result()
        base = transformers.AutoModelForCausalLM.from_pretrained(policy.base.path, attn_implementation="eager")
        model = peft.PeftModel.from_pretrained(base, path).merge_and_unload().eval()
        for datum, lp in zip(data, policy.forward(data).result().logprobs, strict=True):
            assert np.abs(score(model, datum.tokens) - lp[1:])[datum.mask[1:]].max() < 1e-4, kind
        state = json.loads((Path(path) / "state.json").read_text("utf-8"))
        config = json.loads((Path(path) / "adapter_config.json").read_text("utf-8"))
        assert state["lora"]["train_unembed"] is head, kind
        assert ("lm_head" in config["target_modules"]) is head, kind
        assert (" on attention + MLP + output head," in repr(policy)) is head, repr(policy)


def test_a_saved_adapter_keeps_its_head(connect, tiny, tmp_path):
    """Whatever the default means on the model; a contradiction is refused."""
    options = {"device": "cpu", "folder": tmp_path, "model": tiny("llama")}
    for head, other in ((True, False), (False, True)):
        path = connect(lora=rlkit.Lora(rank=4, train_unembed=head)).save("x").result()
        for lora in (None, rlkit.Lora(rank=4), rlkit.Lora(rank=4, train_unembed=head)):
            with rlkit.connect("local", resume_from=path, lora=lora, **options) as policy:
                assert any("lm_head" in name for name in policy._trainer.parameters) is head
        with pytest.raises(rlkit.ConfigError, match="contradicts the saved adapter"):
            rlkit.connect("local", resume_from=path, lora=rlkit.Lora(rank=4, train_unembed=other), **options)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_merged_export(connect, tmp_path, kind):
    """The exported model alone gives the policy's logprobs; a tied head is untied, the embedding unchanged."""
    policy = connect(kind)
    data = train(policy)
    path = policy.save("x").result()
    folder = save_merged(path, str(tmp_path / "merged"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for datum, lp in zip(data, policy.forward(data).result().logprobs, strict=True):
        assert np.abs(score(model, datum.tokens) - lp[1:])[datum.mask[1:]].max() < 1e-5
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding, policy.base.model.get_input_embeddings().weight)
    assert not torch.equal(embedding, model.get_output_embeddings().weight)
    with pytest.raises(rlkit.CheckpointError, match="exists"):
        save_merged(path, folder)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_base_is_not_written(connect, kind):
    """Training, merging, sampling and saving leave every base tensor as it was, the tied embedding included."""
    policy = connect(kind)
    before = digest(policy.base.model)
    for _ in range(3):
        train(policy, 1)
        with policy.sampler().result() as sampler:
            sampler.sample([5, 6], PARAMS, n=3).result()
        policy.save("x").result()
    assert digest(policy.base.model) == before


def held_by_the_base(policy, weights):
    """Whether all are its own memory, or the prepacked copy that whoever samples shares."""
    own = {p.untyped_storage().data_ptr() for p in policy.base.model.parameters()}
    shared = {id(copy) for _, copy in policy.base.copies._copies.values()}
    read = [x for part in weights.values() for x in part]
    return all(id(x) in shared or (torch.is_tensor(x) and x.untyped_storage().data_ptr() in own) for x in read)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral", "bloom"])
def test_merged_and_unmerged_agree(connect, kind):
    """Merging changes how an adapter is applied, not what it does; a closed sampler's copy makes room for the next."""
    merged, unmerged = connect(kind, merge=True), connect(kind, merge=False)
    for policy in (merged, unmerged):
        train(policy)
    tokens = np.arange(3, 23)
    samplers = [p.sampler().result() for p in (merged, unmerged)]
    a, b = (sampler.logprobs(tokens).result() for sampler in samplers)
    assert np.abs(a - b).max() < 1e-4
    assert not held_by_the_base(merged, white_box.weights(merged))
    held = [weakref.ref(x) for part in white_box.weights(merged).values() for x in part]
    while samplers:
        samplers.pop().close()
    gc.collect()
    base = merged.base_sampler().result().logprobs(tokens).result()
    kept = {id(x) for x in merged.base.model.parameters()}
    assert all(ref() is None or id(ref()) in kept for ref in held)
    unmerged.base_sampler().result().logprobs(tokens).result()
    assert held_by_the_base(unmerged, white_box.weights(unmerged))
    assert np.abs(base - a).max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "mistral", "bloom"])
def test_the_merged_copy_follows_what_is_sampled(connect, kind):
    """Base, policy, base, a later policy: each sampler has its own weights, whichever was merged before."""
    policy = connect(kind, merge=True)
    tokens = np.arange(3, 23)
    datum = rlkit.Datum.supervised(tokens[:1], tokens[1:])
    base = policy.base_sampler().result()
    seen = [base.logprobs(tokens).result()]
    for _ in range(2):
        train(policy)
        expected = policy.forward([datum]).result().logprobs[0]
        found = policy.sampler().result().logprobs(tokens).result()
        assert np.abs(found - expected).max() < 1e-4
        assert np.abs(found - seen[-1]).max() > 1e-3
        seen.append(found)
        assert np.array_equal(base.logprobs(tokens).result(), seen[0])


def test_lora_options_choose_modules(connect):
    """The three flags pick attention, MLP and head; target_modules names modules; nothing found is an error."""

    def targets(**options):
        return {n.split(".lora_A")[0].rpartition(".")[2] for n in names(connect(lora=rlkit.Lora(rank=2, **options)))}

    def names(policy):
        return [n for n in policy._trainer.parameters if "lora_A" in n]

    attention, mlp, head = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}, {"lm_head"}
    assert targets() == attention | mlp  # its head is tied
    assert targets(train_unembed=True) == attention | mlp | head
    assert targets(train_mlp=False, train_unembed=False) == attention
    assert targets(train_attn=False, train_unembed=False) == mlp
    assert targets(train_attn=False, train_mlp=False, train_unembed=True) == head
    with pytest.raises(rlkit.ConfigError, match="ties to its embedding; expected train_unembed=True"):
        targets(train_attn=False, train_mlp=False)
    assert targets(target_modules=("q_proj",)) == {"q_proj"}
    assert targets(target_modules="all-linear") == attention | mlp
    assert targets(target_modules="all-linear", train_unembed=True) == attention | mlp | head
    with pytest.raises(rlkit.ConfigError, match=r"lora.rank: is 1000000000; expected at most \d+ "):
        connect(lora=rlkit.Lora(rank=10**9, train_unembed=True))
    for unknown, close in (("q_prj", "q_proj"), ("nothing", "it has"), ("model.layers.0.mlp", "LlamaMLP")):
        with pytest.raises(rlkit.ConfigError, match=close):
            connect(lora=rlkit.Lora(target_modules=("v_proj", unknown)))  # no name is dropped beside one that exists


def test_adapter_start(connect):
    """B is zero, A uniform in +-1/sqrt(d_in) from the seed; another seed gives another A; a new policy is the base."""
    a, b, c = connect(), connect(), connect(seed=1)
    first = {n: p.detach().clone() for n, p in a._trainer.parameters.items()}
    for name, tensor in first.items():
        assert torch.equal(tensor, b._trainer.parameters[name])
        if "lora_A" in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound
            assert not torch.equal(tensor, c._trainer.parameters[name])
        else:
            assert not tensor.any()
    tokens = np.arange(3, 20)
    assert np.array_equal(*(s.result().logprobs(tokens).result() for s in (a.sampler(), a.base_sampler())))


def test_global_randomness_is_untouched(connect):
    """Connecting, sampling and training leave the random states of torch and numpy as they were."""
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  # the global state is what is looked at
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    policy = connect()
    train(policy)
    policy.sampler().result().sample([5], PARAMS, n=2).result()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002


def test_concurrent_requests_are_batched(connect):
    """Requests made together share decode steps: 16 single ones take about as many forwards as one of 16."""
    policy = connect()
    sampler = policy.sampler().result()
    sampler.sample([5, 6, 7], PARAMS).result()
    calls = count_forwards(policy)
    alone = sampler.sample([5, 6, 7], PARAMS, n=16, seed=0).result()
    one_request, calls[0] = calls[0], 0
    futures = [sampler.sample([5, 6, 7], PARAMS, seed=k) for k in range(16)]
    for future in futures:
        future.result()
    assert len(alone) == 16
    assert one_request == 8  # the prompt once, and 7 steps after the token it gives
    assert calls[0] < 2 * one_request + 16


def test_prompt_is_computed_once(connect):
    """Equal prompts are computed once, and of prompts that begin alike their common blocks are."""
    policy = connect()
    sampler = policy.sampler().result()
    sampler.sample([5], PARAMS).result()
    prompt = np.arange(3, 43)
    seen = []
    decoder = white_box.decoder(policy)
    inner = decoder.prefill
    decoder.prefill = lambda first, rests, starts: (
        seen.append([rest.size for rest in rests]) or inner(first, rests, starts)
    )
    futures = [sampler.sample(p, PARAMS, n=4, seed=0) for p in (prompt, np.append(prompt, 7), prompt)]
    first = [f.result() for f in futures]
    assert seen == [[40], [9]]
    again = sampler.sample(np.append(prompt, 7), PARAMS, n=4, seed=0).result()
    assert seen[2:] == [[9]]
    cold = connect(prefix_mb=0).sampler().result().sample(np.append(prompt, 7), PARAMS, n=4, seed=0).result()
    assert [s.logprobs.tobytes() for s in cold] == [s.logprobs.tobytes() for s in first[1]]
    assert [s.logprobs.tobytes() for s in cold] == [s.logprobs.tobytes() for s in again]


def test_finished_rows_leave(connect):
    """A row that has ended is not decoded further, and its place is filled by a waiting one."""
    policy = connect(max_rows=4)
    sampler = policy.sampler().result()
    short, long = rlkit.SamplingParams(max_tokens=1, stop=()), rlkit.SamplingParams(max_tokens=30, stop=())
    futures = [sampler.sample([5, 6], long, n=2, seed=0)]
    futures += [sampler.sample([7, 8, 9], short, n=3, seed=k) for k in range(6)]
    futures += [sampler.sample([4, 3], PARAMS, n=11, seed=9)]
    results = [f.result() for f in futures]
    assert [len(r) for r in results] == [2, *[3] * 6, 11]
    assert all(s.tokens.size == 30 for s in results[0])
    wide = connect(max_rows=64).sampler().result().sample([4, 3], PARAMS, n=11, seed=9).result()
    assert [s.tokens.tolist() for s in wide] == [s.tokens.tolist() for s in results[-1]]


def test_snapshots_take_turns(connect):
    """Requests for two snapshots and the base, mixed, are all answered, each by its own weights."""
    policy = connect()
    samplers = [policy.base_sampler().result(), policy.sampler().result()]
    train(policy)
    samplers.append(policy.sampler().result())
    tokens = np.arange(3, 15)
    expected = [s.logprobs(tokens).result() for s in samplers]
    futures = [(k, samplers[k].logprobs(tokens), samplers[k].sample(tokens, PARAMS, n=2)) for k in [0, 1, 2] * 4]
    for k, scored, sampled in futures:
        assert np.array_equal(scored.result(), expected[k])
        assert sampled.result()[0].version == samplers[k].version
    assert np.abs(expected[2] - expected[0]).max() > 1e-3


def test_sampling_goes_on_during_training(connect):
    """A long sample and a long gradient, submitted together, are both finished, and do not disturb each other."""
    policy, other = connect(micro_batch_tokens=8), connect(micro_batch_tokens=8)
    sampler = policy.sampler().result()
    long = rlkit.SamplingParams(max_tokens=60, stop=())
    expected = sampler.sample([5, 6], long, n=4, seed=0).result()
    future = sampler.sample([5, 6], long, n=4, seed=0)
    data = train(policy, 3)
    assert [s.logprobs.tobytes() for s in future.result()] == [s.logprobs.tobytes() for s in expected]
    train(other, 3)
    for a, b in zip(policy.forward(data).result().logprobs, other.forward(data).result().logprobs, strict=True):
        assert np.array_equal(a, b)


def test_snapshots_share_one_copy(connect):
    """Samplers between two steps hold the same adapter; it is freed when they are forgotten."""
    policy = connect()
    a, b = policy.sampler().result(), policy.sampler().result()
    assert a._snapshot is b._snapshot
    train(policy, 1)
    assert policy.sampler().result()._snapshot is not a._snapshot
    ref = weakref.ref(a._snapshot)
    a.close()
    del a, b
    gc.collect()
    assert ref() is None


def test_bases_are_shared_and_freed(connect):
    """Two backends on one model hold one base; the last one frees it."""
    a, b = connect(), connect()
    assert a.base is b.base
    other = connect(dtype="bfloat16")
    assert other.base is not a.base


def test_forgotten_backend_ends_its_thread(tiny, tmp_path):
    """A backend that nobody holds ends its worker; so does close()."""

    before = set(threading.enumerate())
    policy = rlkit.connect("local", model=tiny("llama"), lora=rlkit.Lora(rank=2), device="cpu")
    sampler = policy.sampler().result()
    del policy
    gc.collect()
    assert len(sampler.sample([5], PARAMS).result()) == 1  # a sampler keeps its backend alive
    workers = [t for t in set(threading.enumerate()) - before if t.name == "rlkit-local"]
    assert workers
    del sampler
    deadline = time.monotonic() + 60
    while any(t.is_alive() for t in workers) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not any(t.is_alive() for t in workers)


def test_close_fails_what_was_not_sampled(connect):
    """Requests that are still waiting when the backend is closed raise instead of hanging."""
    policy = connect()
    sampler = policy.sampler().result()
    futures = [sampler.sample([5], rlkit.SamplingParams(max_tokens=100, stop=()), n=64) for _ in range(4)]
    policy.close()
    with pytest.raises(rlkit.BackendError, match="closed"):
        futures[-1].result(timeout=30)
    with pytest.raises(rlkit.BackendError, match="closed"):
        sampler.sample([5], PARAMS)


def test_sampler_without_a_trainer(connect, tiny):
    """rlkit.sampler gives the base model, or a saved policy."""
    policy = connect()
    train(policy)
    path = policy.save("teacher").result()
    tokens = np.arange(3, 15)
    expected = policy.sampler().result().logprobs(tokens).result()
    with rlkit.sampler("local", model=tiny("llama"), path=path, device="cpu") as teacher:
        assert np.array_equal(teacher.logprobs(tokens).result(), expected)
    with rlkit.sampler("local", model=tiny("llama"), device="cpu") as base:
        assert np.array_equal(base.logprobs(tokens).result(), policy.base_sampler().result().logprobs(tokens).result())
    with pytest.raises(rlkit.ConfigError, match="path="):
        rlkit.sampler("local", model=tiny("llama"), init_from=path)


def test_bfloat16(connect):
    """bf16 trains and samples; sampler and trainer agree as well as that format allows."""
    policy = connect(dtype="bfloat16")
    samples = policy.sampler().result().sample([5, 6, 7], PARAMS, n=4, seed=0).result()
    data = [s.datum(1.0) for s in samples]
    output = policy.forward_backward(data, "ppo").result()
    assert max(np.abs(lp - s.logprobs).max() for lp, s in zip(output.selected, samples, strict=True)) < 0.2
    assert np.isfinite(policy.optim_step(STEP).result()["grad_norm:mean"])


@pytest.mark.parametrize(
    "file", ["adapter_model.safetensors", "optimizer.safetensors", "state.json", "adapter_config.json"]
)
def test_damaged_saves_are_found(connect, tmp_path, file):
    """One flipped bit, a cut file or a missing one is a CheckpointError before anything is loaded."""
    policy = connect()
    train(policy)
    for damage in ("flip", "cut", "remove"):
        path = policy.save(damage).result()
        target = Path(path) / file
        content = bytearray(target.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 1
            target.write_bytes(content)
        elif damage == "cut":
            target.write_bytes(content[: len(content) // 2])
        else:
            target.unlink()
        with pytest.raises(rlkit.CheckpointError):
            connect(resume_from=path)


def test_saves_of_other_shapes_are_refused(connect, tiny, tmp_path):
    """An adapter of another model, a contradicting lora, another backend's save: each says what is wrong."""
    policy = connect()
    train(policy)
    path = policy.save("x").result()
    with pytest.raises(rlkit.ConfigError, match="contradicts"):
        rlkit.connect("local", model=tiny("llama"), init_from=path, lora=rlkit.Lora(rank=8), device="cpu")
    same = attrs.evolve(rlkit.Lora(rank=4), seed=5)
    rlkit.connect("local", model=tiny("llama"), init_from=path, lora=same, device="cpu").close()
    rlkit.connect("local", init_from=path, device="cpu").close()  # the model that it was trained on
    with pytest.raises(rlkit.CheckpointError, match="another model|shape"):
        connect("gpt2", init_from=path)
    with pytest.raises(rlkit.CheckpointError, match="'local'"):
        rlkit.connect("toy", init_from=path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"merge": 1}, "merge"),
        ({"merge": "yes"}, "merge"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"max_rows": True}, "max_rows"),
        ({"prefix_mb": -1}, "prefix_mb"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"lora": {"rank": 4}}, "lora"),
        ({"device": "nowhere"}, "device"),
        ({"fodler": "x"}, "folder"),
    ],
)
def test_bad_options(connect, options, match):
    """Options are checked before the model is read."""
    with pytest.raises(rlkit.ConfigError, match=match):
        connect(**options)


def test_bad_models(tmp_path):
    """A model that is not named, or not there, is a ConfigError."""
    with pytest.raises(rlkit.ConfigError, match="model"):
        rlkit.connect("local")
    for model in (str(tmp_path), str(tmp_path / "missing"), 3, ""):
        with pytest.raises(rlkit.ConfigError, match="model"):
            rlkit.connect("local", model=model)


def count_forwards(policy):
    """A list whose only entry counts forwards of the sampling model from now on."""
    calls = [0]
    decoder = white_box.decoder(policy)
    inner = decoder._logits

    def counted(*arguments):
        calls[0] += 1
        return inner(*arguments)

    decoder._logits = counted
    return calls


@pytest.mark.filterwarnings("ignore:.*its experts get no adapter")
@pytest.mark.parametrize("kind", ["gemma2", "mixtral", "bloom", "mamba"])
def test_other_architectures(connect, kind):
    """Whatever transformers can load is sampled and trained, and both sides agree."""
    policy = connect(kind)
    sampler = policy.sampler().result()
    futures = [
        sampler.sample(prompt, rlkit.SamplingParams(max_tokens=14, stop=()), n=2) for prompt in ([5, 6], [9] * 12)
    ]
    samples = [sample for future in futures for sample in future.result()]
    output = policy.forward_backward([s.datum(1.0) for s in samples], "ppo").result()
    assert max(np.abs(lp - s.logprobs).max() for lp, s in zip(output.selected, samples, strict=True)) < 1e-4
    assert policy.optim_step(STEP).result()["grad_norm:mean"] > 0


def test_engine_failure_reaches_the_callers(connect, monkeypatch):
    """What goes wrong while sampling is raised by the futures, and the engine goes on with the next request."""
    policy = connect()
    sampler = policy.sampler().result()
    monkeypatch.setattr(policy._scheduler, "_make_decoder", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampler.sample([5], PARAMS).result(timeout=30)
    monkeypatch.undo()
    assert sampler.sample([5], PARAMS).result()
    step = white_box.decoder(policy).step
    white_box.decoder(policy).step = lambda: 1 / 0
    futures = [sampler.sample([5, 6], PARAMS, n=3) for _ in range(2)]
    for future in futures:
        with pytest.raises(ZeroDivisionError):
            future.result(timeout=30)
    white_box.decoder(policy).step = step
    assert len(sampler.sample([5], PARAMS, n=3).result()) == 3


def test_two_processes_agree(tiny, tmp_path):
    """The same seed gives the same samples, gradients and weights in two processes, to the bit."""
    program = """
import hashlib, sys, numpy as np, rlkit
policy = rlkit.connect("local", model=sys.argv[1], seed=3, lora=rlkit.Lora(rank=4), device="cpu")
total = hashlib.sha256()
for _ in range(3):
    samples = policy.sampler().result().sample([5, 6, 7], rlkit.SamplingParams(max_tokens=9), n=6).result()
    fb = policy.forward_backward([s.datum((-1.0) ** i) for i, s in enumerate(samples)], "ppo")
    policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
    for lp in [*fb.result().logprobs, *(s.logprobs for s in samples)]:
        total.update(lp.tobytes())
print(total.hexdigest())
"""
    runs = [
        subprocess.run([sys.executable, "-c", program, tiny("llama")], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_chunked_head(connect, kind, monkeypatch):
    """Logprobs, entropies and top-k, with their gradients, are the same in chunks as from all logits at once."""

    def loss(logprobs, entropy, weights=1.0):
        return (weights * (logprobs * logprobs + 0.3 * entropy)).sum()

    def topk(target_logprobs, teacher_logprobs, weights=1.0):
        return (target_logprobs * teacher_logprobs.exp()).sum()

    gradients = []
    for kept, chunk in ((2**40, 256), (0, 5)):
        policy = connect(kind)
        data = train(policy, 1)
        for module in (forward, output_head):
            monkeypatch.setattr(module, "KEPT", kept)
        monkeypatch.setattr(output_head, "CHUNK", chunk)
        rng = np.random.default_rng(0)
        for k, datum in enumerate(data):
            n = int(datum.mask.sum())
            ids = rng.integers(-1, 200, (n, 3))
            data[k] = attrs.evolve(datum, temperature=0.7 if k % 2 else 1.0).with_inputs(
                target_tokens=ids, teacher_logprobs=np.full((n, 3), -1.5)
            )
        first = policy.forward_backward(data, loss, want=("entropy",)).result()
        policy.forward_backward(data, topk).result()
        policy.forward_backward(data, "cross_entropy").result()
        grads = [p.grad.clone() for p in policy._trainer.parameters.values()]
        assert kept or policy._trainer.forward.splits
        gradients.append((first, grads))
        monkeypatch.undo()
    (a, one), (b, other) = gradients
    one, other = (torch.cat([g.flatten() for g in grads]) for grads in (one, other))
    assert (one - other).norm() < 1e-5 * one.norm()
    for name in ("logprobs", "entropy"):
        pair = [out.logprobs if name == "logprobs" else out.outputs[name] for out in (a, b)]
        assert max(np.abs(x - y).max() for x, y in zip(*pair, strict=True)) < 2e-5


def test_adapters_made_at_once(tiny):
    """By several threads, as a server's clients do: no warning of peft's gets out, the random state is as it was."""
    from rlkit.backends.local.model.base import load_base
    from rlkit.backends.local.model.lora import with_adapter

    base, before = load_base(tiny("llama"), "float32", "cpu"), torch.random.get_rng_state()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda k: with_adapter(base, rlkit.Lora(rank=2), k % 2), range(48)))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [dict(model.named_parameters()) for model in made]
    for name, parameter in weights[2].items():
        assert torch.equal(parameter, weights[46][name])
