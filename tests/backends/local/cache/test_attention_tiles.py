"""Attention over slots: the same bits in any company, and what it computes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.attention.tree import Window, narrowed  # noqa: E402
from rlkit.backends.local.cache import kv_cache  # noqa: E402
from rlkit.backends.local.cache.kv_cache import LENGTHS, TERMS, SharedPrefix, matmul_attention  # noqa: E402

AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
KEYS = 4 * TERMS


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(3, 1, 8), (9, 3, 64), (4, 4, 16), (8, 2, 96), (1, 1, 64), (4, 2, 256)])
@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.skipif(AVX2, reason="MKL's sums may hang on shapes here, which capabilities() says")
@pytest.mark.usefixtures("threads")
def test_a_token_is_alike_in_any_company(shape, window):
    """Alone, among other queries, with more keys, in more rows, with shared beginnings."""
    heads, key_heads, width = shape
    generator = torch.Generator().manual_seed(1)

    def random(rows, heads, length):
        return torch.randn(rows, heads, length, width, generator=generator)

    size = 2 * KEYS + 5 * LENGTHS
    queries, keys, values = random(1, heads, size) * width**-0.5, random(4, key_heads, size), random(4, key_heads, size)
    sinks = None if window is None else torch.randn(heads, generator=generator)
    keys[:, :, :KEYS], values[:, :, :KEYS] = keys[:1, :, :KEYS], values[:1, :, :KEYS]  # they begin alike

    def computed(first, count, longest, rows, shared=None):
        places = torch.arange(first, first + count)
        hidden = torch.arange(longest) > places[:, None]
        mask = torch.zeros(rows, 1, *hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
        mask = narrowed(mask, None if window is None else Window(window), places[None])
        query = queries[:, :, first : first + count].expand(rows, -1, -1, -1)
        options = {"sinks": sinks, "shared": shared}
        return matmul_attention(query, keys[:rows, :, :longest], values[:rows, :, :longest], mask, **options)[0]

    whole = computed(0, size, size, 1)
    for place in (*range(0, KEYS, 67), 106, 255, 256, 400, 590):
        least = -(-(place + 1) // LENGTHS) * LENGTHS
        together = SharedPrefix(KEYS, [[0, 1, 2, 3]]) if place >= KEYS else None
        for longest in range(least, size + 1, 13 * LENGTHS):
            assert torch.equal(computed(place, 1, longest, 1), whole[place : place + 1])
            assert torch.equal(computed(place, 1, longest, 4, together), whole[place : place + 1])
        count = min(7, size - place)
        assert torch.equal(computed(place, count, size, 2), whole[place : place + count])


def test_what_rows_share_reaches_the_attention(monkeypatch):
    """Through modules that do not know of it."""
    seen, shared = [], SharedPrefix(KEYS, [[0, 1]])
    monkeypatch.setattr(kv_cache, "matmul_attention", lambda *args: seen.append(args[-1]) or args[0].transpose(1, 2))
    q = torch.zeros(2, 3, 1, 8)
    with kv_cache.sharing(shared):
        kv_cache._attend_in_slots(None, q, q, q, torch.zeros(2, 1, 1, 1))
    kv_cache._attend_in_slots(None, q, q, q, torch.zeros(2, 1, 1, 1))
    assert seen == [shared, None]


@pytest.mark.parametrize("cap", [None, 2.0])
def test_sinks_take_their_share(cap):
    """As one more score in each query's softmax, whose weight is thrown away; against float64, capped scores, too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, generator=generator) for h, n in ((6, 3), (2, 32), (2, 32)))
    sinks, mask = torch.randn(6, generator=generator), torch.randn(2, 1, 3, 32, generator=generator)
    found, _ = kv_cache._attend_in_slots(None, q, k, v, mask, softcap=cap, s_aux=sinks)
    keys, values = (x.double().repeat_interleave(3, dim=1) for x in (k, v))
    scores = q.double() @ keys.transpose(-1, -2) / 8**0.5
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)) + mask.double()
    every = torch.cat([scores, sinks.double().view(1, 6, 1, 1).expand(2, 6, 3, 1)], dim=-1)
    expected = every.softmax(-1)[..., :-1] @ values
    assert torch.allclose(found.double(), expected.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize("cast", [2**17, 300])
def test_keys_in_bfloat16_are_cast_some_rows_at_a_time(cast, monkeypatch):
    """However many; scores are in float32, so that the result is rounded like its factors."""
    monkeypatch.setattr(kv_cache, "CAST", cast)
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 1), (2, 32), (2, 32))
    q, k, v = (torch.randn(5, h, n, 8, generator=generator).to(torch.bfloat16) for h, n in shapes)
    mask = torch.randn(5, 1, 1, 32, generator=generator)
    found = matmul_attention(q, k, v, mask)
    keys, values = (x.double().repeat_interleave(3, dim=1) for x in (k, v))
    weights = (q.double() @ keys.transpose(-1, -2) + mask.double()).softmax(-1)
    assert torch.allclose(found.double(), (weights @ values).transpose(1, 2), atol=0.02)
