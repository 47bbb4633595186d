"""Seeded noise of clients that is drawn on the GPU that adds it, for simulations.

Its random words are those that the host draws, so the signs and tails have the same bits. The
normal numbers made of them differ by the rounding of another library's inverse at most. Secure
noise never comes from here: it is drawn on the host, from the operating system.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._devices import on_device
from ...random import philox
from .laws import GaussianNoise, NoiseLaw
from .sources import NoiseSource, SeededSource, check_uses

_MASK = 0xFFFFFFFF
_AT_ONCE = 1 << 24  # numbers, of which a dozen arrays of 8 bytes are made


def source_there(
    law: NoiseLaw, sources: Sequence[NoiseSource], device: torch.device
) -> SeededSource | None:
    """Returns the source of seeded Gaussian noise off the CPU; None for all other noise, which is
    drawn on the host.

    Args:
        law: of the noise.
        sources: of each repetition.
        device: on which the sums are.
    """
    first = sources[0]
    # A law of one's own has its own inverse, which is in NumPy.
    there = device.type != "cpu" and len(sources) == 1 and type(law) is GaussianNoise
    if there and isinstance(first, SeededSource) and first.name == "seeded":
        return first
    return None


def gaussian_rows(
    law: NoiseLaw,
    source: SeededSource,
    purpose: str,
    uses: Tensor,
    keys: Tensor,
    size: int,
    device: torch.device,
) -> Tensor:
    """Returns Gaussian noise of clients at sensitivity 1, as :meth:`.laws.NoiseLaw.draw_rows`.

    Args:
        law: whose multiplier is the standard deviation.
        source: whose seed addresses the words.
        purpose: name of the release.
        uses: int64 (k,) on the host, the number of each client's use.
        keys: int64 (k,) on the host, keys of the clients.
        size: numbers a client.
        device: of the result.

    Returns:
        (k, size) float64.

    Raises:
        PrivacyError: a use beyond 2**32.
    """
    out = torch.empty(len(keys), size, dtype=torch.float64, device=device)
    rows = max(1, _AT_ONCE // max(1, size))
    for first in range(0, len(keys), rows):
        part = slice(first, first + rows)
        sign, tail = tails_on(source, purpose, uses[part], keys[part], size, device)
        out[part] = torch.special.ndtri(tail).mul_(sign).mul_(law.multiplier)
    return out


def tails_on(
    source: SeededSource, purpose: str, uses: Tensor, keys: Tensor, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the signs and tails of :meth:`.sources.SeededSource.tails`, to the bit, on a device:
    float64 (k, size) each.

    Args:
        source: whose seed addresses them.
        purpose: name of the release.
        uses: int64 (k,) on the host.
        keys: int64 (k,) on the host.
        size: numbers a client.
        device: of the results.

    Raises:
        PrivacyError: a use beyond 2**32.
    """
    check_uses(uses.numpy())
    place = torch.arange(-(-size // 2), device=device)
    use = on_device(uses, device)[:, None]
    client = on_device(keys, device)[:, None]
    key = int(source.key(purpose))
    words = philox(key, place[None], use, client & _MASK, client >> 32 & _MASK)
    # int64 has the bits of the unsigned words; their order is that of the host's.
    pairs = [words[i] << 32 | words[i + 1] for i in (0, 2)]
    word = torch.stack(pairs, -1).flatten(1)[:, :size]
    # The shift of a signed number repeats its sign, which is no bit of the tail.
    tail = (word >> 1 & (1 << 63) - 1 | 1).double().mul_(2.0**-64)
    sign = 1.0 - 2.0 * (word & 1).double()
    return sign, tail.clamp_(max=0.5 - 2.0**-54)
