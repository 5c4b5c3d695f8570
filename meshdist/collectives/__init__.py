"""The verbs: what the members of a group do together."""

from ..groups.verb_methods import verbs as _verbs
from ..worlds import first_touch as _first_touch  # noqa: F401 - verbs join by it
from . import list_verbs, monitored_barrier, point_to_point, several_tensors, verbs

__all__ = ["list_verbs", "monitored", "point_to_point", "several_tensors", "verbs"]

for _module in (list_verbs, monitored_barrier, point_to_point, several_tensors, verbs):
    _verbs.update((name, getattr(_module, name)) for name in _module.__all__)
