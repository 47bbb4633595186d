"""Print which checks of the audit catch which broken version of the release path, as a markdown
table.

    python scripts/mutants.py [ALGORITHM ...] > mutants.md

Every mutant is audited with all checks in its configurations of each algorithm: of pmtl, pmtl-local
and fedavg, which go in rounds, of mp_mtl, which releases covariances, and of async_learner, p2p and
pp_dmtl, whose clients act one at a time; some of the latter with further releases.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.audit.mutants import MUTANTS, NO_OP, caught


def main(algorithms: list[str]) -> int:
    """Print the table; 1 if a mutant escapes or a no-op is refuted."""
    every = {algorithm for mutant in [*NO_OP, *MUTANTS] for algorithm, _ in mutant.cases()}
    unknown = set(algorithms) - every
    if unknown:
        print(
            f"unknown: {', '.join(sorted(unknown))}; accepted: {', '.join(sorted(every))}",
            file=sys.stderr,
        )
        return 2
    failed = 0
    print("| mutant | configuration | algorithms | caught by |\n|---|---|---|---|")
    for mutant in [*NO_OP, *MUTANTS]:
        found: dict[str, dict[str, list[str]]] = {}
        for algorithm, configuration in mutant.cases():
            if not algorithms or algorithm in algorithms:
                checks = caught(mutant, algorithm, configuration)
                found.setdefault(configuration, {})[algorithm] = checks
                failed += (
                    not any(check.startswith(mutant.caught_by) for check in checks)
                    if mutant.caught_by
                    else bool(checks)
                )
        for configuration, by in found.items():
            names = (
                "; ".join(dict.fromkeys(check for checks in by.values() for check in checks))
                or "nothing"
            )
            having = ", ".join(algorithm for algorithm, checks in by.items() if checks) or "none"
            print(f"| {mutant.name} | {configuration} | {having} | {names} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
