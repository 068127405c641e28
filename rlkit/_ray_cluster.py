"""The Ray cluster that processes are started on, the user's or one of this machine, and their resources there."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import attrs

from rlkit import _check, _runtime
from rlkit._check import checked
from rlkit.errors import BackendTimeout, ConfigError

__all__ = ["RayWorker", "connected", "on_loopback"]

_started = ""  # the address of the Ray that was started here
_starting = threading.Lock()


def connected() -> ModuleType:
    """Return the module ray, connected: to what the user has connected it to, else to processes of this machine."""
    global _started  # noqa: PLW0603  # a process has one Ray
    ray = importlib.import_module("ray")
    with _starting:  # by one of several rollouts
        if not ray.is_initialized():
            _start(ray)
            _started = ray.get_runtime_context().gcs_address
    return ray


@attrs.frozen(kw_only=True)
class RayWorker:
    """What Ray gives to a worker process, and where it places it.

    Args:
        num_cpus, num_gpus: >= 0, reserved for it; only GPUs are enforced.
        memory: bytes, >= 1, which Ray reserves when it places the worker and does not enforce; None: none.
        resources: other resources of Ray's, by name.
        placement_group: Ray's own or its name; None: anywhere.

    Raises:
        ConfigError: naming the field.
        MissingPackageError: Ray is not installed.
    """

    num_cpus: float = checked(1, _check.real, low=0.0)
    num_gpus: float = checked(0, _check.real, low=0.0)
    memory: int | None = checked(None, _check.integer, none=True, low=1, why="bytes")
    resources: Mapping[str, float] = attrs.field(factory=dict)
    placement_group: Any = None

    def __attrs_post_init__(self) -> None:
        name, group = type(self).__name__, self.placement_group
        expected = "a mapping of names to numbers"
        _check.require(isinstance(self.resources, Mapping), f"{name}.resources", self.resources, expected)
        fits = group is None or isinstance(group, str) or hasattr(group, "bundle_specs")
        _check.require(fits, f"{name}.placement_group", group, "a Ray placement group, or the name of one")
        if importlib.util.find_spec("ray") is None:
            raise _runtime.missing(name, "ray", "ray")

    def find_room(self, ray: ModuleType, workers: int | None, timeout: float) -> tuple[dict[str, Any], int]:
        """Return the options of an actor, and how many there may be: ``workers``, else as many as fit, at least one.

        Args:
            ray: connected.
            workers: the requested number, >= 1, or None.
            timeout: seconds that a placement group may take to get its place.

        Raises:
            ConfigError: there is less than the workers need, or no such placement group.
            BackendTimeout: the placement group got no place in time.
        """
        where, group = type(self).__name__, self.placement_group
        options = {name: getattr(self, name) for name in ("num_cpus", "num_gpus", "memory")}
        options["resources"] = dict(self.resources)
        if isinstance(group, str):
            group = _find_group(ray, group, f"{where}.placement_group")
        places = [ray.cluster_resources()] if group is None else group.bundle_specs
        grows = group is None and ray.get_runtime_context().gcs_address != _started  # the user's cluster may
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": self.memory or 0}
        needs = {name: need for name, need in needs.items() if need or name == "CPU"} | options["resources"]
        fits = sum(_count_fitting(place, needs) for place in places)
        count = workers or max(1, fits)
        if fits < count and any(needs.values()) and not grows:
            held = "; ".join(", ".join(f"{name}: {place.get(name, 0):g}" for name in needs) for place in places)
            asked = ", ".join(f"{name}: {need:g}" for name, need in needs.items())
            whose = "this machine" if group is None else "the placement group"
            what = f"asks for {count} worker(s) with {asked} each"
            raise ConfigError(where, what, f"at most what {whose} has ({held})")
        if group is not None:
            if not group.wait(timeout):
                raise BackendTimeout(f"{where}.placement_group: the cluster did not place it within {timeout:g} s")
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(placement_group=group)
        return options, count


def _count_fitting(place: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers fit into a place.

    >>> _count_fitting({"CPU": 3.0}, {"CPU": 2})
    1
    """
    fits = (int(place.get(name, 0) // need) for name, need in needs.items() if need)
    return min(fits, default=max(1, int(place.get("CPU", 1))))


def _find_group(ray: ModuleType, name: str, where: str) -> Any:
    try:
        return ray.util.get_placement_group(name)
    except ValueError as error:
        what = f"is {name!r}, which this Ray cluster does not have"
        raise ConfigError(where, what, "one that your program created") from error


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
