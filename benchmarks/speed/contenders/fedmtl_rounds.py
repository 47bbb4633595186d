"""Run fedmtl's own rounds on a given work: cohort, ledger entry on disk, gathering, local training, store, release."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from fedmtl_run import Run
from torch import nn
from work import Clock, Work, arguments, report

import fedmtl
from fedmtl.ranks import Ranks


def processor(ranks: Ranks) -> float:
    """Return the processor seconds of all ranks; none of them goes on before all have come."""
    return sum(ranks.gather(time.process_time()))


def main() -> None:
    """Time every round as the trainer makes it, in as many processes as the others have threads."""
    given = arguments(__doc__)
    work = Work.read(given.work, given.rounds)
    settings = work.settings | (
        {"execution": json.loads(given.execution)} if given.execution else {}
    )
    count = given.threads if given.device == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder, Ranks().forked(count) as ranks:
        torch.set_num_threads(1 if count > 1 else given.threads)
        clock = Clock.new(given.device, partial(processor, ranks))
        run = Run.of(
            settings, work.rounds, given.root, Path(folder) / "ledger.jsonl", given.device, ranks
        )
        problem, algorithm = run.problem, run.algorithm
        steps = run.steps(work.rounds)
        for step in range(work.rounds):
            clock.start()
            cohort, state = next(steps)
            clock.stop()
            assert torch.equal(torch.sort(cohort).values, torch.sort(work.cohorts[step]).values)
        taking_part = torch.unique(torch.cat(work.cohorts))
        rows = torch.zeros(len(problem.data), problem.dimension)
        mine = taking_part[problem.places_here(taking_part)]
        rows[mine] = algorithm.personalize(problem, state, mine).cpu()
        rows = sum(ranks.gather(rows))
        module = work.module().to(given.device)

        def model(client: int) -> nn.Module:
            nn.utils.vector_to_parameters(rows[client].to(given.device), module.parameters())
            return module

        peak = sum(ranks.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)) / (1 << 10)
        if ranks.first:
            loss = work.loss(model, given.device)
            report(
                work, clock, "fedmtl", fedmtl.__version__, given.threads, loss, peak_mib=round(peak)
            )
        run.channel.close()


if __name__ == "__main__":
    main()
