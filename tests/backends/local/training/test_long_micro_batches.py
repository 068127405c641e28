"""Micro-batches of more tokens than the budget: layers are computed again, with the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.training.micro_batches import pack  # noqa: E402
from tests.backends.local import white_box  # noqa: E402
from tests.models.families import FAMILIES  # noqa: E402
from tests.models.family import build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*get no adapter")
WHOLE = 10**6
# rlkit's own forward, with and without a window; the library's with windows, sinks, experts, states, and rows.
NAMES = ["llama", "mistral, window", "qwen3", "gemma3_text", "gpt_oss", "mixtral", "qwen3_5_text", "zamba2", "mamba"]
NAMES += ["bloom"]


@rlkit.losses.loss(level="pair")
def preferred(logprobs, reference_logprobs, weights=(1.0, 1.0)):
    """DPO of any two datums, of one prompt or not."""
    return rlkit.losses.dpo(logprobs, reference_logprobs, weights)


@rlkit.losses.loss(level="batch")
def over_all(logprobs, advantages):
    """One that has no parts."""
    return -torch.cat(logprobs).exp().mean() * torch.cat(advantages).sum()


def rows():
    """A group behind a long prompt, and the turns of an episode."""
    rng = np.random.default_rng(4)
    prompt, history = rng.integers(3, 200, 60), rng.integers(3, 200, 10)
    samples = [rlkit.Sample(prompt, rng.integers(3, 200, n), -rng.random(n) * 5) for n in (3, 9, 20, 1)]
    for _ in range(4):
        answer = rng.integers(3, 200, 7)
        samples.append(rlkit.Sample(history, answer, -rng.random(7) * 5))
        history = np.concatenate([history, answer, rng.integers(3, 200, 5)])
    data = [sample.datum(rng.normal()) for sample in samples]
    data = [d.with_inputs(reference_logprobs=np.full(d.mask.sum(), -1.0)) for d in data]
    return [data[i] for i in rng.permutation(len(data))]


def gradient(policy, data, loss, want=()):
    """Of a loss, all that was asked for of each datum, and how many numbers the forward pass kept."""
    trainer, kept, run = policy._trainer, [], None

    def note(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):  # of this thread, so without the backend's queue
        run = trainer.run(data, rlkit.losses.prepare(loss), want, backward=True)
        while True:
            try:
                next(run)
            except StopIteration as end:
                outputs, _ = end.value
                break
    found = [p.grad.clone() for p in white_box.parameters(policy).values() if p.grad is not None]
    policy.discard().result()
    return [*(x for name in sorted(outputs) for x in outputs[name]), *found], sum(kept)


@pytest.fixture
def opened(tmp_path):
    """A policy on a small model, whose adapter is not zero."""
    made = []

    def connect(name, **lora):
        model = str(build(FAMILIES[name], tmp_path / "model"))
        lora = rlkit.Lora(**{"rank": 3, "train_unembed": True, **lora})
        policy = rlkit.connect("local", model=model, lora=lora, seed=0, device="cpu", micro_batch_tokens=WHOLE)
        rng = np.random.default_rng(0)
        for parameter in white_box.parameters(policy).values():
            parameter.data.add_(torch.from_numpy(0.05 * rng.normal(size=parameter.shape)).to(parameter))
        made.append(policy)
        return policy

    yield connect
    for policy in made:
        policy.close()


@pytest.mark.parametrize("name", NAMES)
def test_computed_again(opened, name):
    """Outputs and gradients of every kind of loss, to the bit, while less than half is kept."""
    policy, wrong = opened(name), []
    for loss, want in (("importance_sampling", ("entropy", "sum_p2")), (preferred, ()), (over_all, ())):
        policy._trainer.forward._budget = WHOLE
        whole, kept = gradient(policy, rows(), loss, want)
        policy._trainer.forward._budget = 8
        again, less = gradient(policy, rows(), loss, want)
        if not all(map(torch.equal, whole, again)) or less > kept / 2:
            wrong.append(
                (str(loss), less / kept, max(float((a - b).abs().max()) for a, b in zip(whole, again, strict=True)))
            )
    assert wrong == []


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_adapters_on_some_modules(opened, name):
    """Also where a layer has no gradient, or none below it has one."""
    for lora in (
        {"train_mlp": False},
        {"train_attn": False},
        {"train_unembed": False},
        {"train_attn": False, "train_mlp": False},  # the head alone
        {"target_modules": ("layers.1.self_attn.k_proj",)},
    ):
        policy = opened(name, **lora)
        whole, _ = gradient(policy, rows(), "cross_entropy")
        policy._trainer.forward._budget = 8
        assert all(map(torch.equal, whole, gradient(policy, rows(), "cross_entropy")[0])), lora


def test_values_of_a_critic(tiny):
    """Values, and what they train."""
    tokenizer = rlkit.sampler("local", model=tiny("llama")).tokenizer
    data, found = [d.with_inputs(returns=1.0, old_values=0.1) for d in rows()], []
    for budget in (WHOLE, 9):
        options = {"seed": 3, "device": "cpu", "micro_batch_tokens": WHOLE}
        with rlkit.critic("local", model=tiny("llama"), tokenizer=tokenizer, **options) as critic:
            critic._trainer.forward._budget = budget
            for _ in range(2):  # the first step moves the head from 0
                values = critic.forward_backward(data).result().outputs["values"]
                critic.optim_step(rlkit.Adam(learning_rate=0.05)).result()
            found.append([*values, *(p.detach().numpy() for p in critic._trainer.parameters.values())])
    assert all(map(np.array_equal, *found))


def test_a_long_prompt_is_computed_once():
    """Eight completions of 10 behind a prompt of 100, under a budget of 40."""
    data = [rlkit.Datum.supervised(np.arange(1, 101), np.full(11, k + 120)) for k in range(8)]
    assert [batch.tokens.size for batch in pack(data, 40)] == [100 + 8 * 10]
    assert [batch.tokens.size for batch in pack(data, 40, share=False)] == [110] * 8
