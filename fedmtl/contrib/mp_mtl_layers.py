"""MP-MTL of networks: clients share chosen layers through the private covariance of their weights.

Algorithm 1 of Liang et al., "Model-Protected Multi-Task Learning", IEEE TPAMI 2020, with any local
solver as its single-task step. A row of W is the change of one client's chosen layers by training:
their parameters less the public initial ones. In every round each member of the cohort trains its
own model. The server receives the rows and releases their noised, clipped covariance. Every member
then replaces its own row w by M w, with M as for linear models
(:mod:`fedmtl.algorithms.mp_mtl.sharing`). The other layers never leave their clients. M keeps the
few directions along which many clients change a layer, and shrinks those of a single one.

    Trainer(algorithm=MPMTLayers(layers=("3",), threshold=0.1, local=LocalSGD(lr=0.1)), data=data,
            model=models.mlp(hidden=16), schedule=FullParticipation(),
            privacy=ClientPrivacy(clip_norm=1.0, epsilon=4.0), rounds=10).fit()

:class:`~fedmtl.contrib.prior_layers.PriorLayers` releases covariances a single time, with all of
the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._check import Finite, NonNegative
from ..algorithms.base import Problem, Public, State
from ..algorithms.client_batch import ClientBatch, ClientStates, personal_fields
from ..algorithms.mp_mtl.sharing import FORMS, budget_weights, map_of, mapped, shifted_covariance
from ..algorithms.rounds import Released, RoundAlgorithm
from ..errors import ConfigError
from ..local import LocalSGD, LocalSolver, check_names
from ..local.proximal import SharedPenalty
from ..privacy import BoundSampler, ReleasePlan

RELEASE = "covariance"
LARGEST = 2048
"""The most parameters of all chosen layers for a release of their whole covariance."""


@dataclass(frozen=True, kw_only=True)
class MPMTLayers(RoundAlgorithm):
    """Trains personal networks by a private covariance of the changes of chosen layers.

    Args:
        layers: names of modules or parameters of the network, such as ``("fc",)`` for ``fc.weight``
            and ``fc.bias``.
        threshold: the amount by which M shrinks every singular value (``penalty="nuclear"``) or
            norm of a parameter's row (``"l21"``) of W in a round: eta lambda of the linear models.
            At least 0.
        penalty: ``"nuclear"``, few common directions, for at most 2,048 parameters; or ``"l21"``,
            few common parameters, for any number.
        rho: the public shift, as for :class:`MPMTL`.
        alpha: the budget of round t is prop. to t^alpha; another value than 0 needs full
            participation.
        local: the clients' local solver.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import FullParticipation, LocalSGD, MPMTLayers, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=MPMTLayers(layers=("1",), local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.mlp(hidden=8),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 610])
    """

    layers: Sequence[str]
    threshold: NonNegative = 0.1
    penalty: SharedPenalty = "nuclear"
    rho: NonNegative = 1.5
    alpha: Finite = 0.0
    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))

    name = "mp_mtl_layers"
    title = "MP-MTL of layers"
    colour = "#e05a5f"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self, "layers", self.layers)
        LocalSolver.check_given(self, self.local, 0.0)

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the covariance of the changes of the chosen layers: (d, d), or (d,) with
        ``penalty="l21"``.

        Raises:
            ConfigError: layers with too many parameters for a matrix, or that the network does not
                have.
        """
        size = int(self.places(problem).sum())
        if self.penalty == "nuclear" and size > LARGEST:
            raise ConfigError(
                f"MPMTLayers.layers has {size:,} parameters; penalty='nuclear' releases a matrix "
                f"of that many rows, and takes at most {LARGEST:,}. Choose smaller layers, or "
                "penalty='l21'."
            )
        allocation = None  # an equal part for every round
        if self.alpha != 0:
            allocation = budget_weights(problem.rounds, alpha=self.alpha)
        form = FORMS[self.penalty]
        return (ReleasePlan(name=RELEASE, dimension=size, form=form, allocation=allocation),)

    def places(self, problem: Problem) -> Tensor:
        """Returns a mask (D,) bool of the flat parameters that belong to the chosen layers.

        Args:
            problem: of the run.

        Raises:
            ConfigError: a layer that the network does not have.
        """
        return problem.layout.places(self.layers, "MPMTLayers.layers")

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts with a covariance and a map of zeros, (d, d) or (d,)."""
        d = int(self.places(problem).sum())
        shape: tuple[int, ...] = (d,)
        if FORMS[self.penalty] == "symmetric":
            shape = (d, d)
        covariance = torch.zeros(shape, dtype=torch.float64)
        public = {"covariance": covariance, "map": covariance.clone()}
        return State(public, problem.client_store(personal_fields(problem)))

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Trains each client's own model, and sends the change of its chosen layers, (k, d)."""
        # every member trains by itself, from its own last model, and sends the change of the chosen
        # layers
        start = c.last_models(c.initial)
        models = c.train(self.local, start)
        return {RELEASE: self._changed(c.problem, models)}, c.keep(models, start)

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Makes the map M of the released covariance."""
        # the noised sum of the clipped rows' products with a public shift, and M
        form = FORMS[self.penalty]
        covariance = shifted_covariance(released, RELEASE, form, self.rho)[0]
        return {"covariance": covariance, "map": map_of(covariance, form, self.threshold)}

    def receive(self, c: ClientBatch) -> ClientStates:
        """Projects the chosen layers of the clients' own models by M."""
        # every member projects its own row
        places = self.places(c.problem).to(c.initial.device)
        models = c.states["model"].clone()
        rows = self._changed(c.problem, models)
        projected = mapped(c.public["map"], rows.cpu()).to(rows.device)
        models[:, places] = (projected + c.initial[places].double()).to(models)
        # the projection is no training: whether that ended in a finite model stays
        return c.keep(models, c.states["model"]) | {"trained": c.states["trained"]}

    def _changed(self, problem: Problem, models: Tensor) -> Tensor:
        """Returns the changes (k, d) float64 of the chosen layers of models (k, D)."""
        places = self.places(problem).to(problem.initial.device)
        return models[:, places].double() - problem.initial[places].double()

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the clients' own models.

        A client that never took part trains once from the public initial model.
        """
        return c.with_newcomers(c.part(c.newcomers).train(self.local, c.initial))
