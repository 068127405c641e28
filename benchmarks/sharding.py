"""Training with the base's weights whole in each of two processes and shared out over them, one thread each.

    python benchmarks/sharding.py [--tokens 512] [--rounds 3] [--dtype float32]

A random Llama of 28 layers. CPU seconds are those of both processes between the same two calls; what is gathered
depends on the number of micro-batches alone, so that ``--tokens`` of each decide. Figures go to the screen and to
benchmarks/results/sharding-TOKENS-DTYPE.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import processes  # before torch is imported
import runner

import numpy as np  # isort: skip

import rlkit

VOCABULARY, LENGTH = 512, 128


def build(folder: str, hidden: int = 256, layers: int = 28) -> None:
    """Write the model, and a tokenizer of letters."""
    import torch
    import transformers as tf
    from tokenizers import Tokenizer, models

    words = {f"<{i}>": i for i in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<0>"))  # noqa: S106
    tf.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<2>").save_pretrained(folder)  # noqa: S106
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=2,
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    count = 8 * options.tokens // LENGTH  # four micro-batches in each process
    data = []
    for _ in range(count):
        datum = rlkit.Datum.supervised(*rng.integers(3, VOCABULARY, (2, LENGTH // 2)))
        data.append(datum.with_inputs(advantages=1.0, sampling_logprobs=np.full(LENGTH // 2, -6.0, np.float32)))
    with tempfile.TemporaryDirectory() as folder:
        build(str(Path(folder)))
        chosen = {"model": folder, "lora": rlkit.Lora(rank=8), "seed": 0, "dtype": options.dtype, "device": "cpu"}
        chosen |= {"micro_batch_tokens": options.tokens, "processes": 2}
        with rlkit.connect("local", **chosen) as whole, rlkit.connect("local", shard=True, **chosen) as sharded:
            pids = [os.getpid(), *processes.others()]
            sides = {"whole": whole, "sharded": sharded}
            for policy in sides.values():
                processes.step(policy, data, pids)
            weights = sharded._weights  # noqa: SLF001
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            before = weights.gathers
            for _ in range(options.rounds):
                for name, policy in sides.items():
                    runs[name].append(processes.step(policy, data, pids))
                    print(name, {key: round(value, 2) for key, value in runs[name][-1].items()}, flush=True)
            gathers = (weights.gathers - before) / (4 * options.rounds)
            peak = weights.peak / sharded.base.nbytes
            units = len(weights.units)
    medians = {name: {key: statistics.median(x[key] for x in own) for key in own[0]} for name, own in runs.items()}
    found = {
        "cpu_sharded_over_whole": medians["sharded"]["cpu"] / medians["whole"]["cpu"],
        "peak_of_weights": peak,
        "gathers_of_a_micro_batch": gathers,
        "units": units,
    }
    print({key: round(value, 3) for key, value in found.items()})
    settings = {"tokens": options.tokens, "dtype": options.dtype, "rounds": options.rounds, "threads_of_each": 1}
    runner.write(
        f"sharding-{options.tokens}-{options.dtype}",
        {**settings, "machine": runner.machine(), "medians": medians, **found},
    )


if __name__ == "__main__":
    main()
