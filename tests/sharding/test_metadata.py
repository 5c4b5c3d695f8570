"""Metadata of sharded arrays: JSON, and enough to put the array together on another mesh."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.errors import ArgumentError
from meshdist.mesh.layout import Layout
from meshdist.mesh.partition_spec import P
from meshdist.mesh.spec import NamedSharding
from meshdist.sharding.descriptions import ArrayMetadata, describe_array

MESH = Layout.from_ranks([[3, 1], [0, 2]], ("dp", "tp"))
SPECS = [
    P(),
    P("dp"),
    P(None, ("tp", "dp")),
    P("tp", unreduced={"dp"}),
    P(None, "tp", reduced={"dp"}),
]


@given(st.sampled_from(SPECS), st.tuples(st.integers(0, 7), st.integers(0, 7)))
def test_what_was_written_is_read_again(spec: P, shape: tuple[int, int]) -> None:
    sharding = NamedSharding(MESH, spec)
    written = describe_array(shape, torch.float16, sharding)
    assert json.loads(json.dumps(written)) == written
    for data in (written, json.dumps(written)):
        read = ArrayMetadata.from_json(data)
        assert (read.shape, read.dtype) == (shape, "float16")
        assert read.sharding.is_equivalent_to(sharding, 2)
        assert describe_array(read.shape, read.dtype, read.sharding) == written


@given(st.sampled_from(SPECS), st.tuples(st.integers(0, 7), st.integers(0, 7)))
def test_each_shard_is_held_by_its_ranks_and_saved_by_the_first(spec: P, shape: Any) -> None:
    sharding = NamedSharding(MESH, spec)
    read = ArrayMetadata.from_json(describe_array(shape, "float32", sharding))
    assert sorted(rank for shard in read.shards for rank in shard.ranks) == (
        sorted([0, 1, 2, 3]) if shape != () else []
    )
    covered = np.zeros(shape, dtype=int)
    for shard in read.shards:
        assert all(sharding.box(rank, shape) == shard.box for rank in shard.ranks)
        replicas = [sharding.replica(rank) for rank in shard.ranks]
        assert replicas[0] == 0
        covered[tuple(slice(*ends) for ends in shard.box)] += 1
    assert (covered == (2 if spec.unreduced else 1)).all()


def test_a_checkpoint_is_loaded_on_another_mesh() -> None:
    whole = np.arange(42.0).reshape(7, 6)

    def save() -> Any:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        spec = md.NamedSharding(mesh, P(None, "tp", unreduced=set()), shard_sizes={1: (1, 3, 2)})
        x = md.device_put(whole, spec)
        (shard,) = x.addressable_shards
        return json.dumps(x.metadata()), shard.data if shard.replica == 0 else None

    results = md.simulate(save, 3)
    assert len({text for text, _ in results}) == 1
    files = {rank: data for rank, (_, data) in enumerate(results) if data is not None}
    saved = ArrayMetadata.from_json(results[0][0])

    def load() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sharding = md.NamedSharding(mesh, P(("tp", "dp")))

        def read(index: tuple[slice, ...]) -> Any:
            box = tuple((one.start, one.stop) for one in index)
            part = np.zeros([stop - start for start, stop in box])
            for shard in saved.overlapping(box):
                common = [
                    (max(a, c), min(b, d)) for (a, b), (c, d) in zip(shard.box, box, strict=True)
                ]
                there = tuple(
                    slice(a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True)
                )
                of = tuple(
                    slice(a - c, b - c) for (a, b), (c, _) in zip(common, shard.box, strict=True)
                )
                part[there] += files[shard.ranks[0]][of]
            return part

        return md.make_array_from_callback(saved.shape, sharding, read).full()

    assert all(np.array_equal(found, whole) for found in md.simulate(load, 4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, ["no metadata", "version 1", "version 2"]),
        ({"format": "other"}, ["'other'"]),
        ({"spec": {}}, ["no metadata of a sharded array", "KeyError"]),
        ({"shape": [4]}, ["entries for 2 dims"]),
        ({"mesh": {"names": ["a"], "ranks": [0, 1]}}, ["axis 'dp'"]),
    ],
)
def test_other_json_is_refused(change: dict[str, Any], words: list[str]) -> None:
    data = describe_array((4, 4), "float32", NamedSharding(MESH, P("dp", "tp"))) | change
    with pytest.raises(ArgumentError) as caught:
        ArrayMetadata.from_json(data)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("data", ["", "[]", "3", "{}"])
def test_other_text_is_refused(data: str) -> None:
    with pytest.raises(ArgumentError, match="no metadata of a sharded array"):
        ArrayMetadata.from_json(data)
