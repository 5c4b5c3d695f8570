"""Parse backend names, such as "gloo" and "cpu:gloo,cuda:nccl", and find the defaults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from ..bootstrap.world import World
from ..checking.call_sites import warn_caller
from ..errors import ArgumentError, KindError
from .c10d.torch_classes import RegisteredBackend, adopt_torch_backends
from .mpi.communicator import MpiBackend as MpiBackend  # registers itself
from .registry import find_backend, get_backend, register_backend
from .shm.communicator import ShmBackend as ShmBackend  # registers itself

__all__ = [
    "Backend",
    "BackendConfig",
]

_DEFAULT_BACKENDS = {"cpu": ("shm", "gloo"), "cuda": ("nccl",), "xpu": ("xccl",)}


class Backend(str):
    """A backend name in lower case: ``Backend("GLOO") == "gloo" == Backend.GLOO``.

    Unknown names raise only when a group is created.
    """

    __slots__ = ()

    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    MPI: ClassVar[str] = "mpi"
    UCC: ClassVar[str] = "ucc"
    XCCL: ClassVar[str] = "xccl"
    UNDEFINED: ClassVar[str] = "undefined"

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ArgumentError(
                "a backend name must be a str",
                expected="for example 'gloo', 'nccl' or 'cpu:gloo,cuda:nccl'",
                found=f"{name!r}",
                fix="pass the name as a string",
            )
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., Any],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Register a backend that was written for torch.distributed, and set ``Backend.NAME``.

        Args:
            name: The backend's name.
            func: Called as ``func(store, rank, world_size, timeout)`` for each group; returns a
                torch process group.
            extended_api: If True, ``func`` is called as ``func(options, backend_options)``, with
                torch's DistributedBackendOptions.
            devices: The device types that the backend supports. None means cpu and cuda, and logs a
                warning.
        """
        if devices is None:
            warn_caller(f"register_backend({name!r}) got no devices: assuming cpu and cuda")
            devices = ("cpu", "cuda")
        kinds = frozenset([devices] if isinstance(devices, str) else devices)
        register_backend(RegisteredBackend(name.lower(), func, kinds, extended_api))
        setattr(cls, name.upper(), name.lower())


def usable_defaults() -> set[str]:
    """Return the default backends that work on this machine."""
    backends = filter(
        None, (find_backend(name) for names in _DEFAULT_BACKENDS.values() for name in names)
    )
    return {backend.name for backend in backends if backend.is_available()}


def default_backends(usable: Collection[str] | None = None) -> dict[str, str]:
    """Return the best ``usable`` backend (None: any that works here) per device type."""
    found = usable_defaults() if usable is None else usable
    return {
        device_type: next(filter(found.__contains__, names), names[-1])
        for device_type, names in _DEFAULT_BACKENDS.items()
    }


def parse_backends(backend: str | None) -> dict[str, str]:
    """Return ``{device type: backend}`` for the argument ``backend``.

    Args:
        backend: a name, for all device types that the backend supports; pairs such as
            "cpu:gloo,cuda:nccl"; or None for the defaults.

    Example:
        >>> parse_backends("cpu:gloo,cuda:NCCL")
        {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    if backend is None:
        return default_backends()
    if not isinstance(backend, str):
        raise KindError(
            "backend must be a str or None",
            found=f"{backend!r}",
            fix="pass a name, for example 'gloo', or None for the default of each device type",
        )
    adopt_torch_backends()
    text = backend.lower()
    if text == "tcp":
        raise ArgumentError(
            "backend 'tcp' existed in the old torch.distributed only",
            expected="'gloo' for CPU tensors, 'nccl' for CUDA tensors, or None for both",
            fix="init_process_group('gloo')",
        )
    if ":" not in text and "," not in text:
        return dict.fromkeys(_device_types(text), text)
    backends: dict[str, str] = {}
    for pair in text.split(","):
        device_type, _, name = pair.strip().partition(":")
        if not device_type or not name or ":" in name:
            raise ArgumentError(
                f"{pair!r} does not pair a device type with a backend",
                where=f"backend={backend!r}",
                expected="DEVICE:BACKEND, separated by commas",
                fix="write pairs, for example backend='cpu:gloo,cuda:nccl'",
            )
        if device_type in backends:
            raise ArgumentError(
                f"device type {device_type!r} has two backends",
                where=f"backend={backend!r}",
                expected="each device type once",
                found=f"{backends[device_type]} and {name}",
                fix=f"remove all but one backend of {device_type!r}",
            )
        backends[device_type] = name
    return backends


def _device_types(name: str) -> list[str]:
    backend = find_backend(name)
    kinds_here = {"cpu", "cuda"} if backend is None else backend.device_types
    usual = [kind for kind in _DEFAULT_BACKENDS if kind in kinds_here]
    return usual + sorted(kinds_here - set(usual))


def backends_in(world: World | None, backends: dict[str, str]) -> dict[str, str]:
    """Return ``backends``, in a simulated world the simulated backend; reject unknown names."""
    # Simulated ranks ignore the named backend, so that a program runs there unchanged.
    is_simulated = world is not None and world.is_simulated
    for name in set(backends.values()):
        if not is_simulated or find_backend(name) is None:
            get_backend(name)
    return dict(world.backends if world is not None and is_simulated else backends)


def backends_text(backends: dict[str, str]) -> str:
    """Format ``backends`` for ``parse_backends``.

    Example:
        >>> backends_text({"cpu": "gloo", "cuda": "nccl"})
        'cpu:gloo,cuda:nccl'
    """
    return ",".join(f"{device_type}:{name}" for device_type, name in backends.items())


class BackendConfig:
    """The backend of each device type, parsed from an ``init_process_group`` argument.

    Example:
        >>> BackendConfig("cpu:gloo")
        cpu:gloo
    """

    def __init__(self, backend: str | None) -> None:
        self.device_backend_map = {
            device_type: Backend(name) for device_type, name in parse_backends(backend).items()
        }

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Return the backend of each device type."""
        return self.device_backend_map

    def __repr__(self) -> str:
        return backends_text(dict(self.device_backend_map))
