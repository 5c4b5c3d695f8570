from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import meshdist as md
from meshdist.arrays import (
    apart,
    apart_from_all,
    as_tensor,
    describe,
    find_cupy_sync,
    like,
    shape_text,
)
from meshdist.dtypes import dtype_name
from meshdist.errors import ArgumentError, DtypeError, KindError
from tests.stand_in_cupy import StandInCupy

try:
    import cupy
except ImportError:
    cupy = None

SHARED = [
    np.bool_,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
]


def seen(x: Any, **options: Any) -> torch.Tensor:
    return as_tensor(x, argument="tensor", operation="all_reduce", **options)


def refusal(kind: type[Exception], x: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        seen(x, **options)
    assert type(caught.value) is kind
    return str(caught.value)


# -- torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3),
        torch.ones(2, 3).T,
        torch.ones(()),
        torch.ones(0),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(4).as_subclass(type("Named", (torch.Tensor,), {})),
    ],
)
@pytest.mark.parametrize("writable", [True, False])
def test_a_torch_tensor_is_returned_itself(x: torch.Tensor, writable: bool) -> None:
    assert seen(x, writable=writable) is x
    assert like(x, x) is x


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("is_parameter", [False, True])
def test_a_quantized_tensor_is_rejected(is_parameter: bool) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)
    if is_parameter:
        quantized = torch.nn.Parameter(quantized, requires_grad=False)
    text = refusal(DtypeError, quantized)
    assert "cannot take a quantized tensor as tensor: its scale would not be sent" in text
    with pytest.raises(DtypeError, match="quantized"):
        md.simulate(lambda: md.broadcast(quantized, 0), 2)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_rejected(layout: torch.layout) -> None:
    text = refusal(ArgumentError, torch.eye(2).to_sparse(layout=layout))
    assert text == (
        "all_reduce cannot take a sparse tensor as tensor\n"
        "  where:    argument tensor of all_reduce: torch.Tensor, shape (2, 2), float32\n"
        "  expected: a dense tensor, layout torch.strided\n"
        f"  found:    layout {layout}\n"
        "  fix:      pass tensor.to_dense()"
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_rejected(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    text = refusal(KindError, x)
    assert text.startswith(
        "all_reduce cannot take a nested tensor as tensor: its parts have different sizes\n"
        "  where:    argument tensor of all_reduce: torch."
    )
    assert text.endswith("fix:      pass its dense parts one at a time: tensor.unbind()")
    with pytest.raises(KindError, match="cannot take a nested tensor as tensor"):
        md.simulate(lambda: md.all_reduce(x), 1)


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_a_tensor_whose_values_lie_elsewhere_is_rejected() -> None:
    x = torch.Tensor._make_wrapper_subclass(Wrapped, (2,))
    text = refusal(KindError, x)
    assert text.startswith(
        "all_reduce cannot take a Wrapped as tensor: it does not store its values itself\n"
    )
    assert text.endswith("fix:      pass the plain tensor that it wraps")


def test_a_dtensor_is_rejected_and_its_shard_is_named() -> None:
    x = torch.Tensor._make_wrapper_subclass(
        type("DTensor", (Wrapped,), {"to_local": lambda self: None}), (2,)
    )
    text = refusal(KindError, x)
    assert "cannot take a DTensor as tensor" in text
    assert text.endswith("fix:      pass tensor.to_local(), the shard on this rank")


def test_the_real_dtensor_is_of_the_rejected_kind() -> None:
    from torch.distributed.tensor import DTensor

    assert DTensor.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    assert hasattr(DTensor, "to_local")


def test_a_lazy_parameter_is_rejected() -> None:
    text = refusal(KindError, torch.nn.UninitializedParameter())
    assert text == (
        "all_reduce cannot take tensor: a lazy parameter that has no values yet\n"
        "  fix:      run one forward of its module first"
    )


# -- NumPy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SHARED)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_a_numpy_array_shares_its_memory(dtype: type, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    tensor = seen(array)
    assert tuple(tensor.shape) == shape
    assert dtype_name(tensor.dtype) == dtype_name(array.dtype) == np.dtype(dtype).name
    tensor.copy_(torch.ones(shape))
    assert (array == np.ones(shape, dtype)).all()
    back = like(tensor, array)
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert array.size == 0 or np.shares_memory(back, array)


@given(st.lists(st.integers(0, 4), min_size=0, max_size=4), st.randoms(), st.booleans())
def test_any_view_of_positive_strides_reads_the_same(
    shape: list[int], random: Any, is_fortran: bool
) -> None:
    whole = np.arange(np.prod([2 * n for n in shape], dtype=int), dtype=np.int64)
    whole = whole.reshape([2 * n for n in shape], order="F" if is_fortran else "C")
    view = whole[tuple(slice(random.randrange(2), None, 2) for _ in shape)]
    order = list(range(len(shape)))
    random.shuffle(order)
    view = np.asarray(view).transpose(order)
    assert seen(view).tolist() == view.tolist()
    assert view.size == 0 or seen(view).data_ptr() == view.__array_interface__["data"][0]


def test_a_memory_mapped_file_is_written(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "numbers", dtype=np.float32, mode="w+", shape=(4,))
    seen(mapped).add_(3)
    mapped.flush()
    assert np.fromfile(tmp_path / "numbers", np.float32).tolist() == [3, 3, 3, 3]


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_a_read_only_array_is_rejected_by_a_collective_that_writes() -> None:
    assert refusal(ArgumentError, read_only(np.ones(3, np.float32))) == (
        "all_reduce cannot write into tensor: the array is read-only\n"
        "  where:    argument tensor of all_reduce: numpy.ndarray, shape (3,), float32\n"
        "  fix:      pass a copy, tensor = tensor.copy(), and read the result there"
    )


@pytest.mark.parametrize(
    "array",
    [
        read_only(np.arange(6.0).reshape(2, 3).T),
        np.broadcast_to(np.float64(2), (3, 2)),
        np.frombuffer(b"\1\2\3\4", np.int16),
        read_only(np.array(5)),
        read_only(np.ones((0, 2))),
    ],
)
def test_a_read_only_array_is_read_without_a_copy_and_without_a_warning(array: np.ndarray) -> None:
    tensor = seen(array, writable=False)
    assert tensor.tolist() == array.tolist()
    assert array.size == 0 or tensor.data_ptr() == array.__array_interface__["data"][0]
    assert not array.flags.writeable


def test_the_tensor_keeps_a_read_only_array_alive() -> None:
    tensor = seen(np.frombuffer(bytes(range(200)), np.uint8), writable=False)
    _ = [bytes(200) for _ in range(50)]
    assert tensor.tolist() == list(range(200))


def test_a_numpy_scalar_can_be_read_but_not_written() -> None:
    assert refusal(KindError, np.float32(1)) == (
        "all_reduce cannot write into tensor: a NumPy scalar is immutable\n"
        "  expected: a torch tensor, or an array of NumPy or CuPy\n"
        "  found:    numpy.float32\n"
        "  fix:      pass an array: tensor = numpy.array(tensor)"
    )
    tensor = seen(np.float32(1.5), writable=False)
    assert (tensor.dtype, tensor.item()) == (torch.float32, 1.5)
    back = like(tensor, np.float32(0))
    assert type(back) is np.float32
    assert back == 1.5


def test_negative_strides_are_rejected() -> None:
    assert refusal(ArgumentError, np.ones((2, 3))[:, ::-1]) == (
        "all_reduce cannot take tensor: the array has a negative stride, which torch cannot share\n"
        "  where:    argument tensor of all_reduce: numpy.ndarray, shape (2, 3), float64\n"
        "  expected: positive strides, multiples of the element size\n"
        "  found:    strides (24, -8) in bytes, elements of 8\n"
        "  fix:      pass a copy, tensor = tensor.copy(), and read the result there"
    )


def test_strides_that_cut_elements_are_rejected() -> None:
    records = np.zeros(3, dtype=np.dtype([("value", np.float64), ("tag", np.int32)]))
    text = refusal(ArgumentError, records["value"])
    assert "has strides that are not multiples of the element size" in text
    assert "found:    strides (12,) in bytes, elements of 8" in text


def test_unaligned_arrays_are_rejected() -> None:
    array = np.frombuffer(bytearray(17), np.float64, count=2, offset=1)
    assert "is not aligned to its element size" in refusal(ArgumentError, array)


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.array([object()]), "object"),
        (np.array(["a"]), "<U1"),
        (np.zeros(2, [("x", np.int32)]), "[('x', '<i4')]"),
        (np.zeros(2, "datetime64[s]"), "datetime64[s]"),
        pytest.param(
            np.zeros(2, np.longdouble),
            "float128",
            marks=pytest.mark.skipif(
                np.longdouble is np.float64 or not hasattr(np, "float128"),
                reason="no wider float on this machine",
            ),
        ),
    ],
)
@pytest.mark.parametrize("writable", [True, False])
def test_dtypes_that_torch_lacks_are_rejected(array: Any, name: str, writable: bool) -> None:
    text = refusal(DtypeError, array, writable=writable)
    assert text == (
        f"all_reduce cannot take tensor: torch has no dtype {name}\n"
        f"  where:    argument tensor of all_reduce: numpy.ndarray, {describe(array)}\n"
        "  expected: bool, an integer, float16 to float64, complex64 or complex128\n"
        "  fix:      convert it first, for example tensor.astype('float64')"
    )


def test_the_other_byte_order_is_rejected() -> None:
    array = np.ones(2, np.dtype(np.float32).newbyteorder("S"))
    text = refusal(DtypeError, array)
    assert f"it has the wrong byte order ({array.dtype.str})" in text
    fixed = eval(text.rpartition("fix:      pass ")[2], {"tensor": array})
    assert seen(fixed).tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("make", [np.ma.array, np.asmatrix])
def test_arrays_that_mean_more_than_their_numbers_are_rejected(make: Any) -> None:
    array = make(np.ones((1, 2)))
    text = refusal(KindError, array)
    assert f"cannot take a {type(array).__name__} as tensor: only its plain values" in text
    assert text.endswith("fix:      pass numpy.asarray(tensor) to send only its values")
    assert seen(np.asarray(array)).tolist() == [[1, 1]]


def test_a_result_for_numpy_carries_no_gradient_and_no_lazy_conjugate() -> None:
    tensor = torch.tensor([1 + 2j, 3j], requires_grad=True).conj()
    assert like(tensor, np.zeros(1)).tolist() == [1 - 2j, -3j]
    assert like(torch.tensor([1 + 2j]).conj().imag, np.zeros(1)).tolist() == [-2]


# -- everything else ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "name"),
    [
        ([1.0], "list"),
        ((1,), "tuple"),
        (1.0, "float"),
        (True, "bool"),
    ],
)
def test_what_is_no_array_is_rejected(x: Any, name: str) -> None:
    assert refusal(KindError, x) == (
        f"all_reduce cannot take a {name} as tensor\n"
        "  expected: a torch tensor, or an array of NumPy or CuPy\n"
        "  fix:      convert it to a tensor: tensor = torch.tensor(tensor)"
    )
    with pytest.raises(KindError, match="like cannot take"):
        like(torch.ones(1), x)


@pytest.mark.parametrize("x", [None, "a", object(), torch.float32])
def test_what_cannot_become_an_array_gets_no_advice(x: Any) -> None:
    assert "fix:" not in refusal(KindError, x)


def test_an_array_of_another_library_is_pointed_to_dlpack() -> None:
    class Array:
        def __dlpack__(self) -> None: ...

    text = refusal(KindError, Array())
    assert f"cannot take a {__name__}.Array as tensor" in text
    assert "fix:      pass torch.from_dlpack(tensor)" in text


@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_a_library_that_nobody_imported_is_not_looked_at(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, library, raising=False)
    assert seen(torch.ones(1).as_subclass(type("T", (torch.Tensor,), {}))).tolist() == [1]
    assert "cannot take a list" in refusal(KindError, [1])
    assert library not in sys.modules


def test_texts() -> None:
    assert shape_text(torch.Size((4, 8))) == "(4, 8)"
    assert shape_text([]) == "()"
    assert describe(torch.ones(2, 3)) == describe(np.ones((2, 3), np.float32))
    assert describe(torch.ones(2, 3)) == "shape (2, 3), float32"


# -- CuPy, played by a module that keeps its arrays in host memory ------------------------------


@pytest.fixture
def stand_in() -> Iterator[StandInCupy]:
    with StandInCupy().installed() as cupy:
        yield cupy


def test_a_cupy_array_shares_its_memory(stand_in: StandInCupy) -> None:
    array = stand_in.array(np.arange(3.0))
    tensor = seen(array)
    tensor.add_(1)
    assert array.host.tolist() == [1, 2, 3]
    back = like(tensor.requires_grad_(), array)
    assert type(back) is stand_in.ndarray
    assert np.shares_memory(back.host, array.host)


def test_cupy_arrays_that_torch_cannot_share_are_rejected(stand_in: StandInCupy) -> None:
    assert "has a negative stride" in refusal(ArgumentError, stand_in.array(np.ones(2)[::-1]))
    assert "torch has no dtype object" in refusal(DtypeError, stand_in.array(np.array([None])))


def test_a_cupy_array_goes_out_while_its_device_is_the_current_one(stand_in: StandInCupy) -> None:
    x, y = stand_in.array([1.0]), stand_in.array([2.0])
    with x.device:
        seen(y)
        seen(x)
    assert stand_in.handed_out == [(y.device.id, y.device.id), (x.device.id, x.device.id)]


def test_cupys_stream_waits_for_torchs_on_each_device_at_each_call(stand_in: StandInCupy) -> None:
    x, y = stand_in.array([1.0]), stand_in.array([2.0])
    hand_back = find_cupy_sync([x, torch.ones(1), y, x, np.ones(1)])
    assert hand_back is not None and stand_in.waits == []
    for torchs, cupys in ((11, 21), (12, 22), (12, 0), (0, 22), (12, 1)):
        with stand_in.streams(torchs, cupys):
            hand_back()
    expected = [(21, 11), (22, 12), (0, 12), (22, 0), (0, 12)]
    assert stand_in.waits_for(x) == stand_in.waits_for(y) == expected


@pytest.mark.parametrize(("torchs", "cupys"), [(0, 0), (0, 1), (11, 11)])
def test_a_stream_does_not_wait_for_itself(torchs: int, cupys: int, stand_in: StandInCupy) -> None:
    hand_back = find_cupy_sync([stand_in.array([1.0])])
    assert hand_back is not None
    with stand_in.streams(torchs, cupys):
        hand_back()
    assert stand_in.waits == []


def test_nothing_is_handed_back_to_torch_and_numpy(stand_in: StandInCupy) -> None:
    assert find_cupy_sync([torch.ones(1), np.ones(1), np.float32(1)]) is None
    assert find_cupy_sync([]) is None


def test_an_array_is_not_freed_before_it_was_handed_back(stand_in: StandInCupy) -> None:
    x = stand_in.array([1.0])
    kept = weakref.ref(x)
    stand_in.arrays.clear()
    hand_back = find_cupy_sync([x])
    del x
    assert kept() is not None
    del hand_back
    assert kept() is None


class OnCuda:
    """A tensor that says it lies on CUDA device 1, and notes the streams recorded on it."""

    is_cuda = True
    device = torch.device("cuda", 1)

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.detach = self.resolve_conj = self.resolve_neg = lambda: self

    def record_stream(self, stream: Any) -> None:
        assert stream.device == 1
        self.recorded.append(stream.cuda_stream)

    def __dlpack__(self, **options: Any) -> Any:
        return np.ones(1).__dlpack__()

    def __dlpack_device__(self) -> Any:
        return np.ones(1).__dlpack_device__()


@pytest.mark.parametrize("cupys", [21, 0])
def test_memory_that_cupy_gets_is_recorded_on_its_stream(cupys: int, stand_in: StandInCupy) -> None:
    tensor: Any = OnCuda()
    with stand_in.streams(11, cupys):
        assert type(like(tensor, stand_in.array([1.0]))) is stand_in.ndarray
        stream = weakref.ref(stand_in.cuda.get_current_stream(1))
    assert tensor.recorded == [cupys]
    assert stream() is not None  # or torch would look at a stream that is gone


# -- CuPy itself --------------------------------------------------------------------------------


needs_cupy = pytest.mark.skipif(
    cupy is None and torch.cuda.is_available(), reason="needs CuPy beside the GPU"
)


@pytest.mark.gpu
@needs_cupy
@pytest.mark.parametrize("rounds", [20])
def test_work_of_cupy_and_torch_on_different_streams_keeps_its_order(rounds: int) -> None:
    mine, theirs = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(mine), theirs:
        array = cupy.zeros(1 << 24, cupy.float32)
        for _ in range(rounds):
            array += 1  # queued on CuPy's stream
            seen(array).mul_(2)  # on torch's, after it
            hand_back = find_cupy_sync([array])
            assert hand_back is not None
            hand_back()  # and what follows on CuPy's, after that
        result = like(seen(array), array)
    theirs.synchronize()
    mine.synchronize()
    assert result.data.ptr == array.data.ptr
    expected = 0.0
    for _ in range(rounds):
        expected = np.float32((expected + 1) * 2)
    assert (cupy.asnumpy(array) == expected).all()


@pytest.mark.gpu
@needs_cupy
def test_torch_does_not_use_memory_again_that_cupys_stream_still_reads() -> None:
    mine, theirs = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(mine), theirs:
        copy = cupy.zeros(1 << 24, cupy.float32)
        tensor = torch.ones(1 << 24, device="cuda")
        array = like(tensor, copy)
        with torch.cuda.stream(torch.cuda.ExternalStream(theirs.ptr)):
            torch.cuda._sleep(200_000_000)
        copy[...] = array
        del tensor, array
        torch.zeros(1 << 24, device="cuda")  # on torch's stream, and in the same memory if it may
    torch.cuda.synchronize()
    assert (cupy.asnumpy(copy) == 1).all()


@pytest.mark.gpu
@needs_cupy
def test_memory_may_be_freed_after_the_stream_that_it_was_handed_to() -> None:
    with cupy.cuda.Stream(non_blocking=True):
        array = like(torch.ones(1 << 20, device="cuda"), cupy.zeros(1))
    assert float(array.sum()) == 1 << 20
    del array
    torch.cuda.synchronize()
    assert float(torch.ones(1 << 20, device="cuda").sum()) == 1 << 20


def test_an_array_under_a_mode_that_keeps_no_values_is_rejected() -> None:
    with FakeTensorMode(), pytest.raises(KindError, match="cannot take a FakeTensor as tensor"):
        as_tensor(np.ones(2, dtype=np.float32), argument="tensor", operation="all_reduce")


def test_what_shares_memory_is_copied() -> None:
    x = torch.arange(6.0)
    for tensor, output in ((x[:3], x[2:]), (x[2:], x[:3]), (x, x), (x[1:2], x)):
        copy = apart(tensor, output)
        assert copy.data_ptr() != tensor.data_ptr() and torch.equal(copy, tensor)
    for tensor, output in ((x[:3], x[3:]), (x[3:], x[:3]), (x, torch.ones(6))):
        assert apart(tensor, output) is tensor


def test_what_shares_memory_with_any_output_is_copied() -> None:
    x, beside = torch.arange(6.0), torch.ones(2)
    found = apart_from_all([x[:2], beside, x[4:]], [x[1:3], torch.empty(3)])
    assert found[0].data_ptr() != x.data_ptr() and torch.equal(found[0], x[:2])
    assert found[1] is beside and found[2].data_ptr() == x[4:].data_ptr()
