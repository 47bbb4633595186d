"""Rounds: releases of sums over the rows of a cohort.

Order of a round: ``draw`` the cohort, ``begin`` (the charge is written, and there is a receipt),
then ``release`` once for each declared name, of which a mechanism spends the receipt. All releases
of a round are charged as one Gaussian release of the concatenated vector under one cohort. Under
record-level privacy the local steps of DP-SGD are released through ``local``, and the messages of
clients are post-processing, which ``release`` adds up as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ConfigError, PrivacyError
from .accountant import PrivacyAccountant
from .adaptive import AdaptiveClip, CountBelowNorm
from .calibration import Calibration
from .channel import Channel
from .clip import Clip, RowTotal, are_long, clip_rows, clipped_sum
from .dp_sgd import LocalSteps, local_receipt
from .mechanism import Mechanism, Message, check_rows
from .mechanism_choice import mechanism_of
from .noise.banded import Bands
from .noise.grid import GridValue
from .noise.sources import NoiseSource
from .quantile import QuantileClip
from .receipt import LocalReceipt, Receipt
from .records import Records
from .release import Release, ReleasePlan


class RoundChannel(Channel):
    """The channel of a run in rounds: charge, receipts and mechanisms of one round in one object,
    so that no release meets the receipt of another round. ``_mechanism``, ``_count``,
    ``_local_steps`` and ``_empty_total`` are methods that ranks, replicates and the audit replace.

    Args:
        calibration: the settings, the sampler and the releases with their noise.
        accountant: of the charges.
        sources: of the noise and cohorts of each replicate.
        order, ledger_name, notes: see :func:`open_channel` and :class:`Channel`.

    Attributes:
        sampler: the law of the cohorts, with its cap on uses if it has one.
        releases: the typed releases, by name.
        local: the local steps of the round that has begun, if the unit is one record; else None.
        row_noise: noise that clients add to their own rows, by release.
        nodes_add_row_noise: set it if clients are processes of their own, and add that noise there.
    """

    def __init__(
        self,
        calibration: Calibration,
        accountant: PrivacyAccountant,
        sources: Sequence[NoiseSource],
        *,
        order: Tensor | None = None,
        ledger_name: str = "none",
        notes: tuple[str, ...] = (),
    ) -> None:
        settings = calibration.settings
        super().__init__(settings, accountant, sources, ledger_name=ledger_name, notes=notes)
        assert calibration.sampler is not None
        self.sampler = calibration.sampler
        self.releases = calibration.releases
        self.row_noise = calibration.row_noise
        self.nodes_add_row_noise = False
        self.local: LocalSteps | None = None
        self.records = None
        if calibration.gradients is not None:
            self.records = self.records_of(calibration.gradients, calibration.width)
        if order is None:
            order = torch.arange(self.sampler.n)
        self._order = order
        self._adaptive: AdaptiveClip | None = None
        if settings and isinstance(settings[0].clip_norm, QuantileClip):
            self._adaptive = AdaptiveClip(settings[0].clip_norm, self.releases)
        self._mechanisms: dict[str, Mechanism] = {}
        self._drawn: dict[int, Tensor] = {}
        self._receipt: Receipt | None = None
        self._totals: dict[str, RowTotal] = {}

    @property
    def plans(self) -> tuple[ReleasePlan, ...]:
        """Returns the declared releases."""
        return tuple(self.releases.values())

    @property
    def denominator(self) -> float:
        """Returns m, the public constant that divides the sum over a cohort."""
        return self.sampler.denominator

    @property
    def bands(self) -> Bands | None:
        """Returns the correlation of the noise over rounds; None for independent noise."""
        for release in self.releases.values():
            if release.bands is not None:
                return release.bands
        return None

    @property
    def on_grid(self) -> dict[str, GridValue]:
        """Returns the last value of every release with its grid, by name; none in seeded mode."""
        values = dict(super().on_grid)
        for name, mechanism in self._mechanisms.items():
            if mechanism.on_grid is not None:
                values[name] = mechanism.on_grid
        return values

    @property
    def releases_anything(self) -> bool:
        """Returns True if the rounds release something, and therefore charge."""
        return bool(self.releases) or self.records is not None

    # A round

    def draw(self, step: int) -> Tensor:
        """Draws the cohort of a round; it is the same until the round begins.

        Args:
            step: number of the round.

        Returns:
            int64 (k,), positions of clients, in the order of the sampler.

        Raises:
            BudgetExhausted: a fixed cohort can no longer be filled under its cap, or rows of
                clients are noised in a sum and all of the cohort are at theirs.
        """
        self.accountant.start(step)
        if step not in self._drawn:
            uses = torch.from_numpy(self.accountant.participations[0])
            coins = self.source.coins("cohort", step)
            clients = self._order[self.sampler.draw(step, coins, uses[self._order])]
            of_rows = self.records is None or self.records.in_secure_sum
            self._drawn[step] = self.accountant.below_caps(step, clients, needed=of_rows)
        return self._drawn[step].clone()

    def begin(self, step: int, members: Tensor) -> None:
        """Ends the last round and charges a new one; on return the charge is written, in secure
        mode to the disk.

        Args:
            step: number of the round; each begins once.
            members: (k,) the cohort that :meth:`draw` returned, in any order and shape.

        Raises:
            BudgetExhausted: it would exceed the budget, or a client its cap; nothing is charged.
            PrivacyError: it has begun already, or ``members`` are not the cohort drawn.
            ResumeError: charges of earlier steps are missing.
        """
        # A copy: the charged clients stay so, whatever becomes of the caller's tensor.
        clients = members.to("cpu", torch.int64, copy=True).reshape(-1)
        # the rest of the receipts of the last round pays for nothing
        if self.local is not None:
            self.local.receipt.end()
        self._receipt = self.local = None
        use = self._charge(step, clients)
        if self._adaptive is not None:
            for name, norm in self._adaptive.advance().items():
                self.releases[name] = self.releases[name].clipped_at(norm)
        self._receipt = Receipt(step, use, clients)
        self._totals = {}
        for name, release in self.releases.items():
            if release.allocation is not None:
                release = release.weighted(use)
            known = self._mechanisms.get(name)
            # an adaptive clip norm and a weight of the budget make another release
            if known is None or known.release is not release:
                self._mechanisms[name] = self._mechanism(release)
        if self.records is not None:
            receipt = local_receipt(self.records.plan, step, clients)
            self.local = self._local_steps(self.records, receipt)

    def _mechanism(self, release: Release) -> Mechanism:
        """Returns the mechanism of a release, for all rounds in which the release is the same."""
        return mechanism_of(release, self.source)

    def _count(self, adaptive: AdaptiveClip, release: Release) -> Mechanism:
        """Returns the mechanism that counts the rows within an adaptive clip norm."""
        return CountBelowNorm(release, adaptive.settings, self.source)

    def _local_steps(self, records: Records, receipt: LocalReceipt) -> LocalSteps:
        """Returns the local steps of a round that is charged."""
        return LocalSteps(records, receipt)

    def _charge(self, step: int, clients: Tensor) -> int:
        """Charges the accounts of ``clients``; returns the number of rounds charged before, if
        everybody is charged for each round."""
        if step not in self._drawn or not torch.equal(
            self._drawn[step].sort().values, clients.sort().values
        ):
            raise PrivacyError(
                f"Step {step} does not begin with the cohort that was drawn for it; the accounting "
                "holds for that cohort only. Call draw(step) first."
            )
        self.accountant.charge(step, clients.numpy()[None, None])
        del self._drawn[step]
        return self.accountant.steps_charged - 1

    def release(self, name: str, rows: Message, clients: Tensor) -> Tensor:
        """Clips the rows of a cohort, adds them up, adds noise and divides: a public value.

        Args:
            name: a declared release, once a round.
            rows: (k, D) float rows of the cohort's clients, any float dtype and device; k may be 0;
                or the sum that they were added to, of :meth:`new_total`.
                A row with a NaN or infinity counts as zero and the denominator stays; an empty
                cohort still releases noise.
            clients: (k,) int64, positions of the clients that the rows are of, each in the cohort,
                and once.

        Returns:
            ``(sum_k clip(rows_k) + noise) / m``: (D,) float64 on the CPU; (D, D) for a symmetric
            release.

        Raises:
            PrivacyError: an undeclared name, a second release of the name in this round, no round
                that has begun, rows of the wrong shape, or of clients that were not drawn; another
                sum than that of :meth:`new_total`, or one of other clients' rows.
        """
        receipt = self._begun(name)
        mechanism = self._mechanisms[name]
        if isinstance(rows, RowTotal) and rows is not self._totals.get(name):
            raise PrivacyError(
                f"Release {name!r} got a sum that RoundChannel.new_total did not make last in step "
                f"{receipt.step}."
            )
        if mechanism.release.unit == "record":
            self._check_gradient_sums(rows, clients)
        if name in self.row_noise and not self.nodes_add_row_noise:
            rows = self._with_row_noise(mechanism, rows, clients, receipt)
        value = mechanism(rows, clients, receipt)
        if self._adaptive is not None:
            count = self._count(self._adaptive, mechanism.release)
            # The rows as the server has them: with noise on them, nobody counts those without.
            self._adaptive.follow(mechanism.release, count(rows, clients, receipt))
        return value

    def _begun(self, name: str) -> Receipt:
        """Returns the receipt of the round that has begun, in which there is such a release."""
        if self._receipt is None:
            raise PrivacyError(
                f"Release {name!r}: no step has begun, so nothing is charged for it."
            )
        self._declared(name)
        return self._receipt

    def _with_row_noise(
        self, mechanism: Mechanism, rows: Message, clients: Tensor, receipt: Receipt
    ) -> Message:
        """Returns the rows as the server gets them, with the noise of each client on its own, which
        the receipt pays for."""
        noise = self.row_noise[mechanism.name]
        mechanism.check(rows, clients)
        assert isinstance(rows, Tensor)  # noise of their own keeps the rows apart
        receipt.spend(noise.name, clients)
        return noise.added(rows, clients, receipt, self.source)

    def _check_gradient_sums(self, rows: Message, clients: Tensor) -> None:
        """Refuses rows that are not the sums of gradients that clients made in this round."""
        # The rows of an opened sum are masked: nobody here has them.
        if isinstance(rows, Tensor):
            assert self.local is not None  # a round has begun
            self.local.check_sums(rows, clients)

    def new_total(self, name: str) -> RowTotal | None:
        """Returns a new sum for the round that has begun, to which rows are added as they are made.
        :meth:`release` takes only the last one, so that rows of an attempt that failed are in no
        release. Returns None if the release needs the single rows: short ones, matrices, and with
        an adaptive clip or noise that clients add.

        Args:
            name: a declared release.

        Raises:
            PrivacyError: an undeclared name.
        """
        release = self._declared(name)
        clip = release.row_clip
        short = not are_long(release.dimension)
        if clip is None or self._receipt is None or release.form != "vector" or short:
            return None
        if name in self.row_noise or self._adaptive is not None:
            return None
        self._totals[name] = self._empty_total(release, clip)
        return self._totals[name]

    def _empty_total(self, release: Release, clip: Clip) -> RowTotal:
        """Returns an empty sum of the rows of one release of the round that has begun."""
        assert release.width is not None  # as there is a clip
        return RowTotal(release.dimension, clip, release.width)

    @property
    def clips(self) -> dict[str, Clip | None]:
        """Returns the clip of every release in this round, by name; None for one without a clip."""
        return {name: release.row_clip for name, release in self.releases.items()}

    def row_to_send(self, name: str, row: Message, receipt: Receipt) -> Tensor:
        """Returns one client's row as it leaves a process of its own, (1, D) float64 on the CPU.

        The row has its own noise if the release asks for noise on rows. Otherwise it is clipped as
        the release counts it, and a second clip at the server changes nothing. If the clip norm
        adapts, it is clipped at twice the norm, because the server counts the rows above the norm.

        Args:
            name: a declared release.
            row: (1, D), any float dtype and device.
            receipt: of this client alone, from its own ledger; spent on noise on the row.

        Raises:
            PrivacyError: an undeclared name, a row of another shape, or a row with noise was sent
                for this receipt already.
        """
        assert isinstance(row, Tensor)
        release = self._declared(name)
        check_rows(release, row, receipt.clients)
        if release.unit == "record":
            self._check_gradient_sums(row, torch.zeros(1, dtype=torch.int64))
        if name in self.row_noise:
            noise = self.row_noise[name]
            receipt.spend(noise.name, receipt.clients)
            return noise.added(row, receipt.clients, receipt, self.source)
        if self._adaptive is not None and release.clip is not None:
            return clip_rows(row, replace(release.clip, bound=2 * release.clip.bound))
        if release.clip is not None and release.form == "vector":
            return clipped_sum(row, release.row_clip, release.width)[None]
        return clip_rows(row.detach().cpu().double(), release.row_clip)

    def noise_std(self, name: str) -> Tensor:
        """Returns (1,) float64, of the noise at the clip norm of the round that has begun."""
        self._declared(name)
        if self._receipt is None:
            raise PrivacyError(f"Release {name!r}: no step has begun, so its noise is not known.")
        return torch.tensor([self._mechanisms[name].release.noise_std], dtype=torch.float64)

    def _declared(self, name: str) -> Release:
        if name not in self.releases:
            raise PrivacyError(
                f"Release {name!r} was not declared; the plan has {sorted(self.releases)}."
            )
        return self.releases[name]

    # The state in a checkpoint

    def state(self) -> dict[str, Tensor]:
        """Returns the clip norms, if they adapt, otherwise the charges of replicates."""
        return self.norms() or super().state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continues from the clip norms, if they adapt, otherwise from the charges."""
        if self._adaptive is None:
            super().restore(state)
        else:
            self.set_norms(state)

    def norms(self) -> dict[str, Tensor]:
        """Returns the last and the next clip norm of each release, float64 (2,); none if fixed."""
        if self._adaptive is None:
            return {}
        return self._adaptive.state()

    def set_norms(self, norms: Mapping[str, Tensor]) -> None:
        """Takes the clip norms of :meth:`norms`, and nothing else.

        Args:
            norms: float64 (2,) by release: of the last round, and of the next one.

        Raises:
            ConfigError: other names than those of releases whose clip norms adapt, or values that
                are no norms.
        """
        if self._adaptive is None:
            if norms:
                raise ConfigError(f"clip norms of {', '.join(sorted(norms))}; accepted: none.")
            return
        for name, norm in self._adaptive.restore(norms).items():
            self.releases[name] = self.releases[name].clipped_at(norm)
