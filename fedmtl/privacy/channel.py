"""The channel: the only path from private rows to public values, for rounds and for clients that act one at a time.

Order of a round: ``draw`` the cohort, ``begin`` (the charge is written in the ledger, in secure mode to the disk;
``BudgetExhausted`` before any data is read), then ``release`` once for each declared name. All releases of a round are
charged together, as one Gaussian release of the concatenated vector under one cohort. Order of a block of activations:
``begin``, then one gradient ``release`` for each activation, in order. Under record-level privacy in rounds, the local
steps of DP-SGD are released through ``local``, and what clients send is post-processing, which ``release`` adds up as
it is.

Every release is clip, sum by segment (the cohort, or each client), noise of the sum's sensitivity, division by a public
constant. R repetitions of a run, each with its own noise (and its own clients, where these act one at a time), are
computed together; they are simulations, and an epsilon is that of one of them.

Over several ranks every rank has a channel, and hands it the rows of its own clients. The first rank alone draws
cohorts, has the account and adds noise; a step begins, and a value is released, at all ranks together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .._threads import Threads
from ..errors import ConfigError, PrivacyError
from ..ranks import ALONE, Ranks
from .account import Account
from .chain import Head
from .clip import MARGIN, Clip, are_long, clip_rows, contributions, largest_norm, row_norms, sum_width
from .gradients import GradientPlan
from .local_steps import LocalSteps
from .noise.banded import CorrelatedNoise
from .noise.grid import GridValue, client_noise, noised, release_noise
from .noise.laws import GaussianNoise
from .noise.registry import LAWS
from .noise.sources import NoiseSource
from .noise.symmetric import smat
from .quantile import COUNT_BOUND, QuantileClip, count_rows, count_sensitivity
from .release import Release, ReleasePlan
from .report import PrivacyReport, SignalToNoise, channel_report
from .row_noise import BoundRowNoise
from .samplers import BoundSampler, SamplingLaw
from .settings import Privacy
from .sums import (
    BoundedMeans,
    GradientChunks,
    GradientMessage,
    RecordDraws,
    RecordGradients,
    RecordSums,
    ScaledRows,
    by_client,
    in_order,
    turns_of,
)
from .totals import RowTotal

Recording = Sequence[tuple[int, str, Tensor]]
Tap = Callable[[int, str, Tensor, Tensor], None]
"""(step, release, clients (k,) int64, rows (k, D)): called with the row of every client that takes part in a release,
before clip and noise, also where a replay forces the released value. It is private: for audits and tests alone."""
Message = Tensor | RowTotal | GradientMessage | GradientChunks
GRADIENT = "gradient"
_DRAWN = 1 << 20  # numbers of noise drawn ahead, where nothing is lost by that
_ONLY = np.zeros(1, dtype=np.int64)


@dataclass(eq=False)
class _Window:
    """A block of activations that is charged.

    Attributes:
        first: number of the first activation.
        clients: (S, R) int64 who releases something; -1 is nobody, also a client without records, or at its cap where
            it is silent.
        uses: (S, R) int64 how often it acted before.
        divisors: (S, R) what sums are divided by.
        scales: (S, R) scale of the noise on a sum; 0 of nobody's.
        noise: noise on the sums from place ``drawn`` on, (s, R, D).
        widths: of the grids of that noise in secure mode, (s,).
        drawn: see ``noise``.
    """

    first: int
    clients: np.ndarray
    uses: np.ndarray
    divisors: np.ndarray
    scales: np.ndarray
    noise: np.ndarray
    widths: np.ndarray
    drawn: int = 0


class Channel:
    """One run's way out; made by :func:`~fedmtl.privacy.open_channel`.

    Attributes:
        settings: the privacy of all repetitions, or of each; empty without privacy.
        privacy: the settings, of repetitions those of the loudest noise; None without privacy.
        mechanism: name of the law of the noise; None without privacy.
        replicates: R, the repetitions that are released together.
        account: what has been charged.
        sampler: who takes part in rounds, with its cap on uses where one applies; None for activations.
        law: what the sampler guarantees, or None without privacy.
        releases: the typed releases of rows, by name (empty where the messages of clients are not noised).
        gradients: the plan of the releases of gradients, where the unit is one record (also without privacy, where
            clients act one at a time).
        draws: which records take part in them.
        local: the local steps of the round that has begun, where the unit is one record; else None.
        multipliers: z of every repetition's releases of rows, together with its count of unclipped clients, 0 for one
            without noise; empty where none has any.
        record: set it to a list, and (step, name, value) of every release is appended; (step, "<name>/rows", rows) too
            of what clients release to the server, where they add noise to their own rows.
        tap: set it, and it is called with all that is handed to a release; None in every run but an audit's.
        notes: what else no epsilon covers.
        rows: noise that clients add to their own rows, by release.
        rows_are_noised: set it where clients are processes of their own: their rows arrive with that noise.
        ranks: the processes that compute the run; the account of all but the first is empty.
        on_grid: in secure mode, the last value of every release with its grid, by name.
        threads: over which the sum of a cohort's rows is spread, if any.
    """

    def __init__(
        self,
        settings: tuple[Privacy, ...],
        account: Account,
        sources: Sequence[NoiseSource],
        *,
        plans: tuple[ReleasePlan, ...] = (),
        sampler: BoundSampler | None = None,
        law: SamplingLaw | None = None,
        releases: dict[str, Release] | None = None,
        multipliers: tuple[float, ...] = (),
        rows: dict[str, BoundRowNoise] | None = None,
        gradients: GradientPlan | None = None,
        schedule: str = "",
        ledger_name: str = "none",
        notes: tuple[str, ...] = (),
        replay: Recording | None = None,
        ranks: Ranks = ALONE,
        order: Tensor | None = None,
    ) -> None:
        self.settings, self.account, self.sampler, self.law = settings, account, sampler, law
        self.privacy: Privacy | None = settings[0] if settings else None
        self.mechanism: str | None = None if self.privacy is None else self.privacy.mechanism
        self.replicates = len(sources)
        self.releases, self.multipliers, self.rows = releases or {}, multipliers, rows or {}
        self.gradients, self.prices, self.schedule = gradients, account.prices, schedule
        self.ledger_name, self.notes, self.ranks = ledger_name, notes, ranks
        self.record: list[tuple[int, str, Tensor]] | None = None
        self.tap: Tap | None = None
        self.rows_are_noised = False
        self.on_grid: dict[str, GridValue] = {}
        self.local: LocalSteps | None = None
        self.threads: Threads | None = None
        self.sources = list(sources)
        self._plans = {plan.name: plan for plan in plans}
        self._replay = None if replay is None else {(step, name): value for step, name, value in replay}
        self._adaptive = settings[0].clip_norm if settings else None
        self._norms: dict[str, float] = {}  # of the next round, where clip norms adapt
        self._correlated: dict[str, CorrelatedNoise] = {}
        self._step: int | None = None
        self._use = 0
        self._cohort = torch.zeros(0, dtype=torch.int64)  # of the round that has begun, as releases name its clients
        self._drawn: dict[int, Tensor] = {}
        self._released: set[str] = set()
        self._lock = threading.Lock()
        self._order = order
        if gradients is not None:
            self._order = gradients.order
            self.draws: RecordDraws | None = RecordDraws(gradients, self.sources)
            norm, claim = LAWS[self.mechanism or "gaussian"].norm, gradients.published
            if claim is not None and claim.norm is not None:
                norm = claim.norm
            self.sums = RecordSums(gradients, bound=self.bound, norm=norm)
            ratio = gradients.dimension if self.sums.norm == "l1" else 1  # of the squares of this norm and the L2 norm
            self._clearly_within = self.bound**2 / ratio
            self._window: _Window | None = None
            self._place = self._end = 0  # of the next activation, and after the last one that has begun
            self._sampled = self.draws.sampled
            self._secure = self.source.name == "secure"
        else:
            self.draws = None

    # What it is

    @property
    def plans(self) -> tuple[ReleasePlan, ...]:
        """Return the declared releases of rows."""
        return tuple(self._plans.values())

    @property
    def source(self) -> NoiseSource:
        """Return where the random bits of the first repetition come from."""
        return self.sources[0]

    @property
    def denominator(self) -> float:
        """Return m, the public constant that divides the sum over a cohort."""
        return 1.0 if self.sampler is None else self.sampler.denominator

    @property
    def bound(self) -> float:
        """Return C on the norm of a row, or of one record's gradient, in the first step; infinite without privacy."""
        return math.inf if self.privacy is None else self.privacy.initial_norm

    @property
    def noised(self) -> bool:
        """Whether anything is noised."""
        return self.prices is not None

    @property
    def noise_multipliers(self) -> np.ndarray | None:
        """Return z by client, where the unit is one record (at a weight of 1, where uses have weights): (n,) float64,
        or (R, n) where repetitions have settings of their own; None without noise."""
        if self.prices is None or self.gradients is None:
            return None
        return self.prices.by_account if len(self.settings) > 1 else self.prices.by_account[0]

    @property
    def noise_multiplier(self) -> float | None:
        """Return the largest z; None without noise."""
        return None if self.prices is None else max(self.prices.multipliers)

    @property
    def caps(self) -> np.ndarray:
        """Return (n,) int64, the most uses of each client."""
        assert self.account.caps is not None
        return self.account.caps

    def sync(self) -> Head | None:
        """Return the end of the ledger's chain of hashes once all of it is on the disk; None where no file is kept."""
        return None if self.account.ledger is None else self.account.ledger.sync()

    # A step

    def start(self, step: int) -> None:
        """Say at which step this session begins, so that a run with no step left reports what it spent.

        Raises:
            ResumeError: charges of earlier steps are missing.
        """
        self.ranks.share(lambda: self._start(step))
        if self.gradients is not None and self.sampler is None and not self._end:
            self._place = self._end = step

    def _start(self, step: int) -> None:
        self.account.start(step, None if self.sampler is None else lambda earlier: self._members(self._sample(earlier)))

    def draw(self, step: int) -> Tensor:
        """Return the cohort of round ``step``: sorted int64 ranks; the same cohort until the round begins.

        Raises:
            BudgetExhausted: a fixed cohort can no longer be filled under its cap.
        """
        return self.ranks.share(lambda: self._draw(step))

    def _draw(self, step: int) -> Tensor:
        self._start(step)
        if step not in self._drawn:
            self._drawn[step] = self._sample(step)
        return self._drawn[step].clone()

    def _sample(self, step: int) -> Tensor:
        assert self.sampler is not None
        uses, caps = self.account.participations[0], self.account.caps
        if self.gradients is not None:  # accounts of clients, cohorts of ranks
            order = self.gradients.order.numpy()
            uses, caps = uses[order], None if caps is None else caps[order]
        ranks = self.sampler.draw(step, self.source.coins("cohort", step), torch.from_numpy(uses))
        if self.gradients is None or caps is None:
            return ranks
        return ranks[torch.from_numpy(uses < caps)[ranks]]  # a client at its cap stays out

    def _members(self, ranks: Tensor) -> Tensor:
        """Return whose accounts a cohort of ``ranks`` is charged to."""
        return ranks if self.gradients is None else self.gradients.order[ranks]

    def begin(self, step: int, members: Tensor) -> None:
        """Charge a round, or a block of activations; on return the charge is written, in secure mode to the disk.

        Args:
            step: number of the round, or of the first activation; each begins once.
            members: (k,) the cohort that :meth:`draw` gave, in any order; or (R, S), who acts in each of S activations
                of R repetitions, -1 for nobody.

        Raises:
            BudgetExhausted: it would exceed the budget, or a client its cap; nothing is charged, no data are read.
            PrivacyError: it has begun already, or ``members`` are not the cohort drawn; a block that does not follow
                the last one, or a last block that was not finished.
            ResumeError: charges of earlier steps are missing.
        """
        if members.ndim == 2:
            self._begin_activations(step, members.numpy())
            return
        drawn = torch.sort(members.cpu()).values
        clients = self._members(drawn)
        self._use = self.ranks.share(lambda: self._charge(step, drawn, clients))
        self._step, self._released = step, set()
        self._cohort = drawn if self._order is None else self._order[drawn]
        for name, norm in self._norms.items():
            self.releases[name] = self.releases[name].clipped_at(norm)
        self.local = None if self.gradients is None else LocalSteps(self, step, clients)

    def _charge(self, step: int, drawn: Tensor, clients: Tensor) -> int:
        """Charge the accounts of ``clients``; return the number of this use, from 0, where everybody is charged."""
        if step not in self._drawn or not torch.equal(self._drawn[step], drawn):
            raise PrivacyError(
                f"Step {step} does not begin with the cohort that was drawn for it; the accounting holds for "
                f"that cohort only. Call draw(step) first."
            )
        self._step = self.local = None
        self.account.charge(step, clients.numpy()[None, None])
        del self._drawn[step]
        return self.account.steps_charged - 1

    def release(self, name: str, message: Message, clients: Tensor | None = None, *, count: int = 1) -> Tensor:
        """Return a public value: clip, sum by segment, noise, divide.

        Args:
            name: a declared release of rows, once a round; ``"gradient"``.
            message: (k, D) float rows of the cohort's clients, any float dtype and device; k may be 0; (R, k, D) of
                R > 1 repetitions; or the sum that they were added to, of :meth:`total`. A row with a NaN or infinity
                counts as zero and the denominator stays; an empty cohort still releases noise. Or gradients of records,
                see :mod:`.sums`.
            clients: (k,) int64, positions of the clients that the rows are of, each in the cohort, and once over all
                ranks; of one local step, those that the gradients are of.
            count: of gradients of clients that act one at a time: so many activations at once, where they do not wait
                for one another's releases.

        Returns:
            ``(sum_k clip(rows_k) + noise) / m``: (D,) float64 on the CPU; (D, D) for a symmetric release; (R, D) or
            (R, D, D) for R > 1 repetitions. Of gradients ``(sum_j clip(g_j) + noise) / (q_i n_i)``: (count, R, D)
            float64, zero where nobody acts; (A, D) of a local step, on the device of the gradients.

        Raises:
            PrivacyError: an undeclared name, a second release of the name in this round, nothing that has begun, rows
                of the wrong shape, or of clients that were not drawn; a sum of other rows, or with other limits than
                that of :meth:`total`; a mean beyond the bound of the domain.
        """
        if not isinstance(message, (Tensor, RowTotal)) and name != GRADIENT:
            raise PrivacyError(f"Release {name!r} is of rows; gradients of records are {GRADIENT!r}.")
        if isinstance(message, (ScaledRows, RecordGradients, BoundedMeans)):
            return torch.from_numpy(self.release_gradients(message, count))
        if clients is None:
            raise PrivacyError(f"Release {name!r} needs the clients that it is of.")
        if isinstance(message, GradientChunks):
            return self._release_local(message, clients)
        if isinstance(message, RowTotal):
            return self._release_total(name, message, clients)
        return self._release_rows(name, message, clients)

    # Rows of a cohort

    def total(self, name: str) -> RowTotal | None:
        """Return where clients of the round that has begun may add their rows as they make them, for :meth:`release`;
        None where it needs the rows: short ones, those of several repetitions, matrices, and where a clip follows the
        norms, clients add noise themselves, or somebody listens.

        Args:
            name: a declared release.

        Raises:
            PrivacyError: an undeclared name.
        """
        self._check_declared(name)
        plan, clip, step = self._plans[name], self._clip(name), self._step
        if clip is None or step is None or self.sampler is None or self.replicates > 1 or plan.form != "vector":
            return None
        listening = self.tap is not None or self._replay is not None or name in self.rows
        if listening or isinstance(self._adaptive, QuantileClip) or not are_long(plan.dimension):
            return None
        return RowTotal(name, step, plan.dimension, clip, sum_width(clip.bound, self.sampler.n))

    def _release_rows(self, name: str, rows: Tensor, clients: Tensor) -> Tensor:
        step = self._checked_step(name, rows, clients)
        self._released.add(name)
        if self.tap is not None:
            for one in self._each(rows):
                self.tap(step, name, clients, one)
        value = self._replayed(step, name) if self.gradients is None else None  # else it is post-processing
        if value is None:
            rows = self._hidden(name, rows, clients, step)
            if name in self.rows:
                self._note(step, f"{name}/rows", rows)
            total = self._sum(name, rows, clients)
            value = self.ranks.share(lambda: self._noised_sum(name, total, step))
        self._note(step, name, value)
        if isinstance(self._adaptive, QuantileClip):
            self._adapt(name, rows, step, self._adaptive)
        return value

    def _release_total(self, name: str, total: RowTotal, clients: Tensor) -> Tensor:
        if (total.name, total.step) != (name, self._step) or total.count != clients.numel():
            raise PrivacyError(
                f"Release {name!r} of step {self._step} got a sum of {total.count} rows, made for {total.name!r} of "
                f"step {total.step}; it needs one row from each of {clients.numel()} clients."
            )
        asked = self.total(name)
        if asked is None or (total.dimension, total.limits) != (asked.dimension, asked.limits):
            raise PrivacyError(
                f"Release {name!r} got a sum of other rows, or with another clip, than Channel.total makes."
            )
        step = self._checked_step(name, total, clients)
        if total.clients != sorted(clients.tolist()):
            raise PrivacyError(f"Release {name!r} got a sum of rows of other clients than it names.")
        self._released.add(name)
        whole = self.ranks.sum(total.sum())
        value = self.ranks.share(lambda: self._noised_sum(name, whole, step))
        self._note(step, name, value)
        return value

    def _sum(self, name: str, rows: Tensor, clients: Tensor) -> Tensor:
        """Return the clipped sum of the rows of a cohort, as it is noised: at the first rank, elsewhere something else.

        That of vectors is exact, so the ranks add up their own. Matrices are summed at the first rank, from all rows
        in the order of the clients.
        """
        clip, form = self._clip(name), self._plans[name].form
        if form == "vector":
            bound = clip.bound if clip is not None else max(map(largest_norm, self._each(rows)))
            bound = max(self.ranks.gather(bound)) if clip is None else bound
            width = sum_width(bound, len(clients) if self.sampler is None else self.sampler.n)
            return self.ranks.sum(contributions(rows, clip, form, width, threads=self.threads))
        if self.ranks.size > 1:
            each = self.ranks.gather((clients, rows.detach().cpu()))
            clients, rows = (torch.cat(parts) for parts in zip(*each, strict=True))
        return contributions(rows[..., torch.argsort(clients.to(rows.device)), :], clip, form)

    def _hidden(self, name: str, rows: Tensor, clients: Tensor, step: int) -> Tensor:
        """Return the rows as the server gets them: with noise of their own, where the release asks for it."""
        noise = self.rows.get(name)
        if noise is None or self.rows_are_noised:
            return rows
        each = [noise.added(one, clients, step, of) for one, of in zip(self._each(rows), self.sources, strict=True)]
        return each[0] if self.replicates == 1 else torch.stack(each)

    def clip(self, name: str, rows: Tensor) -> Tensor:
        """Return each row as :meth:`release` counts it, for clients that keep what they sent; the result is private.

        Args:
            name: a declared release.
            rows: (k, D) float rows, (R, k, D) of R > 1 repetitions.

        Returns:
            The shape, dtype and device of ``rows``.
        """
        self._checked_rows(name, rows)
        return clip_rows(rows.reshape(-1, rows.shape[-1]), self._clip(name)).reshape(rows.shape)

    def counted(self, name: str, row: Tensor) -> Tensor:
        """Return one client's row as its release adds it up, float64 on the CPU: what a client in a process of its own
        sends. To clip it again changes nothing.

        Args:
            name: a declared release.
            row: (1, D), any float dtype and device.
        """
        self._checked_rows(name, row)
        if self._clip(name) is not None and self._plans[name].form == "vector":
            return self._sum(name, row, torch.zeros(1, dtype=torch.int64))[None]
        return self.clip(name, row.detach().cpu().double())

    def _clip(self, name: str) -> Clip | None:
        release = self.releases.get(name)
        return release.clip if release is not None else None

    def noise_std(self, name: str) -> Tensor:
        """Return (R,) float64: root mean square of a noised coordinate (of a matrix: a diagonal one) of ``name`` as
        released in the round that has begun; of ``"gradient"`` of clients that act one at a time, as released last; 0
        without noise, and where nobody acted."""
        if name == GRADIENT and self.gradients is not None and self.sampler is None:
            return self._answer_std(self.gradients.dimension)
        if self._step is None:
            raise PrivacyError(f"Release {name!r}: no step has begun, so its noise is not known.")
        stds = [release.noise_std for release in self._current(name)]
        return torch.tensor(stds or [0.0] * self.replicates, dtype=torch.float64)

    def _answer_std(self, dimension: int) -> Tensor:
        window = self._window
        if window is None or self._place <= window.first:
            raise PrivacyError("No activation has been released, so its noise is not known.")
        if self.prices is None:
            return torch.zeros(self.replicates, dtype=torch.float64)
        at = self._place - 1 - window.first
        unit = LAWS[str(self.mechanism)](1.0).std(1.0, dimension)
        return torch.from_numpy(unit * window.scales[at] / window.divisors[at])

    def _current(self, name: str) -> list[Release]:
        """Return the release in the round that has begun, by repetition, with the noise of this use; none without a
        clip."""
        release = self.releases.get(name)
        if release is None:
            return []
        if release.noise is None or not self.multipliers:
            return [release] * self.replicates
        weight = self._plans[name].weight(self._use)
        if self.replicates == 1:
            return [release.weighted(weight)]
        silent = replace(release, noise=None)
        return [release.with_multiplier(z).weighted(weight) if z else silent for z in self.multipliers]

    def _noised_sum(self, name: str, total: Tensor, step: int) -> Tensor:
        """Return noised coordinates over the public denominator, in the form that is released: those of R
        repetitions."""
        for release, source, one in zip(self._current(name), self.sources, self._each(total), strict=False):
            if release.noise is not None:
                noise, width = self._noise(name, release, source, step)
                one.copy_(noised(one, noise, width))
                if width is not None:
                    self.on_grid[name] = GridValue(step, one / self.denominator, width, self.denominator)
        value = total / self.denominator
        return smat(value) if self._plans[name].form == "symmetric" else value

    def _noise(self, name: str, release: Release, source: NoiseSource, step: int) -> tuple[Tensor, float | None]:
        """Return the noise of a release, (size,) float64, and the width of its grid."""
        law, (sensitivity, bound) = release.noise, release.independent
        assert law is not None

        def draw(at: int) -> tuple[Tensor, float | None]:
            return release_noise(law, source, f"noise/{name}", at, release.size, sensitivity=sensitivity, bound=bound)

        if release.bands is None:
            return draw(step)
        if name not in self._correlated:  # the steps of a run share one multiplier
            self._correlated[name] = CorrelatedNoise(release.bands, draw, repeatable=source.name == "seeded")
        return self._correlated[name].at(step)

    def _each(self, values: Tensor) -> Sequence[Tensor]:
        return (values,) if self.replicates == 1 else values.unbind()

    def _adapt(self, name: str, rows: Tensor, step: int, settings: QuantileClip) -> None:
        """Release how many rows were not clipped, and compute the clip norm of the next round."""
        release, key = self.releases[name], f"{name}/count"
        value = self._replayed(step, key)
        if value is None:
            count = count_rows(row_norms(rows, release.clip), release.clip.bound).double().sum(0).cpu()
            total = self.ranks.sum(count)
            value = self.ranks.share(lambda: self._noised_count(key, total, step, settings, release))
        self._note(step, key, value)
        self._norms[name] = settings.updated_norm(release.clip.bound, float(value) + COUNT_BOUND)

    def _noised_count(self, key: str, total: Tensor, step: int, settings: QuantileClip, release: Release) -> Tensor:
        std, bound = settings.count_std(self.denominator), count_sensitivity(release.relation)
        law = GaussianNoise(std / bound)
        noise = release_noise(law, self.source, f"noise/{key}", step, 1, sensitivity=bound, bound=bound)
        return noised(total, *noise) / self.denominator

    def _checked_step(self, name: str, rows: Tensor | RowTotal, clients: Tensor) -> int:
        if self._step is None:
            raise PrivacyError(f"Release {name!r}: no step has begun, so nothing is charged for it.")
        if isinstance(rows, Tensor):
            self._checked_rows(name, rows)
        count = rows.count if isinstance(rows, RowTotal) else rows.shape[-2]
        if name in self._released:
            raise PrivacyError(f"Release {name!r} happened already in step {self._step}; once is the rule.")
        named = torch.cat(self.ranks.gather(clients.cpu().reshape(-1)))
        if clients.shape != (count,) or torch.unique(named).numel() != named.numel():
            raise PrivacyError(f"Release {name!r} needs one row from each client, and each client once.")
        others = named[~torch.isin(named, self._cohort)]
        if len(others):
            raise PrivacyError(
                f"Release {name!r} got a row of client {int(others[0])}, who was not drawn for step {self._step}; the "
                f"accounting holds for the cohort that was drawn."
            )
        return self._step

    def _check_declared(self, name: str) -> None:
        if name not in self._plans:
            raise PrivacyError(f"Release {name!r} was not declared; the plan has {sorted(self._plans)}.")

    def _checked_rows(self, name: str, rows: Tensor) -> None:
        self._check_declared(name)
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

    # Gradients of single records

    def _begin_activations(self, first: int, clients: np.ndarray) -> None:
        if self.draws is None or self.sampler is not None:
            raise PrivacyError("The channel was opened for rounds; a block of activations has no account here.")
        self._check_finished()
        if first != self._end:
            raise PrivacyError(f"Activation {first} does not follow {self._end - 1}; its noise could be used twice.")
        acting = self._acting(clients)
        uses = self.account.charge(first, acting[:, :, None])
        assert uses is not None
        self._window = self._prepared(first, acting, uses[:, :, 0])
        self._place, self._end = first, first + acting.shape[1]

    def _check_finished(self) -> None:
        if self._place < self._end:
            raise PrivacyError("The last block of activations has releases left; every one of them happens once.")

    def _acting(self, clients: np.ndarray) -> np.ndarray:
        """Return who releases something (R, S), with -1 for clients without records, and for those at their caps where
        these are silent."""
        assert self.draws is not None
        n, low, high = self.draws.counts.size, clients.min(initial=0), clients.max(initial=0)
        if clients.shape != (self.replicates, clients.shape[-1]) or low < -1 or high >= n:
            raise PrivacyError(
                f"Activations take clients of shape ({self.replicates}, S), from 0 to {n - 1} or -1 for nobody, not "
                f"{clients.shape} with {low} to {high}."
            )
        if not self.draws.never_empty:
            clients = np.where(self.draws.counts[clients] > 0, clients, -1)
        if self.gradients is not None and self.gradients.at_cap == "silent":
            clients = self.account.within_caps(clients[:, :, None])[:, :, 0]
        return clients

    def _prepared(self, first: int, acting: np.ndarray, uses: np.ndarray) -> _Window:
        assert self.gradients is not None
        assert self.draws is not None
        divisors = np.where(acting >= 0, self.gradients.expected[acting], 1.0)
        scales = np.zeros(acting.shape)
        if self.prices is not None:
            scales = 2 * self.bound * self.prices.of_uses(acting, uses)  # neighbours replace a record
        nothing = np.zeros((0, self.replicates, self.gradients.dimension))
        by_step = [np.array(one.T, order="C") for one in (acting, uses, divisors, scales)]
        return _Window(first, by_step[0], by_step[1], by_step[2], by_step[3], nothing, np.zeros(0))

    def release_gradients(self, message: GradientMessage, count: int = 1) -> np.ndarray:
        """(count, R, D) float64: :meth:`release` of the next activations as an array."""
        if self.gradients is None or count < 0:
            raise PrivacyError(f"The channel has no release of {count} activations.")
        window, at = self._window, self._place
        if at + count > self._end or window is None:
            raise PrivacyError("Fewer activations have begun than are released, so nothing is charged for them.")
        start = at - window.first
        if self._replay is None or self.tap is not None:
            value = self._sums(message, window, start, count)
        if self.tap is not None:
            steps = np.repeat(at + np.arange(count), self.replicates)
            clients = window.clients[start : start + count].ravel()
            self._tap_sums(steps, clients, value.reshape(clients.size, -1))
        if self._replay is not None:
            value = self._replayed_activations(at, count)
        else:
            value = self._noised_activations(value, start, window)
        self._place = at + count
        if self.record is not None:
            self.record.extend((at + k, GRADIENT, torch.tensor(one)) for k, one in enumerate(value))
        return value

    def answering(self, count: int) -> np.ndarray:
        """Return which of the next ``count`` activations release something, bool (count, R); public."""
        window = self._window
        if window is None or self._place + count > self._end:
            raise PrivacyError("Fewer activations have begun than were asked for.")
        start = self._place - window.first
        return window.clients[start : start + count] >= 0

    def answers(self, message: GradientMessage) -> Iterator[np.ndarray]:
        """Yield what every activation that has begun releases, one after another: (R, D) float64.

        Each is that of :meth:`release`, and the message is asked when its turn comes, so that it may depend on all
        releases before.

        Raises:
            PrivacyError: as for :meth:`release`; or something else was released in between.
        """
        at = self._place
        while at < self._end:
            if self._place != at:
                raise PrivacyError(f"Activation {at} was released already; every one of them happens once.")
            at += 1
            yield self.release_gradients(message)[0]

    def _sums(self, message: GradientMessage, window: _Window, start: int, count: int) -> np.ndarray:
        """Return (count, R, D): clipped sums of the activations from place ``start`` of the window."""
        clients = window.clients[start : start + count]
        if clients.size == 1 and not _of_all(message) and (client := clients.item()) >= 0:
            return self._sums_of(message, client, _ONLY, _ONLY)[None]
        which, where = np.divmod(np.arange(clients.size), self.replicates)
        return self._sums_at(message, clients.ravel(), which, where).reshape(*clients.shape, -1)

    def _sums_at(
        self, message: GradientMessage, clients: np.ndarray, which: np.ndarray, where: np.ndarray
    ) -> np.ndarray:
        """Return (k, D): clipped sums of activations of ``clients`` (k,), -1 for nobody, at ``which`` (k,) of those to
        come in repetitions ``where`` (k,)."""
        if self._sampled or not _of_all(message):
            return by_client(clients, which, where, self.sums.dimension, lambda *of: self._sums_of(message, *of))
        order, turns = turns_of(clients)
        if not turns:
            return np.zeros((len(clients), self.sums.dimension))
        assert isinstance(message, ScaledRows)
        assert message.of_all is not None
        return in_order(
            self.sums.of_all(turns, message.of_all(clients[order], where[order], turns)), order, len(clients)
        )

    def _sums_of(self, message: GradientMessage, client: int, which: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Return (k, D): clipped sums over the records of a client that take part in its releases."""
        if isinstance(message, BoundedMeans):
            assert self._window is not None
            divisors = self._window.divisors[self._place - self._window.first + which, where]
            return self._sums_of_means(message.means(client, which, where), divisors)
        drawn = self.members(client, which, where, hold=False) if self._sampled else None
        if isinstance(message, ScaledRows):
            return self.sums.of_factors(client, message.factors(client, which, where), drawn)
        return self.sums.of_gradients(client, message.gradients(client, which, where), drawn)

    def _sums_of_means(self, means: np.ndarray, divisors: np.ndarray) -> np.ndarray:
        """Return the sums (k, D) of ``means`` over so many records (k,), which the domain bounds.

        In secure mode they are smaller by the room that rounding to the grid needs.

        Raises:
            PrivacyError: a mean beyond the bound; or releases take a subset of the records.
        """
        if self._sampled:
            raise PrivacyError("Releases take a subset of the records; means over all of them are not accounted for.")
        if self.privacy is not None and not np.vdot(means, means) <= self._clearly_within:
            self._check_bound(means)
        return means * (divisors * (1 - MARGIN) if self._secure else divisors)[:, None]

    def _tap_sums(self, steps: np.ndarray, clients: np.ndarray, sums: np.ndarray) -> None:
        """Call the tap with sums (k, D) of ``clients`` (k,) at activations ``steps`` (k,); -1 is nobody."""
        if self.tap is not None:
            for step, client, row in zip(steps.tolist(), clients.tolist(), torch.tensor(sums), strict=True):
                if client >= 0:
                    self.tap(step, GRADIENT, torch.tensor([client]), row[None])

    def _check_bound(self, means: np.ndarray) -> None:
        """Refuse means (k, D) beyond the bound of the domain."""
        largest = np.linalg.norm(means, 1 if self.sums.norm == "l1" else 2, axis=1).max()  # NaN where any is
        if not largest <= self.bound * (1 + 1e-9):
            raise PrivacyError(
                f"A mean gradient is larger than the bound {self.bound:g} that the domain was said to give; use "
                f"the release that clips every record."
            )

    def members(self, client: int, which: np.ndarray, where: np.ndarray, *, hold: bool = True) -> np.ndarray | None:
        """Return the records that will take part in the next releases of a client, for what it computes from them by
        itself; they are secret.

        Args:
            client: whose.
            which: (k,) int64, places of its activations among those that are released next.
            where: (k,) int64, their repetitions.
            hold: the release that follows takes the same ones.

        Returns:
            (k, n_i) bool; None for all.
        """
        assert self.draws is not None
        assert self._window is not None
        if not self.draws.sampled:
            return None
        uses = self._window.uses[self._place + which - self._window.first, where]
        return self.draws.of(client, uses, where, hold=hold)

    def _noised_activations(self, total: np.ndarray, start: int, window: _Window) -> np.ndarray:
        """Return means, with their noise, of sums (count, R, D) from place ``start`` of the window."""
        count = len(total)
        divisors = window.divisors[start : start + count, :, None]
        if self.prices is None:
            total /= divisors
            return total
        if not window.drawn <= start < start + count <= window.drawn + len(window.noise):
            self._draw_noise(window, start, count)
        noise = window.noise[start - window.drawn : start - window.drawn + count]
        widths = window.widths[start - window.drawn : start - window.drawn + count]
        grid = torch.from_numpy(widths)[:, None, None] if self._secure else None
        means: np.ndarray = noised(torch.from_numpy(total), torch.from_numpy(noise), grid).numpy()
        means /= divisors
        if self._secure and (window.clients[start : start + count] >= 0).any():
            last = int(np.flatnonzero(window.clients[start : start + count, 0] >= 0)[-1])
            value, divisor = torch.from_numpy(means[last, 0].copy()), float(divisors[last, 0, 0])
            self.on_grid[GRADIENT] = GridValue(window.first + start + last, value, float(widths[last]), divisor)
        return means

    def _draw_noise(self, window: _Window, start: int, count: int) -> None:
        """Draw the noise of the activations of the block from place ``start`` on, of at least ``count``."""
        width = max(count, _DRAWN // max(1, self.replicates * self.sums.dimension))
        part = slice(start, start + width)
        clients, uses, scales = window.clients[part], window.uses[part], window.scales[part]
        acting = np.any(clients >= 0, axis=1)
        noise, widths = np.zeros((acting.size, self.replicates, self.sums.dimension)), np.ones(acting.size)
        noise[acting], widths[acting] = self._units("noise/gradient", clients[acting], uses[acting], scales[acting])
        window.noise, window.widths, window.drawn = noise, widths, start

    def _units(
        self, purpose: str, clients: np.ndarray, uses: np.ndarray, scales: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the noise (S, R, D) of activations (S, R), addressed by the client and its own count, and the widths
        of its grids (S,)."""
        assert self.gradients is not None
        law, keys = LAWS[str(self.mechanism)](1.0), self.gradients.addresses[np.maximum(clients, 0)]
        if not self._secure:
            units = law.draw_each(self.sources, purpose, torch.from_numpy(uses), keys, self.sums.dimension)
            return units * scales[:, :, None], np.ones(len(clients))
        sizes, at = torch.from_numpy(scales[:, 0]), torch.from_numpy(uses[:, 0])
        noise, widths = client_noise(
            law, self.source, purpose, at, keys[:, 0], self.sums.dimension, sensitivity=sizes, bound=self.bound
        )
        assert widths is not None
        return noise.numpy()[:, None], widths.numpy()

    def _replayed_activations(self, at: int, count: int) -> np.ndarray:
        """(count, R, D), the recording of the activations from ``at`` on."""
        values = [self._replayed(step, GRADIENT) for step in range(at, at + count)]
        return torch.stack([value for value in values if value is not None]).numpy()

    def _release_local(self, message: GradientChunks, clients: Tensor) -> Tensor:
        """Return (A, D): one local step of DP-SGD of ``clients``, by
        :class:`~fedmtl.privacy.local_steps.LocalSteps`."""
        plan, round = self.gradients, self._step
        if plan is None or round is None or self.local is None:
            raise PrivacyError("No round of local training has begun, so nothing is charged for its local steps.")
        own = self.local.make(clients, message.step)
        sums: Tensor | None = None
        if self._replay is None or self.tap is not None:
            sums = self.sums.of_chunks(message.chunks, clients)
            if self.tap is not None:
                self.tap(round, f"{GRADIENT}/{message.step}", clients, sums)
        steps = zip(clients.tolist(), own.tolist(), strict=True)
        names = [f"{GRADIENT}/{plan.ids[client]}/{number}" for client, number in steps]
        if self._replay is not None:
            values = [self._replayed(round, name) for name in names]
            value = torch.stack([one for one in values if one is not None])
        else:
            assert sums is not None
            value = self._noised_local(sums, clients, own, round)
        if self.record is not None:
            with self._lock:
                for name, row in zip(names, value.cpu(), strict=True):
                    self.record.append((round, name, row.clone()))
        return value

    def _noised_local(self, total: Tensor, clients: Tensor, own: Tensor, round: int) -> Tensor:
        plan, width = self.gradients, None
        assert plan is not None
        expected = torch.from_numpy(plan.expected)[clients]
        if self.prices is not None:
            scale = torch.from_numpy(self.prices.by_account[0])[clients] * self.bound  # neighbours leave a record out
            assert self.local is not None
            noise, width = client_noise(
                LAWS[str(self.mechanism)](1.0),
                self.source,
                "noise/gradient",
                self.local.addresses(clients, own),
                plan.addresses[clients],
                total.shape[1],
                sensitivity=scale,
                bound=self.bound,
            )
            total = noised(total, noise.to(total.device), None if width is None else width.to(total.device)[:, None])
        value = total / expected[:, None].to(total.device)
        if width is not None and len(clients):
            last = GridValue(round, value[-1].cpu(), float(width[-1]), float(expected[-1]))
            with self._lock:
                self.on_grid[GRADIENT] = last
        return value

    # Recordings

    def _replayed(self, step: int, name: str) -> Tensor | None:
        if self._replay is None:
            return None
        if (step, name) not in self._replay:
            raise PrivacyError(f"The recording has no release {name!r} of step {step}.")
        return self._replay[step, name].clone()

    def _note(self, step: int, name: str, value: Tensor) -> None:
        if self.record is not None:
            self.record.append((step, name, value.clone()))

    # What it costs

    @property
    def delta(self) -> float | None:
        """Return the delta of every epsilon here, or None without noise."""
        return self.account.delta

    @property
    def epsilons(self) -> np.ndarray:
        """Return (R,) float64 epsilon of each repetition up to the current step, the largest of all clients; infinite
        without noise, 0 when nothing has been released."""
        if not self._plans and self.gradients is None:
            return np.zeros(self.replicates)
        return np.broadcast_to(self.account.epsilons().max(1, initial=0.0), self.replicates)

    @property
    def epsilon(self) -> float:
        """Return the largest of :attr:`epsilons`."""
        return float(self.epsilons.max())

    def epsilon_at(self, uses: int) -> float:
        """Return the epsilon of ``uses`` rounds (of participations of every client, where these are charged)."""
        return self.account.epsilon_at(uses) if self._plans or self.gradients is not None else 0.0

    def snr(self) -> SignalToNoise | None:
        """Return the signal to noise of the loudest release, from public quantities only; None without noise, and where
        no single figure says how loud the noise of clients that act one at a time is."""
        if self.gradients is not None:
            if self.prices is None or self.sampler is None:
                return None
            size, law = self.gradients.dimension, LAWS[str(self.mechanism)](1.0)
            std = law.std(1.0, size) * self.prices.by_account[0] / self.gradients.expected
            ratio = float(np.median(std)) * math.sqrt(size)
            return SignalToNoise(ratio * self.bound, self.bound, ratio, what="gradient")
        if not self.releases or self.noise_multiplier is None:
            return None
        loudest = max(self.releases.values(), key=lambda r: r.noise_std * math.sqrt(r.size) / r.contribution_bound)
        norm = loudest.noise_std * math.sqrt(loudest.size)
        return SignalToNoise(norm, loudest.contribution_bound, norm / loudest.contribution_bound)

    @property
    def report(self) -> PrivacyReport:
        """Return what may be said of the run so far; after :meth:`close`, of the run."""
        return channel_report(self)

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must keep of the channel: the clip norms of the last round and of the next one (2,),
        where they adapt, and the charges of repetitions, which no file holds."""
        return self.norms() or self.account.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state`."""
        if isinstance(self._adaptive, QuantileClip):
            self.set_norms(state)
        else:
            self.account.restore(state)

    def norms(self) -> dict[str, Tensor]:
        """Return the clip norms of the last round and of the next one, float64 (2,) for each release; none where they
        do not adapt."""
        if not isinstance(self._adaptive, QuantileClip):
            return {}
        norms = {name: (r.clip.bound, self._norms.get(name, r.clip.bound)) for name, r in self.releases.items()}
        return {name: torch.tensor(pair, dtype=torch.float64) for name, pair in norms.items()}

    def set_norms(self, norms: Mapping[str, Tensor]) -> None:
        """Take the clip norms of :meth:`norms`, and nothing else.

        Raises:
            ConfigError: other names than those of releases whose clip norms adapt, or values that are no norms.
        """
        own = self.norms()
        if set(norms) - set(own):
            raise ConfigError(f"clip norms of {', '.join(sorted(norms))}; accepted: {', '.join(own) or 'none'}.")
        for name, pair in norms.items():
            if pair.shape != (2,) or not bool((torch.isfinite(pair) & (pair > 0)).all()):
                raise ConfigError(f"the clip norms of {name} are {pair.tolist()}; accepted: two numbers above 0.")
            last, self._norms[name] = pair.tolist()
            self.releases[name] = self.releases[name].clipped_at(last)

    def charge_remaining(self, done: int) -> None:
        """Stop after ``done`` steps because of what was seen: everything planned is charged, see the account."""
        self.ranks.share(lambda: self.account.charge_remaining(done))

    def close(self) -> None:
        """End cleanly; idempotent."""
        self.account.close()


def _of_all(message: GradientMessage) -> bool:
    return isinstance(message, ScaledRows) and message.of_all is not None
