"""Receipts: proofs that releases are charged, each of which pays for its releases once.

A ledger is charged by the round, or by the block of activations. The receipt of a charge covers
certain releases: :class:`Receipt` the sums over the rows of a round's cohort, :class:`LocalReceipt`
the local steps of its clients, :class:`BlockReceipt` the activations of a block. A mechanism spends
its receipt before a value has noise. A caller can forge a receipt, as any object of Python:
receipts guard against mistakes, and the audit against a broken channel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError


class Receipt:
    """The charge of one round, as a value.

    :meth:`RoundChannel.begin <fedmtl.privacy.RoundChannel.begin>` makes one once the ledger has the
    charge, and a :class:`~fedmtl.privacy.mechanism.Mechanism` spends it before it adds anything up.

    Args:
        step: number of the round; it addresses the noise.
        use: number of rounds charged before, from 0, if everybody is charged for each round.
        clients: int64 (k,), the cohort that is charged.

    Example:
        >>> import torch
        >>> from fedmtl.errors import PrivacyError
        >>> from fedmtl.privacy import Receipt
        >>> receipt = Receipt(step=0, use=0, clients=torch.tensor([1, 4]))
        >>> receipt.spend("update", torch.tensor([1, 4]))
        >>> try:
        ...     receipt.spend("update", torch.tensor([1, 4]))
        ... except PrivacyError as error:
        ...     print(error)
        Release 'update' happened already in step 0; once is the rule.
    """

    def __init__(self, step: int, use: int, clients: Tensor) -> None:
        self.step = step
        self.use = use
        self.clients = clients
        self._spent: dict[str, Tensor] = {}

    def spend(self, name: str, clients: Tensor) -> None:
        """Pays for one release.

        Args:
            name: of the release, once a round.
            clients: int64 (k,), of whom there are rows: each in the cohort, and each once.

        Raises:
            PrivacyError: the release happened already, or there are rows of clients that were not
                drawn, or two of one client; or positions of another dtype.
        """
        senders = clients.cpu().reshape(-1)
        if senders.dtype != torch.int64:
            raise PrivacyError(
                f"Release {name!r} takes the positions of clients as int64, not {senders.dtype}."
            )
        if name in self._spent:
            raise PrivacyError(
                f"Release {name!r} happened already in step {self.step}; once is the rule."
            )
        if torch.unique(senders).numel() != senders.numel():
            raise PrivacyError(
                f"Release {name!r} needs one row from each client, and each client once."
            )
        strangers = senders[~torch.isin(senders, self.clients)]
        if len(strangers):
            raise PrivacyError(
                f"Release {name!r} got a row of client {int(strangers[0])}, who was not drawn for "
                f"step {self.step}; the accounting holds for the cohort that was drawn."
            )
        self._spent[name] = senders

    def charged_step(self, name: str) -> int:
        """Returns the number of the round for a release that this receipt has been spent on; it
        addresses the noise.

        Args:
            name: of the release.

        Raises:
            PrivacyError: the receipt has not been spent on it.
        """
        # Wrappers of a mechanism add its noise to sums of several processes, after they have paid.
        if name not in self._spent:
            raise PrivacyError(
                f"Release {name!r} of step {self.step} is not paid for: noise is added to what a "
                "receipt has been spent on; call the mechanism with the rows and the receipt."
            )
        return self.step

    def senders(self, name: str) -> Tensor:
        """Returns the clients of whom there are rows in a release that this receipt has been spent
        on: int64 (k,).

        Args:
            name: of the release.

        Raises:
            PrivacyError: the receipt has not been spent on it.
        """
        self.charged_step(name)
        return self._spent[name]


class LocalReceipt:
    """The charge of the local steps of one round: each client pays its own, in their order.

    The number of a step in its client's own participation addresses its noise and its subset of
    records, so that neither depends on the other participants.

    Args:
        step: number of the round.
        charged: int64 (n,), the local steps that are charged to each client; 0 for clients that do
            not take part.
        trainings: local trainings of a client that these steps are divided over.

    Example:
        >>> import torch
        >>> from fedmtl.privacy import LocalReceipt
        >>> receipt = LocalReceipt(step=0, charged=torch.tensor([2, 0, 2]), trainings=1)
        >>> clients = torch.tensor([0, 2])
        >>> receipt.spend(clients, receipt.next(clients))
        >>> receipt.next(clients).tolist()  # each has one step left
        [1, 1]
    """

    def __init__(self, step: int, charged: Tensor, trainings: int) -> None:
        self.step = step
        self.charged = charged
        self.trainings = trainings
        self._spent = torch.zeros_like(charged)
        self._over = False

    def next(self, clients: Tensor) -> Tensor:
        """Returns the number of the next local step of each client.

        Args:
            clients: int64 (k,), positions in the data.

        Returns:
            int64 (k,), from 0.

        Raises:
            PrivacyError: the round is over, or a client is named twice, or has made all the steps
                that are charged; or a value is no position of a client.
        """
        if self._over:
            raise PrivacyError(
                f"Round {self.step} is over; its local steps cannot be made any more."
            )
        n = len(self.charged)
        # A negative position is a second name of a client, and a mask is none.
        named = clients.ndim == 1 and clients.dtype == torch.int64
        if not named or bool(((clients < 0) | (clients >= n)).any()):
            raise PrivacyError(
                f"A local step of round {self.step} takes positions of clients, int64 (k,) from 0 "
                f"to {n - 1}, not {tuple(clients.shape)} {clients.dtype} with {clients.tolist()}."
            )
        numbers = self._spent[clients]
        # Two gradients at one address would share the noise, and their difference would show it.
        if torch.unique(clients).numel() != clients.numel():
            raise PrivacyError(
                f"A local step of round {self.step}: a client is named twice, but each makes the "
                "step once. Train every model of a client in a call of its own, and set "
                "ReleasePlan(trainings=...)."
            )
        if bool((numbers >= self.charged[clients]).any()):
            raise PrivacyError(
                f"Round {self.step}: a local step is not charged. Its client is not in the "
                "round, or has made the steps of all local trainings that the algorithm declares: "
                f"ReleasePlan(trainings={self.trainings})."
            )
        return numbers

    def spend(self, clients: Tensor, steps: Tensor) -> None:
        """Pays for one local step of each of ``clients``.

        Args:
            clients: int64 (k,).
            steps: int64 (k,), the numbers that :meth:`next` returned.

        Raises:
            PrivacyError: as for :meth:`next`, or a step was paid for in the meantime.
        """
        if not torch.equal(self.next(clients), steps):
            raise PrivacyError(
                f"A local step of round {self.step} was released while its gradients were added "
                "up; its noise would be used twice."
            )
        self._spent[clients] = steps + 1

    def end(self) -> None:
        """Ends the round: the rest of the receipt pays for nothing."""
        self._over = True


class BlockReceipt:
    """The charge of a block of activations, which pays for each of them once, in order.

    Args:
        first: number of the first activation.
        clients: int64 (S, R), the clients that release something in each of S activations of R
            replicates; -1 is no client.
        uses: int64 (S, R), the activations of that client before.

    Attributes:
        first, clients, uses: see above.
        spent: number of activations that are paid for.

    Example:
        >>> import numpy as np
        >>> from fedmtl.privacy import BlockReceipt
        >>> receipt = BlockReceipt(0, clients=np.array([[1], [0]]), uses=np.array([[0], [0]]))
        >>> receipt.spend(receipt.next())
        >>> receipt.left
        1
    """

    def __init__(self, first: int, clients: np.ndarray, uses: np.ndarray) -> None:
        self.first = first
        self.clients = clients
        self.uses = uses
        self.spent = 0

    @property
    def left(self) -> int:
        """Returns the number of activations that are charged and not released."""
        return len(self.clients) - self.spent

    def next(self) -> int:
        """Returns the place in the block of the next activation.

        Raises:
            PrivacyError: none is left.
        """
        if self.spent >= len(self.clients):
            raise PrivacyError(
                "No activation has begun that was not released, so nothing is "
                "charged for another one."
            )
        return self.spent

    def spend(self, place: int) -> None:
        """Pays for one activation.

        Args:
            place: in the block, as :meth:`next` returned it.

        Raises:
            PrivacyError: none is left, or this one was paid for in the meantime.
        """
        if self.next() != place:
            raise PrivacyError(
                f"Activation {self.first + place} was released while its gradients were added up; "
                "its noise would be used twice."
            )
        self.spent += 1
