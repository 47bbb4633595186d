"""Sums of clipped rows: of their outer products, and by client."""

from __future__ import annotations

import torch
from torch import Tensor

from .._devices import on_device
from ..errors import ConfigError
from .clip import Clip, block_rows, clip_factors, clip_rows, rows_and_norms
from .noise.symmetric import svec


def outer_product_sum(rows: Tensor, clip: Clip | None, *, diagonal: bool) -> Tensor:
    """Sums the outer products of clipped rows.

    Args:
        rows: (k, d), any float dtype and device; rows that are not finite count as zero.
        clip: the bound on one row, or None.
        diagonal: only the diagonal of the products is summed.

    Returns:
        float64 on the CPU: (d (d + 1) / 2,) in the isometric coordinates of
        :func:`~fedmtl.privacy.noise.symmetric.svec`, or (d,) of the diagonal.
    """
    clipped = clip_rows(rows.detach().cpu().double(), clip)
    if diagonal:
        return (clipped * clipped).sum(0)
    values = clipped.numpy()  # of small matrices numpy's products are faster than torch's
    return svec(torch.from_numpy(values.T @ values))


def clipped_segment_sums(
    rows: Tensor,
    client: Tensor,
    count: int,
    clip: Clip | None,
    onto: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:
    """Returns sums of clipped rows by client: per-example clipping of many clients' examples at
    once.

    A row with a NaN or an infinity (or whose norm overflows float64) counts as zero. The rows of a
    client are added in the order in which they come, whatever stands between them; with ``width``
    the sums are exact, as those of clients' rows, and their order does not matter.

    Args:
        rows: (N, D), any float dtype and device; N may be 0.
        client: (N,) int64 on the same device, each in [0, count).
        count: k, number of clients.
        clip: the bound on one row, or None for no clipping.
        onto: the sums that this function returned for earlier rows, to which these are added one by
            one; may be overwritten.
        width: (k,) float64 of each client's grid, from :func:`.clip.sum_width` of its most rows;
            None sums in float64.

    Returns:
        (k, D) float64 on the device of ``rows``, zero for clients without rows.

    Raises:
        ConfigError: ``client`` does not give one client to each row.
    """
    # A wrong place would count an example for another client, whose accounts do not cover it.
    if rows.ndim != 2 or client.shape != rows.shape[:1] or client.dtype != torch.int64:
        raise ConfigError(
            "clipped_segment_sums takes rows (N, D) and client (N,) int64, not "
            f"{tuple(rows.shape)} and {tuple(client.shape)} {client.dtype}."
        )
    if onto is None:
        totals = torch.zeros(count, rows.shape[1], dtype=torch.float64, device=rows.device)
    else:
        totals = onto
    grid = None
    if width is not None:
        grid = on_device(width, rows.device)[:, None]
    # exact: the width is a power of two
    if grid is not None:
        totals = totals.div_(grid)
    block = block_rows(rows)
    chunks = zip(torch.split(rows.detach(), block), torch.split(client, block), strict=True)
    for chunk, chunk_clients in chunks:
        wide, norms = rows_and_norms(chunk, clip)
        factors = clip_factors(norms, clip)[:, None]
        if grid is None:
            clipped = wide * factors
        else:
            clipped = (wide * (factors / grid[chunk_clients])).trunc_()
        if totals.device.type == "cpu":
            totals.index_add_(0, chunk_clients, clipped)
        else:
            totals += _sums_in_order(clipped, chunk_clients, count)
    if grid is None:
        return totals
    return totals.mul_(grid)


def _sums_in_order(rows: Tensor, client: Tensor, count: int) -> Tensor:
    """Returns sums by client without atomic additions, so that the same rows give the same bits."""
    order = torch.argsort(client, stable=True)
    # On a GPU bincount, and a check of the lengths, would wait for all that is queued.
    ends = torch.searchsorted(client[order], torch.arange(count + 1, device=client.device))
    return torch.segment_reduce(rows[order], "sum", lengths=ends.diff(), axis=0, unsafe=True)
