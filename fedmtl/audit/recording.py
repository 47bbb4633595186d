"""Channels whose releases are watched, recorded and replayed.

An audit compares two runs. It notes the releases of the first one and the messages of its clients,
and it forces the second one, on other data, to the same releases: whatever still differs did not
come from a release. Ordinary channels know nothing of this. The classes here are theirs with three
attributes more, and are handed to :func:`~fedmtl.privacy.open_channel` as its ``channel_class``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError
from ..privacy import ActivationChannel, Gradients, Release, RoundChannel
from ..privacy.activation_channel import ChargedBlock
from ..privacy.adaptive import AdaptiveClip
from ..privacy.channel import Channel
from ..privacy.clip import Clip, RowTotal
from ..privacy.dp_sgd import LocalSteps
from ..privacy.mechanism import Mechanism, MechanismAround, Message
from ..privacy.receipt import LocalReceipt, Receipt
from ..privacy.records import GRADIENT, Records

Recording = Sequence[tuple[int, str, Tensor]]
"""The values of releases: (step, name, value)."""
Tap = Callable[[int, str, Tensor, Tensor], None]
"""(step, release, clients (k,) int64, rows (k, D)), rows before their clip and their noise."""


class _Recorded(Channel):
    """A channel that records its releases.

    Attributes:
        record: set it to a list, and (step, name, value) of every release is appended; (step,
            "<name>/rows", rows) too of the rows that clients release to the server, if they add
            noise to them, and "<name>/count" of the clients below a clip norm that adapts.
        tap: set it, and it is called with the row of every client that takes part in a release,
            also if the released value is forced. The rows are private.
    """

    record: list[tuple[int, str, Tensor]] | None = None
    tap: Tap | None = None
    _forced: dict[tuple[int, str], Tensor] | None = None

    def replay(self, recording: Recording) -> None:
        """Forces every release to its value in ``recording``; steps are still charged and checked.

        Args:
            recording: :attr:`record` of another run. A release that it lacks is a PrivacyError.
        """
        self._forced = {(step, name): value for step, name, value in recording}

    @property
    def replays(self) -> bool:
        """Returns True if releases are forced."""
        return self._forced is not None

    def replayed(self, step: int, name: str) -> Tensor:
        """Returns the value to which a release is forced.

        Raises:
            PrivacyError: the recording does not have it.
        """
        assert self._forced is not None
        if (step, name) not in self._forced:
            raise PrivacyError(f"The recording has no release {name!r} of step {step}.")
        return self._forced[step, name].clone()

    def note(self, step: int, name: str, value: Tensor) -> None:
        """Appends a release to :attr:`record`."""
        if self.record is not None:
            self.record.append((step, name, value.clone()))


class RecordedRounds(_Recorded, RoundChannel):
    """Rounds whose releases are recorded, tapped and replayed.

    Attributes:
        handed: set it if rows of another channel are handed to this one; sums of gradients then
            are not those of its own local steps.
    """

    handed = False

    def _check_gradient_sums(self, rows: Message, clients: Tensor) -> None:
        if not self.handed and not self.forces_rows:
            super()._check_gradient_sums(rows, clients)

    def release(self, name: str, rows: Message, clients: Tensor) -> Tensor:
        value = super().release(name, rows, clients)
        if self.tap is not None and isinstance(rows, Tensor):
            self.tap(self._begun(name).step, name, clients, rows)
        return value

    def _empty_total(self, release: Release, clip: Clip) -> RowTotal:
        assert release.width is not None  # as there is a clip
        total = _TappedTotal(release.dimension, clip, release.width)
        if self.tap is not None:
            total.tap = partial(self.tap, self._begun(release.name).step, release.name)
        return total

    @property
    def forces_rows(self) -> bool:
        """Returns True if sums of rows are forced. If clients noise the gradients of their records,
        sums of rows are post-processing of gradients that are forced."""
        return self.replays and (self.records is None or self.records.in_secure_sum)

    def _with_row_noise(
        self, mechanism: Mechanism, rows: Message, clients: Tensor, receipt: Receipt
    ) -> Message:
        if self.forces_rows:
            return rows
        sent = super()._with_row_noise(mechanism, rows, clients, receipt)
        assert isinstance(sent, Tensor)
        self.note(receipt.step, f"{mechanism.name}/rows", sent)
        return sent

    def _mechanism(self, release: Release) -> Mechanism:
        return _RecordedMechanism(super()._mechanism(release), self)

    def _count(self, adaptive: AdaptiveClip, release: Release) -> Mechanism:
        return _RecordedMechanism(super()._count(adaptive, release), self)

    def _local_steps(self, records: Records, receipt: LocalReceipt) -> LocalSteps:
        return _RecordedSteps(records, receipt, self)


class _RecordedMechanism(MechanismAround[Mechanism]):
    """A mechanism whose values are recorded, or forced to those of a recording.

    Args:
        mechanism: it is charged and checked in either case.
        channel: of the recording.
    """

    def __init__(self, mechanism: Mechanism, channel: RecordedRounds) -> None:
        super().__init__(mechanism)
        self._channel = channel

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        # charged and checked all the same, so that a replay is refused where the run would be
        if self._channel.forces_rows:
            self.check(rows, clients)
            receipt.spend(self.name, clients)
            value = self._channel.replayed(receipt.step, self.name)
        else:
            value = self._mechanism(rows, clients, receipt)
        self._channel.note(receipt.step, self.name, value)
        return value


class _TappedTotal(RowTotal):
    """A sum of rows that passes every added piece to a listener.

    Attributes:
        tap: is called with clients (k,) and their rows (k, D); None for no call.
    """

    tap: Callable[[Tensor, Tensor], None] | None = None

    def add(self, clients: Tensor, rows: Tensor) -> None:
        if self.tap is not None:
            self.tap(clients, rows)
        super().add(clients, rows)


class _RecordedSteps(LocalSteps):
    """The local steps of a round of :class:`RecordedRounds`."""

    def __init__(self, records: Records, receipt: LocalReceipt, channel: RecordedRounds) -> None:
        super().__init__(records, receipt)
        self._channel = channel

    def _sums(
        self, chunks: Iterable[tuple[Tensor, Tensor]], clients: Tensor, steps: Tensor
    ) -> Tensor:
        channel = self._channel
        # nobody looks at the sums of a replay, and gradients cost most of its time
        if channel.replays and channel.tap is None:
            return torch.zeros(len(clients), self.plan.dimension, dtype=torch.float64)
        sums = super()._sums(chunks, clients, steps)
        if channel.tap is not None:
            each = zip(clients.split(1), steps.tolist(), sums.split(1), strict=True)
            for client, step, row in each:
                channel.tap(self.receipt.step, f"{GRADIENT}/{step}", client, row)
        return sums

    def _noised(self, total: Tensor, clients: Tensor, steps: Tensor) -> Tensor:
        channel = self._channel
        names = [
            f"{GRADIENT}/{self.plan.ids[client]}/{step}"
            for client, step in zip(clients.tolist(), steps.tolist(), strict=True)
        ]
        if channel.replays and names:
            value = torch.stack([channel.replayed(self.receipt.step, name) for name in names])
        else:
            value = super()._noised(total, clients, steps)
        for name, row in zip(names, value.cpu(), strict=True):
            channel.note(self.receipt.step, name, row)
        return value


class RecordedActivations(_Recorded, ActivationChannel):
    """Activations whose releases are recorded, tapped and replayed."""

    def _sums(self, gradients: Sequence[Gradients], block: ChargedBlock, start: int) -> np.ndarray:
        # as with local steps: the value is that of the recording
        if self.replays and self.tap is None:
            return np.zeros((self.replicates, self.records.plan.dimension))
        sums = super()._sums(gradients, block, start)
        if self.tap is not None:
            step = block.receipt.first + start
            clients = block.receipt.clients[start].tolist()
            for client, row in zip(clients, torch.tensor(sums), strict=True):
                # -1 is no client: one without records, or at its cap
                if client >= 0:
                    self.tap(step, GRADIENT, torch.tensor([client]), row[None])
        return sums

    def _noised(self, total: np.ndarray, start: int, block: ChargedBlock) -> np.ndarray:
        step = block.receipt.first + start
        if self.replays:
            value: np.ndarray = self.replayed(step, GRADIENT).numpy()
        else:
            value = super()._noised(total, start, block)
        self.note(step, GRADIENT, torch.from_numpy(value))
        return value
