"""Packing: every datum sees what it would see alone, and gives the same outputs and gradients."""

from __future__ import annotations

import functools
import itertools
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from tests.properties import examples

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
from rlkit.backends.local.attention import tree  # noqa: E402
from rlkit.backends.local.attention.tree import Window  # noqa: E402
from rlkit.backends.local.training import _attention as kernels  # noqa: E402
from rlkit.backends.local.training.micro_batches import pack  # noqa: E402
from tests.backends.local import white_box  # noqa: E402
from tests.models.families import FAMILIES  # noqa: E402
from tests.models.family import build  # noqa: E402


@st.composite
def batches_of_data(draw):
    """Groups behind shared prompts, some datums alone, masks with gaps, some all masked out."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    data = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = rng.integers(3, 200, rng.integers(1, 12))
        for _ in range(draw(st.integers(1, 5))):
            rest = rng.integers(3, 200, rng.integers(1, 9))
            own = rng.random(rest.size) < 0.7
            own[0] = rng.random() < 0.8
            mask = np.concatenate([np.zeros(prompt.size, bool), own])
            data.append(rlkit.Datum(np.concatenate([prompt, rest]), mask, {"advantages": rng.normal()}))
    return [data[i] for i in rng.permutation(len(data))]


def fits(data, batch, budget):
    """Whether a batch is within the budget, or its first datum alone is not and it has at most twice as much."""
    first = np.flatnonzero(data[batch.members[0]].mask)[-1]
    return len(batch.members) == 1 or batch.tokens.size <= (2 * first if first > budget else budget)


@given(batches_of_data(), st.integers(8, 80), st.booleans())
@examples(80)
def test_every_token_sees_its_own_past(data, budget, share):
    """Each scored token is predicted from exactly its own datum's earlier tokens, at their own positions."""
    seen = []
    for batch in pack(data, budget, share=share):
        seen_from = visible(batch)
        if share:
            assert fits(data, batch, budget)
        else:
            rows, index = batch.rows()
            assert len(batch.members) == 1 or rows.size <= budget
            assert all(not run.before for run in batch.runs)
        places = iter(zip(batch.index, batch.index if share else index, strict=True))
        for i in batch.members:
            seen.append(i)
            for t in np.flatnonzero(data[i].mask):
                place, in_rows = next(places)
                keys = np.flatnonzero(seen_from[place])
                assert batch.tokens[keys].tolist() == data[i].tokens[:t].tolist()
                assert batch.positions[keys].tolist() == list(range(t))
                if not share:
                    row, column = divmod(int(in_rows), rows.shape[1])
                    assert rows[row, : column + 1].tolist() == data[i].tokens[:t].tolist()
    assert sorted(seen) == [i for i, datum in enumerate(data) if datum.mask.any()]


@given(batches_of_data(), st.integers(8, 60))
@examples(40)
def test_pairs_stay_together(data, budget):
    """Datums 2k and 2k + 1 are in one batch, one behind the other."""
    data = [datum for datum in data if datum.mask.any()]
    data = data[: len(data) // 2 * 2]
    for batch in pack(data, budget, pairs=True):
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(batch.members[::2], batch.members[1::2], strict=True))


def test_a_group_reads_its_prompt_once():
    """Eight completions of 4 tokens behind a prompt of 20 are 20 + 8 * 3 tokens."""
    data = [rlkit.Datum.supervised(np.arange(1, 21), np.full(4, k + 30)) for k in range(8)]
    (batch,) = pack(data, 1024)
    assert batch.tokens.shape == (20 + 8 * 3,)
    assert sum(b.tokens.size for b in pack(data, 1024, share=False)) == 8 * 23


def test_turns_of_episodes_share_their_history():
    """Four episodes of three turns, a datum each, with one opening: every token of the tree is computed once."""
    data, distinct = [], set()
    for k in range(4):
        history = [1, 2, 3, 4, 5]
        for turn in range(3):
            answer = [10 * k + turn + 20] * 4
            data.append(rlkit.Datum.supervised(history, answer))
            distinct |= {tuple([*history, *answer[:-1]][: n + 1]) for n in range(len(history) + 3)}
            history = [*history, *answer, 7, 8]
    (batch,) = pack([data[i] for i in np.random.default_rng(0).permutation(12)], 1024)
    assert batch.tokens.size == len(distinct)


@pytest.fixture
def double(monkeypatch):
    """In float32 a random Qwen3 is 4e-5 off float64 by itself, whoever computes it."""
    white_box.allow_float64(monkeypatch)


TREES = [name for name, family in FAMILIES.items() if family.layout == "packed"]


@pytest.mark.parametrize("name", [*TREES, "bloom", "mamba"])  # of which the last two are computed as rows
@pytest.mark.filterwarnings("ignore:.*get no adapter", "ignore:model .* its context is limited to")
def test_no_number_is_changed(name, tmp_path, double):
    """Outputs, loss and gradient are those of peft's own modules on every datum by itself; long ones, too."""
    rng, wrong, experts = np.random.default_rng(0), [], "experts" in FAMILIES[name].note
    # Of float32 logits, and of norms that libraries compute in float32; experts are in float32 as a whole.
    bounds = 2e-5, (5e-5 if name == "gemma4_text, shared keys" else 1e-5)
    with connect(build(FAMILIES[name], tmp_path), rng, {"rank": 4}, "float32" if experts else "float64") as policy:
        assert policy._trainer.forward.shares == (name in TREES)
        data = random_tree(rng)
        near = policy.forward(data).result().selected  # ratios near 1, as in training; far ones amplify rounding
        data = [d.with_inputs(sampling_logprobs=lp - 0.05, advantages=1.0) for d, lp in zip(data, near, strict=True)]
        for loss, want, budget in (("cross_entropy", (), 90), ("ppo", ("entropy",), 24)):
            policy._trainer._budget = policy._trainer.forward._budget = budget
            (a, packed), (b, alone) = both(policy, data, loss, want)
            numbers = [[*out.logprobs, *out.outputs.get("entropy", [])] for out in (a, b)]
            off = max(np.abs(x - y).max() for x, y in zip(*numbers, strict=True)), relative(packed, alone)
            if off[0] > bounds[0] or off[1] > bounds[1]:
                wrong.append((loss, budget, off))
    assert wrong == []


def test_adapters_on_some_modules(tiny, double, monkeypatch):
    """The gradients are right whichever modules have an adapter, and where long runs are cut."""
    rng, wrong = np.random.default_rng(1), []
    monkeypatch.setattr(tree, "SCORES", 50)
    for lora in (
        {"train_mlp": False},
        {"train_attn": False},
        {"train_unembed": False},
        {"train_attn": False, "train_mlp": False},  # the head alone
        {"target_modules": ("layers.1.self_attn.k_proj",)},  # nothing below it has a gradient
    ):
        with connect(tiny("qwen3"), rng, {"rank": 3, "alpha": 7, **lora}) as policy:
            (_, packed), (_, alone) = both(policy, random_tree(rng), "importance_sampling")
        if relative(packed, alone) > 2e-6:
            wrong.append((lora, relative(packed, alone)))
    assert wrong == []


def connect(model, rng, lora, dtype="float64"):
    """A policy whose adapter is not zero."""
    lora = rlkit.Lora(**{"train_unembed": True, **lora})
    policy = rlkit.connect("local", model=model, lora=lora, seed=0, device="cpu", dtype=dtype)
    for parameter in white_box.parameters(policy).values():
        parameter.data.add_(torch.from_numpy(0.05 * rng.normal(size=parameter.shape)).to(parameter))
    return policy


def both(policy, data, loss, want=()):
    """Outputs and gradients, and those of peft's own modules."""
    found = []
    for _ in white_box.forwards(policy):
        output = policy.forward_backward(data, loss, want=want).result()
        found.append((output, [p.grad.clone() for p in white_box.parameters(policy).values()]))
        policy.discard().result()
    return found


WINDOWS = st.sampled_from([None, Window(1), Window(3), Window(10), Window(60), Window(4, chunks=True)])


@given(
    st.integers(0, 2**32),
    st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    st.sampled_from([200, 3000, 2**22]),
    WINDOWS,
    st.sampled_from([None, 2.0]),
    st.booleans(),
)
@examples(60)
def test_tree_attention_is_that_of_its_definition(seed, heads, scores, window, cap, has_sinks):
    """On random trees, in blocks of any size, with capped scores and sinks, values as wide as keys or not."""
    rng = np.random.default_rng(seed)
    (batch,) = pack(random_tree(rng), 10**6)
    n, group = batch.tokens.size, heads[0] // heads[1]
    shapes = (n, heads[0], 8), (n, heads[1], 8), (n, heads[1], int(rng.integers(4, 9)))
    q, k, v = (torch.from_numpy(rng.normal(size=shape)).requires_grad_() for shape in shapes)
    sinks = torch.from_numpy(rng.normal(size=heads[0])) if has_sinks else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "SCORES", scores)
        patch.setattr(tree, "QUERIES", int(rng.integers(1, 20)))
        attention = tree.TreeAttention(batch.runs, *heads, window, cap, sinks)
        with torch.no_grad():
            out, saved = attention.forward(q, k, v)
            grad = torch.from_numpy(rng.normal(size=out.shape))
            found = [out, *attention.backward(grad, saved)]

    pairs = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, dim=1))
    pairs = pairs if cap is None else cap * torch.tanh(pairs / cap)
    weights = pairs.exp() * torch.from_numpy(visible(batch, window))
    total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.exp()[:, None, None])
    out = torch.einsum("hnm,mhe->nhe", weights / total, v.repeat_interleave(group, dim=1)).flatten(1)
    expected = [out, *torch.autograd.grad(out, [q, k, v], grad)]
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


@given(st.integers(0, 2**32), st.sampled_from([(4, 2), (3, 3), (6, 1)]), WINDOWS)
@examples(20)
def test_masked_attention_is_tree_attention(seed, heads, window):
    """The kernel that GPUs have without a compiler, and its gradients."""
    rng = np.random.default_rng(seed)
    (batch,) = pack(random_tree(rng), 10**6)
    q, k, v = (torch.from_numpy(rng.normal(size=(batch.tokens.size, h, 8))) for h in (heads[0], heads[1], heads[1]))
    grad, found = torch.from_numpy(rng.normal(size=(batch.tokens.size, heads[0] * 8))), []
    masked = kernels.MaskedAttention(torch.from_numpy(visible(batch, window)))
    for attention in (tree.TreeAttention(batch.runs, *heads, window), masked):
        out, saved = attention.forward(q, k, v)
        found.append([out, *attention.backward(grad, saved)])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@given(st.integers(0, 2**32), WINDOWS)
@examples(20)
def test_windows_hold_in_every_sequence(seed, window):
    """Each place of a tree sees those of its own sequence that the window has, from its position there."""
    (batch,) = pack(random_tree(np.random.default_rng(seed)), 10**6)
    within, every = visible(batch, window), visible(batch)
    for place, at in enumerate(batch.positions):
        seen = np.flatnonzero(within[place])
        size = at + 1 if window is None else at % window.size + 1 if window.chunks else min(at + 1, window.size)
        assert every[place, seen].all()
        assert sorted(batch.positions[seen]) == list(range(at + 1 - size, at + 1))


@given(st.integers(0, 2**32), st.sampled_from([(4, 2), (3, 3), (6, 1)]), WINDOWS)
@examples(25)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_masked_attention_sees(seed, heads, window):
    """On random trees; not compiled, forward alone, which is what a CPU can do."""
    rng = np.random.default_rng(seed)
    (batch,) = pack(random_tree(rng), 10**6)
    begins, ends = tree.spans(batch.runs)
    places = np.arange(batch.tokens.size)
    seen = (begins <= begins[:, None]) & (begins[:, None] < ends) & (places <= places[:, None])
    assert np.array_equal(seen, visible(batch))
    q, k, v = (torch.from_numpy(rng.normal(size=(batch.tokens.size, h, 16))) for h in (heads[0], heads[1], heads[1]))
    flex = kernels.FlexAttention(batch.runs, torch.device("cpu"), window, compiled=False)
    expected = kernels.MaskedAttention(torch.from_numpy(visible(batch, window))).forward(q, k, v)[0]
    assert torch.allclose(flex.forward(q, k, v)[0], expected, atol=1e-12)


@pytest.mark.skipif(shutil.which("g++") is None, reason="flex_attention is compiled for a CPU with g++")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch's code for it has vector instructions alone"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_compiles(tmp_path, monkeypatch):
    """With captured spans, for two sizes; a CPU has the forward pass alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what it keeps does not know other instructions apart
    for last in (300, 517):
        runs = [
            tree.Segment(0, 150),
            tree.Segment(150, 290, (slice(0, 100),)),
            tree.Segment(290, last, (slice(0, 150),)),
        ]
        q, k, v = torch.randn(3, last, 4, 64, generator=torch.Generator().manual_seed(0)).unbind()
        visible = torch.from_numpy(tree.visible(runs, last))
        with torch.no_grad():
            found, _ = kernels.FlexAttention(runs, torch.device("cpu")).forward(q / 8, k, v)
            expected, _ = kernels.MaskedAttention(visible).forward(q / 8, k, v)
        assert torch.allclose(found, expected, atol=1e-5)


def test_without_a_working_compiler_attention_is_masked(monkeypatch):
    """With a warning, once; the numbers are those of the mask."""

    def broken(*_, **__):
        torch._check(False, lambda: "no compiler")  # torch raises a RuntimeError

    monkeypatch.setattr(kernels, "FlexAttention", broken)
    kernels._flex_works.cache_clear()
    (batch,) = pack(random_tree(np.random.default_rng(0)), 10**6)
    with pytest.warns(UserWarning, match="flex_attention is not used.*no compiler"):
        found = kernels.gpu_attention(batch.runs, 4, 2, 16, torch.float32, torch.device("cpu"))
    assert isinstance(found, kernels.MaskedAttention)
    assert isinstance(
        kernels.gpu_attention(batch.runs, 4, 2, 16, torch.float32, torch.device("cpu")), kernels.MaskedAttention
    )
    kernels._flex_works.cache_clear()


def visible(batch, window=None):
    """Which places each one sees, bool [N, N]."""
    return tree.visible(batch.runs, batch.tokens.size, window)


def relative(a, b):
    """The norm of the difference of two gradients, in norms of the second."""
    a, b = (torch.cat([x.flatten() for x in tensors]) for tensors in (a, b))
    return float((a - b).norm() / b.norm())


def random_tree(rng):
    """Groups behind shared prompts; some episodes go on for a second turn."""
    data = []
    for _ in range(3):
        prompt = rng.integers(3, 200, rng.integers(1, 20))
        for _ in range(rng.integers(1, 6)):
            n = int(rng.integers(1, 12))
            sample = rlkit.Sample(prompt, rng.integers(3, 200, n), -rng.random(n) * 5)
            data.append(sample.datum(rng.normal(), weights=rng.normal()))
            if rng.random() < 0.5:
                longer = np.concatenate([sample.tokens, rng.integers(3, 200, 3)])
                second = rlkit.Sample(np.concatenate([prompt, longer]), rng.integers(3, 200, n), -rng.random(n) * 5)
                data.append(second.datum(rng.normal(), weights=rng.normal()))
    return [data[i] for i in rng.permutation(len(data))]


@given(batches_of_data(), st.integers(8, 80))
@examples(60)
def test_no_other_cut_computes_less(data, budget):
    """Against every way to cut the sorted datums: tokens, and a 32nd of the budget for each batch."""
    order = [i for batch in pack(data, 10**6) for i in batch.members][:9]
    data = [data[i] for i in order]
    found = pack(data, budget)
    assert [i for batch in found for i in batch.members] == list(range(len(data)))
    one = functools.cache(lambda i, j: pack(data[i:j], 10**6)[0].tokens.size)
    best = np.inf
    for bits in itertools.product((False, True), repeat=max(0, len(data) - 1)):
        cuts = [0, *(k for k, cut in enumerate(bits, 1) if cut), len(data)]
        parts = [p for p in itertools.pairwise(cuts) if p[0] < p[1]]
        limits = [max(budget, 2 * one(p[0], p[0] + 1) * (one(p[0], p[0] + 1) > budget)) for p in parts]
        if all(one(*p) <= limit or p[1] == p[0] + 1 for p, limit in zip(parts, limits, strict=True)):
            best = min(best, sum(one(*p) + budget / 32 for p in parts))
    assert not data or sum(b.tokens.size + budget / 32 for b in found) == pytest.approx(best)


def test_groups_stay_whole():
    """Two groups of 110 tokens do not fit into 200; cut in the middle of one, its prompt would be computed twice."""
    data = [rlkit.Datum.supervised(np.arange(p, p + 61), np.full(11, k + 100)) for p in (1, 5, 9) for k in range(5)]
    assert [batch.tokens.size for batch in pack(data, 200)] == [61 + 5 * 10] * 3


@given(batches_of_data(), st.integers(8, 80), st.integers(2, 5), st.booleans())
@examples(60)
def test_several_processes_have_no_more_rounds(data, budget, among, share):
    """Nor larger batches, and each datum is in one of them."""
    alone, found = pack(data, budget, share=share), pack(data, budget, share=share, among=among)
    assert sorted(i for b in found for i in b.members) == sorted(i for b in alone for i in b.members)
    assert -(-len(found) // among) <= -(-len(alone) // among)
    assert all(fits(data, b, budget) for b in found)


def test_several_processes_have_as_much_to_do():
    """A group is cut where its prompt costs less than waiting; where there are more rounds, batches of a size meet."""
    data = [rlkit.Datum.supervised(np.arange(500), np.full(101, k)) for k in range(8)]
    for among, sizes in ((1, [1300]), (2, [900, 900]), (3, [700, 800, 800]), (8, [600] * 8)):
        assert [batch.tokens.size for batch in pack(data, 10**4, among=among)] == sizes
    data = [rlkit.Datum.supervised([k], np.full(size, k)) for k, size in enumerate([9, 30, 9, 30])]
    assert [batch.tokens.size for batch in pack(data, 30, among=2)] == [9, 9, 30, 30]


@pytest.mark.parametrize("share", [True, False])
def test_many_datums_are_packed_fast_enough(share):
    """Ten thousand of them: no step is quadratic."""
    rng = np.random.default_rng(0)
    data = [
        rlkit.Datum.supervised(rng.integers(3, 50, 4), rng.integers(3, 50, rng.integers(1, 8))) for _ in range(10**4)
    ]
    batches = pack(data, 16384, share=share)
    assert sorted(i for batch in batches for i in batch.members) == list(range(10**4))


@given(batches_of_data(), st.integers(4, 60))
@examples(60)
def test_rows_of_pairs_stay_within_the_budget(data, budget):
    """Padded rows count, also where the first of a pair is the longer one."""
    data = [datum for datum in data if datum.mask.any()]
    data = data[: len(data) // 2 * 2]
    for batch in pack(data, budget, pairs=True, share=False):
        assert len(batch.members) == 2 or batch.rows()[0].size <= budget


def test_the_longer_of_a_pair_counts():
    """Pairs of 9 and 1 tokens: two pairs are four rows of 9, not of 1."""
    data = [rlkit.Datum.supervised([3], np.arange(4, 4 + n)) for n in (9, 1, 9, 1)]
    assert [len(batch.members) for batch in pack(data, 20, pairs=True, share=False)] == [2, 2]
