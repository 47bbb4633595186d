"""Client stores against a dictionary of rows, and crashes at every point of a save, of one process and of several."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedmtl._files as files_module
from fedmtl._files import write_bytes
from fedmtl.algorithms import ClientStore
from fedmtl.algorithms import store as store_module
from fedmtl.errors import ConfigError, ResumeError
from fedmtl.ranks import Ranks

from ..small import Ended
from .half import by_halves

N = 9
FIELDS = {"model": ((3,), torch.float64), "seen": ((), torch.bool), "count": ((2, 2), torch.int64)}
WORK = torch.tensor([5, 1, 9, 2, 2, 8, 3, 7, 4])
Reference = dict[tuple[str, int], torch.Tensor]


def random_rows(name: str, k: int, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = FIELDS[name]
    return (torch.randn(k, *shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


def exercise(
    stores: list[ClientStore], reference: Reference, generator: torch.Generator, times: int = 6
) -> None:
    """Random writes to stores and to a dictionary."""
    for _ in range(times):
        for name in FIELDS:
            ids = torch.randperm(N, generator=generator)[
                : int(torch.randint(0, 5, (), generator=generator))
            ]
            rows = random_rows(name, len(ids), generator)
            for store in stores:
                store.scatter(name, ids, rows)
            reference |= {(name, i): row.clone() for i, row in zip(ids.tolist(), rows, strict=True)}


def assert_holds(
    store: ClientStore, reference: Reference, order: torch.Tensor | None = None
) -> None:
    ids = store.members if order is None else order
    for name, (shape, dtype) in FIELDS.items():
        found = store.gather(name, ids)
        zero = torch.zeros(shape, dtype=dtype)
        expected = torch.stack([reference.get((name, i), zero) for i in ids.tolist()])
        assert found.dtype == dtype
        assert torch.equal(found, expected)


def ranks_of(size: int) -> list[ClientStore]:
    """The empty stores of ``size`` processes."""
    owner = Ranks(size=size).assigned(WORK)
    members = [(owner == rank).nonzero()[:, 0] for rank in range(size)]
    parts = [f"{rank}-of-{size}" for rank in range(size)]
    return [
        ClientStore(N, FIELDS, members=own, part=part)
        for own, part in zip(members, parts, strict=True)
    ]


def checkpoint(folder: Path, stores: list[ClientStore], step: int) -> dict[str, int]:
    """Save all stores, and write the checkpoint: a file with the numbers of rows."""
    files = {
        file: length
        for store in stores
        for file, length in store.save(folder / "clients", step).items()
    }
    write_bytes(folder / "checkpoint", json.dumps([step, files]).encode())
    for store in stores:
        store.commit(folder / "clients", files)
    return files


def resumed(folder: Path, size: int) -> tuple[int, list[ClientStore]]:
    """The step of the checkpoint, and the stores of ``size`` processes that go on from it."""
    step, files = json.loads((folder / "checkpoint").read_text())
    stores = ranks_of(size)
    for store in stores:
        store.load(folder / "clients", files)
    return step, stores


def test_rows_are_copies(tmp_path: Path) -> None:
    store, rows = ClientStore(N, FIELDS), torch.ones(2, 3, dtype=torch.float64)
    store.scatter("model", torch.tensor([1, 4]), rows)
    rows.fill_(5)
    for step in range(2):
        found = store.gather("model", torch.tensor([4, 1]))
        assert torch.equal(found, torch.ones(2, 3, dtype=torch.float64))
        found.fill_(7)
        assert torch.equal(
            store.gather("model", torch.tensor([1])), torch.ones(1, 3, dtype=torch.float64)
        )
        checkpoint(tmp_path, [store], step)


def test_rows_of_all_clients_in_order_are_taken_and_lent_without_a_copy() -> None:
    store, rows = ClientStore(N, FIELDS), torch.arange(3.0 * N, dtype=torch.float64).reshape(N, 3)
    store.scatter_all(torch.arange(N), {"model": rows})
    assert (
        store.gather_all(torch.arange(N))["model"].data_ptr()
        == rows.data_ptr()
        == store.whole("model").data_ptr()
    )
    some = torch.tensor([6, 2])
    store.scatter_all(some, {"model": -torch.ones(2, 3, dtype=torch.float64)})
    assert store.whole("model")[:, 0].tolist() == [0, 3, -1, 9, 12, 15, -1, 21, 24]
    late = ClientStore(N, FIELDS)
    for ids in torch.tensor([7, 2, 5, 0, 8, 1, 3, 4, 6]).split(
        2
    ):  # once all are there they are put in order
        late.scatter("model", ids, rows[ids])
    assert torch.equal(late.whole("model"), late.gather("model", torch.arange(N)))
    assert late.whole("model").data_ptr() == late.whole("model").data_ptr()


def test_only_clients_that_were_written_take_memory_and_room(tmp_path: Path) -> None:
    many, generator = 1_000_000, torch.Generator().manual_seed(0)
    store = ClientStore(many, {"model": ((50,), torch.float64)})
    reference, written = torch.zeros(many, dtype=torch.float64), 0
    for step in range(20):
        ids = torch.randperm(many, generator=generator)[:100]
        rows = torch.randn(100, 50, generator=generator, dtype=torch.float64)
        assert torch.equal(store.gather("model", ids)[:, 7], reference[ids])
        store.scatter_all(ids, {"model": rows})
        reference[ids] = rows[:, 7]
        (length,) = checkpoint(tmp_path, [store], step).values()
        written += 100
        assert length == written  # what changed, and nothing else
    (path,) = (tmp_path / "clients").iterdir()
    assert path.stat().st_size == 2000 * (
        8 + 50 * 8
    )  # numbers of clients and rows, and nothing else
    held = store._rows["model"]
    assert len(held) == 0
    assert torch.equal(store.gather("model", torch.arange(many))[:, 7], reference)


def test_a_file_has_at_most_twice_as_many_rows_as_clients(tmp_path: Path) -> None:
    store, names = ClientStore(N, FIELDS), set()
    for step in range(8):
        rows = random_rows("model", N, torch.Generator().manual_seed(step))
        store.scatter_all(torch.arange(N), {"model": rows.clone()})
        files = checkpoint(tmp_path, [store], step)
        assert list(files.values()) == [N * (1 + step % 2)]
        names |= files.keys()
        assert [path.name for path in (tmp_path / "clients").iterdir()] == list(files)
        assert torch.equal(resumed(tmp_path, 1)[1][0].whole("model"), rows)
    assert names == {f"{step}-0-of-1" for step in (0, 2, 4, 6)}


@pytest.mark.parametrize("sizes", [(1, 3, 2, 1), (2, 1, 4), (3, 3)])
def test_rows_follow_their_clients_to_any_number_of_processes(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BYTES", 50)  # rows are copied in pieces
    generator, reference, stores, step = torch.Generator().manual_seed(7), {}, ranks_of(sizes[0]), 0
    for size in sizes:
        if step:
            step, stores = resumed(tmp_path, size)
            for store in stores:
                assert_holds(store, reference)
            files = checkpoint(tmp_path, stores, step)  # a run that had ended
            assert {file.rpartition("-")[2] for file in files} == {str(size)}
        for _ in range(3):
            step += 1
            exercise(stores, reference, generator, times=1)
            for store in stores:
                assert_holds(store, reference)
                assert_holds(store, reference, store.members[[1, 0, 1]])
            checkpoint(tmp_path, stores, step)
    with pytest.raises(NotImplementedError, match="only the tensors of its own clients"):
        ranks_of(2)[0].whole("model")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_files_that_are_missing_or_cut_are_named(size: int, tmp_path: Path) -> None:
    stores = ranks_of(3)
    exercise(stores, {}, torch.Generator().manual_seed(7))
    checkpoint(tmp_path, stores, 2)
    path = tmp_path / "clients" / "2-1-of-3"
    os.truncate(path, path.stat().st_size - 1)
    for _ in range(2):
        with pytest.raises(
            ResumeError, match=r"clients/2-1-of-3 is missing, or has less .* all machines reach"
        ):
            resumed(tmp_path, size)
        path.unlink(missing_ok=True)


def crash_at(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """End the process at the ``number``-th system call; returns the calls that were made."""
    made: list[str] = []

    def stopping(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*args: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) > number:
                raise Ended
            return call(*args, **options)

        return stopped

    written = stopping("write", lambda: None)
    half = lambda path, mode: by_halves(open(path, mode), written)  # noqa: E731, SIM115 - closed by its user
    monkeypatch.setattr(files_module, "open", half, raising=False)
    monkeypatch.setattr(os, "replace", stopping("replace", os.replace))
    monkeypatch.setattr(os, "fsync", stopping("fsync", lambda file: None))
    monkeypatch.setattr(Path, "unlink", stopping("unlink", Path.unlink))
    return made


@pytest.mark.parametrize(("before", "now"), [(1, 1), (2, 2), (2, 1), (1, 3)])
def test_crash_at_each_point_of_a_checkpoint(
    before: int, now: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the checkpoint is found, whole, by any number of processes: the old one until the new one is there;
    and the run that goes on leaves the files of one that was never interrupted."""
    stores, old = ranks_of(before), Reference()
    exercise(stores, old, torch.Generator().manual_seed(4))
    checkpoint(tmp_path / "original", stores, 1)

    def go_on(folder: Path) -> list[Reference]:
        """Write two checkpoints, by rows that are appended and by a new file."""
        states, (step, stores) = [old], resumed(folder, now)
        for times in (1, 4):
            states.append(dict(states[-1]))
            exercise(stores, states[-1], torch.Generator().manual_seed(5), times=times)
            step += 1
            checkpoint(folder, stores, step)
        return states

    shutil.copytree(tmp_path / "original", tmp_path / "whole")
    states, steps, number, finished = go_on(tmp_path / "whole"), [], 0, False
    while not finished:
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "original", folder)
        with monkeypatch.context() as patch:
            crash_at(number, patch)
            with contextlib.suppress(Ended):
                go_on(folder)
                finished = True
        step, found = resumed(folder, (before, now, 4)[number % 3])
        steps.append(step)
        for store in found:
            assert_holds(store, states[step - 1])
        if step == 1:
            go_on(folder)
            left = {
                name: value for name, value in contents(folder).items() if not name.endswith(".tmp")
            }
            assert left == contents(tmp_path / "whole")
        number += 1
        shutil.rmtree(folder)
    assert steps == sorted(steps)
    assert set(steps) == {1, 2, 3}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "field", [(3,), (3, torch.float32), ((3,), "float32"), ((3.0,), torch.float32)]
)
def test_a_field_that_is_no_shape_and_dtype_is_refused_by_name(field: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"field 'h' is .*the shape of one client's value and its dtype"
    ):
        ClientStore(N, {"h": field})
