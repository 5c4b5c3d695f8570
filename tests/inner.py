"""What tests use of rooms that are neither public nor pure nor their own, in one place.

A room that moves, or a name that changes, changes this file and the tests of its own room.
"""

from __future__ import annotations

from meshdist import absent_names as absent_names
from meshdist.absent_names import where_else as where_else
from meshdist.backends import (
    capabilities as capabilities,
    registry as registry,
    work as work,
)
from meshdist.backends.backend_names import parse_backends as parse_backends
from meshdist.backends.capabilities import table_page as table_page
from meshdist.backends.communicator import Communicator as Communicator
from meshdist.backends.composed_collectives import (
    COMPOSED as COMPOSED,
    all_reduce_by_gathering as all_reduce_by_gathering,
    flip as flip,
    reduced as reduced,
    to_order as to_order,
)
from meshdist.backends.mpi.connect import parse_member as parse_member
from meshdist.backends.native_core import core as core
from meshdist.backends.operation_args import OperationArgs as OperationArgs
from meshdist.backends.registry import (
    BackendType as BackendType,
    Opening as Opening,
    backend_names as backend_names,
    find_backend as find_backend,
    get_backend as get_backend,
)
from meshdist.backends.requests import (
    DONE as DONE,
    BackendAborted as BackendAborted,
    BackendFailure as BackendFailure,
    BackendTimeout as BackendTimeout,
    BackendUnsupported as BackendUnsupported,
    Chain as Chain,
    Interrupted as Interrupted,
    MemberLost as MemberLost,
    MemberStopped as MemberStopped,
    MessageMismatch as MessageMismatch,
    RanksMismatch as RanksMismatch,
    Request as Request,
    is_timeout as is_timeout,
    plain_text as plain_text,
)
from meshdist.backends.shm import (
    attach as attach,
    communicator as shm_communicator,  # noqa: F401
)
from meshdist.backends.shm.communicator import ShmBackend as ShmBackend
from meshdist.backends.shm.listener import Listener as Listener
from meshdist.backends.simulated import (
    communicator as simulated_communicator,  # noqa: F401
    matching as matching,
)
from meshdist.backends.simulated.communicator import SimulatedCommunicator as SimulatedCommunicator
from meshdist.backends.simulated.scheduler import Scheduler as Scheduler
from meshdist.backends.simulated.store import SimulatedStore as SimulatedStore
from meshdist.backends.work import bound as bound
from meshdist.bench.measurement import (
    Cell as Cell,
    Entrant as Entrant,
    SideFailedError as SideFailedError,
    measure as measure,
    rank_of as rank_of,
    running as running,
)
from meshdist.bench.reports import machine as machine, size_text as size_text
from meshdist.bootstrap import (
    init_methods as init_methods,
    mpi_library as mpi_library,
    schedulers as schedulers,
    store_endpoints as store_endpoints,
    stores as stores,
)
from meshdist.bootstrap.arrival_counters import digest_of_ranks as digest_of_ranks
from meshdist.bootstrap.launch_environment import (
    find_local_size as find_local_size,
    first_host as first_host,
    read_launch_environment as read_launch_environment,
    read_local_rank as read_local_rank,
)
from meshdist.bootstrap.mpi_library import (
    describe_mpi as describe_mpi,
    find_mpi_problem as find_mpi_problem,
    load_mpi as load_mpi,
)
from meshdist.bootstrap.rendezvous_rounds import RendezvousRound as RendezvousRound
from meshdist.bootstrap.store_cache import keep_store as keep_store
from meshdist.bootstrap.store_liveness import find_readable as find_readable
from meshdist.bootstrap.stores import (
    bind_listener as bind_listener,
    connect_store as connect_store,
    open_file as open_file,
    serve_store as serve_store,
)
from meshdist.bootstrap.timeout_store import TimeoutStore as TimeoutStore, read_json as read_json
from meshdist.bootstrap.world import (
    World as World,
    find_world as find_world,
    get_world as get_world,
    install_world as install_world,
    remove_world as remove_world,
    world_here as world_here,
)
from meshdist.checking import (
    call_sites as call_sites,
    debug_levels as debug_levels,
    shared_flags as shared_flags,
)
from meshdist.checking.call_sites import is_between as is_between
from meshdist.checking.debug_levels import TRACE as TRACE
from meshdist.checking.fingerprint_table import FingerprintTable as FingerprintTable
from meshdist.checking.recorder import Recorder as Recorder
from meshdist.checking.shared_flags import (
    Heartbeats as Heartbeats,
    Regions as Regions,
    SharedFlags as SharedFlags,
    SharedFlagsView as SharedFlagsView,
)
from meshdist.cli import (
    bench as bench,
    diagnostics as diagnostics,
    flags as flags,
    main as main,
    run as run,
)
from meshdist.collectives import flat_sums as flat_sums, shared_buffers as shared_buffers
from meshdist.collectives.flat_sums import (
    Item as Item,
    assign_buckets as assign_buckets,
    dense_stride as dense_stride,
    items_of as items_of,
)
from meshdist.collectives.monitored_barrier import MonitoredBarrier as MonitoredBarrier
from meshdist.collectives.normalize_args import run_named as run_named
from meshdist.collectives.object_protocol import PickledObject as PickledObject, unpack as unpack
from meshdist.collectives.registration import watchers as watchers
from meshdist.collectives.shared_buffers import flat_memory as flat_memory
from meshdist.collectives.torch_private import (
    ENDS_RECORDS_ANYWHERE as ENDS_RECORDS_ANYWHERE,
    SingleLevelFunction as SingleLevelFunction,
    is_apply_bare as is_apply_bare,
)
from meshdist.functional import reductions as reductions
from meshdist.functional.equality_checks import names_of as names_of
from meshdist.groups import device_group as device_group
from meshdist.groups.agreement import Agreements as Agreements
from meshdist.groups.communicators import Registry as Registry, get_registry as get_registry
from meshdist.groups.control_messages import (
    ControlThread as ControlThread,
    Endings as Endings,
    collect as collect,
    last_call_text as last_call_text,
    parse_answer as parse_answer,
)
from meshdist.groups.group_methods import (
    Asked as Asked,
    only as only,
    only_list as only_list,
    read_options as read_options,
)
from meshdist.groups.host_comparison import FingerprintTables as FingerprintTables
from meshdist.groups.process_group import resolve_group as resolve_group
from meshdist.launching.orphan_reaper import end_with_parent as end_with_parent
from meshdist.launching.output import Output as Output
from meshdist.launching.rank_environment import LaunchError as LaunchError
from meshdist.runtime import (
    deadlines as deadlines,
    hosts as hosts,
    timeout_calls as timeout_calls,
)
from meshdist.runtime.deadlines import (
    Deadline as Deadline,
    wait_until as wait_until,
)
from meshdist.runtime.hosts import (
    MORE_DESCRIPTORS as MORE_DESCRIPTORS,
    ProcessInfo as ProcessInfo,
    find_version as find_version,
    host_identity as host_identity,
    my_process_info as my_process_info,
    num_cores as num_cores,
    process_start as process_start,
    read_process as read_process,
)
from meshdist.runtime.integers import find_integer as find_integer
from meshdist.runtime.memory import Scratch as Scratch
