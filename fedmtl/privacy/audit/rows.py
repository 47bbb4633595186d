"""Noise that clients add to their own rows, against the server: its law, freshness, sensitivity and charges.

The rows are taken where the release adds them up, so they are what the server gets. The claim is read off the event
that is charged for them: K-norm noise on a row that moves by at most 2 C when the data of its client are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..._rounding import rounded_up
from ..channel import Channel
from .findings import Finding, exact
from .freshness import fresh_between, fresh_rows, fresh_within
from .noise import noise_law
from .play import standardized
from .sensitivity import Worst, adversaries
from .setup import Claim, Setup, clip_claim, law_of
from .stated import Stated, played, second_accountant
from .statistics import seeds

_MOST_ELEMENTS = 1 << 20
_MOST_ROWS = 2000
_CHANNELS = 50

Sent = Callable[[int, int], Tensor]
"""(step, number of clients) -> rows (k, D)."""


def row_claims(setup: Setup, channel: Channel) -> dict[str, Claim]:
    """Return the claim on a client's row, of every release whose rows have noise of their own."""
    claims = {}
    for plan in setup.releases:
        name = plan.name
        if plan.rows is None or name not in channel.rows:
            continue
        charged = channel.rows[name].cost.step(0)
        kind, multiplier = law_of(charged)
        claims[name] = replace(
            clip_claim(setup, name),
            kind=kind,
            multiplier=multiplier,
            relation="replace",
            norm="l2",
            form="vector",
            size=plan.dimension,
            denominator=1.0,
            event=charged,
        )
    return claims


def sent_rows(channel: Channel, name: str, sent: Sent, *, start: int, stop: int) -> np.ndarray:
    """Return rows (T, k, D) as the server gets them, of the same first clients in every step."""
    found: list[tuple[int, str, Tensor]] = []
    channel.record, kept = found, []
    dimensions = {plan.name: plan.dimension for plan in channel.plans}
    for step in range(start, stop):
        ranks = channel.draw(step)
        channel.begin(step, ranks)
        count = min(len(ranks), max(2, _MOST_ELEMENTS // dimensions[name]))
        found.clear()
        channel.release(name, sent(step, count), ranks[:count])
        rows = [value for at, key, value in found if (at, key) == (step, f"{name}/rows")]
        if not rows:  # nothing was added: what the server gets is what was sent
            rows = [sent(step, count).double()]
        kept.append(rows[0].numpy())
    return np.stack(kept)


def _zeros(dimension: int, step: int, count: int) -> Tensor:
    return torch.zeros(count, dimension)


def _one_apart(row: Tensor, step: int, count: int) -> Tensor:
    rows = torch.ones(count, len(row))
    rows[count // 2] = row
    return rows


def rows_noise(
    setup: Setup, claims: dict[str, Claim], channel: Channel, start: int, stop: int
) -> dict[str, np.ndarray]:
    """Return the standardized noise (T k, D) on rows of zeros, by release."""
    found = {}
    for name, claim in claims.items():
        rows = sent_rows(channel, name, partial(_zeros, claim.size), start=start, stop=stop)
        found[f"rows of {name}"] = standardized(rows.reshape(-1, claim.size), claim)
    return found


def row_noise_law(setup: Setup, claims: dict[str, Claim], seed: int, wanted: int) -> list[Finding]:
    """Make the tests of :func:`~fedmtl.privacy.audit.noise.noise_law` on what the server gets."""
    findings = []
    for name, claim in claims.items():
        rows, least = [], -(-wanted // claim.size)
        for other in seeds(seed, f"rows/{name}", _CHANNELS):
            steps = min(setup.steps, max(1, -(-least // setup.sampler.n)))
            rows.append(rows_noise(setup, {name: claim}, setup.open(other), 0, steps)[f"rows of {name}"])
            least -= len(rows[-1])
            if least <= 0:
                break
        noise = np.concatenate(rows)[: max(_MOST_ROWS, -(-wanted // claim.size))]
        findings += noise_law(f"rows of {name}", noise, [(0, claim.size)])
    return findings


def row_freshness(setup: Setup, claims: dict[str, Claim], seed: int) -> list[Finding]:
    """Check that no two steps and no two clients share noise, and no row repeats itself."""
    findings = []
    for name, claim in claims.items():
        steps = min(setup.steps, 16)
        cube = sent_rows(setup.open(seed), name, partial(_zeros, claim.size), start=0, stop=steps)
        units = standardized(cube.reshape(-1, claim.size), claim).reshape(cube.shape)
        of = f"rows of {name}"
        if len(cube) > 1:
            findings.append(fresh_rows(f"freshness: steps of {of}", units.reshape(len(cube), -1)))
        clients = units[:, :64].swapaxes(0, 1)
        findings.append(fresh_rows(f"freshness: clients of {of}", clients.reshape(len(clients), -1)))
        findings += fresh_within(of, units.reshape(1, -1), [(0, units.size)])
        # the noise on rows is not that on their sum
        channel = setup.open(seed)
        first = sent_rows(channel, name, partial(_zeros, claim.size), start=0, stop=1)[0]
        bare = replace(setup, rows=False).open(seed)
        ranks = bare.draw(0)
        bare.begin(0, ranks)
        total = bare.release(name, torch.zeros(0, claim.size), ranks[:0]).numpy().reshape(1, -1)
        length = min(first.size, total.size)
        if length >= 64:
            pair = first.reshape(1, -1)[:, :length], total[:, :length]
            findings.append(fresh_between(f"freshness: {of} and their sum", *pair))
    return findings


def row_sensitivity(setup: Setup, claims: dict[str, Claim], seed: int) -> list[Finding]:
    """Check that with equal noise the row of a client whose data are replaced moves by at most 2 C, and nobody else's
    at all."""
    setup, findings = setup.seeded(), []
    for name, claim in claims.items():
        worst, others = Worst(), 0
        for index, adversary in enumerate(adversaries(claim.size)):
            for opposite in (-adversary, torch.zeros_like(adversary)):
                one, two = (
                    sent_rows(setup.open(seed + index), name, partial(_one_apart, row), start=0, stop=1)[0]
                    for row in (adversary, opposite)
                )
                with np.errstate(invalid="ignore", over="ignore"):
                    moved = np.linalg.norm(one - two, axis=1)
                place = len(moved) // 2
                worst.see(float(moved[place]) / claim.sensitivity, f"adversary {index}")
                others += int((np.delete(moved, place) != 0).sum())
        findings.append(worst.finding(f"sensitivity: rows of {name}", "largest change of a row over 2 C"))
        detail = f"rows of other clients, {worst.cases} pairs"
        findings.append(exact(f"sensitivity: other rows of {name}", others, detail))
    return findings


def row_charges(setup: Setup, claims: dict[str, Claim], seed: int) -> list[Finding]:
    """Check that the event agrees with the noise, and its composition over all uses stays within what was asked for."""
    findings = []
    done = played(setup, seed)
    for name, claim in claims.items():
        asked = setup.release(name).rows
        noise = done.channel.rows[name]
        assert asked is not None
        wrong = []
        delta = setup.delta if asked.delta is None else asked.delta
        if noise.cost.delta != delta:
            wrong.append(f"delta is {rounded_up(noise.cost.delta, 6)}, the settings have {rounded_up(delta, 6)}")
        if claim.kind != "knorm" or claim.event.dimension != claim.size:
            wrong.append(f"the event is {claim.event}, rows have {claim.size} coordinates")
        if abs(noise.multiplier / claim.multiplier - 1) > 1e-9:
            wrong.append(f"noise {noise.multiplier:.6g}, event {claim.multiplier:.6g}")
        stated = noise.epsilon_at(done.steps)
        if not stated <= asked.epsilon * (1 + 1e-6):
            wrong.append(
                f"epsilon is {rounded_up(stated, 6)} after all steps, {rounded_up(asked.epsilon, 6)} was asked for"
            )
        findings.append(exact(f"charges: rows of {name}", len(wrong), "; ".join(wrong) or "law, noise, delta, budget"))
        one = Stated(stated, [(claim.event, done.steps)], f"of {done.steps} uses")
        findings.append(second_accountant([one], delta, f"charges: second accountant, rows of {name}"))
    return findings
