"""Exchange a flag per rank before a step, for example whether it has data."""

from __future__ import annotations

import torch

from ..backends.work import Work, may_be_dropped
from ..collectives.normalize_args import run_named
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp


class Flags:
    """An all-reduce in flight that gathers a flag per rank; a joined rank sends 0.

    Example: rank 1 of 3 joined, so every rank reads [1, 0, 1] from the sum of these rows:

        rank 0: 1 0 0        rank 1: 0 0 0        rank 2: 0 0 1
    """

    def __init__(self, flag: int, group: ProcessGroup, device: torch.device, op_name: str) -> None:
        self._rows = torch.zeros(group.size(), dtype=torch.int32, device=device)
        self._rows[group.rank()] = flag
        work = run_named("all_reduce", group, op_name, self._rows, ReduceOp.SUM, async_op=True)
        assert work is not None
        self.work: Work = may_be_dropped(work)

    def wait(self) -> list[int]:
        """Return the flags of all ranks, in group order."""
        self.work.wait()
        return list(self._rows.tolist())
