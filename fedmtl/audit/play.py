"""The audit's only reading of a channel: the messages of clients and their releases, in one form.

A run goes in rounds of cohorts, whose rows or whose gradients of single records are released, or in
activations of clients that act one at a time. Whichever it is, :func:`played` gives the releases as
samples, through the production path. If clients contribute nothing, the releases are noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BudgetExhausted
from ..privacy.activation_channel import ActivationChannel
from ..privacy.records import Gradients
from ..privacy.round_channel import RoundChannel
from .claim import GRADIENTS
from .recording import RecordedRounds
from .samples import ReleasedValue, Sample, coordinates, decorrelated
from .setup import ACTIVATIONS, MOST_ELEMENTS, Setup
from .statistics import seeds

Sent = Callable[[str, int, Tensor], Any]
"""(release, step, clients that take part) -> vectors (k, D), and the client of each, int64 (k,); of
a client that acts, also its gradients."""


_LOCAL = 4  # local steps of a participation that are made
_TURNS = 3  # of every client in one block of activations
_CHANNELS = 50  # opened for more noise, at most


# Samples


def silence(setup: Setup) -> Sent:
    """Returns the messages of clients that contribute nothing: zeros, and in every other step no
    rows, except if a row of zeros counts as unclipped. Clients that act one at a time send
    gradients of 0 or NaN, in every kind of message."""

    def sent(name: str, step: int, clients: Tensor) -> Any:
        if setup.one_at_a_time:
            value = math.nan if step % 2 else 0.0
            n = int(setup.sizes[int(clients[0])])
            if setup.records.x is not None and step // 2 % 2:
                return np.full(n, value)
            return torch.tensor(value, dtype=torch.float64).expand(n, setup.records.dimension)
        d = setup.dimension(name)
        # everybody adds a share of the noise of a secure sum
        if setup.shares is None:
            if step % 2 or setup.adaptive is not None:
                clients = clients[:0]
            clients = clients[: max(1, MOST_ELEMENTS // d)]
        return torch.zeros(1, d).expand(len(clients), -1), clients

    return sent


def gathered(setup: Setup, seed: int, wanted: int) -> dict[str, Sample]:
    """Draws at least ``wanted`` numbers of noise of every release, if the budget has them: in
    one step of a channel of this seed, and then in as many steps of up to 49 others as seem to be
    missing."""
    drawn: list[dict[str, Sample]] = []
    steps = 1
    left = wanted
    for other in (seed, *seeds(seed, "noise/more", _CHANNELS - 1)):
        drawn.append(played(setup, setup.open(other), 0, steps))
        least = min(
            sample.values.size for name, sample in drawn[-1].items() if not name.endswith("/count")
        )
        left -= least
        if left <= 0 or (not least and steps > 1):
            break
        steps = min(
            ACTIVATIONS if setup.one_at_a_time else setup.steps,
            math.ceil(steps * left / max(1, least)),
        )
    return {
        name: replace(
            first, releases=[each for samples in drawn for each in samples[name].releases]
        )
        for name, first in drawn[0].items()
    }


def played(
    setup: Setup,
    channel: RoundChannel | ActivationChannel,
    start: int,
    stop: int,
    sent: Sent | None = None,
    *,
    who: np.ndarray | None = None,
    local: int = _LOCAL,
) -> dict[str, Sample]:
    """Plays rounds, or activations, through the production path until the budget ends.

    Args:
        setup: of the run.
        channel: an open one.
        start: the first step; activations before it happen if they are not charged yet, and are
            left out.
        stop: the step after the last one.
        sent: the inputs of the releases; None for nothing, see :func:`silence`. Noise that is
            correlated over rounds is then returned as the independent noise that it is made of; in
            the middle of a run, without the rounds that earlier ones enter.
        who: the only clients that take part, in every step; None for those that are drawn, or all
            in turn.
        local: most local steps of one participation that are made.

    Returns:
        The released values, by name: a release of rows, ``"<name>/count"`` of its unclipped
        clients, ``"rows of <name>"`` with the noise of the clients themselves, or ``"gradients"``.
        If the clip norm adapts, the noise of a round grows as the audit computes it from the
        released counts, by Algorithm 1 of Andrew et al. 2021.
    """
    if sent is None:
        sends = silence(setup)
    else:
        sends = sent
    if isinstance(channel, ActivationChannel):
        return {GRADIENTS: _activations(setup, channel, start, stop, sends, who)}
    if who is not None:
        channel = _drawing(channel, who)
    if setup.gradients is not None:
        return {GRADIENTS: _local_steps(setup, channel, start, stop, sends, local)}
    assert isinstance(channel, RecordedRounds)
    made = _sums(setup, channel, start, stop, sends)
    if sent is not None:
        return made
    return {name: _independent(each, start > 0) for name, each in made.items()}


def _independent(sample: Sample, later: bool) -> Sample:
    """Returns the independent noise of which the correlated noise of consecutive rounds is made,
    without the first rounds if ``later`` than the start."""
    claim = sample.releases[0].claim if sample.releases else None
    if claim is None or not claim.bands:
        return sample
    values = zip(sample.releases, decorrelated(sample.values, claim), strict=True)
    return Sample(
        sample.size,
        [replace(each, value=value) for each, value in values][later * (len(claim.bands) - 1) :],
    )


def _with_zeros(rows: Tensor, who: Tensor, cohort: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows with one of zeros of each client of the cohort that has none: in a secure sum
    everybody sends a row."""
    absent = cohort[~torch.isin(cohort, who)]
    zeros = torch.zeros(len(absent), rows.shape[1], dtype=rows.dtype)
    return torch.cat([rows, zeros]), torch.cat([who, absent])


def summed(
    channel: RoundChannel, gradients: Tensor, who: Tensor, cohort: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the sums of the gradients of each client of the cohort, as a secure sum of records
    takes them: clients clip their own.

    Args:
        channel: with a round that has begun.
        gradients: (N, D).
        who: int64 (N,), the client of each.
        cohort: int64 (k,).

    Returns:
        (k, D), and the clients, ascending.
    """
    assert channel.local is not None
    clients = cohort.sort().values
    place = torch.searchsorted(clients, who)
    return channel.local.grid_sums(clients, [(gradients, place)]), clients


def _sums(
    setup: Setup, channel: RecordedRounds, start: int, stop: int, sent: Sent
) -> dict[str, Sample]:
    """Plays rounds in which rows of clients are added up."""
    names = [
        *setup.claims.names,
        *(f"{name}/count" for name in setup.claims.names if setup.adaptive is not None),
    ]
    made = {name: Sample(setup.claims.of(name).size) for name in names}
    growth = dict.fromkeys(names, 1.0)
    noted = list[tuple[int, str, Tensor]]()
    channel.record = noted
    for step, cohort in rounds(setup, channel, start, stop):
        use = channel.accountant.steps_charged - 1
        drawn = np.sort(cohort.numpy())
        for plan in channel.plans:
            rows, who = sent(plan.name, step, cohort)
            if setup.pooled is not None:
                rows, who = summed(channel, rows, who, cohort)
            elif setup.shares is not None:
                rows, who = _with_zeros(rows, who, cohort)
            noted.clear()
            value = coordinates(channel.release(plan.name, rows, who).numpy(), plan.form)
            beside = {name: released for _, name, released in noted}
            if setup.rows:
                claim = setup.claims.of(names[0])
                no_member = np.zeros(0, dtype=np.int64)
                hidden = zip(
                    beside.get(f"{plan.name}/rows", rows).double().numpy(),
                    who.tolist(),
                    strict=True,
                )
                if plan.name == setup.rows:
                    made[names[0]].releases.extend(
                        ReleasedValue(row, claim, k, step, no_member) for row, k in hidden
                    )
                continue
            claim = setup.claims.of(plan.name, use=use)
            claim = replace(claim, bound=claim.bound * growth[plan.name])
            made[plan.name].releases.append(ReleasedValue(value, claim, -1, step, drawn))
            if setup.adaptive is not None:
                name = f"{plan.name}/count"
                count = float(beside[f"{plan.name}/count"])
                made[name].releases.append(
                    ReleasedValue(np.array([count]), setup.claims.of(name), -1, step, drawn)
                )
                growth[plan.name] *= math.exp(
                    -setup.adaptive.lr * (count + 0.5 - setup.adaptive.quantile)
                )
    return made


def _local_steps(
    setup: Setup, channel: RoundChannel, start: int, stop: int, sent: Sent, local: int
) -> Sample:
    """Plays rounds in which clients train by DP-SGD: the first ``local`` steps of each."""
    made = Sample(setup.records.dimension)
    total = setup.records.local_steps
    for step, clients in rounds(setup, channel, start, stop):
        releases = channel.local
        assert releases is not None
        most = np.minimum(total, local)
        for count in range(int(most[clients.numpy()].max(initial=0))):
            acting = clients[torch.from_numpy(most)[clients] > count]
            used, mask = releases.batch(acting)
            rows, who = sent(GRADIENTS, count, torch.repeat_interleave(acting, mask.sum(1)))
            value = (
                releases.release(acting, [(rows, torch.searchsorted(acting, who))]).cpu().numpy()
            )
            for k, noised, at, there in zip(acting.tolist(), value, used, mask, strict=True):
                drawn = np.sort(at[there].numpy())
                use = step * int(total[k]) + count
                made.releases.append(
                    ReleasedValue(noised, setup.claims.of(GRADIENTS, k), k, use, drawn)
                )
    return made


def _activations(
    setup: Setup,
    channel: ActivationChannel,
    start: int,
    stop: int,
    sent: Sent,
    who: np.ndarray | None,
) -> Sample:
    """Plays clients that act in turn up to their caps, in blocks of one turn, and every third of
    three; of a client at its cap, if an earlier session brought it there, nothing is
    returned."""
    if who is None:
        caps = channel.caps
    else:
        caps = np.where(np.isin(np.arange(len(channel.caps)), who), channel.caps, 0)
    order = turns(np.where(setup.sizes > 0, caps, 0), stop)
    uses = channel.accountant.participations[0].copy()
    at = min(start, int(uses.sum()))
    channel.start(at)
    made = Sample(setup.records.dimension)
    turn = max(1, int((caps > 0).sum()))
    block = 0
    while at < len(order):
        acting = order[at : at + turn * (_TURNS if block % 3 == 2 else 1)]
        try:
            channel.begin(at, torch.from_numpy(acting)[None].expand(channel.replicates, -1))
        except BudgetExhausted:
            break
        for place, client in enumerate(acting.tolist()):
            drawn = _members(channel, client)
            value = activation(setup, channel, block, sent)
            if uses[client] < channel.caps[client] and at + place >= start:
                claim = setup.claims.of(GRADIENTS, client, int(uses[client]))
                made.releases.append(
                    ReleasedValue(value[-1], claim, client, int(uses[client]), drawn)
                )
            uses[client] += 1
        at = at + len(acting)
        block = block + 1
    return made


# Rounds


def _drawing(channel: RoundChannel, clients: np.ndarray) -> RoundChannel:
    """Returns the channel, which draws the cohort ``clients`` (k,) in every round."""
    sampler = copy(channel.sampler)
    drawn = torch.from_numpy(np.sort(clients))
    object.__setattr__(sampler, "draw", lambda *address: drawn)
    channel.sampler = sampler
    return channel


def rounds(
    setup: Setup, channel: RoundChannel, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Begins rounds, of the run or from ``start`` to ``stop``, until the budget ends; yields each
    with its cohort."""
    for step in range(start, setup.steps if stop is None else stop):
        try:
            clients = channel.draw(step)
            channel.begin(step, clients)
        except BudgetExhausted:
            return
        yield step, clients


# Clients that act one at a time


def turns(caps: np.ndarray, limit: int) -> np.ndarray:
    """Returns (T,), the clients of the first ``limit`` activations at most: they act in turn until
    their caps are used up."""
    uses = np.minimum(caps, limit)
    turn = np.concatenate([np.arange(use) for use in uses])
    return np.repeat(np.arange(len(caps)), uses)[np.argsort(turn, kind="stable")][:limit]


def _members(channel: ActivationChannel, client: int) -> np.ndarray:
    """Returns int64 (k,), the drawn records of ``client`` for its next release; none if it draws no
    subset."""
    members = None
    if channel.answering[0]:
        members = channel.members(client, np.zeros(1, dtype=np.int64))
    return np.flatnonzero(() if members is None else members[0])


def activation(setup: Setup, channel: ActivationChannel, step: int, sent: Sent) -> np.ndarray:
    """Returns the releases (R, D) of the next activation. Its client hands over the same in
    every replicate: gradients of all records, or vectors (k, D), the gradients of the first k
    while the others are zero."""
    gradients: list[Gradients] = []
    for client, runs in channel.acting:
        rows = sent(GRADIENTS, step, torch.tensor([client]))
        if isinstance(rows, tuple):
            vectors = rows[0]
            rows = torch.zeros(int(setup.sizes[client]), vectors.shape[1], dtype=torch.float64)
            rows[: len(vectors)] = vectors[: len(rows)]
        shape = (len(runs), *rows.shape)
        gradients.append(
            rows.expand(shape) if isinstance(rows, Tensor) else np.broadcast_to(rows, shape)
        )
    return channel.release(gradients)


# The statements of a channel on its noise


def stated_multiplier(
    setup: Setup, channel: RoundChannel | ActivationChannel, name: str, client: int, use: int
) -> float:
    """Returns the noise multiplier that the channel says a use has, over the allocation's
    weight."""
    if isinstance(channel, RoundChannel) and setup.rows:
        return channel.row_noise[setup.rows].multiplier
    if isinstance(channel, ActivationChannel) or setup.gradients is not None:
        assert channel.noise_multipliers is not None
        weights = setup.records.allocation
        weight = 1.0
        if weights is not None:
            weight = weights[client][use] / np.mean(weights[client])
        return float(channel.noise_multipliers[client] / weight)
    noise = channel.releases[name].weighted(use).noise
    if noise is None:
        return math.nan
    return float(noise.multiplier)
