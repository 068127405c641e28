"""The two sides of step.py, each a process that does ``sample`` or ``train`` when told to, and says what it took.

rlkit: the local backend. naive: ``generate`` of transformers on the peft model, and a step that computes the logits
of every position in micro-batches of 8 rows.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import numpy as np
import torch
import workload

import rlkit


class Rlkit:
    """What a user of the local backend writes."""

    def __init__(self, dtype: str) -> None:
        lora = rlkit.Lora(rank=workload.RANK)
        self.policy = rlkit.connect("local", model=workload.MODEL, lora=lora, seed=0, dtype=dtype, device="cpu")
        self.prompts = workload.prompts(self.policy.tokenizer)

    def sample(self, groups: int) -> int:
        params = rlkit.SamplingParams(max_tokens=workload.TOKENS, stop=())
        with self.policy.sampler().result() as sampler:
            futures = [sampler.sample(p, params, n=workload.GROUP) for p in self.prompts[:groups]]
            return sum(s.tokens.size for future in futures for s in future.result())

    def train(self, groups: int) -> int:
        rows = groups * workload.GROUP
        data = []
        tokens, scores = workload.completions(self.policy.tokenizer.vocab_size), workload.advantages()
        for k in range(rows):
            prompt = self.prompts[k // workload.GROUP]
            lp = np.full(workload.TOKENS, -10.8, np.float32)
            data.append(rlkit.Sample(prompt, tokens[k], lp).datum(scores[k]))
        self.policy.forward_backward(data, "importance_sampling")
        self.policy.optim_step(rlkit.Adam()).result()
        return rows * workload.TOKENS


class Naive:
    """The plain use of transformers and peft."""

    def __init__(self, dtype: str) -> None:
        import peft
        import transformers

        from rlkit.backends.local.hub import model_path
        from rlkit.backends.local.tokenizer import LocalTokenizer

        path = model_path(workload.MODEL)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
        config = peft.LoraConfig(r=workload.RANK, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(model, config).eval()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.vocab_size = model.config.vocab_size
        self.prompts = workload.prompts(LocalTokenizer(tokenizer, vocab_size=self.vocab_size, eos_ids=[]))

    @torch.no_grad()
    def sample(self, groups: int) -> int:
        prompts = self.prompts[:groups]
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
            num_return_sequences=workload.GROUP,
            min_new_tokens=workload.TOKENS,
            max_new_tokens=workload.TOKENS,
        )
        return int(out[:, width:].numel())

    def train(self, groups: int) -> int:
        rows = groups * workload.GROUP
        tokens, scores = workload.completions(self.vocab_size), workload.advantages()
        for start in range(0, rows, 8):
            chosen = range(start, start + 8)
            pairs = [(self.prompts[k // workload.GROUP], tokens[k]) for k in chosen]
            width = max(p.size + c.size for p, c in pairs)
            ids = torch.zeros(8, width, dtype=torch.long)
            mask, own = torch.zeros_like(ids), torch.zeros(8, width)
            for row, (p, c) in enumerate(pairs):
                ids[row, : p.size + c.size] = torch.from_numpy(np.concatenate([p, c]))
                mask[row, : p.size + c.size] = 1
                own[row, p.size : p.size + c.size] = 1
            logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            lp = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            ratio = (lp - -10.8).exp()
            advantages = torch.tensor(scores[list(chosen)], dtype=torch.float32)[:, None]
            (-(ratio * advantages) * own[:, 1:]).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return rows * workload.TOKENS


def main() -> None:
    torch.set_num_threads(int(sys.argv[3]))
    side = {"rlkit": Rlkit, "naive": Naive}[sys.argv[1]](sys.argv[2])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job, groups = line.split()
        cpu, wall = time.process_time(), time.perf_counter()
        tokens = getattr(side, job)(int(groups))
        took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "tokens": tokens}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({**took, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main()
