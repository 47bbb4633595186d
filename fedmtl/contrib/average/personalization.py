"""The averages of models as the last step of every client, and as a method of its own."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..._check import Range, Whole
from ...algorithms.base import Problem, Public
from ...algorithms.client_batch import ClientBatch, ClientStates
from ...algorithms.finetune import Personalization
from ...algorithms.linear.data import check_linear, probe_linear, records_of
from ...algorithms.local_only import Local
from ...algorithms.rounds import RoundAlgorithm
from ...errors import ConfigError, ModelError
from ...local.losses import cross_entropy, is_of_numbers
from ..units import Units
from .candidates import candidates_of, choice_by_votes, class_candidates_of, high_of, votes_on
from .classes import ODDS_OF_CLASSES, fold_of
from .losses import average_of_loss
from .networks import average_networks
from .numbers import Candidates
from .weights import PARTS, Array, prior_of_local

_NUMBERS = 1 << 22  # in the models of clients that are averaged at a time
VOTES = 15.0
"""The most that the mean vote of clients weighs."""
_VOTE_NOISE = 0.5  # the largest standard deviation of the noise of log weights by votes


@dataclass(frozen=True, kw_only=True)
class Average(Personalization):
    """Every client averages models, its own and the shared one, weighted by how they predict
    records left out.

    For linear models, of real targets or of classes, and for networks of classes.

    Args:
        noise: nu of the released model, by which the prior weight of the models of a client's own
            records rises, at least 0; infinite leaves all others out. None: that of the run, see
            :func:`~fedmtl.algorithms.noise_level.noise_of`.
        votes: log weights of the candidates of a linear model by the votes of the clients, that of
            ``local`` first; a run with :attr:`ProximalPoint.vote_rounds` fills them in. Empty
            for none.
        units: middles and half lengths of the ranges of the features and of a real target, in whose
            units clients average; a run of :class:`RangedSGD` fills them in. Empty for the declared
            ranges.
        average_single: True lets clients with a single record of a real target average models as
            the others do; False leaves them ``local`` to the digit. None: they take the model that
            the votes of the run choose, and average after a run without votes.
        choice: the number of that model among those voted on, 0 for ``local``; a run with votes
            fills it in.

    Raises:
        ConfigError: a noise below 0, votes that are not finite, or units that are none.

    Example:
        >>> from fedmtl import Average, FullParticipation, ProximalPoint, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=ProximalPoint(mu=0.03),
        ...     data=load_data("synthetic_tasks", tasks=4, problem="regression"),
        ...     model=models.linear_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     finetune=Average(),
        ...     progress=False,
        ... )
        >>> list(trainer.fit().scores)
        ['shared', 'personal', 'finetuned']
    """

    noise: Annotated[float, Range(lambda v: v >= 0, "a number of at least 0")] | None = None
    votes: tuple[float, ...] = ()
    units: tuple[float, ...] = ()
    average_single: bool | None = None
    choice: Whole | None = None

    name = "average"
    kind = "average"
    parts: ClassVar[tuple[str, ...]] = PARTS
    votes_help = True
    of_linear_numbers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _are_numbers(self.votes):
            raise ConfigError(
                f"Average.votes is {self.votes!r}; accepted: a list of finite numbers, which a run "
                "with vote_rounds fills in."
            )
        object.__setattr__(self, "votes", tuple(self.votes))
        if not _are_units(self.units):
            raise ConfigError(
                f"Average.units is {self.units!r}; accepted: the middles and as many half lengths "
                "above 0 of ranges, which a run of RangedSGD fills in."
            )
        object.__setattr__(self, "units", tuple(self.units))

    def text(self) -> str:
        """Returns ``"average of models"``."""
        return "average of models"

    def check(self, problem: Problem) -> None:
        """Refuses a model that is neither linear nor one of classes, or a loss without a name.

        Raises:
            ConfigError: such a model, such a loss, or votes of another length than the candidates.
        """
        try:
            bias = check_linear(problem)
        except ModelError as error:
            if problem.loss is not cross_entropy:
                raise ConfigError(
                    f"finetune is 'average', but {error} Use finetune 'kl' or 'mean'."
                ) from error
            return
        size = votes_on(problem, bias)
        if len(self.votes) not in (0, size):
            raise ConfigError(
                f"Average.votes has {len(self.votes)} numbers, but clients of this model average "
                f"{size} candidates; leave it out."
            )
        if self.choice is not None and self.choice >= size:
            raise ConfigError(
                f"Average.choice is {self.choice}, but clients of this model average {size} "
                "candidates, from 0 on; leave it out."
            )
        if len(self.units) not in (0, 2 * problem.dimension):
            raise ConfigError(
                f"Average.units has {len(self.units)} numbers, but this model has "
                f"{problem.dimension} columns, and each a middle and a half length; leave it out."
            )

    def resolved(self, noise: float) -> Self:
        """Returns the settings with the noise of the run, unless one is set."""
        if self.noise is None:
            return replace(self, noise=noise)
        return self

    @classmethod
    def alone(cls) -> RoundAlgorithm:
        """Returns :class:`LocalAverage`."""
        return LocalAverage()

    def informed(self, public: Public) -> Self:
        """Returns the settings with the log weights of the released votes, if the run has voted,
        and the units of the columns, if it has learned them.

        Clients with a single record take the model that :func:`choice_by_votes` chooses.
        """
        if "units" in public:
            return replace(self, units=tuple(public["units"].flatten().tolist()))
        if "votes" not in public:
            return self
        weight = VOTES
        noise = float(public["vote_noise"])
        if noise:
            weight = min(VOTES, _VOTE_NOISE / noise)
        votes = public["votes"].double()
        choice = choice_by_votes(votes.tolist(), noise)
        return replace(self, votes=tuple((weight * votes).tolist()), choice=choice)

    def with_releases_of(self, run: Personalization | None) -> Self:
        """Returns the settings, those that are not set as in a run that averages models."""
        if not isinstance(run, Average):
            return self
        names = ("noise", "votes", "units", "average_single", "choice")
        # a noise of 0 and False are set
        left = [name for name in names if getattr(self, name) in (None, ())]
        return replace(self, **{name: getattr(run, name) for name in left})

    def personalize(self, problem: Problem, start: Tensor, clients: Tensor) -> Tensor:
        """Averages the models of each client, (k, D + 4): the average and the weights of the
        :data:`PARTS`.
        """
        starts = start.expand(len(clients), -1)
        counts = problem.data.train.counts[clients]
        shared = (
            torch.tensor([float(part == "shared") for part in PARTS])
            .to(starts)
            .expand(len(clients), -1)
        )
        found = torch.cat([starts, shared], 1)
        finite = torch.isfinite(starts).all(1).cpu()
        try:
            bias = check_linear(problem)
        except ModelError:
            able = (finite & (counts > 1)).nonzero()[:, 0]
            known = 0.0  # the meaning of nu for networks is not known
            if self.noise == math.inf:
                known = math.inf
            prior = prior_of_local(known, 1, problem.dimension, ODDS_OF_CLASSES)
            for some in able.split(max(1, _NUMBERS // problem.dimension)):
                found[some] = average_networks(problem, starts[some], clients[some], prior)
            return found
        for place in (finite & (counts > 0)).nonzero()[:, 0].tolist():
            client = int(clients[place])
            base = starts[place].double().cpu().numpy()
            # of records that are too large for float64 the released model stays
            with np.errstate(all="ignore"), suppress(np.linalg.LinAlgError):
                if problem.data.classes is None:
                    averaged = self._of_numbers(problem, client, base, bias)
                else:
                    averaged = self._of_classes(problem, client, base, bias)
                found[place] = torch.from_numpy(np.concatenate(averaged)).to(found)
        return found

    def _of_classes(
        self, problem: Problem, client: int, base: Array, bias: bool
    ) -> tuple[Array, Array]:
        """Returns the average of the candidates of one client for classes, and the weights of the
        :data:`PARTS`."""
        count = int(problem.data.train.counts[client])
        prior = prior_of_local(self.noise or 0.0, count, problem.dimension, ODDS_OF_CLASSES)
        candidates = class_candidates_of(problem, client, base, bias, alone=prior == 1)
        return candidates.average(prior, self.votes)

    def _of_numbers(
        self, problem: Problem, client: int, base: Array, bias: bool
    ) -> tuple[Array, Array]:
        """Returns the average of the candidates of one client for a real target, in the learned
        units of the columns if there are some, and the weights of the :data:`PARTS`."""
        noise = self.noise or 0.0
        count = int(problem.data.train.counts[client])
        votes = self.votes
        choice = self.choice
        if self.average_single is True:
            choice = None
        elif self.average_single is False:
            choice = 0
        if count == 1 and choice is not None:
            # any share of another model, however small, can be all of the error of a client whose
            # records repeat
            return candidates_of(problem, client, base, bias).one(choice)
        if not self.units:
            return candidates_of(problem, client, base, bias).average(count, noise, votes)
        units = Units.of(self.units)
        x, y = units.records(*records_of(problem, client))
        limit = units.limit(problem.data.limit)
        candidates = Candidates.of(x, y, units.inside(base), bias, limit)
        model, weights = candidates.average(count, noise, votes)
        return units.declared(model), weights


def _are_numbers(values: object) -> bool:
    """Returns True for a list of finite numbers."""
    return isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and math.isfinite(value) for value in values
    )


def _are_units(values: tuple[float, ...]) -> bool:
    """Returns True for middles of ranges and as many half lengths above 0."""
    if not _are_numbers(values) or len(values) % 2:
        return False
    return all(half > 0 for half in values[len(values) // 2 :])


@dataclass(frozen=True, kw_only=True)
class LocalAverage(RoundAlgorithm):
    """The average of the models of every client's own records. Nothing leaves a client.

    Example:
        >>> from fedmtl import FullParticipation, Trainer, load_data, models
        >>> from fedmtl.contrib import LocalAverage
        >>> trainer = Trainer(
        ...     algorithm=LocalAverage(),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=1,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 29])
    """

    # one row and one line of whatever is local
    name = "local"
    title = Local.title
    colour = Local.colour
    fitted_once = True

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Sends nothing; the models follow from the records alone."""
        return {}, c.states

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the averages of the models of each client's own records, (k, D)."""
        if is_of_numbers(c.problem.loss):
            return _own_models(c)
        return Average(noise=math.inf).train(c.problem, c.initial, c.clients)


def _own_models(c: ClientBatch) -> Tensor:
    """Returns the averages of clients' own models for a loss of Huber, of a quantile or of counts,
    (k, D). A client without training records, or with a model that is not finite, has the initial
    one."""
    problem = c.problem
    bias = probe_linear(problem.module, problem.data.spec.shape)
    high = high_of(problem)
    models = c.initial.expand(len(c.clients), -1).clone()
    for place, client in enumerate(c.clients.tolist()):
        x, y = records_of(problem, client)
        if not len(x):
            continue
        fold = fold_of(problem, client, len(x))
        # of records that are too large for float64 the initial model stays
        with suppress(np.linalg.LinAlgError):
            model = average_of_loss(
                x, y, problem.loss, bias, fold, limit=problem.data.limit, high=high
            )
            if np.isfinite(model).all():
                models[place] = torch.from_numpy(model).to(models)
    return models
