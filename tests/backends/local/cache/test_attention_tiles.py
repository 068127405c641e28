"""How attention is cut: alike for any company, whichever way the processor's library sums."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.attention.tree import Window, narrowed  # noqa: E402
from rlkit.backends.local.cache import kv_cache  # noqa: E402
from rlkit.backends.local.cache.kv_cache import KEYS, LENGTHS, SharedPrefix, Tile, matmul_attention, tile_of  # noqa: E402


@pytest.fixture
def fresh(monkeypatch):
    """Nothing was measured yet."""
    monkeypatch.setattr(kv_cache, "_tiles", {})


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def library(longest, few):
    """Attention that halves sums over more than ``longest`` keys, and sums backwards for < ``few`` queries."""

    def attend(query, key, value, mask, tile):
        missing = -query.shape[2] % tile.queries
        padded = torch.nn.functional.pad(query, (0, 0, 0, missing))
        scores = padded.double() @ key.double().transpose(-1, -2)
        scores[:, :, : query.shape[2]] += mask
        weights, out = torch.softmax(scores, -1).float(), 0
        for start in range(0, key.shape[2], tile.keys):
            part, values = weights[..., start : start + tile.keys], value[..., start : start + tile.keys, :]
            out = out + product(part, values)
        return out[:, :, : query.shape[2]]

    def product(a, b):
        size = a.shape[-1]
        if size > longest:
            half = (size + 1) // 2
            return product(a[..., :half], b[..., :half, :]) + product(a[..., half:], b[..., half:, :])
        order = range(size) if a.shape[2] >= few else reversed(range(size))
        out = torch.zeros(*a.shape[:-1], b.shape[-1])
        for k in order:
            out += a[..., k : k + 1] * b[..., k : k + 1, :]
        return out

    return attend


@pytest.mark.parametrize(("longest", "few", "expected"), [(256, 0, Tile(1, 256)), (40, 4, Tile(4, 32))])
@pytest.mark.usefixtures("fresh")
def test_the_cheapest_cut_that_is_alike_is_found(longest, few, expected, monkeypatch):
    """For libraries that are known: the longest sum that is not split, the fewest queries that are many."""
    monkeypatch.setattr(kv_cache._Trials, "PARTS", ((0, 1), (17, 1), (106, 1), (300, 1), (101, 3), (250, 9)))
    assert tile_of(library(longest, few), 2, 4, 4) == expected


@pytest.mark.usefixtures("fresh")
def test_it_is_measured_once_for_each_number_of_threads(monkeypatch):
    """And again for another width or number of heads."""
    tried = []
    monkeypatch.setattr(kv_cache._Trials, "invariant", lambda _, tile: tried.append(tile) or True)
    for width in (4, 4, 8):
        assert tile_of(kv_cache._attend, 2, width, width) == Tile(1, KEYS)
    assert len(tried) == 4
    tile_of(kv_cache._attend, 1, 4, 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    tile_of(kv_cache._attend, 2, 4, 4)
    assert len(tried) == 8


@pytest.mark.parametrize("shape", [(3, 1, 8), (9, 3, 64), (4, 4, 16), (8, 2, 96), (1, 1, 64)])
@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.usefixtures("threads")
def test_a_token_is_alike_in_any_company(shape, window):
    """Other values than the measured ones: alone, among other queries, with more keys, more rows, shared beginnings."""
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
