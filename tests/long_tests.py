"""Tests that `make soak` runs and `make test` does not: long ones whose law a shorter test holds.

Each took 1 to 20 s of CPU, of some 1,300 s of the whole suite. Beside it stands the test that `make
test` runs of the same law.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

_EINSUM = "sharding/test_einsum_oracle.py::test_values_and_gradients_are_those_of_one_device"
_COMPILED = "tensor_parallel/test_compiled.py::test_a_compiled_model_has_the_numbers_of_one_device"

HELD_BY: dict[str, str] = {
    # -- whole programs, started as new interpreters
    "checkpoint/test_preemption.py::test_torchrun_starts_again_what_has_lost_a_rank": (
        "checkpoint/test_preemption.py::test_the_example_goes_on_on_other_ranks"
    ),
    "examples/test_torch_programs.py::test_launched[two]": (
        "examples/test_torch_programs.py::test_shm_gives_what_gloo_gives"
    ),
    "test_engines.py::test_the_ranks_of_kubeflow_s_variables[None]": (
        "test_engines.py::test_the_ranks_of_kubeflow_s_variables[is killed]"
    ),
    "test_over_two_hosts.py::test_a_wrapper_and_a_lost_rank_under_a_launcher[torchrun]": (
        "test_over_two_hosts.py::test_a_wrapper_and_a_lost_rank_under_a_launcher[meshdist]"
    ),
    "test_over_two_hosts.py::test_the_demo": "examples/test_train_lm.py::test_on_two_processes",
    "worlds/test_endings.py::test_a_rank_that_returns_ends_in_good_order[shm-spawned]": (
        "worlds/test_endings.py::test_a_rank_that_returns_ends_in_good_order[shm-fork]"
    ),
    "cli/test_diagnostics.py::test_torchs_own_world_over_shared_memory": (
        "torch_process_groups/test_backend_registration.py"
    ),
    "cli/test_doctor.py::test_backends_that_are_well": (
        "cli/test_doctor.py::test_a_backend_that_fails_its_check"
    ),
    "cli/test_bench.py::test_on_80_columns_names_are_whole_and_mpi_starts_as_any_user": (
        "cli/test_bench.py::test_a_rank_that_ends_while_it_is_measured"
    ),
    "cli/test_bench.py::test_strangers_that_connect_are_no_ranks": (
        "cli/test_bench.py::test_a_rank_that_ends_while_it_is_measured"
    ),
    "examples/test_notebook.py::test_the_notebook_shows_what_it_was_written_with": (
        "test_in_a_notebook.py::test_cells"
    ),
    "test_user_programs.py::test_pyright": "test_user_programs.py::test_mypy",
    # -- tests of the tests and of development's own tools
    "test_benchmarks.py::test_the_structure_of_this_checkout_is_counted": "test_benchmarks.py",
    "test_mutants.py::test_a_new_statement_leaves_most_of_the_draw_as_it_was": "test_mutants.py",
    "test_mutants.py::test_a_run_against_another": "test_mutants.py",
    "test_mutants.py::test_the_draw_gives_each_room_its_share": "test_mutants.py",
    "test_pool.py::test_workers_that_spin_end_with_a_killed_test_session": (
        "test_pool.py::test_programs_end_as_programs_do"
    ),
    # -- further numbers of ranks, shapes of meshes and placements of hosts
    "bootstrap/test_init_methods.py::test_a_hundred_worlds_in_one_file": (
        "bootstrap/test_init_methods.py::test_a_hundred_worlds_at_one_tcp_address"
    ),
    "groups/test_dropped_groups.py::test_forty_dropped_meshes_hold_no_more_than_two[mpi-2]": (
        "groups/test_dropped_groups.py::test_forty_dropped_meshes_hold_no_more_than_two[shm-2]"
    ),
    "mesh/test_torch_interop.py::test_in_the_default_world[False]": (
        "mesh/test_torch_interop.py::test_in_the_default_world[True]"
    ),
    **{
        f"backends/{test}[{num_ranks}]": f"backends/{test}[3]"
        for test in (
            "c10d/test_fast_path.py::test_reductions_give_the_same_bits",
            "c10d/test_fast_path.py::test_moves_give_the_same_bits",
        )
        for num_ranks in (2, 5)
    },
    **{
        f"{_EINSUM}{shape}": f"{_EINSUM}[(2, 2, 2)]"
        for shape in ("[(2,)]", "[(3,)]", "[(2, 2)]", "[(4, 2)]", "[(2, 1, 3)]", "[(2, 2, 4)]")
    },
    **{
        f"examples/test_long_context.py::test_it_checks_itself[more1-{way}-4]": (
            f"examples/test_long_context.py::test_it_checks_itself[more1-{way}-2]"
        )
        for way in ("ring", "heads")
    },
    **{
        f"{_COMPILED}[2-{case}]": f"{_COMPILED}[2-plan0-False]"
        for case in ("plan0-True", "plan1-False")
    },
}


def is_named(test: pytest.Item, name: str) -> bool:
    """Whether ``name`` is that of a test, of its file, or of it without its parameters."""
    own = test.nodeid.removeprefix("tests/")
    return own == name or own.partition("[")[0] == name or own.partition("::")[0] == name


def mark_long(tests: Iterable[pytest.Item]) -> None:
    """Leave the long tests to `make soak`."""
    for test in tests:
        if any(is_named(test, name) for name in HELD_BY):
            test.add_marker(pytest.mark.soak)
