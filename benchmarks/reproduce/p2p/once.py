"""One release of each agent, and free averaging after it, against tuned local models, at small epsilons.

Agents release the gradient of their first wake-up with their whole budget, go on averaging with their neighbours
without their records (``PeerAveraging``), and end with a last step on their own records around their neighbours' mean,
which nobody receives. Every method is tuned on the same validation problems with as many
settings. Writes scores.csv and the tables of README.md beside this file.

    python benchmarks/reproduce/p2p/once.py --root /path/to/ml-100k
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2])]

from agents import DELTA, agents, best_mu, exact, peers  # noqa: E402
from peers import Array, Row, budgets, owners, seeded, simulate  # noqa: E402
from scores import Score, by_client, difference, interval, mark, renew_scores  # noqa: E402
from sweep import existing, markdown, replace_section  # noqa: E402

from fedmtl import PeerAveraging  # noqa: E402
from fedmtl.algorithms.linear.data import LinearData, LinearLoss  # noqa: E402
from fedmtl.algorithms.linear.solve import fit_own, minimize  # noqa: E402
from fedmtl.data import FederatedDataset, TargetAngles  # noqa: E402
from fedmtl.data.readers.movielens import user_ratings  # noqa: E402
from fedmtl.privacy import PrivacyCost  # noqa: E402

SEEDS = tuple(range(8))
WAKEUPS = 30  # of an agent that releases once
Setting = tuple[float, float, float]


@dataclass(frozen=True)
class Effort:
    """What every method is tuned by: as many settings for each.

    Attributes:
        validation: seeds of the problems.
        epsilons: of the runs.
        published: mu, wake-ups, clip.
        once: mu h, h, clip.
        refined: so many settings, the best as they are sent, are also tried with each pull of the last step.
        pulls: of the last step, and ridges of local models.
    """

    validation: tuple[int, ...] = (100, 101, 102)
    epsilons: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    published: tuple[Setting, ...] = tuple(
        itertools.product((0.1, 0.3, 1.0, 3.0), (1, 3, 10, 30), (1.0, 3.0))
    )
    once: tuple[Setting, ...] = tuple(
        itertools.product((0.1, 0.3, 1.0, 3.0), (0.02, 0.05, 0.15, 0.5), (1.0, 3.0))
    )
    refined: int = 12
    pulls: tuple[float, ...] = (0.05, 0.15, 0.5, 1.5, 5.0, 15.0)


SMALL = Effort(
    (100, 101),
    (1.0, 3.0, 10.0),
    tuple(itertools.product((0.3, 1.0), (10, 30), (1.0,))),
    tuple(itertools.product((0.1, 0.3), (0.02, 0.05), (1.0,))),
    4,
    (0.15, 0.5, 1.5, 5.0),
)
EFFORT = {20: Effort(), 50: Effort(), 100: SMALL}


def published(p: int, seed: int, setting: Setting) -> Array:
    """The algorithm as published, with a valid norm: models (epsilons, n, p) as they are sent."""
    mu, wakeups, clip = setting
    data = agents(p, seed)
    return simulate(
        peers(p, seed, mu), data, budgets(EFFORT[p].epsilons, clip, DELTA), int(wakeups), seed
    )[0]


def once(p: int, seed: int, setting: Setting, power: float = 2.0) -> Array:
    """One release of each agent: models (epsilons, n, p) as they are sent."""
    product, curvature, clip = setting
    algorithm = peers(p, seed, product / curvature, kind=PeerAveraging, confidence_power=power)
    algorithm = replace(algorithm, smoothness=curvature)
    return simulate(
        algorithm, agents(p, seed), budgets(EFFORT[p].epsilons, clip, DELTA), WAKEUPS, seed
    )[0]


@cache
def linear(p: int, seed: int) -> LinearData:
    return LinearData.of_data(agents(p, seed))


def stepped(p: int, seed: int, starts: Array, pull: float) -> Array:
    """Every agent's last step from starts (k, n, p): argmin sum_j l(v . x_j, y_j) + pull ||v - start||^2."""
    rows, found = linear(p, seed), starts.copy()
    for i, (x, y) in enumerate(zip(rows.x, rows.y, strict=True)):
        own = fit_own(
            LinearLoss("logistic"),
            x,
            y,
            torch.from_numpy(starts[:, i]),
            2 * pull / len(x),
            "frobenius",
        )
        found[:, i] += own.numpy()
    return found


def around(p: int, seed: int, models: Array) -> Array:
    """Means of the neighbours' models, of models (k, n, p)."""
    weights = TargetAngles(seed).build(agents(p, seed)).weights.toarray()
    means: Array = (weights / weights.sum(1, keepdims=True)) @ models
    return means


def accuracies(models: Array, data: FederatedDataset) -> Array:
    """Shares of right test labels (k, n) of models (k, n, p)."""
    x, y, agent, counts = owners(data)
    right = (np.einsum("kmp,mp->km", models[:, agent], x) > 0) == (y > 0.5)
    return np.stack([np.bincount(agent, one) / counts for one in right])


def tuned(
    p: int, run: Callable[[int, int, Setting], Array], grid: Sequence[Setting], spread: bool
) -> tuple[list[Setting], list[tuple[Setting, float]]]:
    """For each epsilon, the best setting as sent, and the best with a last step and its pull, on the validation
    problems."""
    effort = EFFORT[p]
    sent = {
        (setting, seed): run(p, seed, setting) for setting in grid for seed in effort.validation
    }
    value = {
        setting: np.mean(
            [accuracies(sent[setting, s], agents(p, s)).mean(1) for s in effort.validation], axis=0
        )
        for setting in grid
    }
    best, refined = [], []
    for e in range(len(effort.epsilons)):
        order = sorted(grid, key=lambda setting: -value[setting][e])
        best.append(order[0])
        tried = order[: effort.refined]
        total = np.zeros((len(effort.pulls), len(tried)))
        for seed in effort.validation:
            starts = np.stack([sent[setting, seed][e] for setting in tried])
            starts = around(p, seed, starts) if spread else starts
            for k, pull in enumerate(effort.pulls):
                total[k] += accuracies(stepped(p, seed, starts, pull), agents(p, seed)).mean(1)
        k, at = np.unravel_index(int(total.argmax()), total.shape)
        refined.append((tried[at], effort.pulls[k]))
    return best, refined


def alone(p: int, seed: int, pull: float) -> Array:
    """Local models with one ridge for all: (n, p)."""
    found: Array = stepped(p, seed, np.zeros((1, len(agents(p, seed)), p)), pull)[0]
    return found


def alone_each(p: int, seed: int) -> Array:
    """Local models, every agent's ridge by its own five folds: (n, p)."""
    rows, found = linear(p, seed), np.zeros((len(agents(p, seed)), p))
    loss, pulls = LinearLoss("logistic"), EFFORT[p].pulls
    for i, (x, y) in enumerate(zip(rows.x, rows.y, strict=True)):
        a, b, right = x.numpy(), y.numpy(), np.zeros(len(pulls))
        fold = np.arange(len(b)) % 5
        for k, pull in enumerate(pulls):
            for f in range(5):
                own, out = fold != f, fold == f
                theta = minimize(loss, a[own], b[own], 2 * pull / int(own.sum())).theta
                right[k] += ((a[out] @ theta > 0) == (b[out] > 0)).sum()
        found[i] = minimize(loss, a, b, 2 * pulls[int(right.argmax())] / len(b)).theta
    return found


def together(p: int, seed: int) -> Array:
    """One model of all records, without privacy: (n, p), n times the same."""
    rows = linear(p, seed)
    x, y = (part.numpy() for part in rows.pooled())
    theta = minimize(LinearLoss("logistic"), x, y, 1e-3).theta
    return np.repeat(theta[None], len(rows.x), 0)


def best_pull(p: int, starts: Callable[[int], Array]) -> float:
    """The pull of the last step from ``starts(seed)`` (n, p) that is best on the validation problems."""

    def value(pull: float) -> float:
        return float(
            np.mean(
                [reached(p, s, stepped(p, s, starts(s)[None], pull)) for s in EFFORT[p].validation]
            )
        )

    return max(EFFORT[p].pulls, key=value)


def reached(p: int, seed: int, models: Array) -> float:
    return float(accuracies(models, agents(p, seed)).mean())


def synthetic(p: int) -> list[Row]:
    """The scores of every agent, method, epsilon and seed."""
    rows: list[Row] = []
    local = best_pull(p, lambda seed: np.zeros((len(agents(p, seed)), p)))
    shared = best_pull(p, lambda seed: together(p, seed))
    optima = [
        {
            "p": p,
            "mu": mu,
            "accuracy": np.mean(
                [reached(p, s, exact(p, s, mu)[1][None]) for s in EFFORT[p].validation]
            ),
        }
        for mu in (1.0, 3.0)
    ]
    mu = best_mu(optima, p)
    choice = {
        "published": tuned(p, published, EFFORT[p].published, False),
        "once": tuned(p, once, EFFORT[p].once, True),
    }
    runs = {"published": published, "once": once}
    for seed in SEEDS:
        data = agents(p, seed)
        common = {"p": p, "seed": seed, "counts": data.train.counts.tolist()}

        def add(role: str, method: str, epsilon: float, models: Array, chosen: str) -> None:
            own = accuracies(models[None], data)[0].tolist()  # noqa: B023
            about = {
                "role": role,
                "method": method,
                "epsilon": epsilon,
                "chosen": chosen,
                "agents": own,
            }
            rows.append(common | about)  # noqa: B023

        add("local", "local, one tuned ridge", 0.0, alone(p, seed, local), f"ridge {local:g}")
        add(
            "baseline",
            "local, each agent's own ridge",
            0.0,
            alone_each(p, seed),
            "five folds of its records",
        )
        one_model = stepped(p, seed, together(p, seed)[None], shared)[0]
        add("fedavg", "one model of all, last step", math.inf, one_model, f"pull {shared:g}")
        best = exact(p, seed, mu)[1]
        add("baseline", "no privacy, exact optimum", math.inf, best, f"mu {mu:g}")
        for name, (sent, refined) in choice.items():
            role = "published" if name == "published" else "new"
            title = "every wake-up a release (published)" if name == "published" else "one release"
            words = (
                "mu {:g}, {:g} wake-ups, clip {:g}"
                if name == "published"
                else "mu h {:g}, h {:g}, clip {:g}"
            )
            kept: dict[Setting, Array] = {}
            for e, epsilon in enumerate(EFFORT[p].epsilons):
                for setting in (sent[e], refined[e][0]):
                    if setting not in kept:
                        kept[setting] = runs[name](p, seed, setting)
                add(role, f"{title}, as sent", epsilon, kept[sent[e]][e], words.format(*sent[e]))
                setting, pull = refined[e]
                start = kept[setting][e]
                start = around(p, seed, start) if name == "once" else start
                text = words.format(*setting) + f", pull {pull:g}"
                add(
                    role,
                    f"{title}, last step",
                    epsilon,
                    stepped(p, seed, start[None], pull)[0],
                    text,
                )
    return rows


def pieces() -> list[Row]:
    """What each of the three changes gives, p = 20: gains on local models at fixed settings, with the best pull of the
    last step on two validation problems."""
    p, rows = 20, []
    local = {seed: reached(p, seed, alone(p, seed, 0.5)[None]) for seed in SEEDS}
    runs: dict[str, Callable[[int, int], Array]] = {
        "every wake-up a release": lambda seed, e: published(
            p, seed, ((0.3, 30, 1.0), (1.0, 30, 1.0))[e - 1]
        ),
        "one release, m_i": lambda seed, e: once(p, seed, (0.1, 0.02, 1.0), 1.0),
        "one release, m_i^2": lambda seed, e: once(p, seed, (0.3, 0.02, 1.0)),
    }
    for (name, run), e, spread in itertools.product(runs.items(), (1, 2), (False, True)):
        start = {seed: run(seed, e)[e] for seed in (*EFFORT[p].validation[:2], *SEEDS)}
        start = {
            seed: (around(p, seed, one) if spread else one)[None] for seed, one in start.items()
        }

        def value(pull: float) -> float:
            return float(
                np.mean(
                    [reached(p, s, stepped(p, s, start[s], pull)) for s in EFFORT[p].validation[:2]]  # noqa: B023
                )
            )

        pull = max((0.5, 1.5, 5.0, 15.0), key=value)
        gain, half = interval(
            reached(p, s, stepped(p, s, start[s], pull)) - local[s] for s in SEEDS
        )
        rows.append(
            {
                "method": name,
                "epsilon": EFFORT[p].epsilons[e],
                "around": spread,
                "gain": gain,
                "half": half,
            }
        )
    return rows


def pieces_table(rows: list[Row]) -> str:
    """Gains by method, epsilon and where the last step begins."""
    cells = {
        (r["method"], r["epsilon"], r["around"]): f"{r['gain']:+.3f} ± {r['half']:.3f}"
        for r in rows
    }
    keys = list(dict.fromkeys((r["method"], r["epsilon"]) for r in rows))
    lines = [
        [method, f"{e:g}", cells[method, e, False], cells[method, e, True]] for method, e in keys
    ]
    return markdown(
        ["", "epsilon:", "last step around the own model:", "around the neighbours' mean:"], lines
    )


# MovieLens, everything inside

CENTRE, CONSTANT = (
    3.5,
    0.5,
)  # a public middle of the ratings; the feature by which a user's own level is fitted
FILM_VALIDATION, FILM_EPSILONS = (100, 101), (1.0, 3.0, 10.0)
PRODUCTS, FILM_CLIPS = (0.03, 0.1, 0.3), (1.0, 2.0, 3.0)
REACHES, FILM_PULLS = tuple(2.0**k for k in range(2, 10)), (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Films:
    """A split of the ratings; the only features are which film it is, one unit vector each, and ``CONSTANT``.

    Attributes:
        counts: training ratings of every user, (n,).
        train, test: (users, films, ratings less ``CENTRE``) of all ratings.
        films: how many there are.
    """

    counts: Array
    train: tuple[Array, Array, Array]
    test: tuple[Array, Array, Array]
    films: int


def read_films(root: Path, seed: int) -> Films:
    """Read a split."""
    items, ratings, _ = user_ratings(root, seed=seed)
    sides = []
    for part in (ratings.train, ratings.test):
        user = np.repeat(np.arange(len(ratings)), part.counts.numpy())
        sides.append((user, part.x.numpy(), part.y.numpy() - CENTRE))
    return Films(ratings.train.counts.numpy(), sides[0], sides[1], len(items))


@cache
def expander(n: int) -> Array:
    """Five rings in random public orders, (n, n): ten neighbours, whoever the users are."""
    generator, weights = seeded(0), np.zeros((n, n))
    for _ in range(5):
        order = generator.permutation(n)
        weights[order, np.roll(order, 1)] = weights[np.roll(order, 1), order] = 1.0
    return weights


@cache
def multiplier(epsilon: float) -> float:
    """The noise multiplier of one Gaussian release."""

    return PrivacyCost(law="gaussian", sizes=(1,), delta=DELTA).multiplier(epsilon, 1)


def propagation(counts: Array, product: float) -> Array:
    """(n, n): from -g of every agent to h times its neighbours' mean model, at the fixed point of free averaging with
    mu h = ``product`` and lambda = 0, of which PeerAveraging takes gossip steps."""
    weights = expander(len(counts))
    degree, pull = weights.sum(1), product * (counts / counts.max()) ** 2
    spread = np.linalg.solve(np.diag(degree * (1 + pull)) - weights, np.diag(degree * pull))
    mean: Array = (weights / degree[:, None]) @ spread
    return mean


def told(films: Films, clip: float, epsilon: float, seed: int) -> Array:
    """Minus the released mean gradients at 0, (n, films + 1): every record's is clipped, noise of 2 C z on the sum."""
    user, item, y = films.train
    n = len(films.counts)
    slope = 2 * y * np.minimum(1, clip / np.maximum(2 * np.abs(y) * math.hypot(1, CONSTANT), 1e-9))
    total = np.zeros((n, films.films + 1))
    np.add.at(total, (user, item), slope)
    total[:, -1] = CONSTANT * np.bincount(user, slope, n)
    noise = np.random.default_rng([seed, int(epsilon)]).normal(size=total.shape)
    return (total + noise * 2 * clip * multiplier(epsilon)) / films.counts[:, None]


def film_errors(films: Films, start: Array, pull: float) -> Array:
    """Root mean squared errors of users on their test ratings (n,) after a last step from ``start`` (n, films + 1).

    It minimizes sum_j (y_j - b_j - o_j - k v)^2 + pull (sum_j o_j^2 + (v - v_0)^2) in the offsets o_j of rated films
    and the level v. A film is rated once, so that o_j is eliminated in closed form; test films keep o_j = 0.
    """
    (user, item, y), (who, film, rating) = films.train, films.test
    n, weight = len(start), pull / (1 + pull)
    rest = np.bincount(user, y - start[user, item], n)
    level = (weight * CONSTANT * rest + pull * start[:, -1]) / (
        weight * CONSTANT**2 * films.counts + pull
    )
    squares = (rating - start[who, film] - CONSTANT * level[who]) ** 2
    errors: Array = np.sqrt(np.bincount(who, squares, n) / np.bincount(who, minlength=n))
    return errors


def film_levels(films: Films) -> Array:
    """Every film's mean residual, without noise: (films,)."""
    user, item, y = films.train
    level = np.bincount(user, y, len(films.counts)) / (films.counts + 4)
    found: Array = np.bincount(item, y - level[user], films.films) / (
        np.bincount(item, minlength=films.films) + 3
    )
    return found


def oracle_share(films: Films, epsilon: float) -> float:
    """The share of the variance of film levels (weighted by test ratings) that an oracle explains from the releases.

    The sum over users of m_i times a film's released sum is a_j + noise of variance (2 C z)^2 sum_i m_i^2. Times the
    factor k_j with the least expected error, for which the oracle knows a_j and the level b_j, it explains
    b_j^2 a_j^2 / (a_j^2 + var). The best of the clips; the constant feature takes no part of them.
    """
    user, item, y = films.train
    weight, best = films.counts / films.counts.mean(), 0.0
    tests, level = np.bincount(films.test[1], minlength=films.films), film_levels(films)
    for clip in FILM_CLIPS:
        signal = np.bincount(item, np.clip(2 * y, -clip, clip) * weight[user], films.films)
        noise = (2 * clip * multiplier(epsilon)) ** 2 * (weight**2).sum()
        share = (tests * level**2 * signal**2 / (signal**2 + noise)).sum() / (
            tests * level**2
        ).sum()
        best = max(best, float(share))
    return best


def films_of(root: Path) -> list[Row]:
    """The scores of every user, method, epsilon and split."""
    check = {seed: read_films(root, seed) for seed in FILM_VALIDATION}
    zero = np.zeros((len(next(iter(check.values())).counts), next(iter(check.values())).films + 1))
    alone = {
        a: np.mean([film_errors(f, zero, a).mean() for f in check.values()])
        for a in (*FILM_PULLS, 3.0)
    }
    local = min(alone, key=lambda a: alone[a])
    tried: dict[tuple[float, ...], float] = {}
    for product in PRODUCTS:
        spread = {seed: propagation(films.counts, product) for seed, films in check.items()}
        for clip, epsilon in itertools.product(FILM_CLIPS, FILM_EPSILONS):
            models = {
                seed: spread[seed] @ told(films, clip, epsilon, seed)
                for seed, films in check.items()
            }
            for reach, pull in itertools.product(REACHES, FILM_PULLS):
                errors = [
                    film_errors(check[seed], reach * one, pull).mean()
                    for seed, one in models.items()
                ]
                tried[epsilon, product, clip, reach, pull] = float(np.mean(errors))
    chosen = {
        e: min((key for key in tried if key[0] == e), key=lambda key: tried[key])
        for e in FILM_EPSILONS
    }
    rows: list[Row] = []
    for seed in SEEDS:
        films = read_films(root, seed)
        common = {"seed": seed, "counts": films.counts.tolist()}

        def add(role: str, method: str, epsilon: float, errors: Array, chosen: str = "") -> None:
            rows.append({**common, "role": role, "method": method, "epsilon": epsilon, "chosen": chosen,  # noqa: B023
                         "agents": errors.tolist()})  # fmt: skip

        add("local", "local, tuned", 0.0, film_errors(films, zero, local), f"pull {local:g}")
        for epsilon, (_, product, clip, reach, pull) in chosen.items():
            model = reach * (propagation(films.counts, product) @ told(films, clip, epsilon, seed))
            text = f"mu h {product:g}, clip {clip:g}, 1 / h {reach:g}, pull {pull:g}"
            add("new", "one release, last step", epsilon, film_errors(films, model, pull), text)
        level = zero.copy()
        level[:, :-1] = film_levels(films)
        add("baseline", "film levels, not private", math.inf, film_errors(films, level, 0.1))
        rows += [
            {"seed": seed, "epsilon": e, "bound": oracle_share(films, e)} for e in FILM_EPSILONS
        ]
    return rows


# Tables

FILM_SETTING = "MovieLens-100K, 943 users, everything inside"
SIZES = ((10, 25), (25, 50), (50, 75), (75, 101))


def scores_of(rows: list[Row], setting: str, metric: str, larger: bool) -> list[Score]:
    """One score for each run."""
    local = {row["seed"]: row["agents"] for row in rows if row.get("role") == "local"}
    found = []
    for row in rows:
        if "agents" not in row:
            continue
        own, alone = (dict(enumerate(part)) for part in (row["agents"], local[row["seed"]]))
        shares = by_client(own, alone, larger=larger)  # type: ignore[arg-type]
        found.append(Score(setting, metric, larger, row["role"], row["method"], float(row["epsilon"]), row["seed"],
                           float(np.mean(row["agents"])), **shares, chosen=row["chosen"]))  # fmt: skip
    return found


def gains(scores: list[Score], setting: str) -> str:
    """Every method at every epsilon beside tuned local models: paired differences, and who gains."""
    own = [score for score in scores if score.setting == setting]
    local = [score for score in own if score.role == "local"]
    lines = []
    for method, epsilon in dict.fromkeys((s.method, s.epsilon) for s in own):
        runs = [s for s in own if (s.method, s.epsilon) == (method, epsilon)]
        value, half = interval(s.score for s in runs)
        gap, width = difference(runs, local)
        told_gap = (
            ""
            if runs[0].role == "local"
            else f"{gap:+.4f} ± {width:.4f} {mark(runs, local)}".strip()
        )
        share = "" if runs[0].role == "local" else f"{100 * np.mean([s.better for s in runs]):.0f}% / " \
            f"{100 * np.mean([s.worse for s in runs]):.0f}%"  # fmt: skip
        at = "" if epsilon == 0 else "none" if epsilon == math.inf else f"{epsilon:g}"
        worst = f"{np.mean([s.worst_tenth for s in runs]):.3f}"
        lines.append([method, at, f"{value:.4f} ± {half:.4f}", told_gap, share, worst])
    titles = [
        "method",
        "epsilon:",
        "score ± 95%:",
        "gain on local ± 95%:",
        "better / worse:",
        "worst tenth:",
    ]
    return markdown(titles, lines)


def by_size(parts: dict[int, list[Row]]) -> str:
    """Gains on local models by the agents' numbers of records."""
    lines = []
    for p, rows in parts.items():
        local = {r["seed"]: np.array(r["agents"]) for r in rows if r["role"] == "local"}
        for epsilon in (1.0, 3.0):
            cells = []
            for low, high in SIZES:
                each = []
                for r in rows:
                    if r["method"] == "one release, last step" and r["epsilon"] == epsilon:
                        members = [low <= m < high for m in r["counts"]]
                        each.append(
                            float((np.array(r["agents"]) - local[r["seed"]])[members].mean())
                        )
                mean, half = interval(each)
                cells.append(f"{mean:+.3f} ± {half:.3f}")
            lines.append([str(p), f"{epsilon:g}", *cells])
    return markdown(
        ["p:", "epsilon:", *(f"{low} to {high - 1} records:" for low, high in SIZES)], lines
    )


def main() -> None:
    """Run what is missing, write the scores and the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--root", type=existing, help="u.data, or its folder; without it the synthetic parts alone"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/reproduce/p2p"), help="parts are kept here"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)

    def kept(name: str, part: Callable[[], list[Row]] | None) -> list[Row]:
        file = arguments.out / f"{name}.json"
        if not file.exists() and part is not None:
            file.write_text(json.dumps(part()))
        rows: list[Row] = json.loads(file.read_text()) if file.exists() else []
        return rows

    parts = {p: kept(f"once_{p}", partial(synthetic, p)) for p in EFFORT}
    films = kept("films", None if arguments.root is None else partial(films_of, arguments.root))
    scores, readme = [], HERE / "README.md"
    for p, rows in parts.items():
        scores += scores_of(rows, setting := f"synthetic agents, p = {p}", "accuracy", True)
        replace_section(readme, f"once {p}", gains(scores, setting))
    replace_section(readme, "sizes", by_size(parts))
    replace_section(readme, "pieces", pieces_table(kept("pieces", pieces)))
    if films:
        scores += scores_of(films, FILM_SETTING, "RMSE", False)
        replace_section(readme, "films inside", gains(scores, FILM_SETTING))
        bounds = {
            e: np.mean([r["bound"] for r in films if "bound" in r and r["epsilon"] == e])
            for e in FILM_EPSILONS
        }
        print({e: round(float(bound), 3) for e, bound in bounds.items()})
    renew_scores(HERE / "scores.csv", scores)


if __name__ == "__main__":
    main()
