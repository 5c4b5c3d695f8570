"""Wrong arguments of sharding calls are errors of meshdist, never of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.distributed import from_placements, to_placements
from meshdist.errors import KindError

LAYOUT = md.Layout.from_shape((2, 2), ("dp", "tp"))
ROWS = md.NamedSharding(LAYOUT, md.P("dp"))
HEADS = "(h k)@tp d"


def from_pattern(**options: Any) -> Any:
    return md.NamedSharding.from_pattern(HEADS, LAYOUT, **options)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: from_pattern(shape=(8, 4), sizes=-1),
        lambda: from_pattern(local_shape=0, rank=0),
        lambda: from_pattern(local_shape=[[1], [2, 3]], rank=0),
        lambda: from_pattern(shape=(8, 4), local_shape=(4, 4), rank=1.5),
        lambda: ROWS.box(None, (4, 4)),
        lambda: ROWS.replica(None),
        lambda: ROWS.shard_shape((4, 4), rank=1.5),
        lambda: ROWS.whole_shape(None),
        lambda: ROWS.is_equivalent_to(ROWS, None),
        lambda: md.plan("b@dp d -> b d@dp", mesh=ROWS, shape=(4, 4)),
        lambda: md.plan("b d@dp, d f -> b f", mesh=ROWS, b=2, d=4, f=6),
        lambda: md.plan(md.P("dp"), md.P("tp"), LAYOUT, (4, 4)).explain(torch.float16),
        lambda: md.plan(md.P("dp"), md.P("tp"), LAYOUT, (4, 4)).explain("float32"),
        lambda: md.plan(md.P("dp"), md.P("tp"), LAYOUT, (4, 4)).bytes_received(torch.float16),
        lambda: md.plan("b d@dp, d f -> b f", mesh=LAYOUT, b=2, d=4, f=6).explain(torch.float16),
        lambda: from_placements(None, LAYOUT, (4, 4)),
        lambda: from_placements((), LAYOUT, None),
        lambda: from_placements((), LAYOUT, "dp"),
        lambda: to_placements(None),
    ],
)
def test_kinds(wrong: Callable[[], Any]) -> None:
    with pytest.raises(KindError):
        wrong()


def test_a_name_that_is_no_text() -> None:
    with pytest.raises(md.errors.PatternError, match="for 0, which the pattern does not name"):
        from_pattern(shape=(8, 4), sizes={0: (1, 2)})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda mesh: md.annotate(torch.ones(4), "a@tp", mesh=mesh.layout),
        lambda mesh: md.annotate(torch.ones(4), varying="tp", mesh="tp"),
        lambda mesh: md.annotate(torch.ones(4), "a@tp", mesh=torch.ones(2)),
        lambda mesh: md.annotate(torch.nn.Linear(2, 2), {"weight": "a@tp b"}, mesh=np.ones(2)),
        lambda mesh: md.ShardedArray(torch.ones(2, 4), md.NamedSharding(mesh, md.P("dp")), 0),
        lambda mesh: md.assert_equal(torch.ones(2, device="meta"), "dp", mesh=mesh),
        lambda mesh: md.assert_equal(
            torch.optim.SGD(torch.nn.Linear(2, 2).parameters()), "dp", mesh=mesh
        ),
    ],
)
def test_kinds_on_a_mesh(wrong: Callable[[md.DeviceMesh], Any]) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(KindError) as caught:
            wrong(mesh)
        return str(caught.value.fix)

    fixes = md.simulate(program, 4)
    assert fixes == fixes[:1] * 4


def test_an_optimizer_is_compared_by_its_state() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        md.seed(0)
        optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
        with pytest.raises(KindError) as caught:
            md.assert_equal(optimizer, "dp", mesh=mesh)
        assert caught.value.fix == "pass optimizer.state_dict()"
        md.assert_equal(optimizer.state_dict(), "dp", mesh=mesh)

    md.simulate(program, 2)
