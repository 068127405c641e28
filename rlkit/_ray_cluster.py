"""The Ray cluster that processes are started on, the user's or one of this machine, and their resources there."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import attrs

from rlkit import _check, _runtime
from rlkit.errors import BackendTimeout, ConfigError

__all__ = ["Place", "check", "connected", "on_loopback"]

_started = ""  # the address of the Ray that was started here
_starting = threading.Lock()


def check(options: Mapping[str, object], where: str, names: tuple[str, ...], what: str) -> None:
    """Check the user's options.

    Args:
        options: of these ``names``.
        where: their name for the user.
        what: the feature that needs Ray.

    Raises:
        ConfigError: naming the option.
        MissingPackageError: Ray is not installed.
    """
    for name in options:
        _check.choice(f"{where}: name", name, names)
    _check.optional(_check.integer, f"{where}['workers']", options.get("workers"), low=1)
    for name in ("num_cpus", "num_gpus"):
        _check.optional(_check.real, f"{where}['{name}']", options.get(name), low=0.0)
    _check.optional(_check.integer, f"{where}['memory']", options.get("memory"), low=1, why="bytes")
    resources = options.get("resources", {})
    _check.require(isinstance(resources, Mapping), f"{where}['resources']", resources, "a mapping of names to numbers")
    group = options.get("placement_group")
    fits = group is None or isinstance(group, str) or hasattr(group, "bundle_specs")
    _check.require(fits, f"{where}['placement_group']", group, "a Ray placement group, or the name of one")
    if importlib.util.find_spec("ray") is None:
        raise _runtime.missing(what, "ray", "ray")


def connected() -> ModuleType:
    """Return the module ray, connected: to what the user has connected it to, else to processes of this machine."""
    global _started  # noqa: PLW0603  # a process has one Ray
    ray = importlib.import_module("ray")
    with _starting:  # by one of several rollouts
        if not ray.is_initialized():
            _start(ray)
            _started = ray.get_runtime_context().gcs_address
    return ray


@attrs.frozen
class Place:
    """The options of each Ray worker, and how many there may be.

    Attributes:
        options: of an actor.
        count: how many workers, >= 1.
    """

    options: Mapping[str, object]
    count: int

    @classmethod
    def of(cls, ray: ModuleType, options: Mapping[str, Any], timeout: float, where: str) -> Place:
        """Read the user's options.

        Args:
            ray: connected.
            options: checked by ``check``; "workers" says how many.
            where: their name for the user.
            timeout: seconds that a placement group may take to get its place.

        Raises:
            ConfigError: there is less than the workers need, or no such placement group.
            BackendTimeout: the placement group got no place in time.
        """
        cpus, gpus, memory = options.get("num_cpus", 1), options.get("num_gpus", 0), options.get("memory")
        resources = dict(options.get("resources", {}))
        chosen = {"num_cpus": cpus, "num_gpus": gpus, "memory": memory, "resources": resources}
        needs = {"CPU": cpus, "GPU": gpus, "memory": memory or 0}
        needs = {name: need for name, need in needs.items() if need or name == "CPU"} | resources
        group = options.get("placement_group")
        if group is None:
            theirs = ray.get_runtime_context().gcs_address != _started
            return cls(chosen, _count([ray.cluster_resources()], needs, options, where, grows=theirs))  # it may grow
        group = _named(ray, group, where) if isinstance(group, str) else group
        bundles: Sequence[Mapping[str, float]] = group.bundle_specs
        count = _count(bundles, needs, options, where, grows=False)
        if not group.wait(timeout):
            raise BackendTimeout(f"{where}['placement_group']: the cluster did not place it within {timeout:g} s")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        chosen["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(placement_group=group)
        return cls(chosen, count)


def _count(
    places: Sequence[Mapping[str, float]],
    needs: Mapping[str, float],
    options: Mapping[str, Any],
    where: str,
    *,
    grows: bool,
) -> int:
    """Return how many workers there may be: the requested number, else as many as fit into ``places``.

    >>> _count([{"CPU": 3.0}, {"CPU": 1.0}], {"CPU": 2}, {}, "options", grows=False)
    1
    """
    fits = sum(_fitting(place, needs) for place in places)
    count: int = options.get("workers") or max(1, fits)
    if fits < count and not grows:
        held = "; ".join(", ".join(f"{name}: {place.get(name, 0):g}" for name in needs) for place in places)
        what = f"ask for {count} worker(s) with {', '.join(f'{name}: {need:g}' for name, need in needs.items())} each"
        whose = "this machine" if options.get("placement_group") is None else "the placement group"
        raise ConfigError(where, what, f"at most what {whose} has ({held})")
    return count


def _fitting(place: Mapping[str, float], needs: Mapping[str, float]) -> int:
    fits = (int(place.get(name, 0) // need) for name, need in needs.items() if need)
    return min(fits, default=max(1, int(place.get("CPU", 1))))


def _named(ray: ModuleType, name: str, where: str) -> Any:
    try:
        return ray.util.get_placement_group(name)
    except ValueError as error:
        what = f"is {name!r}, which this Ray cluster does not have"
        raise ConfigError(f"{where}['placement_group']", what, "one that your program created") from error


def _start(ray: ModuleType) -> None:
    """Start Ray from a thread that lasts: Linux kills its processes with the thread that they were started from."""
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start() -> None:
        try:
            with on_loopback():
                ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            outcome.set_exception(error)
        else:
            outcome.set_result(None)
            threading.Event().wait()

    threading.Thread(target=start, name="rlkit-ray", daemon=True).start()
    outcome.result()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make Ray listen on the loopback address, as it does elsewhere than on Linux where this is not set otherwise."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    name, here = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(name)
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False  # for what is started, and for this process
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = here
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
