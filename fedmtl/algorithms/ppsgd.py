"""PP-SGD: the sum of a private shared model and of a personal one, trained by the same gradients.

Bietti, Wei, Dudik, Langford, Wu: "Personalization Improves Privacy-Accuracy Tradeoffs in Federated
Learning", ICML 2022.

    min over w and theta_1 .. theta_K of (1/K) sum_k l_k(w + theta_k)

Both parts have the gradient g of l_k at their sum. A step of a client is w <- w - lr g for its copy
of w, whose clipped change is sent, and theta_k <- theta_k - ratio lr g for its own part, which is
not; so a local run is one of the sum with the step size (1 + ratio) lr, divided between the two.
``ratio`` goes from federated averaging, 0, to local training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .._check import NonNegative
from .._devices import on_device
from ..errors import ConfigError
from ..local import LocalSGD
from .client_batch import ClientBatch, ClientStates
from .shared_model import SharedModel


@dataclass(frozen=True, kw_only=True)
class PPSGD(SharedModel):
    """Trains the sum of a shared and a personal model (Bietti et al. 2022, Algorithm 1).

    Local runs have several steps.

    Args:
        ratio: step size of the personal part over that of the shared one (the paper's alpha), at
            least 0.
        local: the clients' local solver, with the step size of the shared part; :class:`LocalSGD`
            without weight decay.
        server_lr, server_optimizer: see :class:`SharedModel`.

    Raises:
        ConfigError: a value outside these ranges, or another solver.

    Example:
        >>> from fedmtl import FullParticipation, LocalSGD, PPSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=PPSGD(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])
    """

    ratio: NonNegative = 1.0

    name = "ppsgd"
    title = "PP-SGD"
    colour = "#17808c"
    own_starts = True
    keeps_models = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.local, LocalSGD) or self.local.weight_decay:
            raise ConfigError(
                f"PPSGD.local is {self.local!r}; it must be LocalSGD without weight_decay, since "
                "the personal part follows the gradients that moved the shared one."
            )

    def local_update(self, c: ClientBatch) -> tuple[Tensor, ClientStates]:
        """Trains the sum of both models, and divides its change between the two."""
        parts = c.states["model"]  # 0 of a client that never took part
        moved = self._moved(c, c.shared + parts)
        # the change of the sum, divided by the step sizes: 1 to ratio
        states = c.keep(parts + self.ratio / (1.0 + self.ratio) * moved, parts)
        return moved / (1.0 + self.ratio), states

    def _moved(self, c: ClientBatch, models: Tensor) -> Tensor:
        """Returns the change (k, D) of the sums ``models`` (k, D) by a local run."""
        solver = replace(self.local, lr=(1.0 + self.ratio) * self.local.lr)
        return c.train(solver, models) - models

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the sums.

        A client that never took part trains its own part once, from the shared model.
        """
        models = c.shared + c.states["model"]
        newcomers = c.newcomers
        if len(newcomers) and self.ratio > 0.0:
            place = on_device(newcomers, models.device)
            moved = self._moved(c.part(newcomers), models[place])
            models[place] += self.ratio / (1.0 + self.ratio) * moved
        return models
