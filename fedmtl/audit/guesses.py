"""Lower bounds on epsilon from one run, beside the upper bound of its accounting.

m canaries (clients or records with chosen data) are each in or out of one run by a fair coin that
the run does not know; for replaced units the coin chooses between two values. An attacker computes
a score of each canary from the published values, guesses coins and may abstain. If the run is as
its :class:`~fedmtl.privacy.cost.PrivacyCost` says with noise multiplier z, flipping the coin of a
canary obeys the trade-off curve of that cost: ``P(E) <= F_z(Q(E))`` for every event E and the laws
P and Q of the published values under its two values, given all other coins (F_z: see
:class:`~fedmtl.privacy.accounting.trade_off.TradeOff`). Too many right guesses refute it. The lower
bound is the epsilon of the smallest multiplier that they refute at the confidence, found by
bisection: more noise makes F_z smaller, and more guesses surprising. In a sound run the bound
exceeds the epsilon of the run with a probability of at most one minus the confidence.

Everything else of the claim enters through its cost: the law of the noise, the number of uses,
sampling by a secret coin (the canaries are drawn as all units are) and the neighbour relation. So
the bound is at the delta of the claim, and comparable with it.

Two theorems turn F_z into a test. They differ in their assumptions on the run beyond F_z; a lower
bound that uses the first one is larger.

**Independent canaries.** Let canary i show in an observation whose law, given the coins and
observations of all others, depends only on coin i and obeys F_z, and let the guesses be functions
of all observations. Given these the coins are independent, and guess i is right with the larger of
the two posterior probabilities of coin i at most, say r_i, which depends only on observation i. So
the r_i are independent, and the mean of each is at most ``(1 + TV_z) / 2``, where
``TV_z = max_x F_z(x) - x`` is the total variation: half of P(guess "in") plus half of Q(guess
"out") is ``1/2 + (P(in) - Q(in)) / 2``. The number of right guesses among m is thus dominated by a
binomial number, and the test is exact (Clopper and Pearson). The assumption follows from the claim
if the noise is additive: orthogonal canaries meet independent noise. Score i is the log likelihood
ratio of the two values of coin i, summed over the releases. It depends only on the product of each
release with the direction of canary i, after the sum of the other rows (which the adversary of
differential privacy knows) is subtracted. A run that breaks its claim may break the assumption,
too; the claim is refuted all the same.

**Any canaries.** F_z alone (Mahloujifar, Melis, Chaudhuri 2025, "Auditing f-differential privacy in
one run"; Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run"). Let N of the
r guesses made be right, and N_i be those among them that are not i's. Given all other coins, "guess
i is right and N_i >= v" under one value of coin i is the same event as "guess i is wrong and N_i >=
v" under the other value. So ``P(i right, N_i >= v) <= F_z(P(i wrong, N_i >= v))``, first given the
other coins and the value of coin i, then on average, as F_z is concave. On average over the m
canaries, and since N is N_i + 1 if guess i is right,

    E[N; N >= v + 1] / m <= F_z(E[r - N; N >= v] / m)    for v = 0, ..., r - 1.

The largest P(N >= c) under these inequalities comes from going down from v = c with the smallest
mass at each count that they allow, and all of tau at N = c. Lemma: any other masses with P(N >= c)
= tau have both sums at every v, and the total, at least as large. For mass added at counts k >= v
adds (k, r - k) to the sums, so it adds (a, b) with (r - v) a >= v b; the inequality at v - 1 then
turns this into an addition (a', b') with (r - v + 1) a' >= (v - 1) b'. If the total exceeds 1 at
any count down to 0, the count 0 included, P(N >= c) < tau. For pure epsilon, r independent guesses
that are right with probability ``exp(epsilon) / (1 + exp(epsilon))`` meet all inequalities with
equality; the test is at most a tenth of a standard deviation from their binomial law for r of at
least 1,000. Here the attacker abstains: the surest guesses are right more often.

Neither assumes that the attacker is any good; a bound of 0 only says that this attack learned
nothing. In both a guess may use the scores of all canaries, so they are compared with their median,
and not with the value at which both coins are as likely under the claim: if the claim is broken
(noise of another size under sampling), that value is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .._check import Fraction, Rate, check_arguments
from ..errors import ConfigError
from ..privacy.accounting.composition import trade_off
from ..privacy.accounting.trade_off import TradeOff
from ..privacy.cost import PrivacyCost

SHARE = 0.1  # of the canaries that are guessed where any are allowed: good from 1,000 canaries on
_PRECISION = 1e-4
# multipliers: below, curves overflow, and hardly any number of guesses is refuted
_LEAST = 2.0**-5
_MOST = 2.0**20


@dataclass(frozen=True)
class Guesses:
    """The outcome of an attack.

    Args:
        right: guesses that are right.
        made: all guesses; the attacker abstains on the other canaries. Chosen before the run.
        canaries: m, the coins flipped.

    Raises:
        ConfigError: unless 0 <= right <= made <= canaries, and canaries >= 1.
    """

    right: int
    made: int
    canaries: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.made <= self.canaries or self.canaries < 1:
            raise ConfigError(
                f"{self.right} right guesses of {self.made} made about {self.canaries} canaries "
                "are impossible. They are at least 0, at most the guesses made, and these at most "
                "the canaries, at least 1."
            )


@check_arguments
def guess(scores: np.ndarray, coins: np.ndarray, share: Rate = 1.0) -> Guesses:
    """Guesses "in" if a score is above the median and "out" otherwise, only of those farthest
    from it; count the right guesses.

    Args:
        scores: (m,) larger if the canary is more likely in.
        coins: (m,) bool, whether each canary was in.
        share: of the canaries that are guessed; at least one is.

    Raises:
        ConfigError: arrays of different shapes, a score that is not finite, or a share outside (0,
            1].
    """
    scores = np.asarray(scores, np.float64)
    coins = np.asarray(coins, bool)
    if scores.shape != coins.shape or scores.ndim != 1 or not np.isfinite(scores).all():
        raise ConfigError(
            f"Scores of shape {scores.shape} for coins of shape {coins.shape} with "
            f"{int((~np.isfinite(scores)).sum())} that are not finite; each canary needs one "
            "finite score and one coin."
        )
    made = max(1, round(share * scores.size))
    # half of the coins are expected to be heads, so that the median divides the guesses
    distance = scores - np.median(scores)
    # stable, so that ties are decided alike on every machine
    surest = np.argsort(-np.abs(distance), kind="stable")[:made]
    return Guesses(int(((distance > 0) == coins)[surest].sum()), made, scores.size)


@check_arguments
def lower_bound(
    guesses: Guesses,
    cost: PrivacyCost,
    uses: int,
    *,
    confidence: Fraction = 0.95,
    independent: bool = False,
) -> float:
    """Returns the lower bound on the epsilon of ``uses`` uses at the delta of ``cost``.

    It is 0 if the guesses refute nothing, and holds with probability ``confidence`` over the run
    and its coins; the module gives the theorems.

    Args:
        guesses: right and made; with ``independent`` every canary is guessed.
        cost: of the account that is charged for the canaries. Its weights, sampling and sums stay
            as they are; its noise multiplier is tested.
        uses: that are charged.
        confidence: above 0 and below 1.
        independent: True if canaries are assumed to be independent.

    Raises:
        ConfigError: a confidence outside (0, 1), or abstentions if canaries are taken for
            independent.
        PrivacyError: more uses than the cost has, or a cost without a loss distribution.
    """

    def rejected(multiplier: float) -> bool:
        return refuted(guesses, trade_off(cost.after(uses, multiplier), 1), confidence, independent)

    if not uses * cost.sums or not refuted(
        guesses, TradeOff.of_epsilon(0.0, 0.0), confidence, independent
    ):
        return 0.0
    multiplier = _smallest(rejected)
    if math.isinf(multiplier):
        return 0.0
    return cost.epsilon(uses, multiplier)


def refuted(
    guesses: Guesses, curve: TradeOff, confidence: float = 0.95, independent: bool = False
) -> bool:
    """Returns True if a run whose coins obey ``curve`` has so many right guesses with
    probability of at most ``1 - confidence``. The arguments are those of :func:`lower_bound`."""
    if not independent:
        return _surprising(guesses, curve, 1 - confidence)
    if guesses.made < guesses.canaries:
        raise ConfigError(
            "The bound for independent canaries needs a guess about each of the "
            f"{guesses.canaries}, not about {guesses.made}. Use the bound for any canaries "
            "(independent=False) where the attacker abstains."
        )
    # no guess of a fair coin is right more often than by the total variation distance
    accuracy = (1 + min(1.0, curve.advantage)) / 2
    return bool(stats.binom.sf(guesses.right - 1, guesses.made, accuracy) <= 1 - confidence)


def _surprising(guesses: Guesses, curve: TradeOff, tail: float) -> bool:
    """Returns True if every mechanism under ``curve`` has so many right guesses with probability
    of at most ``tail``."""
    r = guesses.made
    m = guesses.canaries
    total = tail
    right = tail * guesses.right / m
    wrong = tail * (r - guesses.right) / m
    for count in range(guesses.right - 1, -1, -1):
        mass = max(0.0, curve.smallest(right) - wrong) * m / (r - count)
        total += mass
        if total > 1:
            return True
        right = right + mass * count / m
        wrong = wrong + mass * (r - count) / m
    return False


def _smallest(holds: Callable[[float], bool]) -> float:
    """Returns the smallest number from ``_LEAST`` on for which ``holds``, true from some number on,
    is true; infinity if that is beyond ``_MOST``."""
    high = 1.0
    while not holds(high):
        high *= 2
        if high > _MOST:
            return math.inf
    low = high / 2
    while low > _LEAST and holds(low):
        high = low
        low = high / 2
    while high > (1 + _PRECISION) * low:
        # the geometric mean, since the precision is relative
        middle = math.sqrt(low * high)
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
