"""Provide communication hooks and their states under torch's names.

``PowerSGDState``, ``PostLocalSGDState``, ``powerSGD_hook``, ``DDPCommHookType`` and
``register_ddp_comm_hook`` are imported from torch.
"""

from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from .bucket import GradBucket, allreduce_hook, noop_hook, post_localSGD_hook
from .compression import (
    batched_powerSGD_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

__all__ = [
    "DDPCommHookType",
    "GradBucket",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
]


def __dir__() -> list[str]:
    return __all__
