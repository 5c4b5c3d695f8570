"""What is noted of how random generators were seeded: one record a process, as generators are.

Simulated ranks share a process, and the scheduler swaps the record with the generators' states.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["SeedNotes", "seed_notes", "swap_seed_notes"]


class SeedNotes(WeakKeyDictionary[torch.Generator, Any]):
    """A note by generator, for as long as the generator lives."""


_notes = SeedNotes()


def seed_notes() -> SeedNotes:
    """The record of the rank that runs now."""
    return _notes


def swap_seed_notes(notes: SeedNotes) -> None:
    """Let ``notes`` be the record from now on."""
    global _notes
    _notes = notes
