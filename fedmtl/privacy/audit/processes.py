"""Freshness beyond one object: another channel, a forked process, a restored run."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from ..channel import Channel
from .findings import Finding, skipped
from .noise import fresh_between, standardized
from .setup import Claim, Setup, released, without_counts

_PATIENCE = 30.0


def fresh_objects(setup: Setup, claims: dict[str, Claim], first: int, second: int, steps: int) -> list[Finding]:
    """Two channels: of different seeds, or of the same one in secure mode, where the seed must not matter."""
    seeds = (first, first if setup.secure else second)
    noise = [_standard(_own(setup.open(seed), setup, claims, 0, steps), claims) for seed in seeds]
    return [fresh_between(f"freshness: channels, {name}", noise[0][name], noise[1][name]) for name in claims]


def fresh_forks(setup: Setup, claims: dict[str, Claim], seed: int, steps: int) -> list[Finding]:
    """A channel that is open when the process forks, used on both sides.

    In seeded mode the same step is by design the same release, so the child goes on at the next step; in secure mode
    both take the same step, and copied generator state would repeat the noise.
    """
    names = [f"freshness: forked process, {name}" for name in claims]
    if not hasattr(os, "fork"):
        return [skipped(name, "this system has no fork") for name in names]
    half = max(1, steps // 2)
    channel = setup.open(seed)
    channel.start(0)
    start = 0 if setup.secure else half
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child must not enter a pool of threads that only its parent has
    try:
        theirs = _in_child(lambda: _flat(_own(channel, setup, claims, start, start + half)))
        ours = _own(channel, setup, claims, 0, half)
    finally:
        torch.set_num_threads(threads)
    if theirs is None:
        return [skipped(name, "the forked process did not answer") for name in names]
    findings, position = [], 0
    mine = _standard(ours, claims)
    for check, (name, claim) in zip(names, claims.items(), strict=True):
        width = ours[name].shape[1]
        count = theirs[0][list(claims).index(name)]
        rows = theirs[1][position : position + count * width].reshape(count, width)
        position += count * width
        findings.append(fresh_between(check, mine[name], standardized(rows, claim)))
    return findings


def fresh_restores(setup: Setup, claims: dict[str, Claim], seed: int, steps: int) -> list[Finding]:
    """A run that ends and is resumed from its ledger: the noise after differs from the noise before."""
    half = max(1, steps // 2)
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        before = setup.open(seed, ledger=path)
        try:
            first = _own(before, setup, claims, 0, half)
        finally:
            before.close()
        start = 0 if setup.secure else half  # a replayed step: by design the same release in seeded mode
        after = setup.open(seed, ledger=path, resume=True)
        try:
            second = _own(after, setup, claims, start, start + half)
        finally:
            after.close()
    one, two = _standard(first, claims), _standard(second, claims)
    return [fresh_between(f"freshness: after a restore, {name}", one[name], two[name]) for name in claims]


def _own(channel: Channel, setup: Setup, claims: dict[str, Claim], start: int, stop: int) -> dict[str, np.ndarray]:
    """Releases that have a claim."""
    return without_counts(released(channel, setup, start=start, stop=stop), claims)


def _standard(noise: dict[str, np.ndarray], claims: dict[str, Claim]) -> dict[str, np.ndarray]:
    return {name: standardized(noise[name], claim) for name, claim in claims.items()}


def _flat(noise: dict[str, np.ndarray]) -> tuple[list[int], np.ndarray]:
    return [len(rows) for rows in noise.values()], np.concatenate([rows.ravel() for rows in noise.values()])


def _in_child(work: object) -> tuple[list[int], np.ndarray] | None:
    """What ``work()`` returns in a forked process; None if it fails or takes too long."""
    assert callable(work)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent: the child uses none
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            counts, values = work()
            head = np.array([len(counts), *counts], dtype=np.int64)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(head.tobytes() + values.astype(np.float64).tobytes())
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
    count = int(np.frombuffer(received[:8], dtype=np.int64)[0])
    counts = np.frombuffer(received[8 : 8 + 8 * count], dtype=np.int64).tolist()
    return counts, np.frombuffer(received[8 + 8 * count :], dtype=np.float64)
