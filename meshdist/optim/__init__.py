"""Provide an optimizer and a gradient scaler for models whose parameters are sharded.

torch's optimizers that update each element by itself, such as AdamW, also work on shards.
"""

from .grad_scaler import GradScaler
from .muon import Muon

__all__ = ["GradScaler", "Muon"]


def __dir__() -> list[str]:
    return __all__
