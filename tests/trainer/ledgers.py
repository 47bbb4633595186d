"""An independent reading of a ledger's file: what it says has been charged."""

import json
from collections import Counter
from pathlib import Path


def read_lines(path: Path) -> list[dict]:
    """The complete lines; the last one does not count without its newline."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def charges(path: Path) -> Counter[int]:
    """How often each step is charged."""
    count: Counter[int] = Counter()
    for line in read_lines(path):
        if line["kind"] == "charge":
            count.update(range(line["first"], line["end"]))
    return count


def participations(path: Path) -> Counter[int]:
    """Charged steps by rank, each step once, for ledgers that write cohorts."""
    steps: dict[int, list[int]] = {}
    for line in read_lines(path):
        if "cohorts" in line:
            steps |= dict(zip(range(line["first"], line["end"]), line["cohorts"], strict=True))
    return Counter(rank for ranks in steps.values() for rank in ranks)
