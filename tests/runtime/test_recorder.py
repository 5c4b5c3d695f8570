"""What a rank called last."""

from __future__ import annotations

import torch

from meshdist.runtime.recorder import DebugLevel, Recorder, debug_level


def call(recorder: Recorder, *args, **more) -> None:
    """Stands for a verb, whose caller is noted."""
    recorder.note(*args, **more)


def test_the_last_call_with_tensor_and_place() -> None:
    recorder = Recorder()
    call(recorder, "all_reduce", torch.ones(2, 3))
    line = test_the_last_call_with_tensor_and_place.__code__.co_firstlineno + 2
    assert recorder.describe() == {
        "sequence": 1,
        "verb": "all_reduce",
        "tensor": "(2, 3) float32",
        "where": f"{__file__}:{line} in test_the_last_call_with_tensor_and_place",
    }


def test_only_collectives_count() -> None:
    recorder = Recorder()
    recorder.note("barrier", None)
    recorder.note("send", torch.ones(1), is_collective=False)
    described = recorder.describe()
    assert (described["sequence"], described["verb"]) == (1, "send")
    recorder.note("barrier", None)
    assert recorder.describe()["sequence"] == 2
    assert recorder.describe()["tensor"] == ""


def test_before_any_call() -> None:
    assert Recorder().describe() == {"sequence": 0, "verb": "", "tensor": "", "where": ""}


def test_it_keeps_no_tensor_alive() -> None:
    import gc
    import weakref

    recorder = Recorder()
    x = torch.ones(2)
    seen = weakref.ref(x)
    recorder.note("all_reduce", x)
    del x
    gc.collect()
    assert seen() is None


def test_debug_level_is_torchs() -> None:
    assert isinstance(debug_level(), DebugLevel)
