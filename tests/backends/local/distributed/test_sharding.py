"""Weights shared out over two ranks: the numbers of whole ones, at little more than half of the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlkit
from tests.models.build import build as build_small
from tests.models.families import FAMILIES
from tests.models.family import build

pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[4]
LAYERS = 32
# Llama's own path, windows, a state space with layers of attention, stacked experts, Conv1D with a
# tied head, blocks that several layers share.
MODELS = ("llama", "gemma3_text", "jamba", "mixtral", "gpt2", "zamba2")


def run_ranks(jobs, root):
    """Return what two ranks found, a list of results of the jobs each; a rank that was killed has fewer."""
    ranks, files = [], [root / f"results-{rank}" for rank in range(2)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for rank, file in enumerate(files):
        folder = root / f"saves-{rank}"
        settings = {"rank": rank, "store": str(root / "store"), "jobs": jobs, "results": str(file)}
        settings["folder"] = str(folder)
        command = [sys.executable, "-m", "tests.backends.local.distributed.sharded_rank", json.dumps(settings)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=500)[1] for rank in ranks]
    return [json.loads(file.read_text()) if file.exists() else text for file, text in zip(files, said, strict=True)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """By model, what each rank found."""
    root = tmp_path_factory.mktemp("sharding")
    jobs = {}
    for name in MODELS:
        jobs[name] = str(build(FAMILIES[name], root / name)), "float32"
    jobs["tied"] = str(build_small("llama", root / "tied")), "float32"
    jobs["bfloat16"] = jobs["llama"][0], "bfloat16"
    jobs["deep"] = str(deep(root / "deep")), "float32"
    found = run_ranks([{"run": "compare", "model": model, "dtype": dtype} for model, dtype in jobs.values()], root)
    assert all(len(results) == len(jobs) and isinstance(results, list) for results in found), found
    return {name: [results[i] for results in found] for i, name in enumerate(jobs)}


def deep(folder):
    """Write a model of many layers."""
    from tests.models.build import tokenizer

    size = tokenizer(folder)
    config = transformers.Qwen3Config(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [*MODELS, "tied", "bfloat16", "deep"])
def test_numbers_of_whole_weights(compared, name):
    """Logprobs, gradients, samples and saves are those of whole weights, though each rank computes something else."""
    for result in compared[name]:
        assert result["same_path"]
        assert result["logprobs"] <= 1e-6
        assert result["gradient"] <= 1e-6
        assert result["same_tokens"]
        # Whole weights are packed for sampling, so sums are in another order: 16 last places a layer; 3 were seen
        assert result["sampled"] <= 16 * result["layers"] * 2**-23 * result["largest"]
        assert result["same_saves"]


def test_memory(compared):
    """Of a model whose layers are a small part of it each, at most 0.6 of the weights are ever in a rank's memory."""
    for result in compared["deep"]:
        assert 0.5 <= result["held"] < 0.52
        assert result["peak"] <= 0.6


def test_killed_rank(tmp_path):
    """The other rank gets an error soon, and no hang."""
    model = str(build_small("llama", tmp_path / "model"))
    first, _ = run_ranks([{"run": "killed", "model": model, "dtype": "float32"}], tmp_path)
    assert first[0]["error"] == "RankLost"
    assert "held a part of the weights was lost" in first[0]["text"]
    assert first[0]["seconds"] < 60


def test_missing_weight(tmp_path):
    """A weight that the checkpoint lacks is not made up, as each rank would make up another one."""
    from safetensors.torch import load_file, save_file

    folder = build_small("qwen3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = run_ranks([{"run": "refused", "model": str(folder)}], tmp_path)
    assert all("the checkpoint lacks 'weight' of Linear" in results[0]["text"] for results in found), found


def test_connect(connect):
    """``shard=True`` trains, samples and saves what one process does, and a run goes on on one process."""
    rng = np.random.default_rng(0)
    data = [rlkit.Datum.supervised(rng.integers(3, 290, 20), rng.integers(3, 290, 30 + i)) for i in range(5)]
    options = {"micro_batch_tokens": 100, "merge": False}
    policies = connect(processes=1, **options), connect(shard=True, **options)
    for _ in range(3):
        losses = [p.forward_backward(data, "cross_entropy").result().metrics["loss:sum"] for p in policies]
        assert abs(losses[0] - losses[1]) <= 1e-6 * losses[0]
        for policy in policies:
            policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
    prompts = [rng.integers(3, 290, 5) for _ in range(4)]
    params = rlkit.SamplingParams(max_tokens=6, stop=())
    scored = []
    for policy in policies:
        with policy.sampler().result() as sampler:
            drawn = [sampler.sample(prompt, params, n=2, seed=i) for i, prompt in enumerate(prompts)]
            assert all(len(future.result()) == 2 for future in drawn)
            scored.append(np.concatenate([sampler.logprobs(prompt).result()[1:] for prompt in prompts]))
    assert np.abs(scored[0] - scored[1]).max() < 1e-4
    path = policies[1].save("x").result()
    resumed = connect(processes=1, resume_from=path)
    outputs = [p.forward(data).result().selected for p in (policies[1], resumed)]
    assert max(np.abs(a - b).max() for a, b in zip(*outputs, strict=True)) < 1e-5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"processes": 1}, "processes=2 or more"),
        ({"merge": True}, "merge: got True with shard=True"),
        ({"cuda_graphs": True}, "cuda_graphs: got True with shard=True"),
    ],
)
def test_refused(connect, options, text):
    """What needs the weights whole is refused at connect, with the remedy."""
    with pytest.raises(rlkit.ConfigError, match=text):
        connect(shard=True, **options)
