"""Nine programs that a new user writes in the first hour from the pages alone: ``python -P first_hour.py MODEL``.

They run after README's lines in an empty environment (check.py, on a real model), and in the suite on a small random
one. What each is for stands in its docstring; whatever it raises is a sentence of the pages that does not hold.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import rlkit
from rlkit import advantages, losses
from rlkit.envs import StepResult, Tasks
from rlkit.rollouts import rollout_sync
from rlkit.tracking import read_metrics

PARAMS = rlkit.SamplingParams(max_tokens=8)
ADAM = rlkit.Adam(learning_rate=1e-3)


def own_reward(model, steps=2):
    """GRPO of a LoRA with a reward of one's own: how short the answer is."""
    with rlkit.connect("local", model=model, lora=rlkit.Lora(rank=4), seed=0) as policy:
        prompts = [policy.tokenizer.apply_chat_template([{"role": "user", "content": f"{n} + 1?"}]) for n in (1, 2)]
        for _ in range(steps):
            data = []
            with policy.sampler().result() as sampler:
                for group in [sampler.sample(prompt, PARAMS, n=4) for prompt in prompts]:
                    samples = group.result()
                    texts = [policy.tokenizer.decode(sample.tokens) for sample in samples]
                    advantage = advantages.grpo([-float(len(text)) for text in texts])
                    data += [sample.datum(a) for sample, a in zip(samples, advantage, strict=True)]
            loss = policy.forward_backward(data, "ppo")
            assert np.isfinite(policy.optim_step(ADAM).result()["grad_norm:mean"])
            assert np.isfinite(loss.result().metrics["loss:sum"])
        assert policy.version == steps


def own_estimator_and_loss(model):
    """An estimator and a loss by name; running the cell again replaces them; ``config`` reaches the loss."""

    def cell():
        @advantages.register("best_only")
        def best_only(rewards):
            rewards = np.asarray(rewards, dtype=float)
            return (rewards == rewards.max()) - 1 / len(rewards)

        @losses.register("scaled")
        def scaled(logprobs, advantages, *, factor=1.0):
            return -factor * (logprobs * advantages).sum()

    cell()
    cell()
    estimate = advantages.registry["best_only"]
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        samples = sampler.sample(list(b"Call "), PARAMS, n=4, seed=0).result()
        data = [s.datum(a) for s, a in zip(samples, estimate([0, 1, 0, 0]), strict=True)]
        once = policy.forward(data, "scaled").result().metrics["loss:sum"]
        twice = policy.forward(data, "scaled", config={"factor": 2.0}).result().metrics["loss:sum"]
        assert np.isclose(twice, 2 * once)
        assert once


def several_turns(model):
    """A class of one's own and an environment with tools, several turns each, played by the model."""
    from rlkit.tools import ToolEnv

    class Echo:
        def reset(self, seed):
            self.left = 2
            return "Say anything."

        def step(self, action):
            self.left -= 1
            return StepResult("Go on.", reward=len(action) / 100, terminated=not self.left)

        def close(self): ...

    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The one.
            b: The other.
        """
        return a + b

    tasks = Tasks(lambda _: ToolEnv("7 + 8?", [add], reward=lambda answer: float("15" in answer)), 2, name="sums")
    with rlkit.connect("local", model=model, lora=rlkit.Lora(rank=4), seed=0) as policy:
        with policy.sampler().result() as sampler:
            (group,) = rollout_sync(sampler, Echo, n=2, params=PARAMS, seed=0)
            assert [len(t.turns) for t in group.trajectories] == [2, 2]
            played = rollout_sync(sampler, tasks, n=2, params=PARAMS, max_turns=3)
            assert [len(group.trajectories) for group in played] == [2, 2]
        data = [d for t in group.trajectories for d in rlkit.trajectory.datums(t, [1.0, -1.0])]
        policy.forward_backward(data, "ppo").result()


def hosted_service(model):
    """The loop of the toy on the hosted service's stand-in, by the real SDK: the same rewards."""
    from rlkit.testing import FakeTinker

    def curve(policy):
        means = []
        for _ in range(3):
            with policy.sampler().result() as sampler:
                samples = sampler.sample(policy.tokenizer.encode("Call "), PARAMS, n=8, seed=0).result()
            rewards = [np.mean([48 <= token < 58 for token in sample.tokens]) for sample in samples]
            data = [s.datum(a) for s, a in zip(samples, advantages.grpo(rewards), strict=True)]
            policy.forward_backward(data, "ppo")
            policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
            means.append(np.mean(rewards))
        return means

    with rlkit.connect("toy", seed=0) as policy:
        toy = curve(policy)
    with FakeTinker(seed=0) as fake:
        address = {"base_url": fake.base_url, "api_key": fake.api_key}
        with rlkit.connect("tinker", model="toy", seed=0, **address) as policy:
            assert curve(policy) == toy


def penalty_to_the_reference(model):
    """A KL penalty to the untrained model: 0 before the first step, above it after some."""
    with rlkit.connect("local", model=model, lora=rlkit.Lora(rank=4), seed=0) as policy:
        reference = policy.base_sampler().result()
        prompt = policy.tokenizer.encode("1 + 1 =")
        found = []
        for _ in range(3):
            with policy.sampler().result() as sampler:
                samples = sampler.sample(prompt, PARAMS, n=4, seed=0).result()
            before = rlkit.reference_logprobs(reference, samples).result()
            found.append(max(np.abs(np.subtract(s.logprobs, r)).max() for s, r in zip(samples, before, strict=True)))
            data = []
            for sample, ref, advantage in zip(samples, before, (1.0, -1.0, 1.0, -1.0), strict=True):
                data.append(sample.datum(advantage, reference_logprobs=ref))
            policy.forward_backward(data, losses.with_kl("ppo", 0.01))
            policy.optim_step(rlkit.Adam(learning_rate=1e-2)).result()
        assert found[0] < 1e-3 < found[-1], found


LOOP = """
import sys, time
import rlkit
with rlkit.Run("killed", seed=0) as run:
    policy = run.connect("toy")
    print("begins at", run.step, flush=True)
    for step in run.steps(6):
        samples = policy.sampler().result().sample(list(b"Call "), rlkit.SamplingParams(max_tokens=4), n=2).result()
        policy.forward_backward([s.datum(a) for s, a in zip(samples, (1.0, -1.0))], "ppo")
        run.log(policy.optim_step(rlkit.Adam(learning_rate=0.01)).result())
        run.checkpoint(policy, every=2)
        print("done", step, flush=True)
        if len(sys.argv) > 1 and step == 3:
            time.sleep(600)
"""


def killed_and_resumed(model):
    """A run that is killed by ``kill -9`` goes on after its last checkpoint, and no step is logged twice."""
    child = subprocess.Popen([sys.executable, "-P", "-c", LOOP, "wait"], stdout=subprocess.PIPE, text=True)
    while child.stdout.readline().strip() != "done 3":
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    again = subprocess.run([sys.executable, "-P", "-c", LOOP], capture_output=True, text=True, check=True)
    assert again.stdout.startswith("begins at 4"), again.stdout
    steps = [row["step"] for row in read_metrics("killed") if "grad_norm:mean" in row["metrics"]]
    assert steps == list(range(6)), steps


def exported(model):
    """A trained adapter, read by peft, and the merged model, read by transformers: the same logits as here."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from rlkit.backends.local.export import save_merged

    with rlkit.connect("local", model=model, lora=rlkit.Lora(rank=4), seed=0) as policy:
        tokens = policy.tokenizer.encode("Numbers: 1, 2, 3")
        datum = rlkit.Datum(tokens, np.arange(len(tokens)) > 0, {})
        for _ in range(2):
            policy.forward_backward([datum], "cross_entropy")
            policy.optim_step(rlkit.Adam(learning_rate=1e-2)).result()
        adapter = policy.save("adapter").result()
        ours = policy.forward([datum]).result().logprobs[0][1:]
    save_merged(adapter, "merged")
    for read in (AutoModelForCausalLM.from_pretrained("merged"), PeftModel.from_pretrained(base(adapter), adapter)):
        with torch.no_grad():
            ids = torch.as_tensor(tokens)
            logprobs = read(ids[None]).logits[0].float().log_softmax(-1)
        theirs = logprobs[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        assert np.abs(ours - theirs).max() < 1e-3, np.abs(ours - theirs).max()


def base(adapter):
    """The model that an adapter's own file names."""
    from peft import PeftConfig
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(adapter).base_model_name_or_path)


def looked_at(model):
    """A run's page and TensorBoard's files."""
    with rlkit.Run("looked", seed=0, trackers=["jsonl", "tensorboard"]) as run:
        for step in range(3):
            run.log({"train/loss": 1.0 / (step + 1)}, step=step)
    subprocess.run(["rlkit", "report", "looked"], check=True, stdout=subprocess.DEVNULL)
    assert Path("looked/report.html").stat().st_size > 10_000
    assert list(Path("looked").rglob("events.out.tfevents*"))


def other_families(model):
    """Tiny random models of five families learn, and the sampler's logprobs are the trainer's."""
    import tokenizers
    import transformers as tf

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(300)}, "0"))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")  # noqa: S106
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    kinds = {"Qwen3": {"head_dim": 8}, "Gemma3": {"head_dim": 8, "sliding_window": 8}, "Phi3": {}, "Mistral": {}}
    shapes = {"GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4}}
    for kind, own in kinds.items():
        shapes[kind] = {**size, "intermediate_size": 64, "num_key_value_heads": 2, **own}
    for kind, shape in shapes.items():
        name = {"Gemma3": "Gemma3Text"}.get(kind, kind)
        config = getattr(tf, f"{name}Config")(vocab_size=300, bos_token_id=0, eos_token_id=1, pad_token_id=2, **shape)
        tf.AutoModelForCausalLM.from_config(config).save_pretrained(kind)
        tokenizer.save_pretrained(kind)
        with rlkit.connect("local", model=kind, lora=rlkit.Lora(rank=4), seed=0) as policy:
            for _ in range(2):
                with policy.sampler().result() as sampler:
                    samples = sampler.sample([5, 6, 7], PARAMS, n=2, seed=0).result()
                data = [sample.datum(a) for sample, a in zip(samples, (1.0, -1.0), strict=True)]
                out = policy.forward_backward(data, "ppo").result()
                for sample, mine in zip(samples, out.selected, strict=True):
                    assert np.abs(sample.logprobs - mine).max() < 1e-4, kind
                policy.optim_step(ADAM).result()


PROGRAMS = [
    own_reward,
    own_estimator_and_loss,
    several_turns,
    hosted_service,
    penalty_to_the_reference,
    killed_and_resumed,
    exported,
    looked_at,
    other_families,
]


def main(model):
    """All of them, each in a folder of its own."""
    model = str(Path(model).resolve()) if Path(model).exists() else model
    for program in PROGRAMS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            program(model)
        print(f"{program.__name__:26}{time.monotonic() - began:6.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
