"""What names of the registry may stand for, and that what they give is looked at."""

from __future__ import annotations

import pytest

import rlkit
from rlkit.backends import registry


class SamplesAlone:
    @classmethod
    def open_sampler(cls, *, model=None, path=None, **options):
        cls.asked = (model, path, options)
        return rlkit.sampler("toy")


@pytest.fixture(autouse=True)
def names(monkeypatch):
    monkeypatch.setitem(registry, "alone", SamplesAlone)
    monkeypatch.setitem(registry, "nothing", object)


def test_a_package_may_only_sample():
    """Its class method is called with all options; it needs no trainer's methods."""
    with rlkit.sampler("alone", model="m", path="p", speed=2) as sampler:
        assert sampler.sample([65], rlkit.SamplingParams(max_tokens=2)).result()
    assert SamplesAlone.asked == ("m", "p", {"speed": 2})


def test_what_is_no_trainer_or_no_sampler_is_refused(monkeypatch):
    """With what it lacks, and where it can sample, how."""
    with pytest.raises(rlkit.ConfigError, match=r"connect\('alone'\).*no .*forward_backward.*rlkit.sampler\('alone'\)"):
        rlkit.connect("alone")
    with pytest.raises(rlkit.ConfigError, match=r"connect\('nothing'\).*optim_step.*expected a TrainerBackend$"):
        rlkit.connect("nothing")
    monkeypatch.setattr(SamplesAlone, "open_sampler", classmethod(lambda cls, **options: cls))
    with pytest.raises(rlkit.ConfigError, match=r"rlkit.sampler\('alone'\).*has no .*logprobs.*expected a Sampler"):
        rlkit.sampler("alone")
