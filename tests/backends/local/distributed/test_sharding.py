"""Weights shared out over two ranks: the numbers of whole ones, from little more than half of them."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import pytest

import rlkit
from tests.models.families import FAMILIES
from tests.models.family import build

pytest.importorskip("peft")

import torch
from torch.distributed.tensor import DTensor

from rlkit.backends.local.distributed import shard
from tests.backends.local.distributed.test_lost import BEGIN, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # peft asks transformers
    pytest.mark.filterwarnings("ignore:the .* model. its experts get no adapter"),
]
# Windows, a state space with layers of attention, stacked experts, Conv1D with a tied head, a head that is tied.
MODELS = ("llama", "llama, tied", "gemma3_text", "jamba", "mixtral", "gpt2", "zamba2")


def rows(*lengths):
    """Datums behind one prompt of 8 tokens, which are a tree."""
    draw = np.random.default_rng(0)
    begin = draw.integers(3, 250, 8)
    return [rlkit.Datum(np.r_[begin, draw.integers(3, 250, n)], np.arange(8 + n) >= 8) for n in lengths]


@rlkit.losses.loss(level="batch")
def of_all(logprobs):
    return -sum((x * x).sum() for x in logprobs)


def gradient(policy, data, loss):
    """The logprobs, and the gradient [all of it in one row]."""
    logprobs = policy.forward_backward(data, loss, want=("entropy",)).result().selected
    found = torch.cat([p.grad.flatten() for p in policy._trainer.parameters.values()])
    policy.discard().result()
    return np.concatenate(logprobs), found


def held(policy):
    """The share of the base's weights that this rank has, of its layers and of all."""
    parameters = [p for p in policy.base.model.parameters() if not p.requires_grad]
    here = [p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters]
    layers = [(n, p.numel()) for n, p in zip(here, parameters, strict=True) if isinstance(p, DTensor)]
    return np.divide(*np.sum(layers, axis=0)), sum(here) / sum(p.numel() for p in parameters)


def test_numbers_of_whole_weights(connect, tmp_path):
    """Of an odd number of micro-batches, one alone, one beyond the budget, both passes; adapters are whole."""
    wrong, few, many = [], rows(20), rows(20, 30, 85, 40, 12)
    for name in MODELS:
        options = {"model": str(build(FAMILIES[name], tmp_path / name)), "micro_batch_tokens": 64}
        whole, sharded = connect(1, **options), connect(2, shard=True, **options)
        for policy in (whole, sharded):  # from an adapter that has an effect
            policy.forward_backward(many, "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
        for data, loss in ((few, "cross_entropy"), (many, "cross_entropy"), (many, of_all)):
            (a, u), (b, v) = (gradient(policy, data, loss) for policy in (whole, sharded))
            off = float(np.abs(a - b).max()), float((u - v).abs().max() / u.abs().max())
            if max(off) > 5e-6:
                wrong.append((name, len(data), off))
        if held(sharded)[0] > 0.51 or any(isinstance(p, DTensor) for p in sharded._trainer.parameters.values()):
            wrong.append((name, held(sharded)))
        whole.close()
        sharded.close()
    assert wrong == []


def test_bfloat16(connect):
    """The same modules on the same tokens give the same, so the bits of whole weights arrive."""
    policies = [connect(n, dtype="bfloat16", **options) for n, options in ((1, {}), (2, {"shard": True}))]
    (a, u), (b, v) = (gradient(policy, rows(20), "cross_entropy") for policy in policies)
    assert a.tobytes() == b.tobytes()
    assert torch.equal(u, v)


def test_memory(connect, tmp_path):
    """Of a model of many layers a rank holds half, before and after training."""
    family = attrs.evolve(FAMILIES["qwen3"], settings={"num_hidden_layers": 24, "tie_word_embeddings": True})
    policy = connect(2, shard=True, model=str(build(family, tmp_path / "deep")))
    for _ in range(2):
        assert held(policy)[1] < 0.6
        gradient(policy, rows(20, 30), "cross_entropy")


def test_with_others(connect):
    """Two sharded policies and a whole one train at once on the same processes, and each goes on after a bad loss."""
    data, calls, found = rows(20, 30, 40, 12, 9), [], {}
    policies = [connect(2, shard=True, micro_batch_tokens=32) for _ in range(2)]
    policies += [connect(n, micro_batch_tokens=32) for n in (2, 1)]

    def raises_late(logprobs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("a mistake")
        return -logprobs.sum()

    def train(k):
        for _ in range(4):
            policies[k].forward_backward(data, lambda logprobs: -logprobs.sum())
            policies[k].optim_step(rlkit.Adam(learning_rate=0.01)).result()
        found[k] = np.concatenate(policies[k].forward(data).result().selected)

    with pytest.raises(KeyError, match="a mistake"):
        policies[0].forward_backward(data, raises_late).result()
    threads = [threading.Thread(target=train, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.abs(found[k] - found[3]).max() < 1e-4 for k in range(3))
    with connect(1, resume_from=policies[0].save("x").result()) as resumed:
        assert np.abs(np.concatenate(resumed.forward(data).result().selected) - found[3]).max() < 1e-4


def test_vllm_samples(connect, tiny):
    """What is sampled is what is trained, of each version; the comparison's own adapter is everywhere gone again."""
    pytest.importorskip("httpx")
    from tests.backends.vllm.standin import Http, Standin

    text = np.arange(3, 20)
    with Http(Standin(tiny("llama"))) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        policy = connect(2, shard=True, sampler=http.url, lora=rlkit.Lora(rank=4, train_unembed=False))
        for _ in range(2):
            with policy.sampler().result() as sampler:
                assert len(sampler.sample(text, rlkit.SamplingParams(max_tokens=3, stop=()), n=2).result()) == 2
                trained = policy.forward([rlkit.Datum.supervised(text[:1], text[1:])]).result().selected[0]
                assert np.abs(sampler.logprobs(text).result()[1:] - trained).max() < 1e-4
            policy.forward_backward(rows(20, 30), "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        http.shutdown()


LOST = {
    "killed": "os.kill(ranks_of(os.getpid())[0], signal.SIGKILL)",
    "a rank that raises in a layer": "",
    "this one": """
from rlkit.backends.local.model.forward import layers_of
layers_of(policy._policy.peft)[-1].register_forward_pre_hook(lambda *_: [][0])
""",
}
SPOILT = """
from transformers.models.llama.modeling_llama import LlamaMLP
forward, calls = LlamaMLP.forward, []
def raises(*arguments):
    calls.append(1)
    if len(calls) > 40 and sys.argv[0] == "-c":
        raise MemoryError("no room")
    return forward(*arguments)
LlamaMLP.forward = raises
"""


@pytest.mark.parametrize("story", LOST)
def test_a_rank_that_fails_is_an_error_at_once(tiny, tmp_path, story):
    """It cannot answer, since the others wait for its part of a layer: it leaves, and they hear why."""
    code = BEGIN
    if "raises" in story:
        code += "from rlkit.backends.local.distributed import launch\n"
        code += f"launch.PROGRAM = launch.PROGRAM.replace('main(**told)', {SPOILT!r} + 'main(**told)')\n"
    code += "policy = connect(lora=rlkit.Lora(rank=2), shard=True)\ntrain(policy)\n" + LOST[story]
    code += "\nwhy, seconds = lost(lambda: [train(policy) for _ in range(40)])\nprint(why)\nassert seconds < 60\n"
    code += "lost(lambda: policy.forward(data).result())\npolicy.save('x').result()\npolicy.close()\n"
    done = run(code, tiny("llama"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    expected = {"killed": "SIGKILL", "this one": "rank 0 raised IndexError"}.get(story, "MemoryError: no room")
    assert expected in done.stdout, done.stdout


def test_refused(connect, monkeypatch):
    """What cannot be shared out, and sampling, with the remedy; the other rank goes on."""
    with pytest.raises(rlkit.ConfigError, match="processes=2 or more"):
        connect(1, shard=True)
    for times, text in ((2, "a llama model shares weights between its layers"), (0, "has no layers that")):
        monkeypatch.setattr(shard, "layers_of", lambda model, n=times: n * [model.get_decoder().layers[0]])
        with pytest.raises(rlkit.ConfigError, match=text):
            connect(shard=True)
    monkeypatch.undo()
    policy = connect(2, shard=True)
    abilities = policy.capabilities()
    assert (abilities["batch_invariant"], abilities["sampling_options"]) == (False, ())
    for call in (policy.sampler, policy.live_sampler, policy.base_sampler, lambda: policy.saved_sampler("x")):
        with pytest.raises(rlkit.UnsupportedError, match="sampler='vllm'"):
            call().result()
