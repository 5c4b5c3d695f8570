"""Collectives and point-to-point operations on process groups."""

from ..groups.group_methods import operations as _operations
from ..worlds import lazy_init as _lazy_init  # noqa: F401 - it initializes groups on first use
from . import coalesced, list_collectives, monitored_barrier, point_to_point, tensor_collectives

for _module in (list_collectives, monitored_barrier, point_to_point, coalesced, tensor_collectives):
    _operations.update((name, getattr(_module, name)) for name in _module.__all__)
