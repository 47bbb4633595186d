"""What a user asks of privacy; everything else (sensitivity, noise, accounting) is derived from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .._check import one_of, positive
from ..errors import ConfigError

Observer = Literal["clients", "public"]
Guarantee = Literal["sound", "paper"]
Accountant = Literal["pld", "rdp"]
SourceName = Literal["seeded", "secure"]


@dataclass(frozen=True, kw_only=True)
class ClientPrivacy:
    """Differential privacy whose protected unit is a client with all its examples.

    Args:
        clip_norm: bound C on the L2 norm of everything one client contributes to one release, above 0.
        epsilon: the budget. Without ``noise_multiplier`` the noise is calibrated to it; with one it is a hard
            budget that ends the run. ``math.inf`` clips without noise; the reported epsilon is then infinite.
        noise_multiplier: standard deviation of the noise over the *sensitivity* of the sum (``clip_norm`` for
            add/remove, ``2 * clip_norm`` for replace-one), so that equal multipliers mean equal privacy.
        delta: probability of failure, in (0, 1); default ``min(1e-5, n ** -1.1)`` for n clients.
        source: ``"seeded"`` (reproducible simulation) or ``"secure"`` (operating system entropy).
        observer: who sees the releases. ``"clients"``: the other clients, who also know who took part;
            ``"public"``: only outsiders, who see the released values and nothing else.
        guarantee: ``"sound"`` or ``"paper"`` (the published accounting, for reproduction).
        accountant: ``"pld"`` (tight, default) or ``"rdp"``. Sampling without replacement always uses RDP.

    Raises:
        ConfigError: an impossible value, or neither ``epsilon`` nor ``noise_multiplier``.
    """

    clip_norm: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    source: SourceName = "seeded"
    observer: Observer = "clients"
    guarantee: Guarantee = "sound"
    accountant: Accountant = "pld"

    def __post_init__(self) -> None:
        positive(self, clip_norm=self.clip_norm)
        if self.epsilon is None and self.noise_multiplier is None:
            raise ConfigError("ClientPrivacy needs epsilon (the noise is calibrated to it), noise_multiplier, or both.")
        if self.epsilon is not None and self.epsilon != math.inf:
            positive(self, epsilon=self.epsilon)
        if self.noise_multiplier is not None:
            positive(self, noise_multiplier=self.noise_multiplier)
            if self.epsilon == math.inf:
                raise ConfigError("ClientPrivacy.epsilon=inf means no noise; leave noise_multiplier out, or epsilon.")
        if self.delta is not None:
            positive(self, delta=self.delta)
            if self.delta >= 1:
                raise ConfigError(f"ClientPrivacy.delta is {self.delta!r}; it must be between 0 and 1.")
        one_of(self, ("seeded", "secure"), source=self.source)
        one_of(self, ("clients", "public"), observer=self.observer)
        one_of(self, ("sound", "paper"), guarantee=self.guarantee)
        one_of(self, ("pld", "rdp"), accountant=self.accountant)

    @property
    def noiseless(self) -> bool:
        """True when the settings ask for clipping only."""
        return self.epsilon == math.inf

    def resolved_delta(self, clients: int) -> float:
        """The delta of a population of ``clients``: the one given, or ``min(1e-5, clients ** -1.1)``."""
        return self.delta if self.delta is not None else min(1e-5, float(clients) ** -1.1)
