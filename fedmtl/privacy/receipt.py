"""A receipt: the proof that a round is charged, which pays for each of its releases once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import PrivacyError


class Receipt:
    """The charge of one round, as a value.

    :meth:`Rounds.begin <fedmtl.privacy.Rounds.begin>` makes one once the ledger has the charge, and
    a :class:`~fedmtl.privacy.mechanism.Mechanism` spends it before it adds anything up. A caller
    who means to can build a receipt, as any object of Python: this guards against mistakes, and the
    audit against a broken channel.

    Args:
        step: number of the round; it addresses the noise.
        use: number of this use of the budget, from 0, if everybody is charged for each round.
        clients: int64 (k,), the cohort that is charged.
    """

    def __init__(self, step: int, use: int, clients: Tensor) -> None:
        self.step = step
        self.use = use
        self.clients = clients
        self._spent: set[str] = set()

    def spend(self, name: str, clients: Tensor) -> None:
        """Pays for one release.

        Args:
            name: of the release, once a round.
            clients: int64 (k,), of whom there are rows: each in the cohort, and each once.

        Raises:
            PrivacyError: the release happened already, or there are rows of clients that were not
                drawn, or two of one client.
        """
        senders = clients.cpu().reshape(-1)
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
        self._spent.add(name)
