"""Models on raw rows of a table: from columns to inputs, and from outputs to predictions in the
target's units."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .._extras import pandas as pd
from ..data import Affine, Cast, FederatedDataset, Integers, Transform
from ..data.readers.columns import Table
from ..data.readers.schema import TableSchema
from ..data.transforms import Bounded
from ..errors import ConfigError, DataError, FedmtlError, first_line
from ..local.losses import LINKS, Link, Loss, binary_cross_entropy, cross_entropy, link_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

logger = logging.getLogger("fedmtl")
_TRANSFORMS: dict[str, type] = {kind.__name__: kind for kind in (Cast, Affine, Integers)}
_ROWS = 1 << 14  # of one batch: predictions of a large table fit into memory

Odds = Literal["softmax", "sigmoid"]
"""The function from a model's outputs to probabilities."""


@dataclass(frozen=True)
class Coding:
    """The coding of raw rows of a table as inputs of a model, and of its outputs as predictions.

    Args:
        schema: from columns to features, and from outputs to the target's values.
        transform: from features to inputs.
        odds: from outputs to probabilities of classes; None if the loss of the run gives them no
            such meaning.
        limit: public bound on predictions, in the units in which targets are stored; infinite for
            none.
        link: from outputs to predictions in these units.
    """

    schema: TableSchema
    transform: Transform
    odds: Odds | None = None
    limit: float = math.inf
    link: Link = "identity"

    @classmethod
    def of(cls, data: FederatedDataset, loss: Loss, own_loss: Any = None) -> Coding | None:
        """Returns the coding of the data of a run; None for data that are no table, or whose
        transform is none of this package's for tables.

        Args:
            data: of the run.
            loss: that it minimizes.
            own_loss: of the algorithm, if it has one; that gives outputs their meaning.
        """
        transform = data.transform
        if isinstance(transform, Bounded):  # the models bound their inputs themselves
            transform = transform.inner
        if data.schema is None or type(transform) not in _TRANSFORMS.values():
            return None
        # A hinge loss has classes too, but its outputs are no log-odds.
        odds: Odds | None = None
        if data.classes is not None and own_loss in (None, "logistic"):
            if loss is cross_entropy:
                odds = "softmax"
            elif loss is binary_cross_entropy:
                odds = "sigmoid"
        schema = replace(data.schema, classes=data.classes)
        return cls(schema, transform, odds, data.limit, link_of(loss))

    def features(self, rows: DataFrame | Table) -> Tensor:
        """Returns the features of raw rows, (n, width), with one warning of the values that are
        cut.

        Raises:
            DataError: see :meth:`TableSchema.encode`.
        """
        features = self.schema.encode(rows)
        if isinstance(rows, Table):
            table = rows
        else:
            table = Table(rows, Path("rows"))
        _warn_of_cuts(self.schema, table)
        return features

    def check_odds(self) -> None:
        """Raises :class:`ConfigError` if the outputs of the model have no meaning as
        probabilities."""
        if self.odds is not None:
            return
        why = "was trained with a loss that gives its outputs no probabilities"
        if self.schema.classes is None:
            why = "predicts a number"
        raise ConfigError(
            f"the model {why}; leave probabilities out, or train with a cross-entropy."
        )

    def chances(self, outputs: Tensor) -> Tensor:
        """Returns the probabilities of the classes, float64 (n, classes), of the outputs of a
        model, (n, outputs)."""
        if self.odds == "softmax":
            return outputs.double().softmax(1)
        # One output is the log-odds of the second class.
        second = outputs.double()[:, 0].sigmoid()
        return torch.stack((1 - second, second), 1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the coding as plain values, JSON-ready."""
        settings = asdict(self.transform)  # type: ignore[call-overload]
        transform = {"class": type(self.transform).__name__, **settings}
        limit = None if math.isinf(self.limit) else self.limit  # JSON has no infinity
        return {
            "table": self.schema.to_dict(),
            "transform": transform,
            "odds": self.odds,
            "limit": limit,
            "link": self.link,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Coding:
        """Returns the coding of plain values, which name no code and no file.

        Raises:
            DataError: values that are not those of a coding.
        """
        names = ("table", "transform", "odds", "limit", "link")
        if not set(names) <= set(values):
            raise DataError(f"it must have {', '.join(names)}.")
        # The file may come from somebody else: each value is one of a list, or in a range.
        limit = values["limit"]
        link = values["link"]
        odds = values["odds"]
        transform = values["transform"]
        if odds not in (None, "softmax", "sigmoid"):
            raise DataError(f"odds is {odds!r}; accepted: 'softmax', 'sigmoid' and null.")
        if link not in LINKS:
            accepted = ", ".join(map(repr, LINKS))
            raise DataError(f"link is {link!r}; accepted: {accepted}.")
        if limit is not None and not (type(limit) in (int, float) and 0 < limit < math.inf):
            raise DataError(f"limit is {limit!r}; it must be null, or a number above 0.")
        if not isinstance(transform, dict) or transform.get("class") not in _TRANSFORMS:
            raise DataError(
                f"transform is {transform!r}; accepted: {', '.join(_TRANSFORMS)}, with "
                "its settings."
            )
        settings = {name: value for name, value in transform.items() if name != "class"}
        try:
            made = _TRANSFORMS[transform["class"]](**settings)
        except (FedmtlError, TypeError) as error:
            raise DataError(f"transform is {transform!r}, which cannot be made: {error}") from error
        schema = TableSchema.from_dict(values["table"])
        return cls(schema, made, odds, math.inf if limit is None else float(limit), link)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model that takes raw rows of a table and predicts the target in its own units.

    Args:
        module: the model, in evaluation mode, with the bounds on its inputs and outputs.
        coding: of its inputs and outputs.
    """

    module: nn.Module
    coding: Coding

    def __call__(self, rows: DataFrame, *, probabilities: bool = False) -> Series | DataFrame:
        """Returns the prediction of every row: a number or the label of a class.

        Values beyond the public range of a column are cut there, and one warning counts them.
        Columns that the model does not take, such as the target, are left out.

        Args:
            rows: n rows with the columns of the run, as they were in its table.
            probabilities: of all classes in place of the most likely one.

        Returns:
            (n,), with the index of ``rows`` and the target's name; with ``probabilities`` (n,
            classes), a column a class.

        Raises:
            DataError: a missing column, a missing or infinite value, a text in place of a number,
                or an unknown category, each with the row.
            ConfigError: probabilities of a model whose outputs have no such meaning.
        """
        schema = self.coding.schema
        if probabilities:
            self.coding.check_odds()
        outputs = self.outputs(self.coding.features(rows))
        if probabilities:
            return pd.DataFrame(
                self.coding.chances(outputs).cpu().numpy(), index=rows.index, columns=schema.names
            )
        return pd.Series(schema.decode(outputs), index=rows.index, name=schema.target)

    def outputs(self, features: Tensor) -> Tensor:
        """Returns the outputs of the model, (n, outputs), in its own units.

        Args:
            features: of n rows, as :meth:`Coding.features` returns them.

        Raises:
            DataError: a whole number that an embedding of the model has no row for, an output that
                is not finite, or a model of another number of outputs than the target needs.
        """
        schema = self.coding.schema
        if not len(features):
            return torch.zeros(0, schema.classes or 1)
        like = next(self.module.parameters())
        try:
            with torch.no_grad():
                parts = [
                    self.module(self.coding.transform(some.to(like.device), like.dtype))
                    for some in features.split(_ROWS)
                ]
        except IndexError as error:
            raise DataError(
                "an embedding of the model has no row for one of the whole numbers from "
                f"{features.min():g} to "
                f"{features.max():g} ({first_line(error)}); give numbers that the run had."
            ) from error
        outputs = torch.cat(parts)
        outputs = outputs.reshape(len(outputs), -1)
        # Two classes may have an output each, or one output for the second.
        accepted = [1]
        if schema.classes is not None:
            accepted = sorted({schema.classes, 1 if schema.classes == 2 else schema.classes})
        if outputs.shape[1] not in accepted:
            raise DataError(
                f"the model has {outputs.shape[1]} outputs, and the target {schema.target!r} needs "
                f"{' or '.join(map(str, accepted))}."
            )
        if not torch.isfinite(outputs).all():
            raise DataError(
                "a prediction is not finite: the training of this model diverged, or a value is "
                "far beyond those of the run."
            )
        return outputs


def _warn_of_cuts(schema: TableSchema, table: Table) -> None:
    """Warns once of all values that are cut at the ends of their ranges."""
    counts = schema.outside(table)
    if counts:
        many = ", ".join(f"{name!r} {count:,}" for name, count in counts.items())
        text = "%s: values outside of the public ranges of the run, cut there (rows of %s): %s"
        logger.warning(text, table.file, f"{len(table):,}", many)
