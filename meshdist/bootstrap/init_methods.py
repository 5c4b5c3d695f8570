"""Resolve init_process_group arguments to a rank, a world size and a store.

``meet`` supports ``env://``, ``tcp://host:port``, ``file:///path``, a store, and the schemes of
``register_rendezvous_handler``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

import torch.distributed
from torch.distributed import register_rendezvous_handler

from ..arguments import DEFAULT_TIMEOUT, check_timeout, get_integer
from ..errors import ArgumentError, KindError, RendezvousError, StoreError
from ..runtime.integers import find_integer
from .launch_environment import MOST_RANKS, LaunchEnvironment, read_launch_environment
from .mpi_library import directory_of_mpiexec
from .rendezvous_rounds import SERVER, Rendezvous, RendezvousRound, lost_while_joining
from .store_cache import hold_until_closed, keep_store, release_store
from .store_endpoints import endpoint_from_environment, endpoint_of, open_by_url
from .stores import (
    LEAST_STORE_TIMEOUT,
    HostedStore,
    Store,
    TCPStore,
    check_can_join,
    cloned,
    find_number,
    open_file,
    root_of,
)
from .timeout_store import TimeoutStore

__all__ = [
    "register_rendezvous_handler",
    "rendezvous",
]


_IN_QUERY = ("rank", "world_size")
"""The keys of a URL's query."""


@dataclass(frozen=True)
class InitArguments:
    """Arguments of one initialization, from a call, a URL or the environment.

    Args:
        init_method: the URL; None means ``env://`` unless ``store`` is given.
        rank: -1 if the URL or the environment sets it, or to assign ranks in the order of arrival
            (tcp:// and file://).
        world_size: -1 if the URL or the environment sets it.
        store: a shared store, instead of a URL; needs rank and world_size.
        group_name: separates several worlds at one address.
        backends: the backends that this process can use.
    """

    init_method: str | None = None
    rank: int = -1
    world_size: int = -1
    store: Store | None = None
    group_name: str = ""
    timeout: timedelta = DEFAULT_TIMEOUT
    backends: Collection[str] = ()


def meet(
    init_arguments: InitArguments,
    *,
    is_mpi_asked: bool = False,
    origin: str = "a given store",
    handler_arguments: Mapping[str, Any] | None = None,
) -> Rendezvous:
    """Join the world of ``init_arguments``; return its Rendezvous once all ranks have joined.

    Args:
        is_mpi_asked: whether to use only mpiexec's variables (backend "mpi").
        origin: the source of a given store, for messages.
    """
    init_method, store = init_arguments.init_method, init_arguments.store
    rank, world_size = init_arguments.rank, init_arguments.world_size
    if store is not None and is_mpi_asked:
        launch_environment = read_launch_environment(os.environ, is_mpi_asked=True)
        rank, world_size = launch_environment.rank, launch_environment.size
    rank, world_size = _checked_endpoints(rank, world_size)
    _check_arguments(init_method, rank, world_size, store)
    check_can_join()
    if store is not None:
        # This process cannot see whether torchrun's agent hosts the store, or rank 0 as usual.
        is_hosted_by_0 = isinstance(root_of(store), TCPStore)
        own = _own_handle(store)
        joined = _meet_in(
            own, rank, world_size, origin, init_arguments, is_hosted_by_0=is_hosted_by_0
        )
        return replace(joined, leave=partial(hold_until_closed, store))
    url = _split("env://" if init_method is None else init_method)
    rank, world_size = _with_query(url, rank, world_size)
    if url.scheme == "env":
        launch_environment = read_launch_environment(
            os.environ, rank=rank, world_size=world_size, is_mpi_asked=is_mpi_asked
        )
        return _meet_by_environment(launch_environment, init_arguments)
    if url.scheme == "tcp":
        return _meet_by_tcp(url, rank, world_size, init_arguments)
    if url.scheme == "file":
        return _meet_by_file(url, rank, world_size, init_arguments)
    return _meet_by_handler(url, rank, world_size, init_arguments, handler_arguments or {})


def rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[tuple[Store, int, int]]:
    """Return an iterator that yields the shared store, this rank and the world size, once.

    The call checks its arguments immediately; ``next`` waits until all ranks have joined. With
    ``file://`` and a rank, ``next`` does not wait, and the last process that drops its store
    removes the file.

    Args:
        url: ``env://``, ``tcp://host:port``, ``file:///path``, or a scheme of
            ``register_rendezvous_handler``, whose handler is called as torch calls it.
        rank: as for ``init_process_group``.
        world_size: as for ``init_process_group``.
        kwargs: ``timeout``, a timedelta; a custom handler also gets the other arguments.

    Raises:
        KindError, ArgumentError: as for ``init_process_group``.
        RendezvousError: as for ``init_process_group``; also on a second ``next``.
    """
    timeout = kwargs.pop("timeout", None)
    check_timeout(timeout)
    if not isinstance(url, str):
        raise KindError("url must be a str", expected="for example 'env://'", found=f"{url!r}")
    rank, world_size = _checked_endpoints(rank, world_size)
    _check_arguments(url, rank, world_size, None)
    return _matchings(url, rank, world_size, timeout or DEFAULT_TIMEOUT, kwargs)


def _matchings(
    url: str, rank: int, world_size: int, timeout: timedelta, arguments: dict[str, Any]
) -> Iterator[tuple[Store, int, int]]:
    parts = _split(url)
    rank_and_size = _with_query(parts, rank, world_size)
    if parts.scheme == "file" and rank_and_size[0] >= 0:
        store = open_file(_path_of(parts, *rank_and_size), timeout, rank_and_size[1])
        store.set_timeout(timeout)
        yield store, *rank_and_size
    else:
        joined = meet(
            InitArguments(url, rank, world_size, timeout=timeout), handler_arguments=arguments
        )
        yield joined.make_torch_store(), joined.rank, joined.size
    raise RendezvousError(
        "this rendezvous has already returned its store",
        where=url,
        fix="call rendezvous(...) again to join another world",
    )


# -- the caller's arguments ---------------------------------------------------------------------


def _checked_endpoints(rank: Any, world_size: Any) -> tuple[int, int]:
    expected = "0 or more; omit it (or pass -1) if the URL or the launcher sets it"
    rank = get_integer(rank, "rank", -1, expected=expected)
    return rank, get_integer(world_size, "world_size", -1, expected=expected)


def _check_arguments(
    init_method: str | None, rank: int, world_size: int, store: Store | None
) -> None:
    if store is None:
        if init_method is not None and not isinstance(init_method, str):
            raise KindError(
                "init_method must be a str",
                expected="'env://', 'tcp://host:port' or 'file:///path'",
                found=f"{init_method!r}",
            )
        return
    if init_method is not None:
        raise ArgumentError(
            "init_method and store cannot be combined",
            found=f"init_method={init_method!r}, store={type(store).__name__}",
            fix="pass either init_method or store",
        )
    if not isinstance(store, Store):
        raise KindError(
            "store must be a store",
            expected="a TCPStore, FileStore, HashStore, PrefixStore or another Store",
            found=f"{store!r}",
        )
    if rank < 0 or world_size < 1:
        raise ArgumentError(
            "store= needs rank and world_size",
            expected="rank=0 or more and world_size=1 or more",
            found=f"rank={rank}, world_size={world_size}",
            fix="pass all three: init_process_group(store=store, rank=0, world_size=4)",
        )
    _check_endpoint(rank, world_size)


def _check_endpoint(rank: int, world_size: int) -> None:
    if world_size > MOST_RANKS:
        raise ArgumentError(
            f"a world of {world_size} ranks is too large",
            expected=f"at most {MOST_RANKS}",
            found=f"world_size={world_size}",
            fix="pass the number of processes that take part as world_size",
        )
    if rank >= world_size:
        raise ArgumentError(
            f"rank {rank} does not exist in a world of {world_size}",
            expected=f"a rank from 0 to {world_size - 1}",
            found=f"rank={rank}, world_size={world_size}",
            fix=f"pass a rank below {world_size}, or a larger world_size on every rank",
        )


def _split(init_method: str) -> SplitResult:
    try:
        url = urlsplit(init_method)
        parse_qsl(urlsplit(url.geturl()).query)  # torch reads it in this form
        init_method.encode()
    except ValueError as error:
        raise ArgumentError(
            f"init_method is not a valid URL: {error}",
            expected="'env://', 'tcp://host:port' or 'file:///path'",
            found=f"{init_method!r}",
            fix="correct the URL, or omit init_method to use the launcher's variables",
        ) from None
    return url


def _with_query(url: SplitResult, rank: int, world_size: int) -> tuple[int, int]:
    """Return rank and size from the call or the URL; raise if both set a value."""
    given = dict(zip(_IN_QUERY, (rank, world_size), strict=True))
    for name, text in parse_qsl(url.query, keep_blank_values=True):
        if name not in given:
            continue  # for example torch's use_libuv=1
        if given[name] >= 0:
            raise ArgumentError(
                f"{name} is given both in the URL and in the call",
                where=url.geturl(),
                found=f"{name}={text} in the URL, {name}={given[name]} in the call",
                fix=f"remove {name} from the URL or from the call",
            )
        number = find_integer(text)
        if number is None:
            raise ArgumentError(
                f"{name}={text!r} in the URL is not an integer",
                where=url.geturl(),
                fix=f"write digits, for example {name}=1",
            )
        given[name] = number
    rank, world_size = given.values()
    return rank, world_size


def _check_size(url: SplitResult, rank: int, world_size: int) -> None:
    if world_size < 1:
        raise ArgumentError(
            f"{url.scheme}:// needs world_size",
            where=url.geturl(),
            expected="world_size in the call or in the URL",
            fix=f"init_process_group(init_method={url.geturl()!r}, world_size=4); without rank=, "
            "ranks are assigned in the order of arrival",
        )
    _check_endpoint(rank, world_size)


# -- rendezvous by scheme -----------------------------------------------------------------------


def _own_handle(store: Store) -> Store:
    try:
        return cloned(store)
    except (RuntimeError, NotImplementedError):  # a store written in Python may not support clone()
        return store


def _meet_in(
    store: Store,
    rank: int,
    size: int,
    origin: str,
    init_arguments: InitArguments,
    *,
    rendezvous_round: str = "",
    is_hosted_by_0: bool = False,
    **known: Any,
) -> Rendezvous:
    prefix = "/".join(["meshdist", *filter(None, (init_arguments.group_name, rendezvous_round))])
    patience = max(init_arguments.timeout, LEAST_STORE_TIMEOUT)
    server = {"server": SERVER.format(0)} if is_hosted_by_0 else {}
    is_here = isinstance(store, HostedStore)
    try:
        handle = TimeoutStore(store, patience, is_hosted_here=is_here, **server)
    except StoreError as error:
        raise lost_while_joining(origin, error) from error
    del store  # the traceback of an error would keep it alive
    given = rank if rank >= 0 else None
    known |= {"prefix": prefix, "hosts_store": is_here or (is_hosted_by_0 and rank == 0)}
    try:
        return RendezvousRound(
            handle, given, size, init_arguments.timeout, origin, init_arguments.backends, **known
        ).join()
    except BaseException:
        handle.close()
        raise


def _meet_at(
    address: Hashable,
    make: Callable[[], Store],
    rank: int,
    size: int,
    origin: str,
    init_arguments: InitArguments,
    *,
    stays: bool = False,
    **known: Any,
) -> Rendezvous:
    """Join in the store of ``address``; call ``make`` to open the store if none is cached.

    Args:
        stays: whether the store stays open after the world (the address never changes).
        known: further arguments of ``_meet_in``.
    """
    store = keep_store(address, make)
    try:
        joined = _meet_in(store, rank, size, origin, init_arguments, **known)
    except BaseException:
        del store
        release_store(address)
        raise
    return joined if stays else replace(joined, leave=partial(release_store, address))


def _meet_by_environment(
    launch_environment: LaunchEnvironment, init_arguments: InitArguments
) -> Rendezvous:
    launcher = launch_environment.launcher
    origin = "env://" if launcher == "env" else f"env://, started by {launcher}"
    rank, size, local_rank = (
        launch_environment.rank,
        launch_environment.size,
        launch_environment.local_rank,
    )
    directory = launch_environment.directory
    if launch_environment.port is None and launch_environment.is_one_host:
        directory = directory_of_mpiexec(launch_environment)
    if directory is not None:
        path = os.path.join(directory, f"store at {launch_environment.port or 'mpiexec'}")
        return _meet_in_file(path, rank, size, origin, init_arguments, local_rank=local_rank)
    if launch_environment.port is not None:
        origin += (
            f", store at {launch_environment.address or 'rank 0'}, port {launch_environment.port}"
        )
    address, make = endpoint_from_environment(launch_environment, init_arguments.timeout)
    return _meet_at(
        address,
        make,
        rank,
        size,
        origin,
        init_arguments,
        stays=launcher != "env",
        rendezvous_round=launch_environment.rendezvous_round,
        local_rank=local_rank,
        is_unique=launcher == "torchrun",
        is_hosted_by_0=not launch_environment.has_agent_store,
    )


def _meet_by_tcp(
    url: SplitResult, rank: int, size: int, init_arguments: InitArguments
) -> Rendezvous:
    address, port = _address_of(url)
    _check_size(url, rank, size)

    make = partial(
        open_by_url,
        address,
        port,
        rank,
        size,
        init_arguments.timeout,
        is_named=bool(init_arguments.group_name),
    )
    endpoint = endpoint_of(address, port)
    is_hosted_by_0 = rank >= 0 and not init_arguments.group_name
    origin = f"tcp://{url.netloc}"
    return _meet_at(
        endpoint, make, rank, size, origin, init_arguments, is_hosted_by_0=is_hosted_by_0
    )


def _address_of(url: SplitResult) -> tuple[str, int]:
    try:
        address, port = url.hostname, url.port
    except ValueError as error:
        raise ArgumentError(
            f"the URL has no valid port: {error}",
            where=url.geturl(),
            fix="pass a port from 1 to 65535, for example tcp://127.0.0.1:29500",
        ) from None
    if not address or not port:
        raise ArgumentError(
            "tcp:// needs a host and a port",
            where=url.geturl(),
            expected="tcp://host:port, the address of rank 0",
            fix="tcp://127.0.0.1:29500",
        )
    number = find_number(address)
    if number is not None and number.is_multicast:
        raise ArgumentError(
            f"{address} is a multicast address, which only old torch.distributed supports",
            where=url.geturl(),
            expected="the address of the host of rank 0",
            fix="pass tcp://HOST_OF_RANK_0:PORT and world_size=...; without rank=, ranks are "
            "assigned in the order of arrival",
        )
    return address, port


def _meet_by_file(
    url: SplitResult, rank: int, size: int, init_arguments: InitArguments
) -> Rendezvous:
    path = _path_of(url, rank, size)
    return _meet_in_file(path, rank, size, f"file://{path}", init_arguments)


def _path_of(url: SplitResult, rank: int, size: int) -> str:
    if url.netloc not in ("", "localhost") or not url.path:
        raise ArgumentError(
            "file:// needs an absolute path",
            where=url.geturl(),
            expected="three slashes: file:///path/to/file, on a file system that all ranks share",
            fix=f"file:///{(url.netloc + url.path).lstrip('/') or 'shared/meeting'}",
        )
    _check_size(url, rank, size)
    return url.path


def _meet_in_file(
    path: str, rank: int, size: int, origin: str, init_arguments: InitArguments, **known: Any
) -> Rendezvous:
    return _meet_in(
        open_file(path, init_arguments.timeout), rank, size, origin, init_arguments, **known
    )


def _meet_by_handler(
    url: SplitResult, rank: int, size: int, init_arguments: InitArguments, more: Mapping[str, Any]
) -> Rendezvous:
    rest = [(name, text) for name, text in parse_qsl(url.query, True) if name not in _IN_QUERY]
    plain = url._replace(query=urlencode(rest)).geturl()  # torch adds rank and size itself
    try:
        found = torch.distributed.rendezvous(
            plain, rank, size, timeout=init_arguments.timeout, **more
        )
    except (RuntimeError, AssertionError) as error:
        if "No rendezvous handler" not in str(error):
            raise
        own = "pass one of these, or call register_rendezvous_handler before init_process_group"
        raise RendezvousError(
            f"no rendezvous handler is registered for {url.scheme}://"
            if url.scheme
            else "init_method has no scheme",
            where=f"init_method={url.geturl()!r}",
            expected="env://, tcp://host:port, file:///path, or the scheme of a registered handler",
            fix=own if url.scheme else f"pass init_method='file://{os.path.abspath(url.path)}'",
        ) from None
    store, rank, size = next(found)
    joined = _meet_in(store, rank, size, f"{url.scheme}://", init_arguments)
    # Keep the handler as long as the world: its generator may hold objects that the store needs.
    return replace(joined, leave=getattr(found, "close", joined.leave))
