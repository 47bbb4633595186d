"""Events of round-based schedules."""

import torch

from fedmtl.schedules import Block, rounds


def test_rounds_have_the_cohorts_that_are_drawn():
    draws = {
        2: torch.tensor([4, 1]),
        3: torch.tensor([], dtype=torch.int64),
        4: torch.tensor([0, 3, 2]),
    }
    blocks = list(rounds(draws.__getitem__, start=2, stop=5))
    assert [e.step for e in blocks] == [2, 3, 4]
    assert [e.time.tolist() for e in blocks] == [[[2.0]], [[3.0]], [[4.0]]]
    assert [e.cohort.tolist() for e in blocks] == [[4, 1], [], [0, 3, 2]]


def test_nobody_is_left_out_of_the_cohort():
    block = Block(0, torch.zeros(1, 1), torch.tensor([[[3, -1, 5, -1]]]))
    assert block.cohort.tolist() == [3, 5]
