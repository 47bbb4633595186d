"""Settings of secure sums, in which no server is trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .._check import Checked, Whole


@dataclass(frozen=True, kw_only=True)
class SecureAggregation(Checked):
    """Settings of a secure sum: clients need not trust the server with their rows.

    Every client adds a share of the noise to its own row and hides it behind masks that cancel, so
    that the server learns the noised sum of a cohort and nothing else, see
    :mod:`~fedmtl.privacy.secure_sum`. The row of a client is its update if whole clients are
    protected, and the sum of the clipped gradients of its records if single records are.

    Args:
        colluding: clients of a cohort that may tell the server all they have; nobody can measure
            it. None: a third of the cohort, rounded up.
        missing: clients of a cohort that may be lost after it is fixed. Those that are away before
            cost nothing.
        bits: of a number of a sum.

    Raises:
        ConfigError: a value out of range.

    Example:
        >>> from fedmtl import ClientPrivacy, SecureAggregation
        >>> few = SecureAggregation(colluding=2, missing=1)
        >>> privacy = ClientPrivacy(clip_norm=1.0, epsilon=4.0, aggregation=few)
        >>> SecureAggregation().colluding_of(cohort=10)
        4
    """

    colluding: Whole | None = None
    missing: Whole = 0
    bits: Literal[32, 64] = 32

    def colluding_of(self, cohort: int) -> int:
        """Returns the clients of a cohort that may collude with the server.

        Args:
            cohort: its size.
        """
        if self.colluding is None:
            return -(-cohort // 3)
        return self.colluding
