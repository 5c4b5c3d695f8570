"""The address of another rank's shared words, as it stands in the store."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from meshdist.groups.host_comparison import FingerprintTables


@pytest.mark.parametrize("junk", [["\0", 1, 2], [1e400, 1, 2], [1, 2], "none", {}])
def test_an_address_that_no_rank_wrote_leads_nowhere(junk: object) -> None:
    store = HashStore()
    store.set("process/1", json.dumps({"words": junk}))
    world: Any = SimpleNamespace(store=store, hosts=(0, 0), rank=0)
    assert not FingerprintTables(world).reaches((0, 1))
