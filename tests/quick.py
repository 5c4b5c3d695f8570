"""Plugin of pytest: the quick part of the suite, and at its end what it left out.

    python -m pytest -p tests.quick

What runs: doctests, pure rooms, simulated ranks, and the pool's ranks over shared memory. Left out
are the files of ``LEFT_OUT``, and of all other files the tests on ranks over another backend.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

TESTS = Path(__file__).resolve().parent

LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "other backends": """
            test_over_two_hosts.py test_two_hosts.py torch_process_groups backends/c10d
            backends/mpi
        """,
        "processes that start and end": """
            bootstrap checking/test_debug_levels.py cli faults groups/test_failures.py
            groups/test_host_watch.py launching mesh/test_torch_interop.py promises
            runtime/test_hosts.py test_attacks.py test_engines.py test_public_api.py test_fuzz.py
            test_fuzz_sockets.py test_fuzz_store.py test_interrupts.py test_kills.py test_launch.py
            test_load.py test_pool.py test_suite.py backends/test_worker_queue.py worlds
        """,
        "checkpoints on disks": "checkpoint",
        "the native core by itself": "native",
        "long tables": """
            collectives/test_layouts.py collectives/test_nested_collectives.py
            collectives/test_tensor_collectives.py functional/test_reached_gradients.py
            functional/test_linear_function.py functional/test_ragged.py
            groups/test_dropped_groups.py lax/test_lax_as_jax.py sharding/test_shard_map_as_jax.py
            test_absent_names.py test_misuse.py operations/test_axes.py operations/test_checks.py
            operations/test_promises.py operations/test_stress.py backends/shm/test_all_to_all.py
            backends/shm/test_communicator.py backends/shm/test_listener.py
            backends/shm/test_started_calls.py backends/test_reductions.py
        """,
        "long drawn programs": """
            join/test_zero_optimizer.py
            sharding/test_einsum_oracle.py sharding/test_einsum.py sharding/test_resharding.py
            sharding/test_shard_map_bodies.py tensor_parallel/test_layers.py
            tensor_parallel/test_nd_training.py test_attention.py test_experts.py
            typed_mode/test_casts.py
            typed_mode/test_programs.py
        """,
        "pages, examples and the checkout": """
            examples test_a_new_operation.py test_benchmarks.py test_compiled_names.py test_docs.py
            test_in_a_notebook.py test_misuse_rows.py test_mutants.py test_packaging.py
            test_quick.py test_readme.py test_scale_page.py test_trainers.py test_tutorial.py
            test_user_programs.py test_collectives_page.py
        """,
        "models that train for many steps, are compiled, or stand beside torch's": """
            collectives/test_registration.py ddp/comm_hooks ddp/test_compiled.py
            ddp/test_complete_losses.py ddp/test_data_parallel.py ddp/test_everyday.py
            ddp/test_grad_norm.py ddp/test_gradient_buckets.py
            ddp/test_join_hook.py ddp/test_invariants.py ddp/test_backward_tracking.py
            ddp/test_misuse.py ddp/test_norm_flags.py ddp/test_openings.py
            ddp/test_divergence_checks.py ddp/test_pipelines.py ddp/test_precision.py
            ddp/test_random_backwards.py ddp/test_shard_checks.py ddp/test_sparse_bucket.py
            ddp/test_states.py ddp/test_sync_batch_norm.py ddp/test_torch_second_opinion.py
            ddp/test_torch_wrapper.py ddp/test_axis_reducer.py ddp/test_extra_axis_groups.py
        """,
    }
)
"""Why files and folders of tests/ are left out -> which."""

PROCESSES = {"pool", "two_hosts"}
"""The fixtures of tests that run on processes."""

OTHER_BACKENDS = {"gloo", "mpi", "nccl", "two hosts", "gloo on two hosts"}


def left_out_paths() -> dict[Path, str]:
    """Each file and folder that is left out -> why."""
    return {TESTS / name: why for why, names in LEFT_OUT.items() for name in names.split()}


def find_backend(item: pytest.Item) -> str | None:
    """The backend, other than shared memory, on whose account a test is left out; None for none."""
    parameters = getattr(item, "callspec", None)
    words = {*parameters.id.split("-")} if parameters is not None else set()
    if backends := words & OTHER_BACKENDS:
        return min(backends)
    if item.get_closest_marker("mpi") is not None:
        return "mpi"
    needed = PROCESSES.intersection(getattr(item, "fixturenames", ()))
    if not needed or "shm" in words or item.path.is_relative_to(TESTS / "backends" / "shm"):
        return None
    return "ranks of the pool over a backend that no parameter names"


class Quick:
    """Chooses the tests, on each worker, and tells at the end what was not chosen."""

    def __init__(self) -> None:
        self.paths = left_out_paths()
        self.by_backend: Counter[str] = Counter()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path in self.paths else None

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        backends = {item: find_backend(item) for item in items}
        left_out = [item for item in items if backends[item] is not None]
        self.by_backend.update(str(backends[item]) for item in left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if backends[item] is None]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["left_out_by_backend"] = dict(self.by_backend)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Hear what a worker of pytest-xdist left out: the same as each other worker."""
        self.by_backend = Counter(getattr(node, "workeroutput", {}).get("left_out_by_backend", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("left out by the quick part; `make test` runs all of it")
        for backend, number in self.by_backend.most_common():
            terminalreporter.write_line(f"{number:6} tests: {backend}")
        for why, names in LEFT_OUT.items():
            number = sum(num_functions(TESTS / name) for name in names.split())
            terminalreporter.write_line(
                f"{number:6} test functions: {why}: {' '.join(names.split())}"
            )


def num_functions(path: Path) -> int:
    """How many test functions the text of a file, or of all files of a folder, has."""
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return sum(len(re.findall(r"^ *def test_", file.read_text(), re.M)) for file in files)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Quick(), "quick part of the suite")
