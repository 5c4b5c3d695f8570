"""Run functional operators whose C++ asks for a backend, which meshdist groups lack.

torch's kernels serve all devices, so kernels for a device take precedence; they pass other groups'
calls to torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ..errors import ArgumentError
from .backend_group import BackendGroup

_IS_SEND = {"isend": True, "irecv": False}
_torchs: Any = c10d
_ops: Any = torch.ops._c10d_functional
# removes its kernels when it is deleted
_library = torch.library.Library("_c10d_functional", "IMPL")


def _gather_into(
    group: BackendGroup, x: torch.Tensor, group_size: int, name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    group.all_gather_single_coalesced([out], [x]).wait()
    return out


def _exchange(
    group: BackendGroup,
    words: list[str],
    peers: list[int],
    tags: list[int],
    tensors: list[torch.Tensor],
    name: str,
) -> list[torch.Tensor]:
    if unknown := {*words} - {*_IS_SEND}:
        raise ArgumentError(
            f"batch_p2p_ops has an unknown operation {min(unknown)!r}",
            expected="'isend' or 'irecv' for each tensor",
            fix="pass op_list=['isend', 'irecv', ...]",
        )
    works, results = [], []
    for word, peer, tag, tensor in zip(words, peers, tags, tensors, strict=True):
        start = group.send if _IS_SEND[word] else group.recv
        works.append(start([tensor], peer, tag))
        results.append(tensor.new_empty(0) if _IS_SEND[word] else tensor)
    for work in works:  # after all have started, since two ranks may send to each other
        work.wait()
    return results


def _run(operator: Any, ours: Callable[..., Any], *given: Any, **named: Any) -> Any:
    name = next(each for each in reversed(given) if isinstance(each, (str, c10d.ProcessGroup)))
    group = _torchs._resolve_process_group(name) if isinstance(name, str) else name
    if isinstance(group, BackendGroup):
        return ours(group, *given, **named)
    return operator._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *given, **named)


for _name, _ours in (("all_gather_into_tensor_out", _gather_into), ("batch_p2p_ops", _exchange)):
    if hasattr(_ops, _name):  # ``batch_p2p_ops`` exists since torch 2.13
        for _device in ("CPU", "CUDA"):
            _library.impl(_name, partial(_run, getattr(_ops, _name).default, _ours), _device)
