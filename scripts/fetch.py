"""Download public data sets in their original form, check them, and unpack them where the readers
look.

    python scripts/fetch.py cifar10 --root data/cifar10        then: fedmtl data=cifar
    data.root=data/cifar10 python scripts/fetch.py celeba --root data --check         only check
    what is there

An interrupted download goes on where it stopped. Every file is checked by its size and its checksum
before it is used. Exit codes: 0, all files are there and right; 1, a download or a check failed; 2,
the request is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 20
_TIMEOUT = 60.0
_TFF = "https://storage.googleapis.com/tff-datasets-public/"
_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="


class FetchError(Exception):
    """A file could not be fetched or is not the right one; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """One file of a data set.

    Args:
        file: its path under the root.
        url: where it is.
        checksum: of its bytes, hexadecimal.
        algorithm: of the checksum, as in :mod:`hashlib`.
        size: in bytes; None where only the server states it.
        unpacked: paths under the root that are there when the archive has been unpacked; none for a
            plain file.
    """

    file: str
    url: str
    checksum: str
    algorithm: str = "md5"
    size: int | None = None
    unpacked: tuple[str, ...] = ()


def _tff(name: str, checksum: str, *files: str) -> Source:
    return Source(f"{name}.tar.bz2", f"{_TFF}{name}.tar.bz2", checksum, "sha256", unpacked=files)


CATALOG: dict[str, tuple[Source, ...]] = {
    "celeba": (
        Source(
            "celeba/img_align_celeba.zip",
            f"{_DRIVE}0B7EVK8r0v71pZjFTYXZWM3FlRnM",
            "00d2c5bc6d35e252742224ab0c1e8fcb",
            size=1_443_490_838,
            unpacked=("celeba/img_align_celeba",),
        ),
        Source(
            "celeba/list_attr_celeba.txt",
            f"{_DRIVE}0B7EVK8r0v71pblRyaVFSWGxPY0U",
            "75e246fa4810816ffd6ee81facbd244c",
            size=26_721_026,
        ),
        Source(
            "celeba/identity_CelebA.txt",
            f"{_DRIVE}1_ee_0u7vcNLOfNLegJRHmolfH5ICW-XS",
            "32bd1bd63d3c78cd57e08160ec5ed1e2",
            size=3_424_458,
        ),
        Source(
            "celeba/list_eval_partition.txt",
            f"{_DRIVE}0B7EVK8r0v71pY0NSMzRuSXJEVkk",
            "d32c9cbf5e040fd4025c592c306e6668",
            size=2_836_386,
        ),
    ),
    "cifar10": (
        Source(
            "cifar-10-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            size=170_498_071,
            unpacked=("cifar-10-batches-py",),
        ),
    ),
    "cifar100": (
        Source(
            "cifar-100-python.tar.gz",
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            size=169_001_437,
            unpacked=("cifar-100-python",),
        ),
    ),
    "femnist": (
        _tff(
            "fed_emnist",
            "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
            *("fed_emnist_train.h5", "fed_emnist_test.h5"),
        ),
    ),
    "movielens": (
        Source(
            "ml-100k.zip",
            "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
            "0e33842e24a9c977be4e0107933c0723",
            size=4_924_029,
            unpacked=("ml-100k",),
        ),
    ),
    "stackoverflow": (
        _tff(
            "stackoverflow",
            "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
            *("stackoverflow_train.h5", "stackoverflow_test.h5"),
        ),
        _tff(
            "stackoverflow.word_count",
            "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
            "stackoverflow.word_count",
        ),
        _tff(
            "stackoverflow.tag_count",
            "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
            "stackoverflow.tag_count",
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch or check one data set; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="fetch.py", description="Download a public data set, and check it."
    )
    parser.add_argument("name", choices=sorted(CATALOG))
    parser.add_argument(
        "--root",
        type=Path,
        required=True,
        help="the folder for the files, made where it is missing",
    )
    parser.add_argument("--check", action="store_true", help="only check the files that are there")
    options = parser.parse_args(argv)
    try:
        for source in CATALOG[options.name]:
            if options.check:
                verify(source, options.root / source.file)
                print(f"{source.file}: right")
            else:
                print(f"{source.file}: {fetch(source, options.root)}")
    except FetchError as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch.py: interrupted; the same command goes on where it stopped.", file=sys.stderr)
        return 1
    print(f"{options.name} is in {options.root}")
    return 0


def fetch(source: Source, root: Path) -> str:
    """Bring one file, and unpack it; what is there already is kept.

    Returns:
        What was done, in words.

    Raises:
        FetchError: the server cannot be reached, or the file is another one.
    """
    file, done = root / source.file, []
    if source.unpacked and all((root / name).exists() for name in source.unpacked):
        return "unpacked already"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        part = file.with_name(file.name + ".part")
        download(source, part)
        try:
            verify(source, part)
        except FetchError:
            part.unlink()  # what is wrong cannot be gone on with
            raise
        os.replace(part, file)
        done.append("downloaded")
    else:
        verify(source, file)
        done.append("here already")
    if source.unpacked:
        unpack(file, root / Path(source.file).parent)
        for name in source.unpacked:
            if not (root / name).exists():
                raise FetchError(f"{file} did not contain {name}.")
        done.append("unpacked")
    return ", ".join(done)


def download(source: Source, part: Path) -> None:
    """Bring the bytes that ``part`` does not have yet.

    Raises:
        FetchError: the server cannot be reached, answers with a page, or stops early.
    """
    there = part.stat().st_size if part.exists() else 0
    if source.size is not None and there == source.size:
        return
    request = urllib.request.Request(
        source.url, headers={"Range": f"bytes={there}-"} if there else {}
    )
    goes_on = f"what is there stays in {part}, and the same command goes on"
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            if answer.headers.get_content_type() == "text/html":
                raise FetchError(
                    f"{source.url} answers with a page, not with a file (too many downloads "
                    f"today?); try again later, or put the file at {part.with_suffix('')} by hand."
                )
            resumed = answer.status == http.client.PARTIAL_CONTENT
            there = there if resumed else 0
            length = answer.headers.get("Content-Length")
            total = (
                source.size
                if source.size is not None
                else there + int(length)
                if length is not None
                else None
            )
            with open(part, "ab" if resumed else "wb") as file:
                while block := answer.read(_BLOCK):
                    file.write(block)
                    there += len(block)
                    _progress(part.stem, there, total)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # all of it is there; its checksum decides
        raise FetchError(f"{source.url} answers {error.code} {error.reason}.") from error
    except urllib.error.URLError as error:
        host = urllib.parse.urlsplit(source.url).netloc
        raise FetchError(
            f"{host} cannot be reached ({error.reason}); are you offline? {goes_on}."
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"the download of {source.url} broke off ({error}); {goes_on}.") from error
    if total is not None and there < total:
        raise FetchError(
            f"the download of {source.url} ended after {there:,} of {total:,} bytes; {goes_on}."
        )


def verify(source: Source, file: Path) -> None:
    """Check the size and the checksum of a file.

    Raises:
        FetchError: the file is missing or another one.
    """
    if not file.is_file():
        raise FetchError(f"{file} is missing.")
    size = file.stat().st_size
    if source.size is not None and size != source.size:
        raise FetchError(
            f"{file} has {size:,} bytes; the original has {source.size:,}. Delete it "
            "and fetch it again."
        )
    digest = hashlib.new(source.algorithm)
    with open(file, "rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != source.checksum:
        raise FetchError(
            f"{file} has the {source.algorithm} {digest.hexdigest()}; the original has "
            f"{source.checksum}. Delete it and fetch it again."
        )


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive beside its place first, so that what has a final name is complete.

    Raises:
        FetchError: a damaged archive, or one with paths outside of it.
    """
    temporary = Path(tempfile.mkdtemp(prefix=".unpack-", dir=folder))
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as content:
                content.extractall(temporary)
        else:
            with tarfile.open(archive) as content:
                _extract(content, temporary)
        for entry in temporary.iterdir():
            target = folder / entry.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise FetchError(f"{archive} cannot be unpacked ({error}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract(content: tarfile.TarFile, folder: Path) -> None:
    """Unpack the files and folders of an archive into ``folder``.

    Raises:
        tarfile.TarError: a path outside of the folder, a link or a device.
    """
    if hasattr(tarfile, "data_filter"):
        content.extractall(folder, filter="data")
        return
    # Python has this filter from 3.11.4 on.
    for member in content.getmembers():
        inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is no file or folder inside of the archive")
    content.extractall(folder)


def _progress(name: str, done: int, total: int | None) -> None:
    if sys.stderr.isatty():
        share = f" of {total / 1e6:,.1f} MB, {done / total:.0%}" if total else " MB"
        print(
            f"\r{name}: {done / 1e6:,.1f}{share}",
            end="\n" if done == total else "",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
