"""The result of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._rounding import number_text, rounded_up
from .._text import shown
from ..algorithms.finetune import Finetune, Personalization
from ..data import FederatedDataset
from ..errors import ConfigError
from ..models import ModelFactory
from ..privacy import PrivacyReport
from ..privacy.noise.grid import GridValue
from .comparison import beside
from .folder import RunFolder
from .outcome import read_result
from .published import is_public_part
from .scored_models import RecordFacts, ScoredModels
from .stages import length_of, own_and_local
from .summary import summary_of


@dataclass(frozen=True, kw_only=True)
class Result(ScoredModels):
    """Holds the outcome of a run. Everything but ``shared`` and ``privacy`` is computed on private
    data; for the models and their scores see :class:`~fedmtl.trainer.ScoredModels`.

    Attributes:
        algorithm: its name.
        privacy: everything the epsilon depends on.
        history: one mapping per evaluated round.
        final: the last row of the history; with the numbers of the final models if clients
            finetuned.
        stopped: ``"rounds"``, or ``"budget"`` when the privacy budget ended the run, ``"early"``
            when it stopped improving, ``"diverged"`` when a run without noise did so in its first
            rounds.
        baselines: results of the comparison runs, by name.
        replicates: of several runs that were computed as one program, the last numbers of each: its
            ``budget``, its ``repetition`` and the numbers. ``history`` then has a row for each
            round and budget, with means (``loss``, and so on) and percentiles (``loss_p5``,
            ``loss_p25``, ``loss_p50``, ``loss_p75``, ``loss_p95``); ``final`` is that of the last
            budget, and the models and the scores by client are those of the first run.
        step: ``"round"``, or ``"activation"`` if clients act one at a time.
        released: in secure mode, the last value of every release with the public grid on which it
            lies.
        chosen: the settings that were ``"auto"``, with the values that follow from public rows and
            bounds.
        records: facts of the records, with which the summary warns; not private.
        trained: True if a local training ended in a finite model; True if none is counted.
        adaptation: the arguments of :func:`~fedmtl.personalize` for new clients, see :meth:`adapt`;
            ``None`` if they are not known.
        parts: the decomposition of the models in the method's paper, by its letters: ``"P"`` and
            ``"Q"`` (n, D) of PP-DMTL, one row a client, with P + Q the personal models;
            ``"covariance"`` and ``"map"`` (d, d) of MP-MTL, the last ones that were released, with
            ``"P"`` and ``"Q"`` if its tasks have both; ``"directions"`` and ``"excess"`` of a
            private prior (and of MP-MTL with one release). Empty if only some clients are
            evaluated.

    Example:
        >>> from fedmtl import FullParticipation, Local, LocalSGD, Trainer, load_data, models
        >>> result = Trainer(
        ...     algorithm=Local(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... ).fit()
        >>> result.metric, result.personal.shape, result.privacy.headline
        ('accuracy', torch.Size([10, 650]), 'nothing is released: epsilon = 0')
    """

    algorithm: str
    privacy: PrivacyReport
    history: list[dict[str, Any]]
    final: dict[str, Any]
    stopped: str
    baselines: Mapping[str, Result] = field(default_factory=dict)
    replicates: list[dict[str, Any]] | None = None
    step: str = "round"
    released: Mapping[str, GridValue] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    records: RecordFacts = field(default_factory=RecordFacts)
    trained: bool = True
    adaptation: Mapping[str, Any] | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: nn.Module | ModelFactory | None = None,
        *,
        trust: Sequence[str] = (),
    ) -> Result:
        """Returns the result of :meth:`Trainer.fit` from the folder of a finished run, with its
        baselines.

        If the clients of a baseline have the shared model, each personal model is a copy of it.
        Models and scores are those of the run to the bit, on the CPU.

        Args:
            folder: of the run.
            model: as of :class:`~fedmtl.Trainer`; needed for modules only (:meth:`model_for`,
                :meth:`shared_model`, :meth:`adapt`), and only if the run's was no factory of
                :mod:`fedmtl.models`.
            trust: names of modules, such as that of an algorithm of your own, of which a class that
                the files name is imported and made; beside them only settings and networks of this
                package are.

        Raises:
            ConfigError: no finished run, or one without the files that this reads.
            ModelError: ``model`` does not have the parameters of the run's.
            DataError: a file that cannot be read.
        """
        if not isinstance(folder, str | os.PathLike):
            raise ConfigError(
                f"folder is {folder!r}; give the path of a finished run, as text or Path."
            )
        # A result without its private part would have no scores and no personal models.
        if is_public_part(Path(folder)):
            raise ConfigError(
                f"{folder} is the public part of a run, and a result is all of it; give the folder "
                f"above, or take the shared model by load_predictor({str(folder)!r})."
            )
        if isinstance(trust, str):
            raise ConfigError(
                f"trust is {trust!r}; give a list of names of modules, such as [{trust!r}]."
            )
        return read_result(RunFolder(Path(folder)), cls, model, trust)

    @property
    def epsilon(self) -> float:
        """Returns the epsilon that was spent, see :attr:`privacy`."""
        return self.privacy.epsilon

    def __repr__(self) -> str:
        folder = ""
        if self.folder is not None:
            folder = f", in {self.folder}"
        metrics = ", ".join(f"{name} {number_text(value)}" for name, value in self.metrics.items())
        return (
            f"Result: {self.algorithm}{'' if self.finetuned is None else ' + finetuning'} on "
            f"{shown(self.data_name)}, "
            f"{len(self.ids):,} clients, {length_of(self)}, epsilon "
            f"{rounded_up(self.epsilon, 3)}{folder}\n  not private: {metrics}"
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the means over clients of the metrics of their own models, by name: of the loss,
        the main metric, and those that were asked for."""
        return {name: self.final[name] for name in self.by_client if name in self.final}

    @property
    def lost(self) -> str:
        """Returns the reason why nothing was learned; empty if something was."""
        losses = self.by_client["loss"].values()
        if not self.trained or self.stopped == "diverged":
            reason = (
                f"{'nearly ' * self.trained}every local training ended in a model that is not "
                "finite"
            )
            reason += f", so it stopped after {length_of(self)}" * (self.stopped == "diverged")
        elif losses and not any(map(math.isfinite, losses)):
            reason = "the loss of every client's own model is not finite"
        else:
            return ""
        reason += "; a smaller learning rate (algorithm.local.lr), or scaled features, may help."
        return f"{self.algorithm}: training diverged: {reason}"

    def adapt(
        self,
        data: FederatedDataset | str | Mapping[str, Any],
        *,
        finetune: Personalization | None = None,
        device: str | None = None,
        folder: str | Path | None = None,
    ) -> Result:
        """Returns personal models of clients that took no part in the run, finetuned from the
        released model, with their scores; see :func:`~fedmtl.personalize`.

        Each new client trains on its own records and sends nothing, so this costs no epsilon. The
        privacy loss of the clients of the run is bounded by the epsilon of the released model,
        whatever is computed from it later. Nobody learns anything about a new client as long as its
        model and its scores stay with it. A client that gives away its model or a score reveals
        that, without noise.

        Args:
            data: of the new clients, as :class:`~fedmtl.Trainer` takes them, coded as those of the
                run (features, classes).
            finetune: the settings; ``None`` for those of the run, without a choice on validation
                records, or if the run did not finetune for :class:`~fedmtl.Finetune` with the local
                solver of the algorithm. Everybody starts from the released model.
            device: as of :class:`~fedmtl.Trainer`; ``None`` for that of the released model.
            folder: as of :class:`~fedmtl.Trainer`.

        Raises:
            ConfigError: a run without a shared model or with a loss of its own algorithm, or
                ``finetune`` that starts from personal models.
            DataError: a table whose columns are coded in another way than those of the run.
            ModelError: data that the model does not take.
        """
        from .new_clients import personalize
        from .personalize import check_columns
        from .trainer_arguments import as_data

        model = self.shared_model()
        adaptation = self.adaptation
        if adaptation is None:
            raise ConfigError(
                "this result does not know the settings of its run: its algorithm has a loss of "
                "its own, or its loss, metrics or local solver are your own; use "
                "personalize(model, data, ...), or of a solver Result.load(folder, trust=[MODULE])."
            )
        data = as_data(data)
        check_columns(None if self.coding is None else self.coding.schema, data.schema, data.name)
        if finetune is None:
            finetune = adaptation["finetune"]
        if finetune is None and adaptation["local"] is not None:
            finetune = Finetune(local=adaptation["local"])
        # New clients train as those of the run did, or the scores could not be compared.
        arguments = {name: adaptation[name] for name in ("loss", "metrics", "seed", "dtype")}
        arguments["finetune"] = finetune
        arguments["device"] = device or str(self.personal.device)
        arguments["folder"] = folder
        arguments["factory"] = self.factory
        return personalize(model, data, **arguments)

    def columns(self) -> dict[str, Mapping[str, Any]]:
        """Returns the columns of :meth:`to_frame`, each with the scores by client.

        Columns of a baseline begin with its name, such as ``local accuracy``.
        """
        columns = super().columns()
        for name, run in self.baselines.items():
            for column, values in run.columns().items():
                columns[f"{name} {column}"] = values
        return columns

    def shared_model(self) -> nn.Module:
        """Returns the released model, in evaluation mode.

        Raises:
            ConfigError: the algorithm has none.
        """
        if self.shared is None:
            raise ConfigError(f"{self.algorithm} has no shared model.")
        return self._module(self.shared)

    @property
    def bands(self) -> list[dict[str, Any]]:
        """Returns the last rows of the history, one for each budget; a single one without
        ``replicates``."""
        return [row for row in self.history if row["round"] == self.final["round"]]

    def summary(self) -> str:
        """Returns the printed summary: scores over clients, comparisons, and the privacy block."""
        return summary_of(self)

    @property
    def beside_local(self) -> tuple[float, float, float] | None:
        """Returns the shares of the clients whose personal model scores better than, as, and worse
        than the local one; None without the baseline ``"local"``, or a client to compare."""
        both = own_and_local(self)
        if both is None:
            return None
        return beside(*both, self.shown[0], self.personal.dtype)
