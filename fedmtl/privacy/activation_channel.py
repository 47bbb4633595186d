"""Activations: releases of clients that act one at a time, each a noised mean gradient of its own
records.

Order of a block: ``begin`` (the charge is written, and there is a receipt), then one ``release``
for each activation, in order, which spends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError
from .accountant import PrivacyAccountant
from .calibration import Calibration
from .channel import Channel
from .noise.grid import GridValue, noised
from .noise.sources import NoiseSource
from .receipt import BlockReceipt
from .records import GRADIENT, Gradients, Records

_DRAWN = 1 << 20  # numbers of noise drawn ahead, if nothing is lost by that


@dataclass(eq=False)
class ChargedBlock:
    """A block of activations that is charged.

    Attributes:
        receipt: of the charge. Its clients are -1 also for a client without records, or at its cap
            if it is silent there.
        answering: (S, R) bool, True if it is a client.
        groups: of each activation, the clients that release something in ascending order, with the
            replicates of each, int64 (k,).
        divisors: (S, R, 1) the public divisors of the sums.
        scales: (S, R) scale of the noise on a sum; 0 if no client acts.
        noise_std: (S, R) standard deviation of the noise on a coordinate of a released mean.
        noise: noise on the sums from place ``drawn`` on, (s, R, D).
        widths: of the grids of that noise in secure mode, (s,).
        drawn: see ``noise``.
    """

    receipt: BlockReceipt
    answering: np.ndarray
    groups: list[list[tuple[int, np.ndarray]]]
    divisors: np.ndarray
    scales: np.ndarray
    noise_std: np.ndarray
    noise: np.ndarray
    widths: np.ndarray
    drawn: int = 0


class ActivationChannel(Channel):
    """The channel of a run whose clients act one at a time.

    Args:
        calibration: the settings and the release of gradients.
        accountant: of the charges.
        sources: of the noise of each replicate.
        schedule: see below.
        ledger_name: of the ledger, for the report.
        notes: of parts that no epsilon covers.

    Attributes:
        records: the releases of the clients.
        schedule: one phrase on the law of the activations, which are public.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedmtl import RecordPrivacy
        >>> from fedmtl.privacy import GradientPlan, open_channel
        >>> numbers = {"counts": np.array([4, 4]), "caps": np.array([1, 1])}
        >>> plan = GradientPlan(ids=("ann", "bob"), dimension=3, **numbers)
        >>> privacy = RecordPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-4)
        >>> channel = open_channel(privacy, [plan], "in turn", seed=0)
        >>> channel.begin(0, torch.tensor([[1, 0]]))  # bob answers, then ann
        >>> answers = [channel.release([torch.ones(1, 4, 3)]) for _ in range(2)]
        >>> answers[0].shape, round(channel.epsilon, 2)
        ((1, 3), 8.0)
    """

    def __init__(
        self,
        calibration: Calibration,
        accountant: PrivacyAccountant,
        sources: Sequence[NoiseSource],
        *,
        schedule: str,
        ledger_name: str = "none",
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(
            calibration.settings, accountant, sources, ledger_name=ledger_name, notes=notes
        )
        assert calibration.gradients is not None  # these clients release nothing else
        self.schedule = schedule
        self.records: Records = self.records_of(calibration.gradients)
        self._block: ChargedBlock | None = None
        self._end = 0  # the activation after the last one that has begun
        self._secure = self.source.name == "secure"

    @property
    def releases_anything(self) -> bool:
        """Returns True: every activation is charged."""
        return True

    # A block

    def start(self, step: int) -> None:
        """States the first activation of this session."""
        super().start(step)
        if not self._end:
            self._end = step

    def begin(self, first: int, members: Tensor) -> None:
        """Charges a block of activations; on return the charge is written, in secure mode to the
        disk.

        Args:
            first: number of the first activation; each begins once.
            members: int64 (R, S) or (R, S, 1), the client of each of S activations of R replicates,
                -1 for no client.

        Raises:
            BudgetExhausted: a client would exceed its cap; nothing is charged, no data are read.
            PrivacyError: a block that does not follow the last one, or a last block that was not
                finished.
            ResumeError: charges of earlier steps are missing.
        """
        if self._block is not None and self._block.receipt.left:
            raise PrivacyError(
                "The last block of activations has releases left; every one of them happens once."
            )
        if first != self._end:
            raise PrivacyError(
                f"Activation {first} does not follow {self._end - 1}; its noise "
                "could be used twice."
            )
        acting = self._acting(members.numpy().reshape(members.shape[:2]))
        uses = self.accountant.charge(first, acting[:, :, None])
        assert uses is not None
        self._block = self._prepared(first, acting, uses[:, :, 0])
        self._end = first + acting.shape[1]

    def _acting(self, clients: np.ndarray) -> np.ndarray:
        """Returns the clients (R, S) that release something. Clients without records are -1, and
        so are clients at their caps if these are silent."""
        n = len(self.records.plan.ids)
        low = clients.min(initial=0)
        high = clients.max(initial=0)
        if clients.shape != (self.replicates, clients.shape[-1]) or low < -1 or high >= n:
            raise PrivacyError(
                f"Activations take clients of shape ({self.replicates}, S), from 0 to {n - 1} or "
                f"-1 for no client, not {clients.shape} with {low} to {high}."
            )
        clients = np.where(self.records.plan.counts[clients] > 0, clients, -1)
        if self.records.plan.at_cap == "silent":
            clients = self.accountant.within_caps(clients[:, :, None])[:, :, 0]
        return clients

    def _prepared(self, first: int, acting: np.ndarray, uses: np.ndarray) -> ChargedBlock:
        divisors = np.where(acting >= 0, self.records.plan.expected[acting], 1.0)
        scales = self.records.scales(acting, uses)
        nothing = np.zeros((0, self.replicates, self.records.plan.dimension))
        acting, uses, divisors, scales = (
            np.array(each.T, order="C") for each in (acting, uses, divisors, scales)
        )
        noise_std = np.zeros_like(scales)
        if self.costs is not None:
            noise_std = self.records.law.std(1.0, self.records.plan.dimension) * scales / divisors
        return ChargedBlock(
            receipt=BlockReceipt(first, acting, uses),
            answering=acting >= 0,
            groups=_grouped(acting),
            divisors=divisors[:, :, None],
            scales=scales,
            noise_std=noise_std,
            noise=nothing,
            widths=np.zeros(0),
        )

    @property
    def answering(self) -> np.ndarray:
        """Returns the replicates in which the next activation releases something, bool (R,);
        public."""
        block, start = self._next()
        answering: np.ndarray = block.answering[start]
        return answering

    @property
    def acting(self) -> list[tuple[int, np.ndarray]]:
        """Returns the clients that release something in the next activation, in ascending order,
        each with the replicates in which it acts, int64 (k,); public."""
        block, start = self._next()
        return block.groups[start]

    def members(self, client: int, runs: np.ndarray) -> np.ndarray | None:
        """Returns the records of a client that take part in its next release, for the client's own
        computation; they are secret.

        Args:
            client: the one that acts next.
            runs: (k,) int64, in these replicates.

        Returns:
            (k, n_i) bool; None for all.
        """
        block, start = self._next()
        drawn = None
        if self.records.sampled:
            drawn = self.records.drawn(client, block.receipt.uses[start, runs], runs)
        if drawn is None:
            return None
        # coins of an audit's canaries come behind those of the client's records
        return drawn[:, : self.records.counts[client]]

    def release(self, gradients: Sequence[Gradients]) -> np.ndarray:
        """Clips the gradients of the next activation, adds them up, adds noise and divides:
        DP-SGD of one client.

        Args:
            gradients: of the records of each client in :attr:`acting`, in its replicates: an array
                (k, n_i) of factors of the client's rows, or a tensor (k, n_i, D), see
                :mod:`.records`. One that is not a number counts as zero.

        Returns:
            ``(sum_j clip(g_j) + noise) / (q_i n_i)``, (R, D) float64, zero if no client acts.

        Raises:
            PrivacyError: no activation that has begun is left, or gradients of more or fewer
                clients.
        """
        block, start = self._next()
        sums = self._sums(gradients, block, start)
        block.receipt.spend(start)
        return self._noised(sums, start, block)

    def _next(self) -> tuple[ChargedBlock, int]:
        """Returns the block, and the place in it of the next activation."""
        if self._block is None:
            raise PrivacyError("No activation has begun, so nothing is charged for it.")
        return self._block, self._block.receipt.next()

    def noise_std(self, name: str = GRADIENT) -> Tensor:
        """Returns (R,) float64, the standard deviation of the noise on the answer that was released
        last.

        Raises:
            PrivacyError: nothing has been released.
        """
        return torch.from_numpy(self.latest_std)

    @property
    def latest_std(self) -> np.ndarray:
        """Returns the same as an array.

        Raises:
            PrivacyError: nothing has been released in this block.
        """
        block = self._block
        if block is None or not block.receipt.spent:
            raise PrivacyError("No activation has been released, so its noise is not known.")
        std: np.ndarray = block.noise_std[block.receipt.spent - 1]
        return std

    # Sums and noise

    def _sums(self, gradients: Sequence[Gradients], block: ChargedBlock, start: int) -> np.ndarray:
        """Returns (R, D): clipped sums over the records of the clients that act at place ``start``
        and take part; zero if no client acts."""
        groups = block.groups[start]
        records = self.records
        parts = []
        if len(gradients) != len(groups):
            raise PrivacyError(
                f"{len(groups)} clients act; gradients of {len(gradients)} were handed over."
            )
        for (client, runs), rows in zip(groups, gradients, strict=True):
            # Another replicate, in which no client acts, has no noise.
            if len(rows) != len(runs):
                raise PrivacyError(
                    f"Client {client} acts in {len(runs)} replicates; gradients of {len(rows)} "
                    "were handed over."
                )
            drawn = None
            if records.sampled:
                drawn = self.members(client, runs)
            if isinstance(rows, Tensor):
                parts.append(records.of_gradients(client, rows, drawn))
            else:
                parts.append(records.of_factors(client, rows, drawn))
        if len(parts) == 1 and len(parts[0]) == self.replicates:
            return parts[0]
        sums = np.zeros((self.replicates, self.records.plan.dimension))
        if parts:
            sums[np.concatenate([runs for _, runs in groups])] = np.concatenate(parts)
        return sums

    def _noised(self, total: np.ndarray, start: int, block: ChargedBlock) -> np.ndarray:
        """Returns means, with their noise, of sums (R, D) at place ``start`` of the block."""
        divisors = block.divisors[start]
        if self.costs is None:
            exact: np.ndarray = total / divisors
            return exact
        if not block.drawn <= start < block.drawn + len(block.noise):
            self._draw_noise(block, start)
        at = start - block.drawn
        width = None
        if self._secure:
            width = float(block.widths[at])
        means: np.ndarray = noised(total, block.noise[at], width)
        means /= divisors
        if width is not None and block.receipt.clients[start, 0] >= 0:
            value = torch.from_numpy(means[0].copy())
            self.records.on_grid[GRADIENT] = GridValue(
                block.receipt.first + start, value, width, float(divisors[0, 0])
            )
        return means

    def _draw_noise(self, block: ChargedBlock, start: int) -> None:
        """Draws the noise of the activations of the block from place ``start`` on."""
        part = slice(
            start, start + max(1, _DRAWN // max(1, self.replicates * self.records.plan.dimension))
        )
        receipt = block.receipt
        clients = receipt.clients[part]
        acting = np.any(clients >= 0, axis=1)
        of = (
            torch.from_numpy(each[part][acting])
            for each in (receipt.clients, receipt.uses, block.scales)
        )
        drawn, widths = self.records.noise(*of)
        block.noise = np.zeros((acting.size, self.replicates, self.records.plan.dimension))
        block.noise[acting] = drawn.numpy()
        block.widths = np.ones(acting.size)
        if widths is not None:
            block.widths[acting] = widths[:, 0].numpy()
        block.drawn = start


def _grouped(clients: np.ndarray) -> list[list[tuple[int, np.ndarray]]]:
    """Returns the groups of a :class:`ChargedBlock` of ``clients`` (S, R)."""
    order = clients.argsort(1, kind="stable")
    ordered = np.sort(clients, 1)
    begins = np.ones(clients.shape, dtype=bool)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=begins[:, 1:])
    starts = np.flatnonzero(begins)
    runs = order.ravel()
    groups: list[list[tuple[int, np.ndarray]]] = [[] for _ in clients]
    for client, (start, end) in zip(
        ordered.ravel()[starts].tolist(), pairwise([*starts.tolist(), runs.size]), strict=True
    ):
        if client >= 0:
            groups[start // clients.shape[1]].append((client, runs[start:end]))
    return groups
