"""Run the plain PyTorch loop on a given work; see plain_loop.py."""

from __future__ import annotations

import torch
from plain_loop import PlainLoop
from work import Clock, Work, arguments, batches, report


def main() -> None:
    """Time every round; of FedProx the clients start from the shared model each time."""
    given = arguments(__doc__)
    work, clock = Work.read(given.work), Clock.new(given.device)
    x, y = work.x.to(given.device), work.y.to(given.device)
    settings = work.settings
    generator = torch.Generator().manual_seed(int(settings["seed"]))
    loop = PlainLoop(
        work.module().to(given.device),
        lr=settings["lr"],
        lam=settings["lam"],
        clip_norm=settings["clip"],
        noise_std=settings["noise"],
        denominator=settings["denominator"],
        normal=lambda step: torch.randn(
            len(work.initial), generator=generator, dtype=torch.float64
        ),
        personal=settings["method"] == "pmtl",
    )
    for step in range(work.rounds):
        clock.start()
        loop.round(
            {
                client: (x, y, batches(order.to(given.device), settings["batch"]))
                for client, order in work.examples(step).items()
            },
            step,
        )
        clock.stop()
    loss = work.loss(lambda client: loop.models.get(client, loop.shared), given.device)
    report(work, clock, "plain loop", torch.__version__, given.threads, loss)


if __name__ == "__main__":
    main()
