"""What a model must be, and what of it the wrapper takes care of; rejections come before
sending."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.ddp.model_checks import (
    check_module,
    delayed_indices,
    find_devices,
    ignored_names,
    module_state,
    sparse_parameters,
    trainable_parameters,
)
from meshdist.errors import ArgumentError, DtypeError, GradientError, KindError


class Net(nn.Module):
    """A tied weight, a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))


def test_the_state_is_every_tensor_once_but_what_is_ignored() -> None:
    net = Net()
    names = ["frozen", "first.weight", "first.bias", "count"]
    assert [*module_state(net)] == names
    assert [*module_state(net, with_buffers=False)] == names[:-1]
    assert [*module_state(net, ["count", "frozen"])] == ["first.weight", "first.bias"]
    assert module_state(net)["first.weight"] is net.tied.weight


def test_trainable_are_those_that_require_gradients_and_are_not_ignored() -> None:
    assert [*trainable_parameters(Net())] == ["first.weight", "first.bias"]
    assert [*trainable_parameters(Net(), {"first.weight"})] == ["first.bias"]


def test_ignored_names_are_noted_on_the_module_by_any_of_their_names() -> None:
    net = Net()
    assert ignored_names(net) == frozenset()
    assert ignored_names(net, iter(["tied.weight", "count"])) == {"tied.weight", "count"}
    assert ignored_names(net) == {"tied.weight", "count"}


def test_sparse_are_the_weights_of_embeddings_that_say_so() -> None:
    net = nn.Sequential(
        nn.Embedding(2, 2, sparse=True),
        nn.Embedding(2, 2),
        nn.EmbeddingBag(2, 2, sparse=True),
    )
    assert [id(one) for one in sparse_parameters(net)] == [id(net[0].weight), id(net[2].weight)]


# -- delayed parameters ---------------------------------------------------------------------------


def test_delayed_parameters_are_found_among_those_that_are_averaged() -> None:
    first, second, third = parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    assert delayed_indices(parameters, None, None) == (frozenset(), None)
    assert delayed_indices(parameters, [("a", third), ("b", first)], second) == ({0, 2}, 1)


def test_delayed_parameters_may_be_generated() -> None:
    net = nn.Linear(2, 2)
    behind, parameters = net.weight, [*net.parameters()]
    assert delayed_indices(parameters, net.named_parameters(), behind) == ({0, 1}, 0)


@pytest.mark.parametrize("delayed", [["weight"], [nn.Parameter(torch.ones(2))], {"ab": 1}])
def test_delayed_parameters_without_names_are_rejected(delayed: Any) -> None:
    one = nn.Parameter(torch.ones(1))
    with pytest.raises(KindError) as error:
        delayed_indices([one], delayed, one)
    assert str(error.value) == (
        f"delay_all_reduce_named_params is of type {type(delayed).__name__}\n"
        "  expected: a list of (name, parameter) pairs\n"
        "  fix:      pass for example list(module.named_parameters())"
    )


@pytest.mark.parametrize(
    ("delayed", "behind", "text"),
    [
        (
            True,
            False,
            "delay_all_reduce_named_params requires param_to_hook_all_reduce\n"
            "  expected: both arguments, or neither\n"
            "  fix:      pass param_to_hook_all_reduce too",
        ),
        (
            False,
            True,
            "param_to_hook_all_reduce requires delay_all_reduce_named_params\n"
            "  expected: both arguments, or neither\n"
            "  fix:      pass delay_all_reduce_named_params too",
        ),
    ],
)
def test_half_of_both_is_rejected(delayed: bool, behind: bool, text: str) -> None:
    one = nn.Parameter(torch.ones(1))
    with pytest.raises(ArgumentError) as error:
        delayed_indices([one], [("one", one)] if delayed else None, one if behind else None)
    assert str(error.value) == text


def test_a_delayed_parameter_from_elsewhere_is_rejected() -> None:
    mine, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    expected = (
        "{} is not a trainable parameter of the module\n"
        "  expected: delayed parameters, and the parameter they wait for, from the module\n"
        "  fix:      take them from module.named_parameters()"
    )
    with pytest.raises(ArgumentError) as error:
        delayed_indices([mine], [("mine", mine), ("other", other)], mine)
    assert str(error.value) == expected.format("other")
    with pytest.raises(ArgumentError) as error:
        delayed_indices([mine], [("mine", mine)], other)
    assert str(error.value) == expected.format("param_to_hook_all_reduce")


# -- devices --------------------------------------------------------------------------------------


def test_cpu_modules_need_no_devices() -> None:
    assert find_devices(Net(), None, None) == (None, None)
    assert find_devices(Net(), [], 0) == (None, None)


@pytest.mark.parametrize("given", [[0], [0, 1], ["cpu"], [torch.device("cpu")]])
def test_devices_that_do_not_fit_are_rejected(given: Any) -> None:
    with pytest.raises(ArgumentError, match="does not match the module's devices"):
        find_devices(Net(), given, None)


@pytest.mark.parametrize(
    ("given", "output", "what"),
    [
        ([None], None, "device_ids[0] is None\n"),
        ([torch.device("cpu"), "gpu0"], None, "device_ids[1] is 'gpu0'\n"),
        (0, None, "device_ids is 0\n"),
    ],
)
def test_what_is_no_device_is_rejected(given: Any, output: Any, what: str) -> None:
    with pytest.raises(KindError) as error:
        find_devices(Net(), given, output)
    text = str(error.value)
    assert text.startswith(what) and "  expected: " in text
    assert "on the CPU, remove device_ids" in text


def test_an_output_device_alone_is_rejected() -> None:
    with pytest.raises(ArgumentError) as error:
        find_devices(Net(), None, 1)
    assert str(error.value).startswith("output_device requires device_ids\n")


@pytest.mark.gpu
def test_the_device_of_a_cuda_module_comes_back() -> None:
    device = torch.device("cuda", 0)
    assert find_devices(Net().cuda(), [0], None) == ([device], device)


# -- before anything is sent ----------------------------------------------------------------------


def test_what_can_be_trained_passes() -> None:
    assert check_module(Net()) == frozenset()
    lazy = nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(1))
    ignored_names(lazy, ["1.weight", "1.bias"])
    assert check_module(lazy) == {"1.weight", "1.bias"}


def test_frozen_parameters_may_have_eight_bits() -> None:
    def program() -> list[float]:
        net = Net()
        net.table = nn.Parameter(
            torch.full((2,), 1.0 + md.get_rank()).to(torch.float8_e4m3fn), False
        )
        md.DDP(net)
        return net.table.float().tolist()

    assert md.simulate(program, 2) == [[1.0, 1.0]] * 2


def test_sparse_buffers_and_parameters_may_be_left_to_each_rank() -> None:
    def program() -> float:
        net = nn.Linear(1, 1, bias=False)
        net.register_buffer("near", torch.eye(2).to_sparse())
        net.far = nn.Parameter(torch.eye(2).to_sparse())
        ignored_names(net, ["near", "far"])
        md.DDP(net)(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
        del net._ddp_params_and_buffers_to_ignore
        del net.far
        md.DDP(copy.deepcopy(net), broadcast_buffers=False)
        return net.weight.grad.item()

    assert md.simulate(program, 2) == [1.5, 1.5]


def sparse(kind: str) -> nn.Module:
    net, rows = nn.Linear(1, 1), torch.eye(2).to_sparse()
    if kind == "parameter":
        net.rows = nn.Parameter(rows)
    else:
        net.register_buffer("rows", rows)
    return net


def of_eight_bits() -> nn.Module:
    net = nn.Linear(1, 1)
    net.scale = nn.Parameter(torch.ones(2).to(torch.float8_e5m2))
    return net


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = [
    (
        lambda: nn.LazyLinear(1),
        {},
        GradientError,
        "cannot wrap a module whose parameter weight is uninitialized\n"
        "  expected: parameters that are initialized\n"
        "  fix:      run one forward of the module before you wrap it",
    ),
    (
        lambda: nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1)),
        {},
        KindError,
        "1 is torch's SyncBatchNorm, which requires torch's process groups\n"
        "  expected: meshdist's SyncBatchNorm\n"
        "  fix:      convert it: module = "
        "md.distributed.SyncBatchNorm.convert_sync_batchnorm(module, mesh['dp'])",
    ),
    (
        nn.ReLU,
        {},
        GradientError,
        "ReLU has no parameter that requires a gradient\n"
        "  expected: a module with at least one trainable parameter\n"
        "  fix:      use the module without DistributedDataParallel",
    ),
    *(
        (
            lambda kind=kind: sparse(kind),
            {},
            KindError,
            "rows is not a dense tensor\n"
            "  expected: dense parameters and buffers; their gradients may be sparse\n"
            "  found:    layout sparse_coo\n"
            "  fix:      convert it with to_dense()" + more,
        )
        for kind, more in (("parameter", ""), ("buffer", "; or pass broadcast_buffers=False"))
    ),
    (
        of_eight_bits,
        {},
        DtypeError,
        "cannot average the gradients of scale: torch does not average float8_e5m2\n"
        "  expected: trainable parameters of 16 bits or more\n"
        "  found:    (2,) float8_e5m2\n"
        "  fix:      keep it in bfloat16 and convert it in the forward; or freeze it",
    ),
    (Net, {"device_ids": [None]}, KindError, "device_ids[0] is None"),
    (Net, {"bucket_cap_mb_list": [1, -1]}, ArgumentError, "bucket_cap_mb_list[1] is -1"),
    (Net, {"param_to_hook_all_reduce": 1}, ArgumentError, "requires delay_all_reduce_named"),
    (Net, {"mixed_precision": 1}, KindError, "mixed_precision is 1"),
]


@pytest.mark.parametrize(("make", "options", "kind", "text"), REFUSED)
def test_a_rank_alone_rejects_without_the_others(
    make: Callable[[], nn.Module], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    """Were anything sent before, the first rank would be alone there: a deadlock."""

    def program() -> str:
        if md.get_rank() == 1:
            return ""
        with pytest.raises(kind) as error:
            md.DDP(make(), **options)
        return str(error.value)

    assert text in md.simulate(program, 2)[0]


def test_a_parameter_that_thaws_after_wrapping_is_an_error() -> None:
    def program() -> str:
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        module[1].bias.requires_grad_(False)
        model = md.DDP(module)
        model(torch.ones(1, 1)).sum().backward()
        module[1].bias.requires_grad_(True)
        with pytest.raises(GradientError) as error:
            model(torch.ones(1, 1))
        return str(error.value)

    for rank, text in enumerate(md.simulate(program, 2)):
        assert text == (
            "1.bias requires a gradient, but did not when the model was wrapped\n"
            f"  where:    rank {rank}\n"
            "  expected: every trained parameter requires a gradient when the model is "
            "wrapped\n"
            "  fix:      del ddp, and wrap the model again; or wrap first and freeze "
            "afterwards"
        )


def test_a_parameter_that_is_frozen_after_wrapping_is_none() -> None:
    def program() -> list[Any]:
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        model = md.DDP(module)
        seen = []
        for number in range(6):
            module[0].weight.requires_grad_(number not in (2, 3))
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
            grad = module[0].weight.grad
            seen.append(None if grad is None else torch.equal(grad, 1.5 * module[1].weight))
            assert torch.equal(module[0].bias.grad, module[1].weight[0])
        return seen

    assert md.simulate(program, 2) == [[True, True, None, None, True, True]] * 2


# -- simulated ranks ------------------------------------------------------------------------------


def test_a_module_that_simulated_ranks_share_is_told() -> None:
    shared = nn.Linear(1, 1)

    def program() -> None:
        md.DDP(shared)

    with pytest.raises(GradientError) as caught:
        md.simulate(program, 3)
    assert str(caught.value) == (  # the rank that waits for no other goes on first
        "weight belongs to the DistributedDataParallel of rank 2\n"
        "  expected: a separate module per rank (simulated ranks share objects in the "
        "closure)\n"
        "  fix:      create it inside the function, or pass it as an argument, which is "
        "copied: md.simulate(function, ranks, args=(module,))"
    )

    def handed(module: nn.Module) -> float:
        model = md.DDP(module)
        model(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
        return module.weight.grad.item()

    assert md.simulate(handed, 3, (shared,)) == [2.0] * 3

    kept = []
    md.simulate(lambda: kept.append(md.DDP(shared)), 1)
    with pytest.raises(GradientError, match="belongs to another DistributedDataParallel"):
        md.simulate(program, 2)  # of a world that has ended
    kept.clear()
    md.simulate(lambda: md.DDP(shared) and None, 1)
