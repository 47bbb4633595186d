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
    from .audit.canaries import RecordCanaries
    from .rounds import Rounds


class LocalSteps:
    """The local steps of one round.

    Step t of training j has the number ``j * stride + t``, so that steps which clients make at the same
    time have one number; the stride is the length of the longest training. In a client's own participation it is step
    ``j * length + t`` with its own length, which addresses its noise and its subset of records, so that neither depends
    on who else takes part.

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
        member = torch.zeros(len(plan.ids), dtype=torch.bool)
        member[clients] = True
        length = torch.from_numpy(plan.local_steps // plan.trainings)
        self._length = torch.where(member, length, 0)
        self._done = torch.zeros(len(member), dtype=torch.int64)
        self._lock = threading.Lock()
        self.stride = max(1, int(length.max()) if len(length) else 1)

    def steps(self, clients: Tensor) -> Tensor:
        """Return local steps of one training in this round: int64 (k,) clients -> int64 (k,); 0 for clients that do not
        take part."""
        return self._length[clients]

    def own_numbers(self, clients: Tensor, step: int) -> Tensor:
        """Return int64 (A,): the number of a local step in the participation of each of ``clients``."""
        training, place = divmod(step, self.stride)
        return training * self._length[clients] + place

    def addresses(self, clients: Tensor, own: Tensor) -> Tensor:
        """Return int64 (A,): local steps ``own`` of this round in the streams of ``clients``."""
        return self._round * torch.from_numpy(self.plan.local_steps)[clients] + own

    def step_numbers(self, client: int) -> list[int]:
        """Return the numbers of all local steps of one participation of ``client``."""
        own = range(int(self.plan.local_steps[client]) // self.plan.trainings)
        return [training * self.stride + step for training in range(self.plan.trainings) for step in own]

    def begin_training(self, clients: Tensor) -> int:
        """Return the number of the first local step of the next training of ``clients``, int64 (k,).

        Raises:
            PrivacyError: all trainings that were charged have been made, or the clients are not at the same training.
        """
        length = self.steps(clients)
        length, done = length[length > 0], self._done[clients[length > 0]]
        training = torch.unique(done // length).tolist()
        if not training:
            return 0
        if len(training) > 1 or bool((done % length != 0).any()):
            raise PrivacyError(
                f"Round {self._round}: clients that train at the same time must be at the same local training."
            )
        if training[0] >= self.plan.trainings:
            raise PrivacyError(
                f"Round {self._round}: local training number {training[0] + 1} of one participation, but the algorithm "
                f"declares {self.plan.trainings}, and no more are charged. Set ReleasePlan(trainings=...)."
            )
        return training[0] * self.stride

    def batch(self, clients: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the records of one local step, drawn anew for each client; see
        :meth:`~fedmtl.privacy.sums.RecordDraws.batch`."""
        own = self.own_numbers(clients, step)
        positions, drawn = self._draws.batch(clients, self.addresses(clients, own))
        canaries = self._channel.record_canaries
        return positions, drawn if canaries is None else canaries.without(clients, positions, drawn)

    def release(self, clients: Tensor, step: int, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Return ``(sum_j clip(g_j) + noise) / (q_i n_i)`` for every client: a public value.

        Args:
            clients: int64 (A,), each with a local step that is charged and not yet made.
            step: number of the local step in this round; a client makes its steps in order.
            chunks: pairs of gradients of single records (N, D), any float dtype and device, and the place of each
                record's client among ``clients``, int64 (N,).

        Returns:
            (A, D) float64 on the device of the gradients.

        Raises:
            PrivacyError: as for :meth:`make`, or another round has begun.
        """
        channel, round = self._channel, self._round
        if channel.local is not self:
            raise PrivacyError(f"Round {round} is over; its local steps cannot be made any more.")
        steps = self.make(clients, step)
        names = [f"{GRADIENT}/{self.plan.ids[k]}/{t}" for k, t in zip(clients.tolist(), steps.tolist(), strict=True)]
        forced = [value for name in names if (value := channel.replayed(round, name)) is not None]
        value = torch.stack(forced) if forced else None
        if value is None or channel.tap is not None:
            sums, canaries = self._sums.of_chunks(chunks, clients), channel.record_canaries
            if channel.tap is not None:
                channel.tap(round, f"{GRADIENT}/{step}", clients, sums)
            if canaries is not None:
                value = self._with_canaries(canaries, sums, clients, steps)
            value = self._noised(sums, clients, steps) if value is None else value
        if channel.record is not None:
            with self._lock:
                for name, row in zip(names, value.cpu(), strict=True):
                    channel.record.append((round, name, row.clone()))
        return value

    def _with_canaries(self, canaries: RecordCanaries, sums: Tensor, clients: Tensor, steps: Tensor) -> Tensor:
        """Return noised means as :meth:`_noised`, of records and of the canaries that were drawn and are in."""
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
            self.addresses(clients, steps),
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

    def make(self, clients: Tensor, step: int) -> Tensor:
        """Note that ``clients``, int64 (A,), make local step ``step``; return its number in each one's participation,
        int64 (A,).

        Raises:
            PrivacyError: a client that is named twice, has no such step, or has made it already.
        """
        training, place = divmod(step, self.stride)
        length = self.steps(clients)
        if torch.unique(clients).numel() != clients.numel():
            raise PrivacyError(
                f"Local step {step} of round {self._round}: a client is named twice, but each makes the step once. "
                f"Train every model of a client in a call of its own, and set ReleasePlan(trainings=...)."
            )
        if training >= self.plan.trainings or bool((place >= length).any()):
            raise PrivacyError(f"Local step {step} of round {self._round} is not charged for every client given.")
        with self._lock:
            if bool((self._done[clients] != training * length + place).any()):
                raise PrivacyError(f"Local step {step} of round {self._round} was made already, or out of order.")
            self._done[clients] += 1
        return self.own_numbers(clients, step)
