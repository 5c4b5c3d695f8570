"""Save and restore torch's process-wide hooks and handlers for each simulated rank."""

from __future__ import annotations

import sys
from importlib import import_module

_OWNERS = [
    vars(import_module(name)) for name in ("torch.nn.modules.module", "torch.optim.optimizer")
]
_NAMES = [(owner, name) for owner in _OWNERS for name in owner if name.startswith("_global_")]


class TorchHooks:
    """Snapshot of the global hooks on modules and optimizers, and of DTensor's handlers."""

    def __init__(self) -> None:
        names = _NAMES
        dtensors = sys.modules.get("torch.distributed.tensor._api")
        dispatcher = getattr(getattr(dtensors, "DTensor", None), "_op_dispatcher", None)
        if dispatcher is not None:  # ``loss_parallel`` changes its table of handlers
            names = [*names, *((vars(dispatcher), name) for name in vars(dispatcher))]
        self._saved = [
            (owner, name, dict(value) if isinstance(value := owner[name], dict) else value)
            for owner, name in names
        ]

    def restore(self) -> None:
        for owner, name, value in self._saved:
            now = owner[name]
            if isinstance(now, dict) and now != value:  # in place: handles of hooks know the table
                now.clear()
                now.update(value)
            elif not isinstance(now, dict):
                owner[name] = value
