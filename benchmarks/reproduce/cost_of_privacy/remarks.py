"""The published learner where owners answer unequally often (Remark 4), and where an answer is of a secret subset.

Adds its rows to scores.csv and writes three tables of README.md beside this file.

    python benchmarks/reproduce/cost_of_privacy/remarks.py --hospital /path/to/hospital
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from collaboration import Collaboration
from hospitals import stays
from public_start import DEALS, EPSILONS, FILE, HERE, HOSPITALS, METHODS, RUNS, hospitals
from scores import interval, renew_scores, table
from sweep import existing, markdown, replace_section
from weighted import Sampled, Weighted

OFTEN, RARELY, OWNERS = 12, 3, 17
CAPS = tuple(RARELY if owner % 2 else OFTEN for owner in range(OWNERS))
UNEQUAL = f"{HOSPITALS}, every second one answers a quarter as often"
LEARNER = replace(METHODS[0], cap=CAPS, rate=tuple(map(float, CAPS)))
WEIGHTS = (
    replace(LEARNER, name="equal weights"),
    replace(LEARNER, name="weights of known frequencies",
            learner=Weighted(frequencies=LEARNER.rate)),
    replace(LEARNER, name="weights of frequencies so far", learner=Weighted()),
)  # fmt: skip
FURTHER = tuple(
    replace(METHODS[0], role="new", name=f"learner, {part} of the records an answer",
            learner=Sampled(batch_rate=rate))
    for part, rate in (("half", 0.5), ("a quarter", 0.25))
)  # fmt: skip


def same_settings(root: Path, clip: float = 2.0, kappa: float = 5.0) -> str:
    """Return psi by the share of the records in an answer, with one clip and kappa for all."""
    data, public = stays(root)
    psi, lines = Collaboration(METHODS[0].learner, data).psi, []
    for method in (METHODS[0], *FURTHER):
        cells = []
        for epsilon in EPSILONS:
            runs = (
                method.run(data, public, epsilon, (clip, kappa), RUNS, 10_000 + seed)
                for seed in range(DEALS)
            )
            cells.append(
                "{:.4f} ± {:.4f}".format(*interval(float(psi(theta).mean()) for theta in runs))
            )
        lines.append([method.name, *cells])
    return markdown(
        [f"clip {clip:g}, kappa {kappa:g}", *(f"epsilon {e:g}:" for e in EPSILONS)], lines
    )


def main() -> None:
    """Parse the command line, simulate, write scores and tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--hospital", type=existing, required=True, help="azpro.csv, or its folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    renew_scores(FILE, list(hospitals(arguments.hospital, (*WEIGHTS, METHODS[-1]), UNEQUAL)))
    names = {method.name for method in FURTHER}
    found = renew_scores(
        FILE, [s for s in hospitals(arguments.hospital, FURTHER) if s.method in names]
    )
    replace_section(HERE / "README.md", "unequal clocks", table(found, UNEQUAL, digits=4))
    replace_section(HERE / "README.md", "psi of hospitals", table(found, HOSPITALS, digits=4))
    replace_section(HERE / "README.md", "same settings", same_settings(arguments.hospital))


if __name__ == "__main__":
    main()
