"""Odd image files and folders: what is read of each, or the words in which it is refused."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedmtl.data import FederatedDataset, read_femnist, read_images
from fedmtl.data.readers.pictures import decode
from fedmtl.errors import DataError

PLAIN = 77
STEPS = np.array([[0, 1], [2, 4]]) / 4  # of white
CORNERS = np.array([[10, 60], [110, 210]], np.uint8)


def saved(image: Image.Image | np.ndarray, kind: str, **options) -> bytes:
    content = io.BytesIO()
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    image.save(content, kind, **options)
    return content.getvalue()


def tiff(
    rows: bytes, bits: int, *, order: str = "<", white_is_zero: bool = False, form: int = 1
) -> bytes:
    """A TIFF file of 2 x 2 numbers, written by the specification; ``form`` 1: no sign, 2: signed, 3: floats."""
    tags = [
        (256, 4, 2),
        (257, 4, 2),
        (258, 3, bits),
        (259, 3, 1),
        (262, 3, 0 if white_is_zero else 1),
        (273, 4, 8),
        (277, 3, 1),
        (278, 4, 2),
        (279, 4, len(rows)),
        (339, 3, form),
    ]
    rows += b"\0" * (len(rows) % 2)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(rows))
    entries = [
        struct.pack(order + "HHI", tag, kind, 1)
        + struct.pack(order + ("I" if kind == 4 else "Hxx"), value)
        for tag, kind, value in tags
    ]
    return head + rows + struct.pack(order + "H", len(tags)) + b"".join(entries) + b"\0" * 4


def png(width: int, height: int, depth: int, colour: int, rows: list[bytes]) -> bytes:
    """A PNG file, written by the specification."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def words(values: np.ndarray, kind: str) -> bytes:
    return np.asarray(values).astype(kind).tobytes()


def palette(**options) -> bytes:
    image = Image.fromarray(np.array([[0, 1], [2, 3]], np.uint8)).convert("P")
    image.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200, 9, 9, 9])
    return saved(image, "PNG", **options)


COLOURS = np.array([[[200, 0, 0], [0, 200, 0]], [[0, 0, 200], [9, 9, 9]]]) / 255
SECOND_WHITE = np.where(np.arange(4).reshape(2, 2, 1) == 1, 1, COLOURS)
RAMP = (STEPS * 65535).round()
RAMP_16 = RAMP.astype(np.uint16)
FIFTHS = np.array([[0, 1], [2, 5]]) / 5
ALPHA = np.array([[[9, 8, 7, 255], [9, 8, 7, 0]], [[0, 0, 0, 51], [255, 255, 255, 128]]], np.uint8)
ON_WHITE = np.array([[[9, 8, 7], [255, 255, 255]], [[204, 204, 204], [255, 255, 255]]]) / 255
GREY_ALPHA = png(2, 2, 8, 4, [b"\x09\xff\x09\x00", b"\x00\x33\xff\x80"])
GREY_ON_WHITE = np.array([[9 / 255, 1], [0.8, 1]])
CMYK = np.array([[[0, 0, 0, 0], [0, 0, 0, 255]], [[255, 0, 0, 0], [0, 255, 255, 0]]], np.uint8)
CMYK_COLOURS = np.array([[[1, 1, 1], [0, 0, 0]], [[0, 1, 1], [1, 0, 0]]])
DEEP_COLOUR = np.array([[[0, 65535, 13107]] * 2, [[26214, 39321, 65535]] * 2])
DEEP_COLOUR_PNG = png(2, 2, 16, 2, [words(row, ">u2") for row in DEEP_COLOUR])
TWELVE = tiff(bytes([0x00, 0x03, 0xFF, 0x7F, 0xEF, 0xFF]), 12)
TWELVE_VALUES = np.array([[0x000, 0x3FF], [0x7FE, 0xFFF]]) / 4095
CORNERS_60_WHITE = np.array([[10, 255], [110, 210]]) / 255
STEPS_0_WHITE = np.array([[1, 0.25], [0.5, 1]])
ALL_99 = np.full((2, 2), 99 / 255)
PREVIEW = {"save_all": True, "append_images": [Image.new("L", (1, 1))]}
VALUES: dict[str, tuple[str, bytes, np.ndarray, float]] = {
    "png of 8 bits": ("png", saved((FIFTHS * 255).astype(np.uint8), "PNG"), FIFTHS, 0),
    "png of 16 bits": ("png", saved(RAMP_16, "PNG"), STEPS, 1e-5),
    "tif of 16 bits": ("tif", saved(RAMP_16, "TIFF"), STEPS, 1e-5),
    "tif of 16 bits, big end first": ("tif", tiff(words(RAMP, ">u2"), 16, order=">"), STEPS, 1e-5),
    "tif of 16 bits, white is 0": (
        "tif",
        tiff(words(RAMP, "<u2"), 16, white_is_zero=True),
        1 - STEPS,
        1e-5,
    ),
    "tif of 8 bits, white is 0": (
        "tif",
        tiff(words(FIFTHS * 255, "u1"), 8, white_is_zero=True),
        1 - FIFTHS,
        0,
    ),
    "tif of 12 bits": ("tif", TWELVE, TWELVE_VALUES, 1e-5),
    "pgm up to 65535": ("pgm", b"P5 2 2 65535\n" + words(RAMP, ">u2"), STEPS, 1e-5),
    "pgm up to 1000": ("pgm", b"P5 2 2 1000\n" + words(STEPS * 1000, ">u2"), STEPS, 1e-5),
    "pgm up to 4": ("pgm", b"P5 2 2 4\n" + words(STEPS * 4, "u1"), STEPS, 0.5 / 255),
    "tif of floats": ("tif", saved(STEPS.astype(np.float32), "TIFF"), STEPS, 1e-5),
    "tif of floats, white is 0": (
        "tif",
        tiff(words(STEPS, "<f4"), 32, white_is_zero=True, form=3),
        1 - STEPS,
        1e-5,
    ),
    "png of 1 bit": ("png", png(2, 2, 1, 0, [b"\x40", b"\x80"]), np.array([[0, 1], [1, 0]]), 0),
    "png of 4 bits": (
        "png",
        png(2, 2, 4, 0, [b"\x05", b"\xaf"]),
        np.array([[0, 5], [10, 15]]) / 15,
        0,
    ),
    "png of 16 bits a colour": ("png", DEEP_COLOUR_PNG, DEEP_COLOUR / 65535, 0.5 / 255),
    "png with a palette": ("png", palette(), COLOURS, 0),
    "png with a palette, one transparent": ("png", palette(transparency=1), SECOND_WHITE, 0),
    "gif": ("gif", saved(CORNERS, "GIF"), CORNERS / 255, 0),
    "bmp": ("bmp", saved(CORNERS, "BMP"), CORNERS / 255, 0),
    "webp": (
        "webp",
        saved(Image.fromarray(CORNERS).convert("RGB"), "WEBP", lossless=True),
        CORNERS / 255,
        0,
    ),
    "png with alpha": ("png", saved(ALPHA, "PNG"), ON_WHITE, 0.5 / 255),
    "grey with alpha": ("png", GREY_ALPHA, GREY_ON_WHITE, 0.5 / 255),
    "grey, one transparent": (
        "png",
        saved(CORNERS, "PNG", transparency=60),
        np.where(CORNERS == 60, 1, CORNERS / 255),
        0,
    ),
    "grey of 16 bits, one transparent": (
        "png",
        saved(RAMP_16, "PNG", transparency=0),
        np.where(STEPS == 0, 1, STEPS),
        1e-5,
    ),
    "cmyk": ("tif", saved(Image.fromarray(CMYK, "CMYK"), "TIFF"), CMYK_COLOURS, 0),
    "suffix in capitals": ("PNG", saved(CORNERS, "PNG"), CORNERS / 255, 0),
    "another suffix than its kind": ("jpg", saved(CORNERS, "PNG"), CORNERS / 255, 0),
    "a photo with a preview": (
        "jpg",
        saved(Image.new("L", (2, 2), 99), "MPO", **PREVIEW),
        np.full((2, 2), 99 / 255),
        0.02,
    ),
}
TURNED: dict[
    int, np.ndarray
] = {  # by the table of the EXIF standard: where the first row and column of the file are
    1: CORNERS,  # top, left
    2: CORNERS[:, ::-1],  # top, right
    3: CORNERS[::-1, ::-1],  # bottom, right
    4: CORNERS[::-1],  # bottom, left
    5: CORNERS.T,  # left, top
    6: CORNERS.T[:, ::-1],  # right, top
    7: CORNERS[::-1, ::-1].T,  # right, bottom
    8: CORNERS.T[::-1],  # left, bottom
}
for orientation, turned in TURNED.items():
    tag = Image.Exif()
    tag[0x0112] = orientation
    kind = ("PNG", "TIFF", "WEBP")[orientation % 3]
    options = {"lossless": True} if kind == "WEBP" else {}
    picture = Image.fromarray(CORNERS).convert("RGB")
    VALUES[f"orientation {orientation}"] = (
        kind.lower(),
        saved(picture, kind, exif=tag, **options),
        turned / 255,
        0,
    )
deep_tag = Image.Exif()
deep_tag[0x0112] = 6
VALUES["orientation 6 of 16 bits"] = (
    "png",
    saved(RAMP_16, "PNG", exif=deep_tag),
    STEPS.T[:, ::-1],
    1e-5,
)


def plain(folder: Path, name: str = "plain.png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2), (PLAIN,) * 3).save(folder / name)
    return folder / name


def read(root: Path, **options) -> FederatedDataset:
    return read_images(root, size=2, cache=root.parent / "cache", **options)


def pictures(data: FederatedDataset) -> list[np.ndarray]:
    """Every image (3, height, width), sorted."""
    found = [
        data.gather(side, torch.arange(len(data.side(side))))[0].numpy()
        for side in ("train", "test")
    ]
    return sorted(np.concatenate(found), key=lambda image: image.tolist())


@pytest.mark.parametrize("case", VALUES)
def test_the_pixels_of_odd_files(tmp_path, case):
    suffix, content, expected, near = VALUES[case]
    plain(tmp_path / "root" / "a" / "x")
    (tmp_path / "root" / "a" / "x" / f"odd.{suffix}").write_bytes(content)
    found = pictures(read(tmp_path / "root"))
    beside = np.full((3, 2, 2), np.float32(PLAIN / 255))
    planes = (
        np.broadcast_to(expected[None], (3, 2, 2))
        if expected.ndim == 2
        else expected.transpose(2, 0, 1)
    )
    wanted = sorted([beside, planes], key=lambda image: image.tolist())
    np.testing.assert_allclose(found, wanted, atol=near + 1e-6)


ANIMATED = {"save_all": True, "append_images": [Image.new("L", (2, 2), 9)]}
NOISE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
BROKEN = r" is not a readable image \(.+\); it may be truncated\.$"
PAGES = r" holds 2 pictures, pages or those of an animation; accepted: one\.$"
NO_WHITE = (
    r" holds whole numbers of 32 bits or with a sign, .* accepted: .* or floats in \[0, 1\]\.$"
)
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "nothing": ("png", b"", r"\(it is empty\); it may be truncated\.$"),
    "text": ("jpg", b"<html>404", r"\(its content begins like no image\); it may be truncated\.$"),
    "cut png": ("png", saved(NOISE, "PNG")[:900], BROKEN),
    "cut jpg": ("jpg", saved(NOISE, "JPEG")[:900], BROKEN),
    "cut tif": ("tif", saved(NOISE, "TIFF")[:900], BROKEN),
    "cut gif": ("gif", saved(NOISE[..., 0], "GIF")[:900], BROKEN),
    "cut bmp": ("bmp", saved(NOISE, "BMP")[:900], BROKEN),
    "cut webp": ("webp", saved(NOISE, "WEBP")[:400], BROKEN),
    "changed png": (
        "png",
        saved(NOISE, "PNG")[:600] + b"\0" * 99 + saved(NOISE, "PNG")[699:],
        BROKEN,
    ),
    "animated gif": ("gif", saved(CORNERS, "GIF", **ANIMATED), PAGES),
    "animated webp": ("webp", saved(CORNERS, "WEBP", **ANIMATED), PAGES),
    "animated png": ("png", saved(CORNERS, "PNG", **ANIMATED), PAGES),
    "pages": ("tif", saved(CORNERS, "TIFF", **ANIMATED), PAGES),
    "32 bits": ("tif", saved(RAMP.astype(np.int32), "TIFF"), NO_WHITE),
    "32 bits without a sign": ("tif", tiff(words(RAMP, "<u4"), 32), NO_WHITE),
    "16 bits with a sign": ("tif", tiff(words(RAMP / 2, "<i2"), 16, form=2), NO_WHITE),
    "floats up to 255": (
        "tif",
        saved((STEPS * 255).astype(np.float32), "TIFF"),
        r" holds the number 63\.75; accepted: fl",
    ),
    "floats below 0": (
        "tif",
        saved((STEPS - 1).astype(np.float32), "TIFF"),
        r" holds the number -1; accepted: floats",
    ),
    "no number": (
        "tif",
        saved(np.full((2, 2), np.nan, np.float32), "TIFF"),
        r" holds the number nan; accepted: floats",
    ),
    "bomb": (
        "png",
        png(40_000, 40_000, 1, 0, [b"\0"]),
        r" has too many pixels for Pillow \(.*1600000000.*\); make it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_without_a_picture_are_refused_by_name(tmp_path, case):
    suffix, content, message = REFUSED[case]
    plain(tmp_path / "root" / "a" / "x")
    (tmp_path / "root" / "a" / "x" / f"odd.{suffix}").write_bytes(content)
    with pytest.raises(DataError, match=rf"odd\.{suffix}.*{message}") as refused:
        read(tmp_path / "root")
    assert "\n" not in str(refused.value)
    assert str(refused.value).count(f"odd.{suffix}") == 1
    assert not list((tmp_path / "cache").iterdir())  # nothing is left of an array that was begun


def linked_file(root: Path) -> None:
    (root / "a" / "x" / "l.png").symlink_to(plain(root.parent / "elsewhere"))


def linked_folder(root: Path) -> None:
    plain(root.parent / "elsewhere" / "x")
    (root / "b").symlink_to(root.parent / "elsewhere")


def odd_names(root: Path) -> None:
    for name in ("Übung é.png", "two\nlines.png", "a'b\"c ;.png", "[1]*.png", "-x.png"):
        plain(root / "a" / "x", name)


def named_like_an_image(root: Path) -> None:
    plain(root / "b.png" / "x")


def left_by_systems(root: Path) -> None:
    for folder in (root, root / "a", root / "a" / "x"):
        for name in ("._1.png", ".DS_Store", "Thumbs.db", "desktop.ini", "notes.txt"):
            (folder / name).write_bytes(b"\0\5\x16\7")
        plain(folder / ".ipynb_checkpoints", "1-checkpoint.png")
        plain(folder / "__MACOSX" / "a" / "x", "1.png")


FOLDERS: dict[str, tuple[Callable[[Path], None], dict[str, int]]] = {
    "a link to an image": (linked_file, {"a": 2}),
    "a link to a client's folder": (linked_folder, {"a": 1, "b": 1}),
    "odd names": (odd_names, {"a": 6}),
    "a folder named like an image": (named_like_an_image, {"a": 1, "b.png": 1}),
    "what systems leave": (left_by_systems, {"a": 1}),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_odd_folders(tmp_path, case):
    make, expected = FOLDERS[case]
    plain(tmp_path / "root" / "a" / "x")
    plain(tmp_path / "root" / "z" / "x", "1.png")
    plain(tmp_path / "root" / "z" / "x", "2.png")
    make(tmp_path / "root")
    data = read(tmp_path / "root", min_examples=1)
    counts = (data.train.counts + data.test.counts).tolist()
    assert dict(zip(data.ids, counts, strict=True)) == expected | {"z": 2}
    assert data.classes == 1


def test_images_of_kinds_that_are_not_read_are_passed_over_with_a_warning(tmp_path, caplog):
    picture = plain(tmp_path / "root" / "a" / "x")
    plain(tmp_path / "root" / "a" / "x", "2.png")
    (tmp_path / "root" / "a" / "x" / "1.HEIC").write_bytes(picture.read_bytes())
    assert len(pictures(read(tmp_path / "root"))) == 2
    assert caplog.messages == [
        f"{tmp_path}/root: images of kinds that are not read are passed over, such as {tmp_path}/root/a/x/1.HEIC; "
        "convert them"
    ]


def link(name: str, target: str) -> Callable[[Path], None]:
    return lambda root: (root / "a" / "x" / name).symlink_to(target)


def not_utf8(root: Path) -> None:
    plain(root / "a" / "x").rename(root / "a" / "x" / os.fsdecode(b"caf\xe9.png"))


def client_not_utf8(root: Path) -> None:
    (root / "a").rename(root / os.fsdecode(b"caf\xe9"))


def pipe(root: Path) -> None:
    os.mkfifo(root / "a" / "x" / "pipe.png")


def too_deep(root: Path) -> None:
    plain(root / "a" / "x" / "y")


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "link to nothing": (
        link("l.png", "nowhere.png"),
        r"a/x/l\.png is a link to nothing; remove it, or restore",
    ),
    "link to no folder": (
        link("folder", "/no/such/folder"),
        r"a/x/folder is a link to nothing; remove it, or restore",
    ),
    "link to itself": (
        link("l.png", "l.png"),
        r"a/x/l\.png cannot be read \(Too many levels of symbolic links\);",
    ),
    "link back": (
        link("again", ".."),
        r"a/x/again is a link back to a folder that it is in; remove the link\.$",
    ),
    "pipe": (pipe, r"a/x/pipe\.png is no file; accepted: a file, or a link to one\.$"),
    "name": (not_utf8, r"a/x holds the name 'caf\\udce9\.png', which is no UTF-8; rename it\.$"),
    "name of a client": (
        client_not_utf8,
        r"root holds the name 'caf\\udce9', which is no UTF-8; rename it\.$",
    ),
    "too deep": (
        lambda root: plain(root / "a" / "x" / "y") and None,
        r"plain\.png is 3 folders deep; accepted: root/CL",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_folders_that_cannot_be_read_are_refused(tmp_path, case):
    make, message = WRONG[case]
    plain(tmp_path / "root" / "a" / "x")
    make(tmp_path / "root")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "root")


def test_files_and_folders_without_permission_are_refused(tmp_path, monkeypatch):
    picture = plain(tmp_path / "root" / "a" / "x")

    def denied(path, *given, **options):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("PIL.Image.open", denied)
        with pytest.raises(
            DataError,
            match=r"^one cannot be read \(Permission denied\); it must be a file that may",
        ):
            decode(picture, "one")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", denied)
        with pytest.raises(DataError, match=r"root cannot be read \(Permission denied\)"):
            read(tmp_path / "root")


def test_an_image_near_the_limit_of_pillow_is_read_without_a_warning(
    tmp_path, monkeypatch, recwarn
):
    plain(tmp_path / "root" / "a" / "x")
    plain(tmp_path / "root" / "a" / "x", "2.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3)
    assert len(pictures(read(tmp_path / "root"))) == 2
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a/x", r"root/a/x is no file; accepted: a file, or a link to one"),
        ("a/x/none.png", r"none\.png does not exist; every file that is listed must be"),
        ("a/x/nu\0ll.png", r"cannot be read \(embedded null byte\)"),
        ("a/x/plain.png/y", r"plain\.png/y cannot be read \(Not a directory\)"),
    ],
)
def test_names_in_a_table_that_are_no_files_are_refused(tmp_path, name, message):
    plain(tmp_path / "root" / "a" / "x")
    table = pd.DataFrame({"file_name": ["a/x/plain.png", name], "who": "a", "what": "x"})
    with pytest.raises(DataError, match=message):
        read(tmp_path / "root", table=table, client="who", target="what")


def test_resized_images_of_16_bits_have_the_values_of_those_of_8_bits(tmp_path):
    shallow = np.random.default_rng(3).integers(0, 256, (9, 11), dtype=np.uint8)
    one, other = tmp_path / "8.png", tmp_path / "16.png"
    one.write_bytes(saved(shallow, "PNG"))
    other.write_bytes(saved(shallow.astype(np.uint16) * 257, "PNG"))
    sizes = [decode(file, "x", size=(5, 4)) for file in (one, other)]
    assert [values.dtype for values in sizes] == [np.uint8, np.uint16]
    np.testing.assert_allclose(sizes[0] / 255, sizes[1] / 65535, atol=1.01 / 255)
    assert decode(other, "x", mode="L").shape == (1, 9, 11)
    np.testing.assert_array_equal(
        decode(other, "x", mode="L") / 65535, decode(one, "x", mode="L") / 255
    )


def test_characters_of_16_bits_in_parquet(tmp_path):
    deep = np.full((28, 28), 65535, np.uint16)
    deep[4, 5] = 257 * 40
    rows = {"image": [saved(deep, "PNG")] * 2, "writer_id": ["w", "w"], "character": [1, 2]}
    pd.DataFrame(rows).to_parquet(tmp_path / "x.parquet")
    data = read_femnist(tmp_path)
    assert data.train.x.sum() == data.train.x[0, 0, 4, 5] == 255 - 40
