"""Rounds: releases of sums over the rows of a cohort.

Order of a round: ``draw`` the cohort, ``begin`` (the charge is written), then ``release`` once for
each declared name. All releases of a round are charged as one Gaussian release of the concatenated
vector under one cohort. Under record-level privacy the local steps of DP-SGD are released through
``local``, and what clients send is post-processing, which ``release`` adds up as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, PrivacyError
from .account import Account
from .channel import Channel
from .clip import (
    Clip,
    RowTotal,
    are_long,
    clip_rows,
    contributions,
    largest_norm,
    row_norms,
    sum_width,
)
from .gradients import GradientPlan
from .noise.banded import CorrelatedNoise
from .noise.grid import GridValue, noised, release_noise
from .noise.laws import GaussianNoise
from .noise.sources import NoiseSource
from .noise.symmetric import smat
from .quantile import COUNT_BOUND, QuantileClip, count_rows, count_sensitivity
from .records import LocalSteps
from .release import Release, ReleasePlan
from .report import SignalToNoise
from .row_noise import BoundRowNoise
from .samplers import BoundSampler
from .settings import ClientPrivacy, Privacy

Message = Tensor | RowTotal
"""What the clients of a cohort send for one release: their rows, or the sum that they were added
to."""


class Rounds(Channel):
    """The channel of a run in rounds.

    Attributes:
        sampler: who takes part, with its cap on uses where one applies.
        releases: the typed releases, by name.
        local: the local steps of the round that has begun, where the unit is one record; else None.
        rows: noise that clients add to their own rows, by release.
        rows_are_noised: set it where clients are processes of their own: their rows arrive with
            that noise.
    """

    def __init__(
        self,
        settings: tuple[Privacy, ...],
        account: Account,
        sources: Sequence[NoiseSource],
        *,
        sampler: BoundSampler,
        releases: dict[str, Release],
        rows: dict[str, BoundRowNoise] | None = None,
        gradients: GradientPlan | None = None,
        order: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__(settings, account, sources, **options)
        self.sampler = sampler
        self.releases = releases
        self.rows = rows or {}
        self.rows_are_noised = False
        self._multipliers = [0.0] * self.replicates  # of releases, 0 without noise
        if self.prices is not None:
            self._multipliers = np.broadcast_to(
                self.prices.by_account[:, 0], self.replicates
            ).tolist()
        self.local: LocalSteps | None = None
        self._adaptive = settings[0].clip_norm if settings else None
        self._norms: dict[str, float] = {}  # of the next round, where clip norms adapt
        self._correlated: dict[str, CorrelatedNoise] = {}
        self._step: int | None = None
        self._use = 0
        self._cohort = torch.zeros(0, dtype=torch.int64)  # of the round that has begun
        self._drawn: dict[int, Tensor] = {}
        self._released: set[str] = set()
        self._totals: dict[str, RowTotal] = {}
        if order is None:
            self._order = torch.arange(sampler.n)
        else:
            self._order = order
        self.records = None
        if gradients is not None:
            self.records = self._records_of(gradients)

    @property
    def plans(self) -> tuple[ReleasePlan, ...]:
        """Return the declared releases."""
        return tuple(self.releases.values())

    @property
    def denominator(self) -> float:
        """Return m, the public constant that divides the sum over a cohort."""
        return self.sampler.denominator

    @property
    def releases_anything(self) -> bool:
        """Returns True if the rounds release something, and therefore charge."""
        return bool(self.releases) or self.records is not None

    # A round

    def draw(self, step: int) -> Tensor:
        """Return the cohort of round ``step``: int64 (k,), clients in the order of the sampler; the
        same cohort until the round begins.

        Raises:
            BudgetExhausted: a fixed cohort can no longer be filled under its cap.
        """
        return self.ranks.share(lambda: self._draw(step))

    def _draw(self, step: int) -> Tensor:
        self.account.start(step)
        if step not in self._drawn:
            self._drawn[step] = self._sample(step)
        return self._drawn[step].clone()

    def _sample(self, step: int) -> Tensor:
        uses = torch.from_numpy(self.account.participations[0])
        caps = self.account.caps
        clients = self._order[
            self.sampler.draw(step, self.source.coins("cohort", step), uses[self._order])
        ]
        if self.records is None or caps is None:
            return clients
        return clients[(uses < torch.from_numpy(caps))[clients]]  # a client at its cap stays out

    def begin(self, step: int, members: Tensor) -> None:
        """Charge a round; on return the charge is written, in secure mode to the disk.

        Args:
            step: number of the round; each begins once.
            members: (k,) the cohort that :meth:`draw` returned, in any order and shape.

        Raises:
            BudgetExhausted: it would exceed the budget, or a client its cap; nothing is charged, no
                data are read.
            PrivacyError: it has begun already, or ``members`` are not the cohort drawn.
            ResumeError: charges of earlier steps are missing.
        """
        clients = members.cpu().reshape(-1)
        self._use = self.ranks.share(lambda: self._charge(step, clients))
        self._step = step
        self._released = set()
        self._totals = {}
        self._cohort = clients
        for name, norm in self._norms.items():
            self.releases[name] = self.releases[name].clipped_at(norm)
        self.local = None
        if self.records is not None:
            self.local = self._local_steps(step, clients)

    def _local_steps(self, step: int, clients: Tensor) -> LocalSteps:
        """Returns the local steps of a round that is charged."""
        return LocalSteps(self, step, clients)

    def _charge(self, step: int, clients: Tensor) -> int:
        """Charge the accounts of ``clients``; return the number of this use, from 0, where
        everybody is charged."""
        if step not in self._drawn or not torch.equal(
            self._drawn[step].sort().values, clients.sort().values
        ):
            raise PrivacyError(
                f"Step {step} does not begin with the cohort that was drawn for it; the accounting "
                "holds for that cohort only. Call draw(step) first."
            )
        self._step = self.local = None
        self.account.charge(step, clients.numpy()[None, None])
        del self._drawn[step]
        return self.account.steps_charged - 1

    def release(self, name: str, rows: Message, clients: Tensor) -> Tensor:
        """Return a public value: clip, sum over the cohort, noise, divide.

        Args:
            name: a declared release, once a round.
            rows: (k, D) float rows of the cohort's clients, any float dtype and device; k may be 0;
                (R, k, D) of R > 1 replicates; or the sum that they were added to, of :meth:`total`.
                A row with a NaN or infinity counts as zero and the denominator stays; an empty
                cohort still releases noise.
            clients: (k,) int64, positions of the clients that the rows are of, each in the cohort,
                and once over all ranks.

        Returns:
            ``(sum_k clip(rows_k) + noise) / m``: (D,) float64 on the CPU; (D, D) for a symmetric
            release; (R, D) or (R, D, D) for R > 1 replicates.

        Raises:
            PrivacyError: an undeclared name, a second release of the name in this round, no round
                that has begun, rows of the wrong shape, or of clients that were not drawn; another
                sum than that of :meth:`total`, or one of other clients' rows.
        """
        step = self._checked_step(name, rows, clients)
        self._released.add(name)
        sent = rows
        if isinstance(rows, Tensor):
            sent = self._hidden(name, rows, clients, step)
        value = self._value(name, sent, clients, step)
        if isinstance(self._adaptive, QuantileClip) and isinstance(rows, Tensor):
            self._adapt(name, rows, step, self._adaptive)
        return value

    def _value(self, name: str, rows: Message, clients: Tensor, step: int) -> Tensor:
        """Return the noised sum of the rows over the public denominator, as :meth:`release`
        does."""
        total = self._sum(name, rows, clients)
        return self.ranks.share(lambda: self._noised_sum(name, total, step))

    def total(self, name: str) -> RowTotal | None:
        """Return a new sum for the round that has begun, to which rows are added as they are made.
        :meth:`release` takes only the last one, so that rows of an attempt that failed are in no
        release. Returns None if the release needs the single rows: short ones, those of replicates,
        matrices, and with an adaptive clip or noise that clients add.

        Args:
            name: a declared release.

        Raises:
            PrivacyError: an undeclared name.
        """
        release = self._declared(name)
        clip = release.clip
        short = not are_long(release.dimension)
        if (
            clip is None
            or self._step is None
            or self.replicates > 1
            or release.form != "vector"
            or short
        ):
            return None
        if name in self.rows or isinstance(self._adaptive, QuantileClip):
            return None
        self._totals[name] = self._new_total(release, clip)
        return self._totals[name]

    def _new_total(self, release: Release, clip: Clip) -> RowTotal:
        """Returns an empty sum of the rows of one release of the round that has begun."""
        return RowTotal(release.dimension, clip, sum_width(clip.bound, self.sampler.n))

    def _sum(self, name: str, rows: Message, clients: Tensor) -> Tensor:
        """Return the clipped sum of the rows of a cohort, complete on the first rank only; ignore
        it on others.

        That of vectors is exact, so the ranks add up their own. Matrices are summed at the first
        rank, from all rows in the order of the clients.
        """
        if isinstance(rows, RowTotal):
            return self.ranks.sum(rows.sum())
        clip = self.releases[name].clip
        form = self.releases[name].form
        if form == "vector":
            if clip is not None:
                bound = clip.bound
            else:
                own = max(map(largest_norm, self._each(rows)))
                bound = max(self.ranks.gather(own))
            width = sum_width(bound, self.sampler.n)
            return self.ranks.sum(contributions(rows, clip, form, width))
        if self.ranks.size > 1:
            each = self.ranks.gather((clients, rows.detach().cpu()))
            clients, rows = (torch.cat(parts) for parts in zip(*each, strict=True))
        return contributions(rows[..., torch.argsort(clients.to(rows.device)), :], clip, form)

    def _hidden(self, name: str, rows: Tensor, clients: Tensor, step: int) -> Tensor:
        """Returns the rows as the server gets them: with noise of their own if clients add some."""
        noise = self.rows.get(name)
        if noise is None or self.rows_are_noised:
            return rows
        each = [
            noise.added(item, clients, step, of)
            for item, of in zip(self._each(rows), self.sources, strict=True)
        ]
        if self.replicates == 1:
            return each[0]
        return torch.stack(each)

    def clip(self, name: str, rows: Tensor) -> Tensor:
        """Return each row as :meth:`release` counts it, for clients that keep what they sent; the
        result is private.

        Args:
            name: a declared release.
            rows: (k, D) float rows, (R, k, D) of R > 1 repetitions.

        Returns:
            The shape, dtype and device of ``rows``.
        """
        self._checked_rows(name, rows)
        return clip_rows(rows.reshape(-1, rows.shape[-1]), self.releases[name].clip).reshape(
            rows.shape
        )

    def sent(self, name: str, row: Message, client: int, step: int) -> Tensor:
        """Return one client's row as it leaves a process of its own, float64 on the CPU: with its
        own noise where the server is to see none without; else as its release adds it up, so that
        to clip it again changes nothing. Where the clip norm adapts it is clipped at twice the
        norm: the server counts who is above it.

        Args:
            name: a declared release.
            row: (1, D), any float dtype and device.
            client: its position.
            step: number of the round.
        """
        assert isinstance(row, Tensor)
        self._checked_rows(name, row)
        release = self.releases[name]
        if name in self.rows:
            return self.rows[name].added(row, torch.tensor([client]), step, self.source)
        if isinstance(self._adaptive, QuantileClip) and release.clip is not None:
            return clip_rows(row, replace(release.clip, bound=2 * release.clip.bound))
        if release.clip is not None and release.form == "vector":
            return self._sum(name, row, torch.zeros(1, dtype=torch.int64))[None]
        return self.clip(name, row.detach().cpu().double())

    def noise_std(self, name: str) -> Tensor:
        if self._step is None:
            raise PrivacyError(f"Release {name!r}: no step has begun, so its noise is not known.")
        return torch.tensor(
            [release.noise_std for release in self._current(name)], dtype=torch.float64
        )

    def _current(self, name: str) -> list[Release]:
        """Return the release in the round that has begun, by repetition, with the noise of this
        use."""
        release = self.releases[name]
        if release.noise is None or self.replicates == 1:
            return [release.weighted(self._use)] * self.replicates
        return [release.with_multiplier(z).weighted(self._use) for z in self._multipliers]

    def _noised_sum(self, name: str, total: Tensor, step: int) -> Tensor:
        """Return noised coordinates over the public denominator, in the form that is released:
        those of R repetitions."""
        for release, source, each in zip(
            self._current(name), self.sources, self._each(total), strict=True
        ):
            if release.noise is not None:
                noise, width = self._noise(name, release, source, step)
                each.copy_(noised(each, noise, width))
                if width is not None:
                    self.on_grid[name] = GridValue(
                        step, each / self.denominator, width, self.denominator
                    )
        value = total / self.denominator
        if self.releases[name].form == "symmetric":
            return smat(value)
        return value

    def _noise(
        self, name: str, release: Release, source: NoiseSource, step: int
    ) -> tuple[Tensor, float | None]:
        """Return the noise of a release, (size,) float64, and the width of its grid."""
        law = release.noise
        sensitivity, bound = release.independent
        assert law is not None

        def draw(at: int) -> tuple[Tensor, float | None]:
            return release_noise(
                law, source, f"noise/{name}", at, release.size, sensitivity=sensitivity, bound=bound
            )

        if release.bands is None:
            return draw(step)
        if name not in self._correlated:  # the steps of a run share one multiplier
            self._correlated[name] = CorrelatedNoise(
                release.bands, draw, repeatable=source.name == "seeded"
            )
        return self._correlated[name].at(step)

    def _each(self, values: Tensor) -> Sequence[Tensor]:
        if self.replicates == 1:
            return (values,)
        return values.unbind()

    def _adapt(self, name: str, rows: Tensor, step: int, settings: QuantileClip) -> None:
        """Release how many rows were not clipped, and compute the clip norm of the next round."""
        value = self._fraction(name, rows, step, settings)
        bound = self.releases[name].bound
        self._norms[name] = settings.updated_norm(bound, float(value) + COUNT_BOUND)

    def _fraction(self, name: str, rows: Tensor, step: int, settings: QuantileClip) -> Tensor:
        """Releases the fraction of the cohort whose rows were not clipped, minus 1/2, (1,)."""
        release = self.releases[name]
        count = count_rows(row_norms(rows, release.clip), release.bound).double().sum(0).cpu()
        total = self.ranks.sum(count)
        return self.ranks.share(
            lambda: self._noised_count(f"{name}/count", total, step, settings, release)
        )

    def _noised_count(
        self, key: str, total: Tensor, step: int, settings: QuantileClip, release: Release
    ) -> Tensor:
        std = settings.count_std(self.denominator)
        bound = count_sensitivity(release.relation)
        law = GaussianNoise(std / bound)
        noise = release_noise(
            law, self.source, f"noise/{key}", step, 1, sensitivity=bound, bound=bound
        )
        return noised(total, *noise) / self.denominator

    def _checked_step(self, name: str, rows: Message, clients: Tensor) -> int:
        if self._step is None:
            raise PrivacyError(
                f"Release {name!r}: no step has begun, so nothing is charged for it."
            )
        if isinstance(rows, Tensor):
            self._checked_rows(name, rows)
        elif rows is not self._totals.get(name) or rows.clients != sorted(clients.tolist()):
            raise PrivacyError(
                f"Release {name!r} got a sum of {len(rows.clients)} rows that Rounds.total did not "
                "make last in step "
                f"{self._step}, or of others than one row from each of {clients.numel()} clients."
            )
        if isinstance(rows, RowTotal):
            count = len(rows.clients)
        else:
            count = rows.shape[-2]
        if name in self._released:
            raise PrivacyError(
                f"Release {name!r} happened already in step {self._step}; once is the rule."
            )
        named = torch.cat(self.ranks.gather(clients.cpu().reshape(-1)))
        if clients.shape != (count,) or torch.unique(named).numel() != named.numel():
            raise PrivacyError(
                f"Release {name!r} needs one row from each client, and each client once."
            )
        others = named[~torch.isin(named, self._cohort)]
        if len(others):
            raise PrivacyError(
                f"Release {name!r} got a row of client {int(others[0])}, who was not drawn for "
                f"step {self._step}; the accounting holds for the cohort that was drawn."
            )
        return self._step

    def _checked_rows(self, name: str, rows: Tensor) -> None:
        dimension = self._declared(name).dimension
        lead: tuple[int, ...] = ()
        if self.replicates > 1:
            lead = (self.replicates,)
        if (
            rows.ndim != 2 + len(lead)
            or rows.shape != (*lead, rows.shape[-2], dimension)
            or not rows.is_floating_point()
        ):
            shape = ", ".join(str(n) for n in (*lead, "k", dimension))
            raise PrivacyError(
                f"Release {name!r} takes float rows of shape ({shape}), not {tuple(rows.shape)} of "
                f"{rows.dtype}."
            )

    def _declared(self, name: str) -> Release:
        if name not in self.releases:
            raise PrivacyError(
                f"Release {name!r} was not declared; the plan has {sorted(self.releases)}."
            )
        return self.releases[name]

    # Its report, and what a checkpoint keeps

    def snr(self) -> SignalToNoise | None:
        if self.prices is None:
            return None
        if self.records is not None:
            size = self.records.plan.dimension
            std = np.median(self.prices.by_account[0] / self.records.plan.expected)
            norm = float(std) * self.records.law.std(self.bound, size) * math.sqrt(size)
            return SignalToNoise(norm, self.bound, what="gradient")
        loudest = max(
            self.releases.values(),
            key=lambda r: r.noise_std * math.sqrt(r.size) / r.contribution_bound,
        )
        first = isinstance(self._adaptive, QuantileClip)
        return SignalToNoise(
            loudest.noise_std * math.sqrt(loudest.size), loudest.contribution_bound, first=first
        )

    def _facts(self) -> dict[str, Any]:
        if self.records is not None:
            return self._record_facts(self.records) | {"sampler": self._schedule()}
        facts = self._common_facts()
        account = self.account
        releases = tuple(self.releases.values())
        privacy = None
        if isinstance(self.privacy, ClientPrivacy):
            privacy = self.privacy
        if account.by_client:
            charged = account.steps_charged
        else:
            charged = int(account.spent.max())
        facts["unit"] = "client"
        facts["relation"] = "none" if privacy is None else self.sampler.relation
        facts["names"] = tuple(self.releases)
        facts["releases"] = charged * len(self.releases)
        facts["budget"] = None if privacy is None else privacy.epsilon
        facts["sampler"] = self._schedule()
        facts["server"] = (
            "; ".join(noise.text(int(account.spent.max())) for noise in self.rows.values()) or None
        )
        if releases and privacy is not None:
            facts["clip_norm"] = max(release.bound for release in releases)
        if self.noised:
            facts["noise_std"] = max(release.noise_std for release in releases)
            bands = next((release.bands for release in releases if release.bands is not None), None)
            if bands is not None:
                facts["mechanism"] += f", correlated over {len(bands)} rounds"
        if privacy is not None and isinstance(adapts := privacy.clip_norm, QuantileClip):
            towards = (
                f"from {adapts.initial:g} on towards the quantile {adapts.quantile:g}, "
                "within the budget"
            )
            facts["clipping"] += f"; {towards}"
        low = min(self._multipliers)
        high = max(self._multipliers)
        if low < high:
            facts["mechanism"] += f" of multipliers {low:.5g} to {high:.5g} by budget"
        return facts

    def _schedule(self) -> str:
        """Returns the facts of the schedule: participants, their charges, and the division of
        the budget."""
        text = self.sampler.describe()
        if not self.noised:
            return text
        if self.account.by_client:
            text += "; not amplified, a client is charged for each participation"
        weights = [weight for plan in self.plans for weight in plan.allocation or ()]
        if weights:
            low = min(weights)
            high = max(weights)
            text += (
                f"; steps have public weights {low:.3g} to {high:.3g}, and noise in inverse "
                "proportion"
            )
        if any(release.bands is not None for release in self.releases.values()):
            text += (
                f"; {self.sampler.separation} rounds from one to the next at least, which "
                "correlated noise needs"
            )
        return text

    def state(self) -> dict[str, Tensor]:
        return self.norms() or super().state()

    def restore(self, state: dict[str, Tensor]) -> None:
        if isinstance(self._adaptive, QuantileClip):
            self.set_norms(state)
        else:
            super().restore(state)

    def norms(self) -> dict[str, Tensor]:
        """Return the clip norms of the last round and of the next one, float64 (2,) for each
        release; none where they do not adapt."""
        if not isinstance(self._adaptive, QuantileClip):
            return {}
        norms = {
            name: (r.bound, self._norms.get(name, r.bound)) for name, r in self.releases.items()
        }
        return {name: torch.tensor(pair, dtype=torch.float64) for name, pair in norms.items()}

    def set_norms(self, norms: Mapping[str, Tensor]) -> None:
        """Take the clip norms of :meth:`norms`, and nothing else.

        Raises:
            ConfigError: other names than those of releases whose clip norms adapt, or values that
                are no norms.
        """
        own = self.norms()
        if set(norms) - set(own):
            raise ConfigError(
                f"clip norms of {', '.join(sorted(norms))}; accepted: {', '.join(own) or 'none'}."
            )
        for name, pair in norms.items():
            if pair.shape != (2,) or not bool((torch.isfinite(pair) & (pair > 0)).all()):
                raise ConfigError(
                    f"the clip norms of {name} are {pair.tolist()}; accepted: two numbers above 0."
                )
            last, self._norms[name] = pair.tolist()
            self.releases[name] = self.releases[name].clipped_at(last)
