"""The interval of epsilon: a run with canaries, and its certificate, what was claimed beside what was measured.

    Trainer(..., audit=Interval(canaries=200)).fit().privacy.interval["measured"]

The canaries (:mod:`fedmtl.privacy.audit.canaries`) take part in the run; its models have met them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._check import Count, Fraction, check_fields
from ..errors import ConfigError
from ..privacy import ClientPrivacy, Price, QuantileClip, Rounds

if TYPE_CHECKING:
    from .trainer import Trainer

RELEASES, MODEL = "all releases", "final model"
_ATTACKS = {
    RELEASES: "likelihood ratio of each canary, the rows of all clients being known",
    MODEL: "matched filter on the change of the shared model",
}
NOT_COVERED = "the measured bound on epsilon and its guesses, which are counted with the noise known"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A lower bound on epsilon beside the claim, measured in the run itself.

    ``canaries`` members join the population: the sampler draws them, the ledger charges them, and where they take part
    their rows are clipped, added up and noised with those of the clients. Each is in or out by a fair coin that the run
    does not know, and an attack guesses the coins from what the run releases. Their rows are worst-case ones, in a
    direction of their own, so that the models are those of a run that also met ``canaries`` adverse clients; more of
    them measure more precisely, and cost more accuracy.

    Args:
        canaries: number of members that join.
        confidence: of the bound.

    Example:
        >>> from fedmtl import Interval
        >>> Interval(canaries=1000).confidence
        0.95
    """

    canaries: Count = 200
    confidence: Fraction = 0.95

    def __post_init__(self) -> None:
        check_fields(self)


def check_interval(settings: Trainer) -> None:
    """Refuse canaries in a run that cannot have them.

    Raises:
        ConfigError: named.
    """
    if settings.audit is None:
        return
    if not isinstance(settings.audit, Interval):
        raise ConfigError(f"audit is {settings.audit!r}; give Interval(canaries=200) or None.")
    if not isinstance(settings.privacy, ClientPrivacy) or settings.noiseless:
        raise ConfigError(
            f"audit measures a claimed epsilon with canary clients, and privacy is {settings.privacy!r}; give "
            f"ClientPrivacy(clip_norm=..., epsilon=...) and an algorithm in rounds, or leave audit out."
        )
    if settings.runs > 1:
        raise ConfigError("audit measures one run; leave replicates and epsilons out, or audit.")


def plant(settings: Trainer, channel: Any) -> None:
    """Add the canaries of a run to its channel.

    Raises:
        ConfigError: the run releases nothing.
        PrivacyError: see :meth:`~fedmtl.privacy.audit.canaries.Canaries.check`.
    """
    if settings.audit is None:
        return
    from ..privacy.audit.canaries import Canaries

    if not isinstance(channel, Rounds) or not channel.releases:
        raise ConfigError(f"audit measures what is released, and {settings.algorithm.name} releases nothing.")
    channel.canaries = Canaries(settings.audit.canaries, len(settings.data), channel.sampler, settings.seed)
    channel.canaries.check(channel.releases)


def certificate(settings: Interval, channel: Rounds, epsilon: float, change: Tensor | None) -> dict[str, Any]:
    """Return the certificate of a finished run, JSON-ready.

    Args:
        settings: of the audit.
        channel: of the run, with its canaries.
        epsilon: what is claimed.
        change: (D,) of the shared model from its start to its end; None where there is none.
    """
    from ..privacy.audit.interval import SHARE, guess

    canaries, prices = channel.canaries, channel.prices
    assert canaries is not None
    assert prices is not None
    canaries.settle()
    scores = {RELEASES: canaries.scores}
    same = [one for one in channel.releases.values() if change is not None and one.dimension == change.numel()]
    if change is not None and same and same[0].form == "vector" and len(canaries) <= change.numel():
        scores[MODEL] = canaries.final_scores(same[0], change)
    took_part = canaries.uses > 0  # of sampled ones all
    took_part |= ~took_part.any()
    observers = []
    for observer, each in scores.items():
        guessed = [(False, SHARE)]
        fixed = isinstance(channel.privacy, ClientPrivacy) and not isinstance(channel.privacy.clip_norm, QuantileClip)
        if observer == RELEASES and fixed and canaries.independent(channel.releases):
            guessed.insert(0, (True, 1.0))
        bounds = []
        for independent, share in guessed:
            guesses = guess(each[took_part].nan_to_num().numpy(), canaries.coins[took_part].numpy(), share)
            bounds.append({"independent": independent, **asdict(guesses)})
        observers.append({"observer": observer, "attack": _ATTACKS[observer], "bounds": bounds})
    record = {"claimed": epsilon, "delta": prices.delta, "confidence": settings.confidence, "unit": "client"}
    record |= {"canaries": len(canaries), "uses": int(channel.account.spent.max()), "observers": observers}
    return with_bounds(record, prices.kinds[0])


def with_bounds(record: Mapping[str, Any], price: Price) -> dict[str, Any]:
    """Return a certificate with the epsilon of every bound, computed from its guesses; that of the first bound of the
    first observer stands under ``measured``, since the largest of several would hold with less confidence.

    Args:
        record: with the guesses, and with or without epsilons.
        price: of a use in the run.
    """
    from ..privacy.audit.interval import Guesses, lower_bound

    observers = []
    for one in record["observers"]:
        bounds = []
        for stated in one["bounds"]:
            guesses = Guesses(stated["right"], stated["made"], stated["canaries"])
            options = {"confidence": record["confidence"], "independent": stated["independent"]}
            bounds.append(stated | {"epsilon": lower_bound(guesses, price, record["uses"], **options).epsilon})
        observers.append({**one, "bounds": bounds})
    return {**record, "measured": observers[0]["bounds"][0]["epsilon"], "observers": observers}
