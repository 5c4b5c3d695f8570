"""Every argument of every collective and group call, misused in every way, beside torch.

What a program catches of torch.distributed it catches here: our error is an instance of torch's
class. Where that is not so, or where only torch raises, a rule below says why, as does
docs/reference/differences_from_torch.md
has the same rules in words.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import meshdist as md
from tests.pool import Pool

# What torch stumbles on, in place of a rejection: its assertions, kernels that its dispatcher
# lacks, attributes that an argument of another type lacks, and a wait in the store for a rank that
# the world lacks.
STUMBLES = (AssertionError, NotImplementedError, AttributeError, dist.DistStoreError)
# What torch rejects and we take, or reject by another class.
OTHERWISE = {
    "barrier(device_ids: [])",  # no device is named
    "broadcast_object_list(object_list: [])",  # nothing is sent
    "get_global_rank(group: None)",  # the world is meant, as everywhere
    "get_group_rank(group: None)",
    "is_backend_available(backend: None)",  # the default backends are meant
    "rendezvous(url: text)",  # rejected by the first `next`
    "DeviceMesh(mesh: integers)",  # tensors whose elements are no ranks
}


def ones(size: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype)


def whole_calls(d: Any, n: int) -> dict[str, dict[str, Any]]:
    """Right arguments of each call, on every rank of a world of ``n``."""
    rank = d.get_rank()
    lists = [ones() for _ in range(n)]
    on_root = (lambda given: given) if rank == 0 else (lambda given: None)
    common: dict[str, Any] = {"group": None, "async_op": False}
    peer = n - 1 - rank
    to, of = {"dst": peer, "group_dst": None}, {"src": peer, "group_src": None}
    made = {"timeout": None, "backend": None, "group_desc": None}
    objects = {"group": None, "device": None}
    return {
        "all_reduce": {"tensor": ones(), "op": d.ReduceOp.SUM, **common},
        "all_reduce_coalesced": {"tensors": [ones()], "op": d.ReduceOp.SUM, **common},
        "reduce": {"tensor": ones(), "dst": 0, "op": d.ReduceOp.SUM, "group_dst": None, **common},
        "broadcast": {"tensor": ones(), "src": 0, "group_src": None, **common},
        "all_gather": {"tensor_list": lists, "tensor": ones(), **common},
        "all_gather_into_tensor": {
            "output_tensor": ones(4 * n),
            "input_tensor": ones(),
            **common,
        },
        "all_gather_coalesced": {
            "output_tensor_lists": [[one] for one in lists],
            "input_tensor_list": [ones()],
            **common,
        },
        "gather": {"tensor": ones(), "gather_list": on_root(lists), "dst": 0, **common},
        "scatter": {"tensor": ones(), "scatter_list": on_root(lists), "src": 0, **common},
        "reduce_scatter": {"output": ones(), "input_list": lists, **common},
        "reduce_scatter_tensor": {"output": ones(), "input": ones(4 * n), **common},
        "all_to_all": {"output_tensor_list": lists, "input_tensor_list": lists, **common},
        "all_to_all_single": {
            "output": ones(4 * n),
            "input": ones(4 * n),
            "output_split_sizes": [4] * n,
            "input_split_sizes": [4] * n,
            **common,
        },
        "barrier": {**common, "device_ids": None},
        "monitored_barrier": {"group": None, "timeout": None},
        "all_gather_object": {"object_list": [None] * n, "obj": 1, "group": None},
        "gather_object": {
            "obj": 1,
            "object_gather_list": on_root([None] * n),
            "dst": 0,
            "group": None,
        },
        "broadcast_object_list": {"object_list": [1], "src": 0, **objects},
        "scatter_object_list": {
            "scatter_object_output_list": [None],
            "scatter_object_input_list": list(range(n)),
            "src": 0,
            "group": None,
        },
        "send": {"tensor": ones(), "group": None, "tag": 0, **to},
        "recv": {"tensor": ones(), "group": None, "tag": 0, **of},
        "isend": {"tensor": ones(), "group": None, "tag": 0, **to},
        "irecv": {"tensor": ones(), "group": None, "tag": 0, **of},
        "send_object_list": {"object_list": [1], **objects, **to},
        "recv_object_list": {"object_list": [None], **objects, **of},
        "P2POp": {"op": d.isend, "tensor": ones(), "peer": peer, "group": None, "tag": 0},
        "batch_isend_irecv": {"p2p_op_list": []},
        "new_group": {"ranks": list(range(n)), **made, "device_id": None},
        "new_subgroups": {"group_size": 1, "group": None, **made},
        "new_subgroups_by_enumeration": {
            "ranks_per_subgroup_list": [[one] for one in range(n)],
            **made,
        },
        "get_rank": {"group": None},
        "get_world_size": {"group": None},
        "get_backend": {"group": None},
        "get_backend_config": {"group": None},
        "get_default_backend_for_device": {"device": "cpu"},
        "get_process_group_ranks": {"group": None},
        "get_group_rank": {"group": d.group.WORLD, "global_rank": 0},
        "get_global_rank": {"group": d.group.WORLD, "group_rank": 0},
        "is_backend_available": {"backend": "gloo"},
        "set_debug_level": {"level": d.get_debug_level()},
        "Backend": {"name": "gloo"},
        "rendezvous": {"url": "env://", "rank": 0, "world_size": n},
        "init_device_mesh": {"device_type": "cpu", "mesh_shape": (n,), "mesh_dim_names": ("a",)},
        "DeviceMesh": {"device_type": "cpu", "mesh": list(range(n)), "mesh_dim_names": ("a",)},
    }


def wrong_values(d: Any, n: int, name: str, right: Any) -> dict[str, Any]:
    """Wrong values of an argument, by what is wrong with them."""
    found = {"None": None, "text": "x", "3.5": 3.5, "object": object(), "[]": [], "{}": {}}
    if name.endswith(("list", "lists")) or isinstance(right, list):
        given = right if right else [ones()] * n
        found |= {"a tuple": tuple(given), "nones": [None] * n, "texts": ["x"] * n}
        found |= {"one more": [*given, given[0]], "one alone": given[0], "halves": [1.5] * n}
        found |= {"outside": [n + 3], "twice": [0, 0], "integers": [ones(4, torch.int64)] * n}
        found |= {"short": [ones(3)] * n}
    elif isinstance(right, torch.Tensor):
        size = right.numel()
        found |= {"a list": [right], "short": ones(size - 1), "whole": ones(size, torch.int64)}
        found |= {"double": ones(size, torch.float64), "bare": torch.tensor(1.0)}
        found |= {"sparse": right.to_sparse(), "needs grad": ones(size).requires_grad_()}
    elif name == "group":
        found |= {"no member": d.GroupMember.NON_GROUP_MEMBER, "ranks": list(range(n)), "7": 7}
    elif name == "op":
        found |= {"BAND": d.ReduceOp.BAND, "all_reduce": d.all_reduce, "7": 7}
    elif name in ("src", "dst", "peer", "tag", "rank") or name.endswith(("_rank", "_src", "_dst")):
        found |= {"-1": -1, "n + 3": n + 3}
    elif name == "device":
        found |= {"no device": "nope", "meta": "meta"}
    elif name == "timeout":
        found |= {"a number": 3}
    elif name in ("backend", "name"):
        found |= {"no backend": "nope", "no pair": "cpu:"}
    elif name in ("mesh_shape", "mesh_dim_names"):
        found |= {"large": (n + 7,), "texts": ("x",), "two": ("a", "b"), "twice": ("a", "a")}
    return found


def misuses(d: Any, n: int) -> Iterator[tuple[str, str, str]]:
    for call, arguments in whole_calls(d, n).items():
        for name, right in arguments.items():
            for what in wrong_values(d, n, name, right):
                yield call, name, what
            yield call, name, "left out"


def outcomes(d: Any, rank: int, n: int, path: str) -> dict[str, Any]:
    """The classes of what each misuse raises; () for nothing. Broken worlds are made anew."""
    names = {"DeviceMesh": DeviceMesh, "init_device_mesh": init_device_mesh} if d is dist else {}
    found: dict[str, Any] = {}
    store = d.FileStore(path, n)
    limit = timedelta(seconds=1 if n == 1 else 30)  # alone, some wait for it

    def begin(name: str) -> None:
        place = d.PrefixStore(name, store)
        d.init_process_group("gloo", store=place, rank=rank, world_size=n, timeout=limit)

    begin("first")
    cases = [case for case in misuses(d, n) if is_answered(n, *case)]
    for number, (call, name, what) in enumerate(cases):
        if not d.is_initialized():
            begin(str(number))
        arguments = whole_calls(d, n)[call]
        right = arguments.pop(name)
        if what != "left out":
            arguments[name] = wrong_values(d, n, name, right)[what]
        raised: tuple[type, ...] = ()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                work = (names.get(call) or getattr(d, call))(**arguments)
                if hasattr(work, "wait"):
                    work.wait()
        except Exception as error:
            raised = tuple(one for one in type(error).__mro__ if one is not object)
        found[f"{call}({name}: {what})"] = raised
        is_kept = not raised or issubclass(raised[0], (ValueError, TypeError))
        if n > 1:  # one rank may go on where the other raises
            store.set(f"{number}/{rank}", str(int(is_kept)))
            is_kept = all(store.get(f"{number}/{one}") == b"1" for one in range(n))
        if not is_kept or call == "new_group":
            d.destroy_process_group()
    if d.is_initialized():
        d.destroy_process_group()
    return found


def is_answered(n: int, call: str, name: str, what: str) -> bool:
    """Whether torch neither waits nor ends the process there, nor parts the ranks."""
    if n > 1 and (what not in ("None", "text", "3.5", "object") or "atter" in call):
        return False
    if call == "reduce_scatter_tensor" and what == "bare":
        return False
    if call.endswith(("send", "recv", "send_object_list", "recv_object_list")):
        return name in ("group", "tensor", "object_list")
    return True


def is_known(n: int, name: str, torchs: type, is_taken: bool) -> bool:
    """Whether a rule above, or of the page of differences, says that we differ from torch here."""
    call = name.partition("(")[0]
    if not is_taken and issubclass(torchs, STUMBLES):
        return True
    if n == 1 and call in ("isend", "irecv", "recv"):  # to itself: torch's, or ours, rejects it
        return True
    kinds = ("async_op: []", "async_op: {}", ": a tuple", ": needs grad")
    return name in OTHERWISE or (is_taken and any(kind in name for kind in kinds))


@pytest.mark.parametrize("n", [1])
def test_ours_are_instances_of_torchs(n: int, pool: Pool, tmp_path: Path) -> None:
    def program(rank: int, library: Any) -> dict[str, Any]:
        return outcomes(library, rank, n, str(tmp_path / library.__name__))

    theirs, ours = (pool.call(program, n, library, timeout_s=300) for library in (dist, md))
    assert len(theirs[0]) > 400
    wrong = [
        (rank, name, kinds[0].__name__, [one.__name__ for one in ours[rank][name][:1]])
        for rank in range(n)
        for name, kinds in theirs[rank].items()
        if kinds and kinds[0] not in ours[rank][name]
        if not is_known(n, name, kinds[0], is_taken=not ours[rank][name])
    ]
    assert wrong == []


def test_every_group_call_and_collective_is_misused() -> None:
    (misused,) = md.simulate(lambda: set(whole_calls(md, 1)), 1)
    functions = {name for name in md.distributed.__all__ if inspect.isfunction(getattr(md, name))}
    with_arguments = {name for name in functions if inspect.signature(getattr(md, name)).parameters}
    elsewhere = {  # in test_error_classes; two names above; NCCL's alone; torch's own
        *("destroy_process_group", "init_process_group", "set_debug_level_from_env"),
        *("all_gather_single", "reduce_scatter_single"),
        *("get_node_local_rank", "split_group", "register_rendezvous_handler"),
    }
    assert {name for name in with_arguments if hasattr(dist, name)} - misused <= elsewhere
