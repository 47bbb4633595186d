"""Automatic settings of linear models, from public facts only: the numbers of clients K and parameters p, declared
bounds, epsilon and delta.

The noise of a run at the client level is nu = sigma sqrt(T p) / K: sigma is the noise multiplier of one Gaussian
release at (epsilon, delta), T the number of rounds, and nu the length of the noise of the mean of one round over the
clip norm. With full participation T releases need exactly the multiplier sigma sqrt(T); a cohort of m clients a round
has noise larger by about the m / K that it is divided by. At the record level it is nu_r = sigma sqrt(30 p K) / N of N
records, that of 30 rounds with noise of each client's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from scipy.optimize import brentq
from scipy.special import log_ndtr

from ..algorithms import Average, FedAvg, Personalization, ProximalPoint, ServerOptimizer
from ..algorithms.base import Algorithm
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local import LocalSGD
from ..models import ModelFactory, linear_regression, logistic_regression, softmax_regression
from ..privacy import FullParticipation, PoissonSampling, Privacy, RecordPrivacy, Sampler

LARGEST_COHORT = 300
_USEFUL = {"client": 1.0, "record": 0.05}  # noise up to which sharing was useful on the tables of the study


def multiplier_of_one_release(epsilon: float, delta: float) -> float:
    """Return the least noise multiplier of one Gaussian release at (epsilon, delta).

    The root of delta = Phi(1 / 2s - epsilon s) - exp(epsilon) Phi(-1 / 2s - epsilon s) (Balle and Wang: "Improving the
    Gaussian Mechanism for Differential Privacy", ICML 2018, Theorem 8).
    """

    def excess(log_scale: float) -> float:
        s = math.exp(log_scale)
        spent = math.exp(log_ndtr(0.5 / s - epsilon * s)) - math.exp(epsilon + log_ndtr(-0.5 / s - epsilon * s))
        return math.log(max(spent, 1e-300)) - math.log(delta)

    return math.exp(brentq(excess, math.log(1e-3), math.log(1e6)))


def noise_of(privacy: Privacy | None, data: FederatedDataset, dimension: int, rounds: int) -> float:
    """Return nu at the client level, nu_r at the record level; 0 without noise.

    Args:
        privacy: of the run.
        data: only the number of clients is read, and at the record level the number of records, which is public there.
        dimension: p.
        rounds: T, at the client level.
    """
    if privacy is None or privacy.noiseless:
        return 0.0
    records = int(data.train.counts.sum())
    units = records if isinstance(privacy, RecordPrivacy) else len(data)
    one = _multiplier(privacy, units, 30 if isinstance(privacy, RecordPrivacy) else rounds)
    if isinstance(privacy, RecordPrivacy):
        return one * math.sqrt(30 * dimension * len(data)) / records
    return one * math.sqrt(rounds * dimension) / len(data)


def noise_level(privacy: Privacy | None, data: FederatedDataset, dimension: int, rounds: int) -> float:
    """Return the noise of a run, in units of that below which sharing was useful on most tables: nu, or nu_r / .05."""
    unit = "record" if isinstance(privacy, RecordPrivacy) else "client"
    return noise_of(privacy, data, dimension, rounds) / _USEFUL[unit]


def _multiplier(privacy: Privacy, units: int, rounds: int) -> float:
    """Return the multiplier of one release: by the budget, or from that of each of ``rounds`` releases."""
    if privacy.epsilon is None:
        assert privacy.noise_multiplier is not None
        return privacy.noise_multiplier / math.sqrt(rounds)
    epsilon = privacy.epsilon if isinstance(privacy.epsilon, (int, float)) else min(privacy.epsilon.values())
    return multiplier_of_one_release(float(epsilon), privacy.resolved_delta(units) or 1e-5)


@dataclass(frozen=True)
class Automatic:
    """What the automatic settings of a run are.

    Attributes:
        algorithm, model, schedule, privacy, rounds, finetune: as of :class:`~fedmtl.Trainer`.
        noise: nu or nu_r.
        dimension: p.
    """

    algorithm: Algorithm
    model: ModelFactory
    schedule: Sampler
    privacy: Privacy | None
    rounds: int
    finetune: Personalization
    noise: float
    dimension: int

    def text(self) -> str:
        """Return one line that says what was chosen, and why."""
        clip = "no clip" if self.privacy is None else f"clip {self.privacy.initial_norm:.3g}"
        symbol = "nu_r" if isinstance(self.privacy, RecordPrivacy) else "nu"
        return (
            f"automatic settings from public facts ({symbol} = {self.noise:.3g}): {self.algorithm.title}, "
            f"{self.rounds} rounds, {type(self.schedule).__name__}, {clip}, the mean of the last half, "
            f"then {self.finetune.text()}"
        )


def automatic(data: FederatedDataset, privacy: Privacy | None) -> Automatic:
    """Return settings for linear models of a real target or of classes.

    Real targets at the client level: 20 exact proximal steps, and a clip by which the noise of a round is at most .1 in
    units of half the target range. Classes: 30 rounds, 100 from 300 clients on. At the record level each client takes
    one full-batch step a round, with few large ones where the noise is loud.

    Args:
        data: with declared bounds.
        privacy: its clip norm is chosen where it is None.

    Raises:
        ConfigError: several targets an example.
    """
    spec, clients = data.spec, len(data)
    if spec.targets:
        raise ConfigError(
            f"{data.name} has several targets an example, for which there are no automatic settings; choose an "
            "algorithm, as algorithm=fedavg."
        )
    classes = data.classes is not None
    model = linear_regression() if not classes else logistic_regression() if data.classes == 2 else softmax_regression()
    outputs = spec.classes if spec.classes is not None and spec.classes > 2 else 1
    dimension = outputs * (math.prod(spec.shape) + 1)
    rounds = (30 if clients < LARGEST_COHORT else 100) if classes else 20
    noise = noise_of(privacy, data, dimension, rounds)
    algorithm: Algorithm = ProximalPoint(averaged=True)
    if isinstance(privacy, RecordPrivacy):
        algorithm, rounds = _by_records(data, noise, classes)
        clip = 1.0 if classes else 2.0  # the gradient of the squared error has no 1/2
    elif classes:
        clip = min(1.5 if rounds == 100 else 3.0, 0.06 * math.sqrt(dimension) / max(noise, 1e-9))
    else:
        clip = min(0.3, 0.1 / max(noise, 1e-9))
    if privacy is not None and privacy.clip_norm is None:
        privacy = replace(privacy, clip_norm=clip)
    full = clients <= LARGEST_COHORT or isinstance(privacy, RecordPrivacy)
    schedule: Sampler = FullParticipation() if full else PoissonSampling(cohort=LARGEST_COHORT)
    finetune = Average().resolved(noise_level(privacy, data, dimension, rounds))
    return Automatic(algorithm, model, schedule, privacy, rounds, finetune, noise, dimension)


def _by_records(data: FederatedDataset, noise: float, classes: bool) -> tuple[Algorithm, int]:
    """Return an algorithm of one full-batch step a round, and its rounds."""
    if data.domain is None or not math.isfinite(data.domain.l2):
        raise ConfigError(
            f"{data.name} states no public bound on rows, from which the step size follows at the record level; "
            "declare data.bounds, or choose an algorithm, as algorithm=fedavg."
        )
    loud, row = noise > 0.1, data.domain.l2**2 + 1
    lr = (2.0 if loud else 0.15) / row * (4.0 if classes else 1.0)
    momentum: dict[str, Any] = {} if loud else {"server_optimizer": ServerOptimizer(options={"momentum": 0.9})}
    local = LocalSGD(lr=lr, steps=1, batch_size=None)
    return FedAvg(averaged=True, weights="examples", local=local, **momentum), 30 if loud else 100
