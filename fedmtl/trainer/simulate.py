"""The rounds of a run one by one, for programs with a loop of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Problem, State
from ..errors import ConfigError
from ..ranks import launched
from ..schedules import Block
from .engine import Engine, training_steps
from .run_plan import RunPlan, prepare
from .trainer import Trainer


@dataclass(frozen=True)
class Step:
    """A round that has been computed, or a block of activations of clients that act one at a time.

    Attributes:
        done: number of rounds, or of activations, so far.
        block: the participants, as positions among the clients of :attr:`problem`.
        state: the algorithm's state. The next step changes it in place, so models of a step are to
            be taken before the next one is asked for.
        epsilon: of the steps so far, at the delta of the settings; infinite without noise.
        algorithm: with the settings that it chose itself.
        problem: the data and the model.

    Example:
        >>> from fedmtl import FedAvg, FullParticipation, LocalSGD, Trainer
        >>> from fedmtl import load_data, models, simulate
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=3),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ... )
        >>> step = next(simulate(trainer))
        >>> step.done, step.epsilon, tuple(step.personal().shape)
        (1, inf, (3, 650))
    """

    done: int
    block: Block
    state: State
    epsilon: float
    algorithm: Algorithm
    problem: Problem

    @property
    def shared(self) -> Tensor | None:
        """Returns the shared model (D,), which is released; None if the algorithm has none."""
        return self.algorithm.shared(self.state)

    def personal(self, clients: Tensor | None = None) -> Tensor:
        """Returns the personal models of clients, (k, D); they are private.

        Args:
            clients: int64 (k,), their places in the data; None for all.

        Raises:
            ConfigError: anything else, or a place that no client has.
        """
        n = self.problem.clients
        if clients is None:
            clients = torch.arange(n)
        places = isinstance(clients, Tensor) and clients.dtype == torch.int64 and clients.ndim == 1
        if not places or bool(((clients < 0) | (clients >= n)).any()):
            raise ConfigError(
                f"Step.personal takes an int64 tensor (k,) of clients' places, numbers from 0 to "
                f"{n - 1}, not {clients!r}; problem.data.ids has the id of each place."
            )
        return self.algorithm.personalize(self.problem, self.state, clients)


def simulate(trainer: Trainer) -> Iterator[Step]:
    """Yields the rounds of a run, each of them charged before it is computed.

    It is the loop of :meth:`fedmtl.Trainer.fit`, with the same cohorts, noise and models to the
    bit, in this process. All else is left to the caller, whatever the settings say: evaluation,
    callbacks and the progress bar, warnings, checkpoints, an end because of ``early_stopping`` or
    of training that diverges, finetuning and baselines. Activations come in blocks that end at
    every evaluation and checkpoint.

    A caller may leave the loop early. If the step at which it leaves is fixed beforehand, or
    follows from ``epsilon`` alone, the epsilon of that step is spent. If it follows from the
    releases, count the epsilon of the whole run, as :class:`~fedmtl.EarlyStopping` does: the
    epsilon of a step says nothing of a number of steps that depends on the noise. If it follows
    from scores or from personal models, the number of steps is a release that no epsilon covers.

    Args:
        trainer: the settings, with ``folder=None``: the charges are kept in memory.

    Raises:
        ConfigError: no trainer, settings that do not fit together, a folder, or secure noise in one
            of several processes of a launch.
        BudgetExhausted: a client would exceed its budget in the next round.

    Example:
        >>> from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD, Trainer
        >>> from fedmtl import load_data, models, simulate
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0),
        ...     rounds=5,
        ... )
        >>> for step in simulate(trainer):
        ...     if step.epsilon > 5.0:
        ...         break
        >>> step.done, tuple(step.personal().shape)
        (3, (10, 650))
    """
    # Settings are refused by the call, and not by the first step.
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"simulate() takes a Trainer, not {trainer!r}.")
    if trainer.folder is not None:
        raise ConfigError(
            f"simulate() keeps nothing on the disk, but folder is {str(trainer.folder)!r}; give "
            "folder=None, or use Trainer.fit, which can be resumed."
        )
    started = launched()
    # Seeded noise is the same in all of them.
    secure = [each is not None and each.source == "secure" for each in trainer.privacies]
    if started > 1 and any(secure):
        raise ConfigError(
            f"simulate() computes a whole run in each process, and {started} were launched: with "
            "noise of source='secure' each would release other values of the same data, and no "
            "report would count them all. Use Trainer.fit, which the processes share, or one "
            "process."
        )
    # In this process alone: other ranks would run the caller's loop, too.
    return _steps(prepare(trainer, trainer.problem()))


def _steps(plan: RunPlan) -> Iterator[Step]:
    """Yields the steps of a run; its channel closes with the generator."""
    engine = Engine()
    channel = engine.open(plan, resume=False)
    with closing(channel):
        state = engine.init(plan, channel)
        channel.start(0)
        for block, after in training_steps(plan, engine, channel, state, 0):
            # Replicates and clients may have spent unequally; the largest holds for all of them.
            epsilon = float(channel.epsilons.max())
            yield Step(block.step + 1, block, after, epsilon, plan.algorithm, plan.problem)
