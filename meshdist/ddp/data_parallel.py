"""Data parallelism: one replica of the model on each rank of an axis, gradients averaged."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..collectives.instruments import leave_untraced
from ..errors import ArgumentError, GradientError, KindError, MeshError
from ..groups.process_group import ProcessGroup, resolve_group, world_group
from ..mesh.device_mesh import DeviceMesh
from .buckets import bucket_caps
from .joined_replica import JoinedReplica
from .joining import Join, Joinable
from .reducer import Reducer, is_reduced
from .replicas import broadcast_from, broadcast_from_first, check_equal_lines, tensor_line

__all__ = ["DDP", "DistributedDataParallel"]

_PREFIX = "module."


class DistributedDataParallel(nn.Module, Joinable):
    """Every rank of an axis trains a replica of ``module``; ``.grad`` is the mean over the axis.

    Making it, each forward that synchronises buffers, and each backward are collective over the
    axis: every one of its ranks must come to them, in the same order. On construction the ranks
    compare their parameters and buffers, and take those of the axis's first rank. Before each
    forward, in eval mode too, buffers come from that rank again.

    Gradients are averaged while ``backward()`` runs and lie in ``.grad`` when it returns.
    ``torch.autograd.grad`` does not go through ``.grad``, so what it returns is not averaged. Where
    the loss is a *mean* over each rank's samples, equal numbers of samples per rank give the
    gradient of the whole batch; where it is a *sum*, gradients are smaller than the whole batch's
    by the number of ranks. Inputs are not split: see ``DistributedSampler``.

    Every backward averages, also a second one on a retained graph. Every parameter must get a
    gradient on every rank before the next forward, which raises otherwise; ``check_gradients``
    raises before. Do not add, remove, replace or convert parameters afterwards.

    On an accelerator ``backward()`` returns while the device is at work. Where a backward was
    interrupted on some ranks, the others therefore learn it at the next forward, when the optimizer
    may have applied that one step's gradients; on the CPU their ``backward()`` raises.

    Args:
        module: the model, on its device already, with equal parameters on all ranks in name, order,
            shape, dtype and strides.
        device_ids: the one device of a CUDA module, to which inputs are moved; None for CPU modules
            and modules on several devices.
        output_device: where outputs are moved; by default the device of ``device_ids``.
        dim: torch's; without effect where a module has one device.
        broadcast_buffers: False leaves buffers alone, also on construction.
        init_sync: False skips comparing and broadcasting on construction.
        process_group: over which ranks gradients are averaged; or
        device_mesh: an axis, ``mesh["dp"]``, or several, ``mesh["dp", "cp"]``, taken as one. With
            neither, the world.
        bucket_cap_mb: the size of a bucket in MiB; by default 25, and 1 for the first.
        gradient_as_bucket_view: False keeps gradients outside the buckets, at the price of their
            memory and a copy.
        forward_sync_buffers: False leaves buffers alone after construction.

    Cost: one all-reduce of all gradients a backward, in buckets that overlap with it; one broadcast
        of all buffers a forward.

    Raises:
        AgreementError: the ranks' modules differ; on every rank, showing both.
        GradientError: the module has no parameter that requires a gradient.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     model = md.DDP(torch.nn.Linear(1, 1, bias=False), device_mesh=mesh["dp"])
        ...     model(torch.tensor([[1.0 + 2.0 * md.get_rank()]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> md.simulate(program, 2)
        [2.0, 2.0]
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        *,
        gradient_as_bucket_view: bool = True,
        device_mesh: DeviceMesh | None = None,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        _check_module(module)
        self._caps = bucket_caps(bucket_cap_mb)
        if broadcast_buffers is not None and forward_sync_buffers is not None:
            raise ArgumentError(
                "broadcast_buffers and forward_sync_buffers were both given",
                expected="one of them",
                fix="drop broadcast_buffers, the older name",
            )
        self.device_ids, self.output_device = _find_devices(module, device_ids, output_device)
        self.dim = dim
        if process_group is not None and device_mesh is not None:
            raise MeshError(
                "process_group and device_mesh were both given",
                expected="one of them, or neither for the world",
                fix="pass device_mesh=mesh['dp'] alone",
            )
        self.process_group = resolve_group(process_group if device_mesh is None else device_mesh)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        given = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.forward_sync_buffers = True if given is None else bool(given)
        # Here rather than in the first backward; in the model's order, which all ranks share.
        for device in dict.fromkeys(tensor.device for tensor in _state(module).values()):
            self.process_group.connect(device)
        self._adopt(module)
        if init_sync:
            state = _state(module, with_buffers=broadcast_buffers is not False)
            check_equal_lines(
                [tensor_line(name, tensor) for name, tensor in state.items()],
                self.process_group,
                device=self.device,
                summary=f"DistributedDataParallel: the ranks hold different "
                f"{type(module).__name__} modules",
                fix="build the same model on every rank of the axis, with equal arguments",
            )
            broadcast_from_first([one.detach() for one in state.values()], self.process_group)

    def _adopt(self, module: nn.Module) -> None:
        """Take ``module`` as the model, and put hooks on its parameters; nothing is sent."""
        self.module = module
        trainable = _trainable(module)
        self.device = next(iter(trainable.values())).device
        self._buffer_places = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        self._reducer = Reducer(
            list(trainable.values()),
            list(trainable),
            self.process_group,
            caps=self._caps,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        # A module that outlives its wrapper must not go on reducing.
        weakref.finalize(self, self._reducer.close).atexit = False

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    # -- training ---------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, after taking the buffers of the axis's first rank.

        Raises:
            GradientError: as ``check_gradients``.
        """
        self._begin_forward()
        if self.device_ids is not None:
            inputs, kwargs = _moved((inputs, kwargs), self.device)
        outputs = self.module(*inputs, **kwargs)
        if self.output_device is not None and self.output_device != self.device:
            outputs = _moved(outputs, self.output_device)
        return self._end_forward(outputs)

    def check_gradients(self) -> None:
        """Raise now, on every rank, what the next forward would raise of the last backward.

        Call it between ``backward()`` and ``optimizer.step()`` where no rank may step with wrong
        gradients: once a step on every rank, also on one whose forward, loss or ``backward()`` has
        raised and which goes on. A rank whose forward no backward followed takes part in that of
        the others here, with zeros. While a CUDA graph is captured nothing is checked.

        Cost: nothing is sent where a backward was run. On an accelerator the CPU waits for the end
        of the backward.

        Raises:
            GradientError: the backward was interrupted, or not run, but not on every rank; or
                parameters got no gradient since the last forward. The next forward does not raise
                it again.

        Example:
            >>> import contextlib, meshdist as md, torch
            >>> def program():
            ...     model = md.DDP(torch.nn.Linear(1, 1))
            ...     loss = model(torch.ones(1, 1)).sum()
            ...     if md.get_rank() == 1:
            ...         model.module.weight.register_hook(lambda _: 1 / 0)
            ...     try:
            ...         with contextlib.suppress(ZeroDivisionError):
            ...             loss.backward()
            ...         model.check_gradients()
            ...     except md.errors.GradientError as error:
            ...         return error.found
            >>> md.simulate(program, 2)[0]
            'rank 1: an exception was raised inside backward()'
        """
        self._reducer.check()

    @leave_untraced
    def _begin_forward(self) -> None:
        joined = self._join_config
        if joined.context is not None and isinstance(joined.hook, JoinedReplica):
            joined.hook.begin_forward(joined.context, self)
        self._take_state()

    def _take_state(self) -> None:
        """Be ready for a forward: with the buckets and buffers of the others."""
        self._reducer.before_forward()
        if self.forward_sync_buffers and self._buffer_places:
            buffers = [getattr(owner, name) for owner, name in self._buffer_places]
            given = [one for one in buffers if one is not None]
            broadcast_from(given, self.process_group, self._reducer.source)

    @leave_untraced
    def _end_forward(self, outputs: Any) -> Any:
        if torch.is_grad_enabled():
            self._reducer.after_forward(outputs, self)
        return outputs

    # -- uneven inputs ----------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """The context ``Join([self])``, in which ranks may have unequally many steps.

        After the last rank has joined, all have its parameters and buffers.

        Args:
            divide_by_initial_world_size: whether gradients are divided by the number of ranks;
                False divides them by the number of those that still have data.
            enable, throw_on_early_termination: as in ``Join``.

        Raises:
            ArgumentError, JoinError: as ``Join``.

        Example:
            >>> import meshdist as md, torch
            >>> def program():
            ...     model = md.DDP(torch.nn.Linear(1, 1, bias=False))
            ...     with model.join(divide_by_initial_world_size=False):
            ...         for _ in range(1 + md.get_rank()):  # rank 1 has one step more
            ...             model.zero_grad()
            ...             model(torch.ones(1, 1)).sum().backward()
            ...     return model.module.weight.grad.item()
            >>> md.simulate(program, 2)
            [1.0, 1.0]
        """
        divide = divide_by_initial_world_size
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=divide)

    def join_hook(self, **kwargs: Any) -> JoinedReplica:
        """What this model does in a join context on ranks that have no data left.

        Args:
            kwargs: ``divide_by_initial_world_size``, as in ``join``.
        """
        return JoinedReplica(
            self.process_group,
            self._reducer,
            self._take_state,
            lambda: [one.detach() for one in _state(self.module).values()],
            divides_by_all=kwargs.get("divide_by_initial_world_size", True),
        )

    @property
    def join_device(self) -> torch.device:
        """The device of the module's first parameter."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group over which gradients are averaged."""
        return self.process_group

    # -- state ------------------------------------------------------------------------------------

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of this wrapper (names begin with ``module.``) or of the module alone.

        Load the same state on every rank; nothing is sent.

        Raises:
            ArgumentError: ``assign`` is true, which would replace the parameters.
        """
        if assign:
            raise ArgumentError(
                "load_state_dict(assign=True) would replace the parameters whose gradients are "
                "averaged",
                expected="assign=False, which copies into them",
                fix="load into the module before it is wrapped",
            )
        own = self.state_dict().keys()
        num_wrapped = sum(name in own for name in state_dict)
        num_bare = sum(_PREFIX + name in own for name in state_dict)
        if num_bare > num_wrapped:
            return self.module.load_state_dict(state_dict, strict=strict)
        return super().load_state_dict(state_dict, strict=strict)

    def _apply(self, fn: Any, recurse: bool = True) -> DistributedDataParallel:
        def kinds() -> list[tuple[torch.dtype, torch.device]]:
            return [(p.dtype, p.device) for p in self.module.parameters()]

        before = kinds()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kinds() != before:
            raise GradientError(
                "the parameters were converted after the model was wrapped",
                where=f"rank {self.process_group.world.rank}, {type(self.module).__name__}",
                expected="the dtype and device that they had, in which gradients are reduced",
                fix="convert first, then wrap: DDP(module.to(...)); this wrapper is unusable now",
            )
        return self

    # -- copies -----------------------------------------------------------------------------------

    def _portable_state(self) -> dict[str, Any]:
        bound = ("process_group", "_reducer", "_buffer_places", "_join_config")
        return {name: value for name, value in self.__dict__.items() if name not in bound}

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A copy over the same group, with a copy of the module; nothing is sent."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state = copy.deepcopy(self._portable_state(), memo)
        clone.__setstate__({**state, "process_group": self.process_group})
        return clone

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not world_group(self.process_group.world):
            raise KindError(
                "a DistributedDataParallel over a part of the world cannot be pickled",
                where=f"its group is {self.process_group.group_name}",
                expected="the world as its group, or the model alone",
                fix="save ddp.state_dict() or ddp.module, and wrap again after loading",
            )
        return self._portable_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "process_group" not in state:
            self.process_group = resolve_group(None)
        self._adopt(self.module)


DDP = DistributedDataParallel


def _state(module: nn.Module, *, with_buffers: bool = True) -> dict[str, torch.Tensor]:
    """Every parameter, and buffer, once, by name."""
    state: dict[str, torch.Tensor] = dict(module.named_parameters())
    if with_buffers:
        state.update(module.named_buffers())
    return state


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _check_module(module: object) -> None:
    """Refuse what cannot be trained so, before anything is sent."""
    if not isinstance(module, nn.Module):
        raise KindError(
            f"module is of type {type(module).__name__}", expected="a torch.nn.Module to train"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise GradientError(
                f"{name} has no shape yet",
                expected="parameters that are initialized",
                fix="run one forward on the module before it is wrapped",
            )
        if is_reduced(parameter):
            raise GradientError(
                f"{name} belongs to another DistributedDataParallel",
                expected="a parameter whose gradient one wrapper averages",
                fix="wrap the module once; before it is wrapped again, let go of the first "
                "wrapper and of its outputs: del ddp",
            )
        if is_traceable_wrapper_subclass(parameter):
            raise KindError(
                f"{name} is a {type(parameter).__name__}",
                expected="plain parameters: each rank's own shard as an ordinary tensor",
                fix="wrap a module whose parameters are local shards",
            )
    if not _trainable(module):
        raise GradientError(
            f"{type(module).__name__} has no parameter that requires a gradient",
            expected="a module to train",
            fix="use the module itself: there is nothing to average",
        )
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise GradientError(
                f"{name or type(child).__name__} makes sparse gradients",
                expected="dense gradients",
                fix="make the embedding with sparse=False",
            )


def _find_devices(
    module: nn.Module,
    device_ids: list[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[torch.device] | None, torch.device | None]:
    """Check ``device_ids`` against the module's devices; both come back as devices."""
    if isinstance(device_ids, (ProcessGroup, DeviceMesh, str)):
        raise KindError(
            "the second argument of DistributedDataParallel is device_ids",
            found=f"{device_ids!r}",
            fix="name the axis: DistributedDataParallel(module, device_mesh=mesh['dp'])",
        )
    devices = sorted({str(p.device) for p in module.parameters()})
    if not device_ids:
        if output_device not in (None, 0):  # torch takes 0 for none, too
            raise ArgumentError(
                "output_device was given without device_ids",
                expected="output_device only with the one device of a CUDA module in device_ids",
                fix="drop output_device, or pass device_ids too",
            )
        return None, None
    given = [_as_device(entry) for entry in device_ids]
    if len(given) != 1 or devices != [str(given[0])] or given[0].type == "cpu":
        raise ArgumentError(
            f"device_ids={device_ids} does not fit the module",
            expected="one entry, the device of a CUDA module; None for CPU modules and for "
            "modules on several devices",
            found=f"parameters on {', '.join(devices)}",
            fix="drop device_ids, or move the module: module.to(device)",
        )
    return given, given[0] if output_device is None else _as_device(output_device)


def _as_device(entry: int | torch.device) -> torch.device:
    return torch.device("cuda", entry) if isinstance(entry, int) else torch.device(entry)


def _moved(tree: Any, device: torch.device) -> Any:
    """``tree`` with its tensors on ``device``."""
    return optree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
        tree,
        none_is_leaf=True,
    )
