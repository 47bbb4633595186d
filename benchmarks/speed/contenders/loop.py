"""Run the plain PyTorch loop on a given work; see plain_loop.py, and plain_records.py for DP-SGD of single records."""

from __future__ import annotations

from collections.abc import Callable

import torch
from plain_loop import PlainLoop
from plain_records import PlainRecordLoop
from torch import Tensor, nn
from work import Clock, Work, arguments, report

Round = Callable[[int], None]
"""A function of the number of a round, which makes it."""
Model = Callable[[int], nn.Module]
"""A function of a client, whose model it returns."""


def of_clients(work: Work, device: str) -> tuple[Round, Model]:
    """Return the loop in which the updates of whole clients are clipped; of FedProx the clients start from the shared
    model each time."""
    settings = work.settings
    generator = torch.Generator().manual_seed(int(settings["seed"]))

    def normal(step: int) -> Tensor:
        return torch.randn(len(work.initial), generator=generator, dtype=torch.float64)

    loop = PlainLoop(
        work.module().to(device),
        lr=settings["lr"],
        lam=settings["lam"],
        clip_norm=settings["clip"],
        noise_std=settings["noise"],
        denominator=settings["denominator"],
        normal=normal,
        personal=settings["method"] == "pmtl",
    )
    x, y = work.x.to(device), work.y.to(device)

    def one(step: int) -> None:
        batches = work.batches(step).items()
        loop.round({c: (x, y, [rows.to(device) for rows in own]) for c, own in batches}, step)

    return one, lambda client: loop.models.get(client, loop.shared)


def of_records(work: Work, device: str) -> tuple[Round, Model]:
    """Return the loop in which the gradients of single records are clipped."""
    settings = work.settings
    loop = PlainRecordLoop(
        work.module().to(device),
        lr=settings["lr"],
        lam=settings["lam"],
        clip_norm=settings["clip"],
        noise_std=settings["noise"],
        denominator=settings["denominator"],
        generator=torch.Generator(device).manual_seed(int(settings["seed"])),
    )
    x, y = work.x.to(device), work.y.to(device)

    def one(step: int) -> None:
        batches = {}
        for client, own in work.batches(step).items():
            batches[client] = (x, y, [rows.to(device) for rows in own], work.expected(client))
        loop.round(batches)

    return one, lambda client: loop.shared


def main() -> None:
    """Time every round."""
    given = arguments(__doc__)
    work, clock = Work.read(given.work, given.rounds), Clock.new(given.device)
    prepare = of_clients
    if work.lengths is not None:
        prepare = of_records
    one, model = prepare(work, given.device)
    for step in range(work.rounds):
        clock.start()
        one(step)
        clock.stop()
    loss = work.loss(model, given.device)
    report(work, clock, "plain loop", torch.__version__, given.threads, loss)


if __name__ == "__main__":
    main()
