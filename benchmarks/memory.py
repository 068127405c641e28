"""Peak memory of a gradient and an update, over completions, context and vocabulary; rlkit beside a naive peft step.

    python benchmarks/memory.py

The model has four layers of width 256 and random weights, so that what grows is easy to see. Every cell is a process
of its own; the figure is the largest resident size, less that of the loaded model. The table goes to the screen and to
benchmarks/results/memory.json.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import runner
import workload

BASE = {"completions": 16, "prompt": 64, "vocabulary": 49152}  # one micro-batch and a little
CELLS = [
    BASE,
    BASE | {"completions": 128},
    BASE | {"prompt": 1024},
    BASE | {"vocabulary": 4 * 49152},
]


def build(folder: Path, vocabulary: int) -> str:
    """A random model with the workload's tokenizer."""
    import transformers

    from rlkit.backends.local.hub import model_path

    path = folder / str(vocabulary)
    if not path.exists():
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(path)
        for file in Path(model_path(workload.MODEL)).glob("*token*"):
            shutil.copy(file, path)
    return str(path)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cell in CELLS:
            row: dict = dict(cell)
            for name in ("rlkit", "naive"):
                side = runner.Side(name, "float32", model=build(Path(folder), cell["vocabulary"]))
                before = side.do("idle")["peak_GB"]
                after = side.do("train", lengths=[cell["prompt"]], group=cell["completions"])["peak_GB"]
                side.end()
                row[name] = after - before
            rows.append(row)
            print(row, flush=True)
    runner.write("memory", {"machine": runner.machine(), "GB_above_the_model": rows})


if __name__ == "__main__":
    main()
