"""Equal runs write equal files, whatever order a process gives to hashes."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fedmtl.trainer.tensor_files import read_tensors, split_header, write_tensors

from ..conftest import quick_figures
from .settings import trainer

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
from tests.trainer.test_equal_files import write

write(Path(sys.argv[1]))
"""


def write(folder: Path) -> None:
    """Write the files of a seeded run, and a file of many tensors."""
    with pytest.MonkeyPatch.context() as patch:
        quick_figures(patch)
        trainer(folder=folder / "run", rounds=1, baselines=(), eval_every=1).fit()
    names = ["update", "prior", "scale", "step", "mean", "row", "unit", "size"]
    write_tensors(
        folder / "many.safetensors",
        {name: torch.ones(3) for name in names},
        {name: name for name in names},
    )


def hashes(folder: Path) -> dict[str, str]:
    """Hashes of the safetensors files below a folder."""
    places = sorted(folder.rglob("*.safetensors"))
    return {
        str(place.relative_to(folder)): hashlib.sha256(place.read_bytes()).hexdigest()
        for place in places
    }


def notes(folder: Path) -> str:
    """The checkpoint's notes but for the ledger's head, which has a random number of the run."""
    with safe_open(folder / "run/private/checkpoint.safetensors", framework="pt") as file:
        values = json.loads(file.metadata()["notes"])
    del values["ledger"]
    return json.dumps(values)


def test_equal_runs_in_two_processes_write_equal_bytes(tmp_path: Path) -> None:
    """In this process and in one that gives another order to hashes."""
    here = tmp_path / "here"
    there = tmp_path / "there"
    write(here)
    another = "1"
    if os.environ.get("PYTHONHASHSEED") == another:
        another = "2"
    environment = os.environ | {"PYTHONHASHSEED": another, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", RUN, str(there)], check=True, env=environment, cwd=ROOT)
    first = hashes(here)
    second = hashes(there)
    checkpoint = "run/private/checkpoint.safetensors"
    assert {"many.safetensors", "run/public/model.safetensors", checkpoint} <= first.keys()
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} <= {checkpoint}
    assert notes(here) == notes(there)


def test_metadata_are_in_the_order_of_their_keys_and_read_as_they_were_written(
    tmp_path: Path,
) -> None:
    tensors = {
        "b": torch.arange(5),
        "a": torch.tensor([[0.5, -1.0]], dtype=torch.float64),
        "c": torch.zeros(0),
    }
    metadata = {key: json.dumps([key, 'ü "x"\n']) for key in "zyxwvutsrq"}
    contents = set()
    for _ in range(20):
        write_tensors(tmp_path / "file.safetensors", tensors, metadata)
        contents.add((tmp_path / "file.safetensors").read_bytes())
    assert len(contents) == 1
    content = contents.pop()
    assert int.from_bytes(content[:8], "little") % 8 == 0  # tensors are aligned
    read, about = read_tensors(tmp_path / "file.safetensors")
    assert about == metadata
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    header, _ = split_header(content)
    assert list(header["__metadata__"]) == sorted(metadata)
