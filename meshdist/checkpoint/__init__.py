"""Save and load checkpoints that any mesh can load: safetensors files and a manifest.

A checkpoint folder appears only when it is complete. ``save``, ``load`` and ``open`` take dicts of
arrays, ``State`` collects a training program's state, and ``Checkpointer`` keeps the last few
steps.
"""

from .checkpointer import Checkpointer
from .loading import load
from .reader import open as open
from .saving import save, save_async
from .state import State

__all__ = ["Checkpointer", "State", "load", "save", "save_async"]


def __dir__() -> list[str]:
    return [*__all__, "open"]
