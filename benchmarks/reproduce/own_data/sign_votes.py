"""Would a private vote tell tables of single training rows apart? Clients vote on the model that automatic settings release.

    python benchmarks/reproduce/own_data/sign_votes.py --data /path/to/data
    python benchmarks/reproduce/own_data/sign_votes.py --print

Each client votes 1 or -1: whether its only row is nearer to the shared model than to the released level, the model
after the first rounds, or whether the squared distance is less than half. The mean vote has the noise of today's votes.
Clients share if it is above so many standard deviations of that noise and of the votes themselves. The error under a
rule is that of sharing or that of *local*, by the probability of each under the noise.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from scipy.stats import gmean, norm

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "comparison")]

from alone import rows_of  # noqa: E402
from pairs import FRESH, MAKERS  # noqa: E402
from sweep import existing  # noqa: E402
from tables import SOURCES  # noqa: E402

from fedmtl import ClientPrivacy, FederatedDataset, Trainer  # noqa: E402
from fedmtl.algorithms.noise_level import noise_of  # noqa: E402
from fedmtl.contrib import ProximalPoint  # noqa: E402
from fedmtl.contrib.average import average_numbers  # noqa: E402

KNOWN = ("births", "colleges", "crimes", "rents", "grades")
SCORES = HERE / "sign_votes.csv"
COLUMNS = ("data", "epsilon", "split", "clients", "noise", "nearer", "half", "sharing")
RULES = {
    "always": None,
    "never": None,
    "nearer, 1.64": ("nearer", 1.645),
    "nearer, 2.33": ("nearer", 2.326),
    "half, 1.64": ("half", 1.645),
    "half, 2.33": ("half", 2.326),
}
"""Rules for sharing: the vote, and the standard deviations above which its mean has to be."""


def released(data: FederatedDataset, epsilon: float, seed: int) -> dict[str, Any]:
    """Return the released model and level, (p,) each, the noise of a mean vote, and nu."""
    found: dict[str, Any] = {}

    update = ProximalPoint.server_update

    def watched(self: ProximalPoint, problem: Any, public: Any, answer: Any) -> Any:
        new = update(self, problem, public, answer)
        if answer.step == self._first_rounds(problem) - 1:
            found["level"] = new["global"].double().numpy().copy()
        found["model"] = new[self.released_name].double().numpy().copy()
        found["noise"] = float(new["vote_noise"])
        return new

    privacy = ClientPrivacy(epsilon=epsilon)
    trainer = Trainer(data=data, privacy=privacy, seed=seed, progress=False, baselines=[])
    with patch.object(ProximalPoint, "server_update", watched):
        trainer.fit()
    found["nu"] = noise_of(privacy, data, len(found["model"]), trainer.rounds)
    return found


def score(data: FederatedDataset, found: dict[str, Any]) -> dict[str, float]:
    """Return the mean votes of the clients and the error of sharing over that of ``local``."""
    model = found["model"]
    votes, sharing, local = [], [], []
    for client in range(len(data)):
        (x, y), (x_test, y_test) = (rows_of(data, side, client) for side in ("train", "test"))
        assert len(y) == 1
        squares = [float((y - x @ w[:-1] - w[-1])[0] ** 2) for w in (model, found["level"])]
        votes.append([np.sign(factor * squares[1] - squares[0]) for factor in (1.0, 0.5)])
        average, _ = average_numbers(x, y, model, True, found["nu"], data.limit)
        predicted = np.clip(x_test @ average[:-1] + average[-1], -data.limit, data.limit)
        sharing.append(float(np.mean((y_test - predicted) ** 2)))
        local.append(float(np.mean((y_test - y) ** 2)))
    nearer, half = np.mean(votes, 0)
    return {
        "clients": len(data),
        "noise": found["noise"],
        "nearer": nearer,
        "half": half,
        "sharing": float(np.mean(sharing) / np.mean(local)),
    }


def under(row: Any, rule: str) -> float:
    """Return the error over that of ``local`` that a rule has in the mean over the noise."""
    if rule == "never":
        return 1.0
    if rule == "always":
        return float(row.sharing)
    vote, deviations = RULES[rule]  # type: ignore[misc]
    level = deviations * math.hypot(row.noise, row.clients**-0.5)
    share = norm.sf((level - getattr(row, vote)) / row.noise)
    return float(share * row.sharing + 1 - share)


def table(scores: pd.DataFrame) -> Iterator[str]:
    """Yield the lines of the table of rules."""
    yield "| share if | epsilon | those that may make a rule: mean | largest | above 1.01 | those that judge: mean | largest | above 1.01 |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for rule, epsilon in product(RULES, sorted(scores["epsilon"].unique())):
        cells = []
        for names in ((*KNOWN, *MAKERS), FRESH):
            rows = scores[(scores["epsilon"] == epsilon) & scores["data"].isin(names)]
            if rows.empty:
                cells += ["", "", ""]
                continue
            errors = rows.assign(error=[under(row, rule) for row in rows.itertuples()])
            means = errors.groupby("data")["error"].mean()
            cells += [
                f"{gmean(means):.2f}",
                f"{means.max():.2f}",
                f"{(means > 1.01).sum()} of {len(means)}",
            ]
        yield f"| {rule} | {epsilon:g} | {' | '.join(cells)} |"


def main() -> None:
    """Compute the votes, or print the table of those that are there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=existing, help="the folder with the files of the data sets")
    parser.add_argument("--print", action="store_true", help="print the table of sign_votes.csv")
    parser.add_argument("--sources", nargs="+", default=[*KNOWN, *MAKERS, *FRESH], metavar="NAME")
    parser.add_argument("--out", type=Path, default=SCORES)
    arguments = parser.parse_args()
    if arguments.data:
        logging.getLogger("fedmtl").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        rows = []
        for name, split, epsilon in product(arguments.sources, range(3), (1.0, 3.0, 10.0)):
            data = SOURCES[name].load(arguments.data / SOURCES[name].file, split)
            where = {"data": name, "epsilon": epsilon, "split": split}
            rows.append(where | score(data, released(data, epsilon, split)))
        pd.DataFrame(rows, columns=COLUMNS).to_csv(
            arguments.out, index=False, float_format="%.7g", lineterminator="\n"
        )
    elif not arguments.print:
        parser.error("--data is needed, except with --print")
    print(*table(pd.read_csv(arguments.out)), sep="\n")


if __name__ == "__main__":
    main()
