"""Train one replica of a model on each rank of a mesh axis and average their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..annotations.axis_types import shown
from ..checking.call_sites import warn_caller
from ..collectives.flat_sums import broadcast_from
from ..collectives.torch_private import hidden_from_modes
from ..errors import ArgumentError, GradientError, MeshError
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..runtime.graph_breaks import graphs_split_at_buckets, traceable, untraced, untraced_frame
from ..typed_mode.module_annotations import restore_annotations
from .axis_reducer import AxisReducer
from .bucket_layout import ReductionOptions, bucket_caps
from .divergence_checks import DivergenceChecks
from .extra_axis_groups import (
    check_experts_over,
    find_experts,
    further_axes,
    open_extra_groups,
    reject_no_experts,
)
from .gradient_hooks import moved
from .join_hook import JoinMethods
from .model_checks import (
    WrappedModel,
    check_module,
    check_period,
    close_all,
    delayed_indices,
    find_devices,
    module_state,
    reject_both,
    reject_unfrozen,
    reject_wrapped,
    sparse_parameters,
    trainable_parameters,
)
from .precision import CastParameters, MixedPrecisionConfig, check_precision
from .reducer import Reducer
from .replicas import ModelBuffers, check_equal, tensor_facts
from .shard_checks import (
    reject_marked_shards,
    reject_probable_shards,
    reject_unnamed_axes,
    without_annotations,
)
from .torch_methods import TorchMethods

__all__ = ["DDP", "DistributedDataParallel"]

_ALWAYS_CHECKED = "check_reduction has no effect: missing gradients are always detected"


class DistributedDataParallel(TorchMethods, JoinMethods, WrappedModel):
    """Train a replica of ``module`` on every rank of an axis; ``.grad`` is the mean over the axis.

    The constructor, each forward that synchronizes buffers, and each backward are collective: all
    ranks of the axis must call them in the same order. The constructor compares all ranks'
    parameters and buffers and broadcasts the first rank's. Each forward, also in eval mode, first
    broadcasts that rank's buffers.

    When ``backward()`` returns, ``.grad`` holds the averages. ``torch.autograd.grad`` does not use
    ``.grad``, so its results are not averaged. If the loss is a *mean* over each rank's samples and
    all ranks have equally many, DDP computes the gradient of the global batch. If it is a *sum*,
    gradients are smaller by the number of ranks. DDP does not split inputs: see
    ``DistributedSampler``. Inside ``md.typed`` each rank's loss must vary over the axis, without a
    pmean.

    DDP averages each backward that reaches outputs of a synchronized forward through the wrapper,
    also a second backward on a retained graph. Every other backward is local. Unless you pass
    ``find_unused_parameters`` or ``static_graph``, the next forward (or ``check_gradients``,
    earlier) raises if a parameter got no gradient on some rank. Do not add, remove, replace or
    convert parameters after wrapping.

    If a backward is interrupted on some ranks, ``backward()`` raises on the other ranks on the CPU.
    On an accelerator it returns while the device runs, so the next forward raises, possibly after
    the optimizer applied that step's gradients.

    Args:
        module: the model, on its device. All ranks' parameters must be equal in name, order, shape,
            dtype and strides.
        device_ids: the one device of a CUDA module, to which inputs are moved; None for modules on
            the CPU or several devices.
        output_device: the device to which outputs are moved; by default the device of
            ``device_ids``.
        dim, batched_grad_copy: without effect.
        check_reduction: without effect; True warns.
        broadcast_buffers: the older name of ``forward_sync_buffers``; False never broadcasts
            buffers, even on construction.
        init_sync: False skips comparison and broadcast on construction.
        process_group: the ranks over which gradients are averaged, unless you pass ``device_mesh``.
        device_mesh: an axis, ``mesh["dp"]``, or several together, ``mesh["dp", "cp"]``. Without it
            and ``process_group``, all ranks, unless a mesh of several axes is open. Gradients of
            parameters annotated as reduced over additional axes of that mesh are also summed over
            them.
        bucket_cap_mb: the size of a bucket in MiB, above 0; by default 25, and 1 for the first
            bucket.
        bucket_cap_mb_list: a size per bucket, instead of ``bucket_cap_mb``; the last applies to all
            further buckets. An empty list means None.
        find_unused_parameters: True allows missing gradients on a rank. Parameters used on some
            rank get the mean over all ranks; unused parameters keep their ``.grad``.
        gradient_as_bucket_view: False keeps gradients outside the buckets, which costs memory and a
            copy.
        static_graph: promises that every backward computes the same gradients as the first, equally
            often; gradients missing in the first are then no error.
        delay_all_reduce_named_params: (name, parameter) pairs whose gradients are sent together
            after the gradient of ``param_to_hook_all_reduce``; they are averaged when
            ``backward()`` returns.
        param_to_hook_all_reduce: the parameter after whose gradient the delayed gradients are sent.
        mixed_precision: the dtypes in which DDP computes and sends; see ``MixedPrecision``.
        skip_all_reduce_unused_params: promises that parameters unused on all ranks in the first
            step stay unused; never sends them.
        forward_sync_buffers: False does not broadcast buffers after construction; by default each
            forward broadcasts them.
        experts_over: an axis of ``device_mesh``, or several, over which annotated experts are
            sharded. DDP makes them equal, and averages their gradients, over the other axes only.
            It divides these gradients by the size of the axis, because ``md.experts.dispatch``
            sends tokens of all its ranks to an expert.
        verify_every: compare replicas bitwise after averaged backwards 2, 10, 100 and every
            ``verify_every``-th; 0: never.

    Cost: an all-reduce of all gradients per backward, in buckets that overlap with it, and a
        broadcast of all buffers per forward.

    Raises:
        MismatchError: on every rank, if the ranks' modules or options differ; shows both.
        AxisTypeError: a tensor is annotated (``md.annotate``) as varying between the ranks, over
            an axis that is not in ``experts_over``; or as reduced over an axis while the wrapper
            has no mesh; or no parameter varies over ``experts_over``.
        AxisError: a tensor is annotated as reduced over an axis that the mesh lacks; or
            ``experts_over`` is not an axis of ``device_mesh``.
        MeshError: no axes are given while a mesh of several axes is open; an unannotated tensor is
            equal along one axis and differs along another; or ``experts_over`` without named axes.
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

    @hidden_from_modes
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: GroupLike = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: MixedPrecisionConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        verify_every: int = 1000,
        experts_over: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        has_buffers = broadcast_buffers is not False
        self.parameters_to_ignore = check_module(module, with_buffers=has_buffers)
        restore_annotations(module)
        self.verify_every = check_period(verify_every)
        self._caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self._caps)
        self.bucket_bytes_cap_list = list(self._caps) if bucket_cap_mb_list else []
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        trained = trainable_parameters(module, self.parameters_to_ignore)
        self._delayed = delayed_indices(
            list(trained.values()), delay_all_reduce_named_params, param_to_hook_all_reduce
        )
        if mixed_precision is not None:
            check_precision(mixed_precision)
        self.mixed_precision = mixed_precision
        self.device_ids, self.output_device = find_devices(module, device_ids, output_device)
        if check_reduction:
            warn_caller(_ALWAYS_CHECKED, FutureWarning)
        self.dim = dim
        older, newer = broadcast_buffers, forward_sync_buffers
        reject_both(ArgumentError, broadcast_buffers=older, forward_sync_buffers=newer)
        reject_both(MeshError, process_group=process_group, device_mesh=device_mesh)
        expert_axes = check_experts_over(experts_over, device_mesh)
        self.process_group = resolve_group(process_group if device_mesh is None else device_mesh)
        self.device_mesh = device_mesh
        state = module_state(module, self.parameters_to_ignore, with_buffers=has_buffers)
        weights = module_state(module, self.parameters_to_ignore, with_buffers=False)
        self._experts = find_experts(weights, expert_axes)
        checked = state if init_sync else trained
        reject_marked_shards(checked, self.process_group, device_mesh, self._experts)
        if process_group is None and device_mesh is None:
            reject_unnamed_axes(weights, self.process_group)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        given = older if newer is None else newer
        self.forward_sync_buffers = True if given is None else bool(given)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        # Connect here rather than in the first backward, in the model's order, equal on all ranks.
        for device in dict.fromkeys(tensor.device for tensor in module_state(module).values()):
            self.process_group.connect(device)
        self._further = further_axes(trained, self.process_group, self.device_mesh)
        if init_sync:
            facts = {name: tensor_facts(tensor) for name, tensor in state.items()}
            # The shapes of experts may differ; they are compared over the other axes.
            facts |= {name: f"varies over {shown(cut)}" for name, cut in self._experts.items()}
            # Compare first: other ranks would wait in the opening of groups over other axes.
            self._compare(module, self.process_group, facts)
        # After the comparison: a rank without experts must not raise alone.
        reject_no_experts(weights, self._experts, expert_axes, device_mesh)
        if init_sync and self.device_mesh is not None and self.device_mesh.mesh_dim_names:
            device = next(iter(trained.values())).device
            reject_probable_shards(without_annotations(state), self.device_mesh, device)
        self._adopt(module)
        if init_sync:
            try:
                self._make_equal(state)
            except BaseException:
                close_all(self.reducer, self._cast, self._owner)
                raise

    def _compare(
        self,
        module: nn.Module,
        over: ProcessGroup,
        facts: dict[str, str],
        all_ranks: ProcessGroup | None = None,
    ) -> None:
        """Raise on all ranks of a group, or of ``all_ranks``, if models or options differ."""
        trainable = trainable_parameters(module, self.parameters_to_ignore)
        options = {
            **self._reduction_options(module, trainable).shared(list(trainable)),
            "broadcast_buffers, forward_sync_buffers": self.forward_sync_buffers,
            "verify_every": self.verify_every,
        }
        check_equal(
            {
                **facts,
                **{f"{name}, also reduced over": shown(it) for name, it in self._further.items()},
                **{f"option {name}": str(value) for name, value in options.items()},
            },
            over,
            all_ranks,
            device=next(iter(trainable.values())).device,
            summary=f"DistributedDataParallel: the ranks wrap different "
            f"{type(module).__name__} modules, or use different options",
            fix="build and wrap the same model with equal arguments on every rank of the axis",
        )

    def _make_equal(self, state: dict[str, torch.Tensor]) -> None:
        """Broadcast each tensor from the first rank of its group."""
        terms, group = self.reducer.layout.terms, self.process_group
        extra_groups = terms.extra_groups
        if extra_groups.all_ranks is not group:  # shards differ in shape along further axes
            names = dict.fromkeys(terms.gradient_errors.names, "trained")
            self._compare(self.module, extra_groups.all_ranks, names)
        by_group: dict[ProcessGroup, dict[str, torch.Tensor]] = {group: {}}
        for name, tensor in state.items():
            over = extra_groups.by_name.get(name, group)
            by_group.setdefault(over, {})[name] = tensor.detach()
        for over, tensors in by_group.items():
            if over is not group:
                facts = {name: tensor_facts(tensor) for name, tensor in tensors.items()}
                self._compare(self.module, over, facts, extra_groups.all_ranks)
        for over, tensors in by_group.items():
            broadcast_from(0, [*tensors.values()], over)

    def _adopt(self, module: nn.Module) -> None:
        """Use ``module`` as the model: register hooks, open additional groups."""
        reject_wrapped(module, self.parameters_to_ignore)  # again, after waiting for other ranks
        self.module = module
        trainable = trainable_parameters(module, self.parameters_to_ignore)
        parameters = list(trainable.values())
        self.device = parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in parameters}) > 1
        self._left_frozen = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if name not in trainable and name not in self.parameters_to_ignore
        ]
        self._buffers_of_model = ModelBuffers(module, self.parameters_to_ignore)
        self._cast: CastParameters | None = None
        if self.mixed_precision is not None:
            self._cast = CastParameters(module, self.mixed_precision, self.parameters_to_ignore)
        options = self._reduction_options(module, trainable)
        group = self.process_group
        names = list(trainable)
        other_axes = self._further, self._experts
        extra_groups = open_extra_groups(*other_axes, names, group, self.device_mesh, self.device)
        self._owner = AxisReducer(trainable, group, self.device_mesh, *other_axes)
        self._divergence_checks = DivergenceChecks(module, self.verify_every, self.device)
        self.reducer = Reducer(
            parameters, names, group, options, extra_groups, self._divergence_checks
        )
        # A module that outlives its wrapper must no longer reduce.
        weakref.finalize(self, close_all, self.reducer, self._cast, self._owner).atexit = False

    def _reduction_options(
        self, module: nn.Module, trainable: dict[str, nn.Parameter]
    ) -> ReductionOptions:
        reduce_dtype = None
        if self.mixed_precision is not None:
            reduce_dtype = self.mixed_precision.reduce_dtype or self.mixed_precision.param_dtype
        sparse = {id(parameter) for parameter in sparse_parameters(module)}
        delayed, delayed_after = self._delayed
        return ReductionOptions(
            caps=self._caps,
            as_views=self.gradient_as_bucket_view,
            finds_unused=self.find_unused_parameters,
            is_static=self.static_graph,
            skips_unused=self.skip_all_reduce_unused_params,
            delayed=delayed,
            delayed_after=delayed_after,
            sparse=frozenset(i for i, x in enumerate(trainable.values()) if id(x) in sparse),
            dtype=reduce_dtype,
        )

    # -- training ---------------------------------------------------------------------------------

    @untraced_frame
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Broadcast the buffers of the axis's first rank, then run the module's forward.

        Raises:
            GradientError: as ``check_gradients``.
        """
        is_reduced = self.require_backward_grad_sync
        self._owner.claim(self.process_group, self.device_mesh, is_reduced=is_reduced)
        self._begin_forward()
        if self.device_ids is not None:
            inputs, kwargs = moved((inputs, kwargs), self.device)
        if self._cast is not None:
            inputs, kwargs = self._cast.cast_inputs((inputs, kwargs))
        with graphs_split_at_buckets(self.bucket_bytes_cap):
            outputs = traceable(self.module)(*inputs, **kwargs)
        if self.output_device is not None and self.output_device != self.device:
            outputs = moved(outputs, self.output_device)
        return self._end_forward(outputs)

    def prepare_for_backward(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Average the next backward that reaches ``outputs``, even if computed in ``no_sync``.

        In a hand-written pipeline, run forwards in ``no_sync`` and call this on every rank before a
        step's last backward, which then averages the accumulated gradients.

        Raises:
            GradientError: the outputs have no graph; or the last step failed, as in a forward.
        """
        self.reducer.prepare_for_backward(outputs)

    @contextmanager
    @untraced
    def no_sync(self) -> Iterator[None]:
        """Disable gradient averaging for forwards in this context: gradients accumulate locally.

        The backward of the next forward outside averages all accumulated gradients. As in torch, it
        matters where the *forward* runs.

        Example:
            >>> import meshdist as md, torch
            >>> def program():
            ...     layer = torch.nn.Linear(1, 1, bias=False)
            ...     model = md.DDP(layer)
            ...     x = torch.full((1, 1), 1.0 + md.get_rank())
            ...     with model.no_sync():
            ...         model(x).sum().backward()
            ...     alone = layer.weight.grad.item()
            ...     model(x).sum().backward()
            ...     return alone, layer.weight.grad.item()
            >>> md.simulate(program, 2)
            [(1.0, 3.0), (2.0, 3.0)]
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def check_gradients(self) -> None:
        """Raise the last backward's error now, on every rank, instead of in the next forward.

        Call it once per step on every rank, between ``backward()`` and ``optimizer.step()``, if no
        rank may step with wrong gradients, or if the program continues after an exception in a
        forward, loss or ``backward()``. A rank that ran a forward without a backward contributes
        zeros to the other ranks' backward here. During the capture of a CUDA graph nothing is
        checked.

        Cost: no communication after a backward. On an accelerator the CPU waits for the backward to
            end.

        Raises:
            GradientError: some ranks interrupted or skipped the backward; parameters got no
                gradient since the last forward; parameters were added after wrapping; or replicas
                have diverged. The next forward raises again for added parameters only.

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
        try:
            self.reducer.check()
        finally:  # after all ranks have synchronized
            reject_unfrozen(self._left_frozen, self.process_group)
            self._divergence_checks.reject_local_gradients()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Average each bucket's gradients with ``hook(state, bucket)``; call it on every rank.

        Args:
            state: passed to the hook; None passes the wrapper's group.
            hook: takes a ``GradBucket`` and returns a torch Future of the averaged tensor: a hook
                of ``meshdist.distributed.comm_hooks`` or torch, or a custom hook.

        Raises:
            KindError, ArgumentError: the hook is invalid, a second hook, or registered after a
                backward.
        """
        self.reducer.register_hook(state, hook)

    @hidden_from_modes
    def _begin_forward(self) -> None:
        reject_unfrozen(self._left_frozen, self.process_group)
        self._divergence_checks.forward_begins()
        self.announce_forward()
        try:
            self.reducer.before_forward(is_synchronised=self.require_backward_grad_sync)
        except GradientError:
            self._divergence_checks.reject_local_gradients()  # the likely cause
            raise
        if self.takes_buffers(is_before=True):
            self.take_buffers()

    def takes_buffers(self, *, is_before: bool) -> bool:
        """Return whether this forward broadcasts buffers."""
        buffers = self._buffers_of_model
        return (
            self.forward_sync_buffers
            and self.require_forward_param_sync
            and buffers.is_synchronised_now(is_before=is_before)
        )

    def take_buffers(self) -> None:
        reducer_state, buffers = self.reducer.reducer_state, self._buffers_of_model
        reducer_state.awaited += buffers.synchronise(
            self.process_group, reducer_state.active_ranks.source
        )

    @hidden_from_modes
    def _end_forward(self, outputs: Any) -> Any:
        if self.takes_buffers(is_before=False):
            self.take_buffers()
        if torch.is_grad_enabled():
            is_synchronised = self.require_backward_grad_sync
            self.require_forward_param_sync = is_synchronised
            self.reducer.after_forward(outputs, self, is_synchronised=is_synchronised)
        return outputs


DDP = DistributedDataParallel
# Trainers and torch's checkpoints unwrap instances of torch's class.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
