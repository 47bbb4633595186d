"""The messages of a round, collected while its clients are computed piece by piece."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..privacy import Rounds
from ..privacy.clip import RowTotal
from ..privacy.mechanism import Message


class Messages:
    """Collects the rows that the clients of a round send, by release.

    Long rows are clipped and added to a sum piece by piece, so that a round of many clients and a
    large model is never in memory as a whole. The sum is exact and has the bits of the rows' sum.

    Args:
        channel: of the round; it makes the sums.
    """

    def __init__(self, channel: Rounds) -> None:
        self._channel = channel
        self._clients: list[Tensor] = []
        self._collected: dict[str, RowTotal | list[Tensor]] = {}

    def add(self, clients: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Adds the messages of one piece.

        Args:
            clients: int64 (k,), positions of the clients in the data.
            rows: their rows, (k, D) or (R, k, D), by release.
        """
        self._clients.append(clients)
        for name, part in rows.items():
            if name not in self._collected:
                self._collected[name] = self._empty(name, part.device)
            collected = self._collected[name]
            if isinstance(collected, RowTotal):
                collected.add(clients, part)
            else:
                collected.append(part)

    def _empty(self, name: str, device: torch.device) -> RowTotal | list[Tensor]:
        """Returns an empty sum for the rows of a release, or a list if they are kept."""
        # sums are exact on the CPU alone
        if device.type != "cpu":
            return []
        # None for short rows, and for releases that need the rows themselves
        total = self._channel.total(name)
        if total is None:
            return []
        return total

    def by_release(self, clients: Tensor) -> dict[str, Message]:
        """Returns the rows of all clients, or their sum, by release.

        Rows are handed over, so that they are in memory once: call it once.

        Args:
            clients: int64 (k,), of all pieces, ascending: the order of the rows.
        """
        places = [torch.searchsorted(clients, piece) for piece in self._clients]
        messages: dict[str, Message] = {}
        for name, collected in self._collected.items():
            if isinstance(collected, RowTotal):
                messages[name] = collected
            else:
                messages[name] = _joined(collected, places)
        return messages


def _joined(parts: list[Tensor], places: list[Tensor]) -> Tensor:
    """Joins the rows (..., k, D) of pieces, each at its places; they are taken out of the list, so
    that none is in memory twice."""
    count = sum(len(place) for place in places)
    # a piece has its clients in the order of its stacks
    if len(parts) == 1 and torch.equal(places[0], torch.arange(count)):
        return parts.pop()
    first = parts[0]
    dtype = first.dtype
    # clients that start from earlier models may have rows of another precision
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    whole = first.new_empty(*first.shape[:-2], count, first.shape[-1], dtype=dtype)
    del first, part
    for place in places:
        part = parts.pop(0)
        whole[..., place.to(part.device), :] = part.to(dtype)
    return whole
