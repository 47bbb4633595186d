"""Automatic settings of linear models and of networks of classes, from public facts only: the
numbers of clients K and parameters p, declared bounds, epsilon and delta.

The noise of a run at the client level is nu = sigma sqrt(T p) / K: sigma is the noise multiplier of
one Gaussian release at (epsilon, delta), T the number of rounds, and nu the length of the noise of
the mean of one round over the clip norm. With full participation T releases need exactly the
multiplier sigma sqrt(T); of the cohorts of about 300 among more clients nu is nearly the same. If
the schedule is set, nu is computed from the multiplier that it needs. At the record level it is
sigma sqrt(T p K) / (.07 N) of N records, with noise of each client's own; in a secure sum of
gradients the noise is added once, and the root of K is left out. Up to nu = 1 sharing was useful on
most tables of the study.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, replace

from torch import nn

from ..algorithms import FedAvg, FedProx, FedSGD, Personalization, ServerOptimizer
from ..algorithms.base import Algorithm
from ..algorithms.linear.data import is_linear, probe_linear
from ..algorithms.noise_level import noise_of
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local import BackoffSGD, LocalSGD
from ..local.losses import LOSSES, Loss, is_of_numbers, name_of
from ..models import ModelFactory, linear_regression, logistic_regression, softmax_regression
from ..models.build import build_module
from ..privacy import (
    BoundSampler,
    ClientPrivacy,
    CyclicCohorts,
    FullParticipation,
    PoissonSampling,
    Privacy,
    QuantileClip,
    RecordPrivacy,
    Sampler,
)
from .average import Average, LocalAverage, half_range
from .proximal_point import ProximalPoint, vote_rounds
from .ranged_sgd import RangedSGD, range_rounds

LARGEST_COHORT = 300
_INTERCEPT_ROUNDS = 4  # of the level of a real target, before its slopes
_VOTE_ROUNDS = 2  # on the models that clients average, after the rounds of the model
_CLIP_OF_RECORDS = 1.0  # of the gradient of a record
_COUNT_SHARE = 0.1  # of the budget of a real target, for the quantile that the clip follows
_CLIP_RATE = 0.4  # of the steps of the logarithm of that clip
_LONGEST_WALK = 1.0  # standard deviation of that logarithm by noise alone, at the end of a run


@dataclass(frozen=True)
class Automatic:
    """The automatic settings of a run.

    Attributes:
        algorithm, model, schedule, privacy, rounds, finetune: as of :class:`~fedmtl.Trainer`.
        noise: nu.
        local: the baseline ``"local"``.
        network: True if the model is one; the meaning of nu is not known for it.
        clients: K.
    """

    algorithm: Algorithm
    model: ModelFactory
    schedule: Sampler
    privacy: Privacy | None
    rounds: int
    finetune: Personalization
    local: Algorithm
    noise: float
    network: bool
    clients: int

    @property
    def votes(self) -> int:
        """Returns the number of last rounds in which clients vote on the models that they
        average."""
        return vote_rounds(self.algorithm, self.rounds)

    def text(self) -> str:
        """Returns the choices and their reasons."""
        clip = "no clip"
        if self.privacy is not None:
            clip = f"clip {self.privacy.initial_norm:.3g}"
            if isinstance(self.privacy.clip_norm, QuantileClip):
                quantile = self.privacy.clip_norm.quantile
                kind = "median"
                if quantile != 0.5:
                    kind = f"{quantile:g} quantile"
                clip += f" at first, then about the {kind} of the updates' norms"
        schedule = self.schedule.bind(self.clients).describe()
        rounds = f"{self.rounds} rounds"
        if self.votes:
            rounds += f" (the last {self.votes} of votes on models)"
        if isinstance(self.algorithm, RangedSGD):
            rounds += (
                f" (the first {self.algorithm.range_rounds} of counts for the ranges of the "
                "columns, at the cost of any round)"
            )
        return textwrap.fill(
            f"automatic settings from public facts (nu = {self.noise:.3g}): "
            f"{self.algorithm.title}, {rounds}, {schedule}, {clip}, the mean of the "
            f"last half of the models, then {self.finetune.text()}",
            width=120,
            subsequent_indent="  ",
        )

    def outlook(self) -> str:
        """Returns the effect of the noise on sharing. No public fact tells how alike clients
        are."""
        alike = "whether clients are alike the run will show"
        if self.network:
            return f"what nu means for networks is not known; {alike}"
        if self.noise == 0:
            return f"no noise; {alike}"
        if self.noise <= 1:
            return f"the noise allows sharing (nu is at most 1); {alike}"
        if self.noise <= 4:
            return f"the noise may outweigh what sharing gives (nu is between 1 and 4); {alike}"
        return (
            f"the noise outweighs what sharing gives (nu is {self.noise:.3g}, above 4): also "
            "clients that are alike keep little more than what their own records give; a larger "
            "privacy.epsilon or more clients lower it"
        )


def automatic(
    data: FederatedDataset,
    privacy: Privacy | None,
    *,
    model: nn.Module | ModelFactory | None = None,
    rounds: int | None = None,
    schedule: Sampler | None = None,
    averages: bool = True,
    loss: str | Loss = "auto",
) -> Automatic:
    """Returns settings for linear models of a real target or of classes, and for networks of
    classes.

    Real targets at the client level: 20 exact proximal steps, of which the first four move the
    level alone, then two rounds of votes on the models that clients average, and a clip that
    follows the median norm of the updates unless noise drowns that median, at first so that the
    noise of a round is at most .1 in units of half the target range. Classes: 30 rounds, 100 from
    300 clients on, and for linear models the rounds of votes. At the record level each client takes
    one full-batch step in each of 60 rounds, without votes, or sends its gradients to a secure sum
    if there is one, of whose rounds the first tenth learns the ranges of the columns of a real
    target. Networks have the rounds and the clip of classes, and local steps whose size each client
    adapts.

    Args:
        data: with declared bounds.
        privacy: its clip norm is chosen if it is None.
        model: the one that is set; None chooses one.
        rounds: the number that is set; None chooses one.
        schedule: the one that is set; None chooses one.
        averages: True if clients average models after the run, so that their votes are of use.
        loss: of the run, by name or as a function; ``"auto"`` for the usual one. For those of
            Huber, of a quantile and of counts the steps and the models that clients average
            minimize that loss; of counts the clip is in units of half the logarithmic range.

    Raises:
        ConfigError: several targets an example, a network of real targets or at the record
            level, a loss of the caller's own, or one of Huber, of a quantile or of counts at the
            record level.
    """
    spec = data.spec
    clients = len(data)
    if spec.targets:
        raise ConfigError(
            f"{data.name} has several targets an example, for which there are no automatic "
            "settings; choose an algorithm, as algorithm=fedavg."
        )
    classes = data.classes is not None
    if model is None:
        model = _linear_model(data)
    network = build_module(model, spec, 0)
    dimension = sum(
        parameter.numel() for parameter in network.parameters() if parameter.requires_grad
    )
    deep = not is_linear(network, data)
    records = isinstance(privacy, RecordPrivacy)
    _check_loss(loss, records)
    settled = schedule
    if deep:
        _check_network(records, classes)
    if schedule is None:
        schedule = FullParticipation()
        if clients > LARGEST_COHORT and not records:
            schedule = _sampled(privacy)
    votes = 0
    if averages and not records and not deep:
        votes = _VOTE_ROUNDS
    usual = _usual_rounds(records, classes, clients, votes)
    if rounds is None:
        rounds = usual
    noise = noise_of(privacy, data, dimension, rounds, settled)
    # there is a bias to be learned first
    level = not classes and probe_linear(network, spec.shape, 1)
    algorithm: Algorithm
    clip: float | QuantileClip
    if records:
        summed = privacy is not None and privacy.aggregation is not None
        counted = range_rounds(summed and level, noise, rounds)
        algorithm = _by_records(classes, summed, counted)
        clip = _CLIP_OF_RECORDS
    elif classes:
        algorithm = _of_classes(deep, votes)
        clip = _clip_of_classes(noise, dimension, clients)
    else:
        algorithm = _of_numbers(level, votes)
        unit = half_range(loss, data.target_range)
        bound = schedule.bind(clients)
        clip = _clip_of_numbers(privacy, noise, dimension, bound, rounds, unit)
    privacy = _with_clip(privacy, clip)
    finetune = Average(noise=noise)
    return Automatic(
        algorithm,
        model,
        schedule,
        privacy,
        rounds,
        finetune,
        LocalAverage(),
        noise,
        deep,
        clients,
    )


def _sampled(privacy: Privacy | None) -> Sampler:
    """Returns the schedule of a population of which not all take part in a round."""
    if isinstance(privacy, ClientPrivacy) and privacy.aggregation is not None:
        # the server knows the cohort, so that sampling amplifies nothing against it
        return CyclicCohorts(cohort=LARGEST_COHORT)
    return PoissonSampling(cohort=LARGEST_COHORT)


def _check_network(records: bool, classes: bool) -> None:
    """Refuses a network of real targets, or one of clients whose records are protected."""
    if records or not classes:
        raise ConfigError(
            "there are automatic settings of a network only for classes and whole clients; set "
            "algorithm (as algorithm=fedavg), algorithm.local.lr, schedule, rounds and "
            "privacy.clip_norm, or leave the model out for a linear one."
        )


def _check_loss(loss: str | Loss, records: bool) -> None:
    """Refuses a loss for which there are no automatic settings."""
    another = "choose an algorithm that takes it, as algorithm=fedavg"
    if callable(loss) and not is_of_numbers(loss) and loss not in LOSSES.values():
        raise ConfigError(
            f"loss is {name_of(loss)!r}, a function of your own, for which there are no automatic "
            "settings, as their steps are minimizers that are known for the losses by name alone; "
            f"{another}."
        )
    if records and is_of_numbers(loss):
        raise ConfigError(
            f"loss is {name_of(loss)!r}, for which there are no automatic settings with "
            "privacy=record, where clip and step size are those of squared errors and classes; "
            f"take privacy=client, or {another}."
        )


def _with_clip(privacy: Privacy | None, clip: float | QuantileClip) -> Privacy | None:
    """Returns the settings with a clip norm, ``clip`` of updates of clients, if they have none."""
    if privacy is None or privacy.clip_norm is not None:
        return privacy
    if isinstance(privacy, RecordPrivacy):
        return replace(privacy, clip_norm=_CLIP_OF_RECORDS)
    return replace(privacy, clip_norm=clip)


def _linear_model(data: FederatedDataset) -> ModelFactory:
    """Returns the linear model of the kind of target."""
    if data.classes is None:
        return linear_regression()
    if data.classes == 2:
        return logistic_regression()
    return softmax_regression()


def _usual_rounds(records: bool, classes: bool, clients: int, votes: int) -> int:
    """Returns the number of rounds for the protected unit, the kind of target, the number of
    clients, and the rounds of votes on models."""
    if records:
        return 60
    if not classes:
        return 20 + votes
    if clients >= LARGEST_COHORT:
        return 100 + votes
    return 30 + votes


def _of_classes(deep: bool, votes: int) -> Algorithm:
    """Returns the algorithm of classes, for a linear model or a network."""
    if deep:
        return FedProx(mu=0.03, averaged=True, local=BackoffSGD())
    return ProximalPoint(averaged=True, vote_rounds=votes)


def _of_numbers(level: bool, votes: int) -> Algorithm:
    """Returns the algorithm of a real target, with first rounds for its level, the model's bias."""
    first = 0
    if level:
        first = _INTERCEPT_ROUNDS
    return ProximalPoint(averaged=True, intercept_rounds=first, vote_rounds=votes)


def _clip_of_classes(noise: float, dimension: int, clients: int) -> float:
    """Returns the clip of the updates of a model of classes.

    Args:
        noise: nu.
        dimension: p.
        clients: K.
    """
    largest = 3.0
    if clients >= LARGEST_COHORT:  # with more rounds
        largest = 1.5
    return min(largest, 0.06 * math.sqrt(dimension) / max(noise, 1e-9))


def _clip_of_numbers(
    privacy: Privacy | None,
    noise: float,
    dimension: int,
    schedule: BoundSampler,
    rounds: int,
    unit: float,
) -> float | QuantileClip:
    """Returns the clip of a real target's updates: at first so that the noise of a round is at most
    .1, in units of half the target's range, then the median of the clients' norms.

    Once the level is learned these norms tell how far targets are spread within their range, so
    that a range that is too wide costs little. The count of the clients within the clip takes a
    tenth of the budget: the noise of a round's sum is nu m / sqrt(p) over the clip for m
    participants, a client moves the count half as far as the sum over the clip, and by Theorem 1 of
    Andrew et al. a tenth of the budget is a multiplier 1 / sqrt(.1) times as large.

    That noise alone makes the logarithm of the clip a random walk. If its standard deviation at the
    end of the run is above 1, the clip says little of the clients, and the first one is kept.

    Args:
        privacy: of the run.
        noise: nu.
        dimension: p.
        schedule: of the rounds, bound to the clients.
        rounds: T.
        unit: half the length of the target's range, in units of the model's outputs.
    """
    initial = unit * min(0.3, 0.1 / max(noise, 1e-9))
    if noise == 0 or not isinstance(privacy, ClientPrivacy):
        return initial
    independent = privacy.mechanism == "gaussian" and privacy.bands is None
    if not independent or privacy.aggregation is not None:
        return initial
    of_the_sum = noise * schedule.denominator / math.sqrt(dimension)
    count_noise = of_the_sum / 2 / math.sqrt(_COUNT_SHARE)
    # a step of the logarithm is the rate times the share of clients within the clip
    walk = _CLIP_RATE * count_noise / schedule.denominator * math.sqrt(rounds)
    if walk > _LONGEST_WALK:
        return initial
    return QuantileClip(initial=initial, quantile=0.5, lr=_CLIP_RATE, count_noise=count_noise)


def _by_records(classes: bool, summed: bool, counted: int) -> Algorithm:
    """Returns an algorithm of one full-batch step a round. Steps along the released gradients over
    their size have a length that depends neither on the size of rows, which a public bound
    overstates, nor on the noise. For a real target that size is one for all coordinates: most
    coordinates of a panel's gradient are little more than noise.

    Args:
        classes: True for a target of classes.
        summed: True if gradients are added up in a secure sum, with one noise for all clients.
        counted: first rounds that count for the ranges of the columns.
    """
    name = "AdamNorm"
    lr = 0.025  # reaches the level of a target whose range is ten times too wide
    if classes:
        name = "Adam"
        lr = 0.1
    optimizer = ServerOptimizer(optimizer_name=name, lr=lr, options={"betas": (0.9, 0.99)})
    if counted:
        return RangedSGD(range_rounds=counted, averaged=True, server_optimizer=optimizer)
    if summed:
        return FedSGD(rate=1.0, averaged=True, server_optimizer=optimizer)
    return FedAvg(
        averaged=True,
        weights="examples",
        local=LocalSGD(lr=1.0, steps=1, batch_size=None),
        server_optimizer=optimizer,
    )
