"""Check 2, freshness: no two steps, releases, clients, repetitions, channels, processes or sessions share noise."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import numpy as np
import torch

from ..channel import GRADIENT
from .findings import Finding, exact, skipped
from .noise import fresh_between, fresh_names, fresh_rows, fresh_within
from .play import Noise, Silent, first_cohort, gathered, local_of, noise_of, standardized
from .processes import Sample, fresh_forks, fresh_objects, fresh_restores
from .setup import ACTIVATIONS, CLIENTS, Claims, Setup
from .statistics import seeds

_STEPS = 96  # in which releases of one step are compared


def freshness(setup: Setup, claims: Claims, noise: Mapping[str, Noise], seed: int, *, processes: bool) -> list[Finding]:
    """Make all checks of freshness.

    Args:
        setup, claims: of the run.
        noise: of one channel or several, by release.
        seed: of the channels opened here.
        processes: also compare with a forked process and a restored run.
    """
    first, second = seeds(seed, "noise", 2)
    findings = []
    for name, one in noise.items():
        if not name.endswith("/count"):
            check = f"freshness: steps of {name}"
            findings += [fresh_rows(check, one.units), *fresh_within(name, one.units, setup.parts(one.units.shape[1]))]
    if setup.gradients is None:
        if len(noise) > 1:
            smallest = min(plan.size for plan in setup.releases)
            findings += fresh_names(
                {name: one.units for name, one in gathered(setup, claims, first, _STEPS * smallest).items()}
            )
        steps = max(2, min(setup.steps, 32))
    elif setup.one_at_a_time:
        findings += _of_activations(setup, claims, first)
        steps = min(ACTIVATIONS, int(setup.open(first).caps.sum()), 4 * -(-128 // setup.records.dimension))
    else:
        findings += [*training_freshness(setup, claims, first), *_address_of_local_steps(setup, first)]
        steps = min(setup.steps, 4)
    return findings + fresh_elsewhere(setup, sample_of(setup, claims), first, second, steps, processes=processes)


def sample_of(setup: Setup, claims: Claims) -> Sample:
    """Return the noise of a window of steps, of noised releases alone."""

    def sample(channel: object, start: int, stop: int) -> dict[str, np.ndarray]:
        found = noise_of(setup, claims, channel, start, stop)  # type: ignore[arg-type]
        return {name: one.units for name, one in found.items() if not name.endswith("/count")}

    return sample


def fresh_elsewhere(
    setup: Setup, sample: Sample, first: int, second: int, steps: int, *, processes: bool
) -> list[Finding]:
    """Compare with the noise of another channel, of a forked process and of a restored run."""
    findings = fresh_objects(setup, sample, first, second, steps)
    if processes:
        findings += fresh_forks(setup, sample, first, steps)
        findings += fresh_restores(setup, sample, first, steps)
    return findings


def _of_activations(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check that no two uses, clients or repetitions share noise, and a client has its noise whoever else acts."""
    n, d = len(setup.sizes), setup.records.dimension
    caps = setup.open(seed).caps
    who = (caps > 0) & (setup.present(np.arange(n), np.zeros(n, dtype=np.int64)) > 0)
    acting, uses = int(who.sum()), int(min(caps[who], default=0))
    uses = min(uses, max(1, ACTIVATIONS // max(1, acting)))
    if not acting:
        return [skipped("freshness: gradients", "no client may act from the start")]
    played = Silent.played(setup.open(seed), setup, 0, acting * uses, acting, who)  # in blocks in which all act
    cube = played.noise(setup, claims).units.reshape(uses, acting, d)
    findings = [
        fresh_rows("freshness: uses of gradients", cube.reshape(uses, -1)),
        fresh_rows("freshness: clients of gradients", cube.swapaxes(0, 1).reshape(acting, -1)),
        *fresh_within("gradients, use by use", cube.reshape(-1, 1), [(0, 1)]),
    ]
    if setup.secure:
        return findings
    with closing(setup.open(seed, replicates=2)) as both:
        pair = Silent.played(both, setup, 0, acting * uses, None, who)
    one, two = (pair.noise(setup, claims, r).units for r in range(2))
    findings.append(fresh_between("freshness: repetitions of gradients", one, two))
    few = who & (np.cumsum(who) % 2 == 1)
    alone = Silent.played(setup.open(seed), setup, 0, int(few.sum()) * uses, 7, few).noise(setup, claims)
    assert alone.clients is not None
    there = np.flatnonzero(who)
    moved = 0
    for client in np.flatnonzero(few).tolist():
        own = alone.units[alone.clients == client]
        moved += int((~np.isclose(own, cube[: len(own), np.flatnonzero(there == client)[0]], atol=1e-6)).any(1).sum())
    return [*findings, _address(moved, len(alone.units))]


def _address(moved: int, count: int) -> Finding:
    return exact(
        "freshness: noise of a client alone", moved, f"of {count} releases have other noise where fewer clients act"
    )


def _address_of_local_steps(setup: Setup, seed: int) -> list[Finding]:
    """Check that a client has its noise whoever else is in the cohort."""
    if setup.secure:
        return []
    channels = setup.open(seed), setup.open(seed)
    clients = first_cohort(setup, *channels)[:CLIENTS]
    clients = clients[local_of(channels[0]).steps(clients) > 0] if len(clients) else clients
    if len(clients) < 2:
        return []
    empty = torch.zeros(0, setup.records.dimension), torch.zeros(0, dtype=torch.int64)
    together = local_of(channels[0]).release(clients, 0, [empty])
    alone = torch.cat([local_of(channels[1]).release(clients[k : k + 1], 0, [empty]) for k in range(1, len(clients))])
    return [_address(int((together[1:] != alone).any(1).sum()), len(alone))]


def training_freshness(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check that no local training of a participation has the noise of another one; nothing where there is only one."""
    plan = setup.records
    if plan.trainings == 1:
        return []
    channel = setup.open(seed)
    clients = first_cohort(setup, channel)[:CLIENTS]
    noise: list[list[np.ndarray]] = [[] for _ in range(plan.trainings)]
    empty = torch.zeros(0, plan.dimension), torch.zeros(0, dtype=torch.int64)
    for client in clients.tolist():
        local = local_of(channel)
        for number in local.step_numbers(client):
            value = local.release(torch.tensor([client]), number, [empty]).cpu().numpy()
            noise[number // local.stride].append(standardized(value, claims.of(GRADIENT, client)))
    if not noise[0]:
        return [skipped("freshness: local trainings", "nobody takes part")]
    first, *later = (np.concatenate(rows) for rows in noise)
    check = "freshness: local trainings, 1 and {}"
    return [fresh_between(check.format(number), first, other) for number, other in enumerate(later, start=2)]
