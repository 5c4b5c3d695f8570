"""Cases: a program, what befalls one of its ranks and when, all drawn from a seed.

A case has a name, as in "shm fault 1 17": its backend, what it is drawn as, the seed and its
number; ``case_of(name)`` is the same case on every machine. It is drawn as a *fault* at a random
point of a random program, as a *loop*, where the program has join contexts and steps of models, or
as an
*exit*, where a rank leaves right after a call.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from meshdist.operation_table import OPERATIONS, ROOTED_OPERATIONS
from tests.faults.programs import (
    ALL_WAIT,
    COMPARED,
    LOOPS,
    MESSAGES,
    Program,
    Step,
    draw_loops,
    draw_program,
)

__all__ = [
    "ABRUPT",
    "EXIT",
    "FAULT",
    "HOSTS",
    "KINDS",
    "LOOP",
    "MISCALLS",
    "SIGNALLED",
    "SKIPPING",
    "Case",
    "can_be_missed",
    "case_of",
]

FAULT, EXIT, LOOP = "fault", "exit", "loop"
HOSTS = "hosts"
"""Two hosts made of namespaces, over the backend that a program has there if it names none."""
LAYOUTS = {2: ("AB",), 3: ("AAB", "ABB", "ABA"), 5: ("AAABB", "ABBAB", "AAAAB", "ABBBB")}
"""On which of the two each rank lies; rank 0, which hosts the store, on the first."""

BEFORE, INSIDE, AFTER = "before", "inside", "after"
EVERYWHERE = (BEFORE, INSIDE, INSIDE, AFTER)
OUTSIDE = (BEFORE, AFTER)

KINDS: dict[str, tuple[str, ...]] = {
    "SIGKILL": EVERYWHERE,
    "SIGTERM": EVERYWHERE,
    "SIGINT": EVERYWHERE,
    "SIGABRT": EVERYWHERE,
    "SIGSTOP, SIGCONT": EVERYWHERE,
    "SIGSTOP, SIGKILL": EVERYWHERE,
    "pause": EVERYWHERE,
    "os._exit(0)": EVERYWHERE,
    "os._exit(3)": EVERYWHERE,
    "sys.exit": OUTSIDE,
    "raise": OUTSIDE,
    "raise in a handler": (INSIDE,),
    "return": OUTSIDE,
    "destroy": OUTSIDE,
    "abort": (BEFORE, INSIDE, AFTER),
    "other count": (BEFORE,),
    "other dtype": (BEFORE,),
    "other collective": (BEFORE,),
    "skipped call": (BEFORE,),
    "dropped Work": (BEFORE,),
    "dropped group": OUTSIDE,
    "thread dies": (BEFORE,),
}
"""The kinds of faults, and the moments of a step at which each can strike."""

SIGNALLED = frozenset(name for name in KINDS if name.startswith("SIG")) | {
    "pause",
    "raise in a handler",
}
"""The kinds that come from another process, where they strike inside a call."""
ABRUPT = frozenset(
    ("SIGKILL", "SIGTERM", "SIGABRT", "SIGSTOP, SIGKILL", "os._exit(0)", "os._exit(3)")
)
"""The kinds that end a process before it can close anything."""
SKIPPING = ("skipped call", "thread dies", "dropped group")
MISCALLS = frozenset(("other count", "other dtype", "other collective"))

WAYS = (
    "os._exit(0)",
    "os._exit(3)",
    "return",
    "sys.exit",
    "raise",
    "SIGKILL",
    "destroy, return",
    "destroy, os._exit(0)",
    "destroy, raise",
)
"""The ways of leaving right after a call."""


@dataclass(frozen=True)
class Fault:
    """What befalls one rank.

    Args:
        kind: of KINDS, or "" for none; of WAYS in an exit.
        rank: the rank.
        step: the number of the step.
        moment: before, inside or after it.
        delay_s: how long after the begin of the step, inside it.
    """

    kind: str
    rank: int = 0
    step: int = 0
    moment: str = BEFORE
    delay_s: float = 0.0

    def __str__(self) -> str:
        inside = f" ({self.delay_s * 1e3:.2f} ms)" if self.moment == INSIDE else ""
        return f"{self.kind}: rank {self.rank}, {self.moment}{inside} step {self.step}"


@dataclass(frozen=True)
class Late:
    """A rank that comes late to a step: it sleeps before it, or is stopped inside it."""

    rank: int
    step: int
    is_stopped: bool
    delay_s: float
    pause_s: float = 0.4

    def __str__(self) -> str:
        how = f"stopped {self.delay_s * 1e3:.2f} ms into" if self.is_stopped else "asleep before"
        return f"rank {self.rank} is {how} step {self.step} for {self.pause_s} s"


@dataclass(frozen=True)
class Case:
    """One program on one backend, with one fault.

    Args:
        name: what ``case_of`` draws it from.
        backend: the backend.
        program: what all ranks do.
        init_method: "env", "tcp" or "file"; MPI's ranks are started by mpiexec.
        ending: what each rank does at the end: nothing, or ``destroy``, or a barrier before that.
        after_error: whether a rank that sees an error ends by it, or destroys its world first.
        fault: what befalls which rank.
        late: a rank that comes late.
        is_exit: whether all others must end well, since the rank had done all its calls.
        timeout_s: of the world and its groups.
        hosts: a letter for each rank, its host, where there are two.
    """

    name: str
    backend: str
    program: Program
    init_method: str
    ending: str
    after_error: str
    fault: Fault
    late: Late | None = None
    is_exit: bool = False
    timeout_s: float = 2.0
    hosts: str = ""

    @property
    def size(self) -> int:
        return self.program.size

    def is_compared_late(self, members: Iterable[int]) -> bool:
        """Whether calls of these ranks that do not fit may bring wrong numbers for a moment."""
        have_parted = self.fault.kind in MISCALLS or self.fault.kind in SKIPPING
        return have_parted and len({self.hosts[rank] for rank in members if self.hosts}) > 1

    def __str__(self) -> str:
        steps = (f"  {number:2} {step}" for number, step in enumerate(self.program.steps))
        return "\n".join(
            [
                f"{self.name}: {self.size} ranks{self.hosts and ' on '}{self.hosts}, "
                f"{self.init_method}, timeout {self.timeout_s} s, "
                f"at the end: {self.ending}; after an error: {self.after_error}",
                f"  {self.fault}",
                *([f"  {self.late}"] if self.late else []),
                *steps,
            ]
        )


def case_of(name: str) -> Case:
    """The case of this name."""
    backend, kind, seed, number = name.split()
    if kind == EXIT:
        return draw_exit(name, backend, int(seed), int(number))
    return draw_fault(name, backend, has_loops=kind == LOOP)


def draw_fault(name: str, backend: str, *, has_loops: bool = False) -> Case:
    """A fault at a random point of a random program, or of one of join contexts and models."""
    draw = random.Random(name)
    size = draw.choice((2, 2, 3, 3, 5))
    program = (draw_loops if has_loops else draw_program)(draw, size, draw.randint(3, 10))
    kind = draw.choice(list(KINDS))
    rank = draw.choice((0, draw.randrange(1, size)))
    step = draw_place(draw, program, kind, rank)
    moment = draw.choice(KINDS[kind])
    delay_s = draw.uniform(0.0, reach_s(program.steps[step]))
    method = "mpiexec" if backend == "mpi" else draw.choice(("env", "env", "tcp", "file"))
    ending = draw.choice(("return", "destroy", "barrier, destroy"))
    if backend == HOSTS and ending == "return":  # which does not compare the last calls
        ending = "destroy"
    return Case(
        name,
        backend,
        program,
        method,
        ending,
        "raise" if backend == "mpi" else draw.choice(("raise", "raise", "destroy")),
        Fault(kind, rank, step, moment, delay_s),
        draw_late(draw, program) if draw.random() < 0.15 else None,
        hosts=draw.choice(LAYOUTS[size]) if backend == HOSTS else "",
    )


def draw_place(draw: random.Random, program: Program, kind: str, rank: int) -> int:
    """The step that a fault of this kind strikes: one in which the rank takes part."""
    steps = program.steps
    own = [number for number, step in enumerate(steps) if program.takes_part(step, rank)]
    if kind in ("abort", "dropped group", "destroy", *SKIPPING):
        own = [number for number in own if number > 0] or own
    if kind in SKIPPING:
        own = [number for number in own if can_be_missed(program, rank, number)]
        if not own:
            steps.append(Step("all_reduce"))
            own = [len(steps) - 1]
    if kind in MISCALLS or kind == "dropped Work":
        fit = [number for number in own if steps[number].call in COMPARED]
        if not fit:  # a call that can be struck so
            steps.append(Step("all_reduce"))
            fit = [len(steps) - 1]
        own = fit
    return draw.choice(own)


def can_be_missed(program: Program, rank: int, number: int) -> bool:
    """Whether others can see that one call of the rank lacks.

    Where its next call of the same kind on the same members is equal in all that is compared it
    takes the place of the missing one: no library can tell the two apart, as in MPI.
    """
    step, steps = program.steps[number], program.steps
    members = program.members(step, rank)
    for later in steps[number + 1 :]:
        if later.call == "reinit":
            return True
        is_alike = kind_of(later) == kind_of(step) and program.takes_part(later, rank)
        if is_alike and program.members(later, rank) == members:
            return fingerprint_of(later) != fingerprint_of(step)
    return True


def kind_of(step: Step) -> str:
    """What kind of calls are made in one common order: of other kinds one does not wait."""
    if step.call in MESSAGES:
        return "message"
    return step.call if step.call in BY_STORE else "collective"


def fingerprint_of(step: Step) -> tuple[object, ...]:
    """What members compare of a call: whatever can differ in those of its kind."""
    operation = step.call.replace("_single", "").replace("_into_tensor", "").replace("_tensor", "")
    if step.call in BY_STORE:
        return operation, step.ranks, step.shape
    if step.call in MESSAGES:
        return operation, step.count, step.dtype, step.root, step.peer
    facts = OPERATIONS.get(step.call)
    if step.call in ("barrier", *LOOPS) or (facts is not None and facts.is_of_objects):
        data: tuple[object, ...] = ()
    else:
        data = (step.count, step.dtype)
    op = step.op if facts is None or facts.reduces else ""
    is_rooted = facts is not None and (
        facts.is_of_objects or not ROOTED_OPERATIONS.isdisjoint(facts.backend_operations)
    )
    return operation, data, op, step.root if is_rooted and "all_" not in operation else -1


def reach_s(step: Step) -> float:
    """How long a step may take, about."""
    if step.call in ("init", "reinit"):
        return 0.15
    if step.call in ("new_group", "mesh", *LOOPS, "monitored_barrier", "shared_empty"):
        return 0.03
    return 0.001 + step.count * 2e-8


def draw_late(draw: random.Random, program: Program) -> Late:
    """A rank that comes late to a step."""
    step = draw.randrange(len(program.steps))
    delay_s = draw.uniform(0.0, reach_s(program.steps[step]))
    return Late(draw.randrange(program.size), step, draw.random() < 0.5, delay_s)


# -- exits ----------------------------------------------------------------------------------------

BY_STORE = ("init", "reinit", "new_group", "two groups", "mesh", "monitored_barrier")
EXITS = (
    *(BY_STORE * 4),  # rank 0 serves the store, as a rule
    *COMPARED,
    *sorted(ALL_WAIT - {*COMPARED, *BY_STORE}),
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "shared_empty",
    "ddp",
    *MESSAGES,
)
LATE = ("", "asleep", "stopped")


NUM_EXITS = len(EXITS) * len(WAYS) * 2 * len(LATE)
"""Every call, every way, rank 0 or another that leaves, and its followers late in every way."""


def draw_exit(name: str, backend: str, seed: int, number: int) -> Case:
    """A rank leaves right after its own call is complete.

    The numbers are shuffled by the seed, so that any first part of them is a fair sample.
    """
    order = list(range(NUM_EXITS))
    random.Random(seed).shuffle(order)
    place, late = divmod(order[number % NUM_EXITS], len(LATE))
    place, is_other = divmod(place, 2)
    place, way = divmod(place, len(WAYS))
    draw = random.Random(name)
    size = draw.choice((2, 3))
    leaver = draw.randrange(1, size) if is_other else 0
    program = Program(size, [Step("init")], [(tuple(range(size)),)])
    if EXITS[place] != "init":
        call, times = ("new_group", 2) if EXITS[place] == "two groups" else (EXITS[place], 1)
        program.steps += [draw_call_to_leave(draw, program, call, leaver) for _ in range(times)]
    last = len(program.steps) - 1
    follower = draw.choice([rank for rank in range(size) if rank != leaver])
    delay_s = draw.uniform(0.0, reach_s(program.steps[last]))
    return Case(
        name,
        backend,
        program,
        "mpiexec" if backend == "mpi" else draw.choice(("env", "tcp", "file")),
        "return",
        "raise",
        Fault(WAYS[way], leaver, last, AFTER),
        Late(follower, last, LATE[late] == "stopped", delay_s) if late else None,
        is_exit=True,
        hosts=draw.choice(LAYOUTS[size]) if backend == HOSTS else "",
    )


def draw_call_to_leave(draw: random.Random, program: Program, call: str, leaver: int) -> Step:
    """The call that one rank leaves after."""
    size = program.size
    if call == "new_group":
        ranks = tuple(sorted({leaver, *draw.sample(range(size), 2)}))
        if draw.random() < 0.3:
            ranks = tuple(rank for rank in range(size) if rank != leaver)
        program.groups.append((ranks,))
        return Step(call, ranks=ranks, makes=(len(program.groups) - 1,))
    if call == "mesh":
        program.groups.append((tuple(range(size)),))
        return Step(call, shape=(size,), makes=(1,))
    root = draw.randrange(size)
    peer = (root + draw.randrange(1, size)) % size
    if call in MESSAGES and leaver not in (root, peer):
        root = leaver
    return Step(call, count=draw.choice((1, 1000, 40_000)), root=root, peer=peer)
