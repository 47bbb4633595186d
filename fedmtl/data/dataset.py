"""The dataset type: all clients' examples as flat tensors with offsets, ragged and without
padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._check import id_of
from .._text import counted
from ..errors import ConfigError, DataError
from . import checks, rows
from .assemble import check_alike, check_side, checked
from .examples import SIDES, DataSpec, Domain, Examples, Side, client_keys
from .fingerprint import digest, facts_of
from .grouping import group_rows, splits_of
from .missing import MissingClient
from .sides import Classes, Selection, scaled, sides_of
from .transforms import Bounded, Cast, Integers, RowBound, Transform
from .units import TargetScale, in_units

if TYPE_CHECKING:
    from .readers.schema import TableSchema


@dataclass(frozen=True, eq=False)
class FederatedDataset:
    """Holds every client's training and test examples.

    ``torch.save(data, file)`` writes them, and ``torch.load(file, weights_only=False, mmap=True)``
    leaves x and y on disk and reads rows as they are gathered.

    Args:
        train: the training side, over n clients; only peer-to-peer learning has a use for one
            without examples.
        test: the test side, over the same clients in the same order. A client without test examples
            trains, and is left out of test scores; one client at least has some.
        ids: the clients' ids, distinct texts.
        transform: applied by :meth:`gather`, from storage to float.
        classes: number of classes, labels in ``0 .. classes - 1``; None for regression (floating
            targets). Two classes may be coded -1 and +1 too, and as floating numbers; ``train`` and
            ``test`` then have them as 0 and 1. With 2 classes and targets (N, T) every example has
            T labels, each there (1) or not (0).
        name: for messages and reports.
        notes: the values in these data that were computed from the records before any privacy
            mechanism, a sentence each: a privacy report must list them as outside its epsilon.
        inferred: the parts of a model's shape that were read off the records, as they were not
            given: ``"classes"``, ``"categories.COLUMN"`` of a column coded by its categories, or
            ``"range.COLUMN"``, numbers without a public range. A run with noise refuses them.
        public: examples that belong to no client and are taken as public, coded as the clients'
            ones, or None: a choice from them (of a step size, say) costs no privacy.
        domain: public bounds that every example keeps, or None.
        limit: public bound on the absolute value of a target, at which predictions are cut off
            wherever they are scored, and in the models of a result; infinite for none.
        target_range: public range [low, high] of the target in its own units, if it is stored
            mapped to [-1, 1]; scores are in these units.
        target_scale: ``"log"`` if the logarithm of the target, within that of the range, is mapped;
            predictions and scores are in the target's own units all the same.
        cut_targets: share of the targets that were beyond ``target_range`` in the records, and were
            cut there; not private.
        schema: the coding of raw rows of the table as features, and of predictions as values of the
            target; None of other data.
        verify: check every value (finite features, labels within the classes). Lengths are always
            checked.

    Raises:
        DataError: malformed data; the message names the client, the field and the accepted values.

    Example:
        >>> import torch
        >>> from fedmtl import FederatedDataset
        >>> data = FederatedDataset.from_tensors(
        ...     {
        ...         "ann": (torch.rand(8, 3), torch.rand(8)),
        ...         "bob": (torch.rand(4, 3), torch.rand(4)),
        ...     },
        ...     test_fraction=0.25,
        ...     classes=None,
        ... )
        >>> data.ids, data.train.counts.tolist(), data.spec.shape
        (('ann', 'bob'), [6, 3], (3,))
    """

    train: Examples
    test: Examples
    ids: tuple[str, ...]
    transform: Transform = Cast()  # noqa: RUF009
    classes: int | None = None
    name: str = "data"
    notes: tuple[str, ...] = ()
    public: Examples | None = None
    domain: Domain | None = None
    inferred: tuple[str, ...] = ()
    limit: float = math.inf
    target_range: tuple[float, float] | None = None
    target_scale: TargetScale = "linear"
    cut_targets: float = 0.0
    schema: TableSchema | None = None
    verify: InitVar[bool] = True

    def __post_init__(self, verify: bool) -> None:
        for name in ("ids", "notes", "inferred", "target_range"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(values))
        checks.check_ids(self.ids, self.name)
        checks.check_transform(self.transform, self.name)
        checks.check_target_scale(self.target_scale, self.target_range, self.name)
        for name in SIDES:
            check_side(self.side(name), name, len(self), self.classes, self.name)
            # reading all values takes a while, and data that are made of checked ones need it once
            if verify:
                self._check_values(name, self.ids)
        if verify and self.public is not None:
            self._check_values("public", ("public",) * (len(self.public.offsets) - 1))
        check_alike(self.train, self.test, self.public, self.name)

    def _check_values(self, name: str, ids: Sequence[str]) -> None:
        """Checks all values of a side, and keeps labels of -1 and +1 as 0 and 1."""
        part = checked(getattr(self, name), self.classes, ids, f"{self.name} ({name})")
        object.__setattr__(self, name, part)

    def __repr__(self) -> str:
        clients = counted(len(self), "client")
        shape = f"test examples of shape {self.spec.shape}, {self.spec.kind}"
        sides = f"{len(self.train):,} training and {len(self.test):,} {shape}"
        return f"FederatedDataset {self.name!r}: {clients}, {sides}"

    def __len__(self) -> int:
        """Returns the number of clients n."""
        return len(self.ids)

    def side(self, side: Side) -> Examples:
        """Returns the training or the test examples.

        Args:
            side: ``"train"`` or ``"test"``; anything else is a :class:`ConfigError`.
        """
        if side not in SIDES:
            raise ConfigError(f"side is {side!r}; accepted: {', '.join(map(repr, SIDES))}.")
        part: Examples = getattr(self, side)
        return part

    @cached_property
    def keys(self) -> Tensor:
        """Returns each client's address in keyed random draws, int64 (n,), on the host."""
        return client_keys(self.ids)

    @cached_property
    def spec(self) -> DataSpec:
        """Returns the shape after the transform, classes and number of clients."""
        x = self.train.x
        # one row of zeros, so that the shape cannot follow from the records
        probe = self.transform(torch.zeros(1, *x.shape[1:], dtype=x.dtype), torch.float32)
        return DataSpec(
            tuple(probe.shape[1:]),
            self.classes,
            len(self),
            tuple(self.train.y.shape[1:]),
            integer=not probe.is_floating_point(),
            inputs=getattr(self.transform, "inputs", ()),
        )

    @property
    def unit(self) -> float:
        """Returns half of the target's range, which divided it; 1 without a range or of logs."""
        # an error on the scale of logarithms is a ratio, and has no unit
        if self.target_range is None or self.target_scale == "log":
            return 1.0
        return (self.target_range[1] - self.target_range[0]) / 2

    def in_units(self, y: Tensor) -> Tensor:
        """Returns targets or predictions in the target's own units.

        Args:
            y: as stored, of any shape; it is returned as it is if the target has no range.
        """
        if self.target_range is None:
            return y
        return in_units(y, self.target_range, self.target_scale)

    def gather(
        self,
        side: Side,
        index: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns examples by flat row number, transformed.

        Args:
            side: ``"train"`` or ``"test"``.
            index: int64 row numbers of that side, of any shape and on any device.
            dtype: floating dtype of the features, and of floating targets.
            device: the device of the result (rows travel in their storage dtype); None: that of
                the data.

        Returns:
            x (*index.shape, *spec.shape) and y (*index.shape, ...), int64 labels or floating
            targets.
        """
        part = self.side(side)
        flat = index.reshape(-1).to(part.x.device, non_blocking=not index.is_cuda)
        x = rows.take(part.x, flat)
        y = rows.take(part.y, flat)
        if device is not None:
            # before the transform, as bytes travel faster than the floats that they become
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
        x = self.transform(x, dtype)
        if y.is_floating_point():
            y = y.to(dtype)
        else:
            y = y.long()
        return x.reshape(*index.shape, *x.shape[1:]), y.reshape(*index.shape, *y.shape[1:])

    @classmethod
    def from_tensors(  # noqa: PLR0913 - a program gives one or two of the options
        cls,
        clients: Mapping[str, Any] | Mapping[int, Any],
        *,
        test: Mapping[str, Any] | Mapping[int, Any] | None = None,
        test_fraction: float | None = None,
        seed: int = 0,
        min_examples: int = 1,
        draw: int | None = None,
        classes: Classes = "infer",
        transform: Transform | None = None,
        domain: Domain | None = None,
        name: str = "data",
        source: str | None = None,
    ) -> FederatedDataset:
        """Returns a dataset from one (x, y) pair a client, tensors or arrays (examples, ...), or a
        torch Dataset.

        Args:
            clients: each client's examples, a pair (x, y) or a ``torch.utils.data.Dataset`` whose
                items are such pairs of one example; only for training if ``test`` is used. An id
                that is a whole number is kept as a text, 7 as ``"7"``. If x is a mapping from
                names to tensors or arrays (examples, ...), every client has these inputs, and the
                model takes them by name.
            test: each client's test examples, if it has any; one client at least has both kinds.
                Clients without training examples are left out.
            test_fraction: share of each client's examples held out for test, above 0 and below 1,
                those of ``test`` included; each side keeps at least 1 example, and the only example
                of a client is for training. None uses ``test``, and holds out 0.2 without it.
            seed: of the split and of the draw of clients, both keyed by the client's id.
            min_examples: clients with fewer examples, for training and test in all, are left out.
            draw: number of clients, drawn at random from the others; None takes all.
            classes: number of classes, None for regression, ``"infer"``: two for targets -1 and +1,
                or floating 0.0 and 1.0, else the largest label plus 1 for integer targets and
                regression for floating ones. An inferred number comes from the records, and a
                run with noise refuses it.
            transform: from storage to float, or :class:`Integers`, with which every x must be
                whole; None scales images of bytes, x uint8 (examples, ..., height, width), to [0,
                1], whose bounds are then the domain, and is :class:`Cast` otherwise.
            domain: public bounds that every example keeps.
            name: for messages and reports.
            source: names the data in messages, such as their file; None for ``name``.

        Raises:
            DataError: malformed data, no client with ``min_examples``, or none with both training
                and test examples.
            ConfigError: an impossible setting, or more clients than there are.
        """
        selection = Selection(test_fraction, seed, min_examples, draw)
        whole = isinstance(transform, Integers)
        sides = sides_of(clients, test, source or name, selection, classes, whole=whole)
        if transform is None:
            transform = sides.packed
        transform, domain = scaled(sides.train.x, transform, domain)
        inferred: tuple[str, ...] = ()
        if classes == "infer":
            inferred = ("classes",)
        facts: dict[str, Any] = {"domain": domain, "inferred": inferred, "verify": False}
        return cls(sides.train, sides.test, sides.ids, transform, sides.classes, name, **facts)

    @classmethod
    def from_columns(
        cls,
        table: Any,
        *,
        client: str,
        target: str,
        features: str | Sequence[str],
        test: Any = None,
        length: int | None = None,
        missing_client: MissingClient = "refuse",
        name: str = "data",
        **options: Any,
    ) -> FederatedDataset:
        """Returns a dataset from a table with a row an example, such as a ``datasets.Dataset``.

        Args:
            table: an object with ``column_names``, whose item at a column's name is that column, or
                one of pandas; or a mapping of splits to such tables, as a ``DatasetDict`` is: of
                ``"train"`` and, unless ``test`` is given, ``"test"``.
            client: the column with each row's client; its values become the ids, as text, in the
                order in which they first occur.
            target: the column to predict: whole labels, real numbers, or lists of one length.
            features: the column to predict from, with numbers, arrays or images (Pillow) of one
                shape, or several columns: of numbers alone they become one feature each, else the
                model takes them by name, as a mapping.
            test: a table of test rows with the same columns.
            length: public length to which lists of whole numbers, such as tokens, are padded with
                0, and at which longer ones are cut. The model then takes them by name, with
                ``mask``, which is 1 for a value of a list, unless a column ``mask`` or
                ``attention_mask`` is among the features. An example has one target, so the loss and
                the scores have no padding; the mask tells the model its places.
            missing_client: of rows without a client, see :class:`~fedmtl.data.TableSettings`.
            name: for messages and reports.
            options: as in :meth:`from_tensors`.

        Raises:
            DataError: a missing column, or malformed rows, named by row and column.
            ConfigError: an impossible setting.
        """
        table, test = splits_of(table, test, name)
        train = group_rows(table, client, target, features, name, length, missing_client)
        held = None
        if test is not None:
            where = f"{name} (test)"
            held = group_rows(test, client, target, features, where, length, missing_client)
        return cls.from_tensors(train, test=held, name=name, **options)

    def subset(self, clients: Sequence[str | int]) -> FederatedDataset:
        """Returns some of the clients, by id.

        Args:
            clients: ids, in the order of the result; a whole number is the text of an id.

        Raises:
            DataError: an unknown client, or one that is given twice.
        """
        positions = {name: i for i, name in enumerate(self.ids)}
        names = [id_of(client) for client in clients]
        for name in names:
            if name not in positions:
                raise DataError(
                    f"{self.name}: there is no client {name!r}; the ids are {self.ids[0]!r} .. "
                    f"{self.ids[-1]!r}."
                )
        places = [positions[name] for name in names]
        return self.take_clients(torch.tensor(places, dtype=torch.int64))

    def take_clients(self, clients: Tensor) -> FederatedDataset:
        """Returns some of the clients, by position.

        Args:
            clients: int64 (k,), positions, in the order of the result.
        """
        ids = tuple(self.ids[i] for i in clients.tolist())
        train = self.train.take_clients(clients)
        test = self.test.take_clients(clients)
        return replace(self, train=train, test=test, ids=ids, verify=False)

    def as_two_classes(self) -> FederatedDataset:
        """Returns the data as two classes if all targets are numbers 0 and 1, or -1 and +1."""
        parts = [part for part in (self.train, self.test, self.public) if part is not None]
        # of all parts, since a test label that does not occur in training is a class as well
        values = torch.cat([part.y.unique() for part in parts]).unique().tolist()
        if self.classes is not None or not (set(values) <= {0, 1} or set(values) <= {-1, 1}):
            return self
        return replace(self, classes=2)

    def bounded(self, bound: RowBound | None) -> FederatedDataset:
        """Returns the same data with features that :meth:`gather` scales down to a bound.

        Args:
            bound: on the features after the transform; None leaves them as they are.
        """
        if bound is None:
            return self
        return replace(self, transform=Bounded(self.transform, bound), verify=False)

    def to(self, device: torch.device | str) -> FederatedDataset:
        """Returns the features and targets on another device; offsets and keys stay on the host.

        Args:
            device: such as ``"cuda"``.
        """
        return replace(self, train=self.train.to(device), test=self.test.to(device), verify=False)

    def fingerprint(self) -> str:
        """Returns the digest (32 hex digits) of all that changes a number of a run."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        parts = {"train": self.train, "test": self.test}
        if self.public is not None:
            parts["public"] = self.public
        # the name and the notes are left out: they change no number of a run
        return digest(facts_of(self.ids, self.classes, self.transform, self.domain), parts)
