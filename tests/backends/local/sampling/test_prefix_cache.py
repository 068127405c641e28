"""Sampling that continues from stored prefixes gives, to the bit, what a cold engine gives."""

from __future__ import annotations

import collections
import gc
import itertools
import math
import shutil
import time
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from tests.properties import examples

pytest.importorskip("peft")
from rlkit.backends.local.cache import kv_cache as attention
from rlkit.backends.local.cache.kv_cache import QUERIES, TERMS, KVCache, SharedPrefix
from rlkit.backends.local.cache.prefix_cache import BLOCK, PrefixCache, block_names
from rlkit.backends.local.model import base
from rlkit.backends.local.model.forward import SamplingForward
from rlkit.backends.local.products.prepacked import ROW_UNIT
from rlkit.backends.local.sampling import _batching
from rlkit.backends.local.sampling.sampler import take_snapshot
from tests.backends.local import white_box

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def connect(model, **options):
    return rlkit.connect(
        "local", model=model, lora=rlkit.Lora(rank=4, train_unembed=True), seed=0, device="cpu", **options
    )


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "mistral", "gemma2"])
def pair(tiny, request):
    """A sampler that keeps prefixes, one that keeps none, and the first one's decoder."""
    policies = [connect(tiny(request.param)), connect(tiny(request.param), prefix_mb=0)]
    white_box.require_invariance(policies[0])
    samplers = [policy.sampler().result() for policy in policies]
    for sampler in samplers:
        sampler.sample([5], rlkit.SamplingParams(max_tokens=1)).result()
    yield *samplers, white_box.decoder(policies[0])
    for policy in policies:
        policy.close()


def bits(samples):
    return [(s.tokens.tolist(), s.logprobs.tobytes()) for s in samples]


@st.composite
def turns(draw):
    """Rounds of requests; each prompt is a cut of an earlier sequence, or of none, and some new tokens."""
    token = st.integers(3, 40)
    rounds = []
    for _ in range(draw(st.integers(2, 4))):
        request = st.tuples(
            st.integers(0, 30),  # which earlier sequence
            st.integers(0, 70),  # tokens of it
            st.lists(token, min_size=1, max_size=draw(st.sampled_from([3, 30]))),
            st.integers(1, 3),  # completions
            st.integers(1, 12),  # their tokens
        )
        rounds.append(draw(st.lists(request, min_size=1, max_size=5)))
    return rounds


@examples(10)
@given(rounds=turns(), blocks=st.sampled_from([1, 3, 8, 1000]))
def test_reuse_changes_nothing(pair, rounds, blocks):
    """Random trees of turns, with evictions: every sample is that of an engine without a memory, asked one by one."""
    warm, cold, decoder = pair
    size = 4 * BLOCK * per_token(decoder.kv_cache)  # bytes of a block
    decoder.prefix_cache = PrefixCache(blocks * size)
    known = [np.zeros(0, np.int64)]
    for number, requests in enumerate(rounds):
        asked = []
        for which, cut, new, n, max_tokens in requests:
            prompt = np.concatenate([known[which % len(known)][:cut], np.array(new)])[:100]
            params = rlkit.SamplingParams(max_tokens=max_tokens, stop=())
            asked.append((prompt, params, n, number))
        futures = [warm.sample(prompt, params, n=n, seed=seed) for prompt, params, n, seed in asked]
        for (prompt, params, n, seed), future in zip(asked, futures, strict=True):
            found = future.result()
            assert bits(found) == bits(cold.sample(prompt, params, n=n, seed=seed).result())
            known += [np.concatenate([prompt, sample.tokens]) for sample in found]
        assert sum(block.nbytes for block in decoder.prefix_cache.entries.values()) <= blocks * size


def per_token(slots):
    return sum(x.shape[1] * x.shape[3] for layer in slots.store for x in layer)


@pytest.fixture(scope="module")
def wide(tiny, tmp_path_factory):
    """A model whose matrices have the sizes of a real one: their kernels choose by shape how they add."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(tiny("llama"), folder, dirs_exist_ok=True)
    config = transformers.AutoConfig.from_pretrained(folder)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    for name, value in {**shape, "head_dim": 64, "max_position_embeddings": 1024}.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=[1, 2])
def threads(request):
    """Each cuts products in its own way."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_real_widths(wide, monkeypatch):
    """Alone or in company, of short rows or of long ones, split or at once, continued or not: the same bits."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 290, 430)
    params = rlkit.SamplingParams(max_tokens=5, stop=())
    policy = connect(wide, prefix_mb=0)
    white_box.require_invariance(policy)
    cold = policy.sampler().result()
    expected = bits(cold.sample(prompt, params, seed=1).result())
    shared = []
    monkeypatch.setattr(attention, "_apart", lambda x, n: shared.append(n) or x.unflatten(1, (n, -1)).transpose(0, 1))
    other = [*prompt[:300], 7, 8]
    groups = [cold.sample(prompt, params, n=5, seed=1), cold.sample(other, params, n=5, seed=2)]
    assert bits(groups[0].result()[:1]) == expected
    assert bits(groups[1].result()[:1]) == bits(cold.sample(other, params, seed=2).result())
    assert 10 in shared  # what rows begin with was read once
    long = cold.sample(rng.integers(3, 290, 900), params, n=2, seed=3)
    few = cold.sample(prompt, params, seed=1)
    many = cold.sample(prompt[:50], params, n=30, seed=4)
    assert bits(few.result()) == expected
    assert long.result()
    assert many.result()
    warm = connect(wide).sampler().result()
    first = warm.sample(prompt[:400], rlkit.SamplingParams(max_tokens=30, stop=()), seed=5).result()[0]
    longer = np.concatenate([prompt[:400], first.tokens, prompt[:11]])
    both = [warm.sample(prompt, params, seed=1), warm.sample(longer, params, seed=6)]
    assert bits(both[0].result()) == expected
    assert bits(both[1].result()) == bits(cold.sample(longer, params, seed=6).result())


@pytest.mark.usefixtures("threads")
def test_adapters_beside_real_widths(wide):
    """An adapter that is not merged has products of its own, narrow ones, which are alike as well."""
    options = {"merge": False, "prefix_mb": 0, "device": "cpu", "seed": 0}
    policy = rlkit.connect("local", model=wide, lora=rlkit.Lora(rank=32, train_unembed=True), **options)
    rng = np.random.default_rng(0)
    for parameter in white_box.parameters(policy).values():
        parameter.data.add_(torch.from_numpy(0.02 * rng.normal(size=parameter.shape)).to(parameter))
    white_box.require_invariance(policy)
    sampler, params = policy.sampler().result(), rlkit.SamplingParams(max_tokens=6, stop=())
    for n, others in ((1, 7), (3, 30), (5, 2), (90, 30)):
        prompt = rng.integers(3, 290, n)
        alone = bits(sampler.sample(prompt, params, seed=1).result())
        futures = [sampler.sample(p, params, seed=1) for p in (prompt, *rng.integers(3, 290, (others, 10)))]
        assert bits(futures[0].result()) == alone
        assert all(future.result() for future in futures)


def test_shapes_are_multiples():
    """Whatever the rows and lengths, they are held, in a multiple of the unit."""
    for rows, length, unit in itertools.product(range(1, 20), range(1, 20), (1, 4)):
        high, wide = _batching._padded_shape(rows, length, unit)
        assert high >= rows
        assert wide >= length
        assert high * wide % unit == 0
        assert high * wide < rows * length + unit * max(rows, length)


@pytest.mark.parametrize("options", [{"merge": True}, {"merge": False}, {"merge": False, "large": True}])
def test_products_that_are_alike_in_any_company(options, tiny, tmp_path, monkeypatch):
    """Those with weights are oneDNN's, of a multiple of 4 rows; attention's have 4 queries and sum at most 64 terms.

    Which sums a library splits otherwise depends on the processor, so bits alone do not show all of this on one.
    """
    large = options.pop("large", False)
    if large:
        monkeypatch.setattr(base, "COPIED_UNDER", 0)
    shutil.copytree(tiny("qwen3"), tmp_path, dirs_exist_ok=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path, head_dim=96, max_position_embeddings=512)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    policy = connect(tmp_path, **options)
    policy.forward_backward([rlkit.Datum([5, 6, 7], [0, 1, 1])], "cross_entropy")
    policy.optim_step(rlkit.Adam(learning_rate=0.1)).result()
    forward = SamplingForward(policy.base, policy.base.tree(attention.ATTENTION))
    decoder = _batching.ContinuousBatching(forward, policy.base, 0, merge=options["merge"])
    decoder.use(take_snapshot(policy._policy.peft, 0, 1.0))
    tokens = np.resize(np.arange(3, 200), 300)
    starts, shared = np.array([150, 149, 3]), SharedPrefix(TERMS, [[0, 1], [2]])
    called = []

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            if name in ("_linear_pointwise", "mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv"):
                called.append((name, *args[-2 if name == "bmm" else 0].shape))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Products():
        decoder.prefill(0, [tokens[:149], tokens[:6]], [0, 0])
        decoder.prefill(0, [tokens], [0])
        decoder._logits(tokens[:3, None], 0, starts, np.arange(3), shared)
    products = [shape for name, *shape in called if name == "_linear_pointwise"]
    sums = [shape for name, *shape in called if name == "bmm" and shape[-1] > 1]  # 1: a rotary embedding's angles
    assert len(called) == len(products) + len([name for name, *_ in called if name == "bmm"])
    assert products
    assert sums
    assert all(math.prod(shape[:-1]) % ROW_UNIT == 0 for shape in products)
    assert all(queries % QUERIES == 0 and terms <= TERMS for _, queries, terms in sums)


def test_turns_compute_what_is_new(tiny):
    """A turn that continues an earlier one computes the tokens behind its last whole block, whatever ran meanwhile."""
    sampler = (policy := connect(tiny("llama"))).sampler().result()
    params = rlkit.SamplingParams(max_tokens=9, stop=())
    prompt = np.arange(3, 63)
    first = sampler.sample(prompt, params, seed=0).result()[0]
    sampler.sample([5, 6, 7], params, seed=0).result()
    seen = []
    decoder = white_box.decoder(policy)
    inner = decoder.prefill
    decoder.prefill = lambda first, rests, starts: seen.append(list(starts)) or inner(first, rests, starts)
    turn = np.concatenate([prompt, first.tokens, [9, 9, 9]])
    sampler.sample(turn, params, seed=0).result()
    assert seen == [[(60 + 8) // BLOCK * BLOCK]]  # the last token of a completion is never computed
    policy.forward_backward([first.datum(1.0)], "ppo")
    policy.optim_step(rlkit.Adam(learning_rate=0.1))
    sampler = policy.sampler().result()
    sampler.sample(turn, params, seed=0).result()
    assert seen[1:] == [[0]]  # other weights, other keys


def test_many_prompts_that_end_at_once(tiny):
    """More prompts than are computed together, ending with their first token, so that no row is left in between."""
    rng = np.random.default_rng(0)
    prompts = [np.concatenate([np.arange(3, 36), rng.integers(3, 200, 30 + k)]) for k in range(9)]
    params = rlkit.SamplingParams(max_tokens=1, stop=())
    found = []
    for options in ({}, {"prefix_mb": 0}):
        policy = connect(tiny("llama"), **options)
        white_box.require_invariance(policy)
        sampler = policy.sampler().result()
        futures = [sampler.sample(prompt, params, n=3, seed=0) for prompt in prompts]
        found.append([bits(future.result()) for future in futures])
    assert found[0] == found[1]


def test_blocks_go_with_their_snapshot(tiny):
    """When the last sampler of a snapshot is closed, its adapter and the blocks kept for it are freed."""
    policy = connect(tiny("llama"))
    samplers = [policy.sampler().result(), policy.sampler().result()]
    snapshot = weakref.ref(samplers[0].snapshot)
    params = rlkit.SamplingParams(max_tokens=3, stop=())
    for sampler in samplers:
        sampler.sample(np.arange(3, 40), params).result()
    prefixes = white_box.decoder(policy).prefix_cache
    names = block_names(np.arange(3, 40))
    samplers[0].close()
    gc.collect()
    assert prefixes.find(names) == 2
    samplers[1].close()
    deadline = time.monotonic() + 10  # the worker's last turn may still be ending
    while snapshot() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert snapshot() is None
    assert prefixes.find(names) == 0
    base = policy.base_sampler().result()
    base.sample(np.arange(3, 40), params).result()
    assert white_box.decoder(policy).prefix_cache.find(names) == 2


def filled(rows, length):
    """Slots of one layer with a head of width 2: entry (slot, token) holds 100 slot + token, values negative."""
    slots = KVCache()
    slots.reserve(rows, length)
    keys = (100 * torch.arange(rows)[:, None] + torch.arange(length)).float()[:, None, :, None].expand(-1, 1, -1, 2)
    slots.at(0, torch.arange(length).repeat(rows, 1), length)
    slots.update(keys, -keys, 0)
    return slots


def test_least_recently_used_goes_first():
    """Two sequences with a common first block, room for three blocks: the tail of the one not used lately is gone."""
    a, b = np.arange(2 * BLOCK), np.append(np.arange(BLOCK), np.arange(BLOCK) + 50)
    slots = filled(2, 3 * BLOCK)
    prefixes = PrefixCache(3 * slots.block_bytes(BLOCK))
    names = [block_names(x) for x in (a, b)]
    for slot in (0, 1):
        prefixes.store([(names[slot], slot)], slots)
    assert [prefixes.find(x) for x in names] == [2, 2]  # three blocks in all
    prefixes.load(names[0], slots, 1)
    assert torch.equal(*slots.read_blocks([(1, 0), (0, 0)], 2 * BLOCK))
    other = block_names(np.arange(BLOCK) + 200)
    prefixes.store([(other, 0)], slots)
    assert [prefixes.find(x) for x in (*names, other)] == [2, 1, 1]
    prefixes.store([(block_names(np.arange(5 * BLOCK)[: 3 * BLOCK] + 300), 0)], slots)
    assert [prefixes.find(x) for x in (*names, other)] == [0, 0, 0]
    prefixes.clear()
    assert prefixes.find(block_names(np.arange(BLOCK) + 300)) == 0


@given(
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=5), max_size=4),
    room=st.integers(0, 9),
)
def test_blocks_stored_together_are_those_stored_one_by_one(rounds, room):
    """What is here, in which order and with which contents: as if each block had been read by itself."""
    slots = filled(6, 4 * BLOCK)
    prefixes = PrefixCache(room * slots.block_bytes(BLOCK))
    expected = {}  # the least recently used first: where its contents are
    for rows in rounds:
        rows = [(block_names(np.arange(count * BLOCK) + 100 * slot), slot) for slot, count in rows]
        prefixes.store(rows, slots)
        for names, slot in rows:
            for i, name in reversed(list(enumerate(names))):
                expected[name] = expected.pop(name, (slot, i * BLOCK))
                while len(expected) > room:
                    expected.pop(next(iter(expected)))
    assert list(prefixes.entries) == list(expected)
    for block, (slot, start) in zip(prefixes.entries.values(), expected.values(), strict=True):
        keys = 100.0 * slot + torch.arange(start, start + BLOCK).repeat_interleave(2)
        assert torch.equal(block, torch.cat([keys, -keys]))


def test_many_blocks_take_few_kernels():
    """However many rows end at once, with 8 blocks each; and what would be dropped at once is never read."""
    slots = filled(16, 8 * BLOCK)
    rows = [(block_names(np.arange(8 * BLOCK) + 1000 * slot), slot) for slot in range(16)]
    count = {}
    for room in (0, 8, 128):
        with Kernels() as kernels:
            PrefixCache(room * slots.block_bytes(BLOCK)).store(rows, slots)
        count[room] = sum(kernels.count[name] for name in ("index", "copy_", "cat", "reshape"))
        assert kernels.count["clone"] == room  # a copy for each block that stays
    assert count == {0: 0, 8: 4, 128: 4}


class Kernels(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operation was carried out."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_block_names():
    """A block's name is that of all tokens up to its end; a part of a block has none."""
    a = np.arange(3 * BLOCK)
    assert block_names(a[: BLOCK - 1]) == []
    assert block_names(a)[:2] == block_names(a[: 2 * BLOCK + 3])
    changed = np.append(7, a[1:])
    assert not set(block_names(a)) & set(block_names(changed))
    assert len(set(block_names(np.zeros(3 * BLOCK, np.int64)))) == 3
