"""The interval of epsilon: a run with canaries, and its certificate, the claim beside the
measurement.

    Trainer(..., audit=Interval(canaries=200)).fit().privacy.interval["measured"]

The canaries (:mod:`fedmtl.audit.canaries`) take part in the run; its models have met them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._check import Checked, Count, Fraction
from ..errors import ConfigError, PrivacyError
from ..privacy import (
    ActivationChannel,
    GradientPlan,
    PrivacyCost,
    RecordPrivacy,
    ReleasePlan,
    RoundChannel,
)
from ..trainer.hooks import RunAudit
from .canaries import Canaries, CanaryRounds
from .record_canaries import CanaryActivations, RecordCanaries, RecordCanaryRounds

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer

RELEASES = "all releases"
MODEL = "final model"
_ATTACKS = {
    RELEASES: "likelihood ratio of each canary, all other rows or gradients being subtracted",
    MODEL: "matched filter on the change of the shared model",
}


@dataclass(frozen=True, kw_only=True)
class Interval(Checked, RunAudit):
    """Measures a lower bound on epsilon in the run itself, beside the claimed epsilon.

    ``canaries`` invented clients join the population: the sampler draws them, the ledger charges
    them, and their rows are clipped, added up and noised with those of the clients. Each of them is
    put in or left out by a fair coin, and an attack guesses the coins from the releases of the run.
    Each canary sends a row as long as the clip allows, in a direction of its own, and so changes
    the models as an adversarial client would: more canaries measure more precisely and cost more
    accuracy. If the unit is one record, the canaries are about as many records of the clients with
    the most common number of records, or of activations if clients act one at a time.

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
    outside = (
        "the measured bound on epsilon and its guesses, which are counted with the noise known"
    )

    def check(self, settings: Trainer) -> None:
        """Refuses runs without a claimed epsilon, and several runs at once."""
        if settings.noiseless:
            raise ConfigError(
                f"audit measures a claimed epsilon, and privacy is {settings.privacy!r} of "
                f"{settings.algorithm.name}; give ClientPrivacy(clip_norm=..., epsilon=...) or "
                "RecordPrivacy, or leave audit out."
            )
        if settings.runs > 1:
            raise ConfigError(
                "audit measures one run; leave replicates and epsilons out, or audit."
            )
        privacy = settings.privacy
        if isinstance(privacy, RecordPrivacy) and privacy.aggregation is not None:
            raise ConfigError(
                "audit has no canaries among the records of a secure sum; leave audit out, or "
                "RecordPrivacy.aggregation."
            )

    def channel_class(
        self, settings: Trainer, plans: Sequence[ReleasePlan | GradientPlan]
    ) -> type[RoundChannel | ActivationChannel]:
        """Returns the class of a channel with canaries, for the unit and schedule of the run."""
        if settings.algorithm.one_at_a_time:
            return CanaryActivations
        if any(isinstance(plan, GradientPlan) for plan in plans):
            return RecordCanaryRounds
        return CanaryRounds

    def plant(self, settings: Trainer, channel: Any, counts: Tensor) -> None:
        """Adds invented clients, or records of the clients, with a fair coin for each."""
        costs = channel.costs
        if not channel.releases_anything or costs is None:
            raise ConfigError(
                f"audit measures what is released, and {settings.algorithm.name} releases nothing."
            )
        if costs.refuted is not None:
            raise PrivacyError(
                f"Canaries measure a claimed epsilon, and {settings.algorithm.name} has none that "
                "holds; leave audit out."
            )
        # the releases decide: rows of clients, or gradients of records
        if channel.records is None:
            channel.canaries = Canaries(
                self.canaries, len(settings.data), channel.sampler, settings.seed
            )
            channel.canaries.check(channel.releases)
        else:
            _plant_records(channel, counts, settings.seed)

    def certificate(self, channel: Any, epsilon: float, change: Tensor | None) -> dict[str, Any]:
        """Returns the claim, the guesses of each attack, and the bounds that they prove."""
        costs = channel.costs
        spent = channel.accountant.spent[0]
        planted = channel.canaries
        record: dict[str, Any] = {
            "claimed": epsilon,
            "delta": costs.delta,
            "confidence": self.confidence,
        }
        scores = {RELEASES: planted.scores}
        accounts = np.arange(len(spent))
        if channel.records is not None:
            dependence = planted.dependence()
            accounts = planted.clients.numpy()
            record["unit"] = "record"
            record["added"] = {"to": planted.own_records, "each": planted.each}
        else:
            # a norm that follows the rows depends on canaries, and with it the scores of the others
            adaptive = not isinstance(channel.privacy.clip_norm, float | int)
            dependence = planted.dependence(channel.releases, adaptive=adaptive)
            record["unit"] = "client"
            final = _final_scores(channel, change)
            if final is not None:
                scores[MODEL] = final
        # The certificate is about the account with the most charges among those with canaries.
        account = int(accounts[spent[accounts].argmax()])
        record["dependence"] = dependence
        record["canaries"] = len(planted)
        record["account"] = account
        record["uses"] = int(spent[account])
        record["observers"] = _observers(planted, scores, dependence)
        kinds = np.broadcast_to(costs.kind_of[0], spent.shape)
        return with_bounds(record, costs.kinds[kinds[account]])


def _plant_records(channel: Any, counts: Tensor, seed: int) -> None:
    """Adds canaries that are records of clients."""
    records = channel.records
    channel.canaries = RecordCanaries(records.plan, counts, records.law, channel.bound, seed)
    if len(np.unique(channel.costs.kind_of[0][channel.canaries.clients])) > 1:
        raise PrivacyError(
            "Canaries join clients of one cost; give one epsilon to all clients, "
            "or leave audit out."
        )
    if isinstance(channel, ActivationChannel):
        records.counts = counts.numpy()  # canaries have no rows


def _final_scores(channel: Any, change: Tensor | None) -> Tensor | None:
    """Returns the scores (m,) of an attacker that sees the final model alone; None if the change of
    that model has no release of its own size, or has fewer coordinates than there are canaries."""
    if change is None:
        return None
    size = change.numel()
    same = [
        each
        for each in channel.releases.values()
        if each.form == "vector" and each.dimension == size
    ]
    # more canaries than coordinates share directions, which change from step to step
    if not same or len(channel.canaries) > size:
        return None
    scores: Tensor = channel.canaries.final_scores(same[0], change)
    return scores


def _observers(
    planted: Any, scores: Mapping[str, Tensor], dependence: str | None
) -> list[dict[str, Any]]:
    """Returns the guesses of every observer about the coins of the canaries that took part."""
    from .guesses import SHARE, guess  # which import SciPy's statistics

    # Canaries that were never drawn tell nothing. With secret sampling each may have been drawn,
    # and if none was, all of them are counted.
    took_part = planted.uses > 0
    if not took_part.any():
        took_part = torch.ones_like(took_part)
    coins = planted.coins[took_part].numpy()
    observers = []
    for observer, each in scores.items():
        # a run that diverged has scores that are no numbers; 0 is a guess without evidence
        chosen = each[took_part].nan_to_num().numpy()
        bounds = []
        if dependence is None and observer == RELEASES:
            bounds.append({"independent": True, **asdict(guess(chosen, coins, 1.0))})
        bounds.append({"independent": False, **asdict(guess(chosen, coins, SHARE))})
        observers.append({"observer": observer, "attack": _ATTACKS[observer], "bounds": bounds})
    return observers


def with_bounds(record: Mapping[str, Any], cost: PrivacyCost) -> dict[str, Any]:
    """Returns a certificate with the epsilon of every bound, computed from its guesses; that of the
    first bound of the first observer stands under ``measured``, since the largest of several would
    hold with less confidence.

    Args:
        record: with the guesses, and with or without epsilons.
        cost: of a use in the run.
    """
    from .guesses import Guesses, lower_bound

    observers = []
    for observer in record["observers"]:
        bounds = []
        for stated in observer["bounds"]:
            guesses = Guesses(stated["right"], stated["made"], stated["canaries"])
            options = {"confidence": record["confidence"], "independent": stated["independent"]}
            bounds.append(
                stated | {"epsilon": lower_bound(guesses, cost, record["uses"], **options)}
            )
        observers.append({**observer, "bounds": bounds})
    return {**record, "measured": observers[0]["bounds"][0]["epsilon"], "observers": observers}
