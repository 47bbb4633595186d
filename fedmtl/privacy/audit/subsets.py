"""Check 5 for single records: those that take part in a release are the secret Poisson subset that it is charged as.

Subsets of local steps are drawn by the channel and shown to the client. Those of activations are not: channels are
opened with next to no noise, on rows along one axis, and gradients of 2^-1, 2^-2, ... of the clip norm spell the subset
in the released sum, through the way out that the run itself has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from ..channel import GRADIENT
from ..local_steps import LocalSteps
from ..sums import RecordGradients, ScaledRows
from .cohorts import binomial_sizes, drawn_law
from .findings import Finding, exact, skipped
from .setup import CLIENTS, Claims, Setup
from .statistics import auditor, seeds

_RECORDS, _QUIET = 16, 1e-13


def subsets(setup: Setup, claims: Claims, seed: int, draws: int) -> list[Finding]:
    """Check sizes, fairness and independence of subsets, of the client with the most records.

    Args:
        setup, claims, seed: of the run.
        draws: number of subsets.
    """
    there = setup.present(np.arange(len(setup.sizes)), np.zeros(len(setup.sizes), dtype=np.int64))
    sampled = [k for k in range(len(there)) if claims.of(GRADIENT, k).sampled is not None]
    client = max(sampled, key=lambda k: int(there[k]), default=-1)
    if setup.one_at_a_time:
        if client < 0:
            return [skipped("sampler", "who acts when is public, and every release uses all records")]
        return _of_activations(setup, claims, client, seed, draws)
    if client < 0:
        return [_all_records(setup, seed)]
    return _of_local_steps(setup, claims, client, sampled, seed, draws)


def _laws(setup: Setup, members: list[list[np.ndarray]], n: int, q: float, coins: np.random.Generator) -> list[Finding]:
    prefix = "sampler: records, "
    sizes = binomial_sizes(f"{prefix}sizes", members[0], n, q, coins)
    return [sizes, *drawn_law(prefix, members, n, q, q * q, coins, fixed=False, secure=setup.secure)]


# Local steps


def _of_local_steps(
    setup: Setup, claims: Claims, client: int, sampled: list[int], seed: int, draws: int
) -> list[Finding]:
    n, q, coins = int(setup.sizes[client]), float(claims.of(GRADIENT, client).sampled or 1.0), auditor(seed, "cohorts")
    first, second = seeds(seed, "cohorts", 2)
    members = [_drawn(setup, one, client, draws) for one in (first, first if setup.secure else second)]
    findings = _laws(setup, members, n, q, coins)
    twins = [k for k in sampled if int(setup.sizes[k]) == n and k != client]
    if twins:  # two clients of one size have subsets of their own
        pair = [members[0], _drawn(setup, first, twins[0], draws)]
        prefix = "sampler: records of two clients, "
        findings.append(drawn_law(prefix, pair, n, q, q * q, coins, fixed=False, secure=False)[-1])
    return findings


def _drawn(setup: Setup, seed: int, client: int, draws: int) -> list[np.ndarray]:
    """Draw the records of a client in ``draws`` local steps, whether or not so many rounds are paid for."""
    channel, one, found = setup.open(seed), torch.tensor([client]), []
    local = int(setup.records.local_steps[client])
    for draw in range(draws):
        index, mask = LocalSteps(channel, draw // local, one).batch(one, draw % local)
        found.append(torch.sort(index[mask]).values.numpy())
    return found


def _all_records(setup: Setup, seed: int) -> Finding:
    clients = torch.arange(len(setup.sizes))[: 4 * CLIENTS]
    index, mask = LocalSteps(setup.open(seed), 0, clients).batch(clients, 0)
    wrong = sum(
        sorted(i[m].tolist()) != list(range(int(n)))
        for i, m, n in zip(index, mask, setup.sizes[clients.numpy()], strict=True)
    )
    return exact("sampler: all records", wrong, "clients that left records out, with nothing sampled")


# Clients that act one at a time


def _of_activations(setup: Setup, claims: Claims, client: int, seed: int, draws: int) -> list[Finding]:
    arrivals, coins = setup.records.arrivals, auditor(seed, "subsamples")
    there = np.arange(setup.sizes[client]) if arrivals is None else np.flatnonzero(arrivals[client] <= 0)
    chosen = np.sort(coins.permutation(there)[:_RECORDS])
    if not len(chosen) or not setup.open(seed).caps[client]:
        return [skipped("sampler", "no client has records at the start and may act")]
    streams = [_sums(setup, claims, one, client, chosen) for one in (seed, seed if setup.secure else seed + 1)]
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
    q = float(claims.of(GRADIENT, client).sampled or 1.0)
    whole = exact("sampler: records, sums", strange, f"of {shorter} are not sums of the gradients drawn over q n")
    return [whole, *_laws(setup, members, len(chosen), q, coins)]


def _sums(setup: Setup, claims: Claims, seed: int, client: int, chosen: np.ndarray) -> Iterator[np.ndarray]:
    """Yield sums (T,) of 2^i over the records ``chosen[i]`` drawn by the releases of one channel after the other."""
    c, d, n = float(setup.privacy.initial_norm), setup.records.dimension, int(setup.sizes[client])
    quiet = replace(setup, privacy=replace(setup.privacy, epsilon=None, noise_multiplier=_QUIET))
    axis = torch.zeros(n, d, dtype=torch.float64)
    axis[:, d // 2] = 1.0
    rows = [axis if k == client else x for k, x in enumerate(setup.x)]
    unit = c * 2.0**-_RECORDS
    factors = np.zeros((1, n))
    factors[0, chosen] = unit * 2.0 ** np.arange(len(chosen))
    gradients = torch.from_numpy(factors)[..., None] * axis
    for index, other in enumerate(seeds(seed, "subsamples", 10_000)):
        channel = quiet.open(seed if setup.secure else other, x=rows)
        cap = min(int(channel.caps[client]), 64)
        channel.begin(0, torch.full((1, cap), client))
        if index % 2 or not setup.linear:
            message = RecordGradients(lambda k, which, where: gradients)
            value = torch.cat([channel.release(GRADIENT, message) for _ in range(cap)])
        else:
            scaled = ScaledRows(lambda k, which, where: factors.repeat(len(which), 0))
            value = channel.release(GRADIENT, scaled, count=cap)
        present = setup.present(np.full(cap, client), np.arange(cap)) / n
        yield value[:, 0, d // 2].numpy() * claims.of(GRADIENT, client).denominator * present / unit
