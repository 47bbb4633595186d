"""Models of clients with their scores, of a run, its baselines and new clients, and how they
compare."""

from __future__ import annotations

import copy
import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .._check import id_of, without_zeros
from .._extras import pandas as pd
from .._rounding import percent
from .._text import shown
from ..algorithms.finetune import Personalization
from ..errors import ConfigError
from ..local import Layout
from ..models.inputs import ModelBounds
from ..models.networks import NamedFactory
from .coding import Coding, Predictor
from .comparison import ByClient
from .metrics import REGISTRY, Metric

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Finetuned:
    """The models that finetuning made of a run, by client id. All of it is computed on private
    data.

    Attributes:
        settings: of the finetuning.
        start: ``"shared"`` or ``"personal"``, the model that every client started from.
        chosen: name of the model that each client chose; empty if they did not choose.
        better, equal, worse: shares of the clients whose final model scores better than, as, or
            worse than the model that finetuning started from; of those whose finetuning did not
            diverge, NaN without any.
        diverged: ids of the clients whose finetuning did: they keep the model that they started
            from, and are in no comparison.
        weights: mean over the clients of the weights of the models that they averaged, by the
            model's name.
    """

    settings: Personalization
    start: str
    chosen: Mapping[str, str]
    better: float
    equal: float
    worse: float
    diverged: tuple[str, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def choices(self) -> dict[str, float]:
        """Returns the shares of the clients that chose each model, the most frequent one first."""
        return {
            name: count / len(self.chosen)
            for name, count in Counter(self.chosen.values()).most_common()
        }

    def numbers(self) -> dict[str, Any]:
        """Returns the fields as plain values, by the names of result.json."""
        numbers: dict[str, Any] = {"finetune": self.settings.kind, "finetuned_from": self.start}
        numbers |= {name: getattr(self, name) for name in ("better", "equal", "worse")}
        numbers["finetuning_diverged"] = len(self.diverged)
        numbers |= {f"weight_{name}": share for name, share in self.weights.items()}
        return numbers | {f"chose_{name}": share for name, share in self.choices.items()}

    def lines(self) -> list[str]:
        """Returns the lines of the summary."""
        lines = [f"  finetuning: {self.settings.text()}, from the {self.start} model"]
        if not isnan(self.equal):  # NaN if no client has a score with both models
            three = percent((self.better, self.equal, self.worse))
            lines.append(
                f"    better/equal/worse than the {self.start} model for {three} % of the clients"
            )
        if self.diverged:
            lines.append(
                f"    diverged for {len(self.diverged):,} clients, who keep the {self.start} model"
            )
        for title, parts in (
            ("weights, mean over clients", self.weights),
            ("chosen by each client on its own validation records", self.choices),
        ):
            if parts:
                lines.append(
                    f"  {title}: "
                    + ", ".join(f"{name} {share:.0%}" for name, share in parts.items())
                )
        return lines


@dataclass(frozen=True, kw_only=True)
class RecordFacts:
    """Facts of the records of a run, with which its summary warns. They are not private: no epsilon
    covers them.

    Attributes:
        shortened: the share of the training and of the test records, by side, that the bound on
            records scaled down.
        cut_targets: the share of the targets that were beyond their public range, and were cut
            there.
        unscaled: True if the first training records have features or real targets far outside of
            [-1, 1].
        tested: number of clients with test examples.
        constants: the main metric of predicting the mean of a client's own training targets, with
            the loss of a quantile their quantile, by id; only of one real target an example.
        constant: the least mean test loss of a model whose outputs are the same for every example;
            ``None`` if it has no closed form, as of a loss of the caller's own.
    """

    shortened: Mapping[str, float] = field(default_factory=dict)
    cut_targets: float = 0.0
    unscaled: bool = False
    tested: int = 0
    constants: Mapping[str, float] = field(default_factory=dict)
    constant: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredModels:
    """Models of clients with their scores: of a run, of its baselines, of new clients, of a node.
    Not private.

    Attributes:
        ids: of the clients.
        personal: (n, D), the clients' models; (k, D), of those in ``evaluated``, if some were
            drawn.
        scores: of every model on each client's test examples, by model, metric and id, without the
            clients for which a metric is not defined, such as those without test examples:
            ``scores["shared"]["auc"]["client-7"]``. The models are ``"shared"``, the released one,
            if there is one; ``"personal"``; ``"finetuned"`` if the clients finetuned; and
            ``"local"``, trained alone, and ``"chosen"`` if each chose one of these on validation
            records. The last ones are those of ``personal``.
        shared: (D,), the released model, if there is one.
        metric: the main one: ``"accuracy"``, ``"mse"``, with the loss of a quantile ``"pinball"``,
            or for many labels an example ``"recall_at_5"``.
        further_metrics: those that a run measured beside the main one.
        data_name: of the data.
        module: the network; ``None`` if files do not say how it is built.
        factory: of :mod:`fedmtl.models`, that built the network; ``None`` for another one.
        bounds: on records and predictions, for scores and in the models of :meth:`model_for`.
        folder: of the run, if any.
        evaluated: ids of the clients that were drawn for evaluation (``evaluate_clients``);
            ``None`` if all are.
        untrained: ids of the evaluated clients that keep a model of their own which is still the
            one that they started from, since each of their local trainings diverged; they are in no
            comparison.
        finetuned: the outcome of finetuning; ``None`` without one.
        coding: of raw rows of the table that the data are from as inputs of the models, and of
            outputs as predictions; ``None`` for other data.
    """

    ids: tuple[str, ...]
    personal: Tensor
    scores: Mapping[str, ByClient]
    metric: str
    shared: Tensor | None = None
    further_metrics: tuple[Metric, ...] = ()
    data_name: str = "data"
    module: nn.Module | None = None
    factory: NamedFactory | None = None
    bounds: ModelBounds = field(default_factory=ModelBounds)
    folder: Path | None = None
    evaluated: tuple[str, ...] | None = None
    untrained: tuple[str, ...] = ()
    finetuned: Finetuned | None = None
    coding: Coding | None = None

    @property
    def by_client(self) -> ByClient:
        """Returns the scores of each client's own model, by metric and id:
        ``by_client["auc"]["client-7"]``."""
        # Models are scored in the order in which they are made; the last ones are kept.
        return list(self.scores.values())[-1]

    @property
    def shared_by_client(self) -> ByClient | None:
        """Returns the scores of the shared model; ``None`` without one."""
        return self.scores.get("shared")

    @property
    def personal_ids(self) -> tuple[str, ...]:
        """Returns the clients of the rows of ``personal``."""
        if self.evaluated is None:
            return self.ids
        return self.evaluated

    @property
    def shown(self) -> tuple[Metric, ...]:
        """Returns the main metric, and those that were asked for."""
        return (
            REGISTRY[self.metric],
            *(metric for metric in self.further_metrics if metric.name != self.metric),
        )

    @property
    def personal_accuracy(self) -> Mapping[str, float]:
        """Returns the main metric of each client's own model, by id."""
        return self.by_client[self.metric]

    @property
    def shared_accuracy(self) -> Mapping[str, float] | None:
        """Returns the main metric of the shared model, by id; ``None`` without one."""
        if self.shared_by_client is None:
            return None
        return self.shared_by_client[self.metric]

    def to_frame(self) -> DataFrame:
        """Returns the scores as a data frame of pandas, not private.

        It has a row for each client that is scored. Columns are the metrics of the client's own
        model, such as ``accuracy``, and those of the other models with the model's name before,
        such as ``shared accuracy`` and ``personal model accuracy``.
        """
        # the run's own clients decide the rows: a baseline may have scored others
        index = pd.Index(list(self.personal_accuracy), name="client")
        return pd.DataFrame(self.columns(), index=index)

    def columns(self) -> dict[str, Mapping[str, Any]]:
        """Returns the columns of :meth:`to_frame`, each with the scores by client."""
        # The last models are the client's own, whose columns have no name of a model.
        *others, _ = self.scores
        models = {"": self.by_client} | {
            "shared " if name == "shared" else f"{name} model ": self.scores[name]
            for name in others
        }
        return {
            f"{name}{metric}": values
            for name, table in models.items()
            for metric, values in table.items()
        }

    def model_for(self, client: str | int) -> nn.Module:
        """Returns the personal model of a client, in evaluation mode.

        Args:
            client: its id.

        Raises:
            ConfigError: no client of that id, or one that was not evaluated.
        """
        # Its model exists in the run, but was not kept: say so, and not that there is no client.
        if self.evaluated is not None and client in self.ids and client not in self.evaluated:
            raise ConfigError(
                f"Client {client!r} is not one of the {len(self.evaluated):,} that were evaluated."
            )
        return self._module(self.personal[place_of(client, self.personal_ids)])

    def predictor(self, client: str | int | None = None) -> Predictor:
        """Returns a model on raw rows of a table: that of a client, or the shared one.

        Args:
            client: id of the client; ``None`` for the shared model.

        Raises:
            ConfigError: data that were no table, no client of that id, one that was not evaluated,
                or no shared model.

        Example:
            >>> import pandas as pd
            >>> from fedmtl import Trainer, load_data
            >>> table = pd.DataFrame({"ward": list("ab") * 10, "age": range(20), "days": range(20)})
            >>> bounds = {"age": [0, 20], "days": [0, 20]}
            >>> data = load_data("table", path=table, client="ward", target="days", bounds=bounds)
            >>> result = Trainer(data=data, privacy=None, rounds=2, progress=False).fit()
            >>> result.predictor("a")(pd.DataFrame({"age": [3, 12]})).shape
            (2,)
        """
        if self.coding is None:
            raise ConfigError(
                f"models of {shown(self.data_name)} take no raw rows of a table: the data of the "
                "run were no table, or had a transform of their own, or the run is of an earlier "
                "version; call Result.model_for(client) on inputs as the run had them."
            )
        if client is None:
            if self.shared is None:
                raise ConfigError(
                    "there is no shared model; give a client, such as "
                    f"predictor({self.personal_ids[0]!r})."
                )
            return Predictor(self._module(self.shared), self.coding)
        if self.shared is not None:
            # A client that came later has no model of its own, and can still be served.
            try:
                self.model_for(client)
            except ConfigError as error:
                raise ConfigError(
                    f"{error} The shared model is available: leave the client out."
                ) from error
        return Predictor(self.model_for(client), self.coding)

    def _module(self, row: Tensor) -> nn.Module:
        """Returns the network at the parameters (D,), with the bounds that it was scored with."""
        if self.module is None:
            raise ConfigError(
                f"{self.folder} does not say how its model is built, which was none of "
                "fedmtl.models; give it: Result.load(folder, model=...)."
            )
        # A caller may train the module that it gets; the result keeps its own.
        module = copy.deepcopy(self.module).to(device=row.device, dtype=row.dtype)
        Layout.of(module).load(module, row)
        return self.bounds.around(module).eval()


def place_of(client: str | int, ids: Sequence[str]) -> int:
    """Returns the place of a client; a whole number stands for the text of its id.

    Raises:
        ConfigError: no client of that id.
    """
    # as the reader of tables names clients: 1.0 is 1
    for name in (id_of(client), without_zeros(str(client))):
        if name in ids:
            return ids.index(name)
    # The similarity of a million ids would take minutes.
    close = difflib.get_close_matches(str(client), ids[:10_000], n=1)
    hint = ""
    if close:
        hint = f"did you mean {close[0]!r}? "
    raise ConfigError(
        f"There is no client {client!r}; {hint}the {len(ids):,} clients are "
        f"{ids[0]!r} .. {ids[-1]!r}."
    )
