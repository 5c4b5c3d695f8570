"""Random programs whose numbers are known: what every rank calls, as plain values.

A program is a list of steps. Each step is one call on one group, made by all members of that group;
a step may make groups, on which later steps are called. Nothing here communicates.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["ALL_WAIT", "COMPARED", "MAKERS", "Program", "Step", "draw_loops", "draw_program"]

Parts = tuple[tuple[int, ...], ...]
"""The groups that one handle stands for: disjoint ranks, as along one axis of a mesh."""

REDUCING = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce_scatter",
)
MOVING = (
    "broadcast",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
)
MESSAGES = ("send", "isend", "recv from anyone", "batch_isend_irecv", "send_object_list")
ABOVE_BACKENDS = (
    "all_gather_coalesced",
    "all_reduce_multigpu",
    "reduce_multigpu",
    "broadcast_multigpu",
    "all_gather_multigpu",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "shared_empty",
)
MAKERS = ("new_group", "mesh", "reinit")
"""The calls that make groups."""
COMPARED = (*REDUCING, *MOVING)
"""The calls whose collective, dtype and size all members compare."""
CAN_BE_ASYNC = frozenset((*REDUCING, *MOVING, "barrier"))
ALL_WAIT = frozenset(
    (
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather",
        "all_to_all",
        "all_to_all_single",
        "all_gather_coalesced",
        "all_reduce_multigpu",
        "all_gather_multigpu",
        "all_gather_object",
        "barrier",
        "monitored_barrier",
        "init",
        "mesh",
    )
)
"""The calls that end on no member before every member has begun them."""
DTYPES = ("float32", "float64", "int64", "int32", "bfloat16")


@dataclass(frozen=True)
class Step:
    """One call.

    Args:
        call: a collective, or what else ``calls.CALLS`` knows.
        group: the number of the group's handle; 0 is the world.
        count: elements of each member's tensor.
        dtype: their dtype.
        op: the reduction.
        root: the root, or the sender of a message, by its place in the group.
        peer: the receiver, likewise.
        is_async: whether a Work is taken, which is waited for ``patience`` steps later.
        patience: see there.
        ranks: of a new group.
        shape: of a mesh; it takes the first ranks of the world.
        makes: the numbers of the handles that it makes.
    """

    call: str
    group: int = 0
    count: int = 4
    dtype: str = "float32"
    op: str = "SUM"
    root: int = 0
    peer: int = 1
    is_async: bool = False
    patience: int = 0
    ranks: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [f"{self.call}(group {self.group}"]
        words += [f"{self.count} {self.dtype} {self.op}"] if self.call in REDUCING else []
        words += [f"root {self.root}, peer {self.peer}"]
        words += [f"async, waited for after {self.patience}"] if self.is_async else []
        words += [f"ranks {self.ranks}"] if self.ranks else []
        words += [f"shape {self.shape}"] if self.shape else []
        return ", ".join(words) + ")"


@dataclass
class Program:
    """Steps, and the ranks of every handle.

    Args:
        size: the world's.
        steps: the first is "init".
        groups: by the number of the handle.
    """

    size: int
    steps: list[Step] = field(default_factory=list)
    groups: list[Parts] = field(default_factory=list)

    def members(self, step: Step, rank: int) -> tuple[int, ...]:
        """The ranks that make this call together with ``rank``; () where it takes no part."""
        if step.call == "new_group":  # outsiders call it, too, and need not wait
            return tuple(range(self.size))
        if step.shape:
            num_ranks = len(self.groups[step.makes[0]]) * len(self.groups[step.makes[0]][0])
            return tuple(range(num_ranks)) if rank < num_ranks else ()
        return next((part for part in self.groups[step.group] if rank in part), ())

    def takes_part(self, step: Step, rank: int) -> bool:
        """Whether ``rank`` makes this call."""
        members = self.members(step, rank)
        if rank not in members:
            return False
        if step.call not in MESSAGES or step.call == "batch_isend_irecv":
            return True
        return members.index(rank) in (step.root, step.peer)


def axes_of(shape: tuple[int, ...]) -> Iterator[Parts]:
    """The groups along each axis of a mesh of the first ranks, row-major."""
    if len(shape) == 1:
        yield (tuple(range(shape[0])),)
        return
    rows, columns = shape
    yield tuple(tuple(range(c, rows * columns, columns)) for c in range(columns))
    yield tuple(tuple(range(r * columns, (r + 1) * columns)) for r in range(rows))


MESHES = {2: ((2,), (1, 2), (2, 1)), 3: ((3,), (2,), (3, 1)), 5: ((5,), (2, 2), (4,), (5, 1))}


def draw_program(draw: random.Random, size: int, num_steps: int) -> Program:
    """Draw a program of about ``num_steps`` steps on ``size`` ranks."""
    program = Program(size, [Step("init")], [(tuple(range(size)),)])
    live = [0]
    for _ in range(num_steps):
        kind = draw.random()
        if kind < 0.10:
            ranks = tuple(sorted(draw.sample(range(size), draw.randint(1, size))))
            live.append(len(program.groups))
            program.steps.append(Step("new_group", ranks=ranks, makes=(live[-1],)))
            program.groups.append((ranks,))
        elif kind < 0.17:
            shape = draw.choice(MESHES[size])
            made = [*axes_of(shape)]
            numbers = tuple(range(len(program.groups), len(program.groups) + len(made)))
            program.steps.append(Step("mesh", shape=shape, makes=numbers))
            program.groups.extend(made)
            live.extend(numbers)
        elif kind < 0.19:
            live = [0]
            program.steps.append(Step("reinit"))
        elif kind < 0.21:
            program.steps.append(Step("ddp"))
        else:
            program.steps.append(draw_call(draw, program, draw.choice(live)))
    return program


LOOPS = ("ddp", "uneven", "join")


def draw_loops(draw: random.Random, size: int, num_steps: int) -> Program:
    """A program of which every third call is a loop, or a model's step, on its group."""
    program = draw_program(draw, size, num_steps)
    for number, step in enumerate(program.steps):
        if not step.makes and step.call not in ("init", "reinit") and draw.random() < 0.35:
            call = draw.choice(LOOPS)
            group = 0 if call == "ddp" else step.group
            program.steps[number] = Step(call, group, count=step.count)
    if not any(step.call in LOOPS for step in program.steps):
        program.steps.append(Step(draw.choice(LOOPS)))
    return program


def draw_call(draw: random.Random, program: Program, group: int) -> Step:
    """Draw one call of a collective on a group."""
    length = len(program.groups[group][0])
    operations = [*REDUCING, *MOVING, *ABOVE_BACKENDS, "barrier", "monitored_barrier"]
    call = draw.choice([*operations, *(MESSAGES if length > 1 else ())])
    root = draw.randrange(length)
    is_async = call in CAN_BE_ASYNC and draw.random() < 0.3
    return Step(
        call,
        group,
        count=draw.choice((1, 3, 64, 1000, 5000, 40_000)) if draw.random() < 0.9 else 400_000,
        dtype=draw.choice(DTYPES),
        op=draw.choice(("SUM", "MAX", "MIN")),
        root=root,
        peer=(root + draw.randint(1, length - 1)) % length if length > 1 else root,
        is_async=is_async,
        patience=draw.randint(0, 3) if is_async else 0,
    )
