"""Arrays that ranks make in place, against what one device makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist import DeviceMesh
from meshdist.errors import (
    ArgumentError,
    DtypeError,
    KindError,
    LengthError,
    NotInGroupError,
    ShapeError,
)
from tests.pool import Pool
from tests.sharding.array_cases import assemble, error_on_mesh, held, on_mesh

SPECS = [
    md.P(),
    md.P("dp", "tp"),
    md.P(None, ("tp", "dp")),
    md.P("tp", unreduced={"dp"}),
    md.P("tp", reduced={"dp"}),
    md.P(unreduced={"dp", "tp"}),
]
SHAPE = (5, 7)


@pytest.mark.parametrize("spec", SPECS)
def test_constant_arrays(spec: md.P) -> None:
    def program(mesh: DeviceMesh) -> Any:
        sharding = md.NamedSharding(mesh, spec)
        return [
            held(md.zeros(SHAPE, sharding=sharding)),
            held(md.ones(SHAPE, torch.int32, sharding=sharding)),
            held(md.full(SHAPE, 2.5, sharding=sharding)),
            held(md.ones(SHAPE, np.float32, sharding=sharding)),
            held(md.full(SHAPE, 3, like=np.empty(0, np.int16), sharding=sharding)),
        ]

    expected = [
        np.zeros(SHAPE, np.float32), np.ones(SHAPE, np.int32), np.full(SHAPE, 2.5, np.float32),
        np.ones(SHAPE, np.float32), np.full(SHAPE, 3, np.int16),
    ]  # fmt: skip
    for shards, whole in zip(zip(*on_mesh(program), strict=True), expected, strict=True):
        assert shards[0].local.dtype == whole.dtype
        assert np.array_equal(assemble(shards), whole)


def test_library_dtype_and_device() -> None:
    def program(mesh: DeviceMesh) -> Any:
        rows = md.NamedSharding(mesh, md.P("dp"))
        made = [
            md.zeros(4, sharding=rows),
            md.zeros([4], "bfloat16", sharding=rows),
            md.zeros((4,), np.dtype("int8"), sharding=rows),
            md.zeros((4,), float, sharding=rows),
            md.empty(4, "float64", like=np.zeros(1, np.int8), sharding=rows),
            md.empty(4, like=torch.zeros(1, dtype=torch.half, device="meta"), sharding=rows),
            md.empty((4, 1 << 40), device="meta", sharding=rows),
            md.full(4, True, sharding=rows),
            md.full((4,), 1j, np.complex64, sharding=rows),
        ]
        with mesh:
            assert md.zeros(4, sharding=md.P("dp")).sharding == rows
        return [
            f"{type(one.local).__name__} {one.dtype} {getattr(one.local, 'device', 'cpu')}"
            for one in made
        ]

    assert on_mesh(program)[0] == [
        "Tensor torch.float32 cpu",
        "Tensor torch.bfloat16 cpu",
        "ndarray int8 cpu",
        "Tensor torch.float64 cpu",
        "ndarray float64 cpu",
        "Tensor torch.float16 meta",
        "Tensor torch.float32 meta",
        "Tensor torch.bool cpu",
        "ndarray complex64 cpu",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_draws_of_torch_are_slices_of_the_whole(spec: md.P, dtype: torch.dtype) -> None:
    def program(mesh: DeviceMesh) -> Any:
        md.seed(3)
        x = md.randn(SHAPE, dtype, sharding=md.NamedSharding(mesh, spec))
        own = torch.Generator().manual_seed(5)
        y = md.randn(SHAPE, dtype, sharding=md.NamedSharding(mesh, spec), generator=own)
        wide = torch.complex64 if dtype.is_complex else torch.float64
        states = torch.get_rng_state(), own.get_state()
        return [
            held(md.ShardedArray(one.local.to(wide), one.sharding, SHAPE)) for one in (x, y)
        ], states

    results = on_mesh(program)
    for place, seed in enumerate((3, 5)):
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(SHAPE, dtype=dtype, generator=generator)
        wide = whole.to(torch.complex64 if dtype.is_complex else torch.float64)
        assert np.array_equal(assemble([shards[place] for shards, _ in results]), wide)
        assert all(torch.equal(states[place], generator.get_state()) for _, states in results)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_draws_of_numpy_are_slices_of_the_whole(dtype: Any) -> None:
    def program(mesh: DeviceMesh) -> Any:
        md.seed(3)
        rows = md.NamedSharding(mesh, md.P(("dp", "tp")))
        x = md.randn(SHAPE, dtype, sharding=rows)
        after = np.random.random()
        y = md.randn(SHAPE, dtype, sharding=rows, generator=np.random.default_rng(4))
        return held(x), held(y), after

    results = on_mesh(program)
    state = np.random.RandomState(3)
    assert np.array_equal(
        assemble([one[0] for one in results]), state.standard_normal(SHAPE).astype(dtype)
    )
    assert {one[2] for one in results} == {state.random_sample()}
    drawn_as = np.float64 if dtype is np.float16 else dtype
    whole = np.random.default_rng(4).standard_normal(SHAPE, dtype=drawn_as).astype(dtype)
    assert np.array_equal(assemble([one[1] for one in results]), whole)


WHOLE = np.arange(35.0).reshape(SHAPE)


@pytest.mark.parametrize("spec", SPECS)
def test_callbacks_are_asked_for_the_shard(spec: md.P) -> None:
    def program(mesh: DeviceMesh) -> Any:
        asked: list[Any] = []

        def read(index: tuple[slice, ...]) -> Any:
            asked.append(index)
            return torch.from_numpy(WHOLE)[index]

        x = md.make_array_from_callback(SHAPE, md.NamedSharding(mesh, spec), read)
        assert asked == [x.addressable_shards[0].index]
        y = md.make_array_from_callback(SHAPE, x.sharding, read, dtype=torch.float16)
        z = md.make_array_from_callback(
            SHAPE, x.sharding, lambda at: WHOLE[at].tolist(), dtype="f4"
        )
        return held(x), held(y), held(z)

    for shards, dtype in zip(
        zip(*on_mesh(program), strict=True), (np.float64, np.float16, np.float32), strict=True
    ):
        assert shards[0].local.dtype == dtype
        assert np.array_equal(assemble(shards), WHOLE)


def test_process_local_data() -> None:
    def program(mesh: DeviceMesh) -> Any:
        rows = md.NamedSharding(mesh, md.P("dp", "tp"))
        make = md.make_array_from_process_local_data
        shard = rows.box(md.get_rank(), SHAPE)
        part = WHOLE[tuple(slice(*ends) for ends in shard)]
        columns = WHOLE[:, slice(*shard[1])]
        two_rows = columns[:4].reshape(2, 2, -1)[mesh.get_local_rank("dp")]
        shapes = [make(rows, np.zeros((2, 3)), asked).shape for asked in (None, (None, None))]
        return [
            held(make(rows, part, SHAPE)),
            held(make(rows, torch.from_numpy(WHOLE), SHAPE)),  # whole everywhere
            held(make(rows, columns, SHAPE)),  # whole along dim 0
            held(make(rows, two_rows, (None, 7))),
        ], tuple(shapes)

    results = on_mesh(program)
    columns = list(zip(*(shards for shards, _ in results), strict=True))
    for shards in columns[:3]:
        assert np.array_equal(assemble(shards), WHOLE)
    assert np.array_equal(assemble(columns[3]), WHOLE[:4])
    assert {shapes for _, shapes in results} == {((4, 6), (4, 6))}


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda rows: md.zeros("4", sharding=rows),
            KindError,
            ["zeros: shape must be the global shape", "'4'"],
        ),
        (
            lambda rows: md.zeros((4, 2.5), sharding=rows),
            KindError,
            ["zeros: shape must be the global shape"],
        ),
        (lambda rows: md.zeros((), sharding=rows), ShapeError, ["entries for 1 dims"]),
        (
            lambda rows: md.zeros(-1, sharding=rows),
            ShapeError,
            ["no dim has a size below 0"],
        ),
        (lambda rows: md.zeros(4, sharding=None), KindError, ["zeros takes a sharding"]),
        (lambda rows: md.zeros(4, "float33", sharding=rows), DtypeError, ["no dtype 'float33'"]),
        (lambda rows: md.zeros(4, 3, sharding=rows), KindError, ["cannot use 3 as a dtype"]),
        (
            lambda rows: md.zeros(4, torch.bfloat16, like=np.zeros(1), sharding=rows),
            DtypeError,
            ["numpy has no dtype 'bfloat16'", "leave like= out"],
        ),
        (lambda rows: md.zeros(4, like="numpy", sharding=rows), KindError, ["a str as like"]),
        (
            lambda rows: md.ones(4, np.float32, device="cpu", sharding=rows),
            ArgumentError,
            ["device= is for torch tensors", "arrays of numpy"],
        ),
        (
            lambda rows: md.randn(4, torch.int32, sharding=rows),
            DtypeError,
            ["randn cannot draw integers"],
        ),
        (lambda rows: md.randn(4, np.int32, sharding=rows), DtypeError, ["a floating dtype"]),
        (
            lambda rows: md.randn(4, generator=np.random.default_rng(), sharding=rows),
            KindError,
            ["randn cannot draw shards of torch from a Generator", "a Generator"],
        ),
        (
            lambda rows: md.make_array_from_callback((4,), rows, lambda at: torch.zeros(4)),
            ShapeError,
            [
                "[0:2] of shape (4,)",
                "expected: shape (2,)",
                "found:    shape (4,)",
                "return global_array[index]",
            ],
        ),
        (
            lambda rows: md.make_array_from_callback((4,), rows, torch.zeros(4)),
            KindError,
            ["takes a function", "a Tensor"],
        ),
        (
            lambda rows: md.make_array_from_callback((4,), rows, lambda at: [None, None]),
            DtypeError,
            ["what data_callback returned", "object"],
        ),
        (
            lambda rows: md.make_array_from_process_local_data(rows, torch.zeros(3), (4,)),
            ShapeError,
            ["expected: shape (2,)", "found:    shape (3,)"],
        ),
        (
            lambda rows: md.make_array_from_process_local_data(rows, torch.zeros(3), (4, 4)),
            LengthError,
            ["global_shape has 2 sizes, the data 1 dims"],
        ),
        (
            lambda rows: md.make_array_from_process_local_data(rows, 3, (4, 4)),
            KindError,
            ["cannot take an int as local_data"],
        ),
        (
            lambda rows: md.full((4,), "x", sharding=rows),
            KindError,
            ["fill_value must be a number", "found:    'x'"],
        ),
    ],
)
def test_what_is_rejected(call: Any, kind: type[Exception], words: list[str]) -> None:
    text = error_on_mesh(lambda mesh: call(md.NamedSharding(mesh, md.P("dp"))), kind)
    for word in words:
        assert word in text, text


def test_a_rank_outside_the_mesh_makes_none() -> None:
    def program() -> list[str]:
        mesh = md.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
        if md.get_rank() == 0:
            return []
        found = []
        for make in (md.zeros, md.ones, md.empty, md.randn):
            with pytest.raises(NotInGroupError) as caught:
                make(4, sharding=md.NamedSharding(mesh, md.P("dp")))  # type: ignore[operator]
            found.append(str(caught.value))
        return found

    texts = md.simulate(program, 2)[1]
    assert [text.split(" ")[0] for text in texts] == ["zeros", "ones", "empty", "randn"]
    assert all("skip the call if mesh.get_coordinate() is None" in text for text in texts)


def test_processes(pool: Pool) -> None:
    def program() -> Any:
        import torch

        import meshdist as md

        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        torch.manual_seed(8)
        x = md.randn((9, 5), sharding=md.NamedSharding(mesh, md.P("dp")))
        return x.full(), torch.get_rng_state()

    torch.manual_seed(8)
    whole = torch.randn(9, 5)
    for found, state in pool.run(program, 4):
        assert torch.equal(found, whole) and torch.equal(state, torch.get_rng_state())
