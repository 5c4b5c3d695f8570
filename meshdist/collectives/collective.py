"""Represent a call of a collective: normalize, check and run its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import forward_ad

from ..arrays import shape_text
from ..backends.operation_args import OperationArgs, Sizes, Tensors, Written
from ..backends.work import Work
from ..dtypes import QUANTIZED, dtype_name
from ..error_text import ranks_text, with_article
from ..errors import ArgumentError, DtypeError, KindError, LengthError, ShapeError
from ..groups.process_group import ProcessGroup, resolve_group
from ..operation_table import OPERATIONS
from ..reduce_ops import REDUCIBLE, ReduceKind, ReduceOp, split_premul
from .argument_checks import as_backend_tensor, check_flag, check_reducible, premultiplied

_Tensor, _STRIDED = torch.Tensor, torch.strided
_NOT_PLAIN = frozenset(
    operation.name for operation in OPERATIONS.values() if not operation.is_plain
)


class OperationCall(OperationArgs):
    """A call of a collective, with its arguments and the tensors to send.

    Args:
        root: the group rank of the source, destination or peer.
        op_name: "" for a direct call.
        is_elementwise: whether tensors correspond element by element on all ranks, and so can keep
            their layout.
    """

    written: list[Written]
    foreign: list[Any]

    def __init__(
        self,
        operation: str,
        group: Any,
        root: int | None = None,
        op_name: str = "",
        is_elementwise: bool = False,
    ) -> None:
        self.operation, self.root, self.op_name = operation, root, op_name
        self.group: ProcessGroup = (
            group if isinstance(group, ProcessGroup) else resolve_group(group)
        )
        self.is_elementwise = is_elementwise
        self.written, self.foreign = [], []

    def take(self, x: Any, argument: str, *, writes: bool = False) -> torch.Tensor:
        """Return the tensor to send for ``x``; record ``x`` as a result if ``writes``."""
        is_plain = forward_ad._current_level < 0 and type(x) is _Tensor and x.layout is _STRIDED
        is_plain = is_plain and not x.requires_grad and x.is_contiguous() and not x.is_nested
        try:
            is_plain = is_plain and (x.data_ptr() or not x.numel())
        except RuntimeError:  # as inside a transform of torch.func
            is_plain = False
        data: torch.Tensor = x
        buffer: torch.Tensor = x
        if not is_plain or x.is_conj() or x.is_neg() or x.dtype in QUANTIZED:  # rare
            keeps = self.is_elementwise
            data, buffer = as_backend_tensor(
                x, argument, self.operation, writable=writes, keeps_layout=keeps
            )
            if data is not x:
                self.foreign.append(x)
            if keeps and not buffer.is_contiguous():
                self.lies_otherwise = True
        if writes:
            self.written.append((x, data, buffer))
        return buffer


class Collective(OperationCall):
    """A call of a collective; its checks raise before anything is sent."""

    is_scaled = False  # whether the factor of PREMUL_SUM is in the inputs already

    @property
    def is_root(self) -> bool:
        return self.root == self.group.rank()

    @property
    def here(self) -> str:
        """The rank and its group, for messages."""
        return f"rank {self.group.world.rank}, {self.group.name}"

    def take_list(
        self,
        given: Any,
        argument: str,
        like: torch.Tensor,
        likes_name: str,
        role: str = "",
        *,
        writes: bool = False,
    ) -> list[torch.Tensor]:
        """Return the tensors to send for a list with an array like ``like`` per rank.

        Args:
            role: the root's name, if only the root passes a list; its arrays are as large as
                ``like``.
        """
        tensors = []
        entries = self.check_list(given, argument, len(self.group.ranks), role=role)
        for index, x in enumerate(entries):
            entry = f"{argument}[{index}]"
            tensors.append(self.take(x, entry, writes=writes))
            self.check_alike(tensors[-1], like, (entry, likes_name))
            if role:
                self.check_same_size(tensors[-1], like, (argument, likes_name))
        return tensors

    def write_lists(
        self, given: Any, argument: str, num_lists: int, length: int
    ) -> list[torch.Tensor]:
        """Return, flat, the tensors to write in ``num_lists`` lists of ``length``; or raise."""
        rows = self.check_list(given, argument, num_lists)
        for row in rows:
            self.check_list(row, f"an entry of {argument}", length)
        return [self.take(x, argument, writes=True) for row in rows for x in row]

    def take_op(self, op: Any, *tensors: torch.Tensor) -> None:
        """Set the reduction, checked for ``tensors``; PREMUL_SUM becomes SUM and a factor."""
        kind, number = op, op.value if type(op) is ReduceKind else None
        for tensor in tensors:
            if (number, tensor.dtype) not in REDUCIBLE:  # rare
                kind, self.factor = split_premul(op)
                check_reducible(kind, tensor, self.operation, self.factor)
        self.op = kind
        self.noted_op = kind if self.factor is None else ReduceOp.PREMUL_SUM

    def scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` times the factor of PREMUL_SUM in new memory; itself with no factor."""
        self.is_scaled = True
        return tensor if self.factor is None else premultiplied(tensor, self.factor)

    def set_data(
        self,
        backend_operation: str,
        inputs: Tensors,
        outputs: Tensors,
        noted: torch.Tensor | Tensors,
        result: Sequence[Any] | None = None,
        sizes: tuple[Sizes, Sizes] | None = None,
    ) -> None:
        """Set the backend operation and its tensors.

        Args:
            noted: the tensors that ranks compare.
            result: the result() of the Work; None for ``outputs``.
            sizes: the elements sent to, and received from, each rank, if they differ.
        """
        self.backend_operation, self.inputs, self.outputs, self.noted = (
            backend_operation,
            inputs,
            outputs,
            noted,
        )
        self.result, self.sizes = result, sizes

    def run(self, async_op: bool = False) -> Work | None:
        """Run the call and wait for it; with ``async_op`` return its Work immediately."""
        if async_op is not False:
            check_flag(async_op, self.operation)
        if len(self.written) > 1:
            self._check_apart()
        if self.factor is not None or self.operation in _NOT_PLAIN:
            self.shows_all = False
        if self.is_scaled:
            self.factor = None
        noted = self.noted
        like = noted if isinstance(noted, _Tensor) else noted[0]
        device_group = self.group.open_device_group("cpu" if like.is_cpu else like.device.type)
        return device_group.run(self, is_async=async_op)

    # -- checks -----------------------------------------------------------------------------------

    def _check_apart(self) -> None:
        # ``[x] * 3`` would keep only the last result. Arrays with gaps, like columns of a matrix,
        # may interleave, so only their first elements are compared.
        spans = [
            (data.data_ptr(), data.nbytes if data.is_contiguous() else data.element_size(), index)
            for index, (_, data, _) in enumerate(self.written)
            if data.numel()
        ]
        spans.sort()
        for (start, size, index), (begin, _, other) in pairwise(spans):
            if begin < start + size:
                raise ArgumentError(
                    f"{self.operation} cannot write two results into the same memory",
                    where=self.here,
                    expected="arrays that do not overlap",
                    found=f"results {index} and {other}, counted from 0, overlap",
                    fix="pass separate arrays: [torch.empty_like(x) for _ in range(n)], "
                    "not [x] * n",
                )

    def check_alike(
        self, output: torch.Tensor, tensor: torch.Tensor, names: tuple[str, str]
    ) -> None:
        """Raise unless both tensors have the same dtype and device."""
        if output.dtype is not tensor.dtype:
            self.check_same_dtype(output, tensor, names)
        if not (output.is_cpu and tensor.is_cpu):
            self.check_same_device(output, tensor, names)

    def check_same_dtype(
        self, output: torch.Tensor, tensor: torch.Tensor, names: tuple[str, str]
    ) -> None:
        if output.dtype != tensor.dtype:
            dtypes = (dtype_name(output.dtype), dtype_name(tensor.dtype))
            raise DtypeError(
                f"{self.operation} has arguments of different dtypes",
                where=self.here,
                expected="the same dtype",
                found=f"{names[0]} {dtypes[0]}, {names[1]} {dtypes[1]}",
                fix=f"pass {names[0]} with the dtype of {names[1]}, {tensor.dtype}",
            )

    def check_same_device(
        self, output: torch.Tensor, tensor: torch.Tensor, names: tuple[str, str]
    ) -> None:
        if output.device != tensor.device:
            raise ArgumentError(
                f"{self.operation} has arguments on different devices",
                where=self.here,
                expected="the same device",
                found=f"{names[0]} on {output.device}, {names[1]} on {tensor.device}",
                fix=f"pass {names[0]} on the device of {names[1]}, {str(tensor.device)!r}",
            )

    def check_blocks(
        self, whole: torch.Tensor, block: torch.Tensor, names: tuple[str, str]
    ) -> None:
        """Raise unless ``whole`` has a block per rank: concatenated, stacked, or flat."""
        size = len(self.group.ranks)
        if whole.dim() == 1 and whole.numel() == size * block.numel():
            return  # the common case, decided fast
        stacked = (size, *block.shape)
        joined = (size * block.shape[0], *block.shape[1:]) if block.dim() else (size,)
        if whole.shape not in (stacked, joined):
            shapes = (shape_text(whole.shape), shape_text(block.shape))
            raise ShapeError(
                f"{self.operation}: {names[0]} does not hold one {names[1]} per rank",
                where=self.here,
                expected=f"{names[0]} of shape {shape_text(joined)} or {shape_text(stacked)}",
                found=f"{names[0]} {shapes[0]}, {names[1]} {shapes[1]}",
                fix=f"pass {names[0]} with one of the expected shapes",
            )

    def check_same_size(
        self, tensor: torch.Tensor, other: torch.Tensor, names: tuple[str, str]
    ) -> None:
        if tensor.numel() != other.numel():
            shapes = (shape_text(tensor.shape), shape_text(other.shape))
            raise ShapeError(
                f"{self.operation}: {names[0]} and {names[1]} have different numbers of elements",
                where=self.here,
                found=f"{names[0]} {shapes[0]}, {names[1]} {shapes[1]}",
                fix=f"pass {names[0]} with {other.numel()} elements, like {names[1]}",
            )

    def check_list(
        self,
        given: Any,
        argument: str,
        length: int | None = None,
        *,
        role: str = "",
        may_be_longer: bool = False,
    ) -> Sequence[Any]:
        """Return ``given`` if it is a list or tuple of ``length`` entries; else raise.

        Args:
            length: None for at least 1.
            role: the root's name, if only the root passes a list; others get ().
        """
        if role and not self.is_root:
            if given is None or (isinstance(given, (list, tuple)) and not given):
                return ()
            root = self.group.ranks[self.root or 0]
            raise (ArgumentError if isinstance(given, (list, tuple)) else KindError)(
                f"{self.operation}: {argument} is given on a rank that is not the {role}",
                where=self.here,
                expected=f"None or [] on all ranks except rank {root}, the {role}",
                found=with_article(type(given).__name__),
                fix=f"pass {argument} only on the {role}",
            )
        each = ", one entry per rank" if length == len(self.group.ranks) else ""
        if given is None:
            name = "src" if role == "source" else "dst"
            raise KindError(
                f"{self.operation} needs {argument} on this rank{role and f', the {role}'}",
                where=self.here,
                expected=f"a list or tuple{each}",
                fix=f"pass {argument}"
                + (role and f" here, or pass the rank of another {role} as {name}"),
            )
        if not isinstance(given, (list, tuple)):
            raise KindError(
                f"{self.operation}: {argument} must be a list",
                where=self.here,
                expected=f"a list or tuple{each}",
                found=type(given).__name__,
                fix=f"pass a list, for example list({argument}.unbind())"
                if isinstance(given, torch.Tensor)
                else "pass a list or tuple",
            )
        if may_be_longer and length is not None and len(given) > length:
            return given
        if len(given) != length if length is not None else not given:
            fix = "pass at least one entry" if length is None else f"pass a list of {length}"
            if each:
                fix = f"pass one entry for each of {ranks_text(self.group.ranks)}"
            raise LengthError(
                f"{self.operation}: {argument} has {len(given)} "
                + ("entry" if len(given) == 1 else "entries"),
                where=self.here,
                expected="at least one" if length is None else f"{length}{each}",
                fix=fix,
            )
        return given
