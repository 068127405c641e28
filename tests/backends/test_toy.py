"""The toy backend conforms; its parts are what torch, jinja2 and plain loops make of the same."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import BackendError, Sample
from rlkit.backends.protocol import LiveSampler, LiveSampling
from rlkit.backends.toy import ByteTokenizer, Features, ToyBackend, Weights, base_weights
from rlkit.backends.trainer import assemble_output
from rlkit.testing import BackendConformance
from tests.backends.live import PROMPT, step
from tests.each import for_each
from tests.properties import examples

TEXTS = st.text(max_size=12) | st.sampled_from(["<|im_start|>", "a<|im_end|>b", "<|endoftext|><|im_start|>", "<|im_"])


class TestToy(BackendConformance):
    offers = ()  # min_p and penalties are refused by name

    def make(self, folder, **options):
        return ToyBackend(folder=folder, max_length=128, **options)


@for_each("clip", [0.0, 0.5, 1e3])
@for_each("decay", [0.0, 0.3])
def test_adamw_is_torch_s(clip, decay):
    """Five steps with moments, decay and a clipped norm."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    params = rlkit.Adam(0.05, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=decay, grad_clip_norm=clip)
    weights = Weights(rng.normal(size=(3, 4)))
    theirs = torch.nn.Parameter(torch.from_numpy(weights.value.copy()))
    adam = torch.optim.AdamW([theirs], lr=0.05, betas=(0.8, 0.9), eps=1e-3, weight_decay=decay)
    for _ in range(5):
        parts = rng.normal(size=(2, 3, 4))
        for part in parts:
            weights.add(part)
        theirs.grad = torch.from_numpy(parts.sum(0))
        norm = torch.nn.utils.clip_grad_norm_([theirs], clip if clip > 0 else np.inf)
        adam.step()
        assert weights.step(params)["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-6)
        np.testing.assert_allclose(weights.value, theirs.detach().numpy(), rtol=1e-6)
        assert not weights.gradient.any()


def test_features_are_the_last_three_tokens_and_a_fading_memory():
    """Token by token, in plain loops; rows do not depend on their companions."""
    features = Features(5, width=4)
    tokens = [3, 0, 4, 4, 1]
    for end, row in enumerate(features.all(np.array(tokens))):
        memory, seen = np.zeros(4), tokens[: end + 1]
        for token in seen[:-1]:
            memory = 0.8 * memory + features._memory[token]
        for back, token in enumerate(reversed(seen[-3:])):
            memory = memory + features._recent[back][token]
        np.testing.assert_allclose(row, [*np.tanh(memory), 1.0], rtol=1e-12)
    alone, _ = features.read(features.start(1), np.array([2]))
    together, _ = features.read(features.start(3), np.array([1, 2, 0]))
    np.testing.assert_array_equal(together[1], alone[0])


def test_a_backend_that_forgets_tokens_is_named():
    """Not the user's data."""
    message = r"the backend's logprobs: have shapes \(1,\); expected \[n\] per datum"
    with ToyBackend(seed=0) as policy:
        policy._run = lambda data, *_, **__: assemble_output(data, [np.zeros(1)], {})
        with pytest.raises(BackendError, match=message):
            policy.forward([Sample([5], [6, 7], [-1.0, -1.0]).datum()]).result()


@examples(60)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.booleans())
def test_template_is_what_it_says(texts, head):
    """Tokens of a conversation are those of its template's text, rendered by jinja2, where texts hold no control."""
    jinja2 = pytest.importorskip("jinja2")
    tokenizer = ByteTokenizer()
    messages = [{"role": "user", "content": text} for text in texts]
    got = tokenizer.apply_chat_template(messages, add_generation_prompt=head)
    rendered = jinja2.Template(tokenizer.chat_template).render(messages=messages, add_generation_prompt=head)
    assert tokenizer.decode(got, skip_special=False) == rendered
    assert list(got).count(256) == len(texts) + head, "texts of users never become control tokens"
    if not any("<|" in text for text in texts):
        assert list(tokenizer.encode(rendered, special=True)) == list(got)


@given(TEXTS)
def test_texts_come_back(text):
    tokenizer = ByteTokenizer()
    plain, control = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert bytes(plain.tolist()) == text.encode()
    assert tokenizer.decode(plain) == tokenizer.decode(control, skip_special=False) == text
    names = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert [int(t) - 256 for t in control if t >= 256] == [
        i for _, i in sorted((at, i) for i, n in enumerate(names) for at in range(len(text)) if text.startswith(n, at))
    ]
    assert tokenizer.decode(control) == functools.reduce(lambda left, name: left.replace(name, ""), names, text)


def test_bytes_that_are_no_text():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([72, 255, 254, 105]) == "H\ufffd\ufffdi"
    assert tokenizer.decode([255, 256, 258], skip_special=False) == "\ufffd<|im_start|><|endoftext|>"


def test_a_saved_sampler_is_of_what_was_saved(tmp_path):
    """Not of the base, and not of what was trained afterwards."""
    with ToyBackend(seed=0, folder=tmp_path) as policy:
        samplers = [policy.base_sampler().result()]
        for _ in range(2):
            step(policy)
            samplers.append(policy.sampler().result())
            if len(samplers) == 2:
                path = policy.save("state", optimizer=False).result()
        samplers.append(policy.saved_sampler(path).result())
        base, first, second, saved = (each.logprobs([*PROMPT, 70, 71, 72]).result()[-3:] for each in samplers)
        np.testing.assert_array_equal(saved, first)
        assert samplers[-1].version == 1
        assert ((base < first) & (first < second)).all()


def test_the_model_stays_the_same():
    """Its fixed features and weights are part of what a saved toy means; only letters, digits, " " and ends are likely.

    Conformance does not ask for the best token alone.
    """
    bias = base_weights(5, 259)[-1]
    assert {*np.flatnonzero(bias > 0)} == {*b"abcdefghijklmnopqrstuvwxyz0123456789 ", ByteTokenizer.eos_ids[0]}
    with ToyBackend(seed=5) as policy, policy.base_sampler().result() as sampler:
        tokens = policy.tokenizer.encode("Call 7")
        logprobs, (ids, best) = sampler.logprobs(tokens).result(), sampler.top_logprobs(tokens, 1).result()
    np.testing.assert_allclose(logprobs[1:], [-4.10739, -3.98049, -3.93277, -3.94378, -3.42161], atol=1e-5)
    assert ids.shape == best.shape == (6, 1)
    assert (best[1:, 0] >= logprobs[1:]).all()


LONG = rlkit.SamplingParams(max_tokens=30, stop=())


def test_a_live_sampler_is_the_policy_of_its_last_update():
    """A snapshot, to the bit, until something is trained; updates stand in the order of calls."""
    with rlkit.connect("toy", seed=0) as policy:
        live, frozen = policy.live_sampler().result(), policy.sampler().result()
        assert isinstance(policy, LiveSampling)  # else conformance skips its test
        assert (isinstance(frozen, LiveSampler), live.switches, live.update().result()) == (False, "token", 0)
        for a, b in zip(*(s.sample(PROMPT, LONG, n=3, seed=1).result() for s in (live, frozen)), strict=True):
            assert (a.tokens.tolist(), a.logprobs.tobytes()) == (b.tokens.tolist(), b.logprobs.tobytes())
            assert a.versions is b.versions is None
        updates = []
        for _ in range(2):
            step(policy)
            updates.append(live.update())
        assert (updates[1].result(), updates[0].result(), live.version) == (2, 1, 2)
        (sample,) = live.sample(PROMPT, LONG, seed=0).result()
        assert (sample.version, sample.versions) == (2, None)


def test_a_live_sampler_refuses():
    """Bad arguments; requests and updates once it is closed, and updates once its policy is."""
    with rlkit.connect("toy", seed=0) as policy:
        with pytest.raises(rlkit.ConfigError, match="recompute"):
            policy.live_sampler(recompute=3)
        live, other = policy.live_sampler().result(), policy.live_sampler().result()
        with pytest.raises(rlkit.DataError):
            live.sample("text", LONG)
        live.close()
        policy.close()
        for call, message in (
            (live.update, "sampler is closed"),
            (lambda: live.sample(PROMPT, LONG), "sampler is closed"),
            (lambda: live.logprobs(PROMPT), "sampler is closed"),
            (other.update, "the toy backend is closed"),
            (policy.live_sampler, "the toy backend is closed"),
        ):
            with pytest.raises(rlkit.BackendError, match=message):
                call()
