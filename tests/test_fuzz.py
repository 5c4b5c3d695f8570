"""Whatever reads text of others, given junk and near-valid text, answers or raises as it says.

Each reader is called with inputs that are drawn with a seed from valid ones: some characters or
fields are changed, moved, repeated or left out. It may return, or raise one of its errors; any
other exception fails the test, and so does an input that takes long.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import string
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import meshdist as md
from meshdist.arguments import check_timeout
from meshdist.distributed import HashStore
from meshdist.errors import MeshdistError
from meshdist.mesh.layout import Layout
from tests.inner import (
    LaunchError,
    ProcessInfo,
    World,
    bench,
    debug_levels,
    find_integer,
    find_local_size,
    find_mpi_problem,
    first_host,
    flags as cli_arguments,
    init_methods,
    main as cli,
    my_process_info,
    parse_backends,
    read_launch_environment,
    read_local_rank,
    run,
    store_endpoints,
    stores,
    world_here,
)

LONGEST_S = 5.0  # of one input, beside busy processes
SHOWN = 2000

ODD = (
    *(
        "²",
        "٣",
        "½",
        "Ⅷ",
        "\N{FULLWIDTH DIGIT ONE}",
        "\udcff",
        "\0",
        "\n",
        "\r",
        "\t",
        " ",
        "\u2028",
    ),
    *("-1", "+1", "1_0", "0x1", "1e309", "NaN", "Infinity", "null", "true", "-0", "00", "1.5"),
    *("9" * 20, "9" * 5000, "[" * 2000, "{", "}", "]", '"', "'", "\\", "\\u", ":", "//", "@", "%"),
    *("::1", "[::1]", "localhost", "..", "a" * 300, "xn--", ",", ",,", "=", "?rank=", "&", "#", ""),
)


def changed(text: str, rng: random.Random) -> str:
    """The text with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        end = min(end, at + 8)
        kind = rng.randrange(6)
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:at] + rng.choice(ODD) + text[end:]
        elif kind == 2:
            text = text[:at] + rng.choice(string.printable) + text[at + 1 :]
        elif kind == 3:
            text = (
                text[:at] + chr(rng.choice((rng.randrange(256), rng.randrange(0xD800)))) + text[at:]
            )
        elif kind == 4:
            text = text[:end] + text[at:]
        else:
            text = text[:at] + text[at:end][::-1] + text[end:]
    return text[:20000]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(string.printable + "²٣é", k=rng.randrange(30)))


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """A plain value of JSON, or what a program may pass by mistake."""
    simple: tuple[Any, ...] = (
        *(None, True, False, 0, -1, 1, 2, 3, 1 << 31, 1 << 64, 10**400, -(10**30)),
        *(0.5, float("nan"), float("inf"), 1e308, "", "dp", "²", "\udcff", "a b", "1", b"x", 1j),
    )
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 6:
        return rng.choice(simple)
    values = [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return values if kind == 6 else {rng.choice(("a", "dp", 0, None)): one for one in values}


def changed_value(value: Any, rng: random.Random) -> Any:
    """A value of JSON with one place replaced, left out, repeated or added."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []

    def collect(inside: Any) -> None:
        keys: Iterable[Any] = ()
        if isinstance(inside, dict):
            keys = list(inside)
        elif isinstance(inside, list):
            keys = range(len(inside))
        for key in keys:
            places.append((inside, key))
            collect(inside[key])

    collect(value)
    if not places or rng.randrange(20) == 0:
        return any_value(rng)
    inside, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, list):
        inside.insert(key, inside[key])
    elif kind == 2 and isinstance(inside, dict):
        inside[rng.choice(("more", "", "pid", "rank"))] = any_value(rng)
    else:
        inside[key] = any_value(rng)
    return value


@dataclass(frozen=True)
class Reader:
    """What reads, and how its inputs are drawn.

    Args:
        draw: makes an input.
        read: is called with it.
        errors: what it may raise.
    """

    draw: Callable[[random.Random], Any]
    read: Callable[[Any], object]
    errors: tuple[type[BaseException], ...] = (MeshdistError,)


def texts(*valid: str) -> Callable[[random.Random], str]:
    def draw(rng: random.Random) -> str:
        return random_text(rng) if rng.randrange(8) == 0 else changed(rng.choice(valid), rng)

    return draw


def records(*valid: Any) -> Callable[[random.Random], bytes]:
    """Bytes of JSON, of which a value or a character is changed."""

    def draw(rng: random.Random) -> bytes:
        value = rng.choice(valid)
        if rng.randrange(2):
            value = changed_value(value, rng)
            return json.dumps(value, default=repr, skipkeys=True).encode()
        return changed(json.dumps(value), rng).encode(errors="surrogateescape")

    return draw


# -- environment variables ------------------------------------------------------------------------

ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"},
    {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "29500",
        "MASTER_ADDR": "127.0.0.1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "GROUP_WORLD_SIZE": "1",
    },
    {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host-77@1",
    },
    {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"},
    {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "4",
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "2",
        "SLURM_JOB_NODELIST": "gpu[07-09],login",
    },
    {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "1", "PMI_RANK": "1"},
    {"PMIX_RANK": "1", "WORLD_SIZE": "4"},
    {"NODE_RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"},
    {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": "7"},
)


def environment(rng: random.Random) -> dict[str, str]:
    found = dict(rng.choice(ENVIRONMENTS))
    if rng.randrange(10) == 0:
        found.update(rng.choice(ENVIRONMENTS))
    for name in rng.sample(sorted(found), rng.randint(1, 2)):
        if rng.randrange(4) == 0:
            del found[name]
        else:
            found[name] = changed(found[name], rng).replace("\0", "")
    return found


def read_environment(variables: Mapping[str, str]) -> None:
    find_local_size(variables)
    for is_mpi_asked in (False, True):
        with contextlib.suppress(MeshdistError):
            found = read_launch_environment(variables, is_mpi_asked=is_mpi_asked)
            assert 0 <= found.rank < found.size
    with contextlib.suppress(MeshdistError):
        assert read_local_rank(variables) >= 0


def in_environment(name: str, read: Callable[[], object]) -> Callable[[str], object]:
    def read_it(text: str) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, text.replace("\0", ""))
            return read()

    return read_it


# -- URLs, files, command lines -------------------------------------------------------------------


class Reached(MeshdistError):
    """What lies behind the reader was reached."""


def reject(*_: object, **__: object) -> None:
    raise Reached("reached")


def read_url(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect_store", "serve_store", "bind_listener"):
            patch.setattr(store_endpoints, name, reject)
        patch.setattr(init_methods, "read_launch_environment", reject)
        patch.setattr(init_methods, "open_file", reject)
        for rank, size in ((-1, -1), (0, 2), (1, 2)):
            with contextlib.suppress(MeshdistError):
                terms = init_methods.InitArguments(url, rank, size, timeout=timedelta(seconds=1))
                init_methods.meet(terms)


def read_command_line(words: str) -> object:
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr(cli_arguments, "run_processes", reject)
        patch.setattr(run.os, "execve", reject)
        patch.setattr(bench, "measure", reject)
        return cli.main(words.split(" "))


# -- what programs pass ---------------------------------------------------------------------------


def mesh_inputs(rng: random.Random) -> dict[str, Any]:
    valid = rng.choice(
        (
            {"shape": [2, 4], "names": ["dp", "tp"], "ranks": [[0, 1], [2, 3]]},
            {"shape": [1], "names": ["dp"], "ranks": [0]},
        )
    )
    more = {
        "axes": rng.choice((0, "dp", ["tp", "dp"], [1, 0])),
        "modes": [[[2, 4]], [[4, 1]]],
        "options": {"dp": "gloo"},
        "timeout": None,
        "device": "cpu",
    }
    found = changed_value({**valid, **more}, rng)
    return {**valid, **more, **(found if isinstance(found, dict) else {"shape": found})}


def read_mesh_inputs(given: Mapping[str, Any]) -> None:
    layout = Layout.from_shape((2, 4), ("dp", "tp"))
    axes, names, device = given["axes"], given["names"], given["device"]
    for make in (
        lambda: Layout.from_shape(given["shape"], names, world_size=8),
        lambda: Layout.from_shape(given["shape"], names),
        lambda: Layout.from_ranks(given["ranks"], names),
        lambda: Layout(given["modes"], names),
        lambda: layout.transpose(axes),
        lambda: layout.axis_index(axes),
        lambda: md.DeviceMesh(device, given["ranks"], mesh_dim_names=names),
        lambda: md.init_device_mesh(device, given["shape"], mesh_dim_names=names),
        lambda: md.init_device_mesh("cpu", (1,), backend_override=given["options"]),
        lambda: md.init_device_mesh("cpu", (1,), axis_options=given["options"]),
        lambda: md.AxisOptions(timeout=given["timeout"], backend=given["names"]),
    ):
        with (
            contextlib.suppress(MeshdistError),
            world_here(World(0, 1, HashStore(), {"cpu": "shm"})),
        ):
            make()


def value(rng: random.Random) -> Any:
    return any_value(rng)


def timeout(rng: random.Random) -> Any:
    if rng.randrange(2):
        return any_value(rng)
    with contextlib.suppress(OverflowError):
        return timedelta(days=rng.choice((-1, 0, 1, 10**6, 10**9)), seconds=rng.random() * 1e9)
    return timedelta.max


def readers(folder: Path) -> dict[str, Reader]:
    process_info = my_process_info().to_json()
    no_store = stores.inherited_listener
    system_errors = (MeshdistError, SystemExit, LaunchError)
    return {
        "launchers' variables": Reader(environment, read_environment),
        "host lists": Reader(
            texts("gpu[007-010,12],login1", "rack[2-4]-node[01-16]", "a.b-c_d"),
            first_host,
            (ValueError,),
        ),
        "integers": Reader(texts("12", "0", "9223372036854775807"), find_integer),
        "an inherited socket": Reader(texts("3", "17"), lambda text: no_store(text, 1)),
        "the debug level": Reader(
            texts("DETAIL", "info", "OFF"),
            in_environment("TORCH_DISTRIBUTED_DEBUG", debug_levels.set_debug_level_from_env),
        ),
        "the local rank": Reader(texts("3"), in_environment("LOCAL_RANK", md.get_node_local_rank)),
        "mpiexec's number of ranks": Reader(
            texts("4"), in_environment("OMPI_COMM_WORLD_SIZE", find_mpi_problem)
        ),
        "URLs": Reader(
            texts(
                *("env://", "tcp://127.0.0.1:29500", "tcp://host:1?rank=0&world_size=2"),
                *("file:///tmp/meeting", "tcp://[::1]:7", "file://localhost/a?world_size=3"),
            ),
            read_url,
        ),
        "process cards": Reader(
            lambda rng: changed_value(process_info, rng),
            lambda found: isinstance(found, dict) and ProcessInfo.from_json(found),
            (ValueError,),
        ),
        "backends": Reader(texts("cpu:gloo,cuda:nccl", "gloo", "mpi"), parse_backends),
        "timeouts": Reader(timeout, check_timeout),
        "meshes": Reader(mesh_inputs, read_mesh_inputs),
        "command lines": Reader(
            texts(
                *("run -n 4 --master-port 29500 script.py", "launch --nproc-per-node=2 x.py"),
                *(
                    "run --launcher mpi -n 2 --mpi-args=--x x.py",
                    "bench --sizes 8,64 -n 2",
                    "rum",
                ),
            ),
            read_command_line,
            system_errors,
        ),
    }


NAMES = sorted(readers(Path()))


def check(name: str, folder: Path, count: int) -> None:
    reader = readers(folder)[name]
    rng = random.Random(name)
    for _ in range(count):
        given = reader.draw(rng)
        begin = time.monotonic()
        try:
            reader.read(given)
        except reader.errors:
            pass
        except BaseException as error:
            shown = repr(given)[:SHOWN]
            raise AssertionError(f"{name}: {type(error).__name__}: {error}, for {shown}") from error
        assert time.monotonic() - begin < LONGEST_S, repr(given)[:SHOWN]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_junk_ends_in_an_error_of_ours(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, 300)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_much_junk_ends_in_errors_of_ours(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, 100_000)
