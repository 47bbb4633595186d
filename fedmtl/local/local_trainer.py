"""Local training of clients without a federation around it."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..data import FederatedDataset
from ..errors import ConfigError, PrivacyError
from ..privacy import GradientPlan, RoundChannel
from .clients import train_on_batches, train_on_records
from .executor import Execution, Executor, resolve_device
from .layout import Layout
from .losses import Loss, resolve_loss
from .module_checks import prepare_module
from .optimizers import Strength
from .solver import LocalSolver
from .train import LocalTraining
from .trials import build_executor, placed

if TYPE_CHECKING:
    from ..privacy import LocalSteps


class LocalTrainer:
    """Trains a model for each of many clients at once, each on its own examples.

    It is the clients' part in a round of every algorithm here, without the round: a copy of the
    module for each client, trained as one batch by any :class:`LocalSolver`; pulled to an anchor
    if one is given (mean-regularization); by DP-SGD if a channel is given. The use of the models is
    up to the caller.

    Args:
        module: any module whose forward takes one batch tensor; see
            :func:`fedmtl.local.prepare_module` for models that are refused. It is copied.
        data: of n clients.
        loss: of training, by its name or as a function (outputs, targets) -> (N,).
        seed: addresses batches and dropout masks.
        device: of the computation, a name as of :class:`torch.device`; ``"auto"`` takes a GPU if
            there is one.
        dtype: of the parameters, ``torch.float32`` or ``torch.float64``.
        execution: the number of clients that are computed at once, and other settings.

    Attributes:
        layout: the order of the D trainable parameters in a row.
        initial: (D,), the parameters of ``module``.

    Raises:
        ConfigError: no module or no data, an unknown loss or dtype, or a device that does not exist
            here.
        ModelError: a module that cannot be trained for each client by itself.

    Example:
        Three rounds of mean-regularized training by DP-SGD.

        >>> import torch
        >>> from fedmtl import FederatedDataset, FullParticipation, LocalSGD, RecordPrivacy
        >>> from fedmtl.local import LocalTrainer
        >>> from fedmtl.privacy import open_channel
        >>> generator = torch.Generator().manual_seed(0)
        >>> rows = {}
        >>> for client in ("north", "south", "west"):
        ...     x = torch.randn(40, 4, generator=generator)
        ...     rows[client] = (x, (x[:, 0] > 0).long())
        >>> data = FederatedDataset.from_tensors(rows, test_fraction=0.25, classes=2)
        >>> local = LocalTrainer(torch.nn.Linear(4, 2), data)
        >>> solver = LocalSGD(lr=0.5, batch_size=10)
        >>> privacy = RecordPrivacy(clip_norm=1.0, epsilon=4.0, delta=1e-4)
        >>> everybody = FullParticipation().bind(len(data))
        >>> channel = open_channel(privacy, [local.plan(solver)], everybody, seed=0, steps=3)
        >>> models = local.initial.expand(len(data), -1)
        >>> for step in range(3):
        ...     channel.begin(step, channel.draw(step))
        ...     pull = {"lam": 1.0, "anchor": models.mean(0)}
        ...     models = local.train(solver, models, round=step, channel=channel, **pull)
        >>> models.shape
        torch.Size([3, 10])
        >>> channel.epsilon <= 4.0
        True
    """

    def __init__(
        self,
        module: nn.Module,
        data: FederatedDataset,
        *,
        loss: str | Loss = "cross_entropy",
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        execution: Execution | None = None,
    ) -> None:
        _check_kind("module", module, nn.Module)
        _check_kind("data", data, FederatedDataset)
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"LocalTrainer: dtype is {dtype!r}; accepted: torch.float32, torch.float64."
            )
        place = resolve_device(device)
        self.data = placed(data, place)
        self.loss = resolve_loss(loss, mapped=data.target_range is not None)
        outputs = None
        if loss == "cross_entropy":
            if data.classes is None or data.spec.labels:
                raise ConfigError(
                    "LocalTrainer: loss is 'cross_entropy', which takes one class an example; "
                    "these targets take loss='mse', 'binary_cross_entropy' or a function."
                )
            outputs = data.spec.outputs
        sample = data.spec.sample(2, dtype)
        self.module = prepare_module(module, sample, seed=seed, outputs=outputs, dtype=dtype)
        self.layout = Layout.of(self.module)
        self.initial = self.layout.flatten(self.module).to(place)
        self._seed = seed
        self._given_loss = loss
        self._execution = execution or Execution()

    @cached_property
    def _executor(self) -> Executor:
        return self._built(private=False)

    @cached_property
    def _private_executor(self) -> Executor:
        return self._built(private=True)

    def _built(self, *, private: bool) -> Executor:
        return build_executor(
            self.module,
            self.data,
            self._given_loss,
            self._execution,
            device=self.initial.device,
            dtype=self.initial.dtype,
            private=private,
        )

    def plan(self, solver: LocalSolver, *, trainings: int = 1) -> GradientPlan:
        """Returns the release of the gradients of one round by DP-SGD, for
        :func:`fedmtl.privacy.open_channel`.

        Args:
            solver: its batch size is the expected number of records of a step, and its epochs or
                steps are the local steps of a training.
            trainings: calls of :meth:`train` in a round.
        """
        return gradient_plan(self.data, solver, len(self.initial), trainings=trainings)

    def train(
        self,
        solver: LocalSolver,
        start: Tensor | None = None,
        *,
        clients: Tensor | None = None,
        lam: Strength = 0.0,
        anchor: Tensor | None = None,
        round: int = 0,
        channel: RoundChannel | None = None,
    ) -> Tensor:
        """Trains the clients' models.

        Args:
            solver: the optimizer, its step size, and the length of the training.
            start: (D,) or (k, D), the models before; None for :attr:`initial`.
            clients: int64 (k,), positions in the data; None for all.
            lam: strength of the pull (lam / 2) ||w - anchor||^2.
            anchor: (D,) or (k, D); None without a pull.
            round: addresses batches, dropout masks and the step size, and is another one in every
                call.
            channel: of :meth:`plan`, in a round that has begun: training is then DP-SGD, by the
                local steps that this round has charged. The models may be published if ``start``
                and ``anchor`` may, as models of earlier rounds of this channel. None trains on the
                examples as they are, and the models are private.

        Returns:
            The models (k, D). One that is not finite, of a client whose training diverged, is
            returned as it is. A client without examples keeps its start.

        Raises:
            ConfigError: models or an anchor of another shape, a client that does not exist or is
                named twice, or a step size that ``lam`` makes too large.
            PrivacyError: a channel in which no round has begun, or one of other gradients than this
                model's; a local step that is not charged.
        """
        for name, given in (("clients", clients), ("start", start), ("anchor", anchor)):
            if given is not None:
                _check_kind(name, given, Tensor)
        everybody = torch.arange(len(self.data))
        chosen = everybody
        if clients is not None:
            chosen = clients.cpu()
        self._check(solver, chosen, start, anchor, lam)
        if start is None:
            start = self.initial
        if anchor is not None:
            anchor = anchor.to(self.initial)
        first = start.to(self.initial)
        training = LocalTraining(self.data, self.loss, solver, round, first, lam, anchor)
        if channel is None:
            return train_on_batches(training, self._executor, chosen, seed=self._seed)
        steps = self._local_steps(channel)
        return train_on_records(training, self._private_executor, chosen, steps)

    def module_of(self, model: Tensor) -> nn.Module:
        """Returns a new module with the parameters of one model.

        Args:
            model: (D,), such as a row of :meth:`train`.

        Returns:
            A copy in evaluation mode, on the CPU.
        """
        return self.layout.load(copy.deepcopy(self.module), model.detach().cpu()).eval()

    def _check(
        self,
        solver: LocalSolver,
        clients: Tensor,
        start: Tensor | None,
        anchor: Tensor | None,
        lam: Strength,
    ) -> None:
        """Refuses arguments of :meth:`train` that do not fit the model or the clients."""
        strength = 0.0  # a tensor has no single one
        if isinstance(lam, (int, float)):
            strength = lam
        LocalSolver.check_given(self, solver, strength)
        n = len(self.data)
        whole = clients.ndim == 1 and not clients.is_floating_point()
        if not whole or bool(((clients < 0) | (clients >= n)).any()):
            raise ConfigError(
                f"LocalTrainer.train: clients must be positions from 0 to {n - 1}, int64 (k,)."
            )
        if torch.unique(clients).numel() != clients.numel():
            raise ConfigError("LocalTrainer.train: a client is named twice; each trains once.")
        size = len(self.initial)
        for name, rows in (("start", start), ("anchor", anchor)):
            if rows is not None and tuple(rows.shape) not in ((size,), (len(clients), size)):
                raise ConfigError(
                    f"LocalTrainer.train: {name} has shape {tuple(rows.shape)}; accepted: "
                    f"({size},) or ({len(clients)}, {size})."
                )

    def _local_steps(self, channel: RoundChannel) -> LocalSteps:
        """Returns the local steps of the round that has begun, if they are this model's."""
        if not isinstance(channel, RoundChannel) or channel.local is None:
            raise PrivacyError(
                "No round of local steps has begun in this channel, so nothing is charged for "
                "them: open it with RecordPrivacy and LocalTrainer.plan(solver), and call "
                "channel.begin(step, channel.draw(step))."
            )
        plan = channel.local.plan
        if plan.dimension != len(self.initial) or plan.ids != tuple(self.data.ids):
            raise PrivacyError(
                f"These local steps release gradients of {plan.dimension:,} numbers of "
                f"{len(plan.ids):,} clients; this model has {len(self.initial):,} parameters and "
                f"{len(self.data):,} clients. Open the channel with LocalTrainer.plan(solver)."
            )
        return channel.local


def _check_kind(name: str, value: object, kind: type) -> None:
    """Refuses an argument that is no instance of ``kind``."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"LocalTrainer: {name} is {value!r}, of {type(value).__name__}; give a {kind.__name__}."
        )


def gradient_plan(
    data: FederatedDataset, solver: LocalSolver, dimension: int, *, trainings: int = 1
) -> GradientPlan:
    """Returns the release of the gradients of local training in rounds.

    The local steps of a client and the records of a step follow from the solver.

    Args:
        data: of the clients.
        solver: of their local training.
        dimension: D, number of parameters.
        trainings: local trainings of a client in a round; each takes local steps of its own.

    Example:
        >>> from fedmtl import LocalSGD, load_data
        >>> from fedmtl.local import gradient_plan
        >>> plan = gradient_plan(load_data("digits", clients=3), LocalSGD(lr=0.1, epochs=2), 650)
        >>> plan.steps.tolist(), plan.batch_size
        ([2, 2, 2], 10)
    """
    counts = data.train.counts
    return GradientPlan(
        ids=tuple(data.ids),
        keys=data.keys,
        counts=counts.numpy(),
        dimension=dimension,
        steps=(solver.step_counts(counts) * trainings).numpy(),
        trainings=trainings,
        batch_size=solver.batch_size,
    )
