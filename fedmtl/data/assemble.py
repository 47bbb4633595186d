"""Assembly of datasets: the clients' examples are checked and concatenated to flat tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .._check import fraction, given, positive_int
from ..errors import ConfigError, DataError
from ..random import derive_key, keyed_bits
from . import checks, rows
from .arrays import as_targets, as_tensor, stack_rows
from .examples import Examples, client_keys
from .transforms import Packed

Kept = TypeVar("Kept", bound=tuple[Any, Any])
Pair = tuple[Tensor, Tensor]
"""The x (examples, ...), dense or sparse CSR, and the y (examples, ...) of a client."""
_MOST_CLASSES = 1 << 20  # that labels are taken for, if their number is not given


def as_pair(value: Any, where: str) -> tuple[Any, Any]:
    """Returns a client's (x, y): a pair as it is, or the stacked items (x, y) of a torch Dataset.

    Raises:
        DataError: neither, or an item that is no pair.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return value[0], value[1]
    # these have a length and items, too, and are no data set: the user forgot x or y
    plain = isinstance(value, (tuple, list, Tensor, np.ndarray))
    if plain or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise DataError(
            f"{where}: its value must be a pair (x, y), or a torch Dataset of such pairs."
        )
    xs = []
    ys = []
    for number in range(len(value)):
        item = value[number]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(
                f"{where}, example {number} is a {type(item).__name__}; a torch "
                "Dataset must give (x, y)."
            )
        xs.append(item[0])
        ys.append(item[1])
    y = stack_rows(ys, f"{where}, example", "y")
    if xs and all(isinstance(x, Mapping) and x.keys() == xs[0].keys() for x in xs):
        return {
            key: stack_rows([x[key] for x in xs], f"{where}, example", f"x[{key}]") for key in xs[0]
        }, y
    return stack_rows(xs, f"{where}, example", "x"), y


def read_clients(
    clients: Mapping[Any, Any],
    name: str,
    *,
    like: Mapping[str, Pair] | None = None,
    packed: Packed | None = None,
) -> tuple[dict[str, Pair], Packed | None]:
    """Returns the x and y of each client by its id, as tensors that agree in all but their lengths.

    If x is a mapping of several inputs, x becomes one row of numbers an example, float32
    (examples, D).

    Args:
        clients: a pair (x, y) or a torch Dataset for each client.
        name: for messages.
        like: the training examples of the clients if these are their test examples, of which
            there may be none.
        packed: the inputs of ``like``, if it has several.

    Returns:
        The pairs, and the inputs in a row or None.

    Raises:
        DataError: no client, or values that are malformed or do not agree.
    """
    if not isinstance(clients, Mapping):
        raise DataError(
            f"{name}: the clients are a {type(clients).__name__}; give a mapping from the id of "
            "each to its examples, "
            "such as {'ann': (x, y), 'bob': (x, y)}."
        )
    pairs: dict[str, Pair] = {}
    for client, value in checks.by_id(clients, name).items():
        where = f"{name}: client {client!r}"
        x, y = as_pair(value, where)
        if isinstance(x, Mapping) and (packed is not None or not pairs):
            x, packed = _packed_row(x, packed, where)
        elif packed is not None:
            raise DataError(f"{where}, field 'x' is no mapping; accepted: one of {_names(packed)}.")
        x = as_tensor(x, where, "x")
        y = as_targets(y, where)
        checks.check_lengths(x, y, where)
        if len(y) == 0 and like is None:
            raise DataError(f"{where} has no examples; every client needs at least 1.")
        # each client is compared with the first one, of the training side if there is one
        first, pair = next(iter((like or pairs).items()), (client, (x, y)))
        for field, part, other in zip("xy", (x, y), pair, strict=True):
            checks.check_like(part, other, where, field, f"of client {first!r}")
        pairs[client] = x, y
    checks.check_ids(tuple(pairs), name)
    checks.warn_of_alike(tuple(pairs), name)
    return pairs, packed


def _packed_row(x: Mapping[Any, Any], packed: Packed | None, where: str) -> tuple[Tensor, Packed]:
    """Returns several inputs (examples, ...) as one row of numbers an example, and their names,
    shapes and types: ``packed`` if given.

    Raises:
        DataError: inputs unlike ``packed`` or of different lengths, or a whole number of 2^24 or
            more.
    """
    inputs = {str(key): as_tensor(part, where, f"x[{key}]") for key, part in x.items()}
    shapes = tuple(
        (key, tuple(part.shape[1:]), "real" if part.is_floating_point() else "integer")
        for key, part in inputs.items()
    )
    packed = packed or Packed(shapes)
    # in any order: the row takes that of the first client
    if sorted(shapes) != sorted(packed.inputs):
        raise DataError(
            f"{where}, field 'x' has the inputs {_names(Packed(shapes))}; accepted: "
            f"{_names(packed)}."
        )
    lengths = {key: len(part) for key, part in inputs.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            f"{where}, field 'x' has inputs of different lengths: {lengths}; they must agree."
        )
    for key, part in inputs.items():
        # float32, in which the row is stored, has whole numbers up to 2^24 without gaps
        if not part.is_floating_point() and len(part) and int(part.abs().max()) >= 1 << 24:
            raise DataError(
                f"{where}, field 'x[{key}]' holds a whole number of 2^24 or more; "
                "accepted: smaller ones."
            )
    row = [
        inputs[key].float().reshape(len(inputs[key]), math.prod(shape))
        for key, shape, _ in packed.inputs
    ]
    return torch.cat(row, 1), packed


def _names(packed: Packed) -> str:
    return ", ".join(f"{name} {shape} ({kind})" for name, shape, kind in packed.inputs)


def check_options(
    *, min_examples: int, draw: int | None, test_fraction: float | None = None, **_: Any
) -> None:
    """Refuses impossible settings of :func:`choose` and of the split.

    Raises:
        ConfigError: a setting is out of its range; the message has the accepted values.
    """
    positive_int("data", min_examples=min_examples, **given(clients=draw))
    fraction("data", **given(test_fraction=test_fraction))


def choose(
    train: Mapping[str, tuple[Any, Any]],
    test: Mapping[str, tuple[Any, Any]],
    source: str,
    *,
    min_examples: int,
    draw: int | None,
    seed: int,
    test_fraction: float | None = None,
    **_: Any,
) -> list[str]:
    """Returns the clients with ``min_examples`` or more on both sides, of these ``draw`` by draws
    keyed by (seed, id).

    Logs the number of the others. Clients with test examples only are left out, unless
    ``test_fraction`` divides the examples of both sides anew.

    Raises:
        DataError: no client has so many, or none of the clients has test examples if ``test``
            names some.
        ConfigError: fewer than ``draw`` have.
    """
    # both sides count, so that the split does not decide which clients take part
    counts: Counter[str] = Counter()
    for side in (train, test):
        counts.update({client: len(y) for client, (_, y) in side.items()})
    large = [client for client, count in counts.items() if count >= min_examples]
    ids = [client for client in large if client in train or test_fraction is not None]
    if not large:
        hint = ""
        if max(counts.values(), default=0) == 1:
            hint = (
                "; every client has a single one, and nothing is left to test on: name another "
                "column of clients, or give test examples of theirs (data.test_path of a table)"
            )
        raise DataError(
            f"{source}: no client has {min_examples} or more examples (min_examples){hint}."
        )
    kept_apart = bool(test) and test_fraction is None
    if kept_apart and not _any_examples(test, ids):
        raise DataError(
            f"{source}: no client has both training and test examples; accepted: test examples of "
            "a client that trains, or test_fraction=0.2, which divides the examples of both sides "
            "anew, or the training examples alone, with the clients of the test side left to "
            "Result.adapt (fedmtl adapt)."
        )
    checks.say_left_out(
        len(counts) - len(large), source, f"fewer than {min_examples} examples (min_examples)"
    )
    checks.say_left_out(
        len(large) - len(ids), source, "test examples only (test_fraction=0.2 divides theirs anew)"
    )
    if draw is None:
        return ids
    if draw > len(ids):
        raise ConfigError(
            f"{source}: clients is {draw:,}, but only {len(ids):,} have enough examples."
        )
    ids = sample(ids, draw, derive_key(seed, "clients"))
    if kept_apart and not _any_examples(test, ids):
        raise DataError(
            f"{source}: none of the {draw:,} clients that were drawn has test examples; ask for "
            "more clients or for another seed, or give test_fraction=0.2, which divides the "
            "examples of both sides anew."
        )
    return ids


def _any_examples(side: Mapping[str, tuple[Any, Any]], ids: Sequence[str]) -> bool:
    return any(len(side[client][1]) for client in ids if client in side)


def sample(ids: Sequence[str], count: int, key: int) -> list[str]:
    """Returns ``count`` of the ids in their order, the ones with the smallest draws keyed by (key,
    id)."""
    # a draw for each client by its id, so that the other clients in the data do not move it
    bits = keyed_bits(key, client_keys(ids), 0, torch.zeros(len(ids), dtype=torch.int64))
    return [ids[place] for place in bits.argsort(stable=True)[:count].sort().values.tolist()]


def taking_part(
    sides: Sequence[Mapping[str, Kept]], **options: Any
) -> Sequence[Mapping[str, Kept]]:
    """Returns both sides without the clients that :meth:`FederatedDataset.from_tensors` with these
    options leaves out, so that the examples of the others need not be decoded.

    Raises:
        DataError, ConfigError: as :func:`choose` and :func:`check_options`.
    """
    check_options(**options)
    ids = choose(sides[0], sides[1], **options)
    return [{client: side[client] for client in ids if client in side} for side in sides]


def pool(train: Mapping[str, Pair], test: Mapping[str, Pair]) -> dict[str, Pair]:
    """Returns the examples of both sides by client, those for training first."""
    both = dict(train)
    for client, pair in test.items():
        if client in both:
            # training rows first, since the split is keyed by the place of a row
            pair = rows.join([both[client][0], pair[0]]), torch.cat([both[client][1], pair[1]])
        both[client] = pair
    return both


def stack(pairs: Mapping[str, Pair], ids: Sequence[str]) -> Examples:
    """Returns the examples of the clients ``ids``, of whom some may be missing in ``pairs``."""
    there = [pairs[client] for client in ids if client in pairs]
    counts = torch.tensor(
        [len(pairs[client][1]) if client in pairs else 0 for client in ids], dtype=torch.int64
    )
    return Examples(
        rows.join([x for x, _ in there]), torch.cat([y for _, y in there]), rows.offsets_of(counts)
    )


def infer_classes(y: Tensor, offsets: Tensor, ids: Sequence[str], where: str) -> int | None:
    """Returns the number of classes that targets are taken for, or None for a regression.

    Two if the targets are true and false, or -1 and +1 or floating 0.0 and 1.0, both of them
    present, and for several integer labels an example that are all 0 or 1; else the largest label
    plus 1 of integer targets, and None for floating ones.
    """
    if y.dtype == torch.bool:
        return 2
    values = y.unique().tolist()
    # several labels an example may all be 0 in a small set, and are labels still
    if values in ([-1, 1], [0, 1]) or (y.ndim > 1 and not y.is_floating_point() and values == [0]):
        return 2
    if y.is_floating_point():
        return None
    accepted = (
        "labels must be whole numbers from 0 on, or -1 and +1 for two classes (for regression give "
        "classes=None)."
    )
    checks.refuse(y < 0, y, offsets, ids, where, "y", accepted)
    accepted = (
        "as many classes are taken only where they are given, as classes=K (for regression "
        "give classes=None)."
    )
    checks.refuse(y >= _MOST_CLASSES, y, offsets, ids, where, "y", accepted)
    return int(values[-1]) + 1


def checked(
    side: Examples, classes: int | None, ids: Sequence[str], where: str, whole: bool = False
) -> Examples:
    """Returns examples of finite features, and of int64 labels below ``classes`` or, if it is None,
    finite floating targets.

    Two classes may be coded 0 and 1 or -1 and +1, whole or floating; here they become 0 and 1.
    Several labels of two classes an example become uint8, floating features that are to be
    ``whole`` int64.

    Raises:
        DataError: a number that is not finite as float32, a label that is no class, or several
            labels an example of other than two classes.
    """
    checks.check_finite(side.x, side.offsets, ids, where, "x")
    if whole and side.x.is_floating_point() and side.x.layout == torch.strided:
        accepted = "with features that are integers every one must be a whole number below 2^63."
        wrong = (side.x != side.x.floor()) | (side.x.abs() >= 2.0**63)
        checks.refuse(wrong, side.x, side.offsets, ids, where, "x", accepted)
        side = replace(side, x=side.x.long())
    checks.check_finite(side.y, side.offsets, ids, where, "y")
    if classes is None:
        # whole targets of a regression, such as counts
        if side.y.is_floating_point():
            return side
        return replace(side, y=side.y.float())
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise DataError(
            f"{where}: classes is {classes!r}; it must be a whole number of at least 1, or None."
        )
    if classes != 2 and side.y.ndim > 1 and len(ids):
        raise DataError(
            f"{where}: client {ids[0]!r}, field 'y' holds labels of shape "
            f"{tuple(side.y.shape[1:])}; with {classes} classes the label of an example must be "
            "one whole number (of one-hot rows y.argmax(1), of a column y[:, 0]; several labels "
            "that are each 0 or 1 need classes=2, several numbers classes=None)."
        )
    # cut off here, and compared with the targets below: a label 1.5 must not become 1
    y = side.y.long()
    accepted = "class labels must be whole numbers from 0 on (for regression give classes=None)."
    checks.refuse(y != side.y, side.y, side.offsets, ids, where, "y", accepted)
    # all labels +1 could be class 1 of the coding 0 and 1, so one negative label is needed
    if classes == 2 and bool((y < 0).any()) and bool((y.abs() == 1).all()):
        y = (y + 1) // 2
    accepted = f"with {classes} classes a label must be in 0..{classes - 1}"
    if classes == 2:
        accepted += ", or all labels -1 and +1"
    checks.refuse((y < 0) | (y >= classes), y, side.offsets, ids, where, "y", f"{accepted}.")
    if classes == 2 and y.ndim > 1:
        y = y.to(torch.uint8)  # several labels an example, each 0 or 1
    return replace(side, y=y)


def check_side(part: Examples, side: str, clients: int, classes: int | None, name: str) -> None:
    """Checks that one side of the dataset ``name`` has its ``clients``, test examples, and targets
    that fit the number of ``classes``."""
    where = f"{name} ({side})"
    if len(part.offsets) != clients + 1:
        raise DataError(f"{where}: examples of {len(part.offsets) - 1} clients, but {clients} ids.")
    if side == "test" and not len(part):
        raise DataError(f"{name}: no client has test examples; at least one client needs some.")
    if classes is None and not part.y.is_floating_point():
        raise DataError(
            f"{where}: field 'y' has dtype {part.y.dtype} and classes is None (regression); "
            "give floating targets, or the number of classes."
        )


def check_alike(train: Examples, test: Examples, public: Examples | None, name: str) -> None:
    """Checks that all examples of the dataset ``name`` have the shapes and dtypes of the training
    examples."""
    checks.check_like(test.x, train.x, f"{name} (test)", "x")
    if public is not None:
        checks.check_like(public.x, train.x, f"{name} (public)", "x")
        checks.check_like(public.y, train.y, f"{name} (public)", "y")
