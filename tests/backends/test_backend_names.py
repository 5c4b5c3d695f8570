"""The names of backends, and the texts that pair device types with them."""

from __future__ import annotations

import pickle

import pytest

import meshdist as md
from meshdist.backends.backend_names import (
    backends_in,
    backends_text,
    default_backends,
    parse_backends,
    usable_defaults,
)
from tests.inner import get_world


def test_names_are_lower_case() -> None:
    assert md.Backend("GLOO") == "gloo" == md.Backend.GLOO
    assert isinstance(md.Backend("gloo"), (str, md.Backend))
    assert [md.Backend.NCCL, md.Backend.MPI, md.Backend.UCC, md.Backend.XCCL] == [
        "nccl",
        "mpi",
        "ucc",
        "xccl",
    ]
    assert md.Backend.UNDEFINED == "undefined"


@pytest.mark.parametrize(
    ("usable", "cpu"), [({"shm", "gloo"}, "shm"), ({"gloo"}, "gloo"), (set(), "gloo")]
)
def test_the_default_is_the_best_that_is_usable(usable: set[str], cpu: str) -> None:
    assert default_backends(usable) == {"cpu": cpu, "cuda": "nccl", "xpu": "xccl"}
    assert default_backends() == default_backends(usable_defaults())


def test_unknown_names_are_kept() -> None:
    assert md.Backend("Homing-Pigeon") == "homing-pigeon"


def test_a_backend_goes_through_pickle() -> None:
    copy = pickle.loads(pickle.dumps(md.Backend("gloo")))
    assert (copy, type(copy)) == ("gloo", md.Backend)


def test_a_backend_is_named_by_a_str() -> None:
    with pytest.raises(md.ArgumentError, match="a backend name must be a str"):
        md.Backend(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "backends"),
    [
        (None, default_backends()),
        ("gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("GLOO", {"cpu": "gloo", "cuda": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("xccl", {"xpu": "xccl"}),
        ("pigeon", {"cpu": "pigeon", "cuda": "pigeon"}),
        ("cpu:gloo", {"cpu": "gloo"}),
        ("cpu:gloo,cuda:NCCL", {"cpu": "gloo", "cuda": "nccl"}),
        ("cuda:nccl, cpu:gloo", {"cuda": "nccl", "cpu": "gloo"}),
    ],
)
def test_backends_by_device_type(text: str | None, backends: dict[str, str]) -> None:
    assert parse_backends(text) == backends
    assert md.BackendConfig(text).get_device_backend_map() == backends
    if backends:
        assert parse_backends(backends_text(backends)) == backends
        assert repr(md.BackendConfig(text)) == backends_text(backends)


@pytest.mark.parametrize("text", ["cpu:", ":gloo", "cpu:gloo,", "cpu:gloo:1", "cpu:gloo,nccl"])
def test_malformed_pairs(text: str) -> None:
    with pytest.raises(ValueError, match="does not pair a device type with a backend"):
        parse_backends(text)


def test_simulated_ranks_have_one_backend_whatever_a_program_names() -> None:
    def program() -> dict[str, str]:
        with pytest.raises(md.BackendError, match="backend 'pigeon' is not registered"):
            backends_in(get_world(), {"cpu": "pigeon"})
        return backends_in(get_world(), {"cpu": "gloo", "cuda": "nccl"})

    assert set(md.simulate(program, 1)[0].values()) == {"simulated"}
    assert backends_in(None, {"cpu": "gloo"}) == {"cpu": "gloo"}
    with pytest.raises(md.BackendError, match="backend 'xccl' is not available"):
        backends_in(None, {"xpu": "xccl"})


def test_a_device_type_twice() -> None:
    with pytest.raises(ValueError, match="device type 'cpu' has two backends") as caught:
        parse_backends("cpu:gloo,cpu:mpi")
    assert "found:    gloo and mpi" in str(caught.value)


def test_tcp_of_the_old_package() -> None:
    with pytest.raises(md.ArgumentError, match=r"existed in the old torch\.distributed") as caught:
        parse_backends("TCP")
    assert "fix:      init_process_group('gloo')" in str(caught.value)


def test_backends_are_text() -> None:
    with pytest.raises(md.KindError, match="backend must be a str or None"):
        parse_backends(3)  # type: ignore[arg-type]
