"""The table of dtypes, compared with torch, NumPy, MPI and the native core."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshdist.dtypes import DTYPES, SIGNED, DtypeFacts, dtype_name
from tests.backends import samples
from tests.inner import core

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ROWS = list(DTYPES.values())


def test_the_table_has_each_dtype_once_and_all_that_torch_computes_with() -> None:
    assert set(DTYPES) == set(samples.DTYPES)
    assert [facts.dtype for facts in ROWS] == list(DTYPES)


@pytest.mark.parametrize("facts", ROWS, ids=lambda facts: facts.name)
def test_numpy_has_what_the_table_says(facts: DtypeFacts) -> None:
    assert getattr(torch, facts.name) is facts.dtype
    try:
        dtype = torch.empty(0, dtype=facts.dtype).numpy().dtype
    except TypeError:
        assert not facts.is_in_numpy
    else:
        assert facts.is_in_numpy and dtype == np.dtype(facts.name)


@pytest.mark.parametrize("facts", ROWS, ids=lambda facts: facts.name)
def test_the_wide_dtype_holds_all_values(facts: DtypeFacts) -> None:
    assert facts.is_whole == (facts.dtype in (torch.bool, *samples.INTEGERS))
    if facts.wide is None:
        return
    wide = DTYPES[facts.wide]
    assert (
        wide.dtype.itemsize > facts.dtype.itemsize and wide.mpi and wide.is_whole == facts.is_whole
    )
    x = samples.draw(facts.dtype, (999,), seed=1)
    assert samples.bits(x.to(facts.wide).to(facts.dtype)) == samples.bits(x)


@pytest.mark.parametrize(
    "facts", [facts for facts in ROWS if facts.same_bits], ids=lambda facts: facts.name
)
def test_the_same_bits_have_the_same_sums(facts: DtypeFacts) -> None:
    x, y = (samples.draw(facts.dtype, (999,), seed) for seed in (1, 2))
    assert facts.same_bits is not None
    expected = samples.reduced_in_numpy([x, y], "SUM")
    found = samples.reduced_in_numpy([x.view(facts.same_bits), y.view(facts.same_bits)], "SUM")
    assert samples.bits(found) == samples.bits(expected)


def test_signed_twins_have_the_same_width() -> None:
    assert set(SIGNED) == {torch.uint16, torch.uint32, torch.uint64}
    for dtype, signed in SIGNED.items():
        assert torch.iinfo(dtype).bits == torch.iinfo(signed).bits


@pytest.mark.skipif(core is None, reason="needs the native core")
def test_the_native_core_has_the_same_dtypes() -> None:
    assert set(core.DTYPES) == {facts.name for facts in ROWS}


def test_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_name(np.dtype("int64")) == "int64"
