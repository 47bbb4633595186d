"""The interval of epsilon: a run with canaries, and its certificate, what was claimed beside what was measured.

    Trainer(..., audit=Interval(canaries=200)).fit().privacy.interval["measured"]

The canaries (:mod:`fedmtl.privacy.audit.canaries`) take part in the run; its models have met them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from .._check import Checked, Count, Fraction
from ..errors import ConfigError, PrivacyError
from ..privacy import Activations, GradientPlan, Price, ReleasePlan, Rounds

if TYPE_CHECKING:
    from .trainer import Trainer

RELEASES, MODEL = "all releases", "final model"
_ATTACKS = {
    RELEASES: "likelihood ratio of each canary, all other rows or gradients being subtracted",
    MODEL: "matched filter on the change of the shared model",
}
NOT_COVERED = "the measured bound on epsilon and its guesses, which are counted with the noise known"


@dataclass(frozen=True, kw_only=True)
class Interval(Checked):
    """A lower bound on epsilon that is measured in the run itself, beside the claimed epsilon.

    ``canaries`` invented clients join the population: the sampler draws them, the ledger charges them, and their rows
    are clipped, added up and noised with those of the clients. Each of them is put in or left out by a fair coin, and
    an attack guesses the coins from what the run releases. Each canary sends a row as long as the clip allows, in a
    direction of its own, and so changes the models as an adversarial client would: more canaries measure more precisely
    and cost more accuracy. If the unit is one record, the canaries are about as many records of the clients with the
    most common number of records, or of activations where clients act one at a time.

    Args:
        canaries: number of canaries.
        confidence: of the bound.

    Example:
        >>> from fedmtl import Interval
        >>> Interval(canaries=1000).confidence
        0.95
    """

    canaries: Count = 200
    confidence: Fraction = 0.95


def check_interval(settings: Trainer) -> None:
    """Refuse canaries in a run that cannot have them.

    Raises:
        ConfigError: named.
    """
    if settings.audit is None:
        return
    if settings.noiseless:
        raise ConfigError(
            f"audit measures a claimed epsilon, and privacy is {settings.privacy!r} of {settings.algorithm.name}; give "
            f"ClientPrivacy(clip_norm=..., epsilon=...) or RecordPrivacy, or leave audit out."
        )
    if settings.runs > 1:
        raise ConfigError("audit measures one run; leave replicates and epsilons out, or audit.")


def kind_of_channel(
    settings: Trainer, plans: Sequence[ReleasePlan | GradientPlan]
) -> type[Rounds | Activations] | None:
    """Return the class of the channel of a run with these releases; None where no canaries take part."""
    if settings.audit is None:
        return None
    from ..privacy.audit.canaries import CanaryActivations, CanaryRounds, RecordCanaryRounds

    if settings.algorithm.one_at_a_time:
        return CanaryActivations
    return RecordCanaryRounds if any(isinstance(plan, GradientPlan) for plan in plans) else CanaryRounds


def plant(settings: Trainer, channel: Any, own: Tensor) -> None:
    """Add the canaries of a run to its channel, whose clients have ``own`` records, int64 (n,).

    Args:
        settings: of the run.
        channel: of the class that :func:`kind_of_channel` gives; any other one without canaries.
        own: without canaries.

    Raises:
        ConfigError: the run releases nothing.
        PrivacyError: canaries of several prices, or no epsilon is claimed that may hold; see also
            :meth:`~fedmtl.privacy.audit.canaries.Canaries.check`.
    """
    if settings.audit is None:
        return
    from ..privacy.audit.canaries import Canaries, RecordCanaries

    records, prices = channel.records, channel.prices
    if not channel.releases_anything or prices is None:
        raise ConfigError(f"audit measures what is released, and {settings.algorithm.name} releases nothing.")
    if prices.refuted is not None:
        raise PrivacyError(
            f"Canaries measure a claimed epsilon, and {settings.algorithm.name} has none that holds; leave audit out."
        )
    if records is not None:
        channel.canaries = RecordCanaries(records.plan, own, records.law, channel.bound, settings.seed)
        if len(np.unique(prices.kind[0][channel.canaries.clients])) > 1:
            raise PrivacyError(
                "Canaries join clients of one price; give one epsilon to all clients, or leave audit out."
            )
        if isinstance(channel, Activations):
            records.counts = own.numpy()  # canaries have no rows
        return
    channel.canaries = Canaries(settings.audit.canaries, len(settings.data), channel.sampler, settings.seed)
    channel.canaries.check(channel.releases)


def certificate(settings: Interval, channel: Any, epsilon: float, change: Tensor | None) -> dict[str, Any]:
    """Return the certificate of a finished run, JSON-ready.

    Args:
        settings: of the audit.
        channel: of the run, with its canaries.
        epsilon: what is claimed.
        change: (D,) of the shared model from its start to its end; None where there is none.
    """
    from ..privacy.audit.interval import SHARE, guess

    prices, spent, planted = channel.prices, channel.account.spent[0], channel.canaries
    scores = {RELEASES: planted.scores}
    record: dict[str, Any] = {"claimed": epsilon, "delta": prices.delta, "confidence": settings.confidence}
    accounts = np.arange(len(spent))
    if channel.records is not None:
        dependence, accounts = planted.dependence(), planted.clients.numpy()
        record |= {"unit": "record", "added": {"to": planted.own_records, "each": planted.each}}
    else:
        adaptive = not isinstance(channel.privacy.clip_norm, float | int)
        dependence = planted.dependence(channel.releases, adaptive=adaptive)
        record |= {"unit": "client"}
        size = 0 if change is None else change.numel()
        same = [each for each in channel.releases.values() if each.form == "vector" and each.dimension == size]
        if change is not None and same and len(planted) <= size:
            scores[MODEL] = planted.final_scores(same[0], change)
    record["dependence"] = dependence
    took_part = planted.uses > 0  # without those never drawn, unless none was; with secret sampling each may have been
    took_part |= ~took_part.any()
    observers = []
    for observer, each in scores.items():
        bounds = []
        for for_independent in (True, False) if dependence is None and observer == RELEASES else (False,):
            chosen = each[took_part].nan_to_num().numpy(), planted.coins[took_part].numpy()
            bounds.append({"independent": for_independent, **asdict(guess(*chosen, 1.0 if for_independent else SHARE))})
        observers.append({"observer": observer, "attack": _ATTACKS[observer], "bounds": bounds})
    account = int(accounts[spent[accounts].argmax()])
    record |= {"canaries": len(planted), "account": account, "uses": int(spent[account]), "observers": observers}
    kinds = np.broadcast_to(prices.kind[0], spent.shape)
    return with_bounds(record, prices.kinds[kinds[account]])


def with_bounds(record: Mapping[str, Any], price: Price) -> dict[str, Any]:
    """Return a certificate with the epsilon of every bound, computed from its guesses; that of the first bound of the
    first observer stands under ``measured``, since the largest of several would hold with less confidence.

    Args:
        record: with the guesses, and with or without epsilons.
        price: of a use in the run.
    """
    from ..privacy.audit.interval import Guesses, lower_bound

    observers = []
    for observer in record["observers"]:
        bounds = []
        for stated in observer["bounds"]:
            guesses = Guesses(stated["right"], stated["made"], stated["canaries"])
            options = {"confidence": record["confidence"], "independent": stated["independent"]}
            bounds.append(stated | {"epsilon": lower_bound(guesses, price, record["uses"], **options)})
        observers.append({**observer, "bounds": bounds})
    return {**record, "measured": observers[0]["bounds"][0]["epsilon"], "observers": observers}
