"""The script that fetches public data: resumed downloads, checks, unpacking, and what it says when it fails."""

import hashlib
import importlib.util
import io
import re
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "scripts" / "fetch.py"


@pytest.fixture
def whole(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("fetch_script", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_script", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(whole, monkeypatch):
    """The script with an empty catalog."""
    monkeypatch.setattr(whole, "CATALOG", {})
    return whole


class Server:
    """Serves ``files``; ``breaks`` bytes of an answer at most, ``ranges`` whether it knows them."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str | None] = []
        self.breaks: int | None = None
        self.ranges, self.page = True, False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                outer.asked.append(wanted)
                content = outer.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                first = int(re.findall(r"\d+", wanted)[0]) if wanted and outer.ranges else 0
                if first >= len(content) and first:
                    self.send_error(416)
                    return
                self.send_response(206 if first else 200)
                self.send_header(
                    "Content-Type", "text/html" if outer.page else "application/octet-stream"
                )
                self.send_header("Content-Length", str(len(content) - first))
                self.end_headers()
                self.wfile.write(content[first:][: outer.breaks])

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


CONTENT = bytes(range(256)) * 4000


def source(script, server, name="a.bin", content=CONTENT, **options):
    server.files[f"/{name}"] = content
    found = {
        "checksum": hashlib.sha256(content).hexdigest(),
        "algorithm": "sha256",
        "size": len(content),
    } | options
    return script.Source(name, f"{server.url}/{name}", **found)


def test_a_file_is_downloaded_once(script, server, tmp_path, capsys):
    script.CATALOG["one"] = (source(script, server),)
    assert script.main(["one", "--root", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT
    assert script.main(["one", "--root", str(tmp_path / "new")]) == 0
    assert server.asked == [None]
    assert script.main(["one", "--root", str(tmp_path / "new"), "--check"]) == 0
    assert "a.bin: downloaded" in capsys.readouterr().out


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on_where_it_stopped(script, server, tmp_path, capsys, ranges):
    script.CATALOG["one"] = (source(script, server),)
    server.breaks, server.ranges = 300_000, ranges
    assert script.main(["one", "--root", str(tmp_path)]) == 1
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "a.bin").exists()
    assert (tmp_path / "a.bin.part").stat().st_size == 300_000
    server.breaks = None
    assert script.main(["one", "--root", str(tmp_path)]) == 0
    assert server.asked == [None, "bytes=300000-"]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_a_complete_part_of_unknown_size_is_checked_and_used(script, server, tmp_path):
    script.CATALOG["one"] = (source(script, server, size=None),)
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    assert script.main(["one", "--root", str(tmp_path)]) == 0
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_another_file_is_refused_and_not_kept(script, server, tmp_path, capsys):
    script.CATALOG["one"] = (source(script, server, checksum="00" * 32),)
    assert script.main(["one", "--root", str(tmp_path)]) == 1
    assert (
        f"has the sha256 {hashlib.sha256(CONTENT).hexdigest()}; the original has 0000"
        in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []
    script.CATALOG["one"] = (source(script, server),)
    (tmp_path / "a.bin").write_bytes(CONTENT[:-1])
    for words in ([], ["--check"]):
        assert script.main(["one", "--root", str(tmp_path), *words]) == 1
        assert "has 1,023,999 bytes; the original has 1,024,000" in capsys.readouterr().err
    assert script.main(["one", "--root", str(tmp_path / "empty"), "--check"]) == 1
    assert "a.bin is missing" in capsys.readouterr().err


def test_offline_pages_and_missing_files_are_told_apart(script, server, tmp_path, capsys):
    script.CATALOG["offline"] = (script.Source("a.bin", "http://127.0.0.1:9/a.bin", "00"),)
    assert script.main(["offline", "--root", str(tmp_path)]) == 1
    assert "127.0.0.1:9 cannot be reached" in (said := capsys.readouterr().err)
    assert "are you offline?" in said
    server.page = True
    script.CATALOG["page"] = (source(script, server),)
    assert script.main(["page", "--root", str(tmp_path)]) == 1
    assert "answers with a page, not with a file" in capsys.readouterr().err
    server.files.clear()
    assert script.main(["page", "--root", str(tmp_path)]) == 1
    assert "answers 404" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        script.main(["nothing", "--root", str(tmp_path)])
    assert stop.value.code == 2


def archive(kind: str, names: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(made, "w") as content:
            for name, data in names.items():
                content.writestr(name, data)
    else:
        with tarfile.open(fileobj=made, mode="w:bz2") as content:
            for name, data in names.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                content.addfile(entry, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.bz2"])
def test_archives_are_unpacked(script, server, tmp_path, capsys, kind):
    content = archive(kind, {"faces/1.jpg": b"one", "faces/2.jpg": b"two"})
    one = source(script, server, f"x.{kind}", content, unpacked=("faces",))
    script.CATALOG["one"] = (one,)
    assert script.main(["one", "--root", str(tmp_path)]) == 0
    assert (tmp_path / "faces" / "2.jpg").read_bytes() == b"two"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["faces", f"x.{kind}"]
    (tmp_path / f"x.{kind}").unlink()  # it is not needed any more
    assert script.main(["one", "--root", str(tmp_path)]) == 0
    assert "unpacked already" in capsys.readouterr().out


@pytest.mark.parametrize("filtered", [True, False])
def test_archives_that_reach_outside_or_are_damaged_are_refused(
    filtered, script, server, tmp_path, capsys, monkeypatch
):
    if not filtered:  # as of Python 3.11.3
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    outside = archive("tar.bz2", {"../evil": b"x"})
    script.CATALOG["one"] = (source(script, server, "x.tar.bz2", outside, unpacked=("faces",)),)
    assert script.main(["one", "--root", str(tmp_path / "a" / "b")]) == 1
    assert "cannot be unpacked" in capsys.readouterr().err
    assert not list(tmp_path.rglob("evil"))
    script.CATALOG["one"] = (
        source(script, server, "y.tar.bz2", b"BZh9 no archive", unpacked=("faces",)),
    )
    assert script.main(["one", "--root", str(tmp_path)]) == 1
    script.CATALOG["one"] = (
        source(script, server, "z.zip", archive("zip", {"b": b""}), unpacked=("faces",)),
    )
    assert script.main(["one", "--root", str(tmp_path)]) == 1
    assert "did not contain faces" in capsys.readouterr().err


def test_the_catalog_is_well_formed(whole):
    for name, sources in whole.CATALOG.items():
        for one in sources:
            length = {"md5": 32, "sha256": 64}[one.algorithm]
            assert re.fullmatch(f"[0-9a-f]{{{length}}}", one.checksum), (name, one.file)
            assert one.url.startswith("https://")
            assert not Path(one.file).is_absolute()
