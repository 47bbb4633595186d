"""Local steps: DP-SGD of the clients of one round, each on its own records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from .._devices import on_device
from ..errors import PrivacyError
from .gradients import GradientPlan
from .noise.grid import GridValue, noised
from .receipt import LocalReceipt
from .records import GRADIENT, Records


class LocalSteps:
    """DP-SGD of the clients of one round (Abadi et al., CCS 2016, Algorithm 1), step by step.

    A local step releases the noised mean of the clipped gradients of a client's records::

        (sum_j clip(g_j) + noise) / (q_i n_i)

    A client pays each of its steps with the receipt of the round.

    Args:
        records: of the run.
        receipt: of the round.

    Attributes:
        plan: of the gradients.
        in_secure_sum: True if a secure sum of all clients has the noise.
        receipt: see above.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedmtl import FullParticipation, RecordPrivacy
        >>> from fedmtl.privacy import GradientPlan, open_channel
        >>> counts = {"counts": np.array([4, 4]), "steps": np.array([1, 1])}
        >>> plan = GradientPlan(ids=("ann", "bob"), dimension=3, **counts)
        >>> privacy = RecordPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-4)
        >>> channel = open_channel(privacy, [plan], FullParticipation().bind(2), seed=0)
        >>> channel.begin(0, channel.draw(0))
        >>> clients = torch.arange(2)
        >>> gradients = (torch.ones(8, 3), torch.arange(2).repeat_interleave(4))
        >>> channel.local.release(clients, [gradients]).shape
        torch.Size([2, 3])
    """

    def __init__(self, records: Records, receipt: LocalReceipt) -> None:
        self.plan = records.plan
        self.in_secure_sum = records.in_secure_sum
        self.receipt = receipt
        self._records = records
        self._made: dict[int, bytes] = {}  # digests of the sums on the grid, by client

    def steps(self, clients: Tensor) -> Tensor:
        """Returns the local steps of clients in one training of this round.

        Args:
            clients: int64 (k,), positions in the data.

        Returns:
            int64 (k,); 0 for clients that do not take part.
        """
        return self.receipt.charged[clients] // self.plan.trainings

    def numbers(self, clients: Tensor) -> Tensor:
        """Returns the number of the next local step of clients in their participation; see
        :meth:`LocalReceipt.next`.

        Args:
            clients: int64 (k,), positions in the data.

        Returns:
            int64 (k,), from 0.
        """
        return self.receipt.next(clients)

    def batch(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the records of the next local step of clients; see :meth:`Records.batch`.

        Args:
            clients: int64 (k,), positions in the data.
        """
        return self._records.batch(clients, self._addresses(clients, self.numbers(clients)))

    def release(self, clients: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Clips the gradients of the next local step of every client, adds up those of each, adds
        noise and divides.

        Args:
            clients: int64 (A,), each with a local step that is charged and not yet made.
            chunks: pairs of gradients of single records (N, D), any float dtype and device, and the
                place of each record's client among ``clients``, int64 (N,).

        Returns:
            The released means, (A, D) float64 on the device of the gradients.

        Raises:
            PrivacyError: as for :meth:`LocalReceipt.spend`; or the sums have no noise of their own,
                as a secure sum adds them up.
        """
        if self._records.in_secure_sum:
            raise PrivacyError(
                "The gradients of this run are added up in a secure sum, and have no noise "
                "before: take LocalSteps.grid_sums, and release them as rows of the round."
            )
        sums, numbers = self._charged_sums(clients, chunks)
        return self._noised(sums, clients, numbers)

    def noised_sums(self, clients: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Releases the noised sums of the gradients of the next local step of every client: the
        means of :meth:`release`, times the public numbers that divide them.

        Args:
            clients: see :meth:`release`.
            chunks: see :meth:`release`.

        Returns:
            (A, D) float64 on the device of the gradients.

        Raises:
            PrivacyError: as for :meth:`release`.
        """
        means = self.release(clients, chunks)
        return means * on_device(self._expected(clients), means.device)

    def grid_sums(self, clients: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Clips the gradients of the next local step of every client and adds up those of each, in
        whole cells of the grid of a secure sum, which has the noise. The sums are private.

        The local step pays for the draw of the records; the receipt of the round pays for the
        value that is released.

        Args:
            clients: see :meth:`release`.
            chunks: see :meth:`release`.

        Returns:
            (A, D) float64 on the device of the gradients.

        Raises:
            PrivacyError: as for :meth:`LocalReceipt.spend`; or no secure sum adds them up, so that
                nothing would noise them.
        """
        if not self._records.in_secure_sum:
            raise PrivacyError(
                "The gradients of this run are in no secure sum, and would be left without noise: "
                "take LocalSteps.release or noised_sums, or RecordPrivacy(aggregation=...)."
            )
        sums, _ = self._charged_sums(clients, chunks)
        self._made |= dict(zip(clients.tolist(), map(_digest, sums), strict=True))
        return sums

    def check_sums(self, rows: Tensor, clients: Tensor) -> None:
        """Refuses rows for a secure sum that :meth:`grid_sums` has not returned in this round.

        A record moves such a sum by the clip norm at most, and twice the sum by twice as much.

        Args:
            rows: (k, D).
            clients: int64 (k,), whose rows they are.

        Raises:
            PrivacyError: a row is another one.
        """
        for client, row in zip(clients.tolist(), rows, strict=True):
            if self._made.get(client) != _digest(row):
                raise PrivacyError(
                    "A secure sum of gradients takes the rows that ClientBatch.gradient_sums "
                    "returned in this round, unchanged, and got others: one record could move them "
                    "by more than the clip norm. Scale the released sum in server_update."
                )

    def _charged_sums(
        self, clients: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns the clipped sums (A, D) of the next local step of every client, and the numbers
        int64 (A,) of these steps, which are paid."""
        numbers = self.numbers(clients)
        sums = self._sums(chunks, clients, numbers)
        # Once there is noise, its address is used. Chunks that fail spend nothing.
        self.receipt.spend(clients, numbers)
        return sums, numbers

    def _expected(self, clients: Tensor) -> Tensor:
        """Returns the expected numbers of records of ``clients`` in a step, float64 (A, 1)."""
        return torch.from_numpy(self.plan.expected)[clients][:, None]

    def _sums(
        self, chunks: Iterable[tuple[Tensor, Tensor]], clients: Tensor, steps: Tensor
    ) -> Tensor:
        """Returns the clipped sums (A, D) of the gradients of ``clients`` in their ``steps``."""
        return self._records.of_chunks(chunks, clients)

    def _addresses(self, clients: Tensor, steps: Tensor) -> Tensor:
        """Returns int64 (A,): local steps ``steps`` of this round in the streams of ``clients``."""
        return self.receipt.step * torch.from_numpy(self.plan.local_steps)[clients] + steps

    def _noised(self, total: Tensor, clients: Tensor, steps: Tensor) -> Tensor:
        """Returns noised means of sums (A, D) of ``clients`` in their ``steps``."""
        expected = self._expected(clients)
        divisors = on_device(expected, total.device)
        if self._records.costs is None:
            return total / divisors
        addresses = self._addresses(clients, steps)
        scales = self._scale(clients)
        each = clients[:, None], addresses[:, None], scales[:, None]
        noise, widths = self._records.noise(*each, device=total.device)
        width = None
        if widths is not None:
            width = on_device(widths, total.device)
        value = noised(total, noise[:, 0], width) / divisors
        if widths is not None and len(clients):
            self._records.on_grid[GRADIENT] = GridValue(
                self.receipt.step, value[-1].cpu().clone(), float(widths[-1]), float(expected[-1])
            )
        return value

    def _scale(self, clients: Tensor) -> Tensor:
        """Returns the scale of the noise on the sums of ``clients``, float64 (A,)."""
        return torch.from_numpy(
            self._records.scales(
                clients[None].numpy(), np.zeros((1, len(clients)), dtype=np.int64)
            )[0]
        )


def _digest(row: Tensor) -> bytes:
    """Returns a digest of a row (D,) in float64."""
    values = row.detach().cpu().double().contiguous()
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).digest()


def local_receipt(plan: GradientPlan, step: int, clients: Tensor) -> LocalReceipt:
    """Returns the receipt of the local steps of a round.

    Args:
        plan: of the gradients.
        step: number of the round.
        clients: int64 (k,), the cohort that is charged.
    """
    charged = torch.zeros(len(plan.ids), dtype=torch.int64)
    charged[clients] = torch.from_numpy(plan.local_steps)[clients]
    return LocalReceipt(step, charged, plan.trainings)
