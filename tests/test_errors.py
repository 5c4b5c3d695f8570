"""Which of torch's classes and which builtins catch each of our exceptions."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

import meshdist as md
from meshdist import errors

CAUGHT_BY = {
    "AbortedError": (dist.DistBackendError,),
    "MismatchError": (dist.DistBackendError, ValueError),
    "ArgumentError": (ValueError,),
    "AxisError": (ValueError, RuntimeError, KeyError, IndexError, TypeError),
    "AxisTypeError": (TypeError,),
    "BackendError": (dist.DistBackendError,),
    "CollectiveTimeoutError": (dist.DistBackendError, TimeoutError),
    "DeadlockError": (dist.DistBackendError,),
    "DtypeError": (ValueError, TypeError, RuntimeError),
    "GradientError": (RuntimeError,),
    "GroupClosedError": (ValueError, RuntimeError),
    "GroupKindError": (TypeError, ValueError, RuntimeError, AttributeError, KeyError),
    "JoinError": (RuntimeError,),
    "KindError": (TypeError, ValueError, RuntimeError),
    "LengthError": (ValueError, RuntimeError, IndexError, TypeError),
    "MeshAttributeError": (ValueError, RuntimeError, AttributeError),
    "MeshError": (ValueError, RuntimeError),
    "MeshdistError": (Exception,),
    "NotInGroupError": (ValueError, RuntimeError, KeyError, IndexError),
    "NotInitializedError": (ValueError, RuntimeError),
    "PatternError": (ValueError,),
    "PicklingError": (TypeError, pickle.PicklingError, AttributeError),
    "NestedCollectiveError": (RuntimeError,),
    "RankFailedError": (RuntimeError,),
    "RendezvousError": (dist.DistNetworkError, ValueError),
    "ShapeError": (ValueError, RuntimeError, IndexError),
    "StoreError": (dist.DistStoreError,),
    "CheckpointError": (OSError,),
    "UnequalError": (AssertionError,),
    "WorldError": (ValueError, RuntimeError),
}
TORCHS = (
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "QueueEmptyError",
)


WARNINGS = ("VaryingNumberWarning",)


def test_every_exception_is_here() -> None:
    assert all(issubclass(getattr(errors, name), UserWarning) for name in WARNINGS)
    assert {*CAUGHT_BY, *TORCHS, *WARNINGS} == set(errors.__all__)


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_ours_are_caught_as_torchs_and_builtin_ones(name: str) -> None:
    kind = getattr(md, name)
    assert issubclass(kind, md.MeshdistError)
    for base in CAUGHT_BY[name]:
        with pytest.raises(base):
            raise kind("what happened", fix="do this")
    is_torchs = any(issubclass(base, dist.DistError) for base in CAUGHT_BY[name])
    assert issubclass(kind, dist.DistError) == is_torchs


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_ours_have_one_text_and_travel(name: str) -> None:
    error = getattr(md, name)("what happened", where="rank 1", fix="do this")
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error) == "what happened\n  where:    rank 1\n  fix:      do this"
    assert type(twin) is type(error) and twin.fix == "do this"


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_own(name: str) -> None:
    assert getattr(md, name) is getattr(dist, name)
    assert issubclass(getattr(md, name), dist.DistError)


def test_an_empty_queue_of_a_store() -> None:
    with pytest.raises(md.QueueEmptyError) as caught:
        md.HashStore().queue_pop("jobs", block=False)
    assert isinstance(caught.value, md.DistStoreError)
