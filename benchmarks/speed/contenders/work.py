"""The work that all contenders do, read from a folder, and what each of them prints of it: one line of JSON.

It needs NumPy and PyTorch alone, so that a contender runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WARM_UP = 2


def cnn3(classes: int) -> nn.Module:
    """The network of 1.2 million parameters for 28 x 28 images that federated benchmarks share (its dropout left
    out, whose masks no two frameworks have alike)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


def cifar(classes: int) -> nn.Module:
    """Four convolutions and two linear layers for 32 x 32 images in three colours, 1.6 million parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 384), nn.ReLU(), nn.Linear(384, classes),
    )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Clients' examples, cohorts and the order of the examples in every round, and all settings.

    Attributes:
        x, y: examples of all clients, one after another: float32 (N, ...), int64 (N,).
        offsets: int64 (n + 1,), where each client's examples begin.
        initial: (D,), where the shared model starts, in the order of ``nn.Module.parameters``.
        cohorts: clients of each round.
        orders: for each round, the examples of its clients in the order of their batches, one client after another.
        settings: model, method, unit, lr, lam, batch, clip, noise, denominator, seed. Under the unit ``"client"``
            (default) the clip is that of a client's update, and ``noise`` the standard deviation on their sum; under
            ``"record"`` they are those of an example's gradient in every local step, and ``denominator`` alone
            divides the sum of the updates. ``scored`` is the number of clients of whom there is a final loss; all
            of those that took part without it.
        lengths: under the unit ``"record"``, for each round the numbers of examples that are drawn in every local
            step, int64 (k, S), -1 after a client's last step; None: batches of ``batch`` examples.
    """

    x: Tensor
    y: Tensor
    offsets: Tensor
    initial: Tensor
    cohorts: list[Tensor]
    orders: list[Tensor]
    settings: dict[str, Any]
    lengths: list[Tensor] | None = None

    def write(self, folder: Path) -> None:
        """Write it as NumPy files and one of JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("x", "y", "offsets", "initial"):
            np.save(folder / f"{name}.npy", getattr(self, name).numpy())
        for name, values in (("cohorts", self.cohorts), ("orders", self.orders)):
            np.save(folder / f"{name}.npy", torch.cat(values).numpy())
            np.save(folder / f"{name}_lengths.npy", np.array([len(value) for value in values]))
        for step, lengths in enumerate(self.lengths or []):
            np.save(folder / f"lengths-{step}.npy", lengths.numpy())
        (folder / "settings.json").write_text(json.dumps(self.settings))

    @classmethod
    def read(cls, folder: Path, rounds: int | None = None) -> Work:
        """Read what :meth:`write` wrote, of the first ``rounds`` rounds only if they are given."""
        one = {
            name: torch.from_numpy(np.load(folder / f"{name}.npy"))
            for name in ("x", "y", "offsets", "initial")
        }
        parts = []
        for name in ("cohorts", "orders"):
            whole = torch.from_numpy(np.load(folder / f"{name}.npy"))
            parts.append(list(whole.split(np.load(folder / f"{name}_lengths.npy").tolist())))
        settings = json.loads((folder / "settings.json").read_text())
        lengths = None
        if settings.get("unit") == "record":
            files = [folder / f"lengths-{step}.npy" for step in range(len(parts[0]))][:rounds]
            lengths = [torch.from_numpy(np.load(file)) for file in files]
        cohorts, orders = (part[:rounds] for part in parts)
        return cls(**one, cohorts=cohorts, orders=orders, settings=settings, lengths=lengths)

    @property
    def rounds(self) -> int:
        """All rounds, those of the warm-up included."""
        return len(self.cohorts)

    def examples(self, step: int) -> dict[int, Tensor]:
        """{client: its examples in the order of its batches} of a round."""
        if self.lengths is None:
            counts = self.offsets.diff()[self.cohorts[step]]
        else:
            counts = self.lengths[step].clamp(min=0).sum(1)
        return dict(
            zip(self.cohorts[step].tolist(), self.orders[step].split(counts.tolist()), strict=True)
        )

    def batches(self, step: int) -> dict[int, Sequence[Tensor]]:
        """{client: the examples of each of its local steps} of a round; the last batch as long as it comes."""
        examples = self.examples(step)
        if self.lengths is None:
            size = int(self.settings["batch"])
            return {client: order.split(size) for client, order in examples.items()}
        sizes = [row[row >= 0].tolist() for row in self.lengths[step]]
        pairs = zip(examples.items(), sizes, strict=True)
        return {client: order.split(own) for (client, order), own in pairs}

    def expected(self, client: int) -> float:
        """The expected number of records of a local step of a client, which is public: a batch, or all of fewer."""
        return float(min(int(self.settings["batch"]), int(self.offsets.diff()[client])))

    def module(self) -> nn.Module:
        """The model at its start."""
        features, classes = self.x[0].numel(), int(self.settings["classes"])
        side = self.x.shape[-1]
        networks: dict[str, Callable[[], nn.Module]] = {
            "cnn": lambda: nn.Sequential(
                nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(64 * (((side - 4) // 2 - 4) // 2) ** 2, classes),
            ),
            "logistic": lambda: nn.Sequential(nn.Flatten(), nn.Linear(features, classes)),
            "mlp": lambda: nn.Sequential(
                nn.Flatten(), nn.Linear(features, 200), nn.ReLU(), nn.Linear(200, classes)
            ),
            "cnn3": lambda: cnn3(classes),
            "cifar": lambda: cifar(classes),
        }  # fmt: skip
        module = networks[self.settings["model"]]()
        nn.utils.vector_to_parameters(self.initial, module.parameters())
        return module

    @torch.no_grad()
    def loss(self, models: Callable[[int], nn.Module], device: str = "cpu") -> float:
        """The mean over the clients that took part (the first ``scored`` of them) of the training loss of their models,
        computed on a device."""
        seen = torch.unique(torch.cat(self.cohorts)).tolist()[: self.settings.get("scored")]
        total = 0.0
        for client in seen:
            rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
            x, y, module = (
                self.x[rows].to(device),
                self.y[rows].to(device),
                models(client).to(device),
            )
            total += float(nn.functional.cross_entropy(module(x), y))
        return total / len(seen)


@dataclass
class Clock:
    """Seconds of every round: on the wall, and of all of the process's threads.

    Attributes:
        wall, cpu: of the rounds so far.
        gpu_mib: the most memory of a GPU that PyTorch's tensors had; None on a CPU.
        processor: seconds that all threads have computed so far; of this process, for a contender that has only one.
    """

    wall: list[float]
    cpu: list[float]
    device: str = "cpu"
    processor: Callable[[], float] = time.process_time
    gpu_mib: int | None = None
    _began: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def new(cls, device: str = "cpu", processor: Callable[[], float] = time.process_time) -> Clock:
        return cls([], [], device, processor)

    def start(self) -> None:
        self.wait()
        cpu = self.processor()  # waits for all processes of a contender
        self._began = time.perf_counter(), cpu

    def wait(self) -> None:
        """Wait for what is queued on a GPU."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def stop(self) -> None:
        self.wait()
        now = time.perf_counter(), self.processor()
        self.wall.append(now[0] - self._began[0])
        self.cpu.append(now[1] - self._began[1])
        if self.device != "cpu":
            self.gpu_mib = round(torch.cuda.max_memory_allocated() / (1 << 20))


def arguments(description: str | None) -> argparse.Namespace:
    """Parse what every contender is given, and set the number of threads of PyTorch's operations."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the work")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch's operations")
    parser.add_argument("--root", help="of the data, for a contender that reads them itself")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, help="of the work's; none takes all of them")
    parser.add_argument("--execution", help="fedmtl's, as JSON, in place of the work's")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return given


def report(
    work: Work, clock: Clock, name: str, version: str, threads: int, loss: float, **more: Any
) -> None:
    """Print the line of a contender, and what more it has to say."""
    batch = int(work.settings["batch"])
    counts = [work.offsets.diff()[cohort] for cohort in work.cohorts[WARM_UP:]]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1 << (20 if sys.platform == "darwin" else 10)
    )
    line = {
        "contender": name,
        "version": version,
        "torch": torch.__version__,
        "threads": threads,
        "method": work.settings["method"],
        "model": work.settings["model"],
        "wall": clock.wall[WARM_UP:],
        "cpu": clock.cpu[WARM_UP:],
        "peak_mib": round(peak),
        "rounds": len(counts),
        "examples": sum(int(c.sum()) for c in counts),
        "steps": sum(int((-(-c // batch)).sum()) for c in counts),
        "loss": loss,
        "device": clock.device,
        "gpu_mib": clock.gpu_mib,
        **more,
    }
    print(json.dumps(line))
