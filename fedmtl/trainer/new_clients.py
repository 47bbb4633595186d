"""Personal models of new clients: a released model, finetuned on each one's own records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..algorithms.finetune import Finetune, Personalization, personalization_of
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local import Execution
from ..local.losses import Loss
from ..models import BoundedInputs, BoundedOutputs, ModelFactory
from ..models.networks import NamedFactory, copies_of
from ..privacy import FullParticipation
from ..ranks import Ranks
from .metrics import MetricFunction
from .personalize import ReleasedModel, alone
from .result import Result
from .trainer import Trainer
from .trainer_arguments import a_kind, as_data, is_auto


def personalize(  # noqa: PLR0913 - the settings of a trainer that apply to new clients
    model: nn.Module,
    data: FederatedDataset | str | Mapping[str, Any],
    *,
    finetune: Personalization | None = None,
    trainable: Sequence[str] | None = None,
    loss: str | Loss = "auto",
    metrics: Sequence[str | MetricFunction] = (),
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    execution: Execution | None = None,
    folder: str | Path | None = None,
    factory: NamedFactory | None = None,
) -> Result:
    """Returns personal models of new clients, each finetuned from a released model on the client's
    own training records.

    The result is that of a run of one round in which nobody trains, with the given model as
    ``shared``. With a linear model it has the baseline ``local``: models of the clients without the
    given one.

    Nothing is sent: the new clients' data cost no epsilon as long as their models stay with them,
    and those of the clients of the run are covered by the epsilon of the released model. Beside a
    :class:`~fedmtl.Result` use :meth:`~fedmtl.Result.adapt`, which has the settings of the run.

    Args:
        model: such as :meth:`Result.shared_model() <fedmtl.Result.shared_model>`, or one read from
            ``public/``.
        data: the new clients' data, as of :class:`~fedmtl.Trainer`.
        finetune: the settings; None for the defaults of :class:`~fedmtl.Finetune`. Only the given
            model can be started from.
        trainable: names of the parameters that are trained, as of :class:`~fedmtl.Trainer`; a model
            that came from a result remembers its own, with None.
        loss: as of :class:`~fedmtl.Trainer`.
        metrics: as of :class:`~fedmtl.Trainer`.
        seed: as of :class:`~fedmtl.Trainer`.
        device: as of :class:`~fedmtl.Trainer`.
        dtype: as of :class:`~fedmtl.Trainer`.
        execution: as of :class:`~fedmtl.Trainer`.
        folder: as of :class:`~fedmtl.Trainer`.
        factory: that built the model, such as ``models.mlp()``, for the files of ``folder``, which
            then say how the models are built; None leaves that out.

    Raises:
        ConfigError: ``finetune`` starts from personal models, or holds out validation records;
            impossible ``metrics``.
        ModelError: see :func:`fedmtl.local.prepare_module`.

    Example:
        >>> from fedmtl import Finetune, LocalSGD, load_data, models, personalize
        >>> data = load_data("digits", clients=10)
        >>> released = models.softmax_regression()(data.spec)
        >>> finetune = Finetune(kind="mean", local=LocalSGD(lr=0.1))
        >>> new = personalize(released, data, finetune=finetune)
        >>> new.personal.shape
        torch.Size([10, 650])
    """
    data = as_data(data)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is {a_kind(model)}; give the released module, such as result.shared_model()."
        )
    finetune = personalization_of(finetune)
    if finetune is None or is_auto(finetune):
        finetune = Finetune()
    bound = None
    # Predictions are cut off for scores only; in training the gradient would vanish there.
    if isinstance(model, BoundedOutputs):
        limit: float = model.limit
        model = model.model
        data = replace(data, limit=min(data.limit, limit), verify=False)
    # The bound on records is the algorithm's, which scales them once for all clients.
    if isinstance(model, BoundedInputs):
        bound = model.bound
        model = model.model
    built: nn.Module | ModelFactory = model
    if factory is not None:
        built = copies_of(model, factory)
    trainer = Trainer(
        algorithm=ReleasedModel(bound=bound),
        data=data,
        model=built,
        schedule=FullParticipation(),
        privacy=None,
        rounds=1,
        trainable=trainable,
        loss=loss,
        seed=seed,
        finetune=finetune,
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        execution=Execution() if execution is None else execution,
        folder=folder,
        metrics=metrics,
        baselines=alone(model, data, finetune, loss, trainable),
        progress=False,
    )
    # New clients have no model yet, and no choice between models of the run.
    if finetune.start == "personal" or finetune.validation:
        raise ConfigError(
            "new clients start from the given model: Finetune.start and validation "
            "must be left as is."
        )
    return trainer.fit(ranks=Ranks())
