"""Opening a channel: refuse settings that cannot be accounted, calibrate the noise, open the
ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .._check import positive_int
from .._files import Json
from ..errors import ConfigError, PrivacyError
from ..ranks import SINGLE, Ranks
from .account_costs import StoredNoise
from .accountant import PrivacyAccountant
from .activation_channel import ActivationChannel
from .calibration import Calibration
from .client_calibration import calibrate_clients, check_row_plans
from .gradients import GradientPlan
from .ledger import Ledger, read_header
from .noise.sources import NoiseSource, SecureSource, SeededSource
from .ranked import RankedRounds
from .record_calibration import calibrate_records
from .release import ReleasePlan
from .replicates import ReplicatedRounds, check_replicates, settings_of
from .round_channel import RoundChannel
from .samplers import BoundSampler
from .settings import ClientPrivacy, Privacy, RecordPrivacy

Plan = ReleasePlan | GradientPlan


def open_channel(
    privacy: Privacy | Sequence[Privacy] | None,
    plans: Sequence[Plan],
    schedule: BoundSampler | str,
    *,
    seed: int,
    steps: int = 1,
    source: NoiseSource | None = None,
    fingerprint: str = "",
    ledger_path: Path | None = None,
    resume: bool = False,
    notes: tuple[str, ...] = (),
    replicates: int = 1,
    ranks: Ranks = SINGLE,
    order: Tensor | None = None,
    channel_class: type[RoundChannel | ActivationChannel] | None = None,
) -> RoundChannel | ActivationChannel:
    """Opens the channel of one run, or of R replicates of it.

    The noise is calibrated to the budget, and the ledger opened, before any data are read.

    Args:
        privacy: settings, or None for neither clip nor noise. For replicates also a sequence of R
            settings that differ only in epsilon or noise_multiplier, one for each.
        plans: the algorithm's releases. Rows of clients are released in every step; a
            :class:`GradientPlan` is needed by :class:`RecordPrivacy`, and wherever clients act one
            at a time. Empty for algorithms that release nothing.
        schedule: a sampler bound to the population, or one phrase on the public schedule of clients
            that act one at a time.
        seed: of seeded noise and cohorts; unused by ``source="secure"``.
        steps: number of rounds that the noise is calibrated for; activations have caps by client.
        source: of the noise and cohorts, in place of the one that ``privacy.source`` and ``seed``
            give; of the same kind. Not for replicates.
        fingerprint: of data, configuration and execution; a seeded resume needs the same one.
        ledger_path: JSON-lines file, or None to keep charges in memory. Nothing is written if
            nothing is charged.
        resume: continue the ledger at ``ledger_path``; its noise multiplier is used as it stands.
        notes: the parts of the data's preparation that no epsilon covers; for the report.
        replicates: R replicates, each with its own noise, released at once: simulations in memory.
            In rounds, everybody takes part in every step. An epsilon is that of one of them.
        ranks: the processes that compute the run; the first one calibrates the noise and keeps the
            ledger.
        order: int64 (n,), the clients in the order by which the sampler of rounds numbers them;
            None: their positions.
        channel_class: a subclass of these two, such as one with canaries or one that records its
            releases; None for these themselves.

    Returns:
        :class:`~fedmtl.privacy.RoundChannel`, or :class:`~fedmtl.privacy.ActivationChannel` if
        clients act one at a time.

    Raises:
        ConfigError: a budget that cannot be met, replicates of a private, kept or sampled run, or a
            ``channel_class`` beside replicates in rounds or several ranks.
        PrivacyError: a combination that no accountant supports.
        ResumeError: the ledger belongs to another run, is in use or damaged, or exists without
            ``resume``.

    Example:
        >>> import torch
        >>> from fedmtl import ClientPrivacy, FullParticipation
        >>> from fedmtl.privacy import ReleasePlan, open_channel
        >>> privacy = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)
        >>> plan = ReleasePlan(name="update", dimension=3)
        >>> channel = open_channel(privacy, [plan], FullParticipation().bind(10), seed=0, steps=2)
        >>> for step in range(2):
        ...     channel.begin(step, channel.draw(step))  # charged from here on
        ...     mean = channel.release("update", torch.ones(10, 3), torch.arange(10))
        >>> mean.shape, round(channel.epsilon, 2)
        (torch.Size([3]), 8.0)
    """
    positive_int("open_channel", replicates=replicates)
    rows = tuple(plan for plan in plans if isinstance(plan, ReleasePlan))
    gradients = _one_gradient_plan(plans)
    settings = settings_of(privacy, replicates)
    sources = _sources(settings, seed, replicates, source, ledger_path)
    sampler = None
    if isinstance(schedule, BoundSampler):
        sampler = schedule
        _check_rounds(settings, rows, sampler, steps, replicates, order)
        # Settings of records need a gradient, which a run that releases nothing does not have.
        if not plans:
            settings = tuple(each for each in settings if isinstance(each, ClientPrivacy))
    setup = _ChannelSetup(
        settings=settings,
        rows=rows,
        gradients=gradients,
        schedule=schedule,
        sampler=sampler,
        steps=steps,
        sources=sources,
        fingerprint=fingerprint,
        resume=resume,
        notes=notes,
        order=order,
        channel_class=channel_class,
        ranks=ranks,
    )
    in_rounds = sampler is not None
    if channel_class is not None and issubclass(channel_class, RoundChannel) != in_rounds:
        raise ConfigError(
            f"{channel_class.__name__} is not the channel of this schedule; rounds need a subclass "
            "of RoundChannel, and clients that act one at a time one of ActivationChannel."
        )
    if channel_class is not None and (ranks.size > 1 or (in_rounds and replicates > 1)):
        raise ConfigError(
            f"A channel of the class {channel_class.__name__} is that of one run in one process; "
            "leave channel_class out with replicates or with several ranks."
        )
    if ranks.size > 1:
        return _opened_at_ranks(setup, ledger_path)
    return setup.channel(_stored_noise(ledger_path, resume), ledger_path)


def _one_gradient_plan(plans: Sequence[Plan]) -> GradientPlan | None:
    """Returns the release of gradients of single records; None without one."""
    several = [plan for plan in plans if isinstance(plan, GradientPlan)]
    if len(several) > 1:
        raise PrivacyError(
            f"There are {len(several)} GradientPlans; a run has one, of all its clients."
        )
    return next(iter(several), None)


def _opened_at_ranks(setup: _ChannelSetup, path: Path | None) -> RoundChannel | ActivationChannel:
    """Returns the channel of this rank. The first one calibrates and keeps the ledger; the others
    read its header, as a resumed run does."""
    first: list[RoundChannel | ActivationChannel] = []

    def open_first() -> dict[str, Json]:
        first.append(setup.channel(_stored_noise(path, setup.resume), path))
        ledger = first[0].accountant.ledger
        if ledger is None:
            return {}
        return dict(json.loads(json.dumps(ledger.header)))

    header = setup.ranks.share(open_first)
    if setup.ranks.first:
        return first[0]
    return setup.channel(StoredNoise(header), None)


@dataclass(frozen=True, kw_only=True)
class _ChannelSetup:
    """The arguments of :func:`open_channel` after their checks: one channel is opened from them at
    every rank.

    Attributes:
        settings: the privacy of all replicates, or of each; empty without privacy.
        rows: releases of rows of clients.
        gradients: the release of gradients of single records; None without one.
        schedule: a bound sampler, or a phrase on clients that act one at a time.
        sampler: the schedule if it is a sampler, otherwise None.
        sources: of the noise and cohorts, one for each replicate.
        steps, fingerprint, resume, notes, order, channel_class, ranks: see :func:`open_channel`.
    """

    settings: tuple[Privacy, ...]
    rows: tuple[ReleasePlan, ...]
    gradients: GradientPlan | None
    schedule: BoundSampler | str
    sampler: BoundSampler | None
    steps: int
    sources: tuple[NoiseSource, ...]
    fingerprint: str
    resume: bool
    notes: tuple[str, ...]
    order: Tensor | None
    channel_class: type[RoundChannel | ActivationChannel] | None
    ranks: Ranks

    def channel(self, prior: StoredNoise, path: Path | None) -> RoundChannel | ActivationChannel:
        """Calibrates the noise, opens the ledger and returns the channel.

        Args:
            prior: the noise of the run that is resumed.
            path: file of the ledger; None keeps charges in memory.
        """
        calibration = self._calibration(prior)
        outside = self.notes
        if calibration.gradients is not None:
            outside = (*outside, *calibration.gradients.notes)
        if self.sampler is not None:
            clients = self.sampler.n
        else:
            # clients that act one at a time release nothing else
            assert calibration.gradients is not None
            clients = len(calibration.gradients.ids)
        ledger = self._ledger(calibration, clients, outside, path)
        account = PrivacyAccountant(
            clients,
            steps=self.steps,
            costs=calibration.costs,
            budget=self._budget(),
            caps=calibration.caps,
            ledger=ledger,
            replicates=len(self.sources),
        )
        if self.sampler is None:
            return self._activations(calibration, account, outside, _ledger_name(ledger, path))
        return self._rounds(calibration, account, outside, _ledger_name(ledger, path))

    def _activations(
        self,
        calibration: Calibration,
        account: PrivacyAccountant,
        outside: tuple[str, ...],
        ledger_name: str,
    ) -> ActivationChannel:
        """Returns the channel of clients that act one at a time."""
        channel_class = self.channel_class or ActivationChannel
        assert issubclass(channel_class, ActivationChannel)
        return channel_class(
            calibration,
            account,
            self.sources,
            schedule=str(self.schedule),
            ledger_name=ledger_name,
            notes=outside,
        )

    def _rounds(
        self,
        calibration: Calibration,
        account: PrivacyAccountant,
        outside: tuple[str, ...],
        ledger_name: str,
    ) -> RoundChannel:
        """Returns the channel of rounds: of one process, of this rank, or of replicates."""
        channel_class: Callable[..., RoundChannel] = RoundChannel
        if self.channel_class is not None:
            assert issubclass(self.channel_class, RoundChannel)
            channel_class = self.channel_class
        elif self.ranks.size > 1:
            channel_class = partial(RankedRounds, ranks=self.ranks)
        elif len(self.sources) > 1:
            channel_class = ReplicatedRounds
        return channel_class(
            calibration,
            account,
            self.sources,
            order=self.order,
            ledger_name=ledger_name,
            notes=outside,
        )

    def _calibration(self, prior: StoredNoise) -> Calibration:
        """Calibrates releases of rows if the unit is a client, otherwise those of gradients of
        records."""
        of_records = any(isinstance(each, RecordPrivacy) for each in self.settings)
        if self.sampler is None or of_records:
            return calibrate_records(
                self.settings,
                self.rows,
                self.gradients,
                self.sampler,
                self.steps,
                self.sources,
                prior,
            )
        return calibrate_clients(
            self.settings, self.rows, self.sampler, self.steps, self.sources, prior
        )

    def _budget(self) -> float | None:
        """Returns the budget that ends a run; None with replicates, or noise of each client."""
        if len(self.sources) > 1 or not self.settings:
            return None
        privacy = self.settings[0]
        if isinstance(privacy, RecordPrivacy) and privacy.aggregation is None:
            return None
        assert not isinstance(privacy.epsilon, Mapping)
        return privacy.epsilon

    def _ledger(
        self, calibration: Calibration, clients: int, outside: tuple[str, ...], path: Path | None
    ) -> Ledger | None:
        """Returns the open ledger; None if nothing is charged, and for replicates with accounts by
        client, which are simulations."""
        header = calibration.header
        if header is None:
            return None
        # Replicates are simulations, and a file could hold the accounts of only one.
        if calibration.caps is not None and len(self.sources) > 1:
            return None
        header["outside"] = list(outside)
        header.setdefault("sampler", str(self.schedule))  # of clients that act one at a time
        # a round is the same release again only if its cohort and its noise are
        repeatable = self.sampler is None or self.sampler.repeatable
        charged: int | None = clients
        if calibration.caps is None:
            charged = None  # everybody is charged for every step
        return Ledger(
            path,
            header,
            fingerprint=self.fingerprint,
            replays_free=repeatable and self.sources[0].name == "seeded",
            clients=charged,
            resume=self.resume,
        )


def _ledger_name(ledger: Ledger | None, path: Path | None) -> str:
    """Returns the name of the ledger in a report."""
    if ledger is None:
        return "none"
    if path is None:
        return "in memory only: a crash forgets what was spent"
    return path.name


def _check_rounds(
    settings: tuple[Privacy, ...],
    rows: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    steps: int,
    replicates: int,
    order: Tensor | None,
) -> None:
    """Refuses releases, replicates and an order of clients that rounds cannot have."""
    check_row_plans(rows, steps)
    if order is not None and not torch.equal(order.sort().values, torch.arange(sampler.n)):
        raise ConfigError(
            f"order must have each of 0 to {sampler.n - 1} once, a number for each client."
        )
    if replicates > 1:
        check_replicates(settings, sampler)


def _stored_noise(path: Path | None, resume: bool) -> StoredNoise:
    """Returns the noise of the run that is resumed."""
    if resume and path is not None:
        return StoredNoise(read_header(path) or {})
    return StoredNoise()


def _sources(
    settings: tuple[Privacy, ...],
    seed: int,
    replicates: int,
    source: NoiseSource | None,
    path: Path | None,
) -> tuple[NoiseSource, ...]:
    """Returns the source of each replicate's noise and cohorts."""
    secure = any(each.source == "secure" for each in settings)
    kind = "seeded"
    if secure:
        kind = "secure"
    if replicates > 1 and (secure or path is not None):
        raise ConfigError(
            f"{replicates} replicates are a simulation: they need source='seeded' and no folder."
        )
    if replicates > 1 and source is not None:
        raise ConfigError(f"{replicates} replicates have noise of their own; leave source out.")
    if source is not None:
        if source.name != kind:
            raise PrivacyError(
                f"The source of the noise is {source.name}, but the settings ask for another one."
            )
        return (source,)
    if secure:
        return (SecureSource(),)
    return tuple(SeededSource(seed, replicate) for replicate in range(replicates))
