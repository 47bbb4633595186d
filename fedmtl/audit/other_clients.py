"""Other data in the place of a run's own, of which nothing but public facts stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..data import FederatedDataset
from ..data.examples import Examples
from ..data.rows import csr, offsets_of, ranges, select
from ..random import derive_key


def replaced_data(data: FederatedDataset, seed: int, *, counts: bool = True) -> FederatedDataset:
    """Returns the same clients with other examples, and other numbers of them: only public facts
    stay.

    Features become uniform numbers over half of their range, labels a skewed draw of the classes,
    floating targets uniform numbers; the total number of examples stays.

    Without ``counts`` the numbers of examples stay, which are public under record-level privacy.
    """
    generator = _generator(seed, "audit/replaced")
    sides = []
    for side in (data.train, data.test):
        other = _others(side, torch.ones(len(side.y), dtype=torch.bool), data.classes, generator)
        # numbers of examples are as private as the examples, if the unit is a client
        sides.append(
            replace(other, offsets=offsets_of(_replaced_counts(side.counts, generator)))
            if counts
            else other
        )
    return replace(data, train=sides[0], test=sides[1], verify=False)


def replaced_records(
    data: FederatedDataset, places: Tensor, seed: int, shift: int | None = None
) -> FederatedDataset:
    """Returns the same data with other training records at ``places``, int64 (k,).

    With ``shift`` their targets are ``1 + shift`` classes farther, or far below or above all.
    """
    chosen = torch.zeros(len(data.train.y), dtype=torch.bool).index_fill(0, places, True)
    side = _others(data.train, chosen, data.classes, _generator(seed, "audit/replaced"))
    y = data.train.y
    if shift is not None and data.classes is not None:
        side.y[chosen] = (y[chosen] + 1 + shift) % data.classes
    elif shift is not None:
        low = y.min()
        high = y.max()
        # a whole range below all, or above
        side.y[chosen] = (2 * low - high - 1, 2 * high - low + 1)[shift % 2]
    return replace(data, train=side, notes=(), verify=False)


def replaced_client(
    data: FederatedDataset, client: int | Tensor, records: int | None, seed: int
) -> FederatedDataset:
    """Returns the same data, but ``client``, or each of several int64 (k,), has ``records``
    training examples, or with None as many as before, whose features are as large as any, or tiny.

    Its features are the largest and the smallest value of all, at random, in every second example a
    thousandth of that; its labels are the first or the last class, its targets the largest or the
    smallest.
    """
    clients = torch.as_tensor(client).reshape(-1)
    generator = _generator(seed, "audit/one client")
    train = _replaced_part(data.train, clients, records, generator)
    test = _replaced_part(data.test, clients, None, generator)
    return replace(data, train=train, test=test, notes=(), verify=False)


def _generator(seed: int, purpose: str) -> torch.Generator:
    # shifted, as a seed of PyTorch is a signed number of 64 bits
    return torch.Generator().manual_seed(derive_key(seed, purpose) >> 1)


def _others(
    side: Examples, rows: Tensor, classes: int | None, generator: torch.Generator
) -> Examples:
    """Returns the examples with uniform numbers, and other labels, at ``rows`` (N,) bool."""

    def uniform(values: Tensor) -> Tensor:
        """Returns numbers over the lower half of the range of ``values``."""
        if not values.numel():
            return values
        low = float(values.min())
        high = float(values.max())
        chance = torch.rand(values.shape, generator=generator)
        if values.is_floating_point():
            # half of the range keeps numbers within any public bounds of the data
            return (low + 0.5 * (high - low or 1.0) * chance).to(values.dtype)
        return (low + (int(high - low) // 2 + 1) * chance).floor().to(values.dtype)

    def labels(values: Tensor) -> Tensor:
        return (torch.rand(values.shape, generator=generator) ** 2 * (classes or 1)).to(
            values.dtype
        )

    y = _changed(side.y, rows, uniform if classes is None else labels)
    return Examples(_changed(side.x, rows, uniform), y, side.offsets)


def _changed(x: Tensor, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns x (N, ...), dense or sparse, with ``change(numbers)`` at ``rows`` (N,) bool."""
    if x.layout == torch.sparse_csr:
        # the stored places stay, and their values change
        row = torch.repeat_interleave(torch.arange(len(rows)), x.crow_indices().diff())
        return csr(
            x.crow_indices(), x.col_indices(), _changed(x.values(), rows[row], change), x.shape[1]
        )
    x = x.clone()
    x[rows] = change(x[rows])
    return x


def _replaced_counts(counts: Tensor, generator: torch.Generator) -> Tensor:
    """Returns other numbers of examples with the same total: shuffled, and one example moved in
    every second pair."""
    mixed = counts[torch.randperm(len(counts), generator=generator)].clone()
    half = len(mixed) // 2
    # a client keeps one example at least
    giving = (mixed[:half] > 1) & (torch.rand(half, generator=generator) < 0.5)
    mixed[:half] -= giving.to(mixed)
    mixed[half : 2 * half] += giving.to(mixed)
    return mixed


def _replaced_part(
    side: Examples, clients: Tensor, records: int | None, generator: torch.Generator
) -> Examples:
    if records is None:
        counts = side.counts
    else:
        counts = side.counts.index_fill(0, clients, records)
    index, client_of = ranges(side.offsets[:-1], counts)
    own = torch.isin(client_of, clients)
    start = side.offsets[client_of]
    # a client that gets more records than it has repeats them; their values are replaced below
    index = torch.where(own, start + (index - start) % side.counts[client_of].clamp(min=1), index)

    def extremes(values: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns a source that draws the largest or the smallest of all numbers."""
        if values.numel():
            ends = torch.stack([values.min(), values.max()])
        else:
            ends = values.new_zeros(2)
        return lambda like: ends[torch.randint(2, like.shape, generator=generator)]

    x = select(side.x, index)
    x = _changed(x, own, extremes(side.x.values() if side.x.layout == torch.sparse_csr else side.x))
    if x.is_floating_point():
        # tiny features meet no clip, and large ones do
        second = torch.zeros_like(own).index_fill(0, own.nonzero()[1::2, 0], True)
        # a power of two, which rounds nothing
        x = _changed(x, second, lambda values: values * 2.0**-10)
    return Examples(x, _changed(side.y[index], own, extremes(side.y)), offsets_of(counts))
