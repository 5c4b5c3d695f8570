"""Check the arguments of DistributedDataParallel and collect the tensors that it manages."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..arguments import get_integer
from ..bootstrap.world import Closable, find_world
from ..dtypes import dtype_name
from ..error_text import with_article
from ..errors import ArgumentError, DtypeError, GradientError, KindError, MeshdistError
from ..groups.process_group import ProcessGroup, resolve_group, world_group
from ..mesh.device_mesh import DeviceMesh
from ..typed_mode.module_annotations import restore_annotations
from .gradient_hooks import find_reducing_world
from .precision import CastParameters

if TYPE_CHECKING:
    from typing_extensions import Self


_PREFIX = "module."
_BOUND = {
    "process_group",
    "device_mesh",
    "reducer",
    "_buffers_of_model",
    "_owner",
    "_divergence_checks",
    "_join_config",
}
"""Attributes that belong to this process; a copy creates new ones."""


class WrappedModel(nn.Module, ABC):
    """The ``nn.Module`` methods of ``DistributedDataParallel``."""

    module: nn.Module
    process_group: ProcessGroup
    device_mesh: Any
    _cast: CastParameters | None

    @abstractmethod
    def _adopt(self, module: nn.Module) -> None:
        """Use ``module`` as the model; no communication."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of this wrapper (names begin with ``module.``) or of the module.

        Load the same state on every rank; no communication.

        Raises:
            ArgumentError: ``assign`` is True, which would replace the parameters.
        """
        if assign:
            raise ArgumentError(
                "load_state_dict(assign=True) cannot replace the parameters of a "
                "DistributedDataParallel",
                expected="assign=False, which copies into the parameters",
                fix="pass assign=False, or load into the module before you wrap it",
            )
        own = self.state_dict().keys()
        num_wrapped = sum(name in own for name in state_dict)
        num_bare = sum(_PREFIX + name in own for name in state_dict)
        if num_bare > num_wrapped:
            return self.module.load_state_dict(state_dict, strict=strict)
        return super().load_state_dict(state_dict, strict=strict)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        def kinds() -> list[tuple[torch.dtype, torch.device]]:
            return [(p.dtype, p.device) for p in self.module.parameters()]

        before = kinds()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kinds() != before:
            raise GradientError(
                "cannot convert parameters after the model is wrapped",
                where=f"rank {self.process_group.world.rank}, {type(self.module).__name__}",
                expected="the dtype and device that the parameters had when the model was wrapped",
                fix="convert first, then wrap: DDP(module.to(...)); this wrapper can no longer be "
                "used",
            )
        return self

    # -- copies -----------------------------------------------------------------------------------

    def _portable_state(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _BOUND}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state = copy.deepcopy(self._portable_state(), memo)
        clone.__setstate__(
            {**state, "process_group": self.process_group, "device_mesh": self.device_mesh}
        )
        return clone

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not world_group(self.process_group.world):
            raise KindError(
                "cannot pickle a DistributedDataParallel whose group is not the world",
                where=f"its group is {self.process_group.group_name}",
                expected="the world as its group",
                fix="save ddp.state_dict() or ddp.module, and wrap again after loading",
            )
        return self._portable_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._cast is not None:
            self._cast.close()  # its hooks were copied with the modules
        if "process_group" not in state:
            self.process_group, self.device_mesh = resolve_group(None), None
        restore_annotations(self.module)
        self._adopt(self.module)


_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The module attribute in which torch's DDP and this one look up ignored names."""


def module_state(
    module: nn.Module, ignored: Iterable[str] = (), *, with_buffers: bool = True
) -> dict[str, torch.Tensor]:
    """Return parameters and buffers that are not ignored, by name, without duplicates."""
    state: dict[str, torch.Tensor] = dict(module.named_parameters())
    if with_buffers:
        state.update(module.named_buffers())
    excluded = set(ignored)
    return {name: tensor for name, tensor in state.items() if name not in excluded}


def trainable_parameters(module: nn.Module, ignored: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient and are not ignored, by name."""
    excluded = set(ignored)
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in excluded
    }


def ignored_names(module: nn.Module, names: Iterable[str] | None = None) -> frozenset[str]:
    """Store ``names``, if given, as ignored on ``module``; return its ignored names."""
    if names is not None:
        names = list(names)
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentError(
                f"{type(module).__name__} has no parameter or buffer named {unknown[0]!r}",
                expected="names from named_parameters() or named_buffers()",
                found=f"{len(unknown)} of {len(names)} names unknown",
                fix=f"pass {str(unknown[0]).lstrip('.')!r}"
                if str(unknown[0]).lstrip(".") in known
                else "take the names from dict(module.named_parameters())",
            )
        setattr(module, _IGNORED, names)
    return frozenset(getattr(module, _IGNORED, ()))


def sparse_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of embeddings with sparse gradients."""
    return [
        cast("nn.Parameter", child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    ]


def check_module(module: object, *, with_buffers: bool = True) -> frozenset[str]:
    """Raise unless a module, with its buffers if asked, can be wrapped; return ignored names."""
    if not isinstance(module, nn.Module):
        raise KindError(
            f"module is of type {type(module).__name__}",
            expected="a torch.nn.Module to train",
            fix="pass the model as the first argument",
        )
    ignored = ignored_names(module)
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm) and not torch.distributed.is_initialized():
            raise KindError(
                f"{name or 'the module'} is torch's SyncBatchNorm, which requires torch's process "
                "groups",
                expected="meshdist's SyncBatchNorm",
                fix="convert it: module = "
                "md.distributed.SyncBatchNorm.convert_sync_batchnorm(module, mesh['dp'])",
            )
    reject_wrapped(module, ignored)
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise GradientError(
                f"cannot wrap a module whose parameter {name} is uninitialized",
                expected="parameters that are initialized",
                fix="run one forward of the module before you wrap it",
            )
        if is_traceable_wrapper_subclass(parameter):
            is_dtensor = type(parameter).__name__ == "DTensor"
            raise KindError(
                f"cannot wrap a module whose parameter {name} is "
                f"{with_article(type(parameter).__name__)}",
                expected="plain tensors as parameters, such as each rank's local shard",
                fix="use torch's fully_shard(module, mesh=mesh.to_torch()['dp']), or replicate, "
                "instead of DDP"
                if is_dtensor
                else "wrap a module whose parameters are local shards",
            )
    for name, tensor in module_state(module, ignored, with_buffers=with_buffers).items():
        _check_tensor(name, tensor)
    if not trainable_parameters(module, ignored):
        raise GradientError(
            f"{type(module).__name__} has no parameter that requires a gradient",
            expected="a module with at least one trainable parameter",
            fix="use the module without DistributedDataParallel",
        )
    return ignored


def reject_wrapped(module: nn.Module, ignored: frozenset[str]) -> None:
    """Raise if a wrapper already averages gradients of ``module`` that are not ignored."""
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        world = find_reducing_world(parameter)
        if world is not None and world is not find_world() and not world.is_closed:
            raise GradientError(
                f"{name} belongs to the DistributedDataParallel of rank {world.rank}",
                expected="a separate module per rank (simulated ranks share objects in the "
                "closure)",
                fix="create it inside the function, or pass it as an argument, which is copied: "
                "md.simulate(function, ranks, args=(module,))",
            )
        if world is not None:
            is_whole = all(map(find_reducing_world, trainable_parameters(module, ignored).values()))
            raise GradientError(
                f"{name} belongs to another DistributedDataParallel",
                expected="a parameter in at most one DistributedDataParallel",
                fix="wrap the module once; or delete the first wrapper and its outputs before you "
                "wrap "
                "again: module = ddp.module; del ddp"
                if is_whole
                else "put all models that share it into one module whose forward selects the "
                "model, and "
                "wrap that module; pass find_unused_parameters=True if a loss uses only one of "
                "them",
            )


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor cannot be sent, or its gradients averaged."""
    if tensor.layout is not torch.strided:
        raise KindError(
            f"{name} is not a dense tensor",
            expected="dense parameters and buffers; their gradients may be sparse",
            found=f"layout {str(tensor.layout).removeprefix('torch.')}",
            fix="convert it with to_dense()"
            + "; or pass broadcast_buffers=False" * (not isinstance(tensor, nn.Parameter)),
        )
    dtype = tensor.dtype
    if tensor.requires_grad and dtype.is_floating_point and dtype.itemsize == 1:
        raise DtypeError(
            f"cannot average the gradients of {name}: torch does not average {dtype_name(dtype)}",
            expected="trainable parameters of 16 bits or more",
            found=f"{tuple(tensor.shape)} {dtype_name(dtype)}",
            fix="keep it in bfloat16 and convert it in the forward; or freeze it",
        )


def check_period(verify_every: object) -> int:
    """Return ``verify_every``; raise unless it is an integer, 0 or more."""
    return get_integer(
        verify_every,
        "verify_every",
        0,
        expected="0 or more: the number of backwards between comparisons of replicas",
        fix="pass for example 1000, or 0 to never compare",
    )


def close_all(*closables: Closable | None) -> None:
    for each in closables:
        if each is not None:
            each.close()


def reject_both(kind: type[MeshdistError], **arguments: object) -> None:
    if None not in arguments.values():
        first, second = arguments
        raise kind(
            f"{first} and {second} cannot both be passed",
            expected="at most one of them",
            fix=f"pass only {second}",
        )


def reject_unfrozen(frozen: Iterable[tuple[str, nn.Parameter]], group: ProcessGroup) -> None:
    """Raise if a parameter of ``frozen`` now requires a gradient."""
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise GradientError(
                f"{name} requires a gradient, but did not when the model was wrapped",
                where=f"rank {group.world.rank}",
                expected="every trained parameter requires a gradient when the model is wrapped",
                fix="del ddp, and wrap the model again; or wrap first and freeze afterwards",
            )


def delayed_indices(
    parameters: Sequence[nn.Parameter],
    delayed: Iterable[tuple[str, nn.Parameter]] | None,
    trigger: nn.Parameter | None,
) -> tuple[frozenset[int], int | None]:
    """Return the indices of ``delayed`` and ``trigger`` in ``parameters``; raise if any is missing.

    Args:
        delayed: (name, parameter) pairs, reduced once ``trigger`` has its gradient.
    """
    if delayed is None and trigger is None:
        return frozenset(), None
    if delayed is None or trigger is None:
        given, lacking = ["delay_all_reduce_named_params", "param_to_hook_all_reduce"][
            :: 1 if trigger is None else -1
        ]
        raise ArgumentError(
            f"{given} requires {lacking}",
            expected="both arguments, or neither",
            fix=f"pass {lacking} too",
        )
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    pairs = [*delayed]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise KindError(
            f"delay_all_reduce_named_params is of type {type(delayed).__name__}",
            expected="a list of (name, parameter) pairs",
            fix="pass for example list(module.named_parameters())",
        )
    for name, parameter in [*pairs, ("param_to_hook_all_reduce", trigger)]:
        if id(parameter) not in indices:
            raise ArgumentError(
                f"{name} is not a trainable parameter of the module",
                expected="delayed parameters, and the parameter they wait for, from the module",
                fix="take them from module.named_parameters()",
            )
    return frozenset(indices[id(parameter)] for _, parameter in pairs), indices[id(trigger)]


def find_devices(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[torch.device] | None, torch.device | None]:
    """Return ``device_ids`` and ``output_device`` as checked devices; None, None without ids."""
    if isinstance(device_ids, (ProcessGroup, DeviceMesh, str)):
        raise KindError(
            "the second argument of DistributedDataParallel is device_ids, not a mesh or group",
            found=f"{device_ids!r}",
            fix="name the axis: DistributedDataParallel(module, device_mesh=mesh['dp'])",
        )
    if device_ids is not None and not isinstance(device_ids, Sequence):
        raise _no_device("device_ids", device_ids, "a list of one device, or None")
    devices = sorted({str(p.device) for p in module.parameters()})
    if not device_ids:
        if output_device not in (None, 0):  # torch also treats 0 as None
            raise ArgumentError(
                "output_device requires device_ids",
                expected="device_ids=[device] for a module on one CUDA device",
                fix="remove output_device, or pass device_ids too",
            )
        return None, None
    given = [_as_device(f"device_ids[{index}]", entry) for index, entry in enumerate(device_ids)]
    if len(given) != 1 or devices != [str(given[0])] or given[0].type == "cpu":
        raise ArgumentError(
            f"device_ids={device_ids} does not match the module's devices",
            expected="one entry, the device of a CUDA module; None for modules on the CPU or on "
            "several devices",
            found=f"parameters on {', '.join(devices)}",
            fix="remove device_ids, or move the module: module.to(device)",
        )
    return given, given[0] if output_device is None else _as_device("output_device", output_device)


def _as_device(what: str, entry: Any) -> torch.device:
    try:
        return torch.device("cuda", entry) if isinstance(entry, int) else torch.device(entry)
    except (TypeError, RuntimeError):
        raise _no_device(what, entry, "the index of a CUDA device, or a torch.device") from None


def _no_device(what: str, entry: object, expected: str) -> KindError:
    return KindError(
        f"{what} is {entry!r}",
        expected=expected,
        found=f"an object of type {type(entry).__name__}",
        fix="on the CPU, remove device_ids; on CUDA, pass device_ids=[torch.cuda.current_device()]",
    )
