"""Record-level releases: every gradient of an owner's local training is clipped by record, summed and noised.

The protected unit is one record of one owner (a client, here also called a silo). The observers are the server, the
other owners and the public. Whatever an owner computes from the released gradients, its models and what it sends, is
post-processing.

An owner with n_k public records draws a Poisson subset of rate q_k = B / n_k for every local step (all records, where B
is at least n_k or not given), and its released gradient is (sum_i clip(g_i) + noise) / (q_k n_k): DP-SGD (Abadi et al.,
"Deep Learning with Differential Privacy", CCS 2016) with a public denominator. The participation of owners is public
and amplifies nothing; one use of an owner's account is one participation with all its local steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError
from .clip import L1Clip, L2Clip, clipped_segment_sums
from .noise.grid import GridValue, privatize
from .noise.laws import NoiseLaw
from .noise.sources import NoiseSource
from .tap import Tap

Recording = Sequence[tuple[int, str, Tensor]]


@dataclass(frozen=True)
class Owners:
    """Public facts about the owners of the records.

    Attributes:
        ids: (n) client ids.
        keys: int64 (n,), address of each owner's random numbers.
        counts: int64 (n,), public number of records, each at least 1.
        ranks: int64 (n,), rank of each owner in the sampler.
        steps: int64 (n,), local steps of one participation, those of all its trainings together.
        batch_size: expected records of one local step; None takes all.
        dimension: D, length of a gradient.
        trainings: local trainings of one participation, each with the same number of local steps.
    """

    ids: tuple[str, ...]
    keys: Tensor
    counts: Tensor
    ranks: Tensor
    steps: Tensor
    batch_size: int | None
    dimension: int
    trainings: int = 1

    def __post_init__(self) -> None:
        if self.trainings < 1 or bool((self.steps % self.trainings != 0).any()):
            raise PrivacyError(f"{self.trainings} trainings cannot share the local steps of a participation equally.")

    @property
    def training_steps(self) -> Tensor:
        """(n,) int64: local steps of one training."""
        return self.steps // self.trainings

    @property
    def stride(self) -> int:
        """Distance between the numbers of the first local steps of two trainings: the longest training's length."""
        return max(1, int(self.training_steps.max()) if len(self.steps) else 1)

    def step_numbers(self, client: int) -> list[int]:
        """Numbers of all local steps of one participation of ``client``: step t of training j is number
        j * stride + t, so that the steps which clients make together have one number."""
        own = range(int(self.training_steps[client]))
        return [training * self.stride + step for training in range(self.trainings) for step in own]

    @property
    def probabilities(self) -> Tensor:
        """(n,) float64: q_k, the probability that a record is part of a local step."""
        if self.batch_size is None:
            return torch.ones(len(self.counts), dtype=torch.float64)
        return torch.clamp(self.batch_size / self.counts.double(), max=1.0)

    def by_rank(self, values: Tensor) -> Tensor:
        """``values`` (n,) of the owners in the order of their ranks."""
        out = torch.empty_like(values)
        out[self.ranks] = values
        return out

    def describe(self) -> str:
        """One phrase for the report."""
        if self.batch_size is None:
            return "all records of an owner in every local step"
        q = self.probabilities
        return (
            f"Poisson over records, expected batch {self.batch_size} "
            f"(q = {float(q.min()):.4g} to {float(q.max()):.4g} by owner)"
        )


class RecordReleases:
    """The gradients that leave the records of a cohort of owners, step by local step.

    Args:
        owners: the owners.
        clip: bound C on the gradient of one record, or None for no privacy.
        noise: law of the noise, or None for clipping only; its multiplier is not used.
        multipliers: (n,) float64, noise scale over sensitivity of each owner.
        source: of subsets and noise.
        replay: values to return instead of those computed, as recorded.
    """

    def __init__(
        self,
        owners: Owners,
        *,
        clip: L1Clip | L2Clip | None,
        noise: NoiseLaw | None,
        multipliers: Tensor | None,
        source: NoiseSource,
        replay: Recording | None = None,
    ) -> None:
        self.owners, self.clip, self.multipliers = owners, clip, multipliers
        self.noise = replace(noise, multiplier=1.0) if noise is not None else None
        self.record: list[tuple[int, str, Tensor]] | None = None
        self.on_grid: dict[str, GridValue] = {}  # in secure mode, the last gradient with its grid
        self.tap: Tap | None = None
        self._source = source
        self._replay = None if replay is None else {(step, name): value for step, name, value in replay}
        self._round = -1
        self._open = torch.zeros(len(owners.counts), dtype=torch.bool)
        self._done = torch.zeros(len(owners.counts), dtype=torch.int64)
        self._lock = threading.Lock()

    def open(self, round: int, ranks: Tensor) -> None:
        """Begin a round whose charges are in the ledger: the owners at ``ranks`` may make their local steps."""
        self._round = round
        member = torch.zeros(len(self.owners.counts), dtype=torch.bool)
        member[ranks] = True
        self._open = member[self.owners.ranks]
        self._done.zero_()

    def steps(self, clients: Tensor) -> Tensor:
        """Local steps of one training in this round: int64 (k,) clients -> int64 (k,); 0 for owners that do not take
        part."""
        return torch.where(self._open[clients], self.owners.training_steps[clients], 0)

    def begin_training(self, clients: Tensor) -> int:
        """The number of the first local step of the next training of ``clients``, int64 (k,).

        Raises:
            PrivacyError: all trainings that were charged have been made, or the clients are not at the same training.
        """
        length = self.steps(clients)
        length, done = length[length > 0], self._done[clients[length > 0]]
        training = torch.unique(done // length).tolist()
        if not training:
            return 0
        if len(training) > 1 or bool((done % length != 0).any()):
            raise PrivacyError(f"Round {self._round}: clients that train together must be at the same local training.")
        if training[0] >= self.owners.trainings:
            raise PrivacyError(
                f"Round {self._round}: local training number {training[0] + 1} of one participation, but the algorithm "
                f"declares {self.owners.trainings}, and no more are charged. Set ReleasePlan(trainings=...)."
            )
        return training[0] * self.owners.stride

    def batch(self, clients: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The records of one local step, drawn anew for each owner.

        Args:
            clients: int64 (A,).
            step: number of the local step in this round (see :meth:`Owners.step_numbers`).

        Returns:
            Positions within each owner's own records, int64 (A, B), padded with 0, and which of them are drawn, bool
            (A, B); B is the largest subset, at least 1.
        """
        counts = self.owners.counts[clients]
        widest = int(counts.max()) if len(clients) else 1
        position = torch.arange(widest)
        inside = position < counts[:, None]
        if self.owners.batch_size is None or widest <= self.owners.batch_size:
            return torch.where(inside, position, 0), inside
        keys = self.owners.keys[clients]
        _, tail = self._source.tails(f"records/{step}", self._round, widest, keys)  # uniform on (0, 1/2)
        drawn = inside & (torch.from_numpy(2.0 * tail) < self.owners.probabilities[clients][:, None])
        size = max(1, int(drawn.sum(1).max()))
        order = torch.argsort((~drawn).to(torch.uint8), dim=1, stable=True)[:, :size]
        mask = torch.gather(drawn, 1, order)
        return torch.where(mask, order, 0), mask

    def release(self, clients: Tensor, step: int, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """``(sum_i clip(g_i) + noise) / (q_k n_k)`` for every owner: a public value.

        Args:
            clients: int64 (A,), each with a local step paid for and not yet made.
            step: number of the local step in this round; an owner makes its steps in order.
            chunks: pairs of per-record gradients (N, D), any float dtype and device, and the position of each one's
                owner in ``clients``, int64 (N,).

        Returns:
            (A, D) float64 on the device of the gradients.

        Raises:
            PrivacyError: an owner that has no such step, or has made it already.
        """
        self._spend(clients, step)
        sums = self._sums(clients, chunks) if self._replay is None or self.tap is not None else None
        if self.tap is not None and sums is not None:
            self.tap(self._round, f"gradient/{step}", clients, sums)
        if self._replay is not None:
            names = [(self._round, self._name(int(client), step)) for client in clients]
            missing = [name for name in names if name not in self._replay]
            if missing:
                raise PrivacyError(f"The recording has no gradient {missing[0][1]!r} of round {missing[0][0]}.")
            value = torch.stack([self._replay[name] for name in names])
        else:
            assert sums is not None
            value = self._noised_means(clients, step, sums)
        if self.record is not None:
            with self._lock:
                for client, row in zip(clients.tolist(), value.cpu(), strict=True):
                    self.record.append((self._round, self._name(client, step), row.clone()))
        return value

    def _sums(self, clients: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        total: Tensor | None = None
        for rows, owner in chunks:
            part = clipped_segment_sums(rows, owner, len(clients), self.clip)
            total = part if total is None else total.add_(part)
        if total is None:
            raise PrivacyError("No gradients were given to the release; a step without records gives an empty chunk.")
        return total

    def _noised_means(self, clients: Tensor, step: int, total: Tensor) -> Tensor:
        width: float | None = None
        if self.noise is not None and self.clip is not None and self.multipliers is not None:
            scale = (self.multipliers[clients] * self.clip.bound)[:, None]
            size = total.shape[1]
            noise = torch.as_tensor(
                self.noise.draw_rows(
                    self._source, f"noise/gradient/{step}", self._round, self.owners.keys[clients], size
                )
            )
            noise = (noise * scale).to(total.device)
            least = float(scale.min()) if len(clients) else 1.0
            total, width = privatize(
                total, noise, self._source, bound=self.clip.bound, norm=self.clip.norm, scale=least
            )
        expected = self.owners.probabilities[clients] * self.owners.counts[clients]
        value = total / expected[:, None].to(total.device)
        if width is not None and len(clients):
            last = GridValue(self._round, value[-1].cpu(), width, float(expected[-1]))
            with self._lock:
                self.on_grid["gradient"] = last
        return value

    def _spend(self, clients: Tensor, step: int) -> None:
        training, own = divmod(step, self.owners.stride)
        length = self.steps(clients)
        if training >= self.owners.trainings or bool((own >= length).any()):
            raise PrivacyError(f"Local step {step} of round {self._round} is not reserved for every owner given.")
        if bool((self._done[clients] != training * length + own).any()):
            raise PrivacyError(f"Local step {step} of round {self._round} was made already, or out of order.")
        self._done[clients] += 1

    def _name(self, client: int, step: int) -> str:
        return f"gradient/{self.owners.ids[client]}/{step}"

    def noise_ratio(self) -> float:
        """Expected norm of the noise on a released gradient over C, of the median owner."""
        if self.noise is None or self.multipliers is None:
            return 0.0
        expected = self.owners.probabilities * self.owners.counts
        std = self.noise.std(1.0, self.owners.dimension) * self.multipliers / expected
        return float(np.median(std.numpy())) * math.sqrt(self.owners.dimension)
