"""The claims of real runs beside what canaries measure in them, and published claims that do not hold.

Writes methods.csv, published.csv and methods.png beside this file.

    python benchmarks/reproduce/epsilon_interval/methods.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from run import DELTA, HERE, both, write

from fedmtl.audit.guesses import Guesses, refuted
from fedmtl.cli.build import build
from fedmtl.cli.config import compose, resolve
from fedmtl.privacy.accounting.trade_off import TradeOff
from fedmtl.report.canvas import drawing

CLAIMS = 1.0, 4.0
DIGITS = ("data.clients=100", "rounds=20")
FULL = "schedule=full"
RUNS = {
    ("fedavg", "client", "full"): (*DIGITS, FULL),
    ("fedavg", "client", "Poisson"): (*DIGITS, "schedule.cohort=140"),
    ("pmtl", "client", "full"): ("algorithm=pmtl", *DIGITS, FULL),
    ("ditto", "client", "full"): ("algorithm=ditto", *DIGITS, FULL),
    ("mp_mtl", "client", "full"): ("algorithm=mp_mtl", "data.tasks=30", "data.features=40"),
    ("private_prior", "client", "full"): (
        "algorithm=private_prior",
        "data.tasks=30",
        "data.features=40",
    ),
    ("fedavg", "record", "full"): ("privacy=record", *DIGITS),
}
CANARIES = 600
OBSERVATIONS = 10_000
DIMENSION = 10  # of Wishart noise
STEPS, SIZE, STEP, TAU, RECORDS = (
    100,
    1.0,
    0.1,
    1e-3,
    100,
)  # of PP-DMTL: iterations, clip, a1, tau, records of a task


def real(runs: int = 3) -> list[dict[str, object]]:
    """Train every method with canaries, and return claim and bounds by observer: means, and how many are above."""
    rows: list[dict[str, object]] = []
    for number, (settings, claim) in enumerate(product(RUNS.values(), CLAIMS)):
        bounds: dict[str, list[tuple[bool, float]]] = {}
        for run in range(runs):
            for observer in trained(settings, claim, seed=runs * number + run)["observers"]:
                found = [(bound["independent"], bound["epsilon"]) for bound in observer["bounds"]]
                bounds.setdefault(observer["observer"], []).extend(found)
        method, unit, schedule = list(RUNS)[number // len(CLAIMS)]
        for observer, pairs in bounds.items():
            row: dict[str, object] = {
                "method": method,
                "unit": unit,
                "schedule": schedule,
                "observer": observer,
            }
            row["claim"] = claim
            for name, independent in (("independent", True), ("any", False)):
                values = [value for alone, value in pairs if alone == independent]
                row[name] = round(float(np.mean(values)), 2) if values else ""
            rows.append(row | {"above": sum(value > claim for _, value in pairs)})
    return rows


def trained(settings: Sequence[str], claim: float, seed: int) -> Mapping[str, Any]:
    """Return the certificate of a run with canaries."""
    overrides = [
        *settings,
        f"privacy.epsilon={claim}",
        f"audit.canaries={CANARIES}",
        f"seed={seed}",
        "progress=false",
    ]
    with TemporaryDirectory() as folder:
        config = resolve(compose(overrides)) | {"baselines": [], "logger": None}
        certificate = (
            replace(build(config, Path(folder)), folder=None, finetune=None).fit().privacy.interval
        )
    assert certificate is not None
    return certificate


def wishart(coins: np.ndarray, claim: float, rng: np.random.Generator) -> np.ndarray:
    """Return scores of canaries w w^T, ||w|| = 1, each in a release of its own with noise W_d(d + 1, I / (2 claim)).

    An output O with w^T O^-1 w > 1 is impossible where the canary is in.
    """
    normals = rng.standard_normal((coins.size, DIMENSION, DIMENSION + 1))
    released = normals @ normals.transpose(0, 2, 1) / (2 * claim)
    released[:, 0, 0] += coins
    return -np.linalg.inv(released)[:, 0, 0]


def answers(
    coins: np.ndarray, claim: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of canaries from the answers of Algorithm 1 of PP-DMTL, of all and of the last one only.

    Every canary is a record of a task of its own, with one feature, and the coin chooses the sign of its clipped
    gradient. The other records have the same target, so far away for ``STEPS`` iterations that their gradients are
    clipped; then p_t, which comes from the other tasks, moves q_t to it. Epsilon_1 and epsilon_2 are half the claim.
    """
    sign, each = np.where(coins, 1.0, -1.0), claim / 2
    sensitivity = 2 * SIZE / RECORDS
    others, scale = (RECORDS - 1) / RECORDS, sensitivity / each
    own, public = np.zeros(coins.size), 0.0  # q_t, and what it would be without the canary
    scores = np.zeros(coins.size)
    for _ in range(STEPS):
        gradient = -SIZE * others + sign * sensitivity / 2
        own = own - STEP * (gradient + TAU * own)
        public = public - STEP * (-SIZE * others + TAU * public)
        noisy = sign * sensitivity / 2 + rng.laplace(0, scale, coins.size)
        scores += evidence_of_shift(noisy, sensitivity / 2)
    query = own - public + rng.laplace(0, STEP * scale, coins.size)
    last = (
        others * np.clip(query, -SIZE, SIZE)
        + sign * sensitivity / 2
        + rng.laplace(0, scale, coins.size)
    )
    return scores + evidence_of_shift(-last, (STEPS * STEP - 1) * sensitivity / 2), -last


def evidence_of_shift(seen: np.ndarray, shift: float) -> np.ndarray:
    """Return a multiple of the log-likelihood ratio of ``shift`` against ``-shift`` under Laplace noise."""
    return np.abs(seen + shift) - np.abs(seen - shift)


def measured(guesses: Guesses, independent: bool) -> float:
    """Return the largest epsilon at ``DELTA`` that the guesses refute, of any mechanism with that claim."""
    low, high = 0.0, 12.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        passes = refuted(guesses, TradeOff.of_epsilon(middle, DELTA), 0.95, independent)
        low, high = (middle, high) if passes else (low, middle)
    return round(low, 2)


PUBLISHED: dict[
    str, tuple[float, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]]
] = {
    "MP-MTL, Wishart noise, one release": (1, wishart),
    f"PP-DMTL, the answer after {STEPS} iterations": (1, lambda *of: answers(*of)[1]),
    f"PP-DMTL, all {STEPS + 1} answers": (STEPS + 1, lambda *of: answers(*of)[0]),
}


def published() -> list[dict[str, object]]:
    """Attack the mechanisms of papers as printed, and return their claims and the bounds."""
    rows: list[dict[str, object]] = []
    for name, (uses, attack) in PUBLISHED.items():
        for claim in CLAIMS:
            rng = np.random.default_rng(int(claim))
            coins = rng.random(OBSERVATIONS) < 0.5
            (every, _), (few, _) = both(attack(coins, claim, rng), coins)
            row: dict[str, object] = {
                "published": name,
                "epsilon of one use": claim,
                "claim": claim * uses,
            }
            rows.append(row | {"independent": measured(every, True), "any": measured(few, False)})
    return rows


def draw(rows: list[dict[str, object]]) -> None:
    """Draw claim against bound, every method a column."""
    names = list(dict.fromkeys((row["method"], row["unit"], row["schedule"]) for row in rows))
    with drawing(HERE / "methods.png", 9.0, 4.0) as figure:
        axis = figure.subplots()
        for column, name in enumerate(names):
            mine = [row for row in rows if (row["method"], row["unit"], row["schedule"]) == name]
            for place, claim in zip((-0.15, 0.15), CLAIMS, strict=True):
                for row in mine:
                    if row["claim"] == claim:
                        mark, color = (
                            ("o", "C0") if row["observer"] == "all releases" else ("s", "C1")
                        )
                        value = row["any"] if row["independent"] == "" else row["independent"]
                        axis.plot(column + place, value, mark, color=color)
                axis.plot(column + place, claim, "_", color="black", markersize=14)
        axis.plot([], [], "_", color="black", markersize=14, label="claim")
        axis.plot([], [], "o", color="C0", label="at least, all releases")
        axis.plot([], [], "s", color="C1", label="at least, final model")
        axis.set_xticks(
            range(len(names)), [f"{method}\n{unit}\n{schedule}" for method, unit, schedule in names]
        )
        axis.set(ylabel="epsilon")
        axis.legend()


if __name__ == "__main__":
    write("published.csv", published())
    table = real()
    write("methods.csv", table)
    draw(table)
