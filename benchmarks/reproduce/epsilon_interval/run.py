"""How much of epsilon a lower bound from one run finds, how often it is wrong, and which broken runs it refutes.

Pure statistics: the sums of every round are drawn in the directions of orthogonal canaries. Writes table.csv,
cover.csv, broken.csv and interval.png beside this file.

    python benchmarks/reproduce/epsilon_interval/run.py
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

from fedmtl.audit.guesses import SHARE, Guesses, guess, lower_bound, refuted
from fedmtl.privacy.accounting.composition import trade_off
from fedmtl.privacy.cost import PrivacyCost
from fedmtl.report.canvas import drawing

HERE = Path(__file__).parent
EPSILONS, CANARIES, DELTA = (1.0, 2.0, 4.0, 8.0), (1_000, 10_000), 1e-5
RATE, ROUNDS = 0.2, 20
COSTS = {
    "one Gaussian sum": (PrivacyCost(law="gaussian", sizes=(1,), delta=DELTA), 1),
    "one Laplace sum": (PrivacyCost(law="laplace", sizes=(1,), delta=0.0), 1),
    "20 Gaussian sums, sampled at 0.2": (
        PrivacyCost(law="gaussian", sizes=(1,), delta=DELTA, sampled=RATE),
        ROUNDS,
    ),
}
SAMPLED = "20 Gaussian sums, sampled at 0.2"
Sums = (
    np.ndarray
)  # (rounds, canaries): every sum in the direction of every canary, over the clip norm


def sound(
    coins: np.ndarray,
    z: float,
    rng: np.random.Generator,
    *,
    rate: float = RATE,
    rounds: int = ROUNDS,
    size: float = 1.0,
) -> Sums:
    """Draw the sums of a sampled run whose rows have ``size`` times the clip norm."""
    shape = rounds, coins.size
    return size * coins * (rng.random(shape) < rate) + z * rng.standard_normal(shape)


def evidence(sums: Sums, z: float, rate: float = RATE) -> np.ndarray:
    """Return the log-likelihood ratio of "in" against "out" under the claim, (canaries,)."""
    with np.errstate(over="ignore"):
        return np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * sums - 1) / (2 * z**2)).sum(0)


def range_of(sums: Sums, z: float) -> np.ndarray:
    """Return how far the largest and smallest sum of a canary lie apart, less half the size of a row."""
    return sums.max(0) - sums.min(0) - 0.5


def evidence_of_one_draw(sums: Sums, z: float) -> np.ndarray:
    """Return the log-likelihood ratio where a canary takes part in all rounds or in none."""
    return np.logaddexp(np.log1p(-RATE), np.log(RATE) + ((2 * sums - 1) / (2 * z**2)).sum(0))


def repeated(coins: np.ndarray, z: float, rng: np.random.Generator) -> Sums:
    return coins * (rng.random((ROUNDS, coins.size)) < RATE) + z * rng.standard_normal(coins.size)


def fixed_cohort(coins: np.ndarray, z: float, rng: np.random.Generator) -> Sums:
    return coins * (rng.random(coins.size) < RATE) + z * rng.standard_normal((ROUNDS, coins.size))


def chosen_by_noise(coins: np.ndarray, z: float, rng: np.random.Generator) -> Sums:
    noise = z * rng.standard_normal((ROUNDS, coins.size))
    return coins * (noise > np.quantile(noise, 1 - RATE)) + noise


def partly(share: float, factor: float) -> Callable[..., Sums]:
    def draw(coins: np.ndarray, z: float, rng: np.random.Generator) -> Sums:
        scale = np.where(rng.random((ROUNDS, 1)) < share, factor, 1.0)
        return coins * (rng.random((ROUNDS, coins.size)) < RATE) + scale * z * rng.standard_normal(
            (ROUNDS, coins.size)
        )

    return draw


def revealed(count: int) -> Callable[..., Sums]:
    def draw(coins: np.ndarray, z: float, rng: np.random.Generator) -> Sums:
        sums = sound(coins, z, rng)
        sums[:, :count] += 100 * (2 * coins[:count] - 1)
        return sums

    return draw


def reveals_at_times(coins: np.ndarray, z: float, rng: np.random.Generator) -> Sums:
    return sound(coins, z, rng) + (100 * (2 * coins - 1) if rng.random() < 1e-3 else 0)


def scaled(noise: float = 1.0, **changes: float) -> Callable[..., Sums]:
    return lambda coins, z, rng: sound(coins, noise * z, rng, **changes)  # type: ignore[arg-type]


BROKEN: dict[str, tuple[Callable[..., Sums], Callable[..., np.ndarray]]] = {
    "sound": (sound, evidence),
    "noise halved": (scaled(0.5), evidence),
    "noise 0.7 times as large (variance for scale)": (scaled(0.5**0.5), evidence),
    "noise 0.9 times as large": (scaled(0.9), evidence),
    "noise for the other neighbour relation, factor 2": (scaled(size=2.0), evidence),
    "noise over the square root of 10 ranks": (scaled(0.1**0.5), evidence),
    "no noise": (scaled(1e-3), evidence),
    "no noise in 1 round of 10": (partly(0.1, 1e-3), evidence),
    "noise halved in half the rounds": (partly(0.5, 0.5), evidence),
    "same noise in all rounds": (repeated, evidence),
    "same noise in all rounds, attacked by differences": (repeated, range_of),
    "clip skipped, rows of 10 times the norm": (scaled(size=10.0), evidence),
    "clip by a stale norm, rows of 3 times the norm": (scaled(size=3.0), evidence),
    "clip of a sum of two rows of a client": (scaled(size=2.0), evidence),
    "weights over 1, 1.5": (scaled(size=1.5), evidence),
    "sampler with twice the rate": (scaled(rate=2 * RATE), evidence),
    "everybody takes part": (scaled(rate=1.0), evidence),
    "cohort drawn once": (fixed_cohort, evidence_of_one_draw),
    "cohort depends on the noise": (chosen_by_noise, evidence),
    "accountant halved: twice the rounds": (scaled(rounds=2 * ROUNDS), evidence),
    "rounds after an early stop uncharged, a quarter": (scaled(rounds=ROUNDS * 5 // 4), evidence),
    "a failed round drawn anew, 1 of 10": (scaled(rounds=ROUNDS * 11 // 10), evidence),
    "resumed without its ledger: 4 times the rounds": (scaled(rounds=4 * ROUNDS), evidence),
    "one canary in 1,000 revealed": (revealed(1), evidence),
    "everything revealed with probability 0.001": (reveals_at_times, evidence),
}


def once(kind: str, z: float, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and coins of a sound run."""
    coins = rng.random(m) < 0.5
    if kind == SAMPLED:
        return evidence(sound(coins, z, rng), z), coins
    noise = rng.laplace(size=m) if "Laplace" in kind else rng.standard_normal(m)
    return coins - 0.5 + z * noise, coins


@cache
def bound(kind: str, guesses: Guesses, independent: bool) -> float:
    cost, uses = COSTS[kind]
    return lower_bound(guesses, cost, uses, independent=independent)


def both(
    scores: np.ndarray, coins: np.ndarray
) -> tuple[tuple[Guesses, bool], tuple[Guesses, bool]]:
    return (guess(scores, coins), True), (guess(scores, coins, SHARE), False)


def write(name: str, rows: list[dict[str, object]]) -> None:
    with (HERE / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(name, *rows, sep="\n", flush=True)


def tightness(runs: int = 40) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for kind, (cost, uses) in COSTS.items():
        for m in CANARIES:
            for epsilon in EPSILONS:
                rng, z = np.random.default_rng(m), cost.multiplier(epsilon, uses)
                pairs = [both(*once(kind, z, m, rng)) for _ in range(runs)]
                row: dict[str, object] = {"run": kind, "canaries": m, "epsilon": epsilon}
                for side, name in enumerate(("independent", "any")):
                    values = [bound(kind, *pair[side]) for pair in pairs]
                    row |= {
                        name: round(float(np.mean(values)), 2),
                        f"{name} least": round(min(values), 2),
                    }
                rows.append(row)
    return rows


def coverage(runs: int = 400, m: int = 1_000) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for kind, (cost, uses) in COSTS.items():
        for epsilon in (1.0, 4.0):
            rng, z = np.random.default_rng(7), cost.multiplier(epsilon, uses)
            curve = trade_off(cost.after(uses, z), 1)
            above = np.zeros(2, int)
            for _ in range(runs):
                above += [
                    refuted(g, curve, 0.95, alone) for g, alone in both(*once(kind, z, m, rng))
                ]
            p = stats.binom.sf(above - 1, runs, 0.05).round(3)
            rows.append(
                {"run": kind, "epsilon": epsilon, "runs": runs, "independent": above[0], "p": p[0]}
            )
            rows[-1] |= {"any": above[1], "p any": p[1]}
    return rows


def broken(runs: int = 10) -> list[dict[str, object]]:
    """Count runs of ten whose bound passes the claim, for independent canaries and for any."""
    cost, uses = COSTS[SAMPLED]
    rows: list[dict[str, object]] = []
    for name, (draw, attack) in BROKEN.items():
        row: dict[str, object] = {"run": name}
        for m in CANARIES:
            for epsilon in EPSILONS:
                rng, z = np.random.default_rng(m), cost.multiplier(epsilon, uses)
                curve, passed = trade_off(cost.after(uses, z), 1), np.zeros(2, int)
                for _ in range(runs):
                    coins = rng.random(m) < 0.5
                    guesses = both(attack(draw(coins, z, rng), z), coins)
                    passed += [refuted(g, curve, 0.95, alone) for g, alone in guesses]
                row[f"{m} at {epsilon:g}"] = f"{passed[0]}/{passed[1]}"
        rows.append(row)
    return rows


def main() -> None:
    write("cover.csv", coverage())
    write("broken.csv", broken())
    table = tightness()
    write("table.csv", table)
    with drawing(HERE / "interval.png", 11.0, 4.0) as figure:
        for axis, kind in zip(figure.subplots(1, len(COSTS)), COSTS, strict=True):
            for m in CANARIES:
                rows = [row for row in table if row["run"] == kind and row["canaries"] == m]
                for name in ("independent", "any"):
                    axis.plot(
                        EPSILONS,
                        [row[name] for row in rows],
                        marker="o",
                        label=f"{name}, {m:,} canaries",
                    )
            axis.plot(EPSILONS, EPSILONS, color="black", linewidth=0.8, label="claim")
            axis.set(title=kind, xlabel="epsilon claimed", ylabel="epsilon at least")
        axis.legend()


if __name__ == "__main__":
    main()
