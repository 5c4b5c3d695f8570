"""Save and restore a rank's random generators, seed records, default dtype and torch hooks.

They are global to the process, so the scheduler of simulated ranks swaps them at each switch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from .torch_hooks import TorchHooks
from .torch_worlds import begin_record

if TYPE_CHECKING or torch.Generator.__weakrefoffset__:

    class SeedNotes(WeakKeyDictionary[torch.Generator, Any]):
        """Seed record by generator, dropped with the generator."""

else:  # generators of torch 2.11 and 2.12 take no weak references
    (_COUNT_OF_A_KEY,) = [sys.getrefcount(key) for key in {torch.Generator(): None}]

    class SeedNotes(dict):
        """Seed record by generator; setting a record drops unreferenced generators."""

        def __setitem__(self, generator: torch.Generator, note: Any) -> None:
            for key in [key for key in self if sys.getrefcount(key) <= _COUNT_OF_A_KEY]:
                del self[key]
            super().__setitem__(generator, note)


_notes = SeedNotes()


def seed_notes() -> SeedNotes:
    """Return how the running rank's generators were seeded."""
    return _notes


def swap_seed_notes(notes: SeedNotes) -> None:
    """Replace the records of how the running rank's generators were seeded with ``notes``."""
    global _notes
    _notes = notes


_WORDS: Any = vars(np.random.MT19937)["state"]


class _NumpyGenerator(np.random.MT19937):
    """NumPy's global bit generator of a simulated rank, exchanged as an object."""

    # Exchanging the object takes 0.5 us; copying its 624 words takes 100 us. The global RandomState
    # also caches the second of a pair of normal samples. To move only that sample with get_state
    # and set_state, this class omits the words while ``is_exchanged``.
    is_exchanged = False

    @property
    def state(self) -> Any:
        if self.is_exchanged:
            return {"bit_generator": "MT19937", "state": None}
        return _WORDS.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        if not self.is_exchanged:
            _WORDS.__set__(self, value)


_NumpyGenerator.__name__ = "MT19937"  # NumPy stores and compares the name in states


class ProcessState:
    """Snapshot of the generators, default dtype and torch hooks of a rank or the caller."""

    def __init__(self) -> None:
        self.dtype = torch.get_default_dtype()
        self.hooks = TorchHooks()
        self.seed_notes = _notes
        self.torch_state = torch.default_generator.get_state()
        self.random_state = random.getstate()
        generator = self.numpy_generator = get_bit_generator()
        if isinstance(generator, _NumpyGenerator):
            generator.is_exchanged = True
        self.numpy_rest = np.random.get_state(legacy=False)
        self.cuda_states = (
            [generator.get_state() for generator in torch.cuda.default_generators]
            if _has_cuda() and torch.cuda.is_initialized()
            else None
        )

    def restore(self) -> None:
        global _notes
        self.hooks.restore()
        _notes = self.seed_notes
        seed_before = torch.default_generator.initial_seed()
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        torch.default_generator.set_state(self.torch_state)
        random.setstate(self.random_state)
        set_bit_generator(self.numpy_generator)
        np.random.set_state(self.numpy_rest)
        if isinstance(self.numpy_generator, _NumpyGenerator):
            self.numpy_generator.is_exchanged = False
        if self.cuda_states is not None:
            for generator, state in zip(
                torch.cuda.default_generators, self.cuda_states, strict=True
            ):
                generator.set_state(state)
        else:
            _seed_cuda(seed_before)


def default_generators() -> list[torch.Generator]:
    """Return torch's default generators of the CPU and, once in use, of the current accelerator."""
    found = [torch.default_generator]
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            found.append(device.default_generators[device.current_device()])
    return found


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the default generators of torch, NumPy and ``random`` after the block."""
    states = [(generator, generator.get_state()) for generator in default_generators()]
    numpy_state, random_state = np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        np.random.set_state(numpy_state)
        random.setstate(random_state)


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _seed_cuda(noted_seed: int) -> None:
    """Seed CUDA's generators like the CPU's, if CUDA is initialized or the seed has changed."""
    # Before CUDA is initialized, ``torch.manual_seed`` only stores the seed for later. Without this
    # function, the stored seed would be ``noted_seed``, of the rank that seeded last.
    seed = torch.default_generator.initial_seed()
    if _has_cuda() and (torch.cuda.is_initialized() or seed != noted_seed):
        torch.cuda.manual_seed_all(seed)


def start_as(rank: int) -> None:
    """Seed all generators with ``rank``, and start with an empty record of torch's groups."""
    begin_record()
    swap_seed_notes(SeedNotes())
    seed_before = torch.initial_seed()
    torch.default_generator.manual_seed(rank)
    _seed_cuda(seed_before)
    random.seed(rank)
    set_bit_generator(_NumpyGenerator(0))
    np.random.seed(rank)
