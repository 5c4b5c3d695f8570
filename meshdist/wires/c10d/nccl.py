"""torch's wires for accelerators: NCCL, UCC and XCCL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed

from ..communicator import Communicator
from ..failures import WireFailure
from ..opening import Opening
from ..registry import Wire, register_wire
from .communicator import C10dCommunicator, plain_text
from .substitutes import NCCL, UCC

__all__ = ["C10dWire", "NcclCommunicator", "NcclWire", "UccCommunicator"]


class NcclCommunicator(C10dCommunicator):
    """NCCL's connection, and that of XCCL, which follows it."""

    arithmetic = NCCL
    gathers_uneven = True


class UccCommunicator(C10dCommunicator):
    """UCC's connection."""

    arithmetic = UCC


@dataclass(eq=False)
class C10dWire(Wire):
    """A wire over one of torch's process-group classes, where this torch has it.

    Args:
        name: the wire's name.
        class_name: the name of torch's class.
        device_types: the device types it serves.
        build: which build of torch has the class.
        communicator_kind: the class of its connections.
    """

    name: str
    class_name: str
    device_types: frozenset[str]
    build: str
    communicator_kind: type[C10dCommunicator]

    def is_available(self) -> bool:
        return hasattr(torch_distributed, self.class_name)

    def why_unavailable(self) -> tuple[str, str]:
        return f"torch {torch.__version__} was built without {self.name.upper()}", self.build

    def open(self, opening: Opening) -> Communicator:
        try:
            group = self._make_group(opening)
        except RuntimeError as error:
            raise WireFailure(plain_text(error)) from None
        return self.communicator_kind(self.name, opening.rank, len(opening.ranks), group)

    def _make_group(self, opening: Opening) -> Any:
        kind = getattr(torch_distributed, self.class_name)
        return kind(opening.make_torch_store(), opening.rank, len(opening.ranks), opening.timeout)


class NcclWire(C10dWire):
    """NCCL. Opening does not communicate unless a device is bound: then it connects at once."""

    default_timeout = timedelta(minutes=10)

    def is_available(self) -> bool:
        return super().is_available() and torch.cuda.is_available()

    def why_unavailable(self) -> tuple[str, str]:
        if not super().is_available():
            return super().why_unavailable()
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            return f"CUDA_VISIBLE_DEVICES={hidden} shows no GPU", "unset CUDA_VISIBLE_DEVICES"
        return "torch sees no GPU", "nvidia-smi tells whether the driver sees one"

    def _make_group(self, opening: Opening) -> Any:
        kind = torch_distributed.ProcessGroupNCCL
        options = opening.options if isinstance(opening.options, kind.Options) else kind.Options()
        options._timeout = opening.timeout
        # A failure is raised where it is waited for, never by ending the process behind its back.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        group = kind(opening.make_torch_store(), opening.rank, len(opening.ranks), options)
        if opening.device is not None and opening.device.type == "cuda":
            group.eager_connect_single_device(opening.device)
        return group


register_wire(
    NcclWire(
        "nccl",
        "ProcessGroupNCCL",
        frozenset({"cuda"}),
        "install a build of torch for CUDA, see https://pytorch.org",
        NcclCommunicator,
    )
)
register_wire(
    C10dWire(
        "ucc",
        "ProcessGroupUCC",
        frozenset({"cpu", "cuda"}),
        "build torch with UCC; Gloo and NCCL serve the same devices",
        UccCommunicator,
    )
)
register_wire(
    C10dWire(
        "xccl",
        "ProcessGroupXCCL",
        frozenset({"xpu"}),
        "install torch's build for XPU, see https://pytorch.org",
        NcclCommunicator,
    )
)
