"""Runs through the production path in which clients contribute nothing: what leaves is noise.

A run goes in rounds of cohorts, whose rows or whose gradients of single records are released, or in activations of
clients that act one at a time. Whichever it is, :func:`noise_of` gives the noise in the same form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from scipy import signal, special
from torch import Tensor

from ...errors import BudgetExhausted
from ..channel import FIRST, GRADIENT, Channel
from ..local_steps import LocalSteps
from ..release import Form
from ..sums import BoundedMeans, ClientVectors, GradientMessage, RecordGradients, ScaledRows
from .setup import ACTIVATIONS, MOST_ELEMENTS, Claim, Claims, Setup, count_std, expected_cohort
from .statistics import seeds

Rows = Callable[[int, str, Tensor], tuple[Tensor, Tensor]]
"""(step, release, ranks drawn) -> rows (k, D) and the ranks whose rows they are."""

_ROWS = 1 << 20  # numbers of gradients of records given to a channel at once, at most
_LOCAL = 4  # local steps of a participation that are made
_CHANNELS = 50  # opened for more noise, at most
_DRAWN = 64  # clients or records whose part in a release is noted


@dataclass(frozen=True, eq=False)
class Noise:
    """Noise of one release, as numbers that are i.i.d. N(0, 1) under the claim.

    Attributes:
        units: (T, D).
        drawn: (T, 64) bool, which of the first clients, or of the first records of the client, take part in it.
        clients: (T,) whose, where clients have noise of their own; else None.
    """

    units: np.ndarray
    drawn: np.ndarray
    clients: np.ndarray | None = None

    @classmethod
    def joined(cls, parts: list[Noise]) -> Noise:
        """Return one after the other."""
        clients = [part.clients for part in parts if part.clients is not None]
        units, drawn = (np.concatenate([getattr(part, name) for part in parts]) for name in ("units", "drawn"))
        return cls(units, drawn, np.concatenate(clients) if clients else None)


def _marked(places: np.ndarray) -> np.ndarray:
    """Return (64,) bool, which of the first places are among ``places`` (k,)."""
    return np.isin(np.arange(_DRAWN), places)


def standardized(values: np.ndarray, claim: Claim) -> np.ndarray:
    """Return releases (T, D) of pure noise as numbers that are i.i.d. N(0, 1) under the claim.

    Gaussian: divided by the standard deviation. Laplace: by the distribution function. K-norm: the radius, Gamma(D),
    is replaced by the chi variable of the same quantile; a uniform direction times that is standard normal.
    """
    units = values / claim.scale
    if claim.kind == "gaussian":
        return units
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if claim.kind == "laplace":
            return np.sign(units) * -special.ndtri(0.5 * np.exp(-np.abs(units)))
        radius, d = np.linalg.norm(units, axis=1, keepdims=True), units.shape[1]
        upper, lower = special.gammaincc(d, radius), special.gammainc(d, radius)
        half = np.where(upper < 0.5, special.gammainccinv(d / 2, upper), special.gammaincinv(d / 2, lower))
        return units / radius * np.sqrt(2 * half)


def decorrelated(values: np.ndarray, claim: Claim) -> np.ndarray:
    """Return C w of releases w (T, D) of consecutive rounds, the first of which is the first of a session; ``values``
    where noise is independent over rounds."""
    return signal.lfilter(claim.bands, [1.0], values, axis=0) if claim.bands and len(values) else values


def noise_of(setup: Setup, claims: Claims, channel: Channel, start: int, stop: int) -> dict[str, Noise]:
    """Return the noise of steps ``start`` to ``stop`` of a channel, by release."""
    if setup.gradients is None:
        return _of_rows(setup, claims, channel, start, stop)
    if setup.one_at_a_time:
        return {"gradients": Silent.played(channel, setup, start, stop).noise(setup, claims)}
    return {"gradients": _of_local_steps(setup, claims, channel, start, stop)}


def gathered(setup: Setup, claims: Claims, seed: int, wanted: int) -> dict[str, Noise]:
    """Draw at least ``wanted`` numbers of noise of every release, from up to 50 channels, the first of this seed."""
    found: list[dict[str, Noise]] = []
    left = wanted
    for other in (seed, *seeds(seed, "noise/more", _CHANNELS - 1)):
        found.append(noise_of(setup, claims, setup.open(other), 0, steps_for(setup, left)))
        least = min(one.units.size for name, one in found[-1].items() if not name.endswith("/count"))
        left -= least
        if left <= 0 or not least:
            break
    joined = {name: Noise.joined([one[name] for one in found]) for name in found[0]}
    if setup.first is not None:
        joined["first releases"] = first_noise(setup, claims, seed, wanted)
    return joined


def steps_for(setup: Setup, wanted: int) -> int:
    """Return how many steps of one channel give about so many numbers of noise, where the run has them."""
    if setup.gradients is None:
        return min(setup.steps, max(4, -(-wanted // min(plan.size for plan in setup.releases))))
    rows = -(-wanted // setup.records.dimension)
    if setup.one_at_a_time:
        return min(ACTIVATIONS, rows)
    local = min(_LOCAL, max(1, int(np.median(setup.records.local_steps))))
    return min(setup.steps, max(2, math.ceil(rows / (local * setup.sampler.denominator))))


# Rows of cohorts


def play(
    setup: Setup, channel: Channel, rows: Rows, *, start: int, stop: int
) -> Iterator[tuple[int, Tensor, dict[str, np.ndarray]]]:
    """Play rounds through the production path (draw, begin, release every plan) until the budget ends.

    Yields:
        step, the ranks drawn, and the released values by name, float64 coordinates (size,).
    """
    for step, ranks in rounds(setup, channel, start, stop):
        values = {}
        for plan in channel.plans:
            sent, who = rows(step, plan.name, ranks)
            values[plan.name] = coordinates(channel.release(plan.name, sent, who).numpy(), plan.form)
        yield step, ranks, values


def coordinates(value: np.ndarray, form: Form) -> np.ndarray:
    """Return the coordinates that are noised: of a symmetric matrix the upper triangle, off-diagonals times
    sqrt(2). A matrix that is not symmetric gives NaN."""
    if form != "symmetric":
        return value
    if not np.array_equal(value, value.T):
        return np.full(len(value) * (len(value) + 1) // 2, np.nan)
    upper = np.triu_indices(len(value))
    return value[upper] * np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0))


def silence(setup: Setup) -> Rows:
    """Return rows of clients that contribute nothing: zeros, and in every other step nobody answers."""
    dimensions = {plan.name: plan.dimension for plan in setup.releases}

    def rows(step: int, name: str, ranks: Tensor) -> tuple[Tensor, Tensor]:
        return setup.zeros(dimensions[name], ranks if step % 2 == 0 else ranks[:0])

    return rows


def _of_rows(setup: Setup, claims: Claims, channel: Channel, start: int, stop: int) -> dict[str, Noise]:
    """Return the noise of every release; where the uses differ, each in units of its own noise over that of the first
    use.

    Where the clip norm adapts, they are in units of the clip norm of their step over the first one, which the audit
    computes from the released counts by Algorithm 1 of Andrew et al. 2021; noise of the count itself, in units of its
    standard deviation, is under ``"<name>/count"``. Of noise that is correlated over rounds, what is independent is
    returned; from the middle of a run on, without the rounds that earlier ones enter.
    """
    names = claims.names
    kept: dict[str, list[np.ndarray]] = {name: [] for name in names}
    adaptive = setup.adaptive
    noted: list[tuple[int, str, Tensor]] = []
    if adaptive is not None:
        channel.record = noted
        kept |= {f"{name}/count": [] for name in names}
    growth, rows, cohorts = dict.fromkeys(names, 1.0), silence(setup), [np.zeros((0, _DRAWN), dtype=bool)]
    for step, ranks, values in play(setup, channel, rows, start=start, stop=stop):
        if setup.uses_differ:
            use = channel.account.steps_charged - 1
            growth = {name: claims.of(name, use=use).multiplier / claims.of(name).multiplier for name in names}
        cohorts.append(_marked(ranks.numpy())[None])
        for name, value in values.items():
            kept[name].append(value / growth[name])
            if adaptive is None:
                continue
            (count,) = [float(v) for at, key, v in noted if (at, key) == (step, f"{name}/count")]
            m, answered = expected_cohort(setup.sampler), len(rows(step, name, ranks)[0])
            kept[f"{name}/count"].append(np.array([(count * m - answered / 2) / count_std(adaptive, setup.sampler)]))
            growth[name] *= math.exp(-adaptive.lr * (count + 0.5 - adaptive.quantile))
    sizes = {plan.name: plan.size for plan in setup.releases}
    raw = {name: np.stack(found) if found else np.zeros((0, sizes.get(name, 1))) for name, found in kept.items()}
    for name in names:
        unknown = max(0, len(claims.of(name).bands) - 1) if start else 0
        raw[name] = decorrelated(raw[name], claims.of(name))[unknown:]
    units = {name: standardized(raw[name], claims.of(name)) if name in names else raw[name] for name in raw}
    drawn = np.concatenate(cohorts)
    return {name: Noise(one, drawn[len(drawn) - len(one) :]) for name, one in units.items()}


# Local steps


def begin_round(setup: Setup, channel: Channel, step: int) -> Tensor:
    """Begin a round; return who takes part: ranks, or where records are protected clients in their order."""
    ranks = channel.draw(step)
    channel.begin(step, ranks)
    if setup.gradients is None or setup.gradients.ranks is None:
        return ranks
    return torch.argsort(setup.gradients.ranks)[ranks]


def drawing(channel: Channel, ranks: Tensor) -> Channel:
    """Return the channel, which draws the cohort ``ranks`` (k,) in every round."""
    sampler, drawn = copy(channel.sampler), torch.sort(ranks).values
    object.__setattr__(sampler, "draw", lambda *address: drawn)
    channel.sampler = sampler
    return channel


def rounds(setup: Setup, channel: Channel, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Begin rounds, of the run or from ``start`` to ``stop``, until the budget ends; yield each with who takes part."""
    for step in range(start, setup.steps if stop is None else stop):
        try:
            clients = begin_round(setup, channel, step)
        except BudgetExhausted:
            return
        yield step, clients


def first_cohort(setup: Setup, *channels: Channel, having: int | None = None) -> Tensor:
    """Begin rounds in all channels until somebody, or the client ``having``, takes part.

    Returns:
        Who takes part, int64 (k,) as :func:`begin_round` has them; empty where nobody does within the budget.
    """
    for (_, clients), *_ in zip(*(rounds(setup, channel) for channel in channels), strict=True):
        if len(clients) and (having is None or having in clients.tolist()):
            return clients
    return torch.zeros(0, dtype=torch.int64)


def local_of(channel: Channel) -> LocalSteps:
    """Return the local steps of the round that has begun."""
    assert channel.local is not None
    return channel.local


def _of_local_steps(setup: Setup, claims: Claims, channel: Channel, start: int, stop: int) -> Noise:
    """Play clients whose records have zero gradients, or (every other step) none."""
    d = setup.records.dimension
    rows, who, drawn = [np.zeros((0, d))], [np.zeros(0, dtype=np.int64)], [np.zeros((0, _DRAWN), dtype=bool)]
    for _, clients in rounds(setup, channel, start, stop):
        releases = local_of(channel)
        local = releases.steps(clients)
        for index in range(min(int(local.max()) if len(local) else 0, _LOCAL)):
            active = clients[local > index]
            used, mask = releases.batch(active, index)
            drawn += [_marked(own[there].numpy())[None] for own, there in zip(used, mask, strict=True)]
            place, _ = mask.nonzero(as_tuple=True) if index % 2 == 0 else (torch.zeros(0, dtype=torch.int64), None)
            place = place[: max(1, MOST_ELEMENTS // d)]
            value = releases.release(active, index, [(torch.zeros(1, d).expand(len(place), -1), place)]).cpu().numpy()
            rows += [standardized(value[i : i + 1], claims.of(GRADIENT, k)) for i, k in enumerate(active.tolist())]
            who.append(active.numpy())
    return Noise(np.concatenate(rows), np.concatenate(drawn), np.concatenate(who))


# Clients that act one at a time


def turns(caps: np.ndarray, limit: int) -> np.ndarray:
    """Return (T,) clients of the first ``limit`` activations at most, who act in turn until their caps are used up."""
    kept, total, use = [np.zeros(0, dtype=np.int64)], 0, 0
    while total < limit and (acting := np.flatnonzero(caps > use)).size:
        kept.append(acting)
        total, use = total + acting.size, use + 1
    return np.concatenate(kept)[:limit]


@dataclass(frozen=True, eq=False)
class Silent:
    """Releases of clients whose records have zero gradients, or factors that are not numbers.

    Attributes:
        clients, uses, present: (T,) who acts, after how many activations of its own, with how many records.
        drawn: (T, 64) bool, which of the client's first records take part, in the first repetition.
        values: (T, R, D) float64.
    """

    clients: np.ndarray
    uses: np.ndarray
    present: np.ndarray
    drawn: np.ndarray
    values: np.ndarray

    @classmethod
    def played(
        cls,
        channel: Channel,
        setup: Setup,
        start: int,
        stop: int,
        block: int | None = None,
        who: np.ndarray | None = None,
    ) -> Silent:
        """Play activations in which nothing is there to be seen but noise.

        Activations before ``start`` happen where they are not charged yet, and are left out. They come in blocks of
        ``block`` activations, or None for uneven ones; clients act in turn up to their caps, all or those of ``who``
        (n,). Activations without records, or of clients that earlier sessions have brought to their caps, are left
        out; fewer are played where the caps end.
        """
        order = turns(channel.caps if who is None else np.where(who, channel.caps, 0), stop)
        present = setup.present(order, np.arange(len(order)))
        at = first = min(start, _charged(channel, present))
        channel.start(at)
        uses = channel.account.participations[0].copy()
        values: list[np.ndarray] = [np.zeros((0, channel.replicates, setup.records.dimension))]
        drawn = [np.zeros((0, _DRAWN), dtype=bool)]
        while at < len(order):
            length = min(len(order) - at, block or 1 + at * 7 % 61)
            acting = torch.from_numpy(order[at : at + length])
            try:
                channel.begin(at, acting.expand(channel.replicates, -1))
            except BudgetExhausted:
                break
            drawn.append(_members(channel, acting.numpy()))
            values.append(nothing(channel, setup, length, math.nan if at % 2 else 0.0))
            at += length
        number = np.zeros(at - first, dtype=np.int64)
        for row, client in enumerate(order[first:at].tolist()):
            number[row] = uses[client]
            uses[client] += int(present[first + row] > 0)
        loud = (present[first:at] > 0) & (number < channel.caps[order[first:at]])
        kept = np.flatnonzero(loud & (np.arange(first, at) >= start))
        rest = np.concatenate(drawn)[kept], np.concatenate(values)[kept]
        return cls(order[first:at][kept], number[kept], present[first:at][kept], *rest)

    def noise(self, setup: Setup, claims: Claims, replicate: int = 0) -> Noise:
        """Return the noise in the units of what each was charged for."""
        values, out = self.values[:, replicate].copy(), np.empty_like(self.values[:, replicate])
        for row, (client, use, n) in enumerate(zip(self.clients, self.uses, self.present, strict=True)):
            first = claims.of(GRADIENT, int(client)).multiplier
            louder = claims.of(GRADIENT, int(client), int(use)).multiplier / first
            values[row] *= n / setup.sizes[client] / louder
        for client in np.unique(self.clients).tolist():
            own = self.clients == client
            out[own] = standardized(values[own], claims.of(GRADIENT, client))
        return Noise(out, self.drawn, self.clients)


def _members(channel: Channel, clients: np.ndarray) -> np.ndarray:
    """Return (k, 64) bool: which of the first records of each of ``clients`` (k,), who act next, will take part."""
    found = np.zeros((len(clients), _DRAWN), dtype=bool)
    for client in np.unique(clients).tolist():
        which = np.flatnonzero(clients == client)
        members = channel.members(client, which, np.zeros_like(which))
        if members is not None:
            found[which, : members.shape[1]] = members[:, :_DRAWN]
    return found


def _charged(channel: Channel, present: np.ndarray) -> int:
    """Return how many activations an earlier session charged: as its uses take, with those of nobody between."""
    uses = int(channel.account.participations[0].sum())
    return 0 if uses == 0 else int(np.searchsorted(np.cumsum(present > 0), uses)) + 1


def zero_factors(setup: Setup, factor: float = 0.0) -> ScaledRows:
    """Return factors of records whose gradients are all zero (or not a number)."""
    return ScaledRows(lambda client, which, where: np.full((len(which), setup.sizes[client]), factor))


def zero_gradients(setup: Setup, factor: float = 0.0) -> RecordGradients:
    """Return, as :func:`zero_factors`, the gradients themselves."""

    def rows(client: int, which: np.ndarray, where: np.ndarray) -> Tensor:
        shape = (len(which), int(setup.sizes[client]), setup.records.dimension)
        return torch.full((1, 1, 1), factor, dtype=torch.float64).expand(shape)

    return RecordGradients(rows)


def zero_means(setup: Setup) -> BoundedMeans:
    """Return, as :func:`zero_factors`, the means of gradients that the domain bounds."""
    return BoundedMeans(lambda client, which, where: np.zeros((len(which), setup.records.dimension)))


def nothing(channel: Channel, setup: Setup, count: int, factor: float) -> np.ndarray:
    """Return (count, R, D) by any way out, one activation after the other or together."""
    assert channel.draws is not None
    if not channel.draws.sampled and count % 5 == 3:
        return _given(channel, zero_means(setup), count, together=False)
    small = int(setup.sizes.max()) * setup.records.dimension * count <= _ROWS
    if not setup.linear or (small and count % 4 > 1):
        return _given(channel, zero_gradients(setup, factor), count, together=small and count % 2 == 0)
    return _given(channel, zero_factors(setup, factor), count, together=count % 2 == 0)


def _given(channel: Channel, message: GradientMessage, count: int, *, together: bool) -> np.ndarray:
    if together:
        return channel.release(GRADIENT, message, count=count).numpy()
    if count % 3:
        return np.stack(list(islice(channel.answers(message), count)))
    return torch.cat([channel.release(GRADIENT, message) for _ in range(count)]).numpy()


def next_release(channel: Channel, message: GradientMessage, number: int) -> np.ndarray:
    """Return what the next activation releases, (R, D) float64, of every second ``number`` by
    :meth:`~fedmtl.privacy.Channel.answers`, whose loop over a single run is code of its own.

    Raises:
        PrivacyError: a message that is refused; the activation is still to be released.
    """
    return channel.release(GRADIENT, message)[0].numpy() if number % 2 else next(channel.answers(message))


def first_noise(setup: Setup, claims: Claims, seed: int, wanted: int) -> Noise:
    """Draw first releases of zero vectors, at least ``wanted`` numbers from up to 50 channels."""
    d, charged = setup.records.dimension, [k for k in range(len(setup.sizes)) if claims.starts(k)]
    found = [np.zeros((0, d))]
    for other in seeds(seed, "noise/first", _CHANNELS if charged else 0):
        value = setup.open(other).release(FIRST, ClientVectors(lambda client: torch.zeros(d))).numpy()[0]
        found += [standardized(value[k : k + 1], claims.of(FIRST, k)) for k in charged]
        if sum(part.size for part in found) >= wanted:
            break
    units = np.concatenate(found)
    clients = np.resize(np.array(charged, dtype=np.int64), len(units))
    return Noise(units, np.zeros((len(units), _DRAWN), dtype=bool), clients)
