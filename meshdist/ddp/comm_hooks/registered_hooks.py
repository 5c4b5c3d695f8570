"""Check communication hooks at registration, and check the averages that they return.

Hooks of meshdist replace torch's hooks of the same names, which use torch's default group if their
state has none; some fail on CPU tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import GradBucket as TorchBucket

from ...arrays import shape_text
from ...backends.futures import Deferral
from ...backends.simulated.scheduler import find_rank_here
from ...dtypes import dtype_name
from ...errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DtypeError,
    KindError,
    MeshdistError,
    ShapeError,
)
from ...groups.process_group import ProcessGroup
from ...runtime.deadlines import Deadline, wait_until
from .bucket import (
    GradBucket,
    allreduce_hook,
    group_in_state,
    is_mesh,
    noop_hook,
    post_localSGD_hook,
)
from .compression import (
    batched_powerSGD_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks."
_IN_ANY_CASE = {
    hook.__name__: hook
    for hook in (
        batched_powerSGD_hook,
        quantization_perchannel_hook,
        quantization_pertensor_hook,
    )
}
_WITHOUT_A_GROUP = {
    hook.__name__: hook
    for hook in (
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        noop_hook,
        post_localSGD_hook,
    )
}
_WRAPPERS = {
    f"{wrapper.__name__}.<locals>.{wrapper.__name__}_hook": wrapper
    for wrapper in (bf16_compress_wrapper, fp16_compress_wrapper)
}


def ours_for(hook: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """Return ``hook``, or the meshdist hook that replaces a torch hook."""
    if not str(getattr(hook, "__module__", "")).startswith(_TORCHS):
        return hook
    name = getattr(hook, "__qualname__", "")
    if name in _IN_ANY_CASE:
        return _IN_ANY_CASE[name]
    if name in _WITHOUT_A_GROUP and _names_no_group(state):
        return _WITHOUT_A_GROUP[name]
    if name in _WRAPPERS:  # torch's wrapper around another hook
        inner = inspect.getclosurevars(hook).nonlocals["hook"]
        ours = ours_for(inner, state)
        return hook if ours is inner else _WRAPPERS[name](ours)
    return hook


def _names_no_group(state: Any) -> bool:
    """Return whether a hook's state, or its group field, is None or a mesh."""
    if state is None or is_mesh(state):
        return True
    return any(
        (given := getattr(state, field, state)) is None or is_mesh(given)
        for field in ("process_group", "subgroup")
    )


_EMPTY = inspect.Parameter.empty
_FUTURE = torch.futures.Future[torch.Tensor]
_WANT_A_STATE = {
    "powerSGD_hook": "PowerSGDState",
    "batched_powerSGD_hook": "PowerSGDState",
    "post_localSGD_hook": "PostLocalSGDState",
}
_SIGNATURE = "hook(state, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]"


class RegisteredHook:
    """A communication hook and its state, for one group."""

    def __init__(self, state: Any, hook: Callable[..., Any], group: ProcessGroup) -> None:
        _check(hook, group)
        self.name = hook_name(hook)
        if state is None and self.name in _WANT_A_STATE:
            raise KindError(
                f"communication hook {self.name} requires a state",
                where=f"rank {group.world.rank}",
                expected=f"a {_WANT_A_STATE[self.name]}",
                found="None",
                fix=f"pass md.distributed.comm_hooks.{_WANT_A_STATE[self.name]}(None, ...), "
                "where None selects the wrapper's group",
            )
        self.group = group
        self._hook = ours_for(hook, state)
        self._state = state

    def start(self, bucket: GradBucket) -> PendingBucket:
        pending = PendingBucket(self, bucket)
        pending.call(self._hook, self.group if self._state is None else self._state)
        return pending


class PendingBucket:
    """A bucket that a registered hook is averaging."""

    def __init__(self, registered: RegisteredHook, bucket: GradBucket) -> None:
        self._registered = registered
        self._bucket = bucket
        self._into = bucket.buffer()
        self._deferral = Deferral()
        self._future: Any = None
        self._state: Any = None

    def call(self, hook: Callable[..., Any], state: Any) -> None:
        """Call the hook and keep its Future; raise if it returns anything else."""
        self._state = state
        with self._deferral.entered(), group_in_state(state, self._registered.group):
            self._future = hook(state, self._bucket)
        if not isinstance(self._future, torch._C.Future):
            raise self._error(
                KindError,
                "did not return a Future",
                expected="a torch.futures.Future of the averaged tensor",
                found=f"an object of type {type(self._future).__name__}",
                fix="return work.get_future().then(lambda done: done.value()[0])",
            )

    def wait(self) -> bool:
        """Wait for the hook's Future; copy its checked averages into the bucket."""
        # Callbacks of the hook's futures run on this thread.
        with self._deferral.entered(), group_in_state(self._state, self._registered.group):
            error = self._deferral.finalize()
            if not self._future.done():
                self._await_others(error)
            value = self._future.wait()
        self._take(self._checked(value))
        return True

    def _await_others(self, error: Exception | None) -> None:
        """Raise ``error``, or wait until a thread completes the Future; raise on timeout."""
        if error is not None:
            raise error
        timeout = self._registered.group.timeout
        limit = timedelta(0) if find_rank_here() is not None else timeout  # without other threads
        if wait_until(self._future.done, Deadline(limit)) is None:
            raise self._error(
                CollectiveTimeoutError,
                "returned a Future that was never completed",
                expected="a Future completed by a callback of the hook's collectives, or by "
                "another "
                f"thread within {timeout.total_seconds():g} s",
                found="all collectives that the hook started are complete",
                fix="return the Future that then() returns, which passes on a callback's error, "
                "instead of calling set_result() in the callback",
            )

    def _checked(self, value: Any) -> torch.Tensor:
        """Return the tensor in the Future's value; raise unless it matches the bucket."""
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        into = self._into
        expected = f"{into.numel()} elements, {dtype_name(into.dtype)}, on {into.device}"
        if not isinstance(value, torch.Tensor):
            raise self._error(
                KindError,
                "returned a Future of a value that is not a tensor",
                expected=f"one tensor, or a list of one: {expected}",
                found=f"an object of type {type(value).__name__}",
                fix="return the averaged tensor from the last callback",
            )
        fix = "return bucket.buffer(), or a tensor like it, from the last callback"
        fields = {"expected": expected, "fix": fix}
        if value.numel() != into.numel() or value.layout != into.layout:
            fields["found"] = f"shape {shape_text(value.shape)}"
            if value.layout != into.layout:
                fields["found"] += f", layout {str(value.layout).removeprefix('torch.')}"
            raise self._error(ShapeError, "returned a tensor of a different shape", **fields)
        if value.dtype not in (into.dtype, self._bucket.buffer().dtype):
            fields["found"] = dtype_name(value.dtype)
            raise self._error(DtypeError, "returned a tensor of a different dtype", **fields)
        if value.device != into.device:
            fields["found"] = str(value.device)
            raise self._error(ArgumentError, "returned a tensor on a different device", **fields)
        return value

    def _error(self, kind: type[MeshdistError], summary: str, **fields: str) -> MeshdistError:
        name, group = self._registered.name, self._registered.group
        where = f"rank {group.world.rank}, hook {name}, {self._bucket!r} in {group.group_name}"
        return kind(f"communication hook {name} {summary}", where=where, **fields)

    def _take(self, value: torch.Tensor) -> None:
        """Copy the averages into the bucket's memory unless they are already there."""
        into = self._into
        if value is into:
            return
        if into.is_sparse:
            into.copy_(value)
            return
        is_there = value.data_ptr() == into.data_ptr() and value.dtype == into.dtype
        if not (is_there and value.is_contiguous()):
            into.copy_(value.reshape(into.shape))


def hook_name(hook: object) -> str:
    named = getattr(hook, "func", hook)  # of functools.partial
    return str(getattr(named, "__qualname__", type(named).__qualname__))


def _check(hook: Callable[..., Any], group: ProcessGroup) -> None:
    where = f"rank {group.world.rank}"
    if not callable(hook):
        raise KindError(
            f"the communication hook is of type {type(hook).__name__}",
            where=where,
            expected=f"a function: {_SIGNATURE}",
            fix="pass the state first, then the hook: register_comm_hook(state, hook)",
        )
    signature = _find_signature(hook)
    if signature is None:
        return
    name = hook_name(hook)
    try:
        signature.bind(None, None)
    except TypeError:
        raise KindError(
            f"communication hook {name} does not accept the arguments (state, bucket)",
            where=where,
            expected=_SIGNATURE,
            found=f"{name}{signature}",
            fix=f"define it as {_SIGNATURE}",
        ) from None
    of_bucket = [*signature.parameters.values()][1:2]
    for parameter in of_bucket:
        said = parameter.annotation
        if not isinstance(said, str) and said not in (_EMPTY, Any, GradBucket, TorchBucket):
            raise ArgumentError(
                f"communication hook {name}: {parameter.name} is not annotated as a GradBucket",
                where=where,
                expected=_SIGNATURE,
                found=inspect.formatannotation(said),
                fix="annotate it as meshdist.distributed.GradBucket or "
                "torch.distributed.GradBucket, or remove the annotation",
            )
    said = signature.return_annotation
    if not isinstance(said, str) and said not in (_EMPTY, Any, _FUTURE):
        raise ArgumentError(
            f"communication hook {name} is not annotated to return a Future of a tensor",
            where=where,
            expected=_SIGNATURE,
            found=inspect.formatannotation(signature.return_annotation),
            fix="annotate it as torch.futures.Future[torch.Tensor], or remove the annotation",
        )


def _find_signature(hook: Callable[..., Any]) -> inspect.Signature | None:
    """Return a hook's signature; None for an object without a signature."""
    try:
        return inspect.signature(hook, eval_str=True)
    except Exception:  # evaluating an annotation may raise anything
        pass
    try:
        return inspect.signature(hook)
    except (TypeError, ValueError):
        return None
