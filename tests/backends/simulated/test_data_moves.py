"""How data moves between members of one process: aliases, layouts, failures."""

from __future__ import annotations

import pytest
import torch

from meshdist.backends.simulated.matching import MemberData, move, write
from meshdist.operation_table import BACKEND_OPERATIONS, BackendOperation, TensorLayout


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_an_all_to_all_in_place_reads_before_it_writes() -> None:
    members = [[numbers(10.0 * i + j) for j in range(3)] for i in range(3)]
    move(BACKEND_OPERATIONS["all_to_all"], MemberData(members, members))
    assert [[x.item() for x in row] for row in members] == [
        [10.0 * j + i for j in range(3)] for i in range(3)
    ]


def test_a_gather_into_the_tensors_that_are_gathered() -> None:
    first, second = numbers(1.0), numbers(2.0)
    move(BACKEND_OPERATIONS["gather"], MemberData([[first], [second]], [[second, first], []]))
    assert (first.item(), second.item()) == (2.0, 1.0)


def test_a_scatter_over_its_own_inputs() -> None:
    inputs = [numbers(1.0), numbers(2.0), numbers(3.0)]
    move(
        BACKEND_OPERATIONS["scatter"],
        MemberData([inputs, [], []], [[inputs[2]], [inputs[0]], [inputs[1]]]),
    )
    assert [x.item() for x in inputs] == [2.0, 3.0, 1.0]


def test_parts_of_one_memory_are_gathered_in_place() -> None:
    wholes = [torch.zeros(2, 2), torch.zeros(2, 2)]
    for member, whole in enumerate(wholes):
        whole[member] = member + 1.0
    blocks = [[whole[member]] for member, whole in enumerate(wholes)]
    move(BACKEND_OPERATIONS["all_gather"], MemberData(blocks, [[whole] for whole in wholes]))
    move(
        BACKEND_OPERATIONS["all_gather_list"], MemberData(blocks, [list(whole) for whole in wholes])
    )
    for whole in wholes:
        assert whole.tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_a_block_is_reduced_into_its_own_input() -> None:
    wholes = [numbers(1.0, 2.0), numbers(10.0, 20.0)]
    blocks = [[whole[member : member + 1]] for member, whole in enumerate(wholes)]
    move(BACKEND_OPERATIONS["reduce_scatter"], MemberData([[whole] for whole in wholes], blocks))
    assert [w.tolist() for w in wholes] == [[11.0, 2.0], [10.0, 22.0]]


def test_nothing_is_written_where_one_output_does_not_fit() -> None:
    fits, does_not = torch.zeros(2), torch.zeros(3)
    with pytest.raises(RuntimeError, match="shape"):
        move(
            BACKEND_OPERATIONS["all_gather"],
            MemberData([[numbers(1.0)], [numbers(2.0)]], [[fits], [does_not]]),
        )
    assert fits.tolist() == [0.0, 0.0]


def test_outputs_may_be_of_any_layout_and_kind() -> None:
    transposed = torch.zeros(2, 3).mT
    write(transposed, torch.arange(6.0))
    assert transposed.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    parameter = torch.nn.Parameter(torch.zeros(()))
    write(parameter, numbers(4.0))
    assert parameter.item() == 4.0
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_a_collective_that_is_new_moves_by_its_forms_alone() -> None:
    # Parts for each member, one after the other in what it gets; and one member's whole, cut.
    exchange = BackendOperation("exchange_single", TensorLayout.EACH, TensorLayout.ONE)
    given = [[numbers(10.0 * i + j) for j in range(3)] for i in range(3)]
    outputs = [[torch.zeros(3)] for _ in range(3)]
    move(exchange, MemberData(given, outputs))
    assert [x.tolist() for (x,) in outputs] == [[j, 10.0 + j, 20.0 + j] for j in range(3)]

    reduce_list = BackendOperation(
        "reduce_list", TensorLayout.IN_PLACE, TensorLayout.ANY, reduces=True, root="to"
    )
    tensors = [[numbers(float(i)), numbers(1.0, i)] for i in range(3)]
    move(reduce_list, MemberData(tensors, tensors, root=2))
    assert [x.tolist() for x in tensors[2]] == [[3.0], [3.0, 3.0]]
    assert [x.tolist() for x in tensors[0]] == [[0.0], [1.0, 0.0]]
