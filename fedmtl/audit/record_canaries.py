"""Canaries that are records of clients, and the channels in which they take part.

They belong to clients that have the same cost. Their gradients take the place of the rows of canary
clients, in every local step of DP-SGD and in every activation of a client that acts one at a time.
The attack is that of :mod:`fedmtl.audit.canaries`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..privacy.activation_channel import ActivationChannel, ChargedBlock
from ..privacy.dp_sgd import LocalSteps
from ..privacy.gradients import GradientPlan
from ..privacy.noise.laws import NoiseLaw
from ..privacy.receipt import LocalReceipt
from ..privacy.records import Records
from ..privacy.round_channel import RoundChannel
from ..random import derive_key
from .canaries import Planted
from .likelihood_ratios import LOUD, Coins, canary_directions, score_dependence


class RecordCanaries(Coins):
    """The canaries of one run of DP-SGD in rounds, or of clients that act one at a time, each a
    record of a client.

    Args:
        plan: of the gradients, with the canaries among the numbers of records, behind each client's
            own.
        counts: int64 (n,), the clients' numbers of records without canaries.
        law: of the noise, at a multiplier of 1.
        bound: C, on the gradient of a record.
        seed: of the coins and the directions.

    Attributes:
        clients: int64 (g,), those that have canaries.
        own_records: number of the own records of each of them; None if they differ.
        each: number of the canaries of each of them; canary i is one of client
            ``clients[i // each]``.
    """

    def __init__(
        self, plan: GradientPlan, counts: Tensor, law: NoiseLaw, bound: float, seed: int
    ) -> None:
        added = torch.from_numpy(plan.counts) - counts
        self.clients = added.nonzero()[:, 0]
        # the same for all that have any, as the plan was made
        self.each = int(added.max())
        super().__init__(len(self.clients) * self.each, len(counts), seed)
        numbers = counts[self.clients].unique().tolist()
        self.own_records = None
        if len(numbers) == 1:
            self.own_records = numbers[0]
        self._counts = counts
        self._law = law
        self._bound = bound
        self._rates = torch.from_numpy(plan.rates)
        self._unit = law.std(1.0, plan.dimension)
        self.paired = plan.relation == "replace"
        key = derive_key(seed, "canaries/gradient")
        self._places, self._values = canary_directions(
            self.each, plan.dimension, law.norm == "l1", key
        )
        self._dimension = plan.dimension
        # -1 for a client without canaries
        self._group = torch.full_like(counts, -1)
        self._group[self.clients] = torch.arange(len(self.clients))
        self._drawn: dict[int, Tensor] = {}

    def dependence(self) -> str | None:
        """Returns the reason why the score of a canary depends on the coins of others of its
        client; None if it does not."""
        return score_dependence(self._law, self.each, self._dimension)

    def without(self, clients: Tensor, positions: Tensor, drawn: Tensor) -> Tensor:
        """Returns the drawn positions (A, B) of ``clients`` that are records of their own, as a
        mask, and notes the canaries."""
        planted = drawn & (positions >= self._counts[clients][:, None])
        for row in planted.any(1).nonzero()[:, 0].tolist():
            client = int(clients[row])
            # canaries are numbered behind the client's own records
            self._drawn[client] = positions[row, planted[row]] - self._counts[client]
        return drawn & ~planted

    def draw(self, client: int, drawn: np.ndarray | None) -> None:
        """Notes which canaries of a client take part: those ``drawn``, bool (n_i,), behind its own
        records; None for all."""
        if int(self._group[client]) >= 0:
            if drawn is None:
                part = np.ones(self.each)
            else:
                part = drawn[int(self._counts[client]) :]
            self._drawn[client] = torch.from_numpy(np.flatnonzero(part))

    def gradients(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients (N, D) of the canaries that were drawn, longer than the clip norm,
        and the places of their clients in ``clients``, int64 (N,). A canary that is out has the
        negative one under replace-one, else a gradient of zero."""
        rows = [torch.zeros(0, self._dimension, dtype=torch.float64)]
        owners = []
        for place, client in enumerate(clients.tolist()):
            # taken out, so that no canary adds its gradient to two steps
            drawn = self._drawn.pop(client, self.clients[:0])
            coins = self.coins[self._group[client] * self.each + drawn]
            signs = torch.where(coins, 1.0, -1.0 if self.paired else 0.0)[:, None]
            row = torch.zeros(len(drawn), self._dimension, dtype=torch.float64)
            rows.append(
                row.scatter_(
                    1, self._places[drawn], LOUD * self._bound * signs * self._values[drawn]
                )
            )
            owners += [place] * len(drawn)
        return torch.cat(rows), torch.tensor(owners, dtype=torch.int64)

    def observe(self, clients: Tensor, rest: Tensor, scale: Tensor) -> None:
        """Takes in the evidence of one local step, or activation.

        Args:
            clients: int64 (A,).
            rest: (A, D), the released sums without the gradients of the clients' own records: noise
                and canaries.
            scale: float64 (A,), of the noise.
        """
        for client, noise, std in zip(
            clients.tolist(), rest.cpu(), (self._unit * scale).tolist(), strict=True
        ):
            group = int(self._group[client])
            if group < 0:
                continue
            part = slice(group * self.each, (group + 1) * self.each)
            values = self._bound * self._values
            self.scores[part] += self._ratios(
                self._law, noise, self._places, values, std, self._rates[client]
            )
            self.uses[part] += 1


class RecordCanaryRounds(Planted, RoundChannel):
    """Rounds of DP-SGD in which :class:`RecordCanaries` are in the local steps of their clients."""

    canaries: RecordCanaries

    def _local_steps(self, records: Records, receipt: LocalReceipt) -> LocalSteps:
        return _CanarySteps(records, receipt, self.canaries)


class _CanarySteps(LocalSteps):
    """Local steps with the gradients of canaries, of which the attack gets every value."""

    def __init__(self, records: Records, receipt: LocalReceipt, canaries: RecordCanaries) -> None:
        super().__init__(records, receipt)
        self._canaries = canaries

    def batch(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        positions, drawn = super().batch(clients)
        return positions, self._canaries.without(clients, positions, drawn)

    def _noised(self, total: Tensor, clients: Tensor, steps: Tensor) -> Tensor:
        canaries = self._canaries
        rows, owners = (part.to(total.device) for part in canaries.gradients(clients))
        value = super()._noised(
            total + self._records.of_chunks([(rows, owners)], clients), clients, steps
        )
        # the mean times its divisor, less the clients' own sum, leaves noise and canaries
        expected = torch.from_numpy(self.plan.expected)[clients].to(total.device)
        canaries.observe(clients, value * expected[:, None] - total, self._scale(clients))
        return value


class CanaryActivations(Planted, ActivationChannel):
    """Activations in which :class:`RecordCanaries` are among the records of their clients, in the
    only replicate."""

    canaries: RecordCanaries

    def _noised(self, total: np.ndarray, start: int, block: ChargedBlock) -> np.ndarray:
        clients = torch.from_numpy(block.receipt.clients[start])
        client = int(clients[0])
        if client < 0:
            return super()._noised(total, start, block)
        drawn = self.records.drawn(client, block.receipt.uses[start], np.arange(1))
        self.canaries.draw(client, None if drawn is None else drawn[0])
        added = self.records.of_chunks([self.canaries.gradients(clients)], clients)
        value = super()._noised(total + added.numpy(), start, block)
        rest = value * block.divisors[start] - total
        self.canaries.observe(
            clients, torch.from_numpy(rest), torch.from_numpy(block.scales[start])
        )
        return value
