"""MP-MTL beyond linear models: chosen layers of any network are shared through the private covariance of their weights.

Algorithm 1 of Liang et al., "Model-Protected Multi-Task Learning", IEEE TPAMI 2020, with any local solver as its
single-task step. A row of W is what training has changed of the chosen layers of one client, their parameters less the
public starting ones. In every round each member of the cohort trains its own model, the server receives the rows,
releases their noised, clipped covariance, and every member replaces its own row w by M w, with M as for linear models
(:mod:`.sharing`). The other layers never leave their clients. Many clients that change a layer along few common
directions keep these, and what only one of them does is shrunk.

    Trainer(algorithm=MPMTLayers(layers=("3",), threshold=0.1, local=LocalSGD(lr=0.1, epochs=5)), data=data,
            model=models.mlp(hidden=16), schedule=FullParticipation(),
            privacy=ClientPrivacy(clip_norm=1.0, epsilon=4.0), rounds=10).fit()

:class:`~fedmtl.contrib.prior_layers.PriorLayers` releases covariances a single time, with all of the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._check import Finite, NonNegative
from ..algorithms.base import Algorithm, Problem, Released, State
from ..algorithms.cohort import Cohort, Own, personal_fields
from ..algorithms.mp_mtl.sharing import FORMS, budget_weights, map_of, mapped, shifted_covariance
from ..errors import ConfigError
from ..local import LocalSGD, LocalSolver, check_names
from ..local.proximal import SharedPenalty
from ..privacy import BoundSampler, ReleasePlan

RELEASE = "covariance"
LARGEST = 2048
"""Most parameters of all chosen layers, where their whole covariance is released."""


@dataclass(frozen=True, kw_only=True)
class MPMTLayers(Algorithm):
    """Multi-task learning of networks from a private covariance of the changes of chosen layers.

    Args:
        layers: names of modules or parameters of the network, such as ``("fc",)`` for ``fc.weight`` and ``fc.bias``.
        threshold: how much M takes off every singular value (``penalty="nuclear"``) or norm of a parameter's row
            (``"l21"``) of W, per round: eta lambda of the linear models. At least 0.
        penalty: ``"nuclear"``, few common directions, for at most 2,048 parameters; or ``"l21"``, few common
            parameters, for any number.
        rho: the public shift, as for :class:`MPMTL`.
        alpha: the budget of round t is prop. to t^alpha; another value than 0 needs everybody to take part.
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

    name, title, colour = "mp_mtl_layers", "MP-MTL of layers", "#e05a5f"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self, "layers", self.layers)
        LocalSolver.check_given(self, self.local, 0.0)

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        size = int(self.places(problem).sum())
        if self.penalty == "nuclear" and size > LARGEST:
            raise ConfigError(
                f"MPMTLayers.layers has {size:,} parameters; penalty='nuclear' releases a matrix of that many rows, "
                f"and takes at most {LARGEST:,}. Choose smaller layers, or penalty='l21'."
            )
        return (
            ReleasePlan(
                name=RELEASE,
                dimension=size,
                form=FORMS[self.penalty],
                allocation=None if self.alpha == 0 else budget_weights(problem.rounds, alpha=self.alpha),
            ),
        )

    def places(self, problem: Problem) -> Tensor:
        """Return (D,) bool: which of the flat parameters belong to the chosen layers.

        Raises:
            ConfigError: a layer that the network does not have.
        """
        return problem.layout.places(self.layers, "MPMTLayers.layers")

    def init(self, problem: Problem, replicates: int = 1) -> State:
        d, form = int(self.places(problem).sum()), FORMS[self.penalty]
        shape = (d, d) if form == "symmetric" else (d,)
        return State(
            {name: torch.zeros(shape, dtype=torch.float64) for name in ("covariance", "map")},
            problem.client_store(personal_fields(problem)),
        )

    def client(self, c: Cohort) -> tuple[dict[str, Tensor], Own]:
        # every member trains by itself, from its own last model, and sends what has changed of the chosen layers
        start = c.models(c.initial)
        models = c.train(self.local, start)
        return {RELEASE: self._changed(c.problem, models)}, c.keep(models, start)

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        # the covariance of the clipped rows, noised: its sum over the cohort, with a public shift, and M
        form = FORMS[self.penalty]
        covariance = shifted_covariance(released, RELEASE, form, self.rho)[0]
        return {"covariance": covariance, "map": map_of(covariance, form, self.threshold)}

    def receive(self, c: Cohort) -> Own:
        # every member projects its own row
        places, models = self.places(c.problem).to(c.initial.device), c.own["model"].clone()
        rows = self._changed(c.problem, models)
        projected = mapped(c.public["map"], rows.cpu()).to(rows.device)
        models[:, places] = (projected + c.initial[places].double()).to(models)
        return c.keep(models, c.own["model"]) | {"trained": c.own["trained"]}

    def _changed(self, problem: Problem, models: Tensor) -> Tensor:
        """Return (k, d) float64: the chosen layers of models (k, D), less the public starting point."""
        places = self.places(problem).to(problem.initial.device)
        return models[:, places].double() - problem.initial[places].double()

    def personal(self, c: Cohort) -> Tensor:
        """Return the clients' own models; a client that never took part trains once from the public start."""
        return c.personal(lambda new: new.train(self.local, c.initial))
