"""Provide the private methods of torch's DDP that trainers call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import BuiltinCommHookType
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ..checking.call_sites import warn_caller
from ..errors import KindError
from ..groups.process_group import resolve_group
from ..mesh.device_mesh import DeviceMesh
from .axis_reducer import AxisReducer
from .comm_hooks.bucket import allreduce_hook
from .comm_hooks.compression import fp16_compress_hook
from .model_checks import ignored_names
from .shard_checks import reject_marked_shards


class TorchMethods:
    """The methods and attributes of torch's DDP that trainers use."""

    process_group: Any
    device_mesh: DeviceMesh | None
    module: Any
    reducer: Any
    register_comm_hook: Any
    static_graph: bool
    forward_sync_buffers: bool
    find_unused_parameters: bool
    _buffers_of_model: Any
    _owner: AxisReducer
    broadcast_bucket_size = 250 * 1024 * 1024
    """As in torch; without effect: buffers are sent together, see ``broadcast_from``."""
    use_side_stream_for_tensor_copies = False
    """Inputs are moved to the module's device on the current stream."""

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The broadcast buffers, by name."""
        return self._buffers_of_model.named()  # type: ignore[no-any-return]

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        return list(self.named_module_buffers.values())

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.has_final_buckets  # type: ignore[no-any-return]

    def _set_static_graph(self) -> None:
        """Promise, before the first backward, that all backwards compute the same gradients."""
        if self.static_graph:
            warn_caller("static_graph is already True")
            return
        if self.find_unused_parameters:
            warn_caller("find_unused_parameters has no effect with static_graph=True")
        self.reducer.change_options("static_graph", is_static=True)
        self.static_graph = True

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Make buffers equal with ``hook(state, named_buffers)`` instead of the broadcast.

        Args:
            hook: may return futures, which the backward waits for at its end.
        """
        is_before = comm_hook_location is _BufferCommHookLocation.PRE_FORWARD
        self._buffers_of_model.set_hook(state, hook, is_before=is_before)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Register ``comm_hooks.allreduce_hook`` or ``fp16_compress_hook``, by torch's enum."""
        if not isinstance(comm_hook_type, BuiltinCommHookType):
            raise KindError(
                f"comm_hook_type is of type {type(comm_hook_type).__name__}",
                expected="a torch.distributed.BuiltinCommHookType",
                fix="register other hooks with model.register_comm_hook(state, hook)",
            )
        is_plain = comm_hook_type == BuiltinCommHookType.ALLREDUCE
        self.register_comm_hook(None, allreduce_hook if is_plain else fp16_compress_hook)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Exclude named parameters and buffers of ``module`` from wrappers created later."""
        ignored = ignored_names(module, params_and_buffers_to_ignore)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in ignored:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield parameters of ``module`` that are not ignored, with names if asked."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over another group from the next forward on; collective over it."""
        group = resolve_group(new_process_group)
        if self.reducer.layout.terms.extra_groups.by_name or self._owner.has_reduced:
            raise self.reducer.layout.terms.gradient_errors.group_with_extra_groups()
        axes = new_process_group if isinstance(new_process_group, DeviceMesh) else None
        reject_marked_shards(dict(self.module.named_parameters()), group, axes, {})
        self.process_group, self.device_mesh = group, axes
        for device in dict.fromkeys(parameter.device for parameter in self.module.parameters()):
            self.process_group.connect(device)
        self.reducer.change_group(self.process_group)

    def _check_reducer_finalized(self) -> None:
        if self.reducer.backward is not None:
            raise self.reducer.layout.terms.gradient_errors.unfinished()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.close()
        self._owner.close()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are the module's outputs, never copies."""
