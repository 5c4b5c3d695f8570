"""The logging data of a wrapper: facts when it is made, times and counts in some iterations.

An iteration begins with a forward whose backward is averaged. The first ten are sampled, and then
every hundredth, or as often as the program says. In such an iteration the logger, which observes
the reducer, has a ``Timing`` and notes on it when its parts begin and end. What a sampled iteration
has shown is told at the forward after it, when all its work is done, on a device too.

Names and texts are those of torch's logging data.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..arguments import get_whole_number
from ..checking.debug_levels import DebugLevel, get_debug_level
from ..dtypes import dtype_name
from .backward import Backward, Moment
from .bucket_layout import BucketLayout
from .buckets import Bucket
from .device_streams import is_capturing
from .tail import Ending

_log = logging.getLogger("meshdist.ddp")

_SAMPLED_AT_FIRST = 10
_UNSET = "N/A"
_FORWARD_END = "forward_compute_time_end"
_MARKS = {
    Moment.FORWARD_ENDS: _FORWARD_END,
    Moment.SENDING_BEGINS: "backward_comm_time_start",
    Moment.BACKWARD_ENDS: "backward_compute_time_end",
    Moment.SENDING_ENDS: "backward_comm_time_end",
}
_VARIABLES = {  # of the environment, by wire; "" is every wire
    "": ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG"),
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
_DTYPE_NAMES = {  # as C++ has them, which torch shows
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}

# -- one sampled iteration ------------------------------------------------------------------------


class _Mark(NamedTuple):
    """A moment on the host's clock, and on the device's stream; the event is None on the CPU."""

    ns: int
    event: Any


class Timing:
    """Times of the parts of one iteration, and the order in which its gradients came."""

    def __init__(self, device: torch.device, *, is_timed: bool = True) -> None:
        self._device = device
        self._is_timed = is_timed
        self._accelerator = None if device.type == "cpu" else torch.get_device_module(device)
        self._marks: dict[str, _Mark] = {}
        self.order: list[int] = []  # of the gradients that came, as they are known to come
        self.num_buckets = 0
        self.unused_bytes = 0

    def mark(self, moment: str) -> None:
        """Record the current time under ``moment``, the name of a field of torch's."""
        if not self._is_timed:
            return
        event = None
        if self._accelerator is not None:
            # On a device its streams are timed, not the host.
            event = self._accelerator.Event(enable_timing=True)
            event.record(self._accelerator.current_stream(self._device))
        self._marks[moment] = _Mark(time.time_ns(), event)

    def backward_begins(self) -> None:
        """Note the beginning of a backward, and forget the times of a backward before it."""
        self._marks = {name: at for name, at in self._marks.items() if name.startswith("forward")}
        self.mark("backward_compute_time_start")

    def times(self) -> dict[str, int]:
        """Return nanoseconds of forward, backward and communication by torch's names; 0 if none."""
        parts = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
        found = {part: self._ns(f"{part}_start", f"{part}_end") for part in parts}
        overlap = self._ns("backward_comm_time_start", "backward_compute_time_end")
        return {**found, "backward_compute_comm_overlap_time": overlap}

    def moments(self) -> dict[str, int]:
        """Return the host time of each mark but the forward's end, in nanoseconds, by its name."""
        # Torch has no end of the forward.
        return {name: at.ns for name, at in self._marks.items() if name != _FORWARD_END}

    def _ns(self, begin: str, end: str) -> int:
        """Return the ns between two marks, 0 if either is missing; on a device, wait for both."""
        first, last = self._marks.get(begin), self._marks.get(end)
        if first is None or last is None:
            return 0
        if first.event is None:
            return max(0, last.ns - first.ns)
        last.event.synchronize()
        return max(0, int(first.event.elapsed_time(last.event) * 1_000_000))


# -- all that is told -----------------------------------------------------------------------------


class DataLogger:
    """The logging data of a wrapper: fields as in torch's, with more given as ``facts``."""

    def __init__(
        self,
        module: torch.nn.Module,
        layout: BucketLayout,
        **facts: str | int,
    ) -> None:
        parameters, group, options = layout.terms[:3]
        self._parameters = parameters
        self._device = parameters[0].device
        self._is_timed = self._device.type == "cpu" or not facts["is_multi_device_module"]
        self._rate = 100
        self._iteration = 0
        self._num_timed = 0
        self._timing: Timing | None = None
        self._is_static = True
        self._fields: dict[str, str | int] = {
            "module_name": type(module).__name__,
            "iteration": 0,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
            "dtypes": ", ".join(
                sorted({_DTYPE_NAMES.get(x.dtype, dtype_name(x.dtype)) for x in parameters})
            ),
            "bucket_cap_bytes": options.caps[-1],
            "find_unused_parameters": int(options.finds_unused),
            "gradient_as_bucket_view": int(options.as_views),
            "has_sync_bn": int(has_sync_batch_norm(module)),
            **_environment(""),
            **facts,
        }
        if options.is_static:
            self._fields["static_graph"] = 1
        self.use_group(layout)
        if get_debug_level() != DebugLevel.OFF:
            lines = [f"{name}: {self._fields[name]}" for name in sorted(self._fields)]
            _log.info("[rank %d]: DDP is made with\n%s", group.rank(), "\n".join(lines))

    def data(self) -> dict[str, Any]:
        """Return all fields, with their last values."""
        return dict(self._fields)

    def note(self, name: str, value: str | int) -> None:
        """Set the field ``name``."""
        self._fields[name] = value

    def calls(self) -> Mapping[Moment, Callable[[Any], None]]:
        """Return the methods that note what the reducer does, by moment of the call."""
        return {
            Moment.FORWARD_BEGINS: self.iteration_begins,
            Moment.BACKWARD_BEGINS: self._backward_begins,
            Moment.GRADIENTS_CAME: self._gradients_came,
            Moment.GROUP_CHANGED: self.use_group,
            Moment.ERROR: self._note_error,
            **{moment: partial(self._mark, name) for moment, name in _MARKS.items()},
        }

    def _note_error(self, error: BaseException) -> None:
        """Set the fields ``has_error`` and ``error``."""
        self._fields.update(has_error=1, error=str(error))

    def use_group(self, layout: BucketLayout) -> None:
        """Set the logged fields that describe the layout's group and its buckets."""
        group, buckets = layout.terms.group, layout.buckets
        backend = group.wire_name(self._device.type)
        for name in ("gloo_num_threads", *_environment("gloo"), *_environment("nccl")):
            self._fields.pop(name, None)
        self._fields.update(
            rank=group.rank(),
            world_size=group.size(),
            backend_name=backend,
            bucket_sizes=_sizes_text(buckets),
            **_environment(backend),
        )
        if backend == "gloo":
            gloo: Any = torch.distributed.ProcessGroupGloo
            self._fields["gloo_num_threads"] = gloo._Options()._threads
        self._laid = weakref.ref(buckets[0])

    # -- iterations ---------------------------------------------------------------------------

    def set_sample_rate(self, rate: int) -> None:
        """Sample the iterations whose number ``rate`` divides, beside the first ten; or raise."""
        self._rate = get_whole_number(
            rate,
            "the sample rate",
            1,
            expected="1 or more: iterations whose number it divides are measured",
            fix="pass 1 to measure every iteration",
        )

    def iteration_begins(self, layout: BucketLayout) -> None:
        """Log the times of the iteration timed last; time the new iteration if it is due."""
        before, self._timing = self._timing, None
        if before is not None and not is_capturing(self._device):
            self._tell(before, layout.buckets)
        self._iteration += 1
        is_due = self._iteration <= _SAMPLED_AT_FIRST or self._iteration % self._rate == 0
        if is_due and not is_capturing(self._device):
            self._timing = Timing(self._device, is_timed=self._is_timed)
            self._timing.mark("forward_compute_time_start")

    def _mark(self, name: str, _: object) -> None:
        if self._timing is not None:
            self._timing.mark(name)

    def _backward_begins(self, _: Backward) -> None:
        if self._timing is not None:
            self._timing.backward_begins()

    def _gradients_came(self, backward: Backward) -> None:
        """Note which gradients a sampled backward had; in any backward note if arrivals changed."""
        timing, verdict = self._timing, backward.verdict
        if verdict is None or (timing is None and verdict.ending is Ending.WHOLE):
            return
        came, history = verdict.came, backward.sending.history
        self._is_static = self._is_static and not history.find_changes(backward.counts, came)
        if timing is not None:
            order = history.laid_order(backward.layout.terms.order)
            timing.order = [index for index in order if came[index]]
            timing.num_buckets = len(backward.layout.buckets)
            timing.unused_bytes = sum(
                parameter.nbytes
                for parameter, has_come in zip(self._parameters, came, strict=True)
                if not has_come
            )

    def _tell(self, timing: Timing, buckets: Sequence[Bucket]) -> None:
        fields = self._fields
        fields.update(
            iteration=self._iteration,
            num_buckets_reduced=timing.num_buckets,
            unused_parameter_size=timing.unused_bytes,
            can_set_static_graph=int(self._is_static),
        )
        if timing.order:
            fields["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, timing.order))
        fields.setdefault("has_rebuilt_buckets", 0)
        if self._laid() is not buckets[0]:
            self._laid = weakref.ref(buckets[0])
            fields["has_rebuilt_buckets"] = 1
            fields["rebuilt_bucket_sizes"] = _sizes_text(buckets)
            fields["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket.indices)) for bucket in buckets
            )
        self._num_timed += 1
        for name, ns in timing.times().items():
            before = fields.get(f"avg_{name}", 0)
            assert isinstance(before, int)
            fields[name] = ns
            fields[f"avg_{name}"] = before + (ns - before) // self._num_timed
        fields.update(timing.moments())
        if get_debug_level() == DebugLevel.DETAIL:
            _log.info(
                "[rank %d of %d, iteration %d]: training %s, unused_parameter_size %d; on average, "
                "in ns: forward %d, backward %d, communication %d, overlap %d",
                *(fields[name] for name in ("rank", "world_size", "iteration", "module_name")),
                timing.unused_bytes,
                *(fields[f"avg_{name}"] for name in timing.times()),
            )


def _environment(wire: str) -> dict[str, str]:
    """Return the values of a wire's environment variables, by torch's field; "N/A" if unset."""
    return {
        variable.replace("TORCH_NCCL", "NCCL").lower(): os.environ.get(variable, _UNSET)
        for variable in _VARIABLES.get(wire, ())
    }


def has_sync_batch_norm(module: torch.nn.Module) -> bool:
    """Return whether the model has a ``SyncBatchNorm``: torch's, ours, or a class of either."""
    kinds = {kind for child in module.modules() for kind in type(child).__mro__}
    return any(kind.__name__ == "SyncBatchNorm" for kind in kinds)


def _sizes_text(buckets: Iterable[Bucket]) -> str:
    return ", ".join(str(sum(member.nbytes for member in bucket.members)) for bucket in buckets)
