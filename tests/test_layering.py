"""The plan of the house, checked: who may import whom.

Every file of the package has a place in ``FLOORS``. A module imports only from floors below its
own; inside one folder, only from modules listed before it. Nothing imports in circles, and nothing
touches another module's underscore names: tests, benchmarks and examples neither. Imports inside
functions count, and so do those under ``if TYPE_CHECKING:``, which tell as well who knows of whom.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "meshdist"
INNER = "tests.inner"
BY_STRING = {"getattr", "setattr", "delattr", "hasattr", "patch", "object", "attrgetter"}

# From the ground up. A floor maps its rooms to their modules, bottom-up: a room is a folder, or one
# file that lies directly in the package ("" where several do); ``c10d.gloo`` lies in a folder of
# its room. A folder's __init__ is its top.
FLOORS: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {
        "": (
            "error_text",
            "absent_names",
            "errors",
            "arguments",
            "dtypes",
            "operation_table",
            "reduce_ops",
            "arrays",
        )
    },
    {
        "runtime": (
            "integers",
            "fork_safe_locks",
            "hosts",
            "deadlines",
            "timeout_calls",
            "memory",
            "torch_worlds",
            "torch_hooks",
            "generators",
            "graph_breaks",
        ),
        "launching": (
            "orphan_reaper",
            "stack_dump",
            "launcher_variables",
            "rank_environment",
            "child_processes",
            "failed_ranks",
            "output",
            "launcher",
        ),
        "bootstrap": (
            "schedulers",
            "launch_environment",
            "store_liveness",
            "stores",
            "store_cache",
            "timeout_store",
            "arrival_counters",
            "rendezvous_rounds",
            "world",
            "mpi_library",
            "store_endpoints",
            "init_methods",
        ),
        "checking": (
            "shared_flags",
            "fingerprint_table",
            "debug_levels",
            "call_sites",
            "calls",
            "recorder",
        ),
    },
    {
        "backends": (
            "requests",
            "operation_args",
            "native",
            "native_core",
            "futures",
            "simulated.scheduler",
            "composed_collectives",
            "communicator",
            "registry",
            "work",
            "started_work",
            "messages",
            "c10d.dtype_fallbacks",
            "c10d.fast_path",
            "c10d.communicator",
            "c10d.stream_backends",
            "c10d.gloo_connections",
            "c10d.gloo",
            "c10d.torch_classes",
            "simulated.store",
            "simulated.matching",
            "simulated.communicator",
            "shm.listener",
            "shm.attach",
            "shm.communicator",
            "mpi.datatypes",
            "mpi.connection",
            "mpi.connect",
            "mpi.communicator",
            "backend_names",
            "capabilities",
        )
    },
    {
        "groups": (
            "control_messages",
            "agreement",
            "host_comparison",
            "liveness",
            "communicators",
            "failure_diagnosis",
            "peer_status",
            "device_group",
            "group_methods",
            "process_group",
            "group_calls",
        ),
        "worlds": (
            "late_init",
            "queries",
            "initialization",
            "lazy_init",
            "simulation",
            "spawn_child",
            "spawn",
        ),
        "mesh": (
            "strides",
            "layout_arguments",
            "view",
            "visualize",
            "layout",
            "placement",
            "partition_spec",
            "pattern",
            "pattern_sizes",
            "spec",
            "definition",
            "torch_interop",
            "device_mesh",
            "current_mesh",
            "constructors",
        ),
    },
    {
        "collectives": (
            "registration",
            "torch_private",
            "argument_checks",
            "collective",
            "normalize_args",
            "tensor_collectives",
            "list_collectives",
            "coalesced",
            "point_to_point",
            "object_protocol",
            "objects",
            "value_comparison",
            "breakpoints",
            "monitored_barrier",
            "shared_buffers",
            "flat_sums",
        ),
        "join": (
            "step_flags",
            "join_context",
            "uneven_loops",
        ),
        "annotations": ("axis_types", "tensor_specs"),
        "functional": (
            "equality_checks",
            "linear_function",
            "reductions",
            "data_movement",
            "ring_attention",
        ),
        "typed_mode": (
            "function_rules",
            "type_errors",
            "step_checks",
            "provenance",
            "detail_checks",
            "casts",
            "context",
            "module_annotations",
            "annotations",
            "gradients",
            "collective_calls",
            "custom_functions",
            "random_draws",
            "mode",
        ),
        "lax": ("axes", "reductions", "data_movement", "equality_checks"),
        "experts": ("experts",),
    },
    {
        "torch_process_groups": (
            "inner_group",
            "works",
            "backend_group",
            "functional_ops",
            "construction",
            "backend_registration",
        ),
        "sharding": (
            "steps",
            "placement_diff",
            "lowering",
            "routes",
            "refinement",
            "plans",
            "einsum_layouts",
            "planner",
            "executor",
            "descriptions",
            "like_tensor",
            "resharding",
            "rematerialization",
            "deferred_reductions",
            "array_methods",
            "elementwise",
            "sharded_array",
            "array_creation",
            "einsum",
            "api",
            "shard_map_specs",
            "shard_mapping",
            "dtensors",
        ),
    },
    {
        "ddp": (
            "reduction",
            "extra_axis_groups",
            "axis_reducer",
            "norm_flags",
            "grad_norm",
            "replicas",
            "expected_gradients",
            "gradient_errors",
            "device_streams",
            "autograd_engines",
            "status_flags",
            "buckets",
            "unbucketed_gradients",
            "bucket_layout",
            "gradient_buckets",
            "comm_hooks.bucket",
            "comm_hooks.compression",
            "comm_hooks.registered_hooks",
            "backward_outcome",
            "backward",
            "gradient_hooks",
            "backward_tracking",
            "precision",
            "model_checks",
            "divergence_checks",
            "shard_checks",
            "accumulation",
            "reducer",
            "torch_methods",
            "join_hook",
            "data_parallel",
            "sampler",
            "sync_batch_norm",
            "model_averagers",
        ),
        "optim": ("muon", "grad_scaler"),
        "tensor_parallel": (
            "layers",
            "losses",
            "plan_styles",
            "plan_checks",
            "plan_warnings",
            "example_check",
            "whole_layers",
            "parallelize",
        ),
        "checkpoint": (
            "pieces",
            "manifest",
            "files",
            "participants",
            "trees",
            "save_jobs",
            "pending_saves",
            "saving",
            "reader",
            "loading",
            "state",
            "checkpointer",
            "preemption",
        ),
        "attention": ("attention",),
        "torch_backends": ("torch_backends",),
    },
    {"bench": ("sides", "worker", "measurement", "reports")},
    {
        "cli": (
            "torchrun_flags",
            "flags",
            "diagnostics",
            "run",
            "bench",
            "doctor",
            "main",
        )
    },
    {
        "launch": ("launch",),
        "__main__": ("__main__",),
        "": ("lazy_names", "distributed"),
    },
)
# On these floors a folder may also import from the folders listed above it there.
STACKED_FLOORS = (1, 3, 4)

# Private attributes of torch's objects that share their name with one of ours.
TORCH_ATTRIBUTES = {  # of a process group and its options, of a Work, of a tensor, of a module
    ("meshdist.collectives.argument_checks", "_base"),
    ("meshdist.runtime.torch_worlds", "_world"),
    ("meshdist.ddp.replicas", "_buffers"),
    ("meshdist.ddp.precision", "_parameters"),
    ("meshdist.backends.c10d.communicator", "_source_rank"),
    ("meshdist.backends.c10d.stream_backends", "_source_rank"),
    ("meshdist.backends.c10d.torch_classes", "_timeout"),
    ("meshdist.backends.c10d.torch_classes", "_devices"),
    ("meshdist.backends.c10d.gloo", "_timeout"),
}


@dataclass(frozen=True)
class Place:
    """Where a module stands: its floor, its room there, and its height in the room."""

    floor: int
    room: str
    height: int


def places() -> dict[str, Place]:
    """Return the place of every module of the plan."""
    found = {PACKAGE: Place(len(FLOORS), "", 0)}
    for floor, rooms in enumerate(FLOORS):
        height = 0
        for room, modules in rooms.items():
            stack = ", ".join(rooms) if floor in STACKED_FLOORS else room
            is_folder = room not in ("", *modules)
            prefix = f"{PACKAGE}.{room}" if is_folder else PACKAGE
            for module in modules:
                found[f"{prefix}.{module}"] = Place(floor, stack, height)
                height += 1
            if is_folder:
                for folder in {f"{prefix}.{module}".rpartition(".")[0] for module in modules}:
                    found[folder] = Place(floor, stack, height)
                height += 1
                found[prefix] = Place(floor, stack, height)
                height += 1
    return found


# -- what a module imports ----------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One import of a module of the package: the line, the module, and the name taken from it."""

    line: int
    module: str
    name: str | None


def is_private(name: str) -> bool:
    """Return whether ``name`` is private; ``_``, ``__dunder__`` and ``_repr_svg_`` are not."""
    return name.startswith("_") and not name.endswith("_")


def name_called(node: ast.Call) -> str:
    """Return the last word of the function that ``node`` calls."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def nodes_of(text: str) -> list[ast.AST]:
    """Return all nodes of a source, walked once for all rules: a walk takes longer than they do."""
    return [*ast.walk(ast.parse(text))]


def imports_of(
    module: str, nodes: list[ast.AST], modules: set[str], is_package: bool
) -> list[Import]:
    """Return the imports of the package's own modules among ``nodes``."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    found.append(Import(node.lineno, alias.name, None))
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = module.split(".")
                above = parts[: len(parts) - node.level + is_package]
                origin = ".".join([*above, origin] if origin else above)
            if origin.split(".")[0] != PACKAGE:
                continue
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                if inner in modules:
                    found.append(Import(node.lineno, inner, None))
                else:
                    found.append(Import(node.lineno, origin, alias.name))
        elif isinstance(node, ast.Call) and node.args:
            called = name_called(node)
            target = node.args[0]
            name = str(target.value) if isinstance(target, ast.Constant) else ""
            if called in ("import_module", "__import__") and name.split(".")[0] == PACKAGE:
                found.append(Import(node.lineno, name, None))
    return found


# -- the rules ----------------------------------------------------------------------------------


def direction_faults(module: str, imports: list[Import], plan: Mapping[str, Place]) -> list[str]:
    """Return one line for each import that does not go down."""
    faults = []
    here = plan[module]
    for item in imports:
        there = plan.get(item.module)
        if there is None:
            why = "which has no floor"
        elif there.floor > here.floor:
            why = f"which is up: floor {there.floor} from floor {here.floor}"
        elif there.floor < here.floor:
            continue
        elif there.room != here.room:
            why = f"another room of the same floor {here.floor}"
        elif there.height >= here.height:
            why = f"which is not listed below it in {here.room or PACKAGE}"
        else:
            continue
        faults.append(f"{module}:{item.line} imports {item.module}, {why}")
    return faults


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Return every name that a module defines or assigns, attributes and methods included."""
    names = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names.update([node.attr] if is_own else [])
    return names


def owners_of(all_nodes: Mapping[str, list[ast.AST]]) -> dict[str, set[str]]:
    """Return which modules define each underscore name."""
    owners: dict[str, set[str]] = {}
    for module, nodes in all_nodes.items():
        for name in filter(is_private, own_names(nodes)):
            owners.setdefault(name, set()).add(module)
    return owners


def root_of(node: ast.expr) -> str:
    """Return the name that a chain of attributes, calls and indices starts with, or ""."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def spelled_faults(where: str, nodes: list[ast.AST], owners: Mapping[str, set[str]]) -> list[str]:
    """Return one line for each private name that is reached by a string: ``getattr(x, "_y")``."""
    return [
        f"{where}:{node.lineno} spells {name}, a private name of {', '.join(sorted(owners[name]))}"
        for node in nodes
        if isinstance(node, ast.Call) and name_called(node) in BY_STRING
        for word in node.args
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
        for path in [word.value.split(".")]  # patch("meshdist.x._y")
        for name in path[-1:]
        if name in owners and path[:-1] in ([], *[module.split(".") for module in owners[name]])
    ]


def underscore_faults(
    module: str,
    nodes: list[ast.AST],
    imports: list[Import],
    owners: Mapping[str, set[str]],
) -> list[str]:
    """Return one line for each underscore name of another module that ``nodes`` touch.

    ``owners`` tells which modules define a private name. An attribute counts as another module's
    when it hangs on something imported from the package, or when others define the name, this
    module does not, and it hangs on nothing from outside the package.
    """
    faults = [
        f"{module}:{item.line} imports {item.name}, a private name of {item.module}"
        for item in imports
        if item.name is not None and is_private(item.name)
    ]
    ours = {PACKAGE}
    foreign: set[str] = set()
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = getattr(node, "module", None) or ""
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                root = origin if isinstance(node, ast.ImportFrom) else alias.name
                top = root.split(".")[0]
                if getattr(node, "level", 0) or top == PACKAGE or root == INNER:
                    ours.add(bound)
                elif top != "tests":
                    foreign.add(bound)
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        name, root, others = node.attr, root_of(node), owners.get(node.attr, set())
        if root in foreign or module in others or (module, name) in TORCH_ATTRIBUTES:
            continue
        if root in ours or (others and root not in ("self", "cls")):
            whose = ", ".join(sorted(others)) or root
            faults.append(f"{module}:{node.lineno} touches {name}, a private name of {whose}")
    return faults


def circle_faults(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one line that names a circle of imports, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["imports in a circle: " + " <- ".join(error.args[1])]
    return []


def find_faults(sources: Mapping[str, str], plan: Mapping[str, Place]) -> list[str]:
    """Return every breach of the plan in ``sources``, a mapping of module name to its text."""
    modules = set(sources)
    packages = {name.rpartition(".")[0] for name in modules}
    all_nodes = {module: nodes_of(text) for module, text in sources.items()}
    owners = owners_of(all_nodes)
    faults, graph = [], {}
    for module, nodes in sorted(all_nodes.items()):
        if module not in plan:
            faults.append(f"{module} has no floor: give it a place in FLOORS")
            continue
        imports = imports_of(module, nodes, modules, module in packages)
        graph[module] = {item.module for item in imports}
        faults += direction_faults(module, imports, plan)
        faults += underscore_faults(module, nodes, imports, owners)
    return list(dict.fromkeys(faults + circle_faults(graph)))


@cache
def package_sources() -> dict[str, str]:
    """Return the text of every module of the package, by its dotted name."""
    sources = {}
    folder = ROOT / PACKAGE
    # A stub stands for a module that has no Python.
    for path in [*sorted(folder.rglob("[!_]*.pyi")), *sorted(folder.rglob("*.py"))]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


# -- the package --------------------------------------------------------------------------------


def test_the_package_keeps_to_the_plan() -> None:
    faults = find_faults(package_sources(), places())
    assert not faults, "\n" + "\n".join(faults)


def test_the_plan_lists_what_exists() -> None:
    assert sorted(places()) == sorted(set(package_sources()))


def test_the_front_door_imports_nothing_of_the_package_before_it_is_asked() -> None:
    for listener in (PACKAGE, f"{PACKAGE}.distributed", f"{PACKAGE}.lazy_names"):
        tree = ast.parse(package_sources()[listener])
        later = (ast.FunctionDef, ast.ClassDef)
        eager = [node for node in tree.body if not isinstance(node, later)]
        nodes = [*ast.walk(ast.Module(body=eager, type_ignores=[]))]
        imports = imports_of(
            listener, nodes, set(package_sources()), is_package=listener == PACKAGE
        )
        assert {item.module for item in imports} <= {f"{PACKAGE}.lazy_names"}


# What takes data and gives data: what these rooms promise is told by their values alone.
PURE = {
    f"{PACKAGE}.{room}.{name}" if room else f"{PACKAGE}.{name}"
    for room, names in {
        "": "arguments arrays dtypes error_text reduce_ops operation_table",
        "annotations": "axis_types",
        "checking": "calls",
        "ddp": "bucket_layout history reduction",
        "mesh": "drawing layout layout_arguments partition_spec pattern pattern_sizes placement "
        "spec strides view",
        "sharding": "change_steps changes plans refinement routes steps",
    }.items()
    for name in names.split()
}
FRONT_DOOR = {PACKAGE} | {
    f"{PACKAGE}.{name}"
    for name in ("attention", "distributed", "errors", "experts", "launch", "lax", "torch_backends")
}
# Forked ranks, of torch's own suite and of ours, have the first two from their parent; the core is
# a unit of its own.
PRELOADED = {
    f"{PACKAGE}.{name}"
    for name in ("torch_process_groups.construction", "checkpoint", "backends.native")
}


def inner_imports(path: Path, text: str) -> list[str]:
    """Return a line for each import of an inner room by a test of another room."""
    folder = path.parent.parts[1:]
    own = ".".join((PACKAGE, *folder)) + "." if folder else f"{PACKAGE}."
    inner = set(package_sources()) - PURE - FRONT_DOOR - PRELOADED
    nodes = nodes_of(text)
    reached = [
        (item.line, item.module)
        for item in imports_of("tests", nodes, set(package_sources()), is_package=False)
    ]
    for node in nodes:  # monkeypatch.setattr("meshdist.backends.registry.get_wire", ...)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            target = node.args[0]
            if isinstance(target, ast.Constant):
                reached.append((node.lineno, str(target.value).rpartition(".")[0]))
    return [
        f"{path}:{line} reaches {module}: let it come from tests.inner"
        for line, module in reached
        if module in inner and not (folder and f"{module}.".startswith(own))
    ]


def test_tests_of_other_rooms_come_by_the_front_door() -> None:
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("*.py"))]
    faults = [
        fault
        for path in paths
        if path != Path("tests/inner.py")
        for fault in inner_imports(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not faults, "\n" + "\n".join(faults)


OWNERS = {
    "_x": {"meshdist.ground"},
    "_z": {"meshdist.ground"},
    "_set_static_graph": {"meshdist.ddp.torch_methods"},
}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import meshdist\nmeshdist.ground._z", ":2 touches _z"),
        ("from meshdist.ground import _z", ":1 imports _z, a private name of meshdist.ground"),
        ("from meshdist import ground\nground._z = 1", ":2 touches _z"),
        ("from tests.inner import ground\nground.f()[0]._z", ":2 touches _z"),
        ("from tests.inner import ground\nground._x", ":2 touches _x"),
        ("def f(c):\n    return c._x", ":2 touches _x, a private name of meshdist.ground"),
        ('patch("meshdist.ground._x")', ":1 spells _x, a private name of meshdist.ground"),
        ('mock.patch.object(ground, "_x")', ":1 spells _x"),
        ('monkeypatch.setattr(thing, "_x", 1)', ":1 spells _x"),
        ('getattr(thing, "_x")', ":1 spells _x"),
    ],
)
def test_a_private_name_in_a_test_is_found(text: str, fault: str) -> None:
    (found,) = private_uses("tests/test_x.py", text, OWNERS)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        "import os, torch\nos._exit(torch._C._x)",
        "import meshdist\nmeshdist.DDP._set_static_graph",  # as torch's class has it
        'getattr(model, "_set_static_graph")',
        "note._replace(y=1)",
        "class A:\n    _x = 1\n\nA()._x",
        'print("_x")',
        'monkeypatch.setattr(thing, "x", 1)',
        "import meshdist\nmeshdist.Mesh()._repr_svg_()",
    ],
)
def test_other_names_in_a_test_are_its_own_business(text: str) -> None:
    assert private_uses("tests/test_x.py", text, OWNERS) == []


def test_an_import_of_another_room_is_found() -> None:
    text = "import meshdist as md\nfrom meshdist.backends.shm import listener\n"
    assert inner_imports(Path("tests/backends/shm/test_listener.py"), text) == []
    for path in (Path("tests/ddp/test_buckets.py"), Path("tests/test_kills.py")):
        assert inner_imports(path, text) == [
            f"{path}:2 reaches meshdist.backends.shm.listener: let it come from tests.inner"
        ]
    patched = 'patch.setattr("meshdist.runtime.hosts.PIDS", ())\n'
    assert inner_imports(Path("tests/runtime/test_hosts.py"), patched) == []
    assert len(inner_imports(Path("tests/test_kills.py"), patched)) == 1
    assert inner_imports(Path("tests/test_x.py"), "from meshdist.mesh.layout import Layout") == []


# Whose private names programs use, and tests may.
MIRRORED = (
    DistributedDataParallel,
    dist.ProcessGroupGloo._Options,
    DeviceMesh,
    dist.ProcessGroup,
    dist.Work,
    dist.Store,
    dist.Reducer,
    torch.Tensor,
)
TORCH_NAMES = {name for mirrored in (*MIRRORED, torch.nn.Module()) for name in dir(mirrored)}


def private_uses(where: str, text: str, owners: Mapping[str, set[str]]) -> list[str]:
    """Return a line for each underscore name of the package that a text touches or spells."""
    if not owners.keys() & {*re.findall(r"\b_\w+", text)} - TORCH_NAMES:
        return []  # as is seen without parsing most texts
    nodes = [node for node in nodes_of(text) if getattr(node, "attr", "") not in TORCH_NAMES]
    own = own_names(nodes)
    others = {name: modules for name, modules in owners.items() if name not in own | TORCH_NAMES}
    imports = imports_of(where, nodes, set(package_sources()), is_package=False)
    return [
        *underscore_faults(where, nodes, imports, others),
        *spelled_faults(where, nodes, others),
    ]


def test_tests_touch_no_private_name_of_the_package() -> None:
    owners = owners_of({module: nodes_of(text) for module, text in package_sources().items()})
    paths = (
        path
        for folder in ("tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    )
    faults = [
        fault
        for path in sorted(paths)
        for fault in private_uses(
            str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"), owners
        )
    ]
    assert not faults, "\n" + "\n".join(faults)


LIGHT = [PACKAGE, f"{PACKAGE}.error_text", f"{PACKAGE}.launching.launcher", f"{PACKAGE}.cli.main"]
LIGHT += [name for name in package_sources() if f"{PACKAGE}.cli." in name and name not in LIGHT]


@pytest.mark.parametrize("module", LIGHT)
def test_launcher_and_command_line_start_light(module: str) -> None:
    code = (
        f"import {module}, sys\n"
        f"print(*[m for m in ('torch', 'numpy', '{PACKAGE}.errors') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


# -- the checker itself -------------------------------------------------------------------------

PLAN = {
    "meshdist": Place(3, "", 0),
    "meshdist.ground": Place(0, "", 0),
    "meshdist.low": Place(1, "low", 2),
    "meshdist.low.first": Place(1, "low", 0),
    "meshdist.low.second": Place(1, "low", 1),
    "meshdist.left.thing": Place(2, "left", 0),
    "meshdist.right.thing": Place(2, "right", 0),
}


def faults_of(**sources: str) -> list[str]:
    """Check made-up modules: ``left__thing`` stands for ``meshdist.left.thing``."""
    blank = dict.fromkeys(PLAN, "")
    named = {f"{PACKAGE}.{name.replace('__', '.')}": text for name, text in sources.items()}
    return find_faults(blank | named, PLAN)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("left__thing", "from meshdist.low.first import f\nimport meshdist.ground"),
        ("left__thing", "def f():\n    from ..low import second\n    return second"),
        ("low__second", "from .first import f"),
        ("low__first", "import torch\ntorch._C._private()"),
        ("low__first", "class A:\n    def f(self, other):\n        return self._x + other._x"),
        ("low__first", "from meshdist import ground\nground.__doc__"),
    ],
)
def test_the_checker_accepts(where: str, text: str) -> None:
    assert faults_of(**{where: text}) == []


@pytest.mark.parametrize(
    ("where", "text", "fault"),
    [
        ("low__first", "import meshdist.left.thing", "floor 2 from floor 1"),
        ("low__first", "from ..left import thing", "floor 2 from floor 1"),
        ("low__first", "def f():\n    from meshdist.left.thing import g", ":2 imports"),
        ("low__first", "from meshdist import simulate", "imports meshdist, which is up"),
        ("low__first", "if TYPE_CHECKING:\n    import meshdist", "imports meshdist, which is up"),
        ("low__first", "import importlib\nimportlib.import_module('meshdist')", "which is up"),
        ("low__first", "from . import second", "not listed below it in low"),
        ("low__first", "from .first import f", "not listed below it in low"),
        ("left__thing", "from meshdist.right.thing import f", "another room of the same floor 2"),
        ("left__thing", "from meshdist.cellar import f", "which has no floor"),
        ("attic", "", "meshdist.attic has no floor"),
        ("left__thing", "from meshdist.ground import _f", "imports _f, a private name of"),
        ("left__thing", "from meshdist import ground as g\ng._f()", "touches _f, a private name"),
        ("left__thing", "from meshdist.ground import C\nC()\nC._f()", ":3 touches _f"),
    ],
)
def test_the_checker_finds(where: str, text: str, fault: str) -> None:
    faults = faults_of(**{where: text})
    assert len(faults) >= 1
    assert fault in faults[0]


def test_the_checker_finds_private_attributes_of_instances() -> None:
    owner = "class C:\n    def __init__(self):\n        self._x = 1"
    (fault,) = faults_of(ground=owner, left__thing="def f(c):\n    return c._x")
    assert fault == "meshdist.left.thing:2 touches _x, a private name of meshdist.ground"


def test_the_checker_finds_circles() -> None:
    faults = faults_of(
        left__thing="import meshdist.right.thing", right__thing="from ..left import thing"
    )
    assert faults[-1].startswith("imports in a circle: meshdist.")
