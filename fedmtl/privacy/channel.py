"""The channel: the only path from private rows to public values.

Order of a step: ``draw`` the cohort, ``begin`` (reserve in the ledger, flushed to disk; ``BudgetExhausted``
before any data is read), then ``release`` once for each declared name. All releases of a step are charged
together, as one Gaussian release of the concatenated vector under one cohort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import PrivacyError
from .account import Account
from .clip import clip_rows, clipped_sum
from .mechanisms import GaussianNoise
from .release import Release, ReleasePlan, bind_releases
from .report import OUTSIDE, PrivacyReport, SignalToNoise
from .samplers import BoundSampler, SamplingLaw
from .settings import ClientPrivacy
from .sources import NoiseSource

Recording = Sequence[tuple[int, str, Tensor]]


class Channel:
    """One run's way out; made by :func:`~fedmtl.privacy.open_channel`.

    Attributes:
        sampler: the bound sampler, with its cap on uses where one applies.
        releases: the typed releases, by name (empty without ``privacy``).
        noise_multiplier: z, or None without noise.
        record: set it to a list, and (step, name, value) of every release is appended.
    """

    def __init__(
        self,
        privacy: ClientPrivacy | None,
        plans: tuple[ReleasePlan, ...],
        sampler: BoundSampler,
        source: NoiseSource,
        account: Account,
        *,
        law: SamplingLaw | None = None,
        noise: GaussianNoise | None = None,
        ledger_name: str = "none",
        replay: Recording | None = None,
    ) -> None:
        self.sampler = sampler
        self.releases: dict[str, Release] = {}
        if privacy is not None and law is not None:
            self.releases = bind_releases(plans, sampler, law, privacy, noise)
        self.noise_multiplier = noise.multiplier if noise is not None else None
        self.record: list[tuple[int, str, Tensor]] | None = None
        self._privacy, self._plans, self._law = privacy, {plan.name: plan for plan in plans}, law
        self._source, self._account, self._ledger_name = source, account, ledger_name
        self._replay = None if replay is None else {(step, name): value for step, name, value in replay}
        self._drawn: dict[int, Tensor] = {}
        self._step: int | None = None
        self._cohort = 0
        self._released: set[str] = set()

    # A step

    @property
    def denominator(self) -> float:
        """m: the public constant that divides every sum."""
        return self.sampler.denominator

    def start(self, step: int) -> None:
        """Say at which step this session begins, so that a run with no step left reports what it spent.

        Raises:
            ResumeError: charges of earlier steps are missing.
        """
        self._account.start(step, self._sample)

    def draw(self, step: int) -> Tensor:
        """The cohort of ``step``: sorted int64 ranks; the same cohort until the step begins.

        Raises:
            BudgetExhausted: a fixed cohort can no longer be filled under its cap.
        """
        self.start(step)
        if step not in self._drawn:
            self._drawn[step] = self._sample(step)
        return self._drawn[step].clone()

    def _sample(self, step: int) -> Tensor:
        return self.sampler.draw(step, self._source.coins("cohort", step), self._account.client_uses)

    def begin(self, step: int, ranks: Tensor) -> None:
        """Charge every release of ``step``; on return the charge is on the disk.

        Args:
            step: number of the step, at least 0; each step begins once.
            ranks: (k,) the cohort that :meth:`draw` gave, in any order.

        Raises:
            BudgetExhausted: the step would exceed the budget, or a client its cap.
            PrivacyError: the step has begun already, or ``ranks`` are not the cohort drawn for it.
            ResumeError: a replayed step with another cohort, or charges of earlier steps that are missing.
        """
        drawn = self._drawn.get(step)
        if drawn is None or not torch.equal(drawn, torch.sort(ranks.cpu()).values):
            raise PrivacyError(
                f"Step {step} does not begin with the cohort that was drawn for it; the accounting holds for "
                f"that cohort only. Call draw(step) first."
            )
        self._step = None
        self._account.charge(step, drawn)
        del self._drawn[step]
        self._step, self._cohort, self._released = step, ranks.numel(), set()

    def release(self, name: str, rows: Tensor, clients: Tensor) -> Tensor:
        """``(sum_k clip(rows_k) + noise) / m``: a public value.

        A row with a NaN or infinity counts as zero and the denominator stays; an empty cohort still releases
        noise.

        Args:
            name: a declared release, once a step.
            rows: (k, D) float rows of the cohort's clients, any float dtype and device; k may be 0.
            clients: (k,) whose rows these are, each client once.

        Returns:
            (D,) float64 on the CPU.

        Raises:
            PrivacyError: an undeclared name, a second release of the name in this step, no step begun, rows
                of the wrong shape, or more rows than clients drawn.
        """
        step = self._checked_step(name, rows, clients)
        self._released.add(name)
        if self._replay is None:
            value = self._noised_sum(name, rows, step) / self.denominator
        elif (step, name) in self._replay:
            value = self._replay[step, name].clone()
        else:
            raise PrivacyError(f"The recording has no release {name!r} of step {step}.")
        if self.record is not None:
            self.record.append((step, name, value.clone()))
        return value

    def clip(self, name: str, rows: Tensor) -> Tensor:
        """Each row as :meth:`release` counts it, for clients that keep what they sent; the result is private.

        Args:
            name: a declared release.
            rows: (k, D) float rows.

        Returns:
            (k, D), the dtype and device of ``rows``.
        """
        self._checked_rows(name, rows)
        release = self.releases.get(name)
        return clip_rows(rows, release.clip if release is not None else None)

    def _noised_sum(self, name: str, rows: Tensor, step: int) -> Tensor:
        release = self.releases.get(name)
        total = clipped_sum(rows, release.clip if release is not None else None)
        if release is None or release.noise is None:
            return total
        std = release.noise.std(release.sensitivity)
        noise = torch.from_numpy(self._source.normal(f"noise/{name}", step, release.dimension)) * std
        if self._source.name == "secure":
            width = grid_width(release.clip.bound, release.dimension, std)
            return (torch.round(total / width) + torch.round(noise / width)) * width
        return total + noise

    def _checked_step(self, name: str, rows: Tensor, clients: Tensor) -> int:
        if self._step is None:
            raise PrivacyError(f"Release {name!r}: no step has begun, so nothing is reserved for it.")
        self._checked_rows(name, rows)
        if name in self._released:
            raise PrivacyError(f"Release {name!r} happened already in step {self._step}; once is the rule.")
        if clients.shape != rows.shape[:1] or torch.unique(clients).numel() != clients.numel():
            raise PrivacyError(f"Release {name!r} needs one row from each client, and each client once.")
        if rows.shape[0] > self._cohort:
            raise PrivacyError(f"Release {name!r} got {rows.shape[0]} rows, but {self._cohort} clients were drawn.")
        return self._step

    def _checked_rows(self, name: str, rows: Tensor) -> None:
        if name not in self._plans:
            raise PrivacyError(f"Release {name!r} was not declared; the plan has {sorted(self._plans)}.")
        dimension = self._plans[name].dimension
        if rows.ndim != 2 or rows.shape[1] != dimension or not rows.is_floating_point():
            raise PrivacyError(
                f"Release {name!r} takes float rows of shape (k, {dimension}), not {tuple(rows.shape)} of {rows.dtype}."
            )

    # What it costs

    @property
    def delta(self) -> float | None:
        """Delta of every epsilon here, or None without noise."""
        return self._account.delta

    @property
    def uses(self) -> int:
        """Steps charged up to now (the most participations of one client, where these are charged)."""
        return self._account.uses

    @property
    def charged_uses(self) -> int:
        """All that the ledger holds, reserved steps and crashed sessions too; never decreases in a run."""
        return self._account.charged

    @property
    def epsilon(self) -> float:
        """Epsilon spent up to the current step; infinite without noise, 0 when nothing has been released."""
        return self.epsilon_at(self.uses)

    def epsilon_at(self, uses: int) -> float:
        """Epsilon of ``uses`` steps (of participations of one client, where these are charged)."""
        return self._account.epsilon_at(uses) if self._plans else 0.0

    def snr(self) -> SignalToNoise | None:
        """Signal to noise of the loudest release, from public quantities only; None without noise."""
        if self._privacy is None or self.noise_multiplier is None:
            return None
        norm = max(r.noise_std * math.sqrt(r.dimension) for r in self.releases.values())
        return SignalToNoise(norm, self._privacy.clip_norm, norm / self._privacy.clip_norm)

    @property
    def report(self) -> PrivacyReport:
        """What may be said of the run so far; after :meth:`close`, of the run."""
        privacy, account, noised = self._privacy, self._account, self.noise_multiplier is not None
        secure = self._source.name == "secure"
        steps = account.steps_charged if account.per_participation else account.spent
        return PrivacyReport(
            private=privacy is not None,
            unit=next(iter(self._plans.values())).unit if self._plans else "client",
            relation=self._law.relation if self._law is not None else "none",
            observer=privacy.observer if privacy is not None else "none",
            epsilon=self.epsilon_at(account.spent),
            delta=account.delta,
            budget=privacy.epsilon if privacy is not None else None,
            clip_norm=privacy.clip_norm if privacy is not None else None,
            noise_multiplier=self.noise_multiplier,
            noise_std=max(r.noise_std for r in self.releases.values()) if noised else None,
            sampler=self.sampler.describe() + self._amplification(),
            names=tuple(self._plans),
            releases=steps * len(self._plans),
            accountant=account.event.accountant if account.event is not None else "none",
            source=self._source.name,
            numerics="float64 on a public power-of-two grid" if secure else "float64",
            guarantee=privacy.guarantee if privacy is not None else "none",
            ledger=self._ledger_name,
            outside=OUTSIDE if privacy is not None else (),
        )

    def close(self) -> None:
        """End cleanly: reservations that were never begun return to the budget; idempotent."""
        self._account.close()

    def _amplification(self) -> str:
        if self._law is None or self._law.relation != "replace" or self.noise_multiplier is None:
            return ""
        if self._law.per_participation:
            return "; not amplified, a client is charged for each participation"
        return "; amplified by sampling without replacement, valid only against outsiders who see no cohort"


def grid_width(clip_norm: float, dimension: int, std: float) -> float:
    """Width of the public grid of secure mode: a power of two.

    Sum and noise are rounded to it apart and added exactly, so the released value is a post-processing of
    Gaussian noise on the rounded sum. Rounding moves the sums of neighbours apart by at most ``sqrt(D)``
    widths, and the clip's margin of ``2**-20 C`` covers that twice over.

    Args:
        clip_norm: C.
        dimension: D.
        std: standard deviation of the noise on the sum.
    """
    finest = min(clip_norm * 2.0**-21 / math.sqrt(dimension), std * 2.0**-20)
    return 2.0 ** math.floor(math.log2(finest))
