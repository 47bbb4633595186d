"""The findings of an audit: one a check, and the table of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .._rounding import rounded_up

LEVEL = 1e-6
"""Level of every statistical finding. An audit has about 30 of them, so the level of the whole is
below 5e-5: a false alarm in 1,000 audits has probability at most 5 %."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: name, such as ``"noise law: tensors of update"``; the part before the colon is the
            kind of check.
        statistic: the measured number; NaN without one.
        threshold: the value of the statistic at which the claim is refuted.
        refuted: True if the measurement contradicts the claim. False never means that the claim is
            proved.
        detail: the number of samples, the pair or the tensor of the figure, in words.
        level: probability of a false alarm of this check; 0 for deterministic checks.
        skipped: nothing was measured; ``detail`` says why.

    Example:
        >>> from fedmtl.audit import Finding
        >>> Finding("noise", statistic=0.31, threshold=1.96, refuted=False, level=1e-6).verdict
        'could not refute at level 1e-06'
    """

    check: str
    statistic: float
    threshold: float
    refuted: bool
    detail: str = ""
    level: float = 0.0
    skipped: bool = False

    @property
    def verdict(self) -> str:
        """Returns one phrase: refuted with the reason, or that (and at which level) it could not be
        refuted."""
        if self.skipped:
            return f"not checked: {self.detail}"
        if self.refuted:
            return f"REFUTED: {self.detail}"
        if self.level:
            return f"could not refute at level {self.level:.0e}"
        return "could not refute"


def low_p(check: str, p_value: float, detail: str) -> Finding:
    """Returns a finding that is refuted by a p-value below the level (also by one that is not a
    number)."""
    return Finding(check, p_value, LEVEL, not p_value >= LEVEL, detail, LEVEL)


def too_large(check: str, statistic: float, threshold: float, detail: str) -> Finding:
    """Returns a finding that is refuted by a statistic above ``threshold`` (also by one that is not
    a number)."""
    return Finding(check, statistic, threshold, not statistic <= threshold, detail)


def exact(check: str, wrong: int | Sequence[str], detail: str) -> Finding:
    """Returns a finding that is refuted by any violation: ``wrong`` is their number, or has each in
    words, of which the first three take the place of ``detail``."""
    count, words = (
        (wrong, "") if isinstance(wrong, int) else (len(wrong), "; ".join(dict.fromkeys(wrong[:3])))
    )
    return Finding(check, float(count), 0.0, count > 0, words or detail)


def skipped(check: str, reason: str) -> Finding:
    """Returns the finding of a check that does not apply."""
    return Finding(check, math.nan, math.nan, False, reason, skipped=True)


def any_refuted(findings: Sequence[Finding]) -> bool:
    """Returns True if a check refuted its claim.

    Args:
        findings: of an audit.

    Returns:
        True for at least one refuted claim; the exit code of ``fedmtl audit`` is then 1.

    Example:
        >>> from fedmtl.audit import Finding, any_refuted
        >>> any_refuted([Finding("noise", statistic=7.2, threshold=1.96, refuted=True)])
        True
    """
    return any(finding.refuted for finding in findings)


def table(findings: Sequence[Finding]) -> str:
    """Formats findings as a table of text.

    Args:
        findings: of an audit; an empty list has the header alone.

    Returns:
        Lines of check, statistic, threshold and verdict, one a finding, under a header.

    Example:
        >>> from fedmtl.audit import Finding, any_refuted, table
        >>> findings = [Finding("noise", statistic=0.31, threshold=1.96, refuted=False)]
        >>> print(table(findings))
        check  statistic  threshold  verdict
        noise       0.31       1.96  could not refute
        >>> any_refuted(findings)
        False
    """
    cells = [("check", "statistic", "threshold", "verdict")]
    cells += [(f.check, _number(f.statistic), _number(f.threshold), f.verdict) for f in findings]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return "\n".join(
        f"{check:<{widths[0]}}  {statistic:>{widths[1]}}  {threshold:>{widths[2]}}  {verdict}"
        for check, statistic, threshold, verdict in cells
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return rounded_up(value)
