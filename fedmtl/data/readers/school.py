"""ILEA School: exam scores of 15,362 pupils of 139 schools, one client a school."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.io import loadmat
from scipy.io.matlab import MatReadError
from torch import Tensor

from ..._check import check_arguments
from ...errors import DataError
from ..arrays import as_tensor
from ..dataset import FederatedDataset
from ..examples import Domain, Examples
from ..loaders import reader
from ..transforms import SHRINK

FILE = "school.mat"
SCORES = (1.0, 70.0)
"""The public range of an exam score."""

STANDARDIZED = (
    "features were standardized with each client's own training mean and standard deviation, "
    "without noise: these statistics are in every model, and no epsilon of single records covers "
    "them (that of whole clients does)"
)
CENTRED = (
    "targets were centred with each client's own training mean, without noise: it is needed to use "
    "a model, and no epsilon of single records covers it (that of whole clients does)"
)


@reader("school")
@check_arguments
def read_school(
    root: str | Path,
    *,
    test_fraction: float = 0.3,
    standardize: Literal["client"] | None = None,
    targets: Literal["score", "unit", "centred"] = "score",
    unit_rows: bool = False,
    seed: int = 0,
    min_examples: int = 2,
) -> FederatedDataset:
    """Reads school.mat: a regression of exam scores, ids ``school-0``, ``school-1``, ... in the
    order of the file.

    The protocol of Liu, Hu, Wu, Smith: "On Privacy and Personalization in Cross-Silo Federated
    Learning", NeurIPS 2022, is ``standardize="client"``, ``targets="unit"`` and 30% for test. That
    of Liang et al., "Model-protected multi-task learning", 2020, as far as it is printed, is
    ``standardize="client"``, ``targets="centred"``, ``unit_rows=True`` and 70% for test: rows of
    unit length have no place for an intercept, and if whole schools are the protected unit, a
    statistic that a school computes of its own pupils needs no noise.

    Args:
        root: the .mat file, or the folder of school.mat: cells X of (pupils, features) and Y of
            (pupils, 1), one a school.
        test_fraction: share of each school's pupils held out for test.
        standardize: ``None``, features as they are; ``"client"``, minus the mean and over the
            standard deviation of the client's own training rows (a column that does not vary there
            is only centred). These statistics come from private records without noise; the
            dataset's ``notes`` say so.
        targets: ``"score"``, as they are; ``"unit"``, the public range 1 to 70 mapped to 0 to 1;
            ``"centred"``, that minus the mean of the school's own training pupils, from private
            records as above.
        unit_rows: rows scaled to ``||x||_2 = 1`` (never more, and at least 1 - 2^-19; a row of
            zeros stays), after standardizing.
        seed: of the split, keyed by the school's id.
        min_examples: schools with fewer pupils are left out.

    Returns:
        Features (d,), 28 in the original file, and targets, both float32.

    Raises:
        DataError: an unreadable file, cells that do not agree, values that are not finite numbers,
            scores outside 1 to 70.
        ConfigError: an impossible setting.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from scipy.io import savemat
        >>> from fedmtl.data import read_school
        >>> cells = np.empty((1, 2), dtype=object), np.empty((1, 2), dtype=object)
        >>> for school in range(2):
        ...     cells[0][0, school] = np.ones((10, 3))
        ...     cells[1][0, school] = np.full((10, 1), 20.0)
        >>> with TemporaryDirectory() as folder:
        ...     savemat(Path(folder, "school.mat"), {"X": cells[0], "Y": cells[1]})
        ...     data = read_school(folder)
        >>> data.ids, data.train.counts.tolist()
        (('school-0', 'school-1'), [7, 7])
    """
    if Path(root).is_dir():
        file = Path(root) / FILE
    else:
        file = Path(root)
    clients = _schools(file)
    if targets != "score":
        low, high = SCORES
        clients = {name: (x, (y - low) / (high - low)) for name, (x, y) in clients.items()}
    data = FederatedDataset.from_tensors(
        {name: (x.astype(np.float32), y.astype(np.float32)) for name, (x, y) in clients.items()},
        test_fraction=test_fraction,
        seed=seed,
        min_examples=min_examples,
        classes=None,
        name="school",
        source=str(file),
    )
    if standardize is not None:
        data = standardized(data)
    if targets == "centred":
        data = centred(data)
    if not unit_rows:
        return data
    domain = Domain(data.train.x.shape[1] ** 0.5, 1.0, SCORES[1] if targets == "score" else 1.0)
    return replace(with_unit_rows(data), domain=domain)


def centred(data: FederatedDataset) -> FederatedDataset:
    """Returns the data with every client's targets minus the mean of its own training targets."""
    mean = _client_means(data.train.y.double()[:, None], data.train.counts)[:, 0]

    def less_mean(side: Examples) -> Examples:
        return replace(side, y=(side.y.double() - mean.repeat_interleave(side.counts)).float())

    return _changed(data, less_mean, CENTRED)


def with_unit_rows(data: FederatedDataset) -> FederatedDataset:
    """Returns the data with every row of features (d,) scaled to length 1; a function of that row
    only."""

    def unit(side: Examples) -> Examples:
        wide = side.x.double()
        norm = wide.norm(dim=1, keepdim=True)
        return replace(side, x=torch.where(norm > 0, wide * (SHRINK / norm), 0.0).float())

    return _changed(data, unit)


def standardized(data: FederatedDataset) -> FederatedDataset:
    """Returns the data with every client's features centred and scaled by its own training rows, in
    float32.

    A column that is constant in a client's training rows is centred and not scaled.
    """
    wide = data.train.x.double()
    counts = data.train.counts
    mean = _client_means(wide, counts)
    variance = _client_means((wide - mean.repeat_interleave(counts, 0)).square(), counts)
    floor = 1e-12 * mean.square()  # a constant column's variance is rounding
    scale = torch.where(variance > floor, variance, torch.ones_like(variance)).sqrt()

    def scaled(side: Examples) -> Examples:
        centre = mean.repeat_interleave(side.counts, 0)
        spread = scale.repeat_interleave(side.counts, 0)
        return replace(side, x=((side.x.double() - centre) / spread).float())

    return _changed(data, scaled, STANDARDIZED)


def _changed(
    data: FederatedDataset, change: Callable[[Examples], Examples], *notes: str
) -> FederatedDataset:
    return replace(
        data, train=change(data.train), test=change(data.test), notes=(*data.notes, *notes)
    )


def _client_means(values: Tensor, counts: Tensor) -> Tensor:
    """Averages the rows (N, d), float64, of each client: (n, d)."""
    # one pass over all rows, whatever the number of clients
    return torch.segment_reduce(values, "mean", lengths=counts)


def _schools(file: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns each school's features (pupils, d) and scores (pupils,), float64."""
    try:
        content = loadmat(file)
    except (
        NotImplementedError,
        MatReadError,
        ValueError,
        TypeError,
        OSError,
        EOFError,
        LookupError,
        MemoryError,
    ) as error:
        raise DataError(
            f"{file} cannot be read as a MATLAB file ({error}); it may be missing or truncated, "
            "and one of version 7.3 is to be saved with -v7."
        ) from error
    x, y = (np.asarray(content.get(name, 0)) for name in "XY")
    if x.dtype != object or y.dtype != object or x.size != y.size:
        raise DataError(
            f"{file}: X or Y is missing or has no cell for a school; accepted: a "
            "matrix of each a school."
        )
    schools: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for number, pair in enumerate(zip(x.flat, y.flat, strict=True)):
        where = f"{file}: school-{number}"
        features, scores = (
            as_tensor(c, where, field).double().numpy() for c, field in zip(pair, "XY", strict=True)
        )
        # the domain of the data states these bounds, and privacy rests on them
        outside = (scores < SCORES[0]) | (scores > SCORES[1])
        if outside.any():
            raise DataError(
                f"{where}, row {outside.argmax()}: Y holds {scores[outside][0]:g}; a score must be "
                "from 1 to 70."
            )
        schools[f"school-{number}"] = features, scores.ravel()
    return schools
