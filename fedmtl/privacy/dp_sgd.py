"""Local steps: DP-SGD of the clients of one round, each on its own records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError
from .noise.grid import GridValue, noised
from .records import GRADIENT

if TYPE_CHECKING:
    from .rounds import Rounds


class LocalSteps:
    """The local steps of one round, which every client makes in order.

    The number of a step in its client's own participation addresses its noise and its subset of
    records, so that neither depends on who else takes part.

    Args:
        channel: of the run.
        round: number of the round, whose charges are in the ledger.
        clients: int64 (k,), who takes part.
    """

    def __init__(self, channel: Rounds, round: int, clients: Tensor) -> None:
        if channel.records is None:
            raise PrivacyError("The channel was opened without a plan of local steps.")
        self._channel = channel
        self._records = channel.records
        self._round = round
        self.plan = channel.records.plan
        # Counts of local steps by client: charged by the round, and made so far.
        self._charged, self._made = torch.zeros(2, len(self.plan.ids), dtype=torch.int64)
        self._charged[clients] = torch.from_numpy(self.plan.local_steps)[clients]

    def steps(self, clients: Tensor) -> Tensor:
        """Return local steps of one training in this round: int64 (k,) clients -> int64 (k,); 0 for
        clients that do not take part."""
        return self._charged[clients] // self.plan.trainings

    def numbers(self, clients: Tensor) -> Tensor:
        """Return int64 (k,): the number of the next local step in the participation of each of
        ``clients``.

        Raises:
            PrivacyError: a client that is named twice, or has made all the steps that are charged.
        """
        made = self._made[clients]
        # Two gradients at one address would share the noise, and their difference would show it.
        if torch.unique(clients).numel() != clients.numel():
            raise PrivacyError(
                f"A local step of round {self._round}: a client is named twice, but each makes the "
                "step once. Train every model of a client in a call of its own, and set "
                "ReleasePlan(trainings=...)."
            )
        if bool((made >= self._charged[clients]).any()):
            raise PrivacyError(
                f"Round {self._round}: a local step is not charged. Its client is not in the "
                "round, or has made the steps of all local trainings that the algorithm declares: "
                f"ReleasePlan(trainings={self.plan.trainings})."
            )
        return made

    def make(self, clients: Tensor) -> None:
        """Note that ``clients``, int64 (A,), make their next local step: once there is noise, its
        address is used.

        Raises:
            PrivacyError: as for :meth:`numbers`.
        """
        self._made[clients] = self.numbers(clients) + 1

    def batch(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records of the next local step of each of ``clients``; see
        :meth:`Records.batch`."""
        return self._records.batch(clients, self._addresses(clients, self.numbers(clients)))

    def release(self, clients: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Return ``(sum_j clip(g_j) + noise) / (q_i n_i)`` in the next local step of every client:
        a public value.

        Args:
            clients: int64 (A,), each with a local step that is charged and not yet made.
            chunks: pairs of gradients of single records (N, D), any float dtype and device, and the
                place of each record's client among ``clients``, int64 (N,).

        Returns:
            (A, D) float64 on the device of the gradients.

        Raises:
            PrivacyError: as for :meth:`numbers`, or another round has begun.
        """
        if self._channel.local is not self:
            raise PrivacyError(
                f"Round {self._round} is over; its local steps cannot be made any more."
            )
        steps = self.numbers(clients)
        sums = self._sums(chunks, clients, steps)
        self.make(clients)
        return self._noised(sums, clients, steps)

    def _sums(
        self, chunks: Iterable[tuple[Tensor, Tensor]], clients: Tensor, steps: Tensor
    ) -> Tensor:
        """Returns the clipped sums (A, D) of the gradients of ``clients`` in their ``steps``."""
        return self._records.of_chunks(chunks, clients)

    def _addresses(self, clients: Tensor, steps: Tensor) -> Tensor:
        """Return int64 (A,): local steps ``steps`` of this round in the streams of ``clients``."""
        return self._round * torch.from_numpy(self.plan.local_steps)[clients] + steps

    def _noised(self, total: Tensor, clients: Tensor, steps: Tensor) -> Tensor:
        """Return noised means of sums (A, D) of ``clients`` in their ``steps``."""
        channel = self._channel
        expected = torch.from_numpy(self.plan.expected)[clients]
        width = None
        if channel.noised:
            addresses = self._addresses(clients, steps)
            scales = self._scale(clients)
            noise, widths = self._records.noise(
                clients[:, None], addresses[:, None], scales[:, None]
            )
            width = None
            if widths is not None:
                width = widths.to(total.device)
            total = noised(total, noise[:, 0].to(total.device), width)
        value = total / expected[:, None].to(total.device)
        if width is not None and len(clients):
            channel.on_grid[GRADIENT] = GridValue(
                self._round, value[-1].cpu(), float(width[-1]), float(expected[-1])
            )
        return value

    def _scale(self, clients: Tensor) -> Tensor:
        """Return the scale of the noise on the sums of ``clients``, float64 (A,)."""
        return torch.from_numpy(
            self._records.scales(
                clients[None].numpy(), np.zeros((1, len(clients)), dtype=np.int64)
            )[0]
        )
