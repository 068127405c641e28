"""Sampling and training of the local backend on a GPU: tokens per second, and how near that is to the machine's limits.

    python benchmarks/gpu.py [--shape 0.6B] [--bandwidth 4.8e12] [--flops 7.9e14] [--rounds 3]

Models of Qwen's shapes with random weights in bfloat16, written to a temporary folder (15 GB for 7B). The limits are
given: bytes per second of the memory and operations per second of dense bfloat16 products (the defaults are an H200's).
Decoding is measured with CUDA graphs and without, training with flex_attention and with a mask over all pairs.
A decoding step has to read every weight and the keys and values of every row; training computes each weight once
forward and once backward for a token, and the head for the completion's tokens. Wall seconds, medians after a warm-up,
go to the screen and to benchmarks/results/gpu-SHAPE.json. `--shape tiny --device cpu` tries the script.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import runner
import torch
import workload

import rlkit
from rlkit.backends.local.hub import model_path
from rlkit.backends.local.training import flex_attention as kernels

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
MORE = {
    "tiny": {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 49152},
    "0.6B": {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "7B": {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 152064, "tie_word_embeddings": False},
}
PROMPT, TOKENS = 512, 128
ROWS = (1, 8, 64, 256)


def build(shape: str, folder: Path, device: str) -> str:
    """A random model with the workload's tokenizer."""
    import transformers

    config = transformers.Qwen3Config(**SHAPES[shape], **MORE[shape], max_position_embeddings=4096)
    with torch.device(device):
        transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in Path(model_path(workload.MODEL)).glob("*token*"):
        shutil.copy(file, folder)
    return str(folder)


def median(rounds: int, job) -> float:
    """Wall seconds of ``job``, after a warm-up."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        job()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def decoding(policy, rows: int, options) -> dict:
    """Completions of one prompt, ``rows`` of them."""
    prompt = np.random.default_rng(0).integers(100, 40000, PROMPT)

    def job(tokens):
        with policy.sampler().result() as sampler:
            sampler.sample(prompt, rlkit.SamplingParams(max_tokens=tokens, stop=()), n=rows, seed=0).result()

    taken = median(options.rounds, lambda: job(TOKENS)) - median(options.rounds, lambda: job(1))  # without the prompt
    config, step = policy.base.model.config, taken / (TOKENS - 1)
    cached = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (PROMPT + TOKENS / 2)
    return {
        "tokens_per_s": rows / step,
        "of_memory_limit": (policy.base.nbytes + rows * cached) / options.bandwidth / step,
        "of_compute_limit": policy.base.nbytes * rows / options.flops / step,  # 2 operations a weight of 2 bytes
    }


def training(policy, groups: int, options) -> dict:
    """A gradient and an update on groups of 8 completions."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(groups):
        prompt = rng.integers(100, 40000, PROMPT)
        samples = [rlkit.Sample(prompt, rng.integers(100, 40000, TOKENS), [-11.0] * TOKENS) for _ in range(8)]
        data += [sample.datum(float(rng.normal())) for sample in samples]

    def job():
        policy.forward_backward(data, "importance_sampling")
        policy.optim_step(rlkit.Adam()).result()

    taken = median(options.rounds, job)
    config = policy.base.model.config
    head = config.vocab_size * config.hidden_size
    body = policy.base.nbytes / 2 - head * (1 if config.tie_word_embeddings else 2)
    computed = groups * (PROMPT + 8 * TOKENS)
    operations = 4 * (body * computed + head * groups * 8 * TOKENS)
    return {
        "completion_tokens_per_s": groups * 8 * TOKENS / taken,
        "of_compute_limit": operations / options.flops / taken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="0.6B", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bandwidth", type=float, default=4.8e12)
    parser.add_argument("--flops", type=float, default=7.9e14)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build(options.shape, Path(folder), options.device)
        for graphs, flex in ((True, True), (False, False)):
            if not flex:
                kernels._flex_works = lambda *_: False  # noqa: SLF001  # users have no reason to choose
            policy = rlkit.connect(
                "local",
                model=model,
                lora=rlkit.Lora(rank=32, train_unembed=False),
                seed=0,
                dtype="bfloat16",
                device=options.device,
                micro_batch_tokens=options.budget,
                max_rows=max(ROWS),
                prefix_mb=0,
                cuda_graphs=graphs,
            )
            for count in ROWS:
                name = f"decoding {count} rows, {'with' if graphs else 'without'} graphs"
                rows[name] = decoding(policy, count, options)
                print(name, rows[name], flush=True)
            name = f"training, {'flex_attention' if flex else 'masked attention'}"
            rows[name] = training(policy, options.groups, options)
            print(name, rows[name], flush=True)
            policy.close()
    cuda = options.device.startswith("cuda")
    runner.write(
        f"gpu-{options.shape}",
        {
            "device": torch.cuda.get_device_name() if cuda else options.device,
            "peak_GB": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            "limits": {"bytes_per_s": options.bandwidth, "operations_per_s": options.flops},
            "prompt": PROMPT,
            "tokens": TOKENS,
            "micro_batch_tokens": options.budget,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
