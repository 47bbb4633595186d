"""Freshness beyond one object: another channel, a forked process, a restored run."""

from __future__ import annotations

import io
import os
import select
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .findings import Finding, skipped
from .noise import fresh_between
from .setup import Setup

Sample = Callable[[Any, int, int], dict[str, np.ndarray]]
"""(channel, first step, end) -> standardized noise (T, d) by release."""

_PATIENCE = 30.0


def fresh_objects(setup: Setup, sample: Sample, first: int, second: int, steps: int) -> list[Finding]:
    """Two channels: of different seeds, or of the same one in secure mode, where the seed must not matter."""
    seeds = (first, first if setup.secure else second)
    one, two = (sample(setup.open(seed), 0, steps) for seed in seeds)
    return [fresh_between(f"freshness: channels, {name}", one[name], two[name]) for name in one]


def fresh_forks(setup: Setup, sample: Sample, seed: int, steps: int) -> list[Finding]:
    """A channel that is open when the process forks, used on both sides.

    In seeded mode the same step is by design the same release, so the child goes on at the next step; in secure mode
    both take the same step, and copied generator state would repeat the noise.
    """
    if not hasattr(os, "fork"):
        return [skipped("freshness: forked process", "this system has no fork")]
    half = max(1, steps // 2)
    channel = setup.open(seed)
    channel.start(0)
    start = 0 if setup.secure else half
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child must not enter a pool of threads that only its parent has
    try:
        theirs = _in_child(lambda: sample(channel, start, start + half))
        ours = sample(channel, 0, half)
    finally:
        torch.set_num_threads(threads)
    if theirs is None:
        return [skipped("freshness: forked process", "the forked process did not answer")]
    return [fresh_between(f"freshness: forked process, {name}", ours[name], theirs[name]) for name in ours]


def fresh_restores(setup: Setup, sample: Sample, seed: int, steps: int) -> list[Finding]:
    """A run that ends and is resumed from its ledger: the noise after differs from the noise before."""
    half = max(1, steps // 2)
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        with closing(setup.open(seed, ledger=path)) as before:
            first = sample(before, 0, half)
        start = 0 if setup.secure else half  # a replayed step: by design the same release in seeded mode
        with closing(setup.open(seed, ledger=path, resume=True)) as after:
            second = sample(after, start, start + half)
    return [fresh_between(f"freshness: after a restore, {name}", first[name], second[name]) for name in first]


def _in_child(work: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """What ``work()`` returns in a forked process; None if it fails or takes too long."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent: the child uses none
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            buffer = io.BytesIO()
            np.savez(buffer, **work())  # type: ignore[arg-type]
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(buffer.getvalue())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    deadline, received = time.monotonic() + _PATIENCE, bytearray()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                break
            part = pipe.read(1 << 20)
            if not part:
                break
            received += part
    _, status = os.waitpid(child, 0)
    if status != 0:
        return None
    with np.load(io.BytesIO(received)) as found:
        return {name: found[name] for name in found.files}
