"""StackOverflow tag prediction: the tags of questions and answers from a bag of their words, by
user.

The task of Reddi et al. ("Adaptive federated optimization", ICLR 2021) and of Hu et al. 2023, from
the HDF5 of TensorFlow Federated, ``examples/<client>/{tokens, title, tags}``: a file, or the folder
of ``stackoverflow_train.h5`` and ``stackoverflow_test.h5``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from ..._check import Count, check_arguments
from ...errors import DataError
from ..assemble import taking_part
from ..dataset import FederatedDataset
from ..examples import Domain
from ..loaders import reader, with_settings
from .h5 import H5, Fields, divided, read_h5

TOKEN_COUNTS = "stackoverflow.word_count"
TAG_COUNTS = "stackoverflow.tag_count"
Texts = tuple[list[str], list[str]]
"""A client's texts, and the tags of each, joined by ``|``."""


@dataclass(frozen=True)
class StackOverflowSettings:
    """Settings of :func:`~fedmtl.data.read_stackoverflow`, which takes them as its arguments.

    Args:
        root: the file, or its folder.
        tokens: number of the commonest tokens, which are the features.
        tags: number of the commonest tags, which are the labels.
        counts: the folder of ``stackoverflow.word_count`` and ``stackoverflow.tag_count``, the
            public counts that TensorFlow Federated distributes; None looks beside the data. Without
            them the commonest are counted in the data, which the dataset's notes say.
        clients: keep that many users, drawn at random; None keeps all.
        min_examples: users with fewer texts are left out.
        max_examples: keep the first so many texts of each user; None keeps all.
        test_fraction: share of each user's texts held out for test, those of the source's test part
            included; None keeps the source's own split, and without one means 0.2.
        seed: of the split and of the choice of users.
    """

    root: str | Path
    _: KW_ONLY
    tokens: Count = 10_000
    tags: Count = 500
    counts: str | Path | None = None
    clients: int | None = None
    min_examples: int = 2
    max_examples: Count | None = 1000
    test_fraction: float | None = 0.2
    seed: int = 0


@reader("stackoverflow")
@check_arguments
@with_settings(StackOverflowSettings)
def read_stackoverflow(settings: StackOverflowSettings) -> FederatedDataset:
    """Reads StackOverflow: features (tokens,), the share of each word in a text, and ``tags``
    labels that are 0 or 1.

    A text is the tokens of a post and of its question's title. Its features are the numbers of the
    commonest tokens over the number of all its tokens, so that they add up to 1 at most, which is
    the dataset's domain. A text may have none of the commonest tags. Features are stored as a
    sparse matrix, labels in a byte each.

    Args:
        settings: the fields of :class:`~fedmtl.data.StackOverflowSettings`, each an argument of its
            own: ``read_stackoverflow("stackoverflow", tokens=5000, tags=100)``.

    Returns:
        Features (tokens,), a sparse float32 matrix, and targets (tags,) of 0 and 1, stored as
        uint8.

    Raises:
        DataError: a missing, truncated or malformed file; the message names file, user and field.
        ConfigError: an impossible setting.
    """
    root = Path(settings.root)
    tokens = settings.tokens
    tags = settings.tags
    options: dict[str, Any] = {
        "min_examples": settings.min_examples,
        "seed": settings.seed,
        "test_fraction": settings.test_fraction,
        "source": str(root),
        "draw": settings.clients,
    }
    # before words are counted: users that are left out must not decide which are common
    sides = taking_part(_read(root, settings.max_examples), **options)
    given = settings.counts is not None
    if settings.counts is not None:
        folder = Path(settings.counts)
    elif root.is_dir():
        folder = root
    else:
        folder = root.parent
    words = _common(
        folder / TOKEN_COUNTS, tokens, given, (text.split() for text in _texts(sides, 0))
    )
    labels = _common(folder / TAG_COUNTS, tags, given, (_tags(text) for text in _texts(sides, 1)))
    coded = [
        {
            client: (_bag(xs, words[0], tokens), _labels(ys, labels[0], tags))
            for client, (xs, ys) in side.items()
        }
        for side in sides
    ]
    data = FederatedDataset.from_tensors(
        coded[0],
        test=coded[1] or None,
        name="stackoverflow",
        classes=2,
        domain=Domain(l1=1.0, l2=1.0, target=1.0),
        **options,
    )
    notes = [
        f"the {size:,} commonest {items} were counted in the records themselves"
        for (_, own), size, items in ((words, tokens, "tokens"), (labels, tags, "tags"))
        if own
    ]
    return replace(data, notes=tuple(notes), verify=False)


def _read(root: Path, most: int | None) -> list[dict[str, Texts]]:
    """Returns the first ``most`` texts of every user, in the train part and in the test part."""
    train, test = divided(root, H5)
    if not train:
        raise DataError(
            f"{root} is no HDF5 file and has none; give stackoverflow_train.h5 or its folder."
        )

    def store(fields: Fields, where: str) -> Texts:
        for name, values in fields.items():
            if values.dtype.kind != "O":
                first = values[0].item()
                raise DataError(f"{where}, field {name!r} holds {first!r}; accepted: text.")
        texts = [
            f"{text} {title}" for text, title in zip(fields["tokens"], fields["title"], strict=True)
        ]
        return texts[:most], fields["tags"].tolist()[:most]

    names = ("tokens", "title", "tags")
    return [read_h5(part, names, store) if part else {} for part in (train, test)]


def _texts(sides: Sequence[Mapping[str, Texts]], field: int) -> Iterator[str]:
    for side in sides:
        for pair in side.values():
            yield from pair[field]


def _tags(text: str) -> list[str]:
    return [tag for tag in text.split("|") if tag]


def _common(
    file: Path, size: int, needed: bool, lists: Iterable[list[str]]
) -> tuple[dict[str, int], bool]:
    """Returns the places of the commonest words by a public file of counts, or without one by the
    words themselves.

    Returns:
        The place of each word, and whether the words themselves were counted.
    """
    if public := file.is_file() or needed:
        common = _counted(file, size)
    else:
        # a word counts once a text, so that no long text decides alone
        counts = Counter(word for words in lists for word in set(words))
        # words of equal counts by the alphabet, so that no order of users shows
        common = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    return {word: place for place, word in enumerate(common)}, not public


def _counted(file: Path, size: int) -> list[str]:
    """Returns the commonest words of a file: JSON of words and counts, or a word and a count a
    line, commonest first."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read ({error}); it must hold words and how often they occur."
        ) from error
    # tags are distributed as JSON, words as lines
    if text.lstrip().startswith("{"):
        try:
            numbers = json.loads(text)
        except ValueError as error:
            raise DataError(f"{file} is not valid JSON ({error}); it may be truncated.") from error
        for word, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise DataError(f"{file}: {word!r} has the count {number!r}; accepted: a number.")
        return sorted(numbers, key=lambda word: -numbers[word])[:size]
    words = []
    for line, row in enumerate(text.splitlines(), start=1):
        fields = row.split()
        if len(fields) != 2 or not fields[1].isdigit():
            raise DataError(
                f"{file}: line {line} is {row[:40]!r}; accepted: a word and how often it occurs."
            )
        words.append(fields[0])
        # files of words are long, and the commonest come first
        if len(words) == size:
            break
    return words


def _counts(
    lists: Sequence[list[str]], places: Mapping[str, int], size: int
) -> scipy.sparse.csr_array:
    """Returns the count of each common word in a list: int64 (lists, size)."""
    counts = [Counter(places[word] for word in words if word in places) for words in lists]
    row = np.repeat(np.arange(len(counts)), [len(places) for places in counts])
    column = np.array([place for row in counts for place in row], dtype=np.int64)
    values = np.array([count for row in counts for count in row.values()], dtype=np.int64)
    return scipy.sparse.csr_array((values, (row, column)), shape=(len(counts), size))


def _bag(texts: Sequence[str], places: Mapping[str, int], size: int) -> scipy.sparse.csr_array:
    """Returns the share of each common token in a text: float32 (texts, size)."""
    lists = [text.split() for text in texts]
    bag = _counts(lists, places, size)
    exact = bag.data / np.repeat([len(words) for words in lists], np.diff(bag.indptr))
    # rounded down, so that the shares of a text add up to no more than 1
    near = exact.astype(np.float32)
    near = np.where(near > exact, np.nextafter(near, np.float32(0)), near)
    return scipy.sparse.csr_array((near, bag.indices, bag.indptr), shape=bag.shape)


def _labels(texts: Sequence[str], places: Mapping[str, int], size: int) -> np.ndarray:
    """Returns 1 for every common tag of a text: uint8 (texts, size)."""
    return (_counts([_tags(text) for text in texts], places, size) > 0).toarray().astype(np.uint8)
