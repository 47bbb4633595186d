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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from scipy import special
from torch import Tensor

from ..._rounding import rounded_up
from ...errors import BudgetExhausted
from ..accounting.composition import epsilon
from ..channel import GRADIENT, Channel
from ..noise.registry import LAWS
from .findings import Finding, skipped, too_large
from .play import begin_round, local_of, play
from .setup import MOST_ELEMENTS, Claim, Claims, Setup
from .statistics import auditor, clopper_pearson, seeds

DELTAS = (0.3, 0.1, 0.03, 0.01, 1e-3)
"""Where the curve of a claim is evaluated, besides the run's own delta."""

_LOUD = 1e3
_LONGEST = 1 << 12
_COMPOSED = 10
_TRIES = 400
_Seeds = Callable[[str, int], Iterator[int]]
"""(purpose, count) -> seeds of that many channels."""

Limits = tuple[float, float, float, float]
"""Lower and upper limits of the true positive rate, then of the false positive rate."""


def canaries(setup: Setup, claims: Claims, seed: int, trials: int, alpha: float) -> list[Finding]:
    """Play all games.

    Args:
        setup, claims, seed: of the run.
        trials: of each game, at least; up to 25 times more where the noise is large.
        alpha: level of each finding.
    """
    coins, named = auditor(seed, "canary"), partial(seeds, seed)
    if setup.one_at_a_time:
        return [skipped("canary", "no games are played against clients that act one at a time")]
    if setup.gradients is not None:
        return _of_records(setup, claims, named, trials, alpha, coins)
    short, read = shortened(setup), {name: claims.of(name) for name in claims.names}
    return [
        *_per_release(short, read, named, trials, alpha, coins),
        _composed(short, read, named, trials, alpha, coins),
    ]


def _per_release(
    setup: Setup,
    claims: dict[str, Claim],
    seeds: _Seeds,
    trials: int,
    alpha: float,
    coins: np.random.Generator,
) -> list[Finding]:
    """Of every release: a canary in a cohort that is known to the adversary, against the event of one release."""
    findings = []
    for name, claim in claims.items():
        check = f"canary: one release of {name}"
        if claim.form != "vector" and claim.relation == "replace":
            findings.append(skipped(check, "replaced outer products have no game here"))
            continue
        alone = claim.kind in ("knorm", "wishart")  # one canary a release
        most = max(2000, trials // 5) if alone else 25 * trials
        wanted = enough_trials(claim.multiplier, min(trials, most), most)
        scores, present = _one_release(setup, name, claim, seeds, wanted, coins)
        if len(scores) < 100:
            findings.append(skipped(check, f"only {len(scores)} trials"))
            continue
        findings.append(
            judge_gaussian(check, scores, present, 1 / claim.multiplier, alpha, coins)
            if claim.kind == "gaussian"
            else judge_curve(check, scores, present, _curve_of_law(claim), alpha, coins)
        )
    return findings


def _composed(
    setup: Setup,
    claims: dict[str, Claim],
    seeds: _Seeds,
    trials: int,
    alpha: float,
    coins: np.random.Generator,
) -> Finding:
    """Several steps with the sampling: canaries that take part when they are drawn, against the composed event."""
    name, claim = next(iter(claims.items()))
    check = f"canary: composed steps of {name}"
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
    scores: list[np.ndarray] = []
    present: list[np.ndarray] = []
    uses = 0
    for seed in seeds("canary/composed", _TRIES):
        got, here, done = _composed_run(setup, name, claim, seed, steps, coins, uses)
        if uses in (0, done):
            uses = done
            scores.append(got)
            present.append(here)
        if sum(map(len, scores)) >= trials:
            break
    if uses == 0:
        return skipped(check, "no step fits the budget")
    channel = setup.open(next(seeds("canary/composed", 1)))
    curve = curve_of(claim.event, uses, claim.accountant)
    if channel.delta is not None:
        curve.append((channel.epsilon_at(uses), channel.delta))
    finding = judge_curve(check, np.concatenate(scores), np.concatenate(present), curve, alpha, coins)
    return Finding(**{**finding.__dict__, "detail": f"{finding.detail}; {uses} uses"})


def enough_trials(multiplier: float, least: int, most: int) -> int:
    """Trials that would refute half the noise: the limits of mu are about 19 / sqrt(trials) apart at level 1e-6."""
    return min(max(least, math.ceil(600 * multiplier**2)), most)


def curve_of(event: object, uses: int, accountant: object) -> list[tuple[float, float]]:
    """Return (epsilon, delta) that ``uses`` of the event claim."""
    return [(epsilon(event, uses, delta, accountant=accountant), delta) for delta in DELTAS]  # type: ignore[arg-type]


def judge_gaussian(
    check: str, scores: np.ndarray, present: np.ndarray, mu: float, alpha: float, coins: np.random.Generator
) -> Finding:
    """The lower bound on mu against the claimed one."""

    def bound(limits: Limits) -> float:
        return float(special.ndtri(limits[0]) - special.ndtri(limits[3]))

    low = bound(_held_out(scores, present, bound, alpha, coins))
    return too_large(check, low, mu, f"lower bound on mu of {len(scores)} canaries against the claimed mu", alpha)


def judge_curve(
    check: str,
    scores: np.ndarray,
    present: np.ndarray,
    curve: Sequence[tuple[float, float]],
    alpha: float,
    coins: np.random.Generator,
) -> Finding:
    """The lower bound on epsilon against the claimed one, at the delta of the claim that it contradicts most."""

    def excess(limits: Limits) -> tuple[float, float, float, float]:
        return max((low - eps, low, eps, delta) for eps, delta in curve for low in (epsilon_above(limits, delta),))

    def bound(limits: Limits) -> float:
        return excess(limits)[0]

    _, low, eps, delta = excess(_held_out(scores, present, bound, alpha, coins))
    at = f"at delta = {rounded_up(delta, 3)}"
    detail = f"lower bound on epsilon {at} of {len(scores)} canaries against the claimed one"
    return too_large(check, low, eps, detail, alpha)


def epsilon_above(limits: Limits, delta: float) -> float:
    """The largest epsilon that the rates refute at ``delta``: of present against absent and the reverse; 0 if none."""
    true_low, _, _, false_high = limits
    found = 0.0
    for hits, misses in ((true_low, false_high), (1 - false_high, 1 - true_low)):
        if hits > delta and hits - delta > misses:
            found = max(found, math.log((hits - delta) / max(misses, 1e-300)))
    return found


def _held_out(
    scores: np.ndarray, present: np.ndarray, bound: Callable[[Limits], float], alpha: float, coins: np.random.Generator
) -> Limits:
    """Limits of the rates on the second half of the canaries, at the threshold that is best on the first half."""
    order = coins.permutation(len(scores))
    half = len(order) // 2
    first, second = order[:half], order[half:]
    candidates = np.quantile(scores[first], np.linspace(0.01, 0.99, 50))

    def limits(sample: np.ndarray, threshold: float) -> Limits:
        above, here = scores[sample] > threshold, present[sample]
        hits, false = int((above & here).sum()), int((above & ~here).sum())
        there = int(here.sum())
        return (*clopper_pearson(hits, there, alpha / 2), *clopper_pearson(false, len(here) - there, alpha / 2))

    best = max(candidates.tolist(), key=lambda threshold: bound(limits(first, threshold)))
    return limits(second, best)


def _curve_of_law(claim: Claim) -> list[tuple[float, float]]:
    """Of one release of a law that is not Gaussian: its pure epsilon, and its curve."""
    if claim.kind == "wishart":
        return [(1 / claim.multiplier, 0.0)]
    event = LAWS["laplace" if claim.kind == "laplace" else "l2_laplace"](claim.multiplier).event(claim.size)
    return [(1 / claim.multiplier, 0.0), *curve_of(event, 1, "pld")]


def _one_release(
    setup: Setup,
    name: str,
    claim: Claim,
    seeds: _Seeds,
    trials: int,
    coins: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and presence of canaries that are all in the cohort drawn, in units of the sensitivity."""
    dimension = setup.release(name).dimension
    scores: list[np.ndarray] = []
    present: list[np.ndarray] = []
    chosen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    collected = 0

    def rows(step: int, plan: str, ranks: Tensor) -> tuple[Tensor, Tensor]:
        if plan != name:
            return setup.zeros(setup.release(plan).dimension, ranks[:0])
        width = (
            1 if claim.kind in ("knorm", "wishart") else min(len(ranks), dimension, max(1, MOST_ELEMENTS // dimension))
        )
        width = min(width, len(ranks))
        places, inside = coins.permutation(dimension)[:width], coins.random(width) < 0.5
        chosen[step] = places, inside
        return _canary_rows(claim, dimension, places, inside, ranks)

    for seed in seeds(f"canary/{name}", _TRIES):
        before = collected
        stop = 1 if setup.adaptive is not None or setup.uses_differ else setup.steps
        for step, _, values in play(setup.open(seed), rows, start=0, stop=stop):
            places, inside = chosen[step]
            present.append(inside)
            collected += len(inside)
            units = values[name] * claim.denominator / claim.sensitivity
            at = places * dimension - places * (places - 1) // 2 if claim.form == "symmetric" else places
            scores.append(_support(units, dimension, places) if claim.kind == "wishart" else units[at])
            if collected >= trials:
                return np.concatenate(scores), np.concatenate(present)
        if collected == before:
            break
    return np.concatenate([np.zeros(0), *scores]), np.concatenate([np.zeros(0, bool), *present])


def shortened(setup: Setup) -> Setup:
    """Return the same for vectors of at most 4,096 coordinates, where the event does not depend on their number."""
    if setup.privacy.mechanism not in ("gaussian", "laplace"):
        return setup
    plans = [replace(p, dimension=min(p.dimension, _LONGEST)) if p.form == "vector" else p for p in setup.releases]
    return replace(setup, plans=tuple(plans))


def _support(units: np.ndarray, dimension: int, places: np.ndarray) -> np.ndarray:
    """Smallest eigenvalue of the released matrix less the canary's outer product: negative where the canary cannot have
    taken part, because Wishart noise is positive definite."""
    matrix = np.zeros((dimension, dimension))
    rows, columns = np.triu_indices(dimension)
    matrix[rows, columns] = matrix[columns, rows] = units / np.where(rows == columns, 1.0, math.sqrt(2.0))
    matrix[places, places] -= 1.0
    return np.linalg.eigvalsh(matrix)[:1]


def _canary_rows(
    claim: Claim, dimension: int, places: np.ndarray, inside: np.ndarray, ranks: Tensor
) -> tuple[Tensor, Tensor]:
    """Loud rows of the canaries that are there (replace-one: of all, with their signs), and whose they are."""
    here = np.ones(len(places), bool) if claim.relation == "replace" else inside
    rows = torch.zeros(int(here.sum()), dimension)
    signs = np.where(inside, 1.0, -1.0)[here]
    rows[torch.arange(len(rows)), torch.from_numpy(places[here])] = torch.from_numpy(
        (_LOUD * claim.bound * signs).astype(np.float32)
    )
    return rows, ranks[: len(places)][torch.from_numpy(here)]


def _composed_run(
    setup: Setup, name: str, claim: Claim, seed: int, steps: int, coins: np.random.Generator, wanted: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Scores and presence of clients with a coordinate each, and the number of uses that the claim covers."""
    dimension = setup.release(name).dimension
    n = setup.sampler.n
    width = 1 if claim.kind == "knorm" else min(n, dimension, max(1, MOST_ELEMENTS // dimension))
    clients, places = np.sort(coins.permutation(n)[:width]), coins.permutation(dimension)[:width]
    inside = coins.random(width) < 0.5
    index = np.full(n, -1)
    index[clients] = np.arange(width)
    score, uses = np.zeros(width), np.zeros(width, dtype=np.int64)

    def rows(step: int, plan: str, ranks: Tensor) -> tuple[Tensor, Tensor]:
        if plan != name:
            return setup.zeros(setup.release(plan).dimension, ranks[:0])
        drawn = ranks[torch.from_numpy(index[ranks.numpy()] >= 0)]
        which = index[drawn.numpy()]
        return _canary_rows(claim, dimension, places[which], inside[which], drawn)

    done = 0
    for _, ranks, values in play(setup.open(seed), rows, start=0, stop=steps):
        units = values[name][places] * claim.denominator / claim.sensitivity
        which = index[ranks.numpy()]
        which = which[which >= 0]
        if claim.per_participation:  # the other clients know who took part
            score[which] += units[which]
        else:
            score += _evidence(units, claim)
        uses[which] += 1
        done += 1
    if not claim.per_participation:
        return score, inside, done
    counts = np.bincount(uses, minlength=2)
    most = wanted or int(counts[1:].argmax()) + 1
    chosen = uses == most
    return score[chosen], inside[chosen], most


def _evidence(units: np.ndarray, claim: Claim) -> np.ndarray:
    """Log-likelihood ratio of one step under the claim: the mixture of drawn and not drawn against absence."""
    if claim.kind != "gaussian":
        return units
    if claim.relation == "replace":
        return units
    ratio = (2 * units - 1) / (2 * claim.multiplier**2)
    q = 1.0 if claim.sampled is None else claim.sampled
    if q < 1:
        return np.logaddexp(math.log1p(-q), math.log(q) + ratio)
    return ratio


# Records of clients that train locally


def _of_records(
    setup: Setup, claims: Claims, seeds: _Seeds, trials: int, alpha: float, coins: np.random.Generator
) -> list[Finding]:
    """Canary records on coordinates of their own: in one local step, and in one participation with its sampling.

    In one step every client plays; scores are in units of its noise, and the claim is the largest mu of all clients.
    In a participation the client with most records plays, against its event composed over its local steps.
    """
    plan, check = setup.records, "canary: one local step"
    each = [claims.of(GRADIENT, client) for client in range(len(plan.ids))]
    if any(claim.kind != "gaussian" for claim in each):
        return [skipped("canary: gradients", "record-level games are played against Gaussian noise")]
    mu = max(1 / claim.multiplier for claim in each)
    wanted = enough_trials(1 / mu, trials, 10 * trials)
    scores: list[float] = []
    present: list[bool] = []
    for seed in seeds("canary/records", 200):
        channel = setup.open(seed)
        for step in range(setup.steps):
            try:
                clients = begin_round(setup, channel, step)
            except BudgetExhausted:
                break
            clients = clients[: max(1, MOST_ELEMENTS // plan.dimension)]
            axis, inside = coins.integers(plan.dimension, size=len(clients)), coins.random(len(clients)) < 0.5
            value = _loud(channel, clients, 0, axis[inside], np.flatnonzero(inside), plan.dimension, setup)
            for i, client in enumerate(clients.tolist()):
                claim = each[client]
                scores.append(float(value[i, axis[i]]) / claim.scale)
            present += inside.tolist()
            if len(scores) >= wanted:
                break
        if len(scores) >= wanted:
            break
    if len(scores) < 100:
        return [skipped(check, f"only {len(scores)} trials")]
    findings = [judge_gaussian(check, np.array(scores), np.array(present), mu, alpha, coins)]
    return [*findings, _participation(setup, claims, seeds, trials, alpha, coins)]


def _loud(
    channel: Channel, clients: Tensor, step: int, axis: np.ndarray, place: np.ndarray, dimension: int, setup: Setup
) -> np.ndarray:
    rows = torch.zeros(len(axis), dimension)
    rows[torch.arange(len(axis)), torch.from_numpy(axis)] = _LOUD * setup.privacy.initial_norm
    return local_of(channel).release(clients, step, [(rows, torch.from_numpy(place))]).cpu().numpy()


def _participation(
    setup: Setup, claims: Claims, seeds: _Seeds, trials: int, alpha: float, coins: np.random.Generator
) -> Finding:
    plan, check = setup.records, "canary: one participation"
    client = int(np.argmax(setup.sizes))
    claim, local = claims.of(GRADIENT, client), claims.repeats(client)
    width = min(int(setup.sizes[client]), plan.dimension)
    q = 1.0 if claim.sampled is None else claim.sampled
    scores, present = [], []
    for seed in seeds("canary/participation", 400):
        channel = setup.open(seed)
        try:
            step = 0
            while client not in (clients := begin_round(setup, channel, step)).tolist():
                step += 1
                if step >= setup.steps:
                    break
        except BudgetExhausted:
            continue
        if client not in clients.tolist():
            continue
        one, inside, score = torch.tensor([client]), coins.random(width) < 0.5, np.zeros(width)
        axis = coins.permutation(plan.dimension)[:width]
        for index in local_of(channel).step_numbers(client):
            position, mask = local_of(channel).batch(one, index)
            used = position[0][mask[0]].numpy()
            used = used[(used < width)]
            used = used[inside[used]]
            value = _loud(channel, one, index, axis[used], np.zeros(len(used), dtype=np.int64), plan.dimension, setup)
            ratio = (2 * value[0, axis] * claim.denominator / claim.bound - 1) / (2 * claim.multiplier**2)
            score += ratio if q >= 1 else np.logaddexp(math.log1p(-q), math.log(q) + ratio)
        scores.append(score)
        present.append(inside)
        if width * len(scores) >= trials:
            break
    if width * len(scores) < 100:
        return skipped(check, f"only {width * len(scores)} trials")
    curve = curve_of(claim.event, local, claim.accountant)
    curve.append((epsilon(claim.event, local, setup.delta, accountant=claim.accountant), setup.delta))
    return judge_curve(check, np.concatenate(scores), np.concatenate(present), curve, alpha, coins)
