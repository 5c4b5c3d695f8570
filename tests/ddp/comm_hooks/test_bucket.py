"""What a hook is given, against the model's own parameters."""

from __future__ import annotations

import pytest
import torch

import meshdist as md
from meshdist.errors import ShapeError


def make_bucket(group: md.ProcessGroup, index: int = 2, is_last: bool = False) -> md.GradBucket:
    """The gradients 0 to 9: of a matrix, and of one that lies by columns."""
    parameters = [torch.zeros(2, 2), torch.zeros(2, 3).t().contiguous().t()]
    flat = torch.arange(10.0)
    views = [flat[:4].view(2, 2), flat[4:].as_strided((2, 3), (1, 2))]
    return md.GradBucket(flat, parameters, views, index, is_last, group)


def test_what_it_tells() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        bucket = make_bucket(mesh.get_group("dp"), 3, True)
        assert bucket.index() == 3 and bucket.is_last() and bucket.group() is mesh.get_group("dp")
        assert [tuple(one.shape) for one in bucket.parameters()] == [(2, 2), (2, 3)]
        bucket.parameters().clear()  # a list of the caller's own
        assert len(bucket.parameters()) == 2
        return repr(bucket)

    assert md.simulate(program, 2) == ["<GradBucket 3: 2 gradients, 10 float32>"] * 2


def test_gradients_are_views_of_the_buffer() -> None:
    def program() -> None:
        bucket = make_bucket(md.group.WORLD)
        first, second = bucket.gradients()
        assert first.tolist() == [[0, 1], [2, 3]]
        assert second.tolist() == [[4, 6, 8], [5, 7, 9]] and second.stride() == (1, 2)
        bucket.buffer()[4] = -1
        assert second[0, 0] == -1
        first[0, 0] = 7
        assert bucket.buffer()[0] == 7

    md.simulate(program, 1)


def test_another_buffer_has_the_same_gradients() -> None:
    def program() -> None:
        bucket = make_bucket(md.group.WORLD)
        half = bucket.buffer().half()
        bucket.set_buffer(half)
        assert bucket.buffer() is half
        first, second = bucket.gradients()
        assert first.dtype == second.dtype == torch.float16
        assert second.tolist() == [[4, 6, 8], [5, 7, 9]]
        second.zero_()
        assert half.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 0]

    md.simulate(program, 1)


def test_a_buffer_of_another_size_has_no_gradients() -> None:
    def program() -> str:
        bucket = make_bucket(md.group.WORLD)
        bucket.set_buffer(torch.ones(3))
        with pytest.raises(ShapeError) as found:
            bucket.gradients()
        return str(found.value)

    assert md.simulate(program, 1) == [
        "the buffer of bucket 2 does not match its gradients\n"
        "  expected: 10 elements\n"
        "  found:    shape (3,), passed to set_buffer()\n"
        "  fix:      pass a tensor of 10 elements to set_buffer()"
    ]


def test_a_sparse_gradient_is_the_buffer() -> None:
    def program() -> str:
        sparse = torch.eye(3).to_sparse()
        bucket = md.GradBucket(sparse, [torch.zeros(3, 3)], [sparse], 0, True, md.group.WORLD)
        assert bucket.gradients()[0] is sparse is bucket.buffer()
        return repr(bucket)

    assert md.simulate(program, 1) == ["<GradBucket 0: 1 gradients, sparse 9 float32>"]
