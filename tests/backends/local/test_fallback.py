"""No faster path is left without a word: a bug of rlkit's warns with its traceback, a refusal is logged."""

from __future__ import annotations

import logging
import re
import shutil
import warnings

import pytest

from rlkit import _fallback
from tests.models.families import FAMILIES
from tests.models.family import build
from tests.models.measure import find_paths

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from rlkit.backends.local.cache.library_cache import RowCache  # noqa: E402
from rlkit.backends.local.model import base as base_module  # noqa: E402
from rlkit.backends.local.model import probe  # noqa: E402
from rlkit.backends.local.model.base import load_base  # noqa: E402
from rlkit.backends.local.products import prepacked  # noqa: E402
from rlkit.backends.local.sampling._batching import ContinuousBatching  # noqa: E402
from rlkit.backends.local.sampling._library import LibraryBatching  # noqa: E402
from rlkit.backends.local.sampling.decoders import decoder_for  # noqa: E402
from rlkit.backends.local.training import _attention  # noqa: E402

CPU = torch.device("cpu")
MODELS = {  # which tiny model has the path, where it breaks, and what is found out about the model then
    "decoding in slots": ("gpt2", ContinuousBatching, "prefill", {"decoding": "cache"}),
    "the library's cache": ("bloom", LibraryBatching, "decode", {"decoding": "whole"}),
    "a cache of unequal rows": ("bloom", RowCache, "remove", {"decoding": "request", "continues": True}),
}
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
    monkeypatch.setattr(probe, "checks_folder", lambda: None)


def break_it(monkeypatch, where, name, error=TypeError):
    """A call of it raises the error."""

    def fail(*_, **__):
        raise error("a bug")

    monkeypatch.setattr(where, name, fail)


def bugs(said):
    """The warnings that ask for a report."""
    return [str(x.message) for x in said if "please report this bug" in str(x.message)]


@pytest.mark.parametrize("path", MODELS)
def test_a_bug_in_the_path_of_a_model_warns(path, tiny, tmp_path, monkeypatch):
    """Once, with its traceback and what to do; another path is taken."""
    kind, where, name, found = MODELS[path]
    break_it(monkeypatch, where, name)
    for again in (False, True):
        folder = shutil.copytree(tiny(kind), tmp_path / f"model{again}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert find_paths(folder).items() >= found.items()
        (text, *others) = bugs(said) or [""]
        assert not others
        assert bool(text) == (not again)
        if text:
            assert text.startswith(f"{path} ({kind}) failed and is not used, so ")
            assert "in fail\n" in text
            assert text.endswith("TypeError: a bug")


def test_a_bug_in_a_continued_cache_warns(tiny, tmp_path, monkeypatch):
    """Only what it is for is left out: prompts that begin with what was computed before."""
    advance = RowCache.advance

    def fail(self, rows, columns):
        if self.end and columns > 1:
            raise LookupError("a bug")
        advance(self, rows, columns)

    monkeypatch.setattr(RowCache, "advance", fail)
    with pytest.warns(UserWarning, match=r"a continued cache \(bloom\) failed"):
        found = find_paths(shutil.copytree(tiny("bloom"), tmp_path / "model"))
    assert found == {"decoding": "cache", "continues": False}


@pytest.mark.parametrize("path", PRODUCTS)
def test_a_bug_in_a_product_warns(path, monkeypatch):
    """As one in the path of a model."""
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


@pytest.mark.filterwarnings("ignore:model .* its context is limited to:UserWarning")
@pytest.mark.parametrize("name", ["codegen", "falcon", "doge", "openai-gpt", "recurrent_gemma", "gpt_neo"])
def test_a_model_that_a_path_does_not_support_is_logged(name, tmp_path, caplog):
    """No warning, which would be an error here."""
    with caplog.at_level(logging.INFO, "rlkit"):
        found = find_paths(build(FAMILIES[name], tmp_path / "model"))
    assert found["decoding"] == FAMILIES[name].path
    assert "is not used, so " in caplog.text


def test_capped_scores_and_sinks_are_decoded_in_slots(tmp_path):
    """Wrong ones would be right by another path, and slower."""
    for name in ("gemma2", "gpt_oss", "llama"):
        assert find_paths(build(FAMILIES[name], tmp_path / name)) == {"decoding": "slots"}, name


def test_what_is_not_tried_in_bfloat16_is_logged(tiny, tmp_path, monkeypatch, caplog):
    """With the reason."""
    monkeypatch.setattr(base_module, "SLOTS", frozenset())
    base = load_base(str(shutil.copytree(tiny("gpt2"), tmp_path / "model")), "bfloat16", "cpu")
    with caplog.at_level(logging.INFO, "rlkit"):
        decoder_for(base, merge=False, prefix_bytes=0, cuda_graphs=False)
    assert base.known.decoding == "request"
    for path in ("decoding in slots", "a continued cache", "a cache of unequal rows"):
        assert re.search(rf"{path} \(gpt2\) is not used, so .* its dtype hides differences", caplog.text)


def test_other_numbers_are_logged_with_their_size(tiny, tmp_path, monkeypatch, caplog):
    """And with the bound."""
    prefill = ContinuousBatching.prefill
    monkeypatch.setattr(ContinuousBatching, "prefill", lambda *args: prefill(*args) * 1.25)
    with caplog.at_level(logging.INFO, "rlkit"):
        found = find_paths(shutil.copytree(tiny("gpt2"), tmp_path / "model"))
    assert found["decoding"] == "cache"
    expected = "decoding in slots (gpt2) is not used, so it is decoded with the library's cache: "
    assert f"{expected}logits differ by 0.25 > 0.0001" in caplog.text


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
