r"""A public start and one answer of each owner, beside the published learner, AdaSSP, and what needs no release: loans.

Writes scores.csv and its tables of README.md beside this file.

    python benchmarks/reproduce/cost_of_privacy/public_start.py --root /path/to/lending --hospital /path/to/hospital
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import scores  # noqa: E402
from collaboration import Collaboration  # noqa: E402
from hospitals import stays  # noqa: E402
from scores import Score, by_client, difference, renew_scores  # noqa: E402
from setting import CANDIDATES, budget, clocks, first_owners, lending  # noqa: E402
from simulate import simulate  # noqa: E402
from sweep import existing, markdown, replace_section  # noqa: E402

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner  # noqa: E402
from fedmtl.algorithms.async_learner.central import CentralLearner  # noqa: E402
from fedmtl.algorithms.linear.data import LinearData  # noqa: E402
from fedmtl.contrib.one_answer import Moments, PublicStart  # noqa: E402

CELLS = {(100, 90): 80, (30, 300): 24, (10, 300): 10}
"""(owners, records of each) -> owners that train where others' records are tests."""
EPSILONS, DEALS, RUNS, TRIALS = (1.0, 3.0, 10.0), 8, 5, 8
HOSPITALS = "17 hospitals"
FILE = HERE / "scores.csv"
CLIPS = (5.0, 10.0, 20.0, 40.0)
RIDGES = tuple(10.0**k for k in np.arange(-3, 2.6, 0.5))


@dataclass(frozen=True)
class Method:
    """A learner whose clip, and kappa where it steps, are chosen on public rows."""

    role: str
    name: str
    learner: CentralLearner
    cap: int | tuple[int, ...] | None
    settings: tuple[tuple[float, float], ...]  # clip, kappa
    rate: float | tuple[float, ...] = 1.0

    def run(self, data: LinearData, public: LinearData, epsilon: float, setting: tuple[float, float],
            runs: int, seed: int) -> Tensor:  # fmt: skip
        """Return theta of ``runs`` runs, (runs, p)."""
        clip, kappa = setting
        learner = self.learner
        if isinstance(learner, AsyncLearner):
            learner = replace(learner, kappa=kappa)
        clients = clocks(len(data.x), runs, seed, self.cap, self.rate)
        known = public if isinstance(learner, PublicStart) else None
        return simulate(learner, data, budget(epsilon, clip), clients, seed=seed, public=known)

    def said(self, clip: float, kappa: float) -> str:
        """Return a setting in words."""
        return f"clip {clip:g}" + (
            f", kappa {kappa:g}" if isinstance(self.learner, AsyncLearner) else ""
        )

    def chosen(
        self, public: LinearData, counts: Sequence[int], epsilon: float
    ) -> tuple[float, float]:
        """Return the setting of the least mean psi where public rows play both parts: a half is public, and owners'
        records, ``counts`` of them, are drawn from the other half, with replacement."""
        x, y = public.pooled()
        total = dict.fromkeys(self.settings, 0.0)
        for trial in range(TRIALS):
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(trial))
            known, rest = order.chunk(2)
            coins = torch.Generator().manual_seed(99 + trial)
            drawn = rest[torch.randint(len(rest), (sum(counts),), generator=coins)].split(
                list(counts)
            )
            data = LinearData(tuple(x[i] for i in drawn), tuple(y[i] for i in drawn), public.bias)
            psi = Collaboration(self.learner, data).psi
            half = LinearData((x[known],), (y[known],), public.bias)
            for setting in self.settings:
                total[setting] += float(
                    psi(self.run(data, half, epsilon, setting, 2, 1000 + trial)).mean()
                )
        return min(total, key=lambda setting: total[setting])


STEPS = tuple((clip, kappa) for clip in (5.0, 20.0) for kappa in CANDIDATES)
ONCE = tuple((clip, 1.0) for clip in CLIPS)
METHODS = (
    Method("published", "published learner", AsyncLearner(), None, STEPS),
    Method("baseline", "AdaSSP", Moments(), 1, ONCE),
    Method("new", "public start", PublicStart(), 1, ONCE),
)


def ridge(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Ridge regression on an owner's records, the ridge by leaving each of them out once."""
    best = None
    left, values, right = np.linalg.svd(x, full_matrices=False)
    turned = left.T @ y
    for strength in RIDGES:
        kept = values**2 / (values**2 + strength)
        missed = (y - left @ (kept * turned)) / (1 - (left**2 * kept).sum(1))
        if best is None or (missed @ missed) < best[0]:
            best = missed @ missed, right.T @ (values / (values**2 + strength) * turned)
    assert best is not None
    return best[1]


def alone(data: LinearData) -> Tensor:
    """Return every owner's tuned ridge fit, (n, p)."""
    return torch.from_numpy(
        np.stack([ridge(x.numpy(), y.numpy()) for x, y in zip(data.x, data.y, strict=True)])
    )


def with_public(data: LinearData, public: LinearData) -> Tensor:
    """Return every owner's least squares fit of the public rows and its own records, which nothing leaves, (n, p)."""
    fits = []
    for x, y in zip(data.x, data.y, strict=True):
        both = LinearData((torch.cat([*public.x, x]),), (torch.cat([*public.y, y]),), data.bias)
        fits.append(Collaboration(AsyncLearner(), both).optimum.theta)
    return torch.from_numpy(np.stack(fits))


def measured(root: Path) -> Iterator[Score]:
    """Yield psi on everybody's records, and the error on owners that took no part."""
    for (owners, size), training in CELLS.items():
        choices = {}
        for deal in range(DEALS):
            whole, public = lending(root, max(owners, 9000 // size), size, deal)
            for metric, count in (("psi", owners), ("test MSE", training)):
                data = first_owners(whole, count)
                if metric == "psi":
                    score_of = Collaboration(AsyncLearner(), data).psi
                else:
                    x, y = torch.cat(whole.x[count:]), torch.cat(whole.y[count:])

                    def score_of(theta: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
                        return (theta @ x.T - y).square().mean(-1)

                name = f"lending, {count} owners x {size}"
                local = score_of(alone(data))
                ids = [str(i) for i in range(count)]
                own = dict(zip(ids, local.tolist(), strict=True))

                def row(
                    role,
                    method,
                    epsilon,
                    score,
                    by,
                    chosen="",
                    *,
                    deal=deal,
                    own=own,
                    name=name,
                    metric=metric,
                ):
                    return Score(name, metric, False, role, method, epsilon, deal, score,
                                 **by_client(by, own, larger=False), chosen=chosen)  # fmt: skip

                yield row(
                    "local", "alone (tuned ridge)", 0.0, float(local.mean()), own, "leave one out"
                )
                free = torch.from_numpy(Collaboration(AsyncLearner(), public).optimum.theta)
                value = float(score_of(free[None]))
                yield row("public", "public rows", 0.0, value, dict.fromkeys(ids, value))
                values = score_of(with_public(data, public))
                yield row("public", "public rows and own records", 0.0, float(values.mean()),
                          dict(zip(ids, values.tolist(), strict=True)))  # fmt: skip
                for method in METHODS:
                    for epsilon in EPSILONS:
                        key = method.name, epsilon
                        if key not in choices:
                            choices[key] = method.chosen(public, [size] * owners, epsilon)
                        theta = method.run(data, public, epsilon, choices[key], RUNS, 10_000 + deal)
                        value = float(score_of(theta).mean())
                        said = method.said(*choices[key])
                        yield row(
                            method.role,
                            method.name,
                            epsilon,
                            value,
                            dict.fromkeys(ids, value),
                            said,
                        )
            print(f"{owners} x {size}, deal {deal}", flush=True)


def hospitals(
    root: Path, methods: Sequence[Method] = METHODS, setting: str = HOSPITALS
) -> Iterator[Score]:
    """Yield psi of 17 hospitals with the stays they have; a seed is of the noise and of who answers when."""
    data, public = stays(root)
    psi, counts = Collaboration(AsyncLearner(), data).psi, data.counts.tolist()
    ids, local = [str(i) for i in range(len(counts))], psi(alone(data))
    own = dict(zip(ids, local.tolist(), strict=True))

    def row(
        role: Any, method: str, epsilon: float, seed: int, by: dict[str, float], said: str = ""
    ) -> Score:
        return Score(setting, "psi", False, role, method, epsilon, seed, sum(by.values()) / len(by),
                     **by_client(by, own, larger=False), chosen=said)  # fmt: skip

    free = float(psi(torch.from_numpy(Collaboration(AsyncLearner(), public).optimum.theta)[None]))
    both = dict(zip(ids, psi(with_public(data, public)).tolist(), strict=True))
    for seed in range(DEALS):
        yield row("local", "alone (tuned ridge)", 0.0, seed, own, "leave one out")
        yield row("public", "public rows", 0.0, seed, dict.fromkeys(ids, free))
        yield row("public", "public rows and own records", 0.0, seed, both)
    for method in methods:
        clips, kappas = (
            (1.0, 2.0, 5.0, 10.0),
            CANDIDATES if isinstance(method.learner, AsyncLearner) else (1.0,),
        )
        method = replace(
            method, settings=tuple((clip, kappa) for clip in clips for kappa in kappas)
        )
        for epsilon in EPSILONS:
            choice = method.chosen(public, counts, epsilon)
            for seed in range(DEALS):
                value = float(
                    psi(method.run(data, public, epsilon, choice, RUNS, 10_000 + seed)).mean()
                )
                yield row(
                    method.role,
                    method.name,
                    epsilon,
                    seed,
                    dict.fromkeys(ids, value),
                    method.said(*choice),
                )


def main() -> None:
    """Parse the command line, simulate, write scores and tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--root",
        type=existing,
        help="loans_full_schema.csv.gz, or its folder; without it tables only",
    )
    parser.add_argument(
        "--hospital", type=existing, help="azpro.csv, or its folder; without it their scores stay"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.root is not None:
        renew_scores(FILE, list(measured(arguments.root)))
    if arguments.hospital is not None:
        renew_scores(FILE, list(hospitals(arguments.hospital)))
    found = scores.read_scores(FILE)
    replace_section(
        HERE / "README.md", "psi of hospitals", scores.table(found, HOSPITALS, digits=4)
    )
    for (owners, size), training in CELLS.items():
        for metric, count, digits in (("psi", owners, 4), ("test MSE", training, 3)):
            part = [
                s
                for s in found
                if s.setting == f"lending, {count} owners x {size}" and s.metric == metric
            ]
            table = scores.table(part, part[0].setting, digits=digits)
            replace_section(HERE / "README.md", f"{metric} {owners} x {size}", table)
    replace_section(HERE / "README.md", "differences", differences(found))


def differences(found: list[Score]) -> str:
    """Return psi of the public start less that of what needs no release."""
    lines = []
    for owners, size in CELLS:
        part = [
            s
            for s in found
            if s.setting == f"lending, {owners} owners x {size}" and s.metric == "psi"
        ]
        for other in ("public rows", "public rows and own records"):
            line = [f"{owners} x {size}", other]
            for epsilon in EPSILONS:
                own = [s for s in part if s.method == "public start" and s.epsilon == epsilon]
                line.append(
                    "{:+.4f} ± {:.4f}".format(
                        *difference(own, [s for s in part if s.method == other])
                    )
                )
            lines.append(line)
    return markdown(
        ["owners x records", "public start less", *(f"epsilon {e:g}:" for e in EPSILONS)], lines
    )


if __name__ == "__main__":
    main()
