"""Wires made from backends that were written for torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d

from ...error_text import first_line
from ..communicator import Communicator
from ..failures import WireFailure
from ..opening import Opening
from ..registry import Wire, find_wire, register_wire
from .communicator import C10dCommunicator
from .gloo import GlooCommunicator
from .nccl import NcclWire as NcclWire  # registers itself, as Gloo does

__all__ = ["RegisteredWire", "adopt_torch_backends"]


@dataclass(eq=False)
class RegisteredWire(Wire):
    """A wire whose communicators a function makes, in one of the two forms that torch calls.

    What the function makes is not known beforehand: each verb is tried, and built from others where
    the class has none. ``support`` takes it to have all of them.

    Args:
        make: called as ``make(store, rank, size, timeout)``, or with extended_api as
            ``make(options, backend_options)``; returns torch's kind of process group.
    """

    name: str
    make: Callable[..., Any]
    device_types: frozenset[str]
    extended_api: bool
    communicator_kind = C10dCommunicator
    descriptors_per_peer = 1  # which is a guess

    def is_available(self) -> bool:
        """True: a registered backend is taken to work."""
        return True

    def open(self, opening: Opening) -> Communicator:
        """Call the registered function for this group."""
        size = len(opening.ranks)
        try:
            if self.extended_api:
                options: Any = distributed_c10d._DistributedBackendOptions()
                options.store = opening.make_torch_store()
                options.group_rank = opening.rank
                options.group_size = size
                options.timeout = opening.timeout
                options.global_ranks_in_group = list(opening.ranks)
                group = self.make(options, opening.options)
            else:
                group = self.make(opening.make_torch_store(), opening.rank, size, opening.timeout)
        except RuntimeError as error:
            raise WireFailure(first_line(error)) from error
        if isinstance(group, ProcessGroupGloo):
            return GlooCommunicator(self.name, opening.rank, size, group, opening.store)
        return C10dCommunicator(self.name, opening.rank, size, group)


def adopt_torch_backends() -> None:
    """Make a wire of each backend that a plug-in has registered with torch and that is none yet."""
    backends: Any = distributed_c10d.Backend
    for upper, plugin in tuple(backends._plugins.items()):
        name = upper.lower()
        if find_wire(name) is None:
            kinds = frozenset(backends.backend_capability.get(name, ("cpu", "cuda")))
            register_wire(RegisteredWire(name, plugin.creator_fn, kinds, plugin.extended_api))
