"""Averages of the replicas' parameters every few steps, in place of their gradients' at each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch

from ..arguments import get_integer
from ..arrays import describe
from ..checking.call_sites import warn_caller
from ..collectives.flat_sums import reduce_together
from ..collectives.torch_private import hidden_from_modes
from ..errors import ArgumentError, AxisError, KindError, MeshError
from ..groups.group_calls import new_subgroups
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from ..mesh.current_mesh import mesh_in_force, with_hidden_mesh
from ..mesh.device_mesh import DeviceMesh
from ..reduce_ops import ReduceOp
from .replicas import check_equal

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
]

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


class ModelAverager(ABC):
    """The base of both averagers: it counts steps, and some of them average.

    Args:
        process_group: over which ranks parameters are averaged.
        warmup_steps: how many steps come before the first that may average.
    """

    def __init__(self, process_group: ProcessGroup, warmup_steps: int) -> None:
        self.warmup_steps = get_integer(warmup_steps, "warmup_steps", 0)
        self.process_group = process_group
        self.step = 0

    @hidden_from_modes
    def average_parameters(self, params: Parameters) -> None:
        """Count one step, and average where it is due; then collective over the group.

        Call it once a step on every rank, after the optimizer's step. Parameters without a gradient
        are left alone.

        Args:
            params: parameters, or an optimizer's groups of them.

        Cost: at a step that averages, one all-reduce of all parameters of one dtype and device.

        Raises:
            MismatchError: the ranks would average different parameters, since some have a gradient
                on some ranks alone, say, or at different steps; on every rank, showing both.
            KindError: neither parameters nor groups of them.
        """
        group = self._find_process_group() if self.step >= self.warmup_steps else None
        if group is not None:
            _average(_flat_list(params), group, self.step)
        self.step += 1

    @abstractmethod
    def _find_process_group(self) -> ProcessGroup | None:
        """Return the group over which this step averages, None if no average is due."""


class PeriodicModelAverager(ModelAverager):
    """Every rank's parameters become the mean of all ranks', every ``period`` steps.

    The first step after the warm-up averages, then each ``period``-th from there. Parameters change
    in place: those that are views, into a bucket say, stay views.

    Args:
        period: the number of steps from one average to the next.
        warmup_steps: how many steps come before the first that averages.
        process_group: an axis, ``mesh["dp"]``; several together, ``mesh["host", "dp"]``; a
            ProcessGroup; or None for the world.

    Raises:
        ArgumentError: the period is below 1, or the warm-up below 0.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     averager = dist.PeriodicModelAverager(period=2)
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     seen = []
        ...     for _ in range(4):
        ...         weight.grad = torch.ones(1)
        ...         weight.data += 1.0 + md.get_rank()  # stands for a step of an optimizer
        ...         averager.average_parameters([weight])
        ...         seen.append(weight.item())
        ...     return seen
        >>> md.simulate(program, 2)
        [[1.5, 2.5, 4.5, 5.5], [1.5, 3.5, 4.5, 6.5]]

    Source: Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD" (2018).
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: GroupLike = None,
    ) -> None:
        _check_period(period)
        _warn_of_one(period)
        super().__init__(resolve_group(process_group), warmup_steps)
        self.period = period

    def _find_process_group(self) -> ProcessGroup | None:
        due = (self.step - self.warmup_steps) % self.period == 0
        return self.process_group if due else None


class HierarchicalModelAverager(ModelAverager):
    """Parameters are averaged over few ranks often, and over more ranks less often; collective.

    A step averages over the largest group whose period divides its number, counted from 0, with the
    warm-up; that includes what smaller groups would have averaged.

    Args:
        period_group_size_dict: with axes, the period of each: ``{"dp": 2, "host": 8}`` averages
            over dp every 2 steps, over host and dp together every 8. An axis's average runs over
            the axes before it in the mapping too; over axes that are not named nothing is averaged.
            Or as torch's: the size of the group for each period, the last that of the whole group,
            which is cut in its order. Periods grow from entry to entry.
        warmup_steps: how many steps come before the first that may average.
        process_group: as for ``PeriodicModelAverager``. With axes, the mesh that has them; None is
            then the current mesh.

    Raises:
        ArgumentError: there is no entry, periods or sizes do not grow, or the last size is not the
            group's.
        AxisError: the mesh has no such axis.
        MeshError: axes are named, and there is no mesh.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "dp"))
        ...     averager = dist.HierarchicalModelAverager({"dp": 2, "host": 8}, process_group=mesh)
        ...     return [group.ranks for group in averager.period_process_group_dict.values()]
        >>> md.simulate(program, (2, 2))[3]
        [(2, 3), (0, 1, 2, 3)]

    Source: Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD" (2018),
        section 5.
    """

    period_process_group_dict: OrderedDict[int, ProcessGroup]
    """Over which group a period averages, from the shortest on."""

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | Mapping[str, int] | None = None,
        warmup_steps: int = 0,
        process_group: GroupLike = None,
    ) -> None:
        if not period_group_size_dict:
            raise ArgumentError(
                "HierarchicalModelAverager has no periods",
                expected="a period for each axis, or a group size for each period",
                fix="pass {'dp': 2, 'host': 8} and process_group=mesh, or {2: 4, 8: 16}",
            )
        by_axis = all(isinstance(key, str) for key in period_group_size_dict)
        keys: list[Any] = list(period_group_size_dict)
        values: list[Any] = list(period_group_size_dict.values())
        periods = values if by_axis else keys
        for period in periods:
            _check_period(period)
        _check_growing(periods, "periods", allows_equal=False)
        if by_axis:
            mesh = _mesh_of_axes(keys, process_group)
            overall = resolve_group(_through(mesh, keys))
        else:
            overall = resolve_group(process_group)
            _check_sizes(values, overall)
        super().__init__(overall, warmup_steps)
        _warn_of_one(periods[-1])
        if by_axis:
            inner = (keys[: count + 1] for count in range(len(keys) - 1))
            groups = [resolve_group(_through(mesh, axes)) for axes in inner] + [overall]
        else:
            groups = [
                resolve_group(new_subgroups(size, overall)[0]) if size < overall.size() else overall
                for size in values
            ]
        self.period_process_group_dict = OrderedDict(zip(periods, groups, strict=True))

    def _find_process_group(self) -> ProcessGroup | None:
        for period in reversed(self.period_process_group_dict):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None


# -- what is averaged -----------------------------------------------------------------------------


def _flat_list(params: Parameters) -> list[torch.nn.Parameter]:
    """Return the parameters of ``params`` and of its groups; raise for anything else."""
    found: list[torch.nn.Parameter] = []
    for entry in params:
        if isinstance(entry, torch.nn.Parameter):
            found.append(entry)
        elif isinstance(entry, dict):
            found += entry["params"]
        else:
            raise KindError(
                f"params holds something of type {type(entry).__name__}",
                expected="torch.nn.Parameters, or dicts with a list of them as 'params'",
                fix="pass model.parameters(), or optimizer.param_groups",
            )
    return found


@torch.no_grad()
def _average(parameters: list[torch.nn.Parameter], group: ProcessGroup, step: int) -> None:
    """Average in place parameters with a ``.grad``; raise if these, or ``step``, differ by rank."""
    chosen = {index: mine for index, mine in enumerate(parameters) if mine.grad is not None}
    check_equal(
        {
            "step": str(step),
            **{f"parameter {index}": describe(each) for index, each in chosen.items()},
        },
        group,
        device=parameters[0].device if parameters else torch.device("cpu"),
        summary="the ranks would average different parameters",
        fix="let the same parameters get gradients on every rank, or clear those of the others; "
        "let step and period be equal on every rank",
    )
    if not chosen:
        text = (
            "an averager found no parameter with a gradient, and averages nothing: call it behind "
            "step() and before zero_grad(), with a list of parameters, as an iterator ends"
        )
        warn_caller(text)
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in chosen.values():
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for together in alike.values():
        torch._foreach_copy_(together, reduce_together(together, group, ReduceOp.AVG))


# -- periods and groups ---------------------------------------------------------------------------


def _check_period(period: object) -> None:
    get_integer(period, "a period", 1, expected="1 step at least, and mostly more than 1")


def _warn_of_one(longest: int) -> None:
    if longest == 1:
        warn_caller(
            "averaging parameters at every step sends as much as averaging gradients, which "
            "DistributedDataParallel does while the backward runs"
        )


def _check_growing(numbers: list[int], what: str, *, allows_equal: bool) -> None:
    if any(
        later < earlier or (later == earlier and not allows_equal)
        for earlier, later in pairwise(numbers)
    ):
        raise ArgumentError(
            f"the {what} {numbers} do not grow",
            expected="the smallest group and the shortest period first",
            fix="order the entries by period",
        )


def _check_sizes(sizes: list[Any], overall: ProcessGroup) -> None:
    """Raise unless the sizes grow, divide the size of ``overall``, and end with it."""
    _check_growing(sizes, "group sizes", allows_equal=True)
    if sizes[-1] != overall.size():
        raise ArgumentError(
            f"the last group of HierarchicalModelAverager has {sizes[-1]} ranks, not all",
            expected=f"{overall.size()}, the size of {overall.group_name}",
            fix="let the longest period average over the whole group",
        )
    for size in sizes:
        if size < 1 or overall.size() % size:
            raise ArgumentError(
                f"groups of {size} do not divide {overall.size()} ranks",
                expected=f"a divisor of {overall.size()}",
            )


def _mesh_of_axes(axes: list[str], given_mesh: object) -> DeviceMesh:
    """Return the given or the current mesh; raise if it is no mesh with these axes."""
    call, over = "HierarchicalModelAverager", f" over axes {', '.join(map(repr, axes))}"
    mesh = mesh_in_force(call, over, "process_group=mesh") if given_mesh is None else given_mesh
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"{call}{over}: a group has no axes",
            expected="the mesh that has these axes",
            found=f"process_group={given_mesh!r}",
            fix="pass process_group=mesh",
        )
    try:
        mesh.layout.axis_indices(axes)
    except AxisError as error:
        fix = "pass the mesh: process_group=mesh"
        raise with_hidden_mesh(error, given_mesh, fix) from None
    return mesh


def _through(mesh: DeviceMesh, axes: list[str]) -> DeviceMesh:
    """Return the submesh of ``mesh`` along these axes, in the order of the mesh's axes."""
    return mesh[tuple(sorted(axes, key=mesh.layout.axis_index))]


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Each step is ``optim``'s, and then the averager's: some steps leave all replicas equal.

    A step that averages is collective over the averager's group; all ranks step equally often. The
    state of ``optim`` (momentum, say) stays each rank's own.

    Args:
        optim: the optimizer of this rank's parameters.
        averager: a ``PeriodicModelAverager`` or ``HierarchicalModelAverager``, or an object that
            has a number ``step`` and a method ``average_parameters(params=)``.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = dist.PostLocalSGDOptimizer(
        ...         torch.optim.SGD([weight], lr=1.0), dist.PeriodicModelAverager(period=3)
        ...     )
        ...     for _ in range(4):  # averages in the first step and the fourth
        ...         (weight * (1.0 + md.get_rank())).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     return weight.item()
        >>> md.simulate(program, 2)
        [-6.0, -6.0]

    Source: Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD" (2018).
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        # The base class would make groups and hooks of its own; all that it keeps is optim's.
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of ``optim``, which replaces them where a state is loaded."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of ``optim``."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``optim``, and the averager's step as ``"step"``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave.

        A state without a step, such as that of ``optim`` alone, begins at 0, with a warning.
        """
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warn_caller(
                "the state has no step of an averager: steps count from 0, warm-up included"
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self) -> None:  # type: ignore[override]
        """Step this rank's optimizer, then count the step, and average where it is due."""
        self.optim.step()
        self.averager.average_parameters(params=self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters of ``optim``."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to ``optim``."""
        self.optim.add_param_group(param_group)
