"""Run FedProx of Flower (pip install "flwr[simulation]") on a given work, in its simulation engine, with its own clip
and Gaussian noise.

The engine's nodes are the clients, which actors of Ray compute: as many as there are threads, each on one. The local
training is that of the plain loop, as Flower leaves it to its users. An actor keeps the work and a module, which a
program that reads its data anew for every message would not.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedProx
from flwr.simulation import run_simulation
from torch import nn
from work import Clock, Work, arguments, report

TICKS = os.sysconf("SC_CLK_TCK")


@cache
def opened(folder: str) -> tuple[Work, nn.Module]:
    """Return the work and a module, once in each process."""
    torch.set_num_threads(1)
    work = Work.read(Path(folder))
    return work, work.module()


def client_app(folder: str) -> ClientApp:
    """Return the part of a node: its number, and FedProx on its own examples."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        number = ConfigRecord({"client": int(context.node_config["partition-id"])})
        return Message(RecordDict({"config": number}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        work, module = opened(folder)
        config = message.content.config_records["config"]
        client, step = int(context.node_config["partition-id"]), int(config["server-round"]) - 1
        module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        anchor, lam = (
            [p.detach().clone() for p in module.parameters()],
            float(config["proximal-mu"]),
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=work.settings["lr"])
        for rows in work.batches(step)[client]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(work.x[rows]), work.y[rows]).backward()
            with torch.no_grad():
                for p, a in zip(module.parameters(), anchor, strict=True):
                    assert p.grad is not None
                    p.grad.add_(p - a, alpha=lam)
            optimizer.step()
        records = {
            "arrays": ArrayRecord(module.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(records), reply_to=message)

    return app


class Cohorts(FedProx):
    """FedProx that samples the cohorts of the work.

    Args:
        work: see there.
        nodes: the node of each client.
    """

    def __init__(self, work: Work, nodes: dict[int, int]) -> None:
        super().__init__(proximal_mu=work.settings["lam"], fraction_evaluate=0.0)
        self.work, self.nodes = work, nodes

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["proximal-mu"], config["server-round"] = self.proximal_mu, server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        members = [self.nodes[client] for client in self.work.cohorts[server_round - 1].tolist()]
        return self._construct_messages(record, members, "train")


class Timed(DifferentialPrivacyServerSideFixedClipping):
    """Flower's clip and noise, and the clock around a round."""

    def __init__(self, strategy: FedProx, clock: Clock, **settings: Any) -> None:
        super().__init__(strategy, **settings)
        self.clock = clock

    def configure_train(self, *given: Any) -> Iterable[Message]:
        self.clock.start()
        return super().configure_train(*given)

    def aggregate_train(self, *given: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = super().aggregate_train(*given)
        self.clock.stop()
        return found


def server_app(work: Work, clock: Clock, done: Callable[[ArrayRecord], None]) -> ServerApp:
    """Return the server: all rounds, then ``done`` with the last model."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(there := list(grid.get_node_ids())) < len(work.offsets) - 1:
            time.sleep(0.1)
        asked = grid.send_and_receive([Message(RecordDict(), node, "query") for node in there])
        nodes = {
            int(one.content.config_records["config"]["client"]): one.metadata.src_node_id
            for one in asked
        }
        settings = work.settings
        strategy = Timed(
            Cohorts(work, nodes),
            clock,
            noise_multiplier=settings["noise"] / settings["clip"],
            clipping_norm=settings["clip"],
            num_sampled_clients=round(settings["denominator"]),  # divides the noise
        )
        done(
            strategy.start(
                grid, ArrayRecord(work.module().state_dict()), num_rounds=work.rounds
            ).arrays
        )

    return app


def family() -> list[Path]:
    """Return the folders in /proc of this process and of all that it has started, those of Ray among them."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = {os.getpid()}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return [Path("/proc") / str(one) for one in sorted(found)]


def processor() -> float:
    """Return the seconds that all of them have computed so far."""
    total = 0
    for path in family():
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def memory() -> float:
    """Return the MiB that all of them hold now; what they share is counted once for each."""
    total = 0
    for path in family():
        try:
            total += int((path / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total / (1 << 20)


def main() -> None:
    """Time every round, from the choice of the cohort to the noised model."""
    given = arguments(__doc__)
    work, clock = Work.read(given.work, given.rounds), Clock.new(processor=processor)
    module, peaks = copy.deepcopy(work.module()), list[float]()

    def done(arrays: ArrayRecord) -> None:
        module.load_state_dict(arrays.to_torch_state_dict())
        peaks.append(memory())

    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": given.threads},
    }
    run_simulation(
        server_app(work, clock, done),
        client_app(str(given.work)),
        len(work.offsets) - 1,
        backend_config=resources,
    )
    loss = work.loss(lambda client: module)
    report(work, clock, "flower", version("flwr"), given.threads, loss, peak_mib=round(peaks[0]))


if __name__ == "__main__":
    import flower_fedprox  # by a name that the actors know, too

    flower_fedprox.main()
