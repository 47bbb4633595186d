"""What is audited (how to open a channel of the run) and what is claimed (read off the event that is charged)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...errors import BudgetExhausted, PrivacyError
from ..channel import Channel, Recording
from ..opening import open_channel
from ..release import ReleasePlan
from ..samplers import BoundFixed, BoundSampler
from ..settings import ClientPrivacy

Kind = Literal["gaussian", "laplace", "knorm"]
Rows = Callable[[int, str, Tensor], tuple[Tensor, Tensor]]
"""(step, release, ranks drawn) -> rows (k, D) and the ranks whose rows they are."""

_MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that opening a channel of the run takes.

    Args:
        privacy: the run's settings.
        plans: the algorithm's releases.
        sampler: who takes part, bound to the population.
        steps: planned number of steps.
        tensors: sizes of the model's tensors in a released vector; releases of another total are one tensor.
    """

    privacy: ClientPrivacy
    plans: tuple[ReleasePlan, ...]
    sampler: BoundSampler
    steps: int
    tensors: tuple[int, ...] = ()

    @property
    def secure(self) -> bool:
        """Whether the run takes its coins from the operating system."""
        return self.privacy.source == "secure"

    @property
    def noised(self) -> bool:
        """Whether anything is released with noise."""
        return bool(self.plans) and not self.privacy.noiseless

    def seeded(self) -> Setup:
        """The same with reproducible noise, so that two channels can share it."""
        return replace(self, privacy=replace(self.privacy, source="seeded"))

    def open(
        self,
        seed: int,
        *,
        ledger: Path | None = None,
        resume: bool = False,
        replay: Recording | None = None,
        privacy: ClientPrivacy | None = None,
    ) -> Channel:
        """A channel of the run with another seed."""
        return open_channel(
            privacy or self.privacy,
            self.plans,
            self.sampler,
            seed=seed,
            steps=self.steps,
            fingerprint="audit",
            ledger_path=ledger,
            resume=resume,
            replay=replay,
        )

    def parts(self, dimension: int) -> list[tuple[int, int]]:
        """(start, stop) of every tensor in a vector of ``dimension`` numbers."""
        sizes = self.tensors if sum(self.tensors) == dimension else (dimension,)
        stops = np.cumsum(sizes).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def zeros(self, dimension: int, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Zero rows of the cohort, or of a part of it where these would be very many numbers."""
        count = min(len(ranks), max(1, _MOST_ELEMENTS // dimension))
        return torch.zeros(1, dimension).expand(count, -1), ranks[:count]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the event charged for one release says, apart from the arithmetic of the channel.

    Attributes:
        kind: law of the noise.
        multiplier: scale of the noise over the sensitivity.
        bound: C, the clip norm in the settings.
        relation: ``"replace"`` for cohorts of a fixed size, whose neighbours differ by a replaced client.
        norm: of the sensitivity that this law needs.
        denominator: m, the public constant.
        sampled: probability of a Poisson-sampled event, else None.
        event: of one whole step.
        accountant: that composes it.
        per_participation: a client is charged for the steps it took part in.
    """

    kind: Kind
    multiplier: float
    bound: float
    relation: Literal["add_remove", "replace"]
    norm: Literal["l1", "l2"]
    denominator: float
    sampled: float | None
    event: Any
    accountant: Any
    per_participation: bool

    @property
    def sensitivity(self) -> float:
        """S, from the clip norm and the relation."""
        return self.bound * (2.0 if self.relation == "replace" else 1.0)

    @property
    def scale(self) -> float:
        """Scale of the noise on the released mean: the standard deviation, for the Gaussian."""
        return self.multiplier * self.sensitivity / self.denominator


def step_event_of(channel: Channel) -> Any:
    """The event and the accountant that the channel's account charges for one step; None without noise."""
    cost = channel.account.cost
    return None if cost is None else cost.events[0]


def claims_of(setup: Setup, channel: Channel) -> dict[str, Claim]:
    """The claim on every release, by name.

    Raises:
        PrivacyError: an event that the audit cannot read.
    """
    charged = step_event_of(channel)
    if charged is None:
        return {}
    inner, sampled = charged.event, None
    kind = type(inner).__name__
    if kind == "PoissonSampledDpEvent":
        inner, sampled = inner.event, float(inner.sampling_probability)
    elif kind == "SampledWithoutReplacementDpEvent":
        inner = inner.event
    read = [_law(event) for event in _parts(inner, len(setup.plans))]
    return {
        plan.name: Claim(
            kind=law,
            multiplier=multiplier,
            bound=setup.privacy.initial_norm,
            relation="replace" if isinstance(setup.sampler, BoundFixed) else "add_remove",
            norm="l1" if law == "laplace" else "l2",
            denominator=_expected_cohort(setup.sampler),
            sampled=sampled,
            event=charged.event,
            accountant=charged.accountant,
            per_participation=channel.account.per_participation,
        )
        for plan, (law, multiplier) in zip(setup.plans, read, strict=True)
    }


def clip_claims(setup: Setup) -> dict[str, Claim]:
    """Of releases that are clipped and not noised: the bound on a client, and no event."""
    relation: Literal["add_remove", "replace"] = "replace" if isinstance(setup.sampler, BoundFixed) else "add_remove"
    return {
        plan.name: Claim(
            kind="gaussian",
            multiplier=0.0,
            bound=setup.privacy.initial_norm,
            relation=relation,
            norm="l2",
            denominator=_expected_cohort(setup.sampler),
            sampled=None,
            event=None,
            accountant=None,
            per_participation=False,
        )
        for plan in setup.plans
    }


def _parts(event: Any, releases: int) -> list[Any]:
    """The events of the releases of one step; equal shares of a joint Gaussian event."""
    from dp_accounting import dp_event

    if isinstance(event, dp_event.ComposedDpEvent):
        return list(event.events)
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return [event.event] * event.count
    if isinstance(event, dp_event.GaussianDpEvent) and releases > 1:
        return [dp_event.GaussianDpEvent(event.noise_multiplier * math.sqrt(releases))] * releases
    return [event]


def _law(event: Any) -> tuple[Kind, float]:
    name = type(event).__name__
    if name == "GaussianDpEvent":
        return "gaussian", float(event.noise_multiplier)
    if name == "LaplaceDpEvent":
        return "laplace", float(event.noise_multiplier)
    if name == "KNormDpEvent":
        return "knorm", 1 / float(event.epsilon)
    raise PrivacyError(f"The audit cannot read the event {event}; it knows Gaussian, Laplace and K-norm noise.")


def _expected_cohort(sampler: BoundSampler) -> float:
    cohort = getattr(sampler, "cohort", None)
    return float(sampler.n if cohort is None else cohort)


def play(channel: Channel, rows: Rows, *, start: int, stop: int) -> Iterator[tuple[int, Tensor, dict[str, np.ndarray]]]:
    """Steps through the production path (draw, begin, release every plan) until the budget ends.

    Yields:
        step, the ranks drawn, and the released values by name, float64 (D,).
    """
    for step in range(start, stop):
        try:
            ranks = channel.draw(step)
            channel.begin(step, ranks)
        except BudgetExhausted:
            return
        values = {}
        for name in channel._plans:
            sent, owners = rows(step, name, ranks)
            values[name] = channel.release(name, sent, owners).numpy()
        yield step, ranks, values


def silence(setup: Setup) -> Rows:
    """Rows of clients that contribute nothing: zeros, and in every other step nobody answers."""
    dimensions = {plan.name: plan.dimension for plan in setup.plans}

    def rows(step: int, name: str, ranks: Tensor) -> tuple[Tensor, Tensor]:
        return setup.zeros(dimensions[name], ranks if step % 2 == 0 else ranks[:0])

    return rows


def released(channel: Channel, setup: Setup, *, start: int, stop: int) -> dict[str, np.ndarray]:
    """Releases of clients that contribute nothing: {name: (T, D) float64}."""
    kept: dict[str, list[np.ndarray]] = {plan.name: [] for plan in setup.plans}
    for _, _, values in play(channel, silence(setup), start=start, stop=stop):
        for name, value in values.items():
            kept[name].append(value)
    sizes = {plan.name: plan.dimension for plan in setup.plans}
    return {name: np.stack(rows) if rows else np.zeros((0, sizes[name])) for name, rows in kept.items()}
