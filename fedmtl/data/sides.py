"""The two sides of a dataset, train and test, made from the rows of each client: read, chosen,
checked and divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import DataError
from . import rows
from .assemble import Pair, check_options, checked, choose, infer_classes, pool, read_clients, stack
from .examples import Domain, Examples, cut, pixel_domain
from .transforms import Affine, Cast, Packed, Transform

Classes = int | None | Literal["infer"]
"""A number of classes, None for a regression, or the one that the targets suggest."""
_TEST = 0.2  # share of the examples held out for test


@dataclass(frozen=True)
class Selection:
    """The clients that take part, and the division of their examples.

    Args:
        test_fraction: share of each client's examples held out for test; None keeps the division
            that the data have, and without one means 0.2.
        seed: of the division and of the draw of clients.
        min_examples: clients with fewer examples are left out.
        draw: number of clients, drawn at random from the others; None takes all.

    Raises:
        ConfigError: an impossible setting.
    """

    test_fraction: float | None
    seed: int
    min_examples: int
    draw: int | None

    def __post_init__(self) -> None:
        check_options(
            min_examples=self.min_examples, draw=self.draw, test_fraction=self.test_fraction
        )


@dataclass(frozen=True)
class Sides:
    """Both sides of a dataset.

    Attributes:
        train: the training examples of all clients.
        test: the test examples of the same clients.
        ids: of the clients.
        classes: number of classes; None for a regression.
        packed: the inputs in a row of x, if an example has several.
    """

    train: Examples
    test: Examples
    ids: tuple[str, ...]
    classes: int | None
    packed: Packed | None


def sides_of(
    clients: Mapping[Any, Any],
    test: Mapping[Any, Any] | None,
    where: str,
    selection: Selection,
    classes: Classes,
    *,
    whole: bool,
) -> Sides:
    """Returns both sides of the clients' examples, checked and in one order of clients.

    Args:
        clients: each client's examples, see :meth:`FederatedDataset.from_tensors`.
        test: each client's test examples, or None.
        where: names the data in messages.
        selection: of the clients and of the division.
        classes: number of classes, None, or ``"infer"``.
        whole: features must be whole numbers.

    Raises:
        DataError: malformed data, or no client that fits the selection.
        ConfigError: fewer clients than are to be drawn.
    """
    train, packed = read_clients(clients, where)
    held: Mapping[str, Pair] = {}
    if test is not None:
        if not test:
            raise DataError(
                f"{where}: test names no clients; at least one client needs test examples."
            )
        held, _ = read_clients(test, f"{where} (test)", like=train, packed=packed)
    if selection.test_fraction is not None:
        train = pool(train, held)
        held = {}
    ids = choose(
        train,
        held,
        where,
        min_examples=selection.min_examples,
        draw=selection.draw,
        seed=selection.seed,
    )
    sides = {where: stack(train, ids)}
    if held:
        sides = {f"{where} (train)": sides[where], f"{where} (test)": stack(held, ids)}
    if classes == "infer":
        # of both sides: the largest label may be in one of them only
        counts = torch.cat([side.counts for side in sides.values()])
        y = torch.cat([side.y for side in sides.values()])
        classes = infer_classes(y, rows.offsets_of(counts), ids * len(sides), where)
    each = [checked(side, classes, ids, place, whole=whole) for place, side in sides.items()]
    if len(each) == 1:
        share = selection.test_fraction or _TEST
        each = list(cut(each[0], ids, test_fraction=share, seed=selection.seed, where=where))
    return Sides(each[0], each[1], tuple(ids), classes, packed)


def scaled(
    x: Tensor, transform: Transform | None, domain: Domain | None
) -> tuple[Transform, Domain | None]:
    """Returns the transform that was given, or for None the one to [0, 1] of images of bytes with
    its bounds, or a cast."""
    if transform is not None:
        return transform, domain
    if x.dtype == torch.uint8 and x.ndim > 2:
        if domain is None:
            domain = pixel_domain(x.shape[1:])
        return Affine(scale=1 / 255), domain
    return Cast(), domain
