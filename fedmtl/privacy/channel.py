"""The channel: the only path from private rows to public values.

Order of a step: ``draw`` the cohort, ``begin`` (reserve in the ledger, flushed to disk; ``BudgetExhausted``
before any data is read), then ``release`` once for each declared name. All releases of a step are charged
together, as one Gaussian release of the concatenated vector under one cohort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import PrivacyError
from .account import Account
from .chain import Head
from .clip import Clip, clip_rows, row_norms
from .forms import contributions, shaped
from .noise.grid import GridValue, privatize
from .noise.sources import NoiseSource
from .quantile import QuantileClip, count_rows, count_sensitivity, noisy_fraction
from .records import RecordReleases
from .release import Release, ReleasePlan, bind_releases
from .report import PrivacyReport, SignalToNoise, channel_report
from .row_noise import BoundRowNoise
from .samplers import BoundSampler, SamplingLaw
from .settings import ClientPrivacy, Privacy
from .tap import Tap

Recording = Sequence[tuple[int, str, Tensor]]


class Channel:
    """One run's way out; made by :func:`~fedmtl.privacy.open_channel`.

    Attributes:
        sampler: the bound sampler, with its cap on uses where one applies.
        releases: the typed releases, by name (empty where the messages of clients are not noised).
        records: the record-level releases of local training, under :class:`RecordPrivacy` only; what clients send is
            then post-processing, and :meth:`release` adds it up as it is.
        noise_multiplier: z of every release together with its count of unclipped clients, or None without noise.
        record: set it to a list, and (step, name, value) of every release is appended; (step, "<name>/rows", rows) too
            of what clients release to the server, where they add noise to their own rows.
        tap: set it, and it is called with all that is handed to a release; None in every run but an audit's.
        notes: what the data's own preparation leaves outside of every epsilon.
        rows: noise that clients add to their own rows, by release.
        on_grid: in secure mode, the last value of every release with its grid, by name.
        multipliers: z of every repetition, 0 for one without noise; empty where none has any.
    """

    def __init__(
        self,
        privacy: Privacy | None,
        plans: tuple[ReleasePlan, ...],
        sampler: BoundSampler,
        source: NoiseSource,
        account: Account,
        *,
        law: SamplingLaw | None = None,
        noise_multiplier: float | None = None,
        records: RecordReleases | None = None,
        ledger_name: str = "none",
        replay: Recording | None = None,
    ) -> None:
        self.sampler, self.records = sampler, records
        self.releases: dict[str, Release] = {}
        if isinstance(privacy, ClientPrivacy) and law is not None:
            self.releases = bind_releases(plans, sampler, law, privacy, noise_multiplier)
        self.noise_multiplier = noise_multiplier
        self.privacy, self.law, self.account, self.source = privacy, law, account, source
        self.ledger_name = ledger_name
        self.notes: tuple[str, ...] = ()
        self.rows: dict[str, BoundRowNoise] = {}
        self.on_grid: dict[str, GridValue] = {} if records is None else records.on_grid
        self._record: list[tuple[int, str, Tensor]] | None = None
        self._tap: Tap | None = None
        self._plans = {plan.name: plan for plan in plans}
        self._sources: tuple[NoiseSource, ...] = (source,)
        self.multipliers: tuple[float, ...] = () if noise_multiplier is None else (noise_multiplier,)
        self._adaptive = privacy.clip_norm if privacy is not None else None
        self._replay = None if replay is None else {(step, name): value for step, name, value in replay}
        self._drawn: dict[int, Tensor] = {}
        self._step: int | None = None
        self._cohort = 0
        self._released: set[str] = set()

    def replicate(self, sources: Sequence[NoiseSource], multipliers: Sequence[float] | None) -> None:
        """Make this the channel of R repetitions: the noise of each, and its multiplier (None without noise)."""
        self._sources = tuple(sources)
        self.multipliers = tuple(multipliers or ())

    @property
    def replicates(self) -> int:
        """R, the repetitions that are released together."""
        return len(self._sources)

    @property
    def plans(self) -> tuple[ReleasePlan, ...]:
        """The declared releases."""
        return tuple(self._plans.values())

    @property
    def record(self) -> list[tuple[int, str, Tensor]] | None:
        """Where every release is appended, or None."""
        return self._record

    @record.setter
    def record(self, to: list[tuple[int, str, Tensor]] | None) -> None:
        self._record = to
        if self.records is not None:
            self.records.record = to

    @property
    def tap(self) -> Tap | None:
        """What is called with the rows of every release and of the gradients of local training, or None."""
        return self._tap

    @tap.setter
    def tap(self, to: Tap | None) -> None:
        self._tap = to
        if self.records is not None:
            self.records.tap = to

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep of the channel: the clip norms, where they adapt, and the charges of repetitions,
        which no file holds."""
        if self.replicates > 1:
            return {"charged": torch.tensor(self.account.steps_charged)}
        if not isinstance(self._adaptive, QuantileClip):
            return {}
        return {name: torch.tensor(r.clip.bound, dtype=torch.float64) for name, r in self.releases.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state`."""
        if self.replicates > 1:
            self.account.assume(int(state["charged"]))
            return
        for name, norm in state.items():
            self.releases[name] = self.releases[name].clipped_at(float(norm))

    @property
    def ledger_head(self) -> Head | None:
        """The end of the ledger's chain of hashes as it is now; None where no file is kept."""
        return None if self.account.ledger is None else self.account.ledger.head

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
        self.account.start(step, self._sample)

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
        uses = self.account.client_uses
        ranks = self.sampler.draw(step, self.source.coins("cohort", step), uses)
        if self.records is None or self.account.caps is None:
            return ranks
        return ranks[uses[ranks] < torch.from_numpy(self.account.caps)[ranks]]  # an owner at its cap stays out

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
        self.account.charge(step, drawn)
        del self._drawn[step]
        self._step, self._cohort, self._released = step, ranks.numel(), set()
        if self.records is not None:
            self.records.open(step, drawn)

    def release(self, name: str, rows: Tensor, clients: Tensor) -> Tensor:
        """``(sum_k clip(rows_k) + noise) / m``: a public value (for matrices, see :class:`ReleasePlan`).

        A row with a NaN or infinity counts as zero and the denominator stays; an empty cohort still releases
        noise.

        Args:
            name: a declared release, once a step.
            rows: (k, D) float rows of the cohort's clients, any float dtype and device; k may be 0. (R, k, D) for R > 1
                repetitions.
            clients: (k,) whose rows these are, each client once.

        Returns:
            (D,) float64 on the CPU; (D, D) for a symmetric release; (R, D) or (R, D, D) for R > 1 repetitions.

        Raises:
            PrivacyError: an undeclared name, a second release of the name in this step, no step begun, rows
                of the wrong shape, or more rows than clients drawn.
        """
        step = self._checked_step(name, rows, clients)
        self._released.add(name)
        if self._tap is not None:
            for one in self._each(rows):
                self._tap(step, name, clients, one)
        value = self._replayed(step, name)
        if value is None:
            rows = self._hidden(name, rows, clients, step)
            if name in self.rows:
                self._note(step, f"{name}/rows", rows)
            value = self._noised(name, contributions(rows, self._clip(name), self._plans[name].form), step)
        self._note(step, name, value)
        if isinstance(self._adaptive, QuantileClip):
            self._adapt(name, rows, step, self._adaptive)
        return value

    def _hidden(self, name: str, rows: Tensor, clients: Tensor, step: int) -> Tensor:
        """The rows as the server gets them: with noise of their own, where the release asks for it."""
        noise = self.rows.get(name)
        if noise is None:
            return rows
        each = [noise.added(one, clients, step, of) for one, of in zip(self._each(rows), self._sources, strict=True)]
        return each[0] if self.replicates == 1 else torch.stack(each)

    def clip(self, name: str, rows: Tensor) -> Tensor:
        """Each row as :meth:`release` counts it, for clients that keep what they sent; the result is private.

        Args:
            name: a declared release.
            rows: (k, D) float rows, (R, k, D) of R > 1 repetitions.

        Returns:
            The shape, dtype and device of ``rows``.
        """
        self._checked_rows(name, rows)
        return clip_rows(rows.reshape(-1, rows.shape[-1]), self._clip(name)).reshape(rows.shape)

    def _clip(self, name: str) -> Clip | None:
        release = self.releases.get(name)
        return release.clip if release is not None else None

    def noise_std(self, name: str) -> Tensor:
        """(R,) float64: root mean square of a noised coordinate (of a matrix: a diagonal one) of ``name`` as released
        in the step that has begun; 0 without noise."""
        if self._step is None:
            raise PrivacyError(f"Release {name!r}: no step has begun, so its noise is not known.")
        stds = [release.noise_std for release in self._current(name)]
        return torch.tensor(stds or [0.0] * self.replicates, dtype=torch.float64)

    def _current(self, name: str) -> list[Release]:
        """The release in the step that has begun, by repetition, with the noise of this use; none without a clip."""
        release = self.releases.get(name)
        if release is None:
            return []
        if release.noise is None or not self.multipliers:
            return [release] * self.replicates
        weight = self._plans[name].weight(self.account.steps_charged - 1)
        if self.replicates == 1:
            return [release.weighted(weight)]
        silent = replace(release, noise=None)
        return [release.with_multiplier(z).weighted(weight) if z else silent for z in self.multipliers]

    def _noised(self, name: str, total: Tensor, step: int) -> Tensor:
        """Noised coordinates over the public denominator, in the form that is released: those of R repetitions."""
        for release, source, one in zip(self._current(name), self._sources, self._each(total), strict=False):
            law = release.noise
            if law is not None:
                noise = torch.from_numpy(law.draw(source, f"noise/{name}", step, release.size)) * release.sensitivity
                scale = law.std(release.sensitivity, release.size)
                bound = release.contribution_bound
                value, width = privatize(one, noise, source, bound=bound, norm=law.norm, scale=scale)
                one.copy_(value)
                if width is not None:
                    self.on_grid[name] = GridValue(step, value / self.denominator, width, self.denominator)
        return shaped(total / self.denominator, self._plans[name].form)

    def _each(self, values: Tensor) -> Sequence[Tensor]:
        return (values,) if self.replicates == 1 else values.unbind()

    def _adapt(self, name: str, rows: Tensor, step: int, settings: QuantileClip) -> None:
        """Release how many rows were not clipped, and move the clip norm of the next step."""
        release, key = self.releases[name], f"{name}/count"
        value = self._replayed(step, key)
        if value is None:
            total = count_rows(row_norms(rows, release.clip), release.clip.bound).double().sum(0).cpu()
            std = settings.count_std(self.denominator)
            noise = torch.from_numpy(self.source.normal(f"noise/{key}", step, 1)) * std
            bound = count_sensitivity(release.relation)
            value = privatize(total, noise, self.source, bound=bound, norm="l2", scale=std)[0] / self.denominator
        self._note(step, key, value)
        norm = settings.updated_norm(release.clip.bound, noisy_fraction(float(value)))
        self.releases[name] = release.clipped_at(norm)

    def _replayed(self, step: int, name: str) -> Tensor | None:
        if self._replay is None:
            return None
        if (step, name) not in self._replay:
            raise PrivacyError(f"The recording has no release {name!r} of step {step}.")
        return self._replay[step, name].clone()

    def _note(self, step: int, name: str, value: Tensor) -> None:
        if self._record is not None:
            self._record.append((step, name, value.clone()))

    def _checked_step(self, name: str, rows: Tensor, clients: Tensor) -> int:
        if self._step is None:
            raise PrivacyError(f"Release {name!r}: no step has begun, so nothing is reserved for it.")
        self._checked_rows(name, rows)
        if name in self._released:
            raise PrivacyError(f"Release {name!r} happened already in step {self._step}; once is the rule.")
        if clients.shape != rows.shape[-2:-1] or torch.unique(clients).numel() != clients.numel():
            raise PrivacyError(f"Release {name!r} needs one row from each client, and each client once.")
        if rows.shape[-2] > self._cohort:
            raise PrivacyError(f"Release {name!r} got {rows.shape[-2]} rows, but {self._cohort} clients were drawn.")
        return self._step

    def _checked_rows(self, name: str, rows: Tensor) -> None:
        if name not in self._plans:
            raise PrivacyError(f"Release {name!r} was not declared; the plan has {sorted(self._plans)}.")
        dimension, lead = self._plans[name].dimension, () if self.replicates == 1 else (self.replicates,)
        if (
            rows.ndim != 2 + len(lead)
            or rows.shape != (*lead, rows.shape[-2], dimension)
            or not rows.is_floating_point()
        ):
            shape = ", ".join(str(n) for n in (*lead, "k", dimension))
            raise PrivacyError(
                f"Release {name!r} takes float rows of shape ({shape}), not {tuple(rows.shape)} of {rows.dtype}."
            )

    # What it costs

    @property
    def delta(self) -> float | None:
        """Delta of every epsilon here, or None without noise."""
        return self.account.delta

    @property
    def uses(self) -> int:
        """Steps charged up to now (the most participations of one client, where these are charged)."""
        return self.account.uses

    @property
    def charged_uses(self) -> int:
        """All that the ledger holds, reserved steps and crashed sessions too; never decreases in a run."""
        return self.account.charged

    @property
    def epsilons(self) -> Tensor:
        """(R,) float64 epsilon of each repetition up to the current step; as :attr:`epsilon` for one run."""
        account = self.account
        if self.replicates == 1 or account.cost is None or not account.uses or account.cost.refuted is not None:
            return torch.full((self.replicates,), self.epsilon, dtype=torch.float64)
        return torch.from_numpy(account.cost.epsilons(account.uses))

    @property
    def epsilon(self) -> float:
        """Epsilon spent up to the current step, the largest of all clients; infinite without noise, 0 when nothing has
        been released."""
        if not self._plans and self.records is None:
            return 0.0
        account = self.account
        if account.forfeited:
            return account.epsilon_at(account.spent_uses)
        return account.epsilon_at(account.client_uses.numpy() if account.per_participation else account.uses)

    def epsilon_at(self, uses: int) -> float:
        """Epsilon of ``uses`` steps (of participations of every client, where these are charged)."""
        return self.account.epsilon_at(uses) if self._plans or self.records is not None else 0.0

    def snr(self) -> SignalToNoise | None:
        """Signal to noise of the loudest release, from public quantities only; None without noise."""
        if self.records is not None and self.records.noise is not None and self.records.clip is not None:
            ratio, bound = self.records.noise_ratio(), self.records.clip.bound
            return SignalToNoise(ratio * bound, bound, ratio, what="gradient")
        if not self.releases or self.noise_multiplier is None:
            return None
        loudest = max(self.releases.values(), key=lambda r: r.noise_std * math.sqrt(r.size) / r.contribution_bound)
        norm = loudest.noise_std * math.sqrt(loudest.size)
        return SignalToNoise(norm, loudest.contribution_bound, norm / loudest.contribution_bound)

    @property
    def report(self) -> PrivacyReport:
        """What may be said of the run so far; after :meth:`close`, of the run."""
        return channel_report(self)

    def forfeit(self, done: int) -> None:
        """Stop after ``done`` steps because of what was seen: everything planned is charged, see the account."""
        self.account.forfeit(done)

    def close(self) -> None:
        """End cleanly: reservations that were never begun return to the budget; idempotent."""
        self.account.close()
