"""Check 5 of owners who act one at a time: the records of an answer are the secret Poisson subsample it is charged as.

Channels are opened with next to no noise, on rows along one axis; gradients of 2^-1, 2^-2, ... of the clip norm then
spell the subsample in the released sum, through the way out that the run itself has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from .cohorts import binomial_sizes, drawn_law
from .findings import Finding, exact, skipped
from .owner_setup import OwnerClaims, OwnerSetup
from .statistics import seeds

_RECORDS, _QUIET = 16, 1e-13


def owner_subsamples(
    setup: OwnerSetup, claims: OwnerClaims, seed: int, draws: int, level: float, coins: np.random.Generator
) -> list[Finding]:
    """Sizes, fairness and independence across records, answers and channels, of the owner with the most records.

    Args:
        setup, claims, seed: of the run.
        draws: number of subsamples.
        level: of each finding.
        coins: the audit's own.
    """
    sampled = [k for k in range(len(claims)) if claims.answer(k).sampled is not None]
    owner = max(sampled, key=lambda k: int(setup.present(np.array([k]), np.zeros(1, dtype=np.int64))[0]), default=-1)
    if owner < 0:
        return [skipped("sampler", "who acts when is public, and every answer uses all records")]
    arrivals = setup.options.get("arrivals")
    there = np.arange(setup.counts[owner]) if arrivals is None else np.flatnonzero(arrivals[owner] <= 0)
    chosen = np.sort(coins.permutation(there)[:_RECORDS])
    if not len(chosen) or not setup.open(seed).caps[owner]:
        return [skipped("sampler", "no owner has records at the start and may answer")]
    streams = [_subsamples(setup, claims, seed, owner, chosen)]
    streams.append(_subsamples(setup, claims, seed if setup.secure else seed + 1, owner, chosen))
    members: list[list[np.ndarray]] = [[], []]
    strange = 0
    for found, stream in zip(members, streams, strict=True):
        for codes in stream:
            strange += int((np.abs(codes - np.rint(codes)) > 1e-3).sum())
            bits = (np.rint(codes).astype(np.int64)[:, None] >> np.arange(len(chosen))) & 1
            found += [np.flatnonzero(row) for row in bits]
            if len(found) >= draws:
                break
    shorter = min(map(len, members))
    members = [found[:shorter] for found in members]
    n, q = len(chosen), float(claims.answer(owner).sampled or 1.0)
    detail = f"{shorter} sums of the gradients drawn over q n"
    return [
        exact("sampler: sums of subsamples", strange, detail),
        binomial_sizes("sampler: sizes of subsamples", members[0], n, q, level, coins),
        *drawn_law("sampler: records, ", members, n, q, q * q, level, coins, fixed=False, secure=setup.secure),
    ]


def _subsamples(
    setup: OwnerSetup, claims: OwnerClaims, seed: int, owner: int, chosen: np.ndarray
) -> Iterator[np.ndarray]:
    """Sums (T,) of 2^i over the records ``chosen[i]`` drawn by the answers of one channel after the other."""
    c, d, n = setup.privacy.clip_norm, setup.dimension, setup.counts[owner]
    quiet = replace(setup.privacy, epsilon=None, noise_multiplier=_QUIET)
    axis = torch.zeros(n, d, dtype=torch.float64)
    axis[:, d // 2] = 1.0
    rows = [axis if k == owner else x for k, x in enumerate(setup.x)]
    factors = torch.zeros(1, n, dtype=torch.float64)
    unit = c * 2.0**-_RECORDS
    factors[0, torch.from_numpy(chosen)] = unit * 2.0 ** torch.arange(len(chosen), dtype=torch.float64)
    gradients = factors[..., None] * axis
    for index, other in enumerate(seeds(seed, "subsamples", 10_000)):
        channel, _ = setup.opening(seed if setup.secure else other, quiet, rows if setup.linear else None)
        cap = min(int(channel.caps[owner]), 64)
        channel.begin(0, torch.full((1, cap), owner))
        if index % 2 or not setup.linear:
            value = torch.stack([channel.release_rows(lambda k, where: gradients) for _ in range(cap)])
        else:
            value = channel.release_run(cap, lambda k, which, where: factors.repeat(len(which), 1))
        present = setup.present(np.full(cap, owner), np.arange(cap)) / n
        yield value[:, 0, d // 2].numpy() * claims.answer(owner).denominator * present / unit
