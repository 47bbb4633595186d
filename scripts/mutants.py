"""Print which checks of the audit catch which broken version of the release path, as a markdown table.

    python scripts/mutants.py [ALGORITHM ...] > mutants.md

Every mutant is audited with all checks in its configuration of each algorithm: of pmtl, pmtl-local, fedavg and fedprox,
which go in rounds, of mp_mtl, which releases covariances, and of async_learner, p2p and pp_dmtl, whose owners act one
at a time; some of the latter with further releases.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.privacy import matrix_mutants as matrices
from tests.privacy import mutants as rounds
from tests.privacy import owner_mutants as owners


def main(algorithms: list[str]) -> int:
    """Print the table; 1 if a mutant escapes or a no-op is refuted."""
    gates = (rounds, matrices, owners)
    accepted = [name for gate in gates for name in gate.ALGORITHMS]
    unknown = set(algorithms) - set(accepted)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; accepted: {', '.join(accepted)}", file=sys.stderr)
        return 2
    failed = 0
    print("| mutant | configuration | algorithms | caught by |\n|---|---|---|---|")
    for gate in gates:
        chosen = [name for name in gate.ALGORITHMS if not algorithms or name in algorithms]
        if not chosen:
            continue
        for mutant in [*gate.NO_OP, *gate.MUTANTS]:
            checks: dict[str, None] = {}
            having = []
            for algorithm in chosen:
                found = gate.caught(algorithm, mutant)
                checks |= dict.fromkeys(found)
                if found:
                    having.append(algorithm)
                expected = any(check.startswith(mutant.caught_by) for check in found)
                failed += bool(found) if mutant in gate.NO_OP else not expected
            names = "; ".join(checks) or "nothing"
            print(f"| {mutant.name} | {mutant.configuration} | {', '.join(having) or 'none'} | {names} |", flush=True)
    for name, mutant in owners.FEATURED_MUTANTS if not algorithms else ():
        found = owners.caught(name, mutant)
        failed += not any(check.startswith(mutant.caught_by) for check in found)
        print(f"| {mutant.name} | {mutant.configuration} | {name} | {'; '.join(found) or 'nothing'} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
