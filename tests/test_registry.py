"""Registries and the error tree."""

from __future__ import annotations

import pickle
import types

import numpy as np
import pytest

import rlkit
from rlkit import ConfigError, Registry, UnknownNameError, errors, losses
from tests.each import for_each


@pytest.fixture
def registry():
    registry = Registry("thing", entry_point_group="rlkit.test")

    @registry.register("one")
    def one():
        """The first.

        More.
        """

    registry["lazy"] = "json:dumps"
    return registry


def test_resolve(registry):
    """A name gives what was registered, a callable itself, a dotted name what it points at."""
    import json

    assert registry.resolve("lazy") is json.dumps
    assert registry.resolve(len) is len
    assert dict.__getitem__(registry, "lazy") is json.dumps


def test_miss_names_what_exists(registry):
    """A miss suggests a close name and lists all of them."""
    with pytest.raises(UnknownNameError, match="did you mean 'one'.*lazy, one"):
        registry.resolve("on")
    with pytest.raises(LookupError):
        registry["nothing"]
    with pytest.raises(ConfigError):
        registry.resolve(3)


def test_names_are_not_taken_twice(registry):
    """Registering another function under a name that exists raises; the same one may come again."""
    with pytest.raises(ConfigError, match="exists"):
        registry.register("one")(len)
    registry.register("one")(registry["one"])
    for bad in ("", None, 3):
        with pytest.raises(ConfigError):
            registry.register(bad)


def test_entry_points_are_loaded_on_a_miss(registry, monkeypatch):
    """Installed packages add to a registry; nothing is imported before it is asked for."""
    point = types.SimpleNamespace(name="theirs", value="json:loads")
    asked = []
    monkeypatch.setattr("rlkit.registry.entry_points", lambda group: asked.append(group) or [point])
    assert registry.resolve("one")
    assert not asked
    import json

    assert registry.resolve("theirs") is json.loads
    assert asked == ["rlkit.test"]


def test_table(registry):
    """The table has the first line of each docstring."""
    assert ("one", "The first.") in registry.table()


@for_each("name", errors.__all__)
def test_errors(name):
    """Every error is picklable, documented, and derives from RlkitError and a built-in of its kind."""
    cls = getattr(rlkit, name)
    error = cls("where: what")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (cls, "where: what")
    assert issubclass(cls, rlkit.RlkitError)
    assert cls.__doc__


def test_error_tree():
    """The built-in bases are those that callers already catch."""
    assert issubclass(rlkit.DataError, ValueError)
    assert issubclass(rlkit.ConfigError, ValueError)
    assert issubclass(rlkit.UnknownNameError, LookupError)
    assert issubclass(rlkit.UnsupportedError, NotImplementedError)
    assert issubclass(rlkit.BackendTimeout, TimeoutError)
    for name in ("BackendTimeout", "RequestCancelled", "StepOutcomeUnknown", "TrainerFailed", "CheckpointError"):
        assert issubclass(getattr(rlkit, name), rlkit.BackendError)
    assert issubclass(rlkit.BackendError, RuntimeError)


def test_connect_names_its_backends():
    """An unknown backend is answered with those that exist; an unknown option is refused."""
    with pytest.raises(UnknownNameError, match="local.*toy"):
        rlkit.connect("loocal")
    with pytest.raises(
        ConfigError, match=r"^connect\('toy'\): no option 'seeed'; did you mean 'seed'\? There are: model"
    ):
        rlkit.connect("toy", seeed=1)


def refuse(call, *arguments) -> str:
    """The error of a call."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


class TestRegistering:
    """What a cell of a notebook does again and again."""

    def test_the_same_function_takes_the_place_of_the_old_one(self):
        def define(factor):
            @losses.register("mine_again")
            def mine(logprobs, weights=1.0):
                return -factor * (weights * logprobs).sum()

            return mine

        try:
            define(1.0)
            second = define(2.0)
            assert losses.registry["mine_again"] is second
            assert "already exists" in refuse(losses.register("mine_again"), len)
        finally:
            losses.registry.pop("mine_again", None)

    def test_lambdas_are_not_the_same(self):
        try:
            losses.register("mine_again")(lambda logprobs: logprobs.sum())
            assert "already exists" in refuse(losses.register("mine_again"), lambda logprobs: -logprobs.sum())
        finally:
            losses.registry.pop("mine_again", None)

    @for_each("wrong", [3, "text", None, [len], np.zeros(3)])
    def test_what_is_no_function_is_refused(self, wrong):
        assert "a function or a class" in refuse(losses.register("mine_again"), wrong)
        assert "mine_again" not in losses.registry

    def test_without_a_name(self):
        assert '@register("name")' in refuse(losses.register, len)


def test_every_way_to_read_it_imports(registry, monkeypatch):
    """``get``, ``in``, ``dict`` and loops give implementations, never dotted names, and know entry points (trap T8)."""
    import json

    point = types.SimpleNamespace(name="added", value="json:loads")
    monkeypatch.setattr("rlkit.registry.entry_points", lambda *, group: [point] if group == "rlkit.test" else [])
    assert "added" in registry
    assert registry.get("added") is json.loads
    assert registry.get("lazy") is json.dumps
    assert registry.get("nothing") is None
    assert registry.get("nothing", 3) == 3
    for name, value in [*dict(registry).items(), *registry.items(), *((n, registry[n]) for n in registry)]:
        assert callable(value), name
    assert set(registry) == set(registry.keys()) == {"one", "lazy", "added"}


def test_iterating_loads_entry_points(registry, monkeypatch):
    """Also where nothing was looked up before."""
    point = types.SimpleNamespace(name="added", value="json:loads")
    monkeypatch.setattr("rlkit.registry.entry_points", lambda *, group: [point])
    assert sorted(registry) == ["added", "lazy", "one"]
