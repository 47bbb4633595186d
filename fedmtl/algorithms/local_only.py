"""Local training: every client trains by itself and releases nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..local import LocalSGD, LocalSolver
from .base import Problem, State
from .client_batch import ClientBatch, ClientStates, personal_fields
from .rounds import RoundAlgorithm


@dataclass(frozen=True, kw_only=True)
class Local(RoundAlgorithm):
    """Trains every client by itself from the public initial model, on the same schedule as the
    other methods.

    Args:
        local: the clients' local solver; a client trains whenever the schedule calls it.

    Example:
        >>> from fedmtl import FullParticipation, Local, LocalSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=Local(local=LocalSGD(lr=0.1)),
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

    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1))

    name = "local"
    title = "Local"
    colour = "#6b6f76"
    baseline = True

    def __post_init__(self) -> None:
        LocalSolver.check_given(self, self.local)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts without a public state; clients keep their models."""
        return State({}, problem.client_store(personal_fields(problem)))

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Trains each client's own last model; nothing is sent."""
        start = c.last_models(c.initial)
        return {}, c.keep(c.train(self.local, start), start)

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the clients' own models.

        A client that was never called trains once from the initial model.
        """
        return c.with_newcomers(c.part(c.newcomers).train(self.local, c.initial))
