"""Average the replicas' parameters every few steps, instead of gradients at each step."""

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
from ..mesh.current_mesh import require_current_mesh, with_outer_mesh_hint
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
    """Count steps and average parameters at some of them.

    Args:
        process_group: the ranks over which parameters are averaged.
        warmup_steps: the number of steps before the first that may average.
    """

    def __init__(self, process_group: ProcessGroup, warmup_steps: int) -> None:
        self.warmup_steps = get_integer(warmup_steps, "warmup_steps", 0)
        self.process_group = process_group
        self.step = 0

    @hidden_from_modes
    def average_parameters(self, params: Parameters) -> None:
        """Count one step and average the parameters if due; these steps are collective.

        Call it once per step on every rank, after the optimizer. Parameters without a gradient are
        not averaged.

        Args:
            params: parameters, or an optimizer's parameter groups.

        Cost: at a step that averages, one all-reduce of all parameters per dtype and device.

        Raises:
            MismatchError: on every rank, if the ranks would average different parameters (for
                example, with a gradient on some ranks only) or at different steps; shows both.
            KindError: ``params`` has neither parameters nor parameter groups.
        """
        group = self._find_process_group() if self.step >= self.warmup_steps else None
        if group is not None:
            _average(_flat_list(params), group, self.step)
        self.step += 1

    @abstractmethod
    def _find_process_group(self) -> ProcessGroup | None:
        """Return the group over which this step averages; None if no average is due."""


class PeriodicModelAverager(ModelAverager):
    """Average all ranks' parameters every ``period`` steps.

    The first step after the warm-up averages, then every ``period``-th. Parameters change in place.

    Args:
        period: the number of steps from one average to the next.
        warmup_steps: the number of steps before the first that averages.
        process_group: an axis, ``mesh["dp"]``; several together, ``mesh["host", "dp"]``; a
            ProcessGroup; or None for all ranks.

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
    """Average parameters over few ranks often, and over more ranks less often.

    A step averages over the largest group whose period divides the step number, counted from 0 and
    including the warm-up.

    Args:
        period_group_size_dict: the period of each axis: ``{"dp": 2, "host": 8}`` averages over dp
            every 2 steps, and over host and dp together every 8. An axis includes the axes before
            it in the mapping; other axes are not averaged over. Or, as in torch, the group size for
            each period; the last is the size of the whole group, which is split in rank order.
            Periods must increase.
        warmup_steps: the number of steps before the first that may average.
        process_group: as for ``PeriodicModelAverager``. With axes, their mesh; None is then the
            current mesh.

    Raises:
        ArgumentError: no entry; periods or sizes do not increase; or the last size is not the
            group's.
        AxisError: the mesh has no such axis.
        MeshError: axes without a mesh.

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
    """The group over which each period averages, shortest period first."""

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


# -- averages -------------------------------------------------------------------------------------


def _flat_list(params: Parameters) -> list[torch.nn.Parameter]:
    """Return the parameters of ``params`` and its groups; raise for anything else."""
    found: list[torch.nn.Parameter] = []
    for entry in params:
        if isinstance(entry, torch.nn.Parameter):
            found.append(entry)
        elif isinstance(entry, dict):
            found += entry["params"]
        else:
            raise KindError(
                f"params contains an object of type {type(entry).__name__}",
                expected="torch.nn.Parameters, or parameter groups (dicts with a 'params' list)",
                fix="pass model.parameters(), or optimizer.param_groups",
            )
    return found


@torch.no_grad()
def _average(parameters: list[torch.nn.Parameter], group: ProcessGroup, step: int) -> None:
    """Average in place parameters with a ``.grad``; raise if they, or ``step``, differ by rank."""
    chosen = {index: mine for index, mine in enumerate(parameters) if mine.grad is not None}
    check_equal(
        {
            "step": str(step),
            **{f"parameter {index}": describe(each) for index, each in chosen.items()},
        },
        group,
        device=parameters[0].device if parameters else torch.device("cpu"),
        summary="the ranks would average different parameters",
        fix="compute gradients of the same parameters on every rank, or set the other gradients "
        "to None; use the same step and period on every rank",
    )
    if not chosen:
        text = (
            "an averager found no parameter with a gradient and averages nothing: call it after "
            "step() and before zero_grad(), with a list of parameters instead of a used-up iterator"
        )
        warn_caller(text)
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in chosen.values():
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for together in alike.values():
        torch._foreach_copy_(together, reduce_together(together, group, ReduceOp.AVG))


# -- periods and groups ---------------------------------------------------------------------------


def _check_period(period: object) -> None:
    get_integer(period, "a period", 1, expected="at least 1 step")


def _warn_of_one(longest: int) -> None:
    if longest == 1:
        warn_caller(
            "averaging parameters at every step sends as much as averaging gradients; use "
            "DistributedDataParallel, which overlaps that with the backward"
        )


def _check_growing(numbers: list[int], what: str, *, allows_equal: bool) -> None:
    if any(
        later < earlier or (later == earlier and not allows_equal)
        for earlier, later in pairwise(numbers)
    ):
        raise ArgumentError(
            f"the {what} {numbers} do not increase",
            expected="the smallest group and the shortest period first",
            fix="order the entries by period",
        )


def _check_sizes(sizes: list[Any], overall: ProcessGroup) -> None:
    """Raise unless the sizes grow, divide the size of ``overall``, and end with it."""
    _check_growing(sizes, "group sizes", allows_equal=True)
    if sizes[-1] != overall.size():
        raise ArgumentError(
            f"the last group of HierarchicalModelAverager has only {sizes[-1]} ranks",
            expected=f"{overall.size()}, the size of {overall.group_name}",
            fix=f"use {overall.size()} as the group size of the longest period",
        )
    for size in sizes:
        if size < 1 or overall.size() % size:
            raise ArgumentError(
                f"cannot split {overall.size()} ranks into groups of {size}",
                expected=f"a divisor of {overall.size()}",
                fix=f"use group sizes that divide {overall.size()}",
            )


def _mesh_of_axes(axes: list[str], given_mesh: object) -> DeviceMesh:
    """Return the given or current mesh; raise if it lacks the axes."""
    call, over = "HierarchicalModelAverager", f" over axes {', '.join(map(repr, axes))}"
    mesh = (
        require_current_mesh(call, over, "process_group=mesh") if given_mesh is None else given_mesh
    )
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"{call}{over} requires a mesh",
            expected="the mesh that has these axes",
            found=f"process_group={given_mesh!r}",
            fix="pass process_group=mesh",
        )
    try:
        mesh.layout.axis_indices(axes)
    except AxisError as error:
        fix = "pass the mesh: process_group=mesh"
        raise with_outer_mesh_hint(error, given_mesh, fix) from None
    return mesh


def _through(mesh: DeviceMesh, axes: list[str]) -> DeviceMesh:
    """Return the submesh of ``mesh`` along these axes, in the mesh's order."""
    return mesh[tuple(sorted(axes, key=mesh.layout.axis_index))]


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Step ``optim``, then the averager, which makes all replicas equal at some steps.

    Averaging steps are collective over the averager's group; all ranks step equally often. The
    state of ``optim`` (for example, momentum) is not averaged.

    Args:
        optim: the optimizer of this rank's parameters.
        averager: a ``PeriodicModelAverager`` or ``HierarchicalModelAverager``, or an object with a
            number ``step`` and a method ``average_parameters(params=)``.

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
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        # The base class would create separate groups and hooks; this class uses optim's.
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of ``optim``."""
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
        """Load a state; without a step, such as ``optim``'s, start at step 0 with a warning."""
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warn_caller(
                "the state has no averager step: steps restart from 0, including the warm-up"
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self) -> None:  # type: ignore[override]
        """Step the optimizer, then count the step and average if due."""
        self.optim.step()
        self.averager.average_parameters(params=self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of ``optim``."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to ``optim``."""
        self.optim.add_param_group(param_group)
