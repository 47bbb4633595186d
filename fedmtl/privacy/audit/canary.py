"""Check 4: how well can an adversary tell whether a canary took part, against what the event allows?

The worst-case game: canaries send far more than the clip norm along coordinates of their own, everybody else sends
nothing, and a coin decides for each canary whether it is there (replace-one: whether it sends v or -v). The adversary
sees the releases. The threshold on its score is chosen on one half of the canaries; on the other half Clopper-Pearson
limits of the true and false positive rates give lower bounds that hold with probability 1 - alpha:

    mu >= Phi^-1(TPR) - Phi^-1(FPR)                        Gaussian trade-off (Dong, Roth, Su 2022)
    delta(epsilon) >= TPR - exp(epsilon) FPR               any law, and with the roles exchanged

Coordinates carry independent noise under the Gaussian and the Laplace law, so one run plays many canaries; under the
K-norm law they share a radius, and every run plays one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import special
from torch import Tensor

from ..._rounding import rounded_up
from ..accounting.composition import epsilon
from ..channel import GRADIENT, Channel
from ..noise.registry import LAWS
from .findings import LEVEL, Finding, skipped, too_large
from .play import decorrelated, first_cohort, local_of, play, rounds
from .setup import MOST_ELEMENTS, Claim, Claims, Setup
from .statistics import auditor, clopper_pearson, seeds

DELTAS = (0.3, 0.1, 0.03, 0.01, 1e-3)
"""Where the curve of a claim is evaluated, besides the run's own delta."""

_LOUD = 1e3
_LONGEST = 1 << 12
_COMPOSED = 10
_TRIES = 400
_FEWEST = 100  # canaries that are judged

Limits = tuple[float, float, float, float]
"""Lower and upper limits of the true positive rate, then of the false positive rate."""
Curve = list[tuple[float, float]]
"""Claims (epsilon, delta)."""
Trials = tuple[np.ndarray, np.ndarray]
"""Scores (k,) of canaries, and whether each took part (k,)."""


def canaries(setup: Setup, claims: Claims, seed: int, trials: int) -> list[Finding]:
    """Play all games; of each at least ``trials``, up to 25 times more where the noise is large."""
    if setup.one_at_a_time:
        return [skipped("canary", "no games are played against clients that act one at a time")]
    coins = auditor(seed, "canary")
    if setup.gradients is not None:
        return _Records(setup, claims, seed, trials, coins).findings()
    return _Rows(shortened(setup), claims, seed, trials, coins).findings()


def shortened(setup: Setup) -> Setup:
    """Return the same for vectors of at most 4,096 coordinates, where the event does not depend on their number."""
    if setup.privacy.mechanism not in ("gaussian", "discrete_gaussian", "laplace"):
        return setup
    plans = [replace(p, dimension=min(p.dimension, _LONGEST)) if p.form == "vector" else p for p in setup.releases]
    return replace(setup, plans=tuple(plans))


# What the scores refute


def enough_trials(multiplier: float, least: int, most: int) -> int:
    """Return trials that would refute half the noise: the limits of mu are about 19 / sqrt(trials) apart at 1e-6."""
    return min(max(least, math.ceil(600 * multiplier**2)), most)


def curve_of(event: object, uses: int) -> Curve:
    """Return (epsilon, delta) that ``uses`` of the event claim."""
    return [(epsilon(event, uses, delta), delta) for delta in DELTAS]


def judge_gaussian(
    check: str, trials: Trials, mu: float, coins: np.random.Generator, *, level: float = LEVEL
) -> Finding:
    """Return the lower bound on mu against the claimed one."""

    def bound(limits: Limits) -> float:
        return float(special.ndtri(limits[0]) - special.ndtri(limits[3]))

    low = bound(_held_out(trials, bound, level, coins))
    return too_large(check, low, mu, f"lower bound on mu of {len(trials[0])} canaries against the claimed mu", level)


def judge_curve(
    check: str,
    trials: Trials,
    curve: Sequence[tuple[float, float]],
    coins: np.random.Generator,
    *,
    level: float = LEVEL,
) -> Finding:
    """Return the lower bound on epsilon against the claimed one, at the delta of the claim that it contradicts most."""

    def excess(limits: Limits) -> tuple[float, float, float, float]:
        return max((low - eps, low, eps, delta) for eps, delta in curve for low in (epsilon_above(limits, delta),))

    def bound(limits: Limits) -> float:
        return excess(limits)[0]

    _, low, eps, delta = excess(_held_out(trials, bound, level, coins))
    at = f"at delta = {rounded_up(delta, 3)}"
    detail = f"lower bound on epsilon {at} of {len(trials[0])} canaries against the claimed one"
    return too_large(check, low, eps, detail, level)


def epsilon_above(limits: Limits, delta: float) -> float:
    """Return the largest epsilon that the rates refute at ``delta``: of present against absent and the reverse; 0 if
    none."""
    true_low, _, _, false_high = limits
    found = 0.0
    for hits, misses in ((true_low, false_high), (1 - false_high, 1 - true_low)):
        if hits > delta and hits - delta > misses:
            found = max(found, math.log((hits - delta) / max(misses, 1e-300)))
    return found


def _held_out(trials: Trials, bound: Callable[[Limits], float], level: float, coins: np.random.Generator) -> Limits:
    """Return limits of the rates on the second half of the canaries, at the threshold that is best on the first."""
    scores, present = trials
    order = coins.permutation(len(scores))
    half = len(order) // 2
    first, second = order[:half], order[half:]
    candidates = np.quantile(scores[first], np.linspace(0.01, 0.99, 50))

    def limits(sample: np.ndarray, threshold: float) -> Limits:
        above, here = scores[sample] > threshold, present[sample]
        hits, false = int((above & here).sum()), int((above & ~here).sum())
        there = int(here.sum())
        return (*clopper_pearson(hits, there, level / 2), *clopper_pearson(false, len(here) - there, level / 2))

    best = max(candidates.tolist(), key=lambda threshold: bound(limits(first, threshold)))
    return limits(second, best)


@dataclass(frozen=True)
class _Games:
    """What all games have.

    Attributes:
        setup: of the run.
        claims: on its releases.
        seed: of the channels opened here.
        trials: of each game, at least.
        coins: the audit's own.
    """

    setup: Setup
    claims: Claims
    seed: int
    trials: int
    coins: np.random.Generator

    def judged(self, check: str, games: Iterable[Trials], wanted: int, claimed: float | Curve) -> Finding:
        """Play until ``wanted`` canaries took their chance; judge them against a claimed mu, or a curve."""
        scores, present = [np.zeros(0)], [np.zeros(0, dtype=bool)]
        for score, here in games:
            scores.append(score)
            present.append(here)
            if sum(map(len, scores)) >= wanted:
                break
        trials = np.concatenate(scores), np.concatenate(present)
        if len(trials[0]) < _FEWEST:
            return skipped(check, f"only {len(trials[0])} trials")
        if isinstance(claimed, float):
            return judge_gaussian(check, trials, claimed, self.coins)
        return judge_curve(check, trials, claimed, self.coins)


def _gain(units: np.ndarray, multiplier: float, q: float) -> np.ndarray:
    """Return log-likelihood ratios of Gaussian releases (k,): the mixture of drawn and not drawn against absence."""
    ratio = (2 * units - 1) / (2 * multiplier**2)
    return ratio if q >= 1 else np.logaddexp(math.log1p(-q), math.log(q) + ratio)


# Rows of cohorts


class _Rows(_Games):
    """Canaries are clients, each on a coordinate of its own."""

    def findings(self) -> list[Finding]:
        """Play every game."""
        return [*(self._one_release(name, self.claims.of(name)) for name in self.claims.names), self._composed()]

    def _one_release(self, name: str, claim: Claim) -> Finding:
        """Play a canary in a cohort that is known to the adversary, against the event of one release."""
        check = f"canary: one release of {name}"
        if claim.form != "vector" and claim.relation == "replace":
            return skipped(check, "replaced outer products have no game here")
        if claim.bands:
            return skipped(check, "noise is correlated over rounds, of which one alone says less")
        most = max(2000, self.trials // 5) if _alone(claim) else 25 * self.trials
        wanted = enough_trials(claim.multiplier, min(self.trials, most), most)
        claimed = 1 / claim.multiplier if claim.kind == "gaussian" else _curve_of_law(claim)
        return self.judged(check, self._releases(name, claim), wanted, claimed)

    def _releases(self, name: str, claim: Claim) -> Iterator[Trials]:
        """Yield, for every release, canaries that are all in the cohort drawn, in units of the sensitivity."""
        setup, coins = self.setup, self.coins
        dimension = setup.release(name).dimension
        chosen: dict[int, Trials] = {}

        def sent(step: int, plan: str, ranks: Tensor) -> tuple[Tensor, Tensor]:
            if plan != name:
                return setup.zeros(setup.release(plan).dimension, ranks[:0])
            width = 1 if _alone(claim) else min(dimension, max(1, MOST_ELEMENTS // dimension))
            width = min(width, len(ranks))
            places, inside = coins.permutation(dimension)[:width], coins.random(width) < 0.5
            chosen[step] = places, inside
            return _canary_rows(claim, dimension, places, inside, ranks)

        stop = 1 if setup.adaptive is not None or setup.uses_differ else setup.steps
        for seed in seeds(self.seed, f"canary/{name}", _TRIES):
            played = False
            for step, _, values in play(setup, setup.open(seed), sent, start=0, stop=stop):
                places, inside = chosen[step]
                units = values[name] * claim.denominator / claim.sensitivity
                at = places * dimension - places * (places - 1) // 2 if claim.form == "symmetric" else places
                played = played or bool(len(inside))
                yield _support(units, dimension, places) if claim.kind == "wishart" else units[at], inside
            if not played:
                return

    def _composed(self) -> Finding:
        """Play several steps with the sampling: canaries that take part when they are drawn, against the composed
        event."""
        setup, name = self.setup, self.claims.names[0]
        claim, check = self.claims.of(name), f"canary: composed steps of {name}"
        if setup.adaptive is not None:
            return skipped(check, "the clip norm adapts, and scores have no common unit")
        if claim.form != "vector":
            return skipped(check, "only vectors are played over several steps")
        if setup.uses_differ:
            return skipped(check, "the noise differs from use to use, and scores have no common unit")
        if claim.kind == "knorm":
            return skipped(check, "one canary a run would take too many runs")
        steps = min(setup.steps, _COMPOSED)
        if claim.per_participation:
            steps = min(setup.steps, max(steps, math.ceil(3 * setup.sampler.n / claim.denominator)))
        runs: list[Trials] = []
        uses = 0
        for seed in seeds(self.seed, "canary/composed", _TRIES):
            run, done = self._composed_run(name, claim, seed, steps, uses)
            if uses in (0, done):
                uses = done
                runs.append(run)
            if sum(len(scores) for scores, _ in runs) >= self.trials:
                break
        if uses == 0:
            return skipped(check, "no step fits the budget")
        channel = setup.open(next(seeds(self.seed, "canary/composed", 1)))
        curve = curve_of(claim.event, uses)
        if channel.delta is not None:
            curve.append((channel.epsilon_at(uses), channel.delta))
        scores, present = zip(*runs, strict=True)
        finding = judge_curve(check, (np.concatenate(scores), np.concatenate(present)), curve, self.coins)
        return replace(finding, detail=f"{finding.detail}; {uses} uses")

    def _composed_run(self, name: str, claim: Claim, seed: int, steps: int, wanted: int) -> tuple[Trials, int]:
        """Return scores and presence of clients with a coordinate each, and the number of uses that the claim
        covers."""
        setup, coins = self.setup, self.coins
        dimension, n = setup.release(name).dimension, setup.sampler.n
        width = min(n, dimension, max(1, MOST_ELEMENTS // dimension))
        clients, places = np.sort(coins.permutation(n)[:width]), coins.permutation(dimension)[:width]
        inside = coins.random(width) < 0.5
        index = np.full(n, -1)
        index[clients] = np.arange(width)
        score, uses = np.zeros(width), np.zeros(width, dtype=np.int64)

        def sent(step: int, plan: str, ranks: Tensor) -> tuple[Tensor, Tensor]:
            if plan != name:
                return setup.zeros(setup.release(plan).dimension, ranks[:0])
            drawn = ranks[torch.from_numpy(index[ranks.numpy()] >= 0)]
            which = index[drawn.numpy()]
            return _canary_rows(claim, dimension, places[which], inside[which], drawn)

        q = 1.0 if claim.sampled is None else claim.sampled
        played = list(play(setup, setup.open(seed), sent, start=0, stop=steps))
        done = len(played)
        releases = [values[name][places] * claim.denominator / claim.sensitivity for _, _, values in played]
        for units, (_, ranks, _) in zip(_matched(releases, claim), played, strict=True):
            which = index[ranks.numpy()]
            which = which[which >= 0]
            if claim.per_participation:  # the other clients know who took part
                score[which] += units[which]
            elif claim.kind != "gaussian" or claim.relation == "replace":
                score += units
            else:
                score += _gain(units, claim.multiplier, q)
            uses[which] += 1
        if not claim.per_participation:
            return (score, inside), done
        counts = np.bincount(uses, minlength=2)
        most = wanted or int(counts[1:].argmax()) + 1
        chosen = uses == most
        return (score[chosen], inside[chosen]), most


def _matched(releases: list[np.ndarray], claim: Claim) -> Iterable[np.ndarray]:
    """Return for every round the best statistic on who takes part in it: its release, or of noise that is correlated
    over rounds C^T C y, the projection of all independent noise on what one participation moves."""
    if not claim.bands or not releases:
        return releases
    independent = decorrelated(np.stack(releases), claim)
    return decorrelated(independent[::-1], claim)[::-1]


def _alone(claim: Claim) -> bool:
    """Return whether one release plays a single canary, because coordinates share their noise."""
    return claim.kind in ("knorm", "wishart")


def _curve_of_law(claim: Claim) -> Curve:
    """Return the pure epsilon of one release of a law that is not Gaussian, and its curve."""
    if claim.kind == "wishart":
        return [(1 / claim.multiplier, 0.0)]
    event = LAWS["laplace" if claim.kind == "laplace" else "l2_laplace"](claim.multiplier).event(claim.size)
    return [(1 / claim.multiplier, 0.0), *curve_of(event, 1)]


def _support(units: np.ndarray, dimension: int, places: np.ndarray) -> np.ndarray:
    """Return the smallest eigenvalue of the released matrix less the canary's outer product: negative where the canary
    cannot have taken part, because Wishart noise is positive definite."""
    matrix = np.zeros((dimension, dimension))
    rows, columns = np.triu_indices(dimension)
    matrix[rows, columns] = matrix[columns, rows] = units / np.where(rows == columns, 1.0, math.sqrt(2.0))
    matrix[places, places] -= 1.0
    return np.linalg.eigvalsh(matrix)[:1]


def _canary_rows(
    claim: Claim, dimension: int, places: np.ndarray, inside: np.ndarray, ranks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return loud rows of the canaries that are there (replace-one: of all, with their signs), and whose they are."""
    here = np.ones(len(places), bool) if claim.relation == "replace" else inside
    rows = torch.zeros(int(here.sum()), dimension)
    signs = np.where(inside, 1.0, -1.0)[here]
    rows[torch.arange(len(rows)), torch.from_numpy(places[here])] = torch.from_numpy(
        (_LOUD * claim.bound * signs).astype(np.float32)
    )
    return rows, ranks[: len(places)][torch.from_numpy(here)]


# Records of clients that train locally


class _Records(_Games):
    """Canaries are records, on coordinates of their own."""

    def findings(self) -> list[Finding]:
        """Play one local step, and one participation with its sampling.

        In one step every client plays; scores are in units of its noise, and the claim is the largest mu of all
        clients. In a participation the client with most records plays, against its event composed over its local steps.
        """
        each = [self.claims.of(GRADIENT, client) for client in range(len(self.setup.records.ids))]
        if any(claim.kind != "gaussian" for claim in each):
            return [skipped("canary: gradients", "record-level games are played against Gaussian noise")]
        mu = max(1 / claim.multiplier for claim in each)
        wanted = enough_trials(1 / mu, self.trials, 10 * self.trials)
        one = self.judged("canary: one local step", self._steps(each), wanted, mu)
        return [one] if one.skipped else [one, self._participation()]

    def _steps(self, each: Sequence[Claim]) -> Iterator[Trials]:
        """Yield the canaries of the first local step of every round."""
        setup, coins, d = self.setup, self.coins, self.setup.records.dimension
        for seed in seeds(self.seed, "canary/records", 200):
            channel = setup.open(seed)
            for _, clients in rounds(setup, channel):
                some = clients[: max(1, MOST_ELEMENTS // d)]
                axis, inside = coins.integers(d, size=len(some)), coins.random(len(some)) < 0.5
                value = self._loud(channel, some, 0, axis[inside], np.flatnonzero(inside))
                scales = np.array([each[client].scale for client in some.tolist()])
                yield value[np.arange(len(some)), axis] / scales, inside

    def _participation(self) -> Finding:
        client = int(np.argmax(self.setup.sizes))
        claim, local = self.claims.of(GRADIENT, client), self.claims.repeats(client)
        curve = curve_of(claim.event, local)
        delta = self.setup.delta
        curve.append((epsilon(claim.event, local, delta), delta))
        return self.judged("canary: one participation", self._participations(client, claim), self.trials, curve)

    def _participations(self, client: int, claim: Claim) -> Iterator[Trials]:
        """Yield the canaries of all local steps of the first round in which ``client`` takes part."""
        setup, coins, d = self.setup, self.coins, self.setup.records.dimension
        width = min(int(setup.sizes[client]), d)
        q = 1.0 if claim.sampled is None else claim.sampled
        for seed in seeds(self.seed, "canary/participation", _TRIES):
            channel, one = setup.open(seed), torch.tensor([client])
            if not len(first_cohort(setup, channel, having=client)):
                continue
            inside, score = coins.random(width) < 0.5, np.zeros(width)
            axis = coins.permutation(d)[:width]
            for index in local_of(channel).step_numbers(client):
                position, mask = local_of(channel).batch(one, index)
                used = position[0][mask[0]].numpy()
                used = used[(used < width)]
                used = used[inside[used]]
                value = self._loud(channel, one, index, axis[used], np.zeros(len(used), dtype=np.int64))
                score += _gain(value[0, axis] * claim.denominator / claim.bound, claim.multiplier, q)
            yield score, inside

    def _loud(self, channel: Channel, clients: Tensor, step: int, axis: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return a local step in which the gradients of the records are loud along ``axis`` (k,), of ``place`` (k,)."""
        rows = torch.zeros(len(axis), self.setup.records.dimension)
        rows[torch.arange(len(axis)), torch.from_numpy(axis)] = _LOUD * self.setup.privacy.initial_norm
        return local_of(channel).release(clients, step, [(rows, torch.from_numpy(place))]).cpu().numpy()
