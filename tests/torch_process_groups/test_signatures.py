"""Our groups and works take every call that torch's own take, by position and by name.

Torch writes both in C++ and tells the forms of each method in its docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from meshdist.torch_process_groups.backend_group import BackendGroup
from meshdist.torch_process_groups.works import TorchWork
from tests.pool import Pool
from tests.torch_process_groups.worlds import on_torch

# What C++ does for any group: the kinds of backends, and what is told about a group; and what a
# group rejects that does not support splitting.
OF_TORCHS_GROUP = {
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
    *("bound_device_id", "boxed", "group_desc", "group_name", "rank", "size", "unbox"),
    *("merge_remote_group", "split_group"),
}
# What torch 2.13 to 2.15 have besides: hooks, windows and changes of members, which need a backend
# in C++; gathers into one tensor, which raise.
OF_NEWER_GROUPS = {
    *("gather_into_tensor", "gather_single", "get_backend", "get_reconfigure_handle"),
    *("new_window", "reconfigure"),
    *("register_abort_hook", "register_post_hook", "register_pre_hook", "supports_abort_hooks"),
    *("supports_completion_hooks", "supports_reconfigure", "supports_window", "timeout"),
    *("unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook"),
    "use_pg_for_symm_mem_rendezvous",
}
# What C++ does for any work; it has neither streams nor a result that is a future, as Gloo's.
OF_TORCHS_WORK = {"block_current_stream", "boxed", "get_future_result", "unbox"}
LAST = ("abort", "shutdown")
MESSAGES = ("send", "recv", "recv_anysource")


class Parameter(NamedTuple):
    name: str
    kind: str
    has_default: bool


def forms_of(method: Any) -> list[list[Parameter]]:
    """The parameters of each form of a method of torch's, without ``self``."""
    text = re.sub(r"<[^<>]*>", "...", method.__doc__)
    lines = re.findall(rf"^(?:\d+\. )?{method.__name__}\((self: .*)\) -> ", text, re.MULTILINE)
    assert lines, method.__doc__
    found = []
    for line in lines:
        _, *parts = re.split(r", (?=\w+: )", line)
        split = [re.fullmatch(r"(\w+): (.*?)( = .*)?", part) for part in parts]
        found.append([Parameter(one[1], one[2], bool(one[3])) for one in split if one])
    return found


def public_names(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def own_names(kind: Any) -> set[str]:
    """The public names that a class of ours has for itself, and torch's has too."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith("meshdist")]
    return public_names(kind) & set().union(*(vars(one) for one in ours))


METHODS = sorted(own_names(BackendGroup) & public_names(dist.ProcessGroup), reverse=True)
WORKS = sorted(own_names(TorchWork) & public_names(dist.Work))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_torchs_names_and_defaults(name: str) -> None:
    forms = forms_of(getattr(dist.ProcessGroup, name))
    _, *ours = inspect.signature(getattr(BackendGroup, name)).parameters.values()
    for mine, theirs in zip(ours, forms[0], strict=False):
        assert mine.name == theirs.name or theirs.name.startswith("arg")
        assert mine.kind is mine.POSITIONAL_OR_KEYWORD
    every = {parameter.name for form in forms for parameter in form}
    assert {mine.name for mine in ours} <= every or every == {"arg0", "arg1"}
    for form in forms:
        for mine, theirs in zip(ours, form, strict=False):
            assert mine.default is not mine.empty or not theirs.has_default
        assert len(form) <= len(ours)


@pytest.mark.parametrize("name", WORKS)
def test_a_method_of_a_work_has_torchs_signature(name: str) -> None:
    (form,) = forms_of(getattr(dist.Work, name))
    _, *ours = inspect.signature(getattr(TorchWork, name)).parameters.values()
    assert [(one.name, one.default is not one.empty) for one in ours] == [
        (theirs.name, theirs.has_default) for theirs in form
    ]


def test_every_name_is_ours_or_needs_nothing_of_ours() -> None:
    assert public_names(dist.ProcessGroup) - {*METHODS, *OF_NEWER_GROUPS} == OF_TORCHS_GROUP
    assert public_names(dist.Work) - {*WORKS, *OF_NEWER_GROUPS} == OF_TORCHS_WORK


# -- every form, called ---------------------------------------------------------------------------


def value_of(parameter: Parameter) -> Any:
    """An argument of the kind that torch's docstring names, for a group of one member."""
    kind = parameter.kind
    x = torch.ones(2)
    if options := re.search(r"(\w+Options)$", kind):
        return getattr(c10d, options[1])()
    for part, value in (
        ("Sequence[collections.abc.Sequence[torch.Tensor]]", [[x]]),
        ("Sequence[torch.Tensor]", [x]),
        ("torch.Tensor", x),
        ("Sequence[typing.SupportsInt", []),
        ("SupportsInt", 0),
        ("ReduceOp", dist.ReduceOp.SUM),
        ("timedelta", timedelta(seconds=20)),
        ("bool", False),
    ):
        if part in kind:
            return value
    raise AssertionError(kind)


def calls_of(name: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Every form of a method: all by position, all by name, and as short as it can be."""
    for form in forms_of(getattr(dist.ProcessGroup, name)):
        yield tuple(map(value_of, form)), {}
        yield tuple(value_of(one) for one in form if not one.has_default), {}
        if not any(one.name.startswith("arg") for one in form):
            yield (), {one.name: value_of(one) for one in form}


def test_every_form_of_a_call_is_taken(pool: Pool) -> None:
    def program() -> dict[str, str]:
        group: Any = dist.group.WORLD
        rejected = {}
        for name in METHODS:
            for given, named in () if name in LAST else calls_of(name):
                try:
                    work = getattr(group, name)(*given, **named)
                    if isinstance(work, TorchWork) and name not in MESSAGES:
                        work.wait()
                        work.result()
                except TypeError as error:
                    rejected[f"{name} {len(given)} {list(named)}"] = str(error)
        return rejected

    assert on_torch(pool, program, 1) == [{}]


def test_a_tensor_of_another_device_goes_on_as_it_was_given(pool: Pool) -> None:
    def program() -> list[str]:
        class Other:
            def __getattr__(self, name: str) -> Any:
                return lambda *given, **named: (name, given, named)

        group: Any = dist.group.WORLD
        group.other_groups["meta"] = Other()
        changed = []
        with torch.device("meta"):
            for name in METHODS:
                for given, named in () if name in LAST else calls_of(name):
                    if "torch.Tensor" in getattr(dist.ProcessGroup, name).__doc__:
                        told = getattr(group, name)(*given, **named)
                        if str(told) != str((name, given, named)):
                            changed.append(name)
        group.other_groups.clear()
        return changed

    assert on_torch(pool, program, 1) == [[]]


def test_several_works_as_one_tell_of_all(pool: Pool) -> None:
    def program() -> Any:
        x, y = torch.ones(1), torch.ones(2)
        with dist._coalescing_manager(async_ops=True) as several:
            dist.all_reduce(x)
            dist.all_reduce(y)
        (work,) = several.works
        work.synchronize()
        told = [work.is_success(), work.exception(), [x.tolist() for x in work.result()]]
        return told

    assert on_torch(pool, program, 2) == [[True, None, [[2.0], [2.0, 2.0]]]] * 2
