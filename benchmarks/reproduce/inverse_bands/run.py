"""Correlated noise whose inverse is banded, against bands, if participations are b rounds apart at least.

The noise of round t is w_t = sum_j d_j z_{t-j}, j < p, of independent z: w = D z with D = C^-1 banded, lower triangular
and Toeplitz (Kalinin, McKenna, Upadhyay, Lampert, "Back to square roots", 2025: BISR, with the d_j of (1 - x)^(1/2); and
BandInvMF, with d_j that are optimized). The package's bands have a banded C instead. Both need p - 1 past vectors, but
those of D are z, which a generator can draw again.

The sensitivity of x -> C x is exact. With d_0 = 1, d_j <= 0 and sum_j abs(d_j) <= 1 the c_j of C are nonnegative, and the
program refuses d_j with which they do not fall. A client adds vectors of norm 1 in up to k rounds that are b apart. For
such rounds s_1 < s_2 < ... the square of the norm is at most sum_ij <C e_si, C e_sj>, since no product is negative, and
<C e_s, C e_t> = sum_{u < n - t} c_u c_{u + t - s}, s <= t, falls with t and with t - s. Every s_i is at least (i - 1) b,
so the most is that of the rounds 0, b, 2 b, ...: || sum_i C e_{(i - 1) b} ||. With vectors that follow earlier releases
it is the same: the Gaussian mechanism of a lower triangular matrix (Denisov et al., NeurIPS 2022).

The error is that of the sums of all rounds so far, its root mean square over rounds at the noise of one release of
multiplier 1. Writes table.csv and the table of the README beside this file.

    python benchmarks/reproduce/inverse_bands/run.py
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from scipy.signal import lfilter

from fedmtl.privacy.noise.banded import Bands

HERE = Path(__file__).parent
ROUNDS = 1_000
APART = (10, 20, 50, 100)  # b; a client takes part in every b-th round
COEFFICIENTS = (1, 2, 4, 8, 16, 64)
MOST_OPTIMIZED = 8
BANDS, OPTIMIZED_BANDS = "bands", "optimized bands"
ROOT, OPTIMIZED = "inverse square root", "optimized inverse"
KINDS = (BANDS, OPTIMIZED_BANDS, ROOT, OPTIMIZED)
Array = NDArray[np.float64]


def inverse_root(count: int) -> Array:
    """Return the first coefficients d_j of (1 - x)^(1/2)."""
    j = np.arange(1, count)
    return np.cumprod(np.concatenate([[1.0], (2 * j - 3) / (2 * j)]))


def inverted(coefficients: Array, rounds: int) -> Array:
    """Return the first column of the inverse of a lower triangular Toeplitz matrix, (rounds,)."""
    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    return lfilter([1.0], coefficients, impulse)


def padded(coefficients: Array, rounds: int) -> Array:
    """Return a first column with zeros behind it."""
    return np.concatenate([coefficients, np.zeros(max(0, rounds - len(coefficients)))])[:rounds]


def sensitivity(c: Array, apart: int, most: int) -> float:
    """Return the norm of C x over the rows of one client, at most ``most`` rounds that are ``apart`` at least.

    Args:
        c: the first column of C, (n,): nonnegative, none above the one before.
        apart: b, at least 1.
        most: k.
    """
    if (c < 0).any() or (np.diff(c) > 1e-12).any():
        raise ValueError("the first column of C must be nonnegative and must not rise")
    total = np.zeros(len(c))
    for first in range(0, len(c), apart)[:most]:
        total[first:] += c[: len(c) - first]
    return float(np.linalg.norm(total))


def spread(d: Array) -> float:
    """Return the root mean square over rounds of the error of sums, for independent z of variance 1."""
    return float(np.sqrt(np.cumsum(np.cumsum(d) ** 2).mean()))


def error_of_inverse(d: Array, rounds: int, apart: int) -> float:
    """Return the error of a banded inverse with the coefficients d_0, ..., d_{p - 1}."""
    c = inverted(d, rounds)
    return spread(padded(d, rounds)) * sensitivity(c, apart, -(-rounds // apart))


def error_of_bands(c: Array, rounds: int, apart: int) -> float:
    """Return the error of bands c_0, ..., c_{b - 1}, of which there are at most ``apart``."""
    noise = spread(inverted(c, rounds))
    return noise * sensitivity(padded(c, rounds), apart, -(-rounds // apart))


def optimized(count: int, rounds: int, apart: int) -> Array:
    """Return d_j with the least error that a search from those of the inverse square root finds."""

    def made(logs: Array) -> Array:
        return np.concatenate([[1.0], -np.exp(logs)])

    def error(logs: Array) -> float:
        d = made(logs)
        c = inverted(d, rounds)
        # outside of the set in which the sensitivity is known
        if d.sum() < 0 or (np.diff(c) > 1e-12).any():
            return float("inf")
        return error_of_inverse(d, rounds, apart)

    if count == 1:
        return np.ones(1)
    start = np.log(-inverse_root(count)[1:])
    options = {"maxiter": 4_000, "xatol": 1e-5, "fatol": 1e-7, "adaptive": True}
    found = optimize.minimize(error, start, method="Nelder-Mead", options=options)
    return made(found.x)


def log_error_of_bands(ratios: Array, rounds: int) -> tuple[float, Array]:
    """Return the logarithm of the squared error of sums, added up over the rounds, at bands of norm 1; and its gradient.

    The noise of the sum of the rounds up to t is a_t z_0 + a_{t-1} z_1 + ... + a_0 z_t with a(x) = 1 / ((1 - x) c(x)). So
    a_t^2 is in the errors of T - t sums, and da(x) / dc_j = -x^j a(x) / c(x).

    Args:
        ratios: (b - 1,), c_j / c_{j-1}; c_0 is 1 before the norm is taken.
        rounds: T.
    """
    c = np.cumprod([1.0, *ratios])
    a = np.cumsum(inverted(c, rounds))
    weighted = np.arange(rounds, 0, -1) * a
    squared = weighted @ a
    slope = lfilter([1.0], c, a)
    by_c = 2.0 * c / (c @ c)
    for j in range(1, len(c)):
        by_c[j] -= 2.0 * (weighted[j:] @ slope[: rounds - j]) / squared
    # c_i has the factor c_j / c_{j-1} for i >= j
    by_ratios = np.cumsum((by_c * c)[:0:-1])[::-1] / ratios
    return float(np.log(squared) + np.log(c @ c)), by_ratios


def optimized_bands(count: int, rounds: int) -> Array:
    """Return the bands c_j with the least error, which a search from those of the square root finds."""
    if count == 1:
        return np.ones(1)
    j = np.arange(1, count)
    found = optimize.minimize(
        log_error_of_bands,
        (2 * j - 1) / (2 * j),
        args=(rounds,),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.01, 0.9999)] * len(j),
    )
    return np.cumprod([1.0, *found.x])


def error(kind: str, count: int, rounds: int, apart: int) -> float:
    """Return the error of a kind of noise with so many coefficients; NaN if it is not defined or not computed."""
    if kind == BANDS and count <= apart:
        c = np.array(Bands.square_root(count).coefficients)
        return error_of_bands(c, rounds, apart)
    if kind == OPTIMIZED_BANDS and count <= apart:
        return error_of_bands(optimized_bands(count, rounds), rounds, apart)
    if kind == ROOT:
        return error_of_inverse(inverse_root(count), rounds, apart)
    if kind == OPTIMIZED and count <= MOST_OPTIMIZED:
        return error_of_inverse(optimized(count, rounds, apart), rounds, apart)
    return float("nan")


def table(rounds: int, aparts: tuple[int, ...]) -> list[dict[str, str]]:
    """Return the rows of the table."""
    found = []
    for apart in aparts:
        for count in sorted({*COEFFICIENTS, apart}):
            row = {"apart": str(apart), "coefficients": str(count)}
            for kind in KINDS:
                row[kind] = f"{error(kind, count, rounds, apart):.4g}"
            found.append(row)
    return found


def markdown(rows: list[dict[str, str]]) -> str:
    """Return the table of a README; a dash is not defined or not computed."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "| ---: " * len(names) + "|"]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    return "\n".join(lines).replace("nan", "-")


def main() -> None:
    """Parse the command line, compute, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="200 rounds; writes nothing")
    if parser.parse_args().quick:
        print(markdown(table(200, (20,))))
        return
    rows = table(ROUNDS, APART)
    with open(HERE / "table.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    page = (HERE / "README.md").read_text(encoding="utf-8")
    before, _, rest = page.partition("<!-- table -->\n")
    after = rest.partition("<!-- /table -->")[2]
    text = f"{before}<!-- table -->\n{markdown(rows)}\n<!-- /table -->{after}"
    (HERE / "README.md").write_text(text, encoding="utf-8")
    print(markdown(rows))


if __name__ == "__main__":
    main()
