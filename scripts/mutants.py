"""Print which checks of the audit catch which broken version of the release path, as a markdown table.

    python scripts/mutants.py [ALGORITHM ...] > mutants.md

Every mutant is audited with all checks in its configuration of each algorithm (pmtl, pmtl-local, fedavg, fedprox).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.privacy.mutants import ALGORITHMS, MUTANTS, NO_OP, caught


def main(algorithms: list[str]) -> int:
    """Print the table; 1 if a mutant escapes or a no-op is refuted."""
    unknown = set(algorithms) - set(ALGORITHMS)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; accepted: {', '.join(ALGORITHMS)}", file=sys.stderr)
        return 2
    failed = 0
    print("| mutant | configuration | algorithms | caught by |\n|---|---|---|---|")
    for mutant in [*NO_OP, *MUTANTS]:
        checks: dict[str, None] = {}
        having = []
        for algorithm in algorithms or ALGORITHMS:
            found = caught(algorithm, mutant)
            checks |= dict.fromkeys(found)
            if found:
                having.append(algorithm)
            expected = bool({check.split(":")[0] for check in found} & set(mutant.caught_by))
            failed += bool(found) if mutant in NO_OP else not expected
        names = "; ".join(checks) or "nothing"
        print(f"| {mutant.name} | {mutant.configuration} | {', '.join(having) or 'none'} | {names} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
