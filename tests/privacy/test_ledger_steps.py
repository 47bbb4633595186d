"""Spans and cohorts, against sets and dictionaries of single steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fedmtl.privacy.ledger_steps import Cohorts, Spans


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_sets(seed: int) -> None:
    choose, spans, plain = random.Random(seed), Spans(), set()
    for _ in range(40):
        first = choose.randrange(60)
        end = first + choose.randrange(8)
        missing = [step for step in range(first, end) if step not in plain]
        assert [step for span in spans.gaps(first, end) for step in range(*span)] == missing
        if choose.random() < 0.5:
            spans.add(first, end)
            plain |= set(range(first, end))
        assert [step for span in spans for step in range(*span)] == sorted(plain)
        assert all(a[1] < b[0] for a, b in zip(list(spans), list(spans)[1:], strict=False)), (
            "disjoint, and not touching"
        )
        assert [step in spans for step in range(70)] == [step in plain for step in range(70)]
        assert spans.count() == len(plain)
    again = Spans((step, step + 1) for step in choose.sample(sorted(plain), len(plain)))
    assert list(again) == list(spans)


@pytest.mark.parametrize("seed", range(10))
def test_cohorts_are_dictionaries_of_steps(seed: int) -> None:
    choose, cohorts, clients = random.Random(seed), Cohorts(), 7
    plain: dict[tuple[int, int], list[int]] = {}
    for session in (1, 2, 3):
        step = choose.randrange(4)
        for _ in range(5):
            block = [choose.sample(range(clients), choose.randrange(3)) for _ in range(choose.randrange(1, 6))]
            cohorts.add(session, step, block)
            plain |= {(session, step + i): cohort for i, cohort in enumerate(block)}
            step += len(block) + choose.randrange(2)
        mine = [at for number, at in plain if number == session]
        gone = choose.sample(mine, len(mine) // 3)
        cohorts.drop(session, Spans((at, at + 1) for at in gone))
        for at in gone:
            del plain[session, at]
        for at in range(40):
            earliest = next((plain[number, at] for number in (1, 2, 3) if (number, at) in plain), None)
            found = cohorts.of(at)
            assert (found if found is None else found.tolist()) == earliest
        for before in (None, choose.randrange(40)):
            for once in (False, True):
                left = set(choose.sample(range(40), 10)) if choose.random() < 0.7 else set()
                counts, seen = np.zeros(clients, dtype=int), set()
                for (number, at), cohort in plain.items():
                    out = number == session and at in left
                    if (before is None or at < before) and not (once and at in seen) and not out:
                        counts[cohort] += 1
                        seen.add(at)
                without = session, Spans((at, at + 1) for at in left)
                found = cohorts.counts(clients, before=before, once=once, without=without)
                assert found.tolist() == counts.tolist()
