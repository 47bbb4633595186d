"""Distributed mean estimation: the error of the mean of vectors on a sphere, by epsilon and by who adds the noise.

The setting is that of Kairouz, Liu and Steinke ("The distributed discrete Gaussian mechanism for federated learning with
secure aggregation", ICML 2021, Section 5): 100 or 1,000 clients with a vector of 250 numbers each, one release.
Ten of a hundred clients collude, five may be missing, and all are there. Writes table.csv, error.png and the table of the README beside
this file.

    python benchmarks/reproduce/mean_estimation/run.py
"""

from __future__ import annotations

import argparse
import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedmtl.privacy import (
    ClientPrivacy,
    FullParticipation,
    ReleasePlan,
    SecureAggregation,
    SeededSource,
    open_channel,
)
from fedmtl.privacy.cost import PrivacyCost
from fedmtl.privacy.noise.discrete import discrete_gaussian
from fedmtl.privacy.receipt import Receipt
from fedmtl.privacy.secure_calibration import calibrate_secure_sum
from fedmtl.privacy.secure_sum import SecureSum
from fedmtl.report.canvas import drawing
from fedmtl.secure.roster import honest_rows

HERE = Path(__file__).parent
SIZE, DELTA = 250, 1e-5
CLIENTS, EPSILONS = (100, 1_000), (0.5, 1.0, 2.0, 4.0, 8.0)
REPETITIONS = {100: 20, 1_000: 4}
TRUSTED, SECURE, LOCAL = "trusted server", "secure, 32 bits", "noise of each client alone"
NARROW = {"secure, 16 bits": 16, "secure, 8 bits": 8}
KINDS = (TRUSTED, SECURE, *NARROW, LOCAL)
DEVIATIONS = 4.0  # of a sum that a narrow grid has room for


def vectors(clients: int, repetition: int) -> torch.Tensor:
    """Return vectors of norm 1 in uniform directions, float64 (clients, SIZE)."""
    generator = torch.Generator().manual_seed(1_000 * repetition + clients)
    rows = torch.randn(clients, SIZE, generator=generator, dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True)


def settings(clients: int) -> SecureAggregation:
    """Return the settings of a secure sum of so many clients."""
    return SecureAggregation(colluding=clients // 10, missing=clients // 20)


def privacy(epsilon: float) -> ClientPrivacy:
    return ClientPrivacy(clip_norm=1.0, epsilon=epsilon, delta=DELTA)


def trusted(rows: torch.Tensor, epsilon: float, seed: int) -> np.ndarray:
    """Return the mean that a trusted server releases, (SIZE,)."""
    plan = ReleasePlan(name="mean", dimension=SIZE)
    everybody = FullParticipation().bind(len(rows))
    channel = open_channel(privacy(epsilon), (plan,), everybody, seed=seed, steps=1)
    cohort = channel.draw(0)
    channel.begin(0, cohort)
    return channel.release("mean", rows[cohort], cohort).numpy()


def secure(rows: torch.Tensor, epsilon: float, seed: int) -> np.ndarray:
    """Return the mean of a secure sum, to which every client adds a share of the noise."""
    clients = len(rows)
    plan = ReleasePlan(name="mean", dimension=SIZE)
    everybody = FullParticipation().bind(clients)
    secured = replace(privacy(epsilon), aggregation=settings(clients))
    terms = calibrate_secure_sum(secured, (plan,), everybody, 1)
    everyone = torch.arange(clients)
    return SecureSum(terms.release, SeededSource(seed))(
        rows, everyone, Receipt(0, 0, everyone)
    ).numpy()


def narrow(rows: torch.Tensor, epsilon: float, seed: int, bits: int) -> np.ndarray:
    """Return the mean of a secure sum of few bits, on a grid that sums of vectors in uniform directions fit but for four
    deviations; with other vectors they would wrap around. NaN if its noise is below the 16 cells that are accounted for."""
    clients = len(rows)
    one = settings(clients)
    counted = honest_rows(clients, one.colluding, one.missing)
    exponent = -60
    while True:
        width = math.ldexp(1.0, exponent)
        # the slack of a coarse grid takes a part of epsilon
        cells = math.floor(multiplier(epsilon) / width)
        if cells < 16:
            return np.full(SIZE, math.nan)
        z = multiplier(epsilon, cells)
        share = math.ceil(z / (width * math.sqrt(counted)))
        spread = math.sqrt(clients / SIZE / width**2 + clients * share**2)
        if DEVIATIONS * spread < 2 ** (bits - 1):
            break
        exponent += 1
    cells_of_rows = np.trunc(rows.numpy() / width).astype(np.int64)
    words = SeededSource(seed).words("narrow", bits)
    noise = discrete_gaussian(words, clients * SIZE, share).reshape(clients, SIZE)
    half = 2 ** (bits - 1)
    total = ((cells_of_rows + noise).sum(0) + half) % (2 * half) - half
    return total * width / clients


def multiplier(epsilon: float, cells: int = 1 << 40) -> float:
    """Return the noise multiplier of one release."""
    cost = PrivacyCost(law="gaussian", sizes=(SIZE,), delta=DELTA)
    return replace(cost, cells=cells).multiplier(epsilon, 1)


def alone(rows: torch.Tensor, epsilon: float, seed: int) -> np.ndarray:
    """Return the mean of rows that each have all the noise that epsilon takes."""
    generator = np.random.default_rng(seed)
    return (rows.numpy() + multiplier(epsilon) * generator.standard_normal(rows.shape)).mean(0)


def estimate(kind: str, rows: torch.Tensor, epsilon: float, seed: int) -> np.ndarray:
    """Return the released mean of rows, (SIZE,)."""
    if kind == TRUSTED:
        return trusted(rows, epsilon, seed)
    if kind == SECURE:
        return secure(rows, epsilon, seed)
    if kind == LOCAL:
        return alone(rows, epsilon, seed)
    return narrow(rows, epsilon, seed, NARROW[kind])


def error(kind: str, clients: int, epsilon: float, repetitions: int) -> float:
    """Return the mean squared error of the mean, of vectors of norm 1."""
    found = []
    for repetition in range(repetitions):
        rows = vectors(clients, repetition)
        mean = estimate(kind, rows, epsilon, repetition)
        found.append(float(((mean - rows.numpy().mean(0)) ** 2).sum()))
    return float(np.mean(found))


def expected(kind: str, clients: int, epsilon: float) -> float:
    """Return the error of the noise alone, in closed form; NaN of a coarse grid, which adds its own."""
    noise = SIZE * multiplier(epsilon) ** 2 / clients**2
    one = settings(clients)
    factors = {
        TRUSTED: 1.0,
        SECURE: clients / honest_rows(clients, one.colluding, one.missing),
        LOCAL: float(clients),
    }
    return noise * factors.get(kind, math.nan)


def table(
    clients: tuple[int, ...], epsilons: tuple[float, ...], repetitions: dict[int, int]
) -> list[dict[str, str]]:
    """Return the rows of the table."""
    found = []
    for count in clients:
        for epsilon in epsilons:
            for kind in KINDS:
                found.append(
                    {
                        "clients": str(count),
                        "epsilon": f"{epsilon:g}",
                        "noise": kind,
                        "error": f"{error(kind, count, epsilon, repetitions[count]):.3g}",
                        "closed form": f"{expected(kind, count, epsilon):.3g}",
                    }
                )
    return found


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Draw the errors by epsilon, a panel for each number of clients."""
    counts = sorted({int(row["clients"]) for row in rows})
    with drawing(path, 11.0, 4.0) as figure:
        for axis, count in zip(figure.subplots(1, len(counts)), counts, strict=True):
            for kind in KINDS:
                own = [row for row in rows if row["clients"] == str(count) and row["noise"] == kind]
                axis.loglog(
                    [float(row["epsilon"]) for row in own],
                    [float(row["error"]) for row in own],
                    "o-",
                    label=kind,
                )
            axis.minorticks_off()
            axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
            axis.set(xlabel="epsilon", ylabel="mean squared error", title=f"{count:,} clients")
        axis.legend()


def markdown(rows: list[dict[str, str]]) -> str:
    """Return the table of a README; a dash is no estimate."""
    lines = [
        "| clients | epsilon | " + " | ".join(KINDS) + " |",
        "| ---: " * (2 + len(KINDS)) + "|",
    ]
    for key in dict.fromkeys((row["clients"], row["epsilon"]) for row in rows):
        own = [row["error"] for row in rows if (row["clients"], row["epsilon"]) == key]
        lines.append("| " + " | ".join([f"{int(key[0]):,}", key[1], *own]) + " |")
    return "\n".join(lines).replace("nan", "-")


def main() -> None:
    """Parse the command line, estimate, and write table and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--quick", action="store_true", help="100 clients, two epsilons; writes nothing"
    )
    given = parser.parse_args()
    if given.quick:
        print(markdown(table(CLIENTS[:1], (1.0, 8.0), {100: 2})))
        return
    rows = table(CLIENTS, EPSILONS, REPETITIONS)
    with open(HERE / "table.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, HERE / "error.png")
    page = (HERE / "README.md").read_text(encoding="utf-8")
    before, _, rest = page.partition("<!-- table -->\n")
    after = rest.partition("<!-- /table -->")[2]
    text = f"{before}<!-- table -->\n{markdown(rows)}\n<!-- /table -->{after}"
    (HERE / "README.md").write_text(text, encoding="utf-8")
    print(markdown(rows))


if __name__ == "__main__":
    main()
