"""Checkpoints that any mesh loads: files of safetensors and a manifest, whole or not there.

``save``, ``load`` and ``open`` take dicts of arrays; ``State`` is that of a training program, and a
``Checkpointer`` keeps its last few steps.
"""

from .checkpointer import Checkpointer
from .loading import load
from .reader import open as open
from .saving import save, save_async
from .state import State

__all__ = ["Checkpointer", "State", "load", "save", "save_async"]


def __dir__() -> list[str]:
    return [*__all__, "open"]
