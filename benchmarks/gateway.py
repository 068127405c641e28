"""The gateway beside direct sampling: CPU seconds of 64 concurrent requests, each a conversation of its own.

    python benchmarks/gateway.py [--requests 64] [--tokens 64] [--rounds 5] [--threads 1] [--layers 30]

SmolLM2-135M with random prompts of words. "direct" samples the same prompts from the sampler, "session" asks sessions
in process, "http" asks them over the socket, from a client in a process of its own whose time is not counted. All
sides take turns after a warm-up. Medians go to the screen and to benchmarks/results/gateway.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import runner
import torch
import workload

import rlkit
from rlkit.gateway import Gateway, Request, Sampling, Session

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

CLIENT = """
import asyncio, json, sys
import httpx

async def main(urls, texts, tokens):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600.0, limits=limits) as client:
        async def one(url, text):
            body = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
            body["ignore_eos"] = True
            answer = await client.post(url + "/chat/completions", json=body)
            answer.raise_for_status()
        await asyncio.gather(*map(one, urls, texts))

for line in sys.stdin:
    asyncio.run(main(**json.loads(line)))
    print("done", flush=True)
"""


def texts(count: int, rng: np.random.Generator) -> list[str]:
    return [" ".join(rng.choice(WORDS, int(rng.integers(20, 60)))) for _ in range(count)]


def direct(sampler: rlkit.Sampler, prompts: list[np.ndarray], tokens: int) -> None:
    params = rlkit.SamplingParams(max_tokens=tokens, stop=())
    for future in [sampler.sample(prompt, params, seed=i) for i, prompt in enumerate(prompts)]:
        future.result()


def in_process(sessions: list[Session], said: list[str], tokens: int) -> None:
    async def main() -> None:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        asked = [Request(messages=[{"role": "user", "content": text}], sampling=sampling) for text in said]
        await asyncio.gather(*(session.answer(request) for session, request in zip(sessions, asked, strict=True)))

    asyncio.run(main())


def over_http(client: subprocess.Popen[str], sessions: list[Session], said: list[str], tokens: int) -> None:
    assert client.stdin is not None
    assert client.stdout is not None
    line = {"urls": [session.base_url for session in sessions], "texts": said, "tokens": tokens}
    client.stdin.write(json.dumps(line) + "\n")
    client.stdin.flush()
    assert client.stdout.readline() == "done\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from rlkit.backends.local.model.hub import model_path

    rng = np.random.default_rng(0)
    took: dict[str, list[float]] = {"direct": [], "session": [], "http": []}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(model_path(workload.MODEL))
        model = source if options.layers == 30 else workload.cut(source, Path(folder) / "m", "llama", options.layers)
        with rlkit.connect("local", model=str(model), seed=0, device="cpu", prefix_mb=0) as policy:
            sampler = policy.sampler().result()
            client = subprocess.Popen(
                [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            with Gateway(sampler) as gateway:
                for turn in range(options.rounds + 1):
                    said = texts(options.requests, rng)
                    prompts = [gateway.chat.start(text).prompt for text in said]
                    for name in took:
                        sessions = [gateway.session(seed=i) for i in range(options.requests)]
                        start = time.process_time()
                        if name == "direct":
                            direct(sampler, prompts, options.tokens)
                        elif name == "session":
                            in_process(sessions, said, options.tokens)
                        else:
                            over_http(client, sessions, said, options.tokens)
                        took[name] += [time.process_time() - start] if turn else []
                        for session in sessions:
                            assert name == "direct" or [n.sample.tokens.size for n in session.turns] == [options.tokens]
                            session.close()
            assert client.stdin is not None
            client.stdin.close()
            client.wait()
    medians = {name: statistics.median(times) for name, times in took.items()}
    for name, value in medians.items():
        print(f"{name:8} {value:7.2f} s  {value / medians['direct']:.3f}")
    runner.write("gateway", {"options": vars(options), "seconds": medians, "all": took, "machine": runner.machine()})


if __name__ == "__main__":
    main()
