"""How a verb of torch's groups was asked, what of its tensors travels, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshdist as md
from meshdist.checking.calls import GroupFacts
from meshdist.groups.verb_methods import Asked, only, only_list, read_options
from meshdist.torch_process_groups.requests import Request, check_some, find_tensor

GROUP = GroupFacts("group 'g'", (4, 6), 1)
X = torch.arange(6.0)


def request(verb: str = "all_reduce", **asked: Any) -> Request:
    return Request(verb, GROUP, Asked(**asked))


def test_options_are_read_in_both_forms() -> None:
    assert read_options(("op",)) == read_options(("op",), None) == Asked()
    assert read_options(("op",), dist.ReduceOp.MAX).op == dist.ReduceOp.MAX
    assert read_options(("op",), opts=dist.ReduceOp.MAX).op == dist.ReduceOp.MAX
    short = read_options(("root", "timeout"), 1, timedelta(seconds=3), op=None)
    assert short == Asked(timeout=timedelta(seconds=3), root=1)
    with pytest.raises(TypeError, match="2 arguments where there are 1: op"):
        read_options(("op",), dist.ReduceOp.MAX, 3)
    options = dist.ReduceOptions()
    options.reduceOp, options.rootRank, options.asyncOp = dist.ReduceOp.MIN, 1, False
    assert read_options(("root",), options) == Asked(False, None, options.reduceOp, 1)
    options.timeout = timedelta(seconds=7)
    assert read_options(("root",), options).timeout == timedelta(seconds=7)


def test_a_plain_tensor_travels_itself() -> None:
    one = request()
    assert one.read(X) is X and one.write(X) is X
    leaf = torch.ones(2, requires_grad=True)
    assert one.read(leaf).data_ptr() == leaf.data_ptr()
    assert not one.read(leaf).requires_grad


def test_what_was_written_elsewhere_is_copied_back_once() -> None:
    one = request()
    turned = torch.zeros(3, 2).t()
    buffer = one.write(turned)
    assert buffer.is_contiguous() and buffer.data_ptr() != turned.data_ptr()
    buffer.copy_(X.view(2, 3))
    assert not turned.any()
    one.copy_back()
    assert torch.equal(turned, X.view(2, 3))
    turned.zero_()
    one.copy_back()
    assert not turned.any()


def test_what_is_read_does_not_change_while_it_is_written() -> None:
    x = X.clone()
    (sent,), (taken,) = request().read_and_written(x, x[:3])
    assert taken is x
    assert sent.data_ptr() != x.data_ptr() and torch.equal(sent, X[:3])
    (sent,), (taken,) = request().read_and_written(x[:3], x[3:])
    assert sent.data_ptr() == x[3:].data_ptr()


def test_a_factor_is_applied_before_the_sum() -> None:
    one = request(op=dist._make_nccl_premul_sum(2.0))
    assert one.take_op([X]) == dist.ReduceOp.SUM
    assert one.facts == {"op": dist.ReduceOp.PREMUL_SUM}
    assert torch.equal(one.scaled(X), 2 * X)
    x = X.clone()
    assert one.scaled(x, in_place=True) is x and torch.equal(x, 2 * X)
    plain = request()
    plain.take_op([X])
    assert plain.scaled(X) is X


def test_the_root_and_the_title() -> None:
    assert request(root=1).is_root and not request(root=0).is_root
    receive = request("recv")
    assert receive.title == "recv"
    receive.message = (None, 3)
    assert receive.title == "recvAnySource"
    assert request("send").tensors == ()


TWO = [X, X]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda r: r.check_place(2), md.ArgumentError, "rank 2 is outside group 'g'"),
        (lambda r: r.check_tag(-1), md.ArgumentError, "tag -1 is negative"),
        (lambda r: r.check_list([X]), md.ArgumentError, "a list of 1 tensors"),
        (lambda r: r.check_list(TWO, X.int()), md.DtypeError, "int32 and float32"),
        (lambda r: r.check_alike([X, X.int()]), md.DtypeError, "different dtypes"),
        (
            lambda r: r.check_alike([X, torch.ones(1, device="meta")]),
            md.ArgumentError,
            "cpu and meta",
        ),
        (lambda r: r.check_blocks(X, X), md.ShapeError, "2 times 6 elements"),
        (lambda r: r.check_count(X, X[:2]), md.ShapeError, "2, of shape"),
        (lambda r: r.split_counts(X[:5], [], "input"), md.ShapeError, "dim 0 a multiple of 2"),
        (lambda r: r.split_counts(X, [1, 2], "output"), md.ShapeError, "2 sizes whose sum is 6"),
        (lambda r: r.write(torch.ones(1).expand(3)), md.ArgumentError, "an expanded tensor"),
    ],
)
def test_what_is_refused(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call(request())
    assert text in str(caught.value)


def test_what_passes() -> None:
    one = request()
    one.check_place(1)
    one.check_tag(0)
    one.check_list(TWO, X)
    one.check_blocks(X, X[:3])
    assert one.split_counts(X.view(2, 3), [], "input") == [3, 3]
    assert one.split_counts(X.view(3, 2), [1, 2], "input") == [2, 4]
    assert one.split_counts(X[:0], [], "input") == [0, 0]


def test_tensors_among_arguments() -> None:
    assert find_tensor([1, [[X]]]) is X
    assert find_tensor([[], None, "text"]) is None
    assert only(X, "send") is X and only([X], "send") is X
    assert only_list([[X]], "gather") == [X] and only_list([X], "gather") == [X]
    with pytest.raises(md.ArgumentError, match="send: a list of 2 tensors, one for each device"):
        only(TWO, "send")
    with pytest.raises(md.ArgumentError, match="gather: 2 lists of tensors"):
        only_list([[X], [X]], "gather")
    with pytest.raises(md.ArgumentError, match=r"0 lists(.|\n)*pass it on the root"):
        only_list([], "gather")
    with pytest.raises(md.ArgumentError, match="an empty list of tensors"):
        check_some("all_reduce_coalesced", [])
