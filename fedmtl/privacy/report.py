"""What a run may say about its privacy, and how loud the noise is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

SIMULATED = (
    "simulated: the seed is stored with the run, so these outputs are not private; "
    "epsilon is that of the same run with noise=secure"
)
OUTSIDE = (
    "public inputs (model, starting point, hyper-parameters, number of clients)",
    "the choice of hyper-parameters, if they were tuned on these data",
    "metrics on private data printed while the run goes on (private/ folder)",
)


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """Everything an epsilon depends on.

    Attributes:
        unit, relation, observer: what is protected, how neighbours differ, from whom.
        epsilon, delta: spent so far; epsilon is infinite without noise and 0 when nothing was released.
        budget: the epsilon that ends the run, or None.
        clip_norm, noise_multiplier, noise_std: C; standard deviation over sensitivity; standard deviation of
            one coordinate of a released mean.
        sampler: the cohort's law, in words.
        releases: number of releases charged; ``names`` of the vectors.
        accountant, source, numerics, guarantee: how the figure and the noise were computed.
        ledger: where the charges are kept.
        outside: what the epsilon does not cover.
    """

    private: bool
    unit: str
    relation: str
    observer: str
    epsilon: float
    delta: float | None
    budget: float | None
    clip_norm: float | None
    noise_multiplier: float | None
    noise_std: float | None
    sampler: str
    names: tuple[str, ...]
    releases: int
    accountant: str
    source: str
    numerics: str
    guarantee: str
    ledger: str
    outside: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields, the headline first; an infinite epsilon or budget is the string ``"inf"``."""
        fields = {"headline": self.headline, **asdict(self)}
        del fields["private"]  # the headline says it better
        fields["names"], fields["outside"] = list(self.names), list(self.outside)
        return {key: "inf" if value == math.inf else value for key, value in fields.items()}

    @property
    def headline(self) -> str:
        """The first line of the printed block."""
        if not self.names:
            return "nothing is released: epsilon = 0"
        if not self.private:
            return "not private: epsilon = inf, no clip, no noise"
        if self.noise_multiplier is None:
            return "not private: epsilon = inf, clip only, no noise"
        if self.source == "seeded":
            return SIMULATED
        return f"private: epsilon = {self.epsilon:.4g} at delta = {self.delta:.3g}"

    def text(self) -> str:
        """One printed block."""
        if not self.private:
            return self.headline
        at = "" if self.delta is None else f" at delta = {self.delta:.3g}"
        rows = [
            ("epsilon", f"{self.epsilon:.4g}{at}"),
            ("budget", "none" if self.budget is None else f"{self.budget:g}"),
            ("protects", f"unit {self.unit}, relation {self.relation}, observer {self.observer}"),
            ("clients", self.sampler),
            ("releases", f"{self.releases} ({', '.join(self.names) or 'nothing is released'})"),
            ("clip norm", f"{self.clip_norm:g}"),
            ("noise", "none" if self.noise_multiplier is None else f"multiplier {self.noise_multiplier:.5g}"),
            ("accountant", f"{self.accountant}, guarantee {self.guarantee}"),
            ("noise source", f"{self.source}, {self.numerics}"),
            ("ledger", self.ledger),
            ("outside", "; ".join(self.outside)),
        ]
        return "\n".join([self.headline, *(f"  {label:<13}{text}" for label, text in rows)])


@dataclass(frozen=True)
class SignalToNoise:
    """How loud the noise is, from public quantities only.

    Attributes:
        noise_norm: expected L2 norm of the noise on a released mean, about std sqrt(D), the loudest release
            of a step.
        clip_norm: C, the most that the mean of a full cohort can amount to.
        ratio: ``noise_norm / clip_norm``.
    """

    noise_norm: float
    clip_norm: float
    ratio: float

    @property
    def warning(self) -> str | None:
        """Advice when the noise norm exceeds 10 times the clip norm, else None."""
        if self.ratio <= 10:
            return None
        return (
            f"{self.text()}: little will be learned. Use a larger cohort, fewer rounds, a smaller model or "
            f"a larger epsilon."
        )

    def text(self) -> str:
        """One line."""
        return (
            f"the noise on a released mean has norm {self.noise_norm:.3g}, "
            f"{self.ratio:.3g} times the clip norm {self.clip_norm:g}"
        )
