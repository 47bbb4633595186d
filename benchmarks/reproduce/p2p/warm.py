"""Peer-to-peer learning from a private warm start: Figures 2 (b) and 2 (c) of Bellet et al. 2018.

Runs from the paid warm start beside runs from zero at the same total epsilon, with the paper's noise and with noise of
a valid norm. Settings are chosen on a validation problem. Writes warm.csv and the table of README.md beside this file.

    python benchmarks/reproduce/p2p/warm.py
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2])]

from agents import DELTA, SEEDS, VALIDATION, agents, equal_step, exact, peers, published  # noqa: E402
from peers import Array, Row, budgets, simulate  # noqa: E402
from peers import accuracy as accuracy_of  # noqa: E402
from scores import interval  # noqa: E402
from sweep import markdown, replace_section, write_csv  # noqa: E402

from benchmarks.baselines.p2p import local_models  # noqa: E402
from fedmtl import PeerToPeer, RecordPrivacy  # noqa: E402
from fedmtl.contrib.published.p2p import PublishedPeerToPeer  # noqa: E402

DIMENSIONS = (20, 100)
WARM = 0.05  # epsilon of the paper's warm start
PAPER, VALID = (0.1, 0.5, 1.0), (1.0, 10.0)  # epsilons of the wake-ups; of a whole run
MUS, WAKEUPS, SHARES = (0.1, 0.3, 1.0, 3.0), (1, 10, 30), (0.1, 0.3, 0.6)
COLUMNS = (
    *("p", "method", "start", "epsilon", "at the start", "accuracy", "less local"),
    *("mu", "wake-ups", "share"),
)
Setting = tuple[float, int, float | None]
"""mu, wake-ups of an agent, and the share of the warm start or None."""


def paper_run(p: int, seed: int, epsilon: float, setting: Setting) -> tuple[Array, Array]:
    """Models at the start and at the end with the paper's noise, of L0 = 1; ``epsilon`` is that of the wake-ups, as
    Theorem 1 states it, and that of a warm start comes on top."""
    mu, wakeups, warm = setting
    privacy, share = published(p, epsilon, wakeups), None
    if warm is not None:
        step = equal_step(epsilon, wakeups)
        total = WARM + wakeups * step
        share = WARM / total
        privacy = replace(privacy, noise_multiplier=(wakeups + 1) / total / privacy.clip_norm)
    algorithm = peers(p, seed, mu, kind=PublishedPeerToPeer, warm_start=share)
    (run,) = runs(algorithm, p, seed, [privacy], wakeups)
    return run


def runs(
    algorithm: PeerToPeer, p: int, seed: int, privacies: list[RecordPrivacy], wakeups: int
) -> list[tuple[Array, Array]]:
    """Models at the start and at the end, one pair for each of ``privacies``."""
    data, starts = agents(p, seed), []

    def keep(event: int, theta: Array, sent: Array) -> None:
        starts.append(theta.copy())

    opening = 0 if algorithm.warm_start is None else len(data)
    theta, _ = simulate(algorithm, data, privacies, wakeups, seed, at=(opening,), seen=keep)
    return list(zip(starts[0], theta, strict=True))


def valid_runs(
    p: int, seed: int, epsilons: Iterable[float], setting: Setting
) -> list[tuple[Array, Array]]:
    """The same with Gaussian noise, gradients clipped at 1 in the L2 norm, and totals ``epsilons``."""
    mu, wakeups, share = setting
    return runs(
        peers(p, seed, mu, warm_start=share), p, seed, budgets(list(epsilons), 1.0, DELTA), wakeups
    )


def chosen(p: int, warm: bool, paper: bool) -> dict[float, Setting]:
    """The setting of every epsilon with the best accuracy on the validation problem."""
    seed, best = VALIDATION[0], dict[float, tuple[float, Setting]]()
    data, epsilons = agents(p, seed), PAPER if paper else VALID
    shares: tuple[float | None, ...] = (None,)
    if warm:
        shares = (WARM,) if paper else SHARES
    for setting in itertools.product(MUS, WAKEUPS, shares):
        if paper:
            found = [paper_run(p, seed, epsilon, setting) for epsilon in epsilons]
        else:
            found = valid_runs(p, seed, epsilons, setting)
        for epsilon, (_, theta) in zip(epsilons, found, strict=True):
            reached = accuracy_of(theta, data)
            if epsilon not in best or reached > best[epsilon][0]:
                best[epsilon] = reached, setting
    return {epsilon: setting for epsilon, (_, setting) in best.items()}


def rows_of(p: int) -> list[Row]:
    """Rows of warm.csv: means over the problems, each with half of a 95% interval."""
    alone = [accuracy_of(local_models(exact(p, seed, 1.0)[0]), agents(p, seed)) for seed in SEEDS]
    rows: list[Row] = [{"p": p, "method": "local models", "accuracy": _mean(alone)}]
    for paper, warm in itertools.product((True, False), (False, True)):
        for epsilon, setting in chosen(p, warm, paper).items():
            pairs = []
            for seed in SEEDS:
                pairs += (
                    [paper_run(p, seed, epsilon, setting)]
                    if paper
                    else valid_runs(p, seed, (epsilon,), setting)
                )
            starts, ends = (
                [
                    accuracy_of(pair[k], agents(p, seed))
                    for seed, pair in zip(SEEDS, pairs, strict=True)
                ]
                for k in (0, 1)
            )
            mu, wakeups, share = setting
            rows.append(
                {
                    "p": p,
                    "method": "the paper's noise, epsilon as stated"
                    if paper
                    else "Gaussian, valid norm",
                    "start": "warm" if warm else "zero",
                    "epsilon": f"{epsilon + WARM if paper and warm else epsilon:g}",
                    "at the start": _mean(starts) if warm else "",
                    "accuracy": _mean(ends),
                    "less local": _mean(
                        [end - own for end, own in zip(ends, alone, strict=True)], "+.3f"
                    ),
                    "mu": mu,
                    "wake-ups": wakeups,
                    "share": share if warm and not paper else "",
                }
            )
            print(rows[-1], flush=True)
    return rows


def _mean(values: list[float], form: str = ".3f") -> str:
    mean, half = interval(values)
    return f"{mean:{form}} ± {half:.3f}"


def table(rows: list[Row]) -> str:
    """The table of the README."""
    return markdown(list(COLUMNS), [[str(row.get(name, "")) for name in COLUMNS] for row in rows])


def main() -> None:
    """Simulate, and write the tables."""
    torch.set_num_threads(1)
    rows = [row for p in DIMENSIONS for row in rows_of(p)]
    write_csv(HERE / "warm.csv", rows, COLUMNS)
    replace_section(HERE / "README.md", "warm", table(rows))


if __name__ == "__main__":
    main()
