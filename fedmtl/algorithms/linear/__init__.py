"""Linear models, for several methods: data, losses, optima and exact local fits.

Single-task fits, and the fit of all records without noise, are computed here to the last digits,
for studies and tests: :func:`minimize` for one client or for pooled records, :func:`fit_own` for a
client's own part beside a shared one, :meth:`TaskStack.fit` for all clients at once.
``LinearData.of_data`` makes the rows of a dataset.
"""

from .data import LinearData, LinearLoss
from .evidence import own_ridges
from .solve import Minimum, fit_own, minimize
from .stack import TaskStack

__all__ = ["LinearData", "LinearLoss", "Minimum", "TaskStack", "fit_own", "minimize", "own_ridges"]
