"""Registries and the error tree."""

from __future__ import annotations

import json
import pickle
import types

import numpy as np
import pytest

import rlkit
from rlkit import ConfigError, Registry, UnknownNameError, errors
from tests.each import for_each


def one():
    pass


@pytest.fixture
def registry(monkeypatch):
    """Two names and, in an installed package, one more: ``registry.asked`` says how often that was asked for."""
    registry = Registry("thing", entry_point_group="rlkit.test")
    registry.register("one")(one)
    registry["lazy"] = "json:dumps"
    registry.asked = []
    point = types.SimpleNamespace(name="added", value="json:loads")
    monkeypatch.setattr("rlkit.registry.entry_points", lambda *, group: registry.asked.append(group) or [point])
    return registry


def test_resolve(registry):
    """A name gives what was registered, a callable itself, a dotted name what it points at."""
    assert registry.resolve("lazy") is json.dumps
    assert registry.resolve(len) is len
    assert dict.__getitem__(registry, "lazy") is json.dumps
    assert registry.resolve("one") is one
    assert not registry.asked, "no package is asked before a name is missing"
    assert registry.resolve("added") is json.loads
    assert registry.asked == ["rlkit.test"]


def test_miss_names_what_exists(registry):
    """A miss suggests a close name and lists all of them."""
    with pytest.raises(UnknownNameError, match="did you mean 'one'.*added, lazy, one"):
        registry.resolve("on")
    with pytest.raises(LookupError):
        registry["nothing"]
    with pytest.raises(ConfigError):
        registry.resolve(3)
    assert registry.get("nothing") is None
    assert registry.get("nothing", 3) == 3


@for_each(
    "read",
    [
        lambda registry: registry["added"],
        lambda registry: registry.get("added"),
        lambda registry: "added" in registry and json.loads,
        lambda registry: dict(registry)["added"],
        lambda registry: dict(registry.items())["added"],
        lambda registry: {name: registry[name] for name in registry}["added"],
        lambda registry: dict(zip(registry.keys(), registry.values(), strict=True))["added"],
    ],
    ids=["[]", "get", "in", "dict", "items", "iter", "keys"],
)
def test_every_way_to_read_it_imports_and_loads_entry_points(registry, read):
    """Also as the first look into it; it gives implementations, never dotted names (trap T8)."""
    fresh = Registry("thing", entry_point_group="rlkit.test")
    fresh["lazy"] = "json:dumps"
    assert read(fresh) is json.loads
    assert sorted(fresh) == ["added", "lazy"]
    assert fresh.get("lazy") is dict(fresh)["lazy"] is json.dumps


def test_only_functions_are_registered_and_under_names(registry):
    """The same function may come again; anything but a function or a class under a name is refused."""
    registry.register("one")(one)
    for bad in ("", None, 3):
        with pytest.raises(ConfigError):
            registry.register(bad)
    for wrong in (3, "text", None, [len], np.zeros(3)):
        with pytest.raises(ConfigError, match="a function or a class"):
            registry.register("new")(wrong)
        assert "new" not in registry
    with pytest.raises(ConfigError, match=r'@register\("name"\)'):
        registry.register(len)


def test_a_function_that_is_defined_anew_takes_the_place_of_the_old_one(registry):
    """As a cell of a notebook does again and again; lambdas are never the same function."""

    def define():
        @registry.register("again")
        def again():
            pass

        return again

    define()
    second = define()
    assert registry["again"] is second
    registry.register("new")(lambda: 1)
    for name, other in (("again", len), ("new", lambda: 2)):
        with pytest.raises(ConfigError, match="already exists"):
            registry.register(name)(other)


BACKEND = (rlkit.BackendError, RuntimeError)
BASES = {"DataError": (ValueError,), "ConfigError": (ValueError,), "UnknownNameError": (LookupError,)}
BASES |= {"UnsupportedError": (NotImplementedError,), "BackendTimeout": (*BACKEND, TimeoutError)}
BASES |= dict.fromkeys(("RequestCancelled", "StepOutcomeUnknown", "TrainerFailed", "CheckpointError"), BACKEND)


@for_each("name", errors.__all__)
def test_errors(name):
    """Every error is picklable, and derives from RlkitError and from what callers already catch."""
    cls = getattr(rlkit, name)
    again = pickle.loads(pickle.dumps(cls("where: what")))
    assert (type(again), str(again)) == (cls, "where: what")
    assert {rlkit.RlkitError, *BASES.get(name, ())} <= set(cls.__mro__)


def test_connect_names_its_backends():
    """An unknown backend is answered with those that exist; an unknown option is refused."""
    with pytest.raises(UnknownNameError, match="local.*toy"):
        rlkit.connect("loocal")
    said = r"^connect\('toy'\): no option 'seeed'; did you mean 'seed'\? There are: model"
    with pytest.raises(ConfigError, match=said):
        rlkit.connect("toy", seeed=1)
