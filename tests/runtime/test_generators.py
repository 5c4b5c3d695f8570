"""The record of how generators were seeded: as long as they live, and one a rank."""

from __future__ import annotations

import gc

import torch

import meshdist as md
from meshdist.runtime.generators import SeedNotes, seed_notes, swap_seed_notes


def test_a_note_lives_as_long_as_its_generator() -> None:
    notes = SeedNotes()
    generator, other = torch.Generator(), torch.Generator()
    notes[generator] = 1
    notes[other] = 1
    assert notes[generator] == 1
    del generator
    gc.collect()
    notes[other] = 2  # before torch 2.13 a note drops those of generators that are gone
    assert list(notes.values()) == [2]


def test_the_record_is_the_one_that_was_put_in_force() -> None:
    before, mine = seed_notes(), SeedNotes()
    swap_seed_notes(mine)
    try:
        assert seed_notes() is mine
    finally:
        swap_seed_notes(before)
    assert seed_notes() is before


def test_a_simulation_gives_the_caller_its_record_back() -> None:
    before = seed_notes()

    def program() -> int:
        md.seed(1)
        return id(seed_notes())

    md.simulate(program, 1)
    found = md.simulate(program, 2)
    assert found[0] != found[1] and id(before) not in found
    assert seed_notes() is before
