"""Warnings point at the line of the program that asks for what they warn of."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch

import meshdist as md


def model(**options: bool) -> md.DistributedDataParallel:
    return md.DDP(torch.nn.Linear(2, 2), **options)


def stepped() -> md.PostLocalSGDOptimizer:
    averager = md.PeriodicModelAverager(period=4, warmup_steps=0)
    return md.PostLocalSGDOptimizer(torch.optim.SGD(model().parameters(), 0.1), averager)


STATE = {"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
WARNED: dict[str, Callable[[], object]] = {
    "'mpi': mpiexec assigns both": lambda: md.init_process_group("mpi", rank=0, world_size=1),
    "check_reduction": lambda: md.DDP(torch.nn.Linear(2, 2), check_reduction=True),
    "got no devices": lambda: md.Backend.register_backend("nothing_here", print),
    "averaging parameters at every": lambda: md.PeriodicModelAverager(period=1, warmup_steps=0),
    "no averager step": lambda: stepped().load_state_dict(STATE),
    "static_graph is already True": lambda: model(static_graph=True)._set_static_graph(),
    "no effect with static_graph": lambda: model(find_unused_parameters=True)._set_static_graph(),
    "reduce_op is the old spelling": lambda: md.reduce_op.SUM,
}


@pytest.mark.parametrize("text", WARNED)
def test_a_warning_names_the_line_of_the_program(text: str) -> None:
    warned = WARNED[text]

    def program() -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as caught, contextlib.suppress(md.MeshdistError):
            warnings.simplefilter("always")
            warned()
        return [(one.filename, one.lineno) for one in caught if text in str(one.message)]

    if "mpi" in text:
        found = program()
    else:
        (found,) = md.simulate(program, 1)
    assert found == [(__file__, warned.__code__.co_firstlineno)]
