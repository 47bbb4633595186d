"""Owners in fixed groups, who answer the same query (Farokhi et al. 2021, Remark 2)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError


def copies_of(groups: tuple[tuple[str, ...], ...], ids: tuple[str, ...]) -> np.ndarray:
    """int64 (n,): the number of each owner's copy; groups first come in the order of their first member."""
    place = {name: k for k, name in enumerate(ids)}
    leader = np.arange(len(ids))
    seen: set[str] = set()
    for group in groups:
        for name in group:
            if name not in place:
                raise ConfigError(f"AsyncLearner.groups names {name!r}; the owners are {ids[0]!r} .. {ids[-1]!r}.")
            if name in seen:
                raise ConfigError(f"AsyncLearner.groups has owner {name!r} twice; an owner is in one group at most.")
            seen.add(name)
        if not group:
            raise ConfigError("AsyncLearner.groups has an empty group; each needs at least 1 owner.")
        leader[[place[name] for name in group]] = min(place[name] for name in group)
    return np.unique(leader, return_inverse=True)[1].astype(np.int64)


def expand_groups(copies: Tensor, groups: list[list[int]]) -> Tensor:
    """Ticks of groups as activations of their members, one after the other.

    Args:
        copies: int64 (R, S), which group ticks; -1 is nobody.
        groups: positions of the members of each group.

    Returns:
        int64 (R, S'), the owners, -1 after the last one of a repetition.
    """
    rows = [[owner for group in row if group >= 0 for owner in groups[group]] for row in copies.tolist()]
    width = max((len(row) for row in rows), default=0)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int64).reshape(len(rows), width)
