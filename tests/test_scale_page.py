"""Numbers of docs/explanation/scale.md: descriptors and threads of an axis."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import meshdist as md
from tests.pool import Pool

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "scale.md"
TEXT = PAGE.read_text(encoding="utf-8")
IN_THE_PAGE: dict[str, Any] = {}
for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
    exec(block, IN_THE_PAGE)
NUM_MESHES = 12  # the signal thread may open a few files meanwhile, for itself
GROUPS = [("shm", "AAAAA"), ("gloo", "AA"), ("gloo", "ABC"), ("gloo", "AABB")]


def take_from_opening() -> tuple[int, int]:
    """How many descriptors and threads one more axis over all ranks takes from this process."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    options = {"dp": md.AxisOptions(private=True)}

    def make() -> md.DeviceMesh:
        return md.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp",), axis_options=options)

    meshes = [make()]
    md.barrier()  # what groups of a process have in common is there
    before = held()
    meshes += [make() for _ in range(NUM_MESHES)]
    # Another thread of the process may have a file open just now.
    files, threads = (new - old for new, old in zip(held(), before, strict=True))
    return round(files / NUM_MESHES), round(threads / NUM_MESHES)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="there is no /proc")
@pytest.mark.parametrize(("backend", "hosts"), GROUPS)
def test_what_an_axis_takes_is_what_the_page_says(pool: Pool, backend: str, hosts: str) -> None:
    counted = pool.run(take_from_opening, len(hosts), backend=backend, hosts=hosts)
    assert counted == [IN_THE_PAGE["taken"](backend, len(hosts))] * len(hosts)


def rows_of_meshes() -> list[tuple[str, str, list[str]]]:
    """The rows of the table of worlds: mesh, axis, and the other columns."""
    table = TEXT.split("| ranks, mesh |")[1].split("\n\n")[0].splitlines()[2:]
    rows, mesh = [], ""
    for line in table:
        first, axis, *columns = (cell.strip() for cell in line.strip("|").split("|"))
        mesh = first or mesh
        rows.append((mesh, axis, columns))
    return rows


@pytest.mark.parametrize(("mesh", "axis", "columns"), rows_of_meshes())
def test_the_table_of_worlds_follows_from_the_formulas(
    mesh: str, axis: str, columns: list[str]
) -> None:
    size = int(mesh.split(", ")[0].replace(",", ""))
    sizes = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", mesh)}
    layout = md.Layout.from_shape(tuple(sizes.values()), names=tuple(sizes))
    for name in sizes if axis == "each" else [axis]:
        ranks = layout.ranks_of_axis(name, 0)
        backend = "shm" if len({rank // 8 for rank in ranks}) == 1 else "gloo"
        descriptors, threads = IN_THE_PAGE["taken"](backend, len(ranks))
        requests, num_bytes = IN_THE_PAGE["of_gloo"](backend, len(ranks))
        assert columns[:3] == [f"{number:,}" for number in (descriptors, threads, requests)]
        assert columns[3] == in_words(num_bytes)
    assert layout.num_ranks == size


def in_words(num_bytes: int) -> str:
    """Bytes as the page writes them: two digits at least."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "KB")):
        if num_bytes >= 10**power:
            number = num_bytes / 10**power
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return str(num_bytes)
