"""No faster path is left without a word: a bug of rlkit's warns with its traceback, a refusal is logged."""

from __future__ import annotations

import logging
import warnings

import pytest

from rlkit import _fallback

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from rlkit.backends.local.products import prepacked  # noqa: E402
from rlkit.backends.local.training import _attention  # noqa: E402

CPU = torch.device("cpu")
PRODUCTS = {  # where it breaks, what is remembered of it, and whether it is taken
    "prepacked weights": (
        prepacked.OneDNNWeight,
        "__call__",
        prepacked._works,
        lambda: prepacked._works(torch.float32),
    ),
    "oneDNN's product": (prepacked, "_plain_onednn", prepacked._preferred, prepacked._preferred),
    "products of bfloat16": (prepacked, "wide_matmul", prepacked._right, lambda: prepacked._right(CPU)),
    "flex_attention": (
        _attention.KernelAttention,
        "_flat",
        _attention._flex_works,
        lambda: _attention._flex_works(CPU, torch.float32, 4, 2, 16),
    ),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing was tried or warned of before."""
    monkeypatch.setattr(_fallback, "_warned", set())


def break_it(monkeypatch, where, name, error=TypeError):
    """A call of it raises the error."""

    def fail(*_, **__):
        raise error("a bug")

    monkeypatch.setattr(where, name, fail)


def bugs(said):
    """The warnings that ask for a report."""
    return [str(x.message) for x in said if "please report this bug" in str(x.message)]


@pytest.mark.parametrize("path", PRODUCTS)
def test_a_bug_in_a_product_warns(path, monkeypatch):
    """Once, with its traceback; another product is taken."""
    where, name, kept, works = PRODUCTS[path]
    monkeypatch.setattr(prepacked, "_made_by_intel", lambda: False)
    monkeypatch.setattr(prepacked, "product", lambda x, w: x.float() @ w.float())  # which a CPU does not have
    if path == "flex_attention":
        monkeypatch.setattr(_attention, "FlexAttention", lambda runs, device: _attention.MaskedAttention(CPU))
    for error in (TypeError, AssertionError):
        break_it(monkeypatch, where, name, error)
        kept.cache_clear()
        with pytest.warns(UserWarning, match=f"{path}.* failed and is not used") as said:
            assert not works()
        assert len(bugs(said)) == 1
    kept.cache_clear()


@pytest.mark.parametrize("path", ["prepacked weights", "oneDNN's product", "products of bfloat16"])
def test_a_product_that_is_not_a_number_is_not_taken(path, monkeypatch, caplog):
    """As it agrees with nothing."""
    where, name, kept, works = PRODUCTS[path]
    monkeypatch.setattr(prepacked, "_made_by_intel", lambda: False)
    monkeypatch.setattr(prepacked, "product", lambda x, w: x.float() @ w.float())
    monkeypatch.setattr(prepacked, "add_product", lambda y, x, w: y + x.float() @ w.float())
    right = getattr(where, name)
    for factor in (1.0, torch.nan):
        monkeypatch.setattr(where, name, lambda *args, factor=factor: right(*args) * factor)
        kept.cache_clear()
        with caplog.at_level(logging.INFO, "rlkit"):
            assert works() == (factor == 1.0)
    assert "is not used, so " in caplog.text
    assert "off by nan" in caplog.text
    kept.cache_clear()


def test_whose_error_it_is(caplog):
    """A library's ValueError and what a path declares are refusals; the same raised by rlkit or a test is none."""

    def unsupported():
        raise _fallback.NotSupportedHere("no such thing")

    def wrong(error):
        raise error

    def tried(trial, **options):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert not _fallback.try_path("a path", trial, "it takes longer", **options)
        return [str(x.message) for x in said]

    with caplog.at_level(logging.INFO, "rlkit"):
        assert tried(unsupported) == []
        assert tried(lambda: torch.nn.functional.l1_loss(1, 2)) != []  # no ValueError, if in torch's code
        assert tried(lambda: torch.nn.functional.interpolate(torch.zeros(1, 1, 1, 1))) == []  # a ValueError
        assert tried(lambda: torch._check(False), refusals=(RuntimeError,)) == []
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "a path is not used, so it takes longer: NotSupportedHere: no such thing"
    assert len(told) == 3
    for error in (ValueError("a"), NotImplementedError("a"), KeyError("a"), torch.OutOfMemoryError("a")):
        (text,) = tried(lambda error=error: wrong(error), refusals=(Exception,))
        assert text.startswith("a path failed and is not used, so it takes longer. Numbers stay right; please report")
    assert tried(unsupported, loud=True) == [told[0]]
    assert _fallback.try_path("a path", lambda: _fallback.Outcome(works=True), "it takes longer")
