"""Client stores against a dictionary of rows, and crashes of the mapped one at every point of a snapshot."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import fedmtl._files as files_module
from fedmtl.algorithms import ClientStore, MappedClientStore, dealing
from fedmtl.algorithms.dealing import deal
from fedmtl.algorithms.store import PartStore
from fedmtl.errors import ConfigError, ResumeError
from fedmtl.ranks import Ranks

N = 9
FIELDS = {"model": ((3,), torch.float64), "seen": ((), torch.bool), "count": ((2, 2), torch.int64)}


def random_rows(name: str, k: int, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = FIELDS[name]
    return (torch.randn(k, *shape, generator=generator, dtype=torch.float64) * 3).to(dtype)


def exercise(store, reference, generator, times=6):
    """Random writes to the store and to a dictionary."""
    for _ in range(times):
        for name in FIELDS:
            ids = torch.randperm(N, generator=generator)[: int(torch.randint(0, 5, (), generator=generator))]
            rows = random_rows(name, len(ids), generator)
            store.scatter(name, ids, rows)
            reference |= {(name, i): row.clone() for i, row in zip(ids.tolist(), rows, strict=True)}


def assert_holds(store, reference, order=None):
    ids = torch.arange(N) if order is None else order
    for name, (shape, dtype) in FIELDS.items():
        found = store.gather(name, ids)
        zero = torch.zeros(shape, dtype=dtype)
        expected = torch.stack([reference.get((name, i), zero) for i in ids.tolist()])
        assert found.dtype == dtype
        assert torch.equal(found, expected)


@pytest.fixture(params=["memory", "mapped"])
def store(request, tmp_path):
    if request.param == "memory":
        return ClientStore(N, FIELDS)
    return MappedClientStore(N, FIELDS, folder=tmp_path / "store")


def test_rows_like_a_dictionary(store):
    generator, reference = torch.Generator().manual_seed(0), {}
    assert_holds(store, reference)
    for _ in range(4):
        exercise(store, reference, generator, times=2)
        store.snapshot(1)
        store.commit()
        exercise(store, reference, generator, times=1)
        assert_holds(store, reference)
        assert_holds(store, reference, torch.tensor([7, 0, 7, 3]))


def test_rows_are_copies(store):
    rows = torch.ones(2, 3, dtype=torch.float64)
    store.scatter("model", torch.tensor([1, 4]), rows)
    rows.fill_(5)
    found = store.gather("model", torch.tensor([4, 1]))
    assert torch.equal(found, torch.ones(2, 3, dtype=torch.float64))
    found.fill_(7)
    assert torch.equal(store.gather("model", torch.tensor([1])), torch.ones(1, 3, dtype=torch.float64))


def test_restore_takes_the_snapshot_and_drops_later_rows(store):
    generator, reference = torch.Generator().manual_seed(1), {}
    exercise(store, reference, generator)
    snapshot = {name: tensor.clone() for name, tensor in store.snapshot(3).items()}
    store.commit()
    exercise(store, {}, generator)
    store.restore(snapshot, 3)
    assert_holds(store, reference)


@pytest.mark.parametrize("kind", ["memory", "mapped"])
def test_only_clients_that_were_written_take_memory(tmp_path, kind):
    many, fields, generator = 1_000_000, {"model": ((50,), torch.float64)}, torch.Generator().manual_seed(0)
    store = ClientStore(many, fields) if kind == "memory" else MappedClientStore(many, fields, folder=tmp_path)
    reference = torch.zeros(many, dtype=torch.float64)
    for step in range(20):
        ids = torch.randperm(many, generator=generator)[:100]
        rows = torch.randn(100, 50, generator=generator, dtype=torch.float64)
        before = store.gather("model", ids)
        assert torch.equal(before[:, 7], reference[ids])
        store.scatter_all(ids, {"model": rows})
        reference[ids] = rows[:, 7]
        snapshot = store.snapshot(step)
        assert sum(tensor.nbytes for tensor in snapshot.values()) <= (step + 1) * 100 * 51 * 8
    assert torch.equal(store.gather("model", torch.arange(many))[:, 7], reference)
    written = (tmp_path / "journal-19.safetensors").stat().st_size if kind == "mapped" else 0
    assert written < 2100 * 51 * 8
    assert sum(path.stat().st_blocks for path in tmp_path.glob("*.bin")) * 512 < 1 << 20  # 400 MB if it were not sparse


def test_a_store_that_most_clients_have_written_is_one_tensor_and_goes_on_from_either():
    store, other = ClientStore(N, FIELDS), ClientStore(N, FIELDS)
    rows = torch.arange(3.0 * N, dtype=torch.float64).reshape(N, 3)
    order = torch.tensor([7, 2, 5, 0, 8, 1])
    for first in range(0, 6, 2):
        ids = order[first : first + 2]
        store.scatter("model", ids, rows[ids])
        snapshot = {name: tensor.clone() for name, tensor in store.snapshot(0).items()}
        assert ("model.ids" in snapshot) == (2 * (first + 2) <= N)
        other.scatter("model", torch.tensor([3]), rows[:1])  # later than the snapshot
        other.restore(snapshot, 0)
        expected = torch.zeros(N, 3, dtype=torch.float64)
        expected[order[: first + 2]] = rows[order[: first + 2]]
        for one in (store, other):
            assert torch.equal(one.gather("model", torch.arange(N)), expected)
            assert torch.equal(one.gather_all(torch.arange(N))["model"], expected)


@pytest.mark.parametrize("ids", [[0, N], [-1, 0], [0, 1, 2]])
def test_restore_refuses_rows_of_clients_that_are_not_there(ids):
    store = ClientStore(N, {"seen": ((), torch.bool)})
    with pytest.raises(ResumeError, match="client tensors"):
        store.restore({"seen": torch.ones(2, dtype=torch.bool), "seen.ids": torch.tensor(ids)}, 1)


def test_restore_refuses_other_shapes():
    store = ClientStore(N, FIELDS)
    for tensors in ({}, {**store.snapshot(1), "seen": torch.zeros(N + 1, dtype=torch.bool)}):
        with pytest.raises(ResumeError, match="client tensors"):
            store.restore(tensors, 1)


def test_mapped_store_reopens_at_its_last_snapshot(tmp_path):
    generator, reference = torch.Generator().manual_seed(2), {}
    store = MappedClientStore(N, FIELDS, folder=tmp_path)
    exercise(store, reference, generator)
    store.snapshot(1)
    store.commit()
    exercise(store, {}, generator)  # never made durable
    assert_holds(MappedClientStore(N, FIELDS, folder=tmp_path), reference)


def test_mapped_store_refuses_another_layout(tmp_path):
    MappedClientStore(N, FIELDS, folder=tmp_path)
    for clients, fields in ((N + 1, FIELDS), (N, {"model": ((4,), torch.float64)})):
        with pytest.raises(ResumeError, match=r"layout\.json"):
            MappedClientStore(clients, fields, folder=tmp_path)


def test_nothing_is_pickled(tmp_path):
    store = MappedClientStore(N, FIELDS, folder=tmp_path)
    exercise(store, {}, torch.Generator().manual_seed(3))
    store.snapshot(1)
    store.commit()
    for path in tmp_path.iterdir():
        assert path.name in {"layout.json", *(f"{name}.bin" for name in FIELDS)}
    assert (tmp_path / "model.bin").stat().st_size == N * 3 * 8  # numbers and nothing else


WORK = torch.tensor([5, 1, 9, 2, 2, 8, 3, 7, 4])


def parts(folder: Path, size: int) -> list[PartStore]:
    """The stores of ``size`` ranks."""
    owner, found = Ranks(size=size).owners(WORK), []
    for rank in range(size):
        members = (owner == rank).nonzero()[:, 0]
        inner = MappedClientStore(len(members), FIELDS, folder=folder / f"rank-{rank}-of-{size}")
        found.append(PartStore(N, members, inner))
    return found


def begin(folder: Path, size: int, steps: int) -> dict:
    """A checkpoint of step ``steps``, the last commit of which ranks 1, 2, ... did not begin; beside it the journals of
    a checkpoint that was never finished. Returns its rows."""
    deal_at_all(folder, size, None)
    stores, generator, reference = parts(folder, size), torch.Generator().manual_seed(7), {}
    for step in range(1, steps + 2):
        for name in FIELDS:
            ids = torch.randperm(N, generator=generator)[:5]
            rows = random_rows(name, len(ids), generator)
            for store in stores:
                store.scatter(name, ids, rows)
            if step <= steps:
                reference |= {(name, i): row.clone() for i, row in zip(ids.tolist(), rows, strict=True)}
        for rank, store in enumerate(stores):
            store.snapshot(step)
            if step < steps or (step == steps and not rank):
                store.commit()
            elif step == steps:
                store.inner._drop()
    return reference


def deal_at_all(folder: Path, size: int, step: int | None) -> None:
    """As ``size`` ranks do it together: each on a thread, which wait for one another."""
    barrier, box, errors = threading.Barrier(size), [None] * size, []

    class Threads(Ranks):
        def share(self, make):
            return self.gather(make() if self.first else None)[0]

        def gather(self, value):
            box[self.rank] = value
            barrier.wait()
            found = list(box)
            barrier.wait()
            return found

    def work(rank: int) -> None:
        try:
            deal(folder, WORK, Threads(rank, size), step)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error


def assert_dealt(folder: Path, size: int, step: int, reference: dict) -> None:
    assert sorted(path.name for path in folder.glob("rank*")) == [
        *(f"rank-{rank}-of-{size}" for rank in range(size)),
        "ranks",
    ]
    for store in parts(folder, size):
        store.restore({}, step)
        assert_holds(store, reference, store.members)
        assert not list(store.inner.folder.glob("journal-*"))


@pytest.mark.parametrize("sizes", [(1, 3, 2, 1), (2, 1, 4), (3, 3)])
def test_rows_follow_their_clients_to_any_number_of_ranks(tmp_path, sizes):
    reference = begin(tmp_path, sizes[0], 4)
    assert len(reference) > N
    for size in sizes[1:]:
        deal_at_all(tmp_path, size, 4)
        if size != sizes[0]:
            assert_dealt(tmp_path, size, 4, reference)
    assert_dealt(tmp_path, sizes[-1], 4, reference)


def test_dealing_keeps_holes_and_takes_rows_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(dealing, "_BYTES", 50)
    reference = begin(tmp_path, 2, 3)
    deal_at_all(tmp_path, 1, 3)
    assert_dealt(tmp_path, 1, 3, reference)
    many, field = 1 << 16, {"model": ((8,), torch.float64)}
    deal(tmp_path / "many", torch.ones(many), Ranks(), None)
    (tmp_path / "many" / "ranks").write_text("2")
    for rank in range(2):
        store = MappedClientStore(many // 2, field, folder=tmp_path / "many" / f"rank-{rank}-of-2")
        store.scatter("model", torch.tensor([7]), torch.full((1, 8), -0.0, dtype=torch.float64))
        store.snapshot(1)
        store.commit()
    monkeypatch.setattr(dealing, "_BYTES", 1 << 20)
    deal(tmp_path / "many", torch.ones(many), Ranks(), 1)
    store = MappedClientStore(many, field, folder=tmp_path / "many" / "rank-0-of-1")
    assert int(torch.signbit(store.whole("model")).sum()) == 16  # -0.0 is not a hole
    assert (store.folder / "model.bin").stat().st_blocks * 512 < 1 << 16  # 4 MB if there were none


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 3)])
def test_crash_at_each_point_of_a_change_of_ranks(tmp_path, monkeypatch, old, new):
    """One complete set is there at any time, for as many ranks as before, as now, or another number."""
    reference = begin(tmp_path / "original", old, 3)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    seen, number, finished = set(), 0, False
    while not finished:
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "original", folder)
        with monkeypatch.context() as patch:
            crash_at(number, patch)
            patch.setattr(shutil, "rmtree", slowly)
            with contextlib.suppress(Stop):
                deal_at_all(folder, new, 3)
                finished = True
        left = [any(folder.glob(f"rank-*-of-{size}")) for size in (old, new)]
        seen.add((int((folder / "ranks").read_text()), *left))
        size = (old, new, 4)[number % 3]
        deal_at_all(folder, size, 3)
        assert_dealt(folder, size, 3, reference)
        number += 1
    assert seen == {(old, True, False), (old, True, True), (new, True, True), (new, False, True)}


def slowly(folder: Path) -> None:
    """Remove a folder file by file, each of which may be the last."""
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_files_that_are_missing_are_named(tmp_path):
    begin(tmp_path, 3, 2)
    (tmp_path / "rank-1-of-3").rename(tmp_path / "elsewhere")
    for size in (1, 2, 3):
        with pytest.raises(ResumeError, match=r"rank-1-of-3 is missing, .* of 1 of the 3 processes") as error:
            deal_at_all(tmp_path, size, 2)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("rank-*-of-[12]"))
    (tmp_path / "ranks").unlink()
    with pytest.raises(ResumeError, match=r"ranks is missing, .*client_store='memory'"):
        deal(tmp_path, WORK, Ranks(), 2)


def test_without_a_checkpoint_all_begin_with_zeros(tmp_path):
    begin(tmp_path, 2, 2)
    for size in (2, 3):
        deal_at_all(tmp_path, size, None)
        assert [path.name for path in tmp_path.iterdir()] == ["ranks"]
        for store in parts(tmp_path, size):
            assert_holds(store, {}, store.members)


class Stop(BaseException):
    """The process ends here."""


def crash_at(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """End the process at the ``number``-th system call of a snapshot; returns the calls that were made."""
    made: list[str] = []

    def stopping(name, call):
        def stopped(*args, **options):
            made.append(name)
            if len(made) > number:
                raise Stop
            return call(*args, **options)

        return stopped

    monkeypatch.setattr(files_module, "open", half_open(stopping("save", lambda: None)), raising=False)
    monkeypatch.setattr(os, "replace", stopping("replace", os.replace))
    monkeypatch.setattr(os, "fsync", stopping("fsync", os.fsync))
    monkeypatch.setattr(Path, "unlink", stopping("unlink", Path.unlink))
    return made


def half_open(stop):
    """Files of which half has arrived when the process ends."""

    class Half:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, content):
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            stop()
            self.file.write(content[len(content) // 2 :])

        def flush(self):
            self.file.flush()

        def fileno(self):
            return self.file.fileno()

    return lambda path, mode: Half(open(path, mode))


@pytest.mark.parametrize("torn", [False, True], ids=["", "torn"])
def test_crash_at_each_point_of_a_checkpoint(tmp_path, monkeypatch, torn):
    """The state of the checkpoint is found, whole: the old one until the new checkpoint is in place."""
    generator, old = torch.Generator().manual_seed(4), {}
    original = MappedClientStore(N, FIELDS, folder=tmp_path / "original")
    exercise(original, old, generator)
    original.snapshot(1)
    original.commit()
    del original
    outcomes, number = [], 0
    while True:
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "original", folder)
        store, new = MappedClientStore(N, FIELDS, folder=folder), dict(old)
        store.restore({}, 1)
        exercise(store, new, torch.Generator().manual_seed(5))
        step, finished = 1, False
        with monkeypatch.context() as patch:
            crash_at(number, patch)
            with contextlib.suppress(Stop):
                store.snapshot(2)
                step = 2  # the checkpoint's rename
                store.commit()
                finished = True
        del store
        if torn and step == 2 and not finished:  # rows of the files that arrived only in part
            content = bytearray((folder / "model.bin").read_bytes())
            changed = {i for name, i in new if name == "model"} - {i for i in range(N) if same_row(old, new, i)}
            if (folder / "journal-2.safetensors").exists():
                for i in changed:
                    content[i * 24 + 8 : i * 24 + 24] = os.urandom(16)
                (folder / "model.bin").write_bytes(content)
        for _ in range(2):
            found = MappedClientStore(N, FIELDS, folder=folder)
            found.restore({}, step)
            assert is_snapshot(found, old, new) == ("old" if step == 1 else "new")
            assert not list(folder.glob("journal*"))
            del found
        outcomes.append((step, finished))
        if finished:
            break
        number += 1
    assert outcomes[0] == (1, False)
    assert (2, False) in outcomes, "nothing was interrupted between the checkpoint and the end of the commit"


def same_row(old, new, client) -> bool:
    zero = torch.zeros(3, dtype=torch.float64)
    return torch.equal(old.get(("model", client), zero), new.get(("model", client), zero))


def is_snapshot(store, old, new) -> str:
    """Which snapshot the store holds; fails on a mixture."""
    for name, reference in (("old", old), ("new", new)):
        try:
            assert_holds(store, reference)
        except AssertionError:
            continue
        return name
    pytest.fail("a mixture of two snapshots")


@pytest.mark.parametrize("field", [3, (3,), (3, torch.float32), ((3,), "float32"), ((3.0,), torch.float32)])
def test_a_field_that_is_no_shape_and_dtype_is_refused_by_name(field, tmp_path):
    for make in (ClientStore, partial(MappedClientStore, folder=tmp_path)):
        with pytest.raises(ConfigError, match=r"field 'h' is .*the shape of one client's value and its dtype"):
            make(N, {"h": field})
