"""Seconds of one round of a secure sum: of one client, step by step, and of the server.

All clients are in one process, and take part in a real round; the medians of some of them are printed. Processor
seconds of all threads, of which there is one.

    OMP_NUM_THREADS=1 python benchmarks/speed/secure.py
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from rounds import machine  # noqa: E402

from fedmtl.privacy import (  # noqa: E402
    ClientPrivacy,
    FullParticipation,
    ReleasePlan,
    SecureAggregation,
    SecureSource,
)
from fedmtl.privacy.receipt import Receipt  # noqa: E402
from fedmtl.privacy.secure_calibration import calibrate_secure_sum  # noqa: E402
from fedmtl.privacy.secure_sum import LocalRandomizer  # noqa: E402
from fedmtl.secure.masks import Identity  # noqa: E402
from fedmtl.secure.member import Member  # noqa: E402
from fedmtl.secure.parameters import PublicParameters  # noqa: E402
from fedmtl.secure.server import SecureSumServer  # noqa: E402

Value = TypeVar("Value")


class Clock:
    """Processor seconds by what was done."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, act: Callable[..., Value], *words: object) -> Value:
        """Returns what ``act`` returns, and keeps its seconds under ``name``."""
        begun = time.process_time()
        value = act(*words)
        self.seconds.setdefault(name, []).append(time.process_time() - begun)
        return value


def given(words: np.ndarray, roster: int) -> np.ndarray:
    """Returns words that were made before, whose noise has been timed."""
    return words


def run(clients: int, numbers: int, colluding: int, missing: int, lost: int) -> Clock:
    """Returns the times of one round, in which ``lost`` clients are lost before their rows."""
    settings = SecureAggregation(colluding=colluding, missing=missing)
    privacy = ClientPrivacy(
        clip_norm=1.0, noise_multiplier=1.0, delta=1e-6, aggregation=settings, source="secure"
    )
    plan = ReleasePlan(name="update", dimension=numbers)
    everybody = FullParticipation().bind(clients)
    noise = calibrate_secure_sum(privacy, (plan,), everybody, 1)
    share = LocalRandomizer(noise.release, SecureSource())
    identities = {f"client {i}": Identity(secrets.token_bytes(32)) for i in range(clients)}
    public = PublicParameters(
        identities={name: one.public for name, one in identities.items()},
        run="speed",
        round=0,
        attempt=0,
        settings="",
        length=numbers,
        colluding=colluding,
        missing=missing,
    )
    clock = Clock()
    timed = clock.timed
    server = SecureSumServer(public)
    members = {}
    for name, identity in identities.items():
        members[name] = timed("keys", Member, public, name, identity)
        timed("server: keys", server.take, name, members[name].keys)
    roster = server.roster()
    for name, member in members.items():
        boxes = timed("boxes", member.shares, roster)
        timed("server: boxes", server.take, name, boxes)
    delivered = server.boxes()
    row = torch.randn(1, numbers, generator=torch.Generator().manual_seed(0)) / numbers**0.5
    came = list(members)[lost:]
    for name in came:
        here = torch.tensor([0])
        receipt = Receipt(0, 0, here)
        words = timed("clip and noise", share, row, here, receipt, clients)
        masked = timed("masks", members[name].row, delivered[name], partial(given, words))
        timed("server: rows", server.take, name, masked)
    names = server.names()
    for name in came:
        shares = timed("opening", members[name].opening, names)
        timed("server: shares", server.take, name, shares)
    total = timed("server: sum", server.total)
    assert np.isfinite(noise.noise.opened(total)).all()
    return clock


def main() -> None:
    """Parse the command line, run the rounds, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--numbers", type=int, nargs="+", default=[10**5, 10**6])
    parser.add_argument("--colluding", type=int, default=10)
    parser.add_argument("--missing", type=int, default=10)
    parser.add_argument("--lost", type=int, nargs="+", default=[0, 10])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print("\n| clients | lost | numbers | step | ms |\n| ---: | ---: | ---: | --- | ---: |")
    for numbers in asked.numbers:
        for lost in asked.lost:
            clock = run(asked.clients, numbers, asked.colluding, asked.missing, lost)
            sums = {"a client, in all": 0.0, "the server, in all": 0.0}
            for name, seconds in clock.seconds.items():
                if name.startswith("server"):
                    spent = sum(seconds)
                    sums["the server, in all"] += spent
                else:
                    spent = median(seconds)
                    sums["a client, in all"] += spent
                print(f"| {asked.clients} | {lost} | {numbers:,} | {name} | {1e3 * spent:.3g} |")
            for name, spent in sums.items():
                print(f"| {asked.clients} | {lost} | {numbers:,} | {name} | {1e3 * spent:.3g} |")


if __name__ == "__main__":
    main()
