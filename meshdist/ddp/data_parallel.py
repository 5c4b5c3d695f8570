"""Data parallelism: one replica of the model on each rank of an axis, gradients averaged."""

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
from ..runtime.graph_breaks import untraced
from ..typed_mode.module_annotations import restore_annotations
from .axis_reducer import AxisReducer
from .bucket_layout import ReductionOptions, bucket_caps
from .divergence_checks import DivergenceChecks
from .extra_axis_groups import further_axes, open_wider_groups
from .gradient_hooks import moved
from .join_hook import JoinMethods
from .model_checks import (
    WrappedModel,
    check_module,
    check_period,
    delayed_indices,
    find_devices,
    let_go,
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

_ALWAYS_CHECKED = "check_reduction has no effect: whether gradients are missing is always checked"


class DistributedDataParallel(TorchMethods, JoinMethods, WrappedModel):
    """Every rank of an axis trains a replica of ``module``; ``.grad`` is the mean over the axis.

    Making it, each forward that synchronises buffers, and each backward are collective over the
    axis: each of its ranks must come to them, in the same order. On construction the ranks
    compare their parameters and buffers, and take those of the axis's first rank. Before each
    forward, in eval mode too, buffers come from that rank again.

    Gradients are averaged while ``backward()`` runs and lie in ``.grad`` when it returns.
    ``torch.autograd.grad`` does not go through ``.grad``, so what it returns is not averaged. Where
    the loss is a *mean* over each rank's samples, equal numbers of samples per rank give the
    gradient of the whole batch; where it is a *sum*, gradients are smaller than the whole batch's
    by the number of ranks. Inputs are not split: see ``DistributedSampler``.
    Inside ``md.typed`` the wrapper owns the axis: each rank's loss varies over it, without a pmean.

    A backward is averaged if and only if it reaches outputs of a forward through the wrapper that
    was synchronised, also a second on a retained graph. Every other backward is local.
    Unless ``find_unused_parameters`` or ``static_graph`` says so, every parameter must get a
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
        dim, batched_grad_copy, check_reduction: torch's, without effect; the last warns.
        broadcast_buffers: False leaves buffers alone, also on construction.
        init_sync: False skips comparing and broadcasting on construction.
        process_group: over which ranks gradients are averaged; or
        device_mesh: an axis, ``mesh["dp"]``, or several together, ``mesh["dp", "cp"]``. With
            neither, the world, unless a mesh of several axes is open. A parameter that is marked
            reduced over further axes of that mesh is summed over these too.
        bucket_cap_mb: the size of a bucket in MiB; by default 25, and 1 for the first.
        bucket_cap_mb_list: sizes of the first bucket, the second, ..., in its place; the last
            holds for all that follow.
        find_unused_parameters: whether a rank may lack gradients: a parameter that some rank uses
            gets the mean over all ranks, others keep the ``.grad`` that they have.
        gradient_as_bucket_view: False keeps gradients outside the buckets, at the price of their
            memory and a copy.
        static_graph: a promise that every backward brings the gradients that the first brought,
            each as often; then what is missing from the start is no error.
        delay_all_reduce_named_params: parameters, with names, whose gradients are sent together
            once that of
        param_to_hook_all_reduce: is there; they are averages when ``backward()`` returns.
        mixed_precision: dtypes of forward, backward and of what is sent, see ``MixedPrecision``.
        skip_all_reduce_unused_params: a promise that what no rank used in the first step is never
            used: it is not sent.
        forward_sync_buffers: False leaves buffers alone after construction.
        verify_every: replicas are compared, to the bit, behind averaged backwards 2, 10, 100 and
            each whose number this divides; 0 for never.

    Cost: one all-reduce of all gradients a backward, in buckets that overlap with it; one broadcast
        of all buffers a forward.

    Raises:
        MismatchError: the ranks' modules differ, or options that must be equal; on every rank,
            showing both.
        AxisTypeError: a tensor is marked as varying between the ranks (``md.annotate``); or as
            reduced over an axis that is no axis of the wrapper's group, which has no mesh.
        AxisError: or over an axis that the mesh lacks.
        MeshError: no axes are named while a mesh of several is open; or a tensor without a mark is
            equal along one of several axes, and different along another.
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
        self.process_group = resolve_group(process_group if device_mesh is None else device_mesh)
        self.device_mesh = device_mesh
        state = module_state(module, self.parameters_to_ignore, with_buffers=has_buffers)
        reject_marked_shards(state if init_sync else trained, self.process_group, device_mesh)
        if process_group is None and device_mesh is None:
            weights = module_state(module, self.parameters_to_ignore, with_buffers=False)
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
        # Here rather than in the first backward; in the model's order, which all ranks share.
        for device in dict.fromkeys(tensor.device for tensor in module_state(module).values()):
            self.process_group.connect(device)
        self._further = further_axes(trained, self.process_group, self.device_mesh)
        if init_sync:
            facts = {name: tensor_facts(tensor) for name, tensor in state.items()}
            # Before groups over further axes are opened, for which other ranks would wait.
            self._compare(module, self.process_group, facts)
            if self.device_mesh is not None and self.device_mesh.mesh_dim_names:
                device = next(iter(trained.values())).device
                reject_probable_shards(without_annotations(state), self.device_mesh, device)
        self._adopt(module)
        if init_sync:
            self._make_equal(state)

    def _compare(self, module: nn.Module, over: ProcessGroup, facts: dict[str, str]) -> None:
        """Raise on all ranks of a group where their models or options differ."""
        trainable = trainable_parameters(module, self.parameters_to_ignore)
        options = {
            **self._reduction_options(module, trainable).shared(list(trainable)),
            "broadcast_buffers, forward_sync_buffers": self.forward_sync_buffers,
            "verify_every": self.verify_every,
        }
        check_equal(
            {
                **facts,
                **{f"{name}, reduced too over": shown(it) for name, it in self._further.items()},
                **{f"option {name}": str(value) for name, value in options.items()},
            },
            over,
            device=next(iter(trainable.values())).device,
            summary=f"DistributedDataParallel: the ranks wrap different "
            f"{type(module).__name__} modules, or with different options",
            fix="build and wrap the same model on every rank of the axis, by equal arguments",
        )

    def _make_equal(self, state: dict[str, torch.Tensor]) -> None:
        """Take tensors of the first rank of their group."""
        terms, group = self.reducer.layout.terms, self.process_group
        if terms.extra_groups.groups:  # shards differ in shape along further axes
            names = dict.fromkeys(terms.gradient_errors.names, "trained")
            self._compare(self.module, terms.extra_groups.all_ranks, names)
        by_group: dict[ProcessGroup, list[torch.Tensor]] = {group: []}
        over_further = {
            terms.gradient_errors.names[i]: extra_groups
            for i, extra_groups in terms.extra_groups.groups.items()
        }
        for name, tensor in state.items():
            by_group.setdefault(over_further.get(name, group), []).append(tensor.detach())
        for over, tensors in by_group.items():
            broadcast_from(0, tensors, over)

    def _adopt(self, module: nn.Module) -> None:
        """Take ``module`` as the model, and put hooks on its parameters; opens further groups."""
        reject_wrapped(module, self.parameters_to_ignore)  # since ranks have been waited for
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
        extra_groups = open_wider_groups(self._further, names, group, self.device_mesh, self.device)
        self._owner = AxisReducer(trainable, group, self.device_mesh, self._further)
        self._divergence_checks = DivergenceChecks(module, self.verify_every, self.device)
        self.reducer = Reducer(
            parameters, names, group, options, extra_groups, self._divergence_checks
        )
        # A module that outlives its wrapper must not go on reducing.
        weakref.finalize(self, let_go, self.reducer, self._cast, self._owner).atexit = False

    def _reduction_options(
        self, module: nn.Module, trainable: dict[str, nn.Parameter]
    ) -> ReductionOptions:
        reduce_dtype = None
        if self.mixed_precision is not None:
            reduce_dtype = self.mixed_precision.reduce_dtype or self.mixed_precision.param_dtype
        sparse = {id(parameter) for parameter in sparse_parameters(module)}
        delayed, delayed_behind = self._delayed
        return ReductionOptions(
            caps=self._caps,
            as_views=self.gradient_as_bucket_view,
            finds_unused=self.find_unused_parameters,
            is_static=self.static_graph,
            skips_unused=self.skip_all_reduce_unused_params,
            delayed=delayed,
            delayed_behind=delayed_behind,
            sparse=frozenset(i for i, x in enumerate(trainable.values()) if id(x) in sparse),
            dtype=reduce_dtype,
        )

    # -- training ---------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, after taking the buffers of the axis's first rank.

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
        outputs = self.module(*inputs, **kwargs)
        if self.output_device is not None and self.output_device != self.device:
            outputs = moved(outputs, self.output_device)
        return self._end_forward(outputs)

    def prepare_for_backward(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Let the next backward that reaches ``outputs`` be averaged, whatever their forward was.

        A pipeline by hand runs its forwards in ``no_sync``, and calls this before the last backward
        of a step, on every rank: that backward averages what all have added up.

        Raises:
            GradientError: the outputs have no graph; or as a forward, of the last step.
        """
        self.reducer.prepare_for_backward(outputs)

    @contextmanager
    @untraced
    def no_sync(self) -> Iterator[None]:
        """Let the forwards inside have backwards that are not averaged: gradients add up here.

        The next forward outside has a backward that averages all that has added up. What counts is
        where the *forward* runs.

        Raises:
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
        """Raise now, on every rank, what the next forward would raise of the last backward.

        Call it between ``backward()`` and ``optimizer.step()`` where no rank may step with wrong
        gradients: once a step on every rank, also where a forward, loss or ``backward()`` has
        raised and the program goes on. A rank whose forward no backward followed takes part in that
        of the others here, with zeros. While a CUDA graph is captured nothing is checked.

        Cost: nothing is sent where a backward was run. On an accelerator the CPU waits for the end
        of the backward.

        Raises:
            GradientError: the backward was interrupted, or not run, but not on every rank; or
                parameters got no gradient since the last forward; or came into the module behind
                the wrapper; or the replicas have parted. The next forward does not raise it again,
                except for parameters that came.

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
        finally:  # once all ranks are in step
            reject_unfrozen(self._left_frozen, self.process_group)
            self._divergence_checks.reject_local_gradients()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` average the gradients of each bucket; on every rank alike.

        Args:
            state: what the hook is given first; None stands for the group of this wrapper.
            hook: takes a ``GradBucket`` and returns a torch Future of the averaged tensor: one of
                ``meshdist.distributed.comm_hooks``, one of torch's, or the program's own.

        Raises:
            KindError, ArgumentError: the hook does not fit, is not the first, or a backward has
                been run.
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
            self._divergence_checks.reject_local_gradients()  # which may be why
            raise
        if self.takes_buffers(is_before=True):
            self.take_buffers()

    def takes_buffers(self, *, is_before: bool) -> bool:
        """Return whether buffers are made equal at this forward, before it or behind it."""
        buffers = self._buffers_of_model
        return (
            self.forward_sync_buffers
            and self.require_forward_param_sync
            and buffers.is_synchronised_now(is_before=is_before)
        )

    def take_buffers(self) -> None:
        """Make buffers equal, as a forward does."""
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
# Trainers and torch's own checkpoints unwrap what is an instance of torch's class.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
