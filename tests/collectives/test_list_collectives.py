"""Lists that will not do are rejected before anything is sent; texts say where and how to mend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import meshdist as md

X = torch.ones(2)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: md.all_gather([X] * 3, X),
            "all_gather: tensor_list has 3 entries\n"
            "  where:    rank 0, the world\n"
            "  expected: 4, one entry per rank\n"
            "  fix:      pass one entry for each of ranks 0-3",
        ),
        (
            lambda: md.all_gather([X.double()] * 4, X),
            "all_gather has arguments of different dtypes\n"
            "  where:    rank 0, the world\n"
            "  expected: the same dtype\n"
            "  found:    tensor_list[0] float64, tensor float32\n"
            "  fix:      pass tensor_list[0] with the dtype of tensor, torch.float32",
        ),
        (
            lambda: md.all_gather([X.to("meta")] * 4, X),
            "all_gather has arguments on different devices\n"
            "  where:    rank 0, the world\n"
            "  expected: the same device\n"
            "  found:    tensor_list[0] on meta, tensor on cpu\n"
            "  fix:      pass tensor_list[0] on the device of tensor, 'cpu'",
        ),
        (
            lambda: md.all_gather([torch.ones(3)] * 4, X),
            "all_gather: my tensor_list and tensor have different numbers of elements\n"
            "  where:    rank 0, the world\n"
            "  found:    my tensor_list (3,), tensor (2,)\n"
            "  fix:      pass my tensor_list with 2 elements, like tensor",
        ),
        (
            lambda: md.scatter(X, src=0),
            "scatter needs scatter_list on this rank, the source\n"
            "  where:    rank 0, the world\n"
            "  expected: a list or tuple, one entry per rank\n"
            "  fix:      pass scatter_list here, or pass the rank of another source as src",
        ),
        (
            lambda: md.gather(X, dst=0),
            "gather needs gather_list on this rank, the destination\n"
            "  where:    rank 0, the world\n"
            "  expected: a list or tuple, one entry per rank\n"
            "  fix:      pass gather_list here, or pass the rank of another destination as dst",
        ),
        (
            lambda: md.all_gather(None, X),
            "all_gather needs tensor_list on this rank\n"
            "  where:    rank 0, the world\n"
            "  expected: a list or tuple, one entry per rank\n"
            "  fix:      pass tensor_list",
        ),
        (
            lambda: md.all_reduce_coalesced([]),
            "all_reduce_coalesced: tensors has 0 entries\n"
            "  where:    rank 0, the world\n"
            "  expected: at least one\n"
            "  fix:      pass at least one entry",
        ),
        (
            lambda: md.all_gather_coalesced([[X]] * 4, [X, X]),
            "all_gather_coalesced: an entry of output_tensor_lists has 1 entry\n"
            "  where:    rank 0, the world\n"
            "  expected: 2\n"
            "  fix:      pass a list of 2",
        ),
    ],
)
def test_a_list_that_will_not_do(call: Callable[[], object], expected: str) -> None:
    def program() -> str:
        text = ""
        if md.get_rank() == 0:
            with pytest.raises(md.MeshdistError) as caught:
                call()
            text = str(caught.value)
        md.barrier()
        return text

    assert md.simulate(program, 4)[0] == expected
