"""A look at what is handed to releases, before clip and noise: for audits and tests alone, it is private."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Tap = Callable[[int, str, Tensor, Tensor], None]
"""(step, release, clients (k,) int64, rows (k, D)): called with the row of every client that takes part in a release.
It is called where a replay forces the released value, too."""
