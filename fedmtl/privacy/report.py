"""The privacy report of a run, and the signal-to-noise ratio of its releases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from .._rounding import grouped, rounded_down, rounded_up

if TYPE_CHECKING:
    from .ledger import Ledger

SIMULATED = (
    "a simulation: the noise is made from a stored seed, so these outputs are not private; "
    "the same run with privacy.source=secure has the epsilon below"
)
OUTSIDE = (
    "public inputs (model, starting point, hyper-parameters, who the clients are)",
    "the choice of hyper-parameters, if they were tuned on these data",
    "metrics on private data printed during the run (private/ folder)",
)
SECURE_OUTSIDE = (
    "a second copy of this run's folder that is resumed as well: each of them releases under the "
    "charges of both",
)
EXACT_OUTSIDE = ("how long the noise of a release took to draw, which depends on it",)
ROUNDED_OUTSIDE = (
    "the precision of the noise: it is computed in float64 and then rounded to the public grid, "
    "and what its law loses by that is not accounted for",
)
_WIDTH = 110  # of a printed block
EXACT = "sums and noise in whole numbers of a public power of two, exact in law"
AUTOMATIC = ", to which every gradient is scaled"
SERVER_AND_CLIENTS = "server and clients"
SHARED = "shares of clients in whole numbers of a public power of two, exact in law"
SHARED_OUTSIDE = (
    "that a client took part, and when, which the server knows",
    "attacks on the keys and ciphers of the secure sum",
    "more clients that collude with the server, or are lost, than the settings say",
)
ON_GRID = "float64 on a public power-of-two grid"
RECORDS_OUTSIDE = (
    "the number of records of each client and who takes part when, which are public",
)


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """The privacy report of a run: its epsilon, and all facts on which that depends.

    Attributes:
        unit, relation, observer: the protected unit, the difference of neighbours, the observer.
        epsilon, delta: spent so far; epsilon is infinite without noise and 0 when nothing was
            released. If every client has an account of its own, epsilon is the largest.
        claimed: the figure of a published accounting that does not hold; None elsewhere.
        refuted: the reason why it does not hold (epsilon is then infinite), or None.
        by_client: smallest, median and largest epsilon of the clients' own accounts, or None.
        budget: the epsilon that ends the run (the largest of the clients' own), or None.
        clip_norm, noise_multiplier, noise_std: C; noise scale over sensitivity; standard deviation
            of one coordinate of a released mean. A range of multipliers is written as its largest.
        clipping: the bounded norm, and the rule by which C adapts, in words.
        mechanism: the law of the noise.
        sampler: the cohort's law, in words.
        records: the law of the records drawn by a client, in words; None if the unit is a
            client.
        server: the guarantee of clients' own noise on their rows against the server, or the sums
            that a secure sum shows it, in words; None if it is trusted.
        releases: number of releases charged; ``names`` of the vectors.
        accountant, source, numerics: the computation of the figure and of the noise.
        ledger: the file of the charges.
        run: identity of the run, the hash of its ledger's first line; None if no file is kept.
        ledger_lines, ledger_head: number of lines of the ledger and hash of the last one, when the
            run ended.
        remaining_charged: True if the run stopped early and is charged for all its planned steps.
        interval: the measurements of an attack on canaries in this run, see
            :func:`fedmtl.audit.Interval.certificate`; None if there were none.
        search: of a private search, whose figures these are: its ``candidates``, ``mean`` and
            ``shape`` (``"inf"`` for Poisson) of the law of the number of repetitions, the ``score``
            that was compared, in words, and the standard deviation of its noise, ``score_noise``;
            None elsewhere.
        beside: a claim beside epsilon against a weaker adversary, in words; None elsewhere.
        elsewhere: the keeper of the accounts, if this is the report of a server that keeps
            none; else None.
        outside: the parts that epsilon does not cover.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation
        >>> from fedmtl.privacy import ReleasePlan, open_channel, privacy_report
        >>> privacy = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)
        >>> plan = ReleasePlan(name="update", dimension=3)
        >>> channel = open_channel(privacy, [plan], FullParticipation().bind(10), seed=0, steps=2)
        >>> privacy_report(channel).to_dict()["relation"]
        'add_remove'
    """

    unit: str
    relation: str
    observer: str
    epsilon: float
    delta: float | None
    claimed: float | None = None
    refuted: str | None = None
    by_client: tuple[float, float, float] | None = None
    budget: float | None
    clip_norm: float | None
    noise_multiplier: float | None
    noise_std: float | None
    clipping: str = "L2 norm"
    mechanism: str = "gaussian"
    sampler: str
    records: str | None = None
    server: str | None = None
    names: tuple[str, ...]
    releases: int
    accountant: str
    source: str
    numerics: str
    ledger: str
    run: str | None = None
    ledger_lines: int | None = None
    ledger_head: str | None = None
    remaining_charged: bool = False
    interval: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    beside: str | None = None
    elsewhere: str | None = None
    outside: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready fields, the headline first; an infinite epsilon or budget is the
        string ``"inf"``."""
        values = {"headline": self.headline, **asdict(self)}
        for name in ("beside", "elsewhere", "interval", "search"):
            if values[name] is None:
                del values[name]
        for key, value in values.items():
            if isinstance(value, tuple):
                values[key] = list(value)
            elif value == math.inf:
                values[key] = "inf"
        return values

    def with_ledger(self, ledger: Ledger | None) -> PrivacyReport:
        """Returns this report with the identity of the run and the end of its ledger.

        Args:
            ledger: as it is now; None leaves the report as it is.
        """
        if ledger is None or ledger.head is None:
            return self
        return replace(
            self, run=ledger.run, ledger_lines=ledger.head.lines, ledger_head=ledger.head.digest
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyReport:
        """Returns the report that :meth:`to_dict` wrote.

        Args:
            values: as a ``privacy.json`` has them; keys of further figures are left out.

        Raises:
            ValueError, TypeError: values that are no report.
        """
        kinds = {each.name: str(each.type) for each in fields(cls)}
        result = {name: value for name, value in values.items() if name in kinds}
        for name, value in result.items():
            if "float" in kinds[name] and "tuple" not in kinds[name] and value is not None:
                result[name] = float(value)
            elif isinstance(value, list):
                result[name] = tuple(value)
        return cls(**result)

    @property
    def private(self) -> bool:
        """Returns True if there are settings of privacy, which have a clip norm."""
        return self.clip_norm is not None

    @property
    def _standing(self) -> tuple[str, str, str]:
        """Returns the headline, the verdict on publishing the releases, and the trusted parties, in
        words."""
        refused = "not private: epsilon = inf"
        kept = "not private, to be kept like private/"
        everybody = "everybody: no finite epsilon holds"
        if not self.names:
            nothing = "nothing is released"
            return f"{nothing}: epsilon = 0", nothing, "no observer: nothing leaves a client"
        if not self.private:
            return f"{refused}, no clip, no noise", kept, everybody
        if self.elsewhere is not None:
            published = "protected by the noise of the nodes, as far as their own certificates say"
            trusted = f"every node with its own noise and account: {self.elsewhere}"
            return f"no account here: {self.elsewhere}", published, trusted
        if self.noise_multiplier is None:
            return f"{refused}, clip only, no noise", kept, everybody
        if self.refuted is not None:
            return f"{refused}, the published accounting does not hold", kept, everybody
        trusted = "the server, which adds up what clients send before there is noise"
        if self.unit == "record":
            trusted = "no observer: every client adds its noise before anything leaves it"
        elif self.observer == SERVER_AND_CLIENTS:
            trusted = f"no server, which sees noised sums only: {self.server}"
        elif self.server is not None:
            trusted = f"the server for this figure; against the server itself: {self.server}"
        if self.source == "seeded":
            return (
                SIMULATED,
                "a simulation, not private; to publish, run with privacy.source=secure",
                trusted,
            )
        epsilon = f"epsilon = {rounded_up(self.epsilon)}"
        at = f"private: {epsilon} at delta = {rounded_up(self.delta or 0.0, 3)}"
        return at, f"may be published, at {epsilon}", trusted

    @property
    def headline(self) -> str:
        """Returns the first line of the printed block."""
        return self._standing[0]

    @property
    def publication(self) -> str:
        """Returns the sentence on whether the releases may be published, as every page prints
        it."""
        return self._standing[1]

    @property
    def trusted(self) -> str:
        """Returns the parties that must be trusted if the figure is to hold, in words."""
        return self._standing[2]

    def rows(self) -> list[tuple[str, str]]:
        """Returns the lines of the printed block under its headline, a name and a text each.

        There are none without privacy, except ``outside`` if nothing is released.
        """
        outside = ("outside", "; ".join(self.outside))
        if not self.private:
            if self.outside and not self.names:
                return [outside]
            return []
        return [*self._figures(), *self._conditions(), outside]

    def _figures(self) -> list[tuple[str, str]]:
        """Returns the lines on epsilon, and on other figures beside it."""
        at = ""
        if self.delta is not None:
            at = f" at delta = {rounded_up(self.delta, 3)}"
        # A server that keeps no accounts has no figure of its own.
        rows = [("epsilon", self.elsewhere or f"{rounded_up(self.epsilon)}{at}")]
        if self.search is not None:
            rows += searched_rows(self.search)
        if self.interval is not None:
            rows += measured_rows(self.interval)
        if self.by_client is not None:
            low, middle, high = map(rounded_up, self.by_client)
            rows.append(("by client", f"smallest {low}, median {middle}, largest {high}"))
        if self.beside is not None:
            rows.append(("beside", self.beside))
        if self.claimed is not None:
            rows.append(("claimed", f"{rounded_up(self.claimed)}{at}, by the published accounting"))
        if self.remaining_charged:
            early = "early, because of what was released: charged as all the planned rounds"
            rows.append(("stopped", early))
        if self.refuted is not None:
            rows.append(("refuted", self.refuted))
        return rows

    def _conditions(self) -> list[tuple[str, str]]:
        """Returns the lines on the assumptions of epsilon."""
        noise = "none"
        if self.noise_multiplier is not None:
            noise = f"{self.mechanism}, multiplier {self.noise_multiplier:.5g}"
        budget = "none"
        if self.budget is not None:
            budget = rounded_up(self.budget, 6)
        if self.elsewhere is not None:
            noise = f"{self.mechanism}, of each node's own"
            budget = "each node's own"
        records = []
        if self.records is not None:
            records.append(("records", grouped(self.records)))
        server = []
        if self.server is not None:
            server.append(("server", self.server))
        return [
            ("budget", budget),
            ("protects", f"unit {self.unit}, relation {self.relation}, observer {self.observer}"),
            ("clients", grouped(self.sampler)),
            *records,
            ("releases", f"{self.releases:,} ({', '.join(self.names) or 'nothing is released'})"),
            ("clip norm", f"{self.clip_norm:g} ({self.clipping})"),
            ("noise", noise),
            *server,
            ("accountant", self.accountant),
            ("noise source", f"{self.source}, {self.numerics}"),
            ("ledger", self.ledger),
        ]

    def text(self) -> str:
        """Returns one printed block."""
        lines = [self.headline]
        for label, text in self.rows():
            lines += wrap(text, _WIDTH, initial_indent=f"  {label:<13}", subsequent_indent=15 * " ")
        return "\n".join(lines)


def searched_rows(search: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the lines of a report on a private search."""
    poisson = search["shape"] == "inf"
    candidates = search["candidates"]
    law = "Poisson"
    if not poisson:
        law = f"truncated negative binomial, shape {search['shape']:g}"
    secret = "number of repetitions: secret, and which of them won"
    return [
        (
            "search",
            f"the best of a random number of runs; {law}, mean {search['mean']:g}; {secret}",
        ),
        ("candidates", f"{len(candidates)}, drawn uniformly: {'; '.join(candidates)}"),
        ("score", f"{search['score']}, noise of standard deviation {search['score_noise']:g}"),
    ]


def measured_rows(interval: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the lines of a report on a certificate of
    :func:`fedmtl.audit.Interval.certificate`."""
    share = f"{100 * interval['confidence']:.4g}%"
    claimed = rounded_up(interval["claimed"])
    least = rounded_down(interval["measured"])
    rows = [("measured", f"epsilon {claimed} claimed, at least {least} measured ({share})")]
    for one in interval["observers"]:
        bounds = []
        for bound in one["bounds"]:
            kind = "any"
            if bound["independent"]:
                kind = "independent"
            guesses = f"{bound['right']:,} of {bound['made']:,} guesses right"
            bounds.append(
                f"at least {rounded_down(bound['epsilon'])} for {kind} canaries ({guesses})"
            )
        rows.append((one["observer"], f"{', '.join(bounds)}; {one['attack']}"))
    if interval.get("dependence") is not None:
        rows.append(("independent", f"no bound for independent canaries: {interval['dependence']}"))
    count = (
        f"{interval['canaries']:,} canary {interval['unit']}s took part, as long as the clip allows"
    )
    return [*rows, ("canaries", f"{count}, each in or out by a coin")]


@dataclass(frozen=True)
class SignalToNoise:
    """The signal-to-noise ratio of a release, from public quantities only.

    Attributes:
        noise_norm: expected L2 norm of the noise on a released mean, about std sqrt(D), the loudest
            release of a step.
        clip_norm: C, the most that the mean of a full cohort can amount to.
        kind: the kind of release.
        first: True if both are those of the first step, since the clip adapts, and the noise with
            it.

    Example:
        >>> from fedmtl.privacy import SignalToNoise
        >>> SignalToNoise(noise_norm=0.5, clip_norm=2.0).ratio
        0.25
    """

    noise_norm: float
    clip_norm: float
    kind: str = "mean"
    first: bool = False

    @property
    def ratio(self) -> float:
        """Returns the noise over the most of the mean."""
        return self.noise_norm / self.clip_norm

    @property
    def warning(self) -> str | None:
        """Returns advice when the noise norm exceeds 10 times the clip norm, else None."""
        if self.ratio <= 10:
            return None
        return (
            f"{self.text()}: little will be learned. Use a larger cohort, fewer rounds, a smaller "
            "model or a larger epsilon."
        )

    def text(self) -> str:
        """Returns one line."""
        return (
            f"the noise on a released {self.kind} has norm {self.noise_norm:.3g}, {self.ratio:.3g} "
            f"times the clip norm {self.clip_norm:g}{' of the first round' * self.first}"
        )
