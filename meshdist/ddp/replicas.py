"""Replicas of one model: compared across a group, and made equal to those of its first rank."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence

import torch

from ..collectives.objects import all_gather_object
from ..collectives.verbs import all_gather_into_tensor, broadcast
from ..dtypes import dtype_name
from ..error_text import grouped_text, ranks_text
from ..errors import AgreementError
from ..groups.process_group import ProcessGroup

__all__ = ["broadcast_from", "broadcast_from_first", "check_equal_lines", "tensor_line"]

_CHUNK_BYTES = 32 * 1024 * 1024
_ALIGNMENT = 16  # a piece of the flat buffer is viewed as any dtype
_SHOWN_LINES = 8


def tensor_line(name: str, tensor: torch.Tensor) -> str:
    """Describe one tensor of a model by all that replicas must share.

    Example:
        >>> tensor_line("head.weight", torch.zeros(2, 3).requires_grad_())
        'head.weight (2, 3) float32'
    """
    line = f"{name} {tuple(tensor.shape)} {dtype_name(tensor.dtype)}"
    if not tensor.is_contiguous():
        line += f" strides {tensor.stride()}"
    if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
        line += " frozen"
    return line


def check_equal_lines(
    lines: Sequence[str], group: ProcessGroup, *, device: torch.device, summary: str, fix: str
) -> None:
    """Return when all members hold equal ``lines``; collective over ``group``.

    Only digests travel where all agree.

    Raises:
        AgreementError: they differ; every member raises, and the text shows the lines that differ.
    """
    digest = list(hashlib.sha256(json.dumps(list(lines)).encode()).digest())
    mine = torch.tensor(digest, dtype=torch.uint8, device=device)
    gathered = mine.new_empty((group.size(), len(digest)))
    all_gather_into_tensor(gathered, mine, group)
    if bool((gathered == mine).all()):
        return
    lists: list[Sequence[str]] = [()] * group.size()
    with torch.cuda.device_of(mine):
        all_gather_object(lists, lines, group)
    raise AgreementError(
        summary,
        where=f"group of {ranks_text(group.ranks)}",
        expected="equal lines, in the same order, on every rank",
        found=_differences(lists, group),
        fix=fix,
    )


def _differences(lists: Sequence[Sequence[str]], group: ProcessGroup) -> str:
    """The places at which the lists differ, and which rank holds which line there."""
    rows = list(enumerate(itertools.zip_longest(*lists, fillvalue="nothing")))
    rows = [(place, entries) for place, entries in rows if len(set(entries)) > 1]
    shown = [
        f"{place}: {grouped_text(zip(group.ranks, entries, strict=True), '; ')}"
        for place, entries in rows[:_SHOWN_LINES]
    ]
    if len(rows) > _SHOWN_LINES:
        shown.append(f"and {len(rows) - _SHOWN_LINES} more")
    return "\n".join(shown)


def broadcast_from_first(tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """``broadcast_from`` group rank 0."""
    broadcast_from(tensors, group, 0)


@torch.no_grad()
def broadcast_from(tensors: Sequence[torch.Tensor], group: ProcessGroup, source: int) -> None:
    """Give every member the values of group rank ``source``, in place; collective over ``group``.

    Cost: one broadcast per device and 32 MiB, whatever the number and dtypes of the tensors.
    """
    for chunk in _chunks(tensors):
        sizes = [_padded_bytes(tensor) for tensor in chunk]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=chunk[0].device)
        pieces = [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(flat.split(sizes), chunk, strict=True)
        ]
        if group.rank() == source:
            torch._foreach_copy_(pieces, chunk)
        broadcast(flat, group=group, group_src=source)
        if group.rank() != source:
            torch._foreach_copy_(chunk, pieces)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut into lists of one device and, but for single larger tensors, at most 32 MiB."""
    filling: dict[torch.device, list[torch.Tensor]] = {}
    filled: dict[torch.device, int] = {}
    for tensor in tensors:
        device = tensor.device
        if tensor.numel() == 0:
            continue
        num_bytes = filled.get(device, 0) + _padded_bytes(tensor)
        if num_bytes > _CHUNK_BYTES and device in filling:
            yield filling.pop(device)
            num_bytes = _padded_bytes(tensor)
        filling.setdefault(device, []).append(tensor)
        filled[device] = num_bytes
    yield from filling.values()


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
