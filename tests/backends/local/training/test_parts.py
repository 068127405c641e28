"""Micro-batches of the library's modules in parts: the numbers of one forward, and never more tokens at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import rlkit
from tests.properties import examples

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.training import (  # noqa: E402
    _chunked_attention,
    forward,
)
from rlkit.backends.local.training._part_attention import BLOCK, parts_with_states  # noqa: E402
from rlkit.backends.local.training.micro_batches import pack  # noqa: E402
from tests.backends.local import white_box  # noqa: E402
from tests.backends.local.training.test_long_micro_batches import (  # noqa: E402
    WHOLE,
    Largest,
    gradient,
    long_tree,
    numbers,
    policies,
    preferred,
)
from tests.backends.local.training.test_micro_batches import batches_of_data, relative  # noqa: E402
from tests.models.families import FAMILIES  # noqa: E402
from tests.models.family import build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*get no adapter")


@pytest.fixture
def small_tiles(monkeypatch):
    """Blocks of a few keys, of which a few queries are looked at at once."""
    monkeypatch.setattr(_chunked_attention.ChunkedAttention.__init__, "__defaults__", (None, 5, None))
    monkeypatch.setattr(_chunked_attention, "SCORES", {"cpu": 90})


WINDOWS = ["gemma2", "gemma3_text", "gemma4_text, shared keys", "gpt_oss"]
EXPERTS = ["mixtral, window", "deepseek_v3"]
STATES = ["qwen3_5_text", "lfm2", "nemotron_h", "falcon_h1", "zamba2", "kimi_linear", "mamba2"]


@pytest.mark.parametrize("name", [*WINDOWS, *EXPERTS, *STATES])
def test_parts_change_no_number(name, small_tiles, monkeypatch, tmp_path):
    """Outputs, losses over datums and pairs, with the entropy, and gradients: as of every datum by itself."""
    offload = name in ("gemma3_text", "gpt_oss", "qwen3_5_text", "zamba2")
    monkeypatch.setattr(forward, "STAY", 0 if offload else 8)
    white_box.allow_float64(monkeypatch)
    single = name in ("gpt_oss", "nemotron_h", "kimi_linear", *EXPERTS)  # torch multiplies by experts in float32
    options = {"dtype": "float32" if single else "float64", "offload_folder": tmp_path if offload else None}
    model = str(build(FAMILIES[name], tmp_path / "model"))
    data = [d.with_inputs(reference_logprobs=np.full(d.mask.sum(), -1.0)) for d in long_tree(np.random.default_rng(4))]
    for policy in policies(model, [30], lora=rlkit.Lora(rank=3, train_unembed=True), **options):
        for loss, want in (("importance_sampling", ("entropy", "sum_p2")), (preferred, ())):
            (a, in_parts), (b, alone) = (gradient(policy, data, loss, want) for _ in white_box.forwards(policy))
            for x, y in zip(numbers(a), numbers(b), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 if single else 3e-5)  # 7e-6 were seen
            assert relative(in_parts, alone) < (5e-5 if single else 3e-6)  # ratios of probabilities amplify
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "starcoder2, window"])
def test_parts_in_float64(name, small_tiles, monkeypatch, tmp_path):
    """Where the library computes nothing in float32, the gradient is that of one micro-batch to 1e-12."""
    white_box.allow_float64(monkeypatch)
    model = str(build(FAMILIES[name], tmp_path))
    rng = np.random.default_rng(0)
    options = {"lora": rlkit.Lora(rank=3, train_unembed=True), "dtype": "float64"}
    for policy in policies(model, [9], **options):
        (batch,) = pack([rlkit.Datum.supervised(rng.integers(3, 290, 5), rng.integers(3, 290, 60))], WHOLE)
        gradients = []
        for used in white_box.forwards(policy):
            logits = used.logits(batch)
            (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
            gradients.append([p.grad.clone() for p in white_box.parameters(policy).values()])
            policy.discard().result()
        assert relative(*gradients) < 1e-12


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("lora", [{"train_mlp": False}, {"train_unembed": False}, {"train_attn": False}])
def test_adapters_on_some_modules(name, lora, tmp_path):
    """Also where nothing below has a gradient; a loss over all datums takes two passes."""
    model = str(build(FAMILIES[name], tmp_path))
    data = long_tree(np.random.default_rng(1))
    for policy in policies(model, [33], lora=rlkit.Lora(**{"rank": 3, "train_unembed": True, **lora})):
        (_, in_parts), (_, alone) = (gradient(policy, data, over_all) for _ in white_box.forwards(policy))
        assert relative(in_parts, alone) < 1.2e-5  # 3e-6 were seen


@rlkit.losses.loss(level="batch")
def over_all(logprobs, advantages):
    """One that has no parts."""
    return -torch.cat(logprobs).exp().mean() * torch.cat(advantages).sum()


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
def test_values_of_a_critic(name, tmp_path):
    """Values and gradients of a critic, by parts."""
    model = str(build(FAMILIES[name], tmp_path))
    data = [d.with_inputs(returns=1.0, old_values=0.1) for d in long_tree(np.random.default_rng(5))]
    tokenizer = rlkit.sampler("local", model=model, device="cpu").tokenizer
    options = {"model": model, "tokenizer": tokenizer, "seed": 3, "device": "cpu", "micro_batch_tokens": 20}
    with rlkit.critic("local", **options) as critic:
        critic.forward_backward(data).result()
        critic.optim_step(rlkit.Adam(learning_rate=0.05)).result()  # the head begins at 0
        outputs, gradients = [], []
        for _ in white_box.forwards(critic):
            outputs.append(np.concatenate(critic.forward_backward(data).result().outputs["values"]))
            gradients.append([p.grad.clone() for p in white_box.parameters(critic).values()])
            critic.discard().result()
    np.testing.assert_allclose(*outputs, atol=1e-5)
    assert relative(*gradients) < 1e-5  # rounding of float32: 7e-6 with AVX2, where the order of sums is another one


@given(batches_of_data(), st.sampled_from([1, 16, 20, 50]))
@examples(60)
def test_parts_with_states_continue_their_sequences(data, size):
    """Each token is in one part; each row begins where the sequence of its first token was left."""
    assume(any(datum.mask.any() for datum in data))
    (batch,) = pack(data, WHOLE, share=BLOCK)[:1]
    parts = parts_with_states(batch.runs, size)
    assert [p.places.start for p in parts] == [0, *(p.places.stop for p in parts[:-1])]
    assert parts[-1].places.stop == batch.tokens.size
    ends = {}
    for number, part in enumerate(parts):
        first = part.places.start
        for length, before in zip(part.lengths, part.before, strict=True):
            at = batch.positions[first : first + length]
            assert at[0] == (ends[before] if before >= 0 else 0)
            assert (np.diff(at) == 1).all()
            assert before < 0 or parts[before].continued
            first += length
        ends[number] = at[-1] + 1
        assert len(part.lengths) == 1 or not part.continued
        assert np.prod(part.shape) <= max(size, BLOCK)
        assert part.shape[1] > 1  # a single token is computed by other code


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
def test_tokens_at_once(name, tmp_path):
    """Never more than the budget, and a group's prompt once, also where a layer has a state."""
    model = str(build(FAMILIES[name], tmp_path))
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 290, 48)
    data = [rlkit.Datum.supervised(prompt, rng.integers(3, 290, 9)) for _ in range(6)]
    for budget, most in ((200, 200), (40, 40)):
        for policy in policies(model, [budget], lora=rlkit.Lora(rank=2, train_unembed=True)):
            sizes = []
            embedding = policy._trainer.model.get_input_embeddings()
            handle = embedding.register_forward_hook(lambda _, __, out, sizes=sizes: sizes.append(out[..., 0].numel()))
            policy.forward_backward(data, "cross_entropy").result()
            handle.remove()
            assert max(sizes) <= most
            once = 48 + 6 * 8
            assert sum(sizes) == (once if budget == 200 else sum(sizes))
            assert sum(sizes) <= 2 * (once + budget)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
def test_nothing_grows_with_the_length_where_there_is_a_folder(name, monkeypatch, tmp_path):
    """The largest tensor of a datum of 90 tokens is that of one of 50."""
    monkeypatch.setattr(forward, "STAY", 0)
    model = str(build(FAMILIES[name], tmp_path))
    rng, found = np.random.default_rng(0), []
    options = {"lora": rlkit.Lora(rank=2, train_unembed=False), "offload_folder": tmp_path}
    for policy in policies(model, [16], **options):
        for n in (50, 90):
            data = [rlkit.Datum.supervised(rng.integers(3, 200, 4), rng.integers(3, 200, n - 4))]
            with Largest() as largest:  # in this thread, so without the backend's queue
                for _ in policy._trainer.run(data, rlkit.losses.prepare("cross_entropy"), (), backward=True):
                    pass
            found.append(largest.most)
    assert found[0] == found[1]
