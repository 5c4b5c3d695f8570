"""Random loops of verbs with unequally many steps, and the same loops padded by neutral elements.

A plan says what each rank calls in each step; ``run_plan`` carries it out, either in a join context
or padded: then a rank past its last step goes on with neutral elements of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import meshdist as md

REDUCTIONS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "SUM": (("float32", "int32", "complex64", "uint8", "bool"), {}),
    "AVG": (("float64", "complex128"), {}),
    "PRODUCT": (("float32", "int64"), {}),
    "MIN": (("float32", "bfloat16", "int8", "uint8", "bool"), {}),
    "MAX": (("float32", "float16", "int16", "uint8", "bool"), {}),
    "BAND": (("int32", "uint8", "bool"), {}),
    "BOR": (("int64", "uint8", "bool"), {}),
    "BXOR": (("int16", "bool"), {}),
}
NEUTRAL_ONE = "PRODUCT"
REDUCING = (
    "all_reduce",
    "async all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_reduce_coalesced",
)
MOVING = (
    "broadcast",
    "scatter",
    "gather",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_to_all",
    "all_to_all_single",
)
OBJECTS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)
OTHERS = ("barrier", "monitored_barrier")
FROM_ROOT = ("broadcast", "scatter", "broadcast_object_list", "scatter_object_list")


@dataclass(frozen=True)
class Step:
    """One call: the verb, the members, what travels and how."""

    verb: str
    members: tuple[int, ...]
    op: str = "SUM"
    dtype: str = "float32"
    counts: tuple[int, ...] = ()
    root: int = 0
    seed: int = 0


@st.composite
def plans(draw: st.DrawFn, size: int) -> tuple[list[int], list[Step]]:
    """How many times each rank runs the loop, and its body."""
    num_steps = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    groups = [tuple(range(size)), (0, size - 1), *[(one, one + 1) for one in range(size - 1)]]
    body = []
    for seed in range(draw(st.integers(1, 5))):
        members = draw(st.sampled_from(groups))
        verb = draw(st.sampled_from((*REDUCING, *MOVING, *OBJECTS, *OTHERS)))
        op = draw(st.sampled_from(tuple(REDUCTIONS))) if verb in REDUCING else "SUM"
        dtype = draw(st.sampled_from(REDUCTIONS[op][0]))
        counts = tuple(draw(st.integers(0, 3)) for _ in members)
        roots = range(len(members))
        if verb in FROM_ROOT:  # a source that goes on as long as any member does
            most = max(num_steps[rank] for rank in members)
            roots = [at for at, rank in enumerate(members) if num_steps[rank] == most]
        body.append(Step(verb, members, op, dtype, counts, draw(st.sampled_from(roots)), seed))
    return num_steps, body


def run_plan(num_steps: list[int], body: list[Step], *, padded: bool) -> list[Any]:
    """What each of this rank's calls wrote, step by step; nothing of padded ones."""
    rank = md.get_rank()
    groups = {
        step.members: md.new_group(list(step.members))
        if len(step.members) < len(num_steps)
        else None
        for step in body
    }
    mine = num_steps[rank]
    context: AbstractContextManager[Any] = nullcontext(range(max(num_steps)))
    if not padded:
        context = md.uneven(range(mine))
    results = []
    with context as turns:
        for turn in turns:
            for step in body:
                if rank in step.members:
                    found = Turn(step, groups[step.members], turn, is_neutral=turn >= mine).call()
                    if turn < mine:
                        results.append((turn, step.verb, found))
    return results


class Turn:
    """One call of one rank."""

    def __init__(self, step: Step, group: Any, turn: int, *, is_neutral: bool) -> None:
        self.step = step
        self.group = group
        self.turn = turn
        self.is_neutral = is_neutral
        self.me = step.members.index(md.get_rank())
        self.size = len(step.members)
        self.dtype = getattr(torch, step.dtype)
        self.op = getattr(md.ReduceOp, step.op)
        self.root = step.root

    def call(self) -> Any:
        verb = self.step.verb
        return getattr(self, verb.replace(" ", "_"))()

    def values(self, count: int) -> torch.Tensor:
        """This rank's numbers; neutral ones past its last step."""
        dtype = self.dtype
        if not self.is_neutral:
            generator = torch.Generator().manual_seed(
                1000 * self.step.seed + 100 * self.turn + self.me
            )
            return torch.randint(0, 4, (count,), generator=generator).to(dtype)
        if self.step.verb not in REDUCING or self.step.op in ("SUM", "AVG", "BOR", "BXOR"):
            return torch.zeros(count, dtype=dtype)
        if self.step.op == "PRODUCT":
            return torch.ones(count, dtype=dtype)
        if self.step.op == "BAND" or dtype is torch.bool:
            full = torch.zeros(count, dtype=dtype)
            return full if self.step.op == "MAX" else full.bitwise_not()
        limits = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype)
        return torch.full(
            (count,), limits.min if self.step.op == "MAX" else limits.max, dtype=dtype
        )

    def room(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=self.dtype)

    @property
    def count(self) -> int:
        return self.step.counts[0]

    def matrix(self) -> list[list[int]]:
        """How much goes from each member to each: not symmetrical."""
        counts = self.step.counts
        return [[(row + 2 * column) % 4 for column in counts] for row in counts]

    def all_reduce(self) -> Any:
        x = self.values(self.count)
        md.all_reduce(x, self.op, self.group)
        return x.tolist()

    def async_all_reduce(self) -> Any:
        tensors = [self.values(self.count + more) for more in range(3)]
        works = [md.all_reduce(x, self.op, self.group, async_op=True) for x in tensors]
        for work in works:
            work.wait()
        return [x.tolist() for x in tensors]

    def reduce(self) -> Any:
        x = self.values(self.count)
        md.reduce(x, op=self.op, group=self.group, group_dst=self.root)
        return x.tolist()

    def reduce_scatter(self) -> Any:
        inputs = [self.values(count) for count in self.step.counts]
        output = self.room(self.step.counts[self.me])
        md.reduce_scatter(output, inputs, self.op, self.group)
        return output.tolist()

    def reduce_scatter_tensor(self) -> Any:
        output = self.room(self.count)
        md.reduce_scatter_tensor(output, self.values(self.count * self.size), self.op, self.group)
        return output.tolist()

    def all_reduce_coalesced(self) -> Any:
        tensors = [self.values(count) for count in self.step.counts]
        md.all_reduce_coalesced(tensors, self.op, self.group)
        return [x.tolist() for x in tensors]

    def broadcast(self) -> Any:
        x = self.values(self.count)
        md.broadcast(x, group=self.group, group_src=self.root)
        return x.tolist()

    def scatter(self) -> Any:
        parts = (
            [self.values(self.count) for _ in range(self.size)] if self.me == self.root else None
        )
        x = self.room(self.count)
        md.scatter(x, parts, group=self.group, group_src=self.root)
        return x.tolist()

    def gather(self) -> Any:
        parts = [self.room(self.count) for _ in range(self.size)] if self.me == self.root else None
        md.gather(self.values(self.count), parts, group=self.group, group_dst=self.root)
        return [x.tolist() for x in parts or []]

    def all_gather(self) -> Any:
        parts = [self.room(count) for count in self.step.counts]
        md.all_gather(parts, self.values(self.step.counts[self.me]), self.group)
        return [x.tolist() for x in parts]

    def all_gather_into_tensor(self) -> Any:
        output = self.room(self.count * self.size)
        md.all_gather_into_tensor(output, self.values(self.count), self.group)
        return output.tolist()

    def all_gather_coalesced(self) -> Any:
        mine = [self.values(count) for count in self.step.counts]
        lists = [[torch.zeros_like(one) for one in mine] for _ in range(self.size)]
        md.all_gather_coalesced(lists, mine, self.group)
        return [[x.tolist() for x in row] for row in lists]

    def all_to_all(self) -> Any:
        matrix = self.matrix()
        inputs = [self.values(count) for count in matrix[self.me]]
        outputs = [self.room(row[self.me]) for row in matrix]
        md.all_to_all(outputs, inputs, self.group)
        return [x.tolist() for x in outputs]

    def all_to_all_single(self) -> Any:
        matrix = self.matrix()
        gives, takes = matrix[self.me], [row[self.me] for row in matrix]
        output = self.room(sum(takes))
        md.all_to_all_single(output, self.values(sum(gives)), takes, gives, self.group)
        return output.tolist()

    def thing(self) -> Any:
        return None if self.is_neutral else {"rank": self.me, "turn": [self.turn] * self.count}

    def all_gather_object(self) -> Any:
        found = [0] * self.size
        md.all_gather_object(found, self.thing(), self.group)
        return found

    def gather_object(self) -> Any:
        found = [0] * self.size if self.me == self.root else None
        md.gather_object(self.thing(), found, group=self.group, group_dst=self.root)
        return found

    def broadcast_object_list(self) -> Any:
        things = [self.thing()] * (1 + self.count)
        md.broadcast_object_list(things, group=self.group, group_src=self.root)
        return things

    def scatter_object_list(self) -> Any:
        found = [0]
        things = [(self.thing(), at) for at in range(self.size)] if self.me == self.root else None
        md.scatter_object_list(found, things, group=self.group, group_src=self.root)
        return found

    def barrier(self) -> Any:
        md.barrier(self.group)

    def monitored_barrier(self) -> Any:
        md.monitored_barrier(self.group)


def checked(num_steps: list[int], body: list[Step]) -> Iterator[Any]:
    """The results of both runs of a plan."""
    yield run_plan(num_steps, body, padded=False)
    yield run_plan(num_steps, body, padded=True)
