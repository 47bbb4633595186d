"""The local steps of DP-SGD that a round has charged: who may make them, on which records, and how each is released.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016. A client with n_i public records draws a Poisson
subset of rate q_i = B / n_i for every local step (all records, where B is at least n_i or not given), and releases
(sum_j clip(g_j) + noise) / (q_i n_i). What it computes from released gradients, its models and what it sends, is
post-processing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import PrivacyError
from .channel import GRADIENT
from .noise.grid import GridValue, client_noise, noised
from .noise.registry import LAWS

if TYPE_CHECKING:
    from .rounds import Rounds


class LocalSteps:
    """The local steps of one round, which every client makes in order.

    The number of a step in its client's own participation addresses its noise and its subset of records, so that
    neither depends on who else takes part.

    Args:
        channel: of the run.
        round: number of the round, whose charges are in the ledger.
        clients: int64 (k,), who takes part.
    """

    def __init__(self, channel: Rounds, round: int, clients: Tensor) -> None:
        plan, draws, sums = channel.gradients, channel.draws, channel.sums
        if plan is None or draws is None or sums is None:
            raise PrivacyError("The channel was opened without a plan of local steps.")
        self._channel, self.plan, self._draws, self._sums, self._round = channel, plan, draws, sums, round
        self._charged, self._made = torch.zeros(2, len(plan.ids), dtype=torch.int64)
        self._charged[clients] = torch.from_numpy(plan.local_steps)[clients]
        self._lock = threading.Lock()

    def steps(self, clients: Tensor) -> Tensor:
        """Return local steps of one training in this round: int64 (k,) clients -> int64 (k,); 0 for clients that do not
        take part."""
        return self._charged[clients] // self.plan.trainings

    def numbers(self, clients: Tensor) -> Tensor:
        """Return int64 (k,): the number of the next local step in the participation of each of ``clients``.

        Raises:
            PrivacyError: a client that is named twice, or has made all the steps that are charged.
        """
        made = self._made[clients]
        if torch.unique(clients).numel() != clients.numel():
            raise PrivacyError(
                f"A local step of round {self._round}: a client is named twice, but each makes the step once. "
                f"Train every model of a client in a call of its own, and set ReleasePlan(trainings=...)."
            )
        if bool((made >= self._charged[clients]).any()):
            raise PrivacyError(
                f"Round {self._round}: a local step is not charged. Its client is not in the round, or has made the "
                f"steps of all local trainings that the algorithm declares: ReleasePlan(trainings="
                f"{self.plan.trainings})."
            )
        return made

    def make(self, clients: Tensor) -> None:
        """Note that ``clients``, int64 (A,), make their next local step: once there is noise, its address is used.

        Raises:
            PrivacyError: as for :meth:`numbers`.
        """
        with self._lock:
            self._made[clients] = self.numbers(clients) + 1

    def batch(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records of the next local step of each of ``clients``; see
        :meth:`~fedmtl.privacy.sums.RecordDraws.batch`."""
        positions, drawn = self._draws.batch(clients, self._addresses(clients, self.numbers(clients)))
        canaries = self._channel.record_canaries
        return positions, drawn if canaries is None else canaries.without(clients, positions, drawn)

    def release(self, clients: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Return ``(sum_j clip(g_j) + noise) / (q_i n_i)`` in the next local step of every client: a public value.

        Args:
            clients: int64 (A,), each with a local step that is charged and not yet made.
            chunks: pairs of gradients of single records (N, D), any float dtype and device, and the place of each
                record's client among ``clients``, int64 (N,).

        Returns:
            (A, D) float64 on the device of the gradients.

        Raises:
            PrivacyError: as for :meth:`numbers`, or another round has begun.
        """
        channel, round = self._channel, self._round
        if channel.local is not self:
            raise PrivacyError(f"Round {round} is over; its local steps cannot be made any more.")
        steps = self.numbers(clients)
        names = [f"{GRADIENT}/{self.plan.ids[k]}/{t}" for k, t in zip(clients.tolist(), steps.tolist(), strict=True)]
        forced = [value for name in names if (value := channel.replayed(round, name)) is not None]
        sums = None if forced and channel.tap is None else self._sums.of_chunks(chunks, clients)
        if channel.tap is not None and sums is not None:
            for client, step, row in zip(clients.split(1), steps.tolist(), sums.split(1), strict=True):
                channel.tap(round, f"{GRADIENT}/{step}", client, row)
        self.make(clients)
        value = torch.stack(forced) if forced else self._value(sums, clients, steps)
        if channel.record is not None:
            with self._lock:
                for name, row in zip(names, value.cpu(), strict=True):
                    channel.record.append((round, name, row.clone()))
        return value

    def _addresses(self, clients: Tensor, steps: Tensor) -> Tensor:
        """Return int64 (A,): local steps ``steps`` of this round in the streams of ``clients``."""
        return self._round * torch.from_numpy(self.plan.local_steps)[clients] + steps

    def _value(self, sums: Tensor | None, clients: Tensor, steps: Tensor) -> Tensor:
        """Return noised means of sums (A, D) of ``clients`` in their ``steps``: of records, and of the canaries that
        were drawn and are in."""
        assert sums is not None
        canaries = self._channel.record_canaries
        if canaries is None:
            return self._noised(sums, clients, steps)
        rows, owners = (part.to(sums.device) for part in canaries.gradients(clients))
        value = self._noised(sums + self._sums.of_chunks([(rows, owners)], clients), clients, steps)
        expected = torch.from_numpy(self.plan.expected)[clients].to(sums.device)
        canaries.observe(clients, value * expected[:, None] - sums, self._scale(clients))
        return value

    def _noised(self, total: Tensor, clients: Tensor, steps: Tensor) -> Tensor:
        """Return noised means of sums (A, D) of ``clients`` in their ``steps``."""
        channel, plan = self._channel, self.plan
        expected = torch.from_numpy(plan.expected)[clients]
        if channel.prices is None:
            return total / expected[:, None].to(total.device)
        noise, width = client_noise(
            LAWS[str(channel.mechanism)](1.0),
            channel.source,
            "noise/gradient",
            self._addresses(clients, steps),
            plan.addresses[clients],
            total.shape[1],
            sensitivity=self._scale(clients),
            bound=channel.bound,
        )
        total = noised(total, noise.to(total.device), None if width is None else width.to(total.device)[:, None])
        value = total / expected[:, None].to(total.device)
        if width is not None and len(clients):
            last = GridValue(self._round, value[-1].cpu(), float(width[-1]), float(expected[-1]))
            with self._lock:
                channel.on_grid[GRADIENT] = last
        return value

    def _scale(self, clients: Tensor) -> Tensor:
        """Return the scale of the noise on the sums of ``clients``, float64 (A,)."""
        assert self._channel.prices is not None
        multipliers = torch.from_numpy(self._channel.prices.by_account[0])
        return multipliers[clients] * self._channel.bound  # neighbours leave a record out
