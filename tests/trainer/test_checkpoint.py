"""Files are replaced whole or not at all; a checkpoint holds every bit, without pickle."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from fedmtl._files import write_bytes
from fedmtl.errors import ResumeError
from fedmtl.trainer.folder import Checkpoint, write_tensors


def test_files_that_are_no_checkpoint_are_named(tmp_path):
    path = tmp_path / "c.safetensors"
    Checkpoint(7, {"w": torch.zeros(2)}, {}, [], "mark").write(path)
    contents = [b"", b"not a checkpoint", b"\x80\x04pickled", path.read_bytes()[:-1]]
    contents += [save({"public.w": torch.zeros(2)}, notes) for notes in ({}, {"notes": "{"}, {"notes": "{}"})]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ResumeError, match=r"c\.safetensors cannot be read"):
            Checkpoint.read(path)


def test_tensors_with_shared_memory_and_strides_are_written_whole(tmp_path):
    row = torch.arange(12.0)
    views = {"a": row[:4].view(2, 2), "b": row[4:], "t": row.view(3, 4).t(), "e": torch.ones(2).expand(3, 2)}
    write_tensors(tmp_path / "t.safetensors", views, {"ids": "x"})
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == views.keys()
    for name in views:
        assert torch.equal(found[name], views[name])


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="asks Linux which file a handle is")
def test_content_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    """The order that survives a loss of power: write, sync the file, rename, sync the folder."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        calls.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        if "tmp" in calls[-1]:
            assert Path(f"/proc/self/fd/{handle}").read_bytes() == b"content"
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        calls.append(f"rename {source.name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_bytes(tmp_path / "file", b"content")
    assert calls == ["sync file.tmp", "rename file.tmp file", f"sync {tmp_path.name}"]
