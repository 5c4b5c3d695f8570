"""torch's own wrapper over our process group, as docs/how-to/communication_hooks.md shows it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.pool import Pool, places

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"<!-- not executed: [^>]*test_torch_wrapper.* -->\n```python\n(.*?)```", re.DOTALL
)

CHECKS = """
model(torch.full((1, 2), 1.0 + md.get_rank())).sum().backward()
assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
with model.no_sync():
    model(torch.ones(1, 2)).sum().backward()
assert model.module.weight.grad.tolist() == [[2.5, 2.5]]
assert torch.distributed.get_rank() == md.get_rank()
md.destroy_process_group()
torch.distributed.destroy_process_group()
"""


def test_a_communication_hook_calls_our_collectives(pool: Pool) -> None:
    page = ROOT / "docs/how-to/communication_hooks.md"
    (script,) = BLOCK.findall(page.read_text(encoding="utf-8"))
    for done in pool.start(script + CHECKS, places(2), has_teardown=False):
        assert done.returncode == 0, done.stderr
