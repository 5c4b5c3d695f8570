"""Settings of the whole suite: signals, and what a marker means."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    """Let Ctrl-C interrupt again: a shell that starts tests in the background has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu`` where there is no NVIDIA GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
