"""Losses that ranks have made together, where a wrapper averages over them: it divides once more.

Verbs with an invariant result keep the line of their call where there is a wrapper, and the first
that a backward comes to is noted; the wrapper warns when that backward has ended, be the verb
behind the model or in it, as in a batch norm by hand. The first of ``pvary(pmean(x))`` is a cast,
whose backward sums what the mean divides: all is right.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checking.program import call_site, show_site
from ..groups.process_group import ProcessGroup

__all__ = ["keep_line", "note_complete"]


def keep_line(node: Any, x: torch.Tensor, group: Any) -> None:
    """Let a verb's node keep the line of its call, where wrappers average over ranks of a group."""
    averaged = x.requires_grad and isinstance(group, ProcessGroup) and group.world.averaged
    if averaged and any(len(one.intersection(group.ranks)) > 1 for one in averaged):
        node.line = show_site(call_site())


def note_complete(node: Any, group: ProcessGroup, *, is_sum: bool = False) -> None:
    """Note the backward of a verb whose result is invariant, or that of a cast, which sums."""
    world = group.world
    if hasattr(node, "line") and world.complete[0] != (task := torch._C._current_graph_task_id()):
        world.complete = task, group.ranks, "" if is_sum else f"{group.name}, {node.line}"
