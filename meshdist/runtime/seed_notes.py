"""Notes of how random generators were seeded: one record a process, as generators are.

Simulated ranks share a process, and the scheduler swaps the record with the generators' states.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["SeedNotes", "seed_notes", "swap_seed_notes"]


if TYPE_CHECKING or torch.Generator.__weakrefoffset__:

    class SeedNotes(WeakKeyDictionary[torch.Generator, Any]):
        """A note by generator, for as long as the generator lives."""

else:  # generators of torch 2.11 and 2.12 take no weak references
    (_COUNT_OF_A_KEY,) = [sys.getrefcount(key) for key in {torch.Generator(): None}]

    class SeedNotes(dict):
        """A note by generator; the next note drops those of generators that only it has."""

        def __setitem__(self, generator: torch.Generator, note: Any) -> None:
            for key in [key for key in self if sys.getrefcount(key) <= _COUNT_OF_A_KEY]:
                del self[key]
            super().__setitem__(generator, note)


_notes = SeedNotes()


def seed_notes() -> SeedNotes:
    """The record of the rank that runs now."""
    return _notes


def swap_seed_notes(notes: SeedNotes) -> None:
    """Let ``notes`` be the record from now on."""
    global _notes
    _notes = notes
