"""Releases of owners who act one at a time: a clipped, noised mean of the gradients of an owner's own records.

The protected unit is one record of one owner; neighbours differ by one record replaced, and the numbers of records n_i
are public. Observers are the server, the other owners and the public. Who acts when is public (a schedule never looks
at data). With every record's gradient within C, a mean over n_i records moves by at most 2 C / n_i, and every owner
has an account of its own with a hard cap on its answers: the noise is calibrated to the cap, not to an expectation.

Order of a block of activations: ``begin`` charges it (on the disk before any noise is drawn) and draws its noise;
``release`` is then called once for each activation, in order. R repetitions of a run, each with its own owners and
noise, are computed together; they are simulations, and an epsilon is that of one of them.

Records may arrive while a run goes on (when is public): an answer then has the records that are there, n_i is their
number, and an owner without any is nobody: it answers nothing and is not charged. An answer may use a secret Poisson
subsample of rate q instead of all; its sum is divided by the constant q n_i and moves by at most 2 C / (q n_i).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError
from .chain import Head
from .clip import MARGIN
from .noise.grid import GridValue, privatize
from .noise.laws import Norm
from .noise.registry import LAWS
from .noise.sources import NoiseSource
from .owner_account import OwnerAccount
from .owner_first import WarmStartRelease, released_first
from .owner_means import by_owner
from .owner_records import Participation, RecordSums
from .owner_report import PublishedClaim, owner_report
from .report import PrivacyReport
from .settings import RecordPrivacy
from .tap import Tap

Sums = Callable[[int, Tensor, Tensor | None], np.ndarray]


class OwnerChannel:
    """The way out of a run whose owners act one at a time; made by :func:`~fedmtl.privacy.open_owner_channel`.

    Attributes:
        record: set it to a list, and (activation, "gradient", (R, D)) of every release is appended, and (-1, "first",
            (R, n, D)) of the first release.
        on_grid: in secure mode, the last answer with its grid.
        tap: set it, and it is called with the sum that an owner hands to every release; None but in an audit.
    """

    def __init__(
        self,
        privacy: tuple[RecordPrivacy, ...],
        sums: RecordSums,
        participation: Participation,
        sources: Sequence[NoiseSource],
        account: OwnerAccount,
        *,
        ids: tuple[str, ...] = (),
        schedule: str = "",
        ledger_name: str = "none",
        notes: tuple[str, ...] = (),
        replay: Sequence[tuple[int, str, Tensor]] | None = None,
        published: PublishedClaim | None = None,
        first: WarmStartRelease | None = None,
    ) -> None:
        self.record: list[tuple[int, str, Tensor]] | None = None
        self.on_grid: dict[str, GridValue] = {}
        self.tap: Tap | None = None
        self.settings, self.privacy = privacy, privacy[0] if privacy else None
        self.ids, self.schedule, self.ledger_name, self.notes = ids, schedule, ledger_name, notes
        self.published = None if account.terms is None else published
        self.first, self.participation = first, participation
        self._sums, self._sources, self.account = sums, sources, account
        self._multipliers = None if account.terms is None else account.terms.multipliers
        self._replay = None if replay is None else {step: value for step, _, value in replay}
        self._dimension = sums.dimension
        self._first, self._position, self._only = 0, 0, torch.zeros(1, dtype=torch.int64)
        self._begins, self._first_made = 0, False
        nobody = np.zeros((len(sources), 0))
        self._owners, self._divisors, self._scales = nobody.astype(np.int64), nobody, nobody
        self._noise, self._by_answer = np.zeros((0, len(sources), self._dimension)), nobody

    @property
    def noise_multipliers(self) -> np.ndarray | None:
        """z, the scale of the noise of every owner's answer over its sensitivity (at a weight of 1, where answers have
        weights): (n,) float64, or (R, n) where repetitions have settings of their own; None without noise."""
        if self._multipliers is None:
            return None
        return self._multipliers if len(self.settings) > 1 else self._multipliers[0]

    @property
    def caps(self) -> np.ndarray:
        return self.account.caps

    @property
    def replicates(self) -> int:
        """R."""
        return len(self._sources)

    @property
    def bound(self) -> float:
        """C on the norm of one record's gradient; infinite without privacy."""
        return math.inf if self.privacy is None else self.privacy.clip_norm

    @property
    def mechanism(self) -> str | None:
        """Name of the noise's law; None without noise."""
        return None if self._multipliers is None or self.privacy is None else self.privacy.mechanism

    @property
    def source(self) -> str:
        """``"seeded"`` or ``"secure"``."""
        return self._sources[0].name

    @property
    def ledger_head(self) -> Head | None:
        """The end of the ledger's chain of hashes as it is now; None where no file is kept."""
        return None if self.account.ledger is None else self.account.ledger.head

    def start(self, step: int) -> None:
        """Say at which activation this session begins.

        Raises:
            ResumeError: charges of earlier activations are missing.
        """
        self.account.start(step)
        self._begins = step

    def reserve(self, first: int, owners: Tensor) -> None:
        """Charge activations to come, arguments of :meth:`begin`, with one line of the ledger where repeating is free
        (seeded noise). :meth:`begin` follows for each block of them; what never begins returns by :meth:`close`."""
        present = self.participation.present(first, owners.numpy())
        self.account.reserve(first, np.where(present > 0, owners.numpy(), -1))

    def begin(self, first: int, owners: Tensor) -> None:
        """Charge a block of activations and draw its noise; the first release too, if it is not charged yet.

        Args:
            first: number of the first activation.
            owners: int64 (R, S), who acts; -1 is nobody.

        Raises:
            BudgetExhausted: an owner would pass its cap; nothing is charged, no data are read.
            PrivacyError: a block that does not follow the last one, or a last block that was not finished.
        """
        if self._position < self._owners.shape[1]:
            raise PrivacyError("The last block of activations has releases left; every one of them happens once.")
        present = self.participation.present(first, owners.numpy())
        acting = np.where(present > 0, owners.numpy(), -1)
        uses = self.account.charge(first, acting)
        self._first, self._position, self._owners = first, 0, acting
        self._divisors = np.where(acting >= 0, present * self.participation.rates[acting], 1.0)
        self._by_answer = self._divisors.T[:, :, None]
        terms = self.account.terms
        self._scales = np.zeros(acting.shape) if terms is None else 2 * self.bound * terms.noise(acting, uses)
        self._noise = self._draw(first, acting)

    def release_first(self, vectors: Callable[[int], Tensor]) -> Tensor:
        """One noised vector of every owner that has data, before any answer: a warm start.

        Args:
            vectors: owner -> (D,), within the sensitivity that the channel was opened with; called once for each owner
                that has data. The repetitions share it, and have noise of their own.

        Returns:
            (R, n, D) float64; zero for owners without data.

        Raises:
            BudgetExhausted: it was charged in an earlier session of secure mode.
            PrivacyError: it is not part of the run, was made already, or an answer was.
        """
        if self.first is None:
            raise PrivacyError("The channel was opened without a first release, so nothing is reserved for it.")
        if self._first_made or self._begins or self._first or self._position:
            raise PrivacyError("The first release happens once, before any answer.")
        self.account.charge_first()
        self._first_made = True
        if self.tap is not None:
            for owner in np.flatnonzero(self._sums.counts > 0).tolist():
                self.tap(-1, "first", torch.tensor([owner]), vectors(owner)[None])
        if self._replay is not None:
            if -1 not in self._replay:
                raise PrivacyError("The recording has no first release.")
            value = self._replay[-1].clone()
        else:
            value = released_first(
                self.first, vectors, self.account.terms, self._sums.counts, self._dimension, self._sources
            )
        if self.record is not None:
            self.record.append((-1, "first", value.clone()))
        return value

    def release(self, scales: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The noised mean gradients of the owners of the next activation, one of each repetition.

        Args:
            scales: (owner, repetitions (k,) int64) -> (k, n_i): the factor of every record of the owner, so that record
                j has the gradient ``s_j x_j``; called once for each owner that acts, however many repetitions it acts
                in. A record whose factor is not finite counts as zero.

        Returns:
            (R, D) float64; zero where nobody acts.

        Raises:
            PrivacyError: no activation has begun.
        """
        return self._release(scales, self._sums.of_factors)

    def release_rows(self, rows: Callable[[int, Tensor], Tensor]) -> Tensor:
        """As :meth:`release` for gradients of any model: ``rows`` (owner, repetitions (k,)) -> (k, n_i, D), the
        gradient of every record. Each is clipped; one that is not finite counts as zero."""
        return self._release(rows, self._sums.of_rows)

    def release_run(self, count: int, scales: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
        """The next ``count`` releases at once, for gradients that do not wait for one another's releases.

        Args:
            count: number of activations.
            scales: (owner, which (k,) int64 of the ``count`` activations, repetitions (k,) int64) -> (k, n_i), as in
                :meth:`release`; called once for each owner that acts in any of them.

        Returns:
            (count, R, D) float64, each as :meth:`release` would give it; zero where nobody acts.

        Raises:
            PrivacyError: fewer activations have begun.
        """
        return torch.from_numpy(self._release_run(count, scales, self._sums.of_factors))

    def release_rows_run(self, count: int, rows: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
        """As :meth:`release_run` for gradients of any model: ``rows`` gives (k, n_i, D), as in :meth:`release_rows`."""
        return torch.from_numpy(self._release_run(count, rows, self._sums.of_rows))

    def members(self, owner: int, which: Tensor, where: Tensor) -> Tensor | None:
        """The records that will take part in answers of a later :meth:`release_run`, for what the owner computes from
        them by itself; they are secret.

        Args:
            owner, which, where: as :meth:`release_run` gives them to ``scales``.

        Returns:
            (k, n_i) bool; None for all.
        """
        if not self.participation.partial:
            return None
        steps = self._first + self._position + which.numpy()
        return self.participation.of(owner, steps, where.numpy(), hold=True)

    def local_noise(self) -> Tensor:
        """Noise that the owners of this block add inside, to a point at which they take a gradient.

        It is of the releases' law at scale 1 and independent of their noise; nothing leaves by it.

        Returns:
            (S, R, D) float64; zero without noise.
        """
        shape = (self._owners.shape[1], self.replicates, self._dimension)
        if self.mechanism is None:
            return torch.zeros(shape, dtype=torch.float64)
        return torch.from_numpy(self._units("noise/local", self._first, shape))

    def release_bounded(self, means: Callable[[int, Tensor], Tensor]) -> Tensor:
        """As :meth:`release` for gradients whose norm the domain itself bounds by C: nothing is clipped.

        Args:
            means: (owner, repetitions (k,) int64) -> (k, D): means over the owner's records of gradients that are
                within C for *every* record of the domain, by an analytic bound on clipped features, targets and
                parameters (such as sufficient statistics of a quadratic loss).

        Raises:
            PrivacyError: a mean beyond C: the bound is wrong, and with it the sensitivity; or records of which answers
                take a subsample.
        """
        if self.participation.sampled:
            raise PrivacyError("Answers take a subsample of the records; means over all of them are not accounted for.")
        value = self._answers(1, lambda owner, which, where: means(owner, where).numpy())
        if self.privacy is not None and not self._within(value):
            raise PrivacyError(
                f"A mean gradient is larger than the bound {self.bound:g} that the domain was said to give; use "
                f"the release that clips every record."
            )
        margin = MARGIN if self.source == "secure" else 0.0  # room for the grid's rounding
        return torch.from_numpy(self._finished(value * (1 - margin))[0])

    def _within(self, value: np.ndarray) -> bool:
        """Whether the norm of every mean (S, R, D) is at most C; not of one that is not finite."""
        l1 = self.norm == "l1"
        norms = np.add.reduce(np.abs(value), 2) if l1 else np.sqrt(np.einsum("srd,srd->sr", value, value))
        return bool(norms.max() <= self.bound * (1 + 1e-9))  # the largest is NaN where any is

    def _release(self, values: Callable[[int, Tensor], Tensor], sums: Sums) -> Tensor:
        return torch.from_numpy(self._release_run(1, lambda owner, which, where: values(owner, where), sums)[0])

    def _release_run(self, count: int, values: Callable[[int, Tensor, Tensor], Tensor], sums: Sums) -> np.ndarray:
        at, partial = self._position, self.participation.partial

        def sum_of(owner: int, which: Tensor, where: Tensor) -> np.ndarray:
            factors = values(owner, which, where)
            kept = self.participation.of(owner, self._first + at + which.numpy(), where.numpy()) if partial else None
            return sums(owner, factors, kept)

        total = self._answers(count, sum_of)
        if self._replay is None:
            total /= self._by_answer[at : at + count]
        return self._finished(total)

    def _answers(self, count: int, answer: Callable[[int, Tensor, Tensor], np.ndarray]) -> np.ndarray:
        """(count, R, D), what the owners of the next ``count`` activations answer; zero where nobody acts, and in a
        replay without a tap."""
        at, repetitions = self._position, self.replicates
        if at + count > self._owners.shape[1]:
            raise PrivacyError("Fewer activations have begun than are released, so nothing is reserved for them.")
        if self.tap is not None:
            answer = self._tapped(self.tap, answer)
        elif self._replay is not None:
            return np.zeros((count, repetitions, self._dimension))
        if repetitions == count == 1 and self._owners[0, at] >= 0:
            return answer(int(self._owners[0, at]), self._only, self._only).reshape(1, 1, -1)
        return by_owner(self._owners[:, at : at + count].T, self._dimension, answer)

    def _tapped(
        self, tap: Tap, answer: Callable[[int, Tensor, Tensor], np.ndarray]
    ) -> Callable[[int, Tensor, Tensor], np.ndarray]:
        first = self._first + self._position

        def shown(owner: int, which: Tensor, where: Tensor) -> np.ndarray:
            given = answer(owner, which, where)
            rows = torch.from_numpy(given).reshape(len(which), 1, -1)
            for step, row in zip((first + which).tolist(), rows, strict=True):
                tap(step, "gradient", torch.tensor([owner]), row)
            return given

        return shown

    def _finished(self, value: np.ndarray) -> np.ndarray:
        """The releases of the next activations, whose means are ``value`` (count, R, D): noise, or the recording."""
        at, count = self._position, len(value)
        self._position += count
        value = self._noised(value, at) if self._replay is None else self._replayed(self._replay, at, count)
        if self.record is not None:
            first = self._first + at
            self.record.extend((first + k, "gradient", torch.tensor(one)) for k, one in enumerate(value))
        return value

    def _replayed(self, replay: dict[int, Tensor], at: int, count: int) -> np.ndarray:
        """(count, R, D), the recording of the activations from place ``at`` of the block."""
        steps = range(self._first + at, self._first + at + count)
        if missing := [step for step in steps if step not in replay]:
            raise PrivacyError(f"The recording has no release of activation {missing[0]}.")
        return torch.stack([replay[step] for step in steps]).numpy()

    @property
    def norm(self) -> Norm:
        """In which a record's gradient is bounded."""
        return "l2" if self.privacy is None else LAWS[self.privacy.mechanism].norm

    def _noised(self, value: np.ndarray, at: int) -> np.ndarray:
        """``value`` (count, R, D) with the noise of the activations from place ``at`` of the block."""
        if self._multipliers is None:
            return value
        noise = self._noise[at : at + len(value)]
        if self.source != "secure":
            return value + noise
        for k, owner in enumerate(self._owners[0, at : at + len(value)].tolist()):
            if owner >= 0:
                n = float(self._divisors[0, at + k])  # of sums, whose sensitivity is 2 C
                total, own = torch.from_numpy(value[k, 0] * n), torch.from_numpy(noise[k, 0] * n)
                scale, source = float(self._scales[0, at + k]), self._sources[0]
                noised, width = privatize(total, own, source, bound=self.bound, norm=self.norm, scale=scale)
                assert width is not None
                self.on_grid["gradient"] = GridValue(self._first + at + k, noised / n, width, n)
                value[k, 0] = (noised / n).numpy()
        return value

    def _draw(self, first: int, owners: np.ndarray) -> np.ndarray:
        """(S, R, D) noise of a block in units of the means; nothing where nobody acts."""
        shape = (owners.shape[1], self.replicates, self._dimension)
        if self._multipliers is None:
            return np.zeros((shape[0], 0, 0))
        noise = self._units("noise/gradient", first, shape)
        noise *= (self._scales / self._divisors).T[:, :, None]
        return noise

    def _units(self, purpose: str, first: int, shape: tuple[int, int, int]) -> np.ndarray:
        """(S, R, D) draws at scale 1 for the activations from ``first``."""
        assert self.privacy is not None
        law = LAWS[self.privacy.mechanism](1.0)
        return law.draw_run(self._sources, purpose, first, shape[0], shape[2])

    # What it costs

    @property
    def epsilon(self) -> float:
        """The largest epsilon of an owner up to the current block; infinite without noise, 0 before any answer."""
        return float(self.epsilons.max())

    @property
    def epsilons(self) -> np.ndarray:
        """(R,) float64: as :attr:`epsilon`, of every repetition."""
        found = self.account.epsilons_by_repetition() if self.published is None else None
        acted = self.account.uses.any(1) | (self.account.firsts > 0)
        return np.where(acted, math.inf, 0.0) if found is None else np.where(acted, found.max(1), 0.0)

    @property
    def report(self) -> PrivacyReport:
        """What may be said of the run so far."""
        return owner_report(self)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep of the channel."""
        return self.account.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state`."""
        self.account.restore(state)

    def snr(self) -> None:
        """No single figure says how loud the noise of many owners is."""

    def forfeit(self, done: int) -> None:
        """Stop after ``done`` activations because of what was seen: every owner is charged up to its cap."""
        self.account.forfeit()

    def close(self) -> None:
        """End cleanly: what was reserved and never begun returns to the budget; idempotent."""
        self.account.close()
