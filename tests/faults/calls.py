"""What each step of a program calls on a rank, and which numbers that rank must then hold."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

import meshdist as md
from tests.faults.programs import Program, Step

__all__ = ["CALLS", "Calls", "WrongNumbers"]


class WrongNumbers(Exception):
    """A call has returned, and what it was to bring is not there."""


Check = Callable[[], None]


@dataclass
class Pending:
    """A call that was started: what is to be waited for, and the check of its numbers."""

    number: int
    due: int
    work: Any
    check: Check


@dataclass
class Calls:
    """One rank's calls.

    Args:
        program: whose steps they are.
        rank: this rank.
        timeout: of the world, of groups and of meshes.
        start_world: makes the world.
        forgive: whether the program goes on though the numbers of a step are wrong.
    """

    program: Program
    rank: int
    timeout: timedelta
    start_world: Callable[[], None]
    forgive: Callable[[int, WrongNumbers], bool]
    handles: dict[int, Any] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)

    def start(self, number: int, step: Step) -> bool:
        """Make the call of one step; whether it is complete, with its numbers checked."""
        members = self.program.members(step, self.rank)
        call = Call(self, number, step, members)
        work, check = CALLS[step.call](call)
        if step.is_async and work is not None:
            self.pending.append(Pending(number, number + step.patience, work, check))
            return False
        self._check(number, check)
        return True

    def finish(self, now: int) -> list[int]:
        """Wait for the calls that are due at step ``now``; their numbers."""
        due = [one for one in self.pending if one.due < now]
        for one in due:
            one.work.wait()
            self._check(one.number, one.check)
            self.pending.remove(one)
        return [one.number for one in due]

    def _check(self, number: int, check: Check) -> None:
        try:
            check()
        except WrongNumbers as error:
            if not self.forgive(number, error):
                raise

    def drop(self, group: int) -> None:
        """Forget a handle and every Work."""
        self.handles.pop(group, None)
        self.pending.clear()
        gc.collect()


class Call:
    """One step on one rank: its arguments, and the data of all members."""

    def __init__(self, calls: Calls, number: int, step: Step, members: Sequence[int]) -> None:
        self.calls, self.number, self.step, self.members = calls, number, step, members
        self.rank = calls.rank
        self.place, self.size = members.index(self.rank), len(members)
        self.group = calls.handles.get(step.group)
        self.dtype = getattr(torch, step.dtype)
        self.op = getattr(md.ReduceOp, step.op)
        self.root = members[step.root % self.size]
        self.peer = members[step.peer % self.size]
        self.is_root = self.rank == self.root

    def data(self, rank: int, part: int = 0, count: int | None = None) -> torch.Tensor:
        """What ``rank`` gives into this call: small integers."""
        count = self.step.count if count is None else count
        first = 5 * self.number + 3 * rank + 2 * part
        return ((torch.arange(count) + first) % 7 + 1).to(self.dtype)

    def all(self, part: int = 0) -> list[torch.Tensor]:
        return [self.data(rank, part) for rank in self.members]

    def empty(self, num_parts: int = 1) -> torch.Tensor:
        return torch.zeros(self.step.count * num_parts, dtype=self.dtype)

    def empties(self) -> list[torch.Tensor]:
        return [self.empty() for _ in self.members]

    def reduced(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(list(tensors)).double()
        if self.step.op == "SUM":
            return stacked.sum(0).to(self.dtype)
        return (stacked.amax(0) if self.step.op == "MAX" else stacked.amin(0)).to(self.dtype)

    def expect(self, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        for x, y in zip(found, wanted, strict=True):
            if not torch.equal(x, y):
                bad = (x != y).nonzero().flatten()
                place = int(bad[0])
                raise WrongNumbers(
                    f"step {self.number}, {self.step}: {len(bad)} of {x.numel()} elements, "
                    f"the first at {place}: {x[place].item()} is not {y[place].item()}"
                )

    def expect_objects(self, found: Any, wanted: Any) -> None:
        if found != wanted:
            raise WrongNumbers(f"step {self.number}, {self.step}: {found} is not {wanted}")

    @property
    def more(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.step.is_async}


Outcome = tuple[Any, Check]


def none() -> None:
    pass


# -- worlds and groups ----------------------------------------------------------------------------


def init(call: Call) -> Outcome:
    call.calls.start_world()
    call.calls.handles = {0: None}
    return None, none


def reinit(call: Call) -> Outcome:
    md.destroy_process_group()
    return init(call)


def new_group(call: Call) -> Outcome:
    group = md.new_group(list(call.step.ranks), timeout=call.calls.timeout)
    call.calls.handles[call.step.makes[0]] = group
    return None, none


def mesh(call: Call) -> Outcome:
    names = ("a", "b")[: len(call.step.shape)]
    made = md.init_device_mesh(
        "cpu", call.step.shape, mesh_dim_names=names, timeout=call.calls.timeout
    )
    for number, name in zip(call.step.makes, names, strict=True):
        call.calls.handles[number] = made[name].get_group()
    return None, none


# -- collectives ----------------------------------------------------------------------------------


def all_reduce(call: Call) -> Outcome:
    x = call.data(call.rank)
    work = md.all_reduce(x, call.op, **call.more)
    return work, lambda: call.expect([x], [call.reduced(call.all())])


def all_reduce_coalesced(call: Call) -> Outcome:
    xs = [call.data(call.rank, part) for part in range(2)]
    work = md.all_reduce_coalesced(xs, call.op, **call.more)
    return work, lambda: call.expect(xs, [call.reduced(call.all(part)) for part in range(2)])


def reduce(call: Call) -> Outcome:
    x = call.data(call.rank)
    work = md.reduce(x, call.root, call.op, **call.more)
    wanted = call.reduced(call.all()) if call.is_root else x.clone()
    return work, lambda: call.expect([x], [wanted])


def _scattered(call: Call) -> torch.Tensor:
    """What this member gets of a reduce-scatter, whose part j is ``data(rank, j)``."""
    return call.reduced([call.data(rank, call.place) for rank in call.members])


def reduce_scatter_tensor(call: Call, operation: str = "reduce_scatter_tensor") -> Outcome:
    x = call.empty()
    given = torch.cat([call.data(call.rank, part) for part in range(call.size)])
    work = getattr(md, operation)(x, given, call.op, **call.more)
    return work, lambda: call.expect([x], [_scattered(call)])


def reduce_scatter(call: Call) -> Outcome:
    x = call.empty()
    given = [call.data(call.rank, part) for part in range(call.size)]
    work = md.reduce_scatter(x, given, call.op, **call.more)
    return work, lambda: call.expect([x], [_scattered(call)])


def broadcast(call: Call) -> Outcome:
    x = call.data(call.rank)
    work = md.broadcast(x, call.root, **call.more)
    return work, lambda: call.expect([x], [call.data(call.root)])


def all_gather_into_tensor(call: Call, operation: str = "all_gather_into_tensor") -> Outcome:
    x = call.empty(call.size)
    work = getattr(md, operation)(x, call.data(call.rank), **call.more)
    return work, lambda: call.expect([x], [torch.cat(call.all())])


def all_gather(call: Call) -> Outcome:
    xs = call.empties()
    work = md.all_gather(xs, call.data(call.rank), **call.more)
    return work, lambda: call.expect(xs, call.all())


def all_gather_coalesced(call: Call) -> Outcome:
    lists = [[call.empty(), call.empty()] for _ in call.members]
    md.all_gather_coalesced(lists, [call.data(call.rank, 0), call.data(call.rank, 1)], call.group)
    found = [x for each in lists for x in each]
    wanted = [call.data(rank, part) for rank in call.members for part in range(2)]
    return None, lambda: call.expect(found, wanted)


def gather(call: Call) -> Outcome:
    xs = call.empties() if call.is_root else None
    work = md.gather(call.data(call.rank), xs, call.root, **call.more)
    return work, lambda: call.expect(xs or [], call.all() if xs else [])


def scatter(call: Call) -> Outcome:
    x = call.empty()
    given = [call.data(call.root, part) for part in range(call.size)] if call.is_root else None
    work = md.scatter(x, given, call.root, **call.more)
    return work, lambda: call.expect([x], [call.data(call.root, call.place)])


def all_to_all(call: Call) -> Outcome:
    xs = call.empties()
    given = [call.data(call.rank, part) for part in range(call.size)]
    work = md.all_to_all(xs, given, **call.more)
    return work, lambda: call.expect(xs, [call.data(rank, call.place) for rank in call.members])


def all_to_all_single(call: Call) -> Outcome:
    x = call.empty(call.size)
    given = torch.cat([call.data(call.rank, part) for part in range(call.size)])
    work = md.all_to_all_single(x, given, **call.more)
    wanted = [call.data(rank, call.place) for rank in call.members]
    return work, lambda: call.expect([x], [torch.cat(wanted)])


def barrier(call: Call) -> Outcome:
    return md.barrier(**call.more), none


def monitored_barrier(call: Call) -> Outcome:
    md.monitored_barrier(call.group, timeout=call.calls.timeout)
    return None, none


def shared_empty(call: Call) -> Outcome:
    x = md.shared_empty((call.step.count,), call.dtype, call.group)
    x.copy_(call.data(call.rank))
    md.all_reduce(x, call.op, call.group)
    return None, lambda: call.expect([x], [call.reduced(call.all())])


def ddp(call: Call) -> Outcome:
    model = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    wrapped = md.DDP(model, process_group=md.distributed.group.WORLD)
    wrapped(torch.full((1, 4), float(call.size * (call.rank + 1)))).sum().backward()
    wanted = torch.full((2, 4), sum(range(1, call.size + 1)) * 1.0)
    grad = model.weight.grad
    assert grad is not None
    return None, lambda: call.expect([grad.flatten()], [wanted.flatten()])


# -- loops with unequally many steps -------------------------------------------------------------


def num_turns(place: int) -> int:
    """How many steps a member has, by its place."""
    return 1 + 3 * place % 5


def uneven(call: Call) -> Outcome:
    found, wanted = [], []
    batches = md.uneven(range(num_turns(call.place)), call.group)
    for turn, (_, weight) in enumerate(batches):
        going = [place for place in range(call.size) if num_turns(place) > turn]
        assert batches.num_active == len(going)
        x = torch.full((call.step.count,), weight * (call.place + 1.0))
        y = torch.full((turn,), 1.0)
        work = md.all_reduce(x, group=call.group, async_op=True)
        md.all_reduce(y, md.ReduceOp.MAX, call.group)
        z = torch.tensor([float(call.place)])
        md.broadcast(z, group=call.group, group_src=max(range(call.size), key=num_turns))
        work.wait()
        found += [x[:1], z]
        total = torch.tensor([sum(place + 1.0 for place in going)])
        wanted += [total, torch.tensor([float(max(range(call.size), key=num_turns))])]
    return None, lambda: call.expect(found, wanted)


def join(call: Call) -> Outcome:
    """A model whose gradients are averaged over the members that have data."""
    model = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    group = md.distributed.group.WORLD if call.group is None else call.group
    wrapped = md.DDP(model, process_group=group)
    found, wanted = [], []
    with wrapped.join(divide_by_initial_world_size=False):
        for turn in range(num_turns(call.place)):
            going = [place for place in range(call.size) if num_turns(place) > turn]
            wrapped.zero_grad()
            wrapped(torch.full((1, 4), float(len(going) * (call.place + 1)))).sum().backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad.flatten().round())
            wanted.append(torch.full((8,), sum(place + 1.0 for place in going)))
    return None, lambda: call.expect(found, wanted)


# -- several tensors, objects ---------------------------------------------------------------------


def all_reduce_multigpu(call: Call) -> Outcome:
    xs = [call.data(call.rank, part) for part in range(2)]
    md.all_reduce_multigpu(xs, call.op, call.group)
    wanted = call.reduced([*call.all(0), *call.all(1)])
    return None, lambda: call.expect(xs, [wanted, wanted])


def reduce_multigpu(call: Call) -> Outcome:
    xs = [call.data(call.rank, part) for part in range(2)]
    wanted = [x.clone() for x in xs]
    md.reduce_multigpu(xs, call.root, call.op, call.group, dst_tensor=1)
    if call.is_root:
        wanted[1] = call.reduced([*call.all(0), *call.all(1)])
    return None, lambda: call.expect(xs, wanted)


def broadcast_multigpu(call: Call) -> Outcome:
    xs = [call.data(call.rank, part) for part in range(2)]
    md.broadcast_multigpu(xs, call.root, call.group, src_tensor=1)
    return None, lambda: call.expect(xs, [call.data(call.root, 1)] * 2)


def all_gather_multigpu(call: Call) -> Outcome:
    lists = [[call.empty() for _ in range(2 * call.size)] for _ in range(2)]
    md.all_gather_multigpu(lists, [call.data(call.rank, part) for part in range(2)], call.group)
    wanted = [call.data(rank, part) for rank in call.members for part in range(2)]
    return None, lambda: call.expect([*lists[0], *lists[1]], wanted * 2)


def thing(call: Call, rank: int) -> dict[str, Any]:
    return {"rank": rank, "step": call.number, "text": "x" * (call.step.count % 977)}


def all_gather_object(call: Call) -> Outcome:
    found: list[Any] = [None] * call.size
    md.all_gather_object(found, thing(call, call.rank), call.group)
    return None, lambda: call.expect_objects(found, [thing(call, rank) for rank in call.members])


def gather_object(call: Call) -> Outcome:
    found: list[Any] | None = [None] * call.size if call.is_root else None
    md.gather_object(thing(call, call.rank), found, call.root, call.group)
    wanted = [thing(call, rank) for rank in call.members] if call.is_root else None
    return None, lambda: call.expect_objects(found, wanted)


def broadcast_object_list(call: Call) -> Outcome:
    found = [thing(call, call.rank), call.rank]
    md.broadcast_object_list(found, call.root, call.group)
    return None, lambda: call.expect_objects(found, [thing(call, call.root), call.root])


def scatter_object_list(call: Call) -> Outcome:
    found: list[Any] = [None]
    given = [thing(call, rank) for rank in call.members]
    md.scatter_object_list(found, given if call.is_root else None, call.root, call.group)
    return None, lambda: call.expect_objects(found, [thing(call, call.rank)])


# -- messages -------------------------------------------------------------------------------------


def send(call: Call) -> Outcome:
    if call.is_root:
        md.send(call.data(call.rank), call.peer, call.group, tag=3)
        return None, none
    x = call.empty()
    sender = md.recv(x, call.root, call.group, tag=3)
    call.expect_objects(sender, call.root)
    return None, lambda: call.expect([x], [call.data(call.root)])


def isend(call: Call) -> Outcome:
    x = call.data(call.rank) if call.is_root else call.empty()
    start = partial(md.isend, x, call.peer) if call.is_root else partial(md.irecv, x, call.root)
    start(group=call.group).wait()
    return None, lambda: call.expect([x], [call.data(call.root)])


def recv_from_anyone(call: Call) -> Outcome:
    if call.is_root:
        md.send(call.data(call.rank), call.peer, call.group, tag=call.number)
        return None, none
    x = call.empty()
    sender = md.recv(x, group=call.group, tag=call.number)
    call.expect_objects(sender, call.root)
    return None, lambda: call.expect([x], [call.data(call.root)])


def batch_isend_irecv(call: Call) -> Outcome:
    left = call.members[(call.place - 1) % call.size]
    right = call.members[(call.place + 1) % call.size]
    x = call.empty()
    batch = [
        md.P2POp(md.irecv, x, left, call.group),
        md.P2POp(md.isend, call.data(call.rank), right, call.group),
    ]
    for work in md.batch_isend_irecv(batch):
        work.wait()
    return None, lambda: call.expect([x], [call.data(left)])


def send_object_list(call: Call) -> Outcome:
    if call.is_root:
        md.send_object_list([thing(call, call.rank), 1], call.peer, call.group)
        return None, none
    found = [None, None]
    md.recv_object_list(found, call.root, call.group)
    return None, lambda: call.expect_objects(found, [thing(call, call.root), 1])


CALLS: dict[str, Callable[[Call], Outcome]] = {
    **{
        one.__name__: one
        for one in (
            *(init, reinit, new_group, mesh),
            *(all_reduce, all_reduce_coalesced, reduce, reduce_scatter_tensor, reduce_scatter),
            *(broadcast, all_gather_into_tensor, all_gather, all_gather_coalesced),
            *(gather, scatter, all_to_all, all_to_all_single, barrier, monitored_barrier),
            *(shared_empty, ddp, uneven, join),
            *(all_reduce_multigpu, reduce_multigpu, broadcast_multigpu, all_gather_multigpu),
            *(all_gather_object, gather_object, broadcast_object_list, scatter_object_list),
            *(send, isend, batch_isend_irecv, send_object_list),
        )
    },
    "recv from anyone": recv_from_anyone,
    "reduce_scatter_single": partial(reduce_scatter_tensor, operation="reduce_scatter_single"),
    "all_gather_single": partial(all_gather_into_tensor, operation="all_gather_single"),
}
"""What a step may call, by name."""
