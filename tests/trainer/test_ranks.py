"""Several processes give what one gives, to the last bit."""

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fedmtl import PPDMTL, Execution, PoissonClocks, cli
from fedmtl import ranks as module
from fedmtl.cli.run import Job, Process
from fedmtl.errors import ConfigError, TrainingError
from fedmtl.ranks import Ranks
from fedmtl.trainer.run import processes

from . import ranked
from .ranked import CASES, DYING, FEW, SAVED, SECURE, SWEEP, outcome, start, trainer

SIZES = (2, 3)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank of groups of two and three processes found."""
    for size in SIZES:  # a run that one process begins, and that the ranks go on with
        ranked.VICTIM = -1
        with pytest.raises(TrainingError):
            trainer(DYING, folder / str(size) / "begun alone").fit()
    ranked.VICTIM = None
    return dict(zip(SIZES, start(SIZES, folder), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_gives_the_same_bits(name: str, found: Any, tmp_path: Path) -> None:
    alone = outcome(trainer(CASES[name], tmp_path / "run"))
    for size, ranks in found.items():
        for one in ranks:
            assert (name in one) == (size == 2 or name in FEW)
            assert one.get(name, alone) == alone


def test_secure_noise_is_drawn_once(found: Any, tmp_path: Path) -> None:
    alone = outcome(trainer(SECURE, tmp_path))
    drawn = set()
    for ranks in found.values():
        assert all(one["secure"] == ranks[0]["secure"] for one in ranks)
        assert ranks[0]["secure"]["off grid"] == [0]
        assert ranks[0]["secure"]["epsilon"] == alone["epsilon"]
        drawn.add(ranks[0]["secure"]["models"])
    assert len(drawn | {alone["models"]}) == 3


def test_a_run_of_one_process_goes_on_in_several(found: Any, tmp_path: Path) -> None:
    whole = outcome(trainer(DYING, tmp_path / "run"))
    for ranks in found.values():
        for one in ranks:
            assert one["begun alone"]["models"] == whole["models"]
            assert one["begun alone"]["epsilon"] == whole["epsilon"]


def test_a_lost_rank_ends_the_run_which_goes_on_in_one_process(found: Any, folder: Path, tmp_path: Path) -> None:
    whole = outcome(trainer(DYING, tmp_path / "run"))
    for size, ranks in found.items():
        for one in ranks[:-1]:
            assert one["killed"].startswith("TrainingError: Rank ")
            assert "resume" in one["killed"]
        assert "killed" not in ranks[-1]
        rest = outcome(trainer(DYING, folder / str(size) / "killed"), resume=True)
        assert (rest["models"], rest["epsilon"]) == (whole["models"], whole["epsilon"])


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29201"),
        RuntimeError("[gloo/transport/tcp/pair.cc:525] Read error [10.0.0.2]:4711: Connection reset by peer"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3600000ms for recv operation"),
        RuntimeError("[gloo/transport/tcp/pair.cc:454] writev [127.0.0.1]:29201: Broken pipe"),
        dist.DistNetworkError("Failed to recv, got 0 bytes"),
    ],
)
def test_a_rank_that_cannot_be_reached_is_said_with_what_to_do(error: RuntimeError) -> None:
    with (
        pytest.raises(TrainingError, match=r"Rank 1 of 2 can no longer reach the others.*resume"),
        Ranks(1, 2)._reached(),
    ):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
        RuntimeError("[gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 32 vs 24"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_an_error_of_its_own_is_not_the_loss_of_a_rank(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as caught, Ranks(1, 2)._reached():
        raise error
    assert caught.value is error


def test_what_one_rank_refuses_all_refuse(found: Any) -> None:
    for ranks in found.values():
        for one in ranks:
            assert "already holds a run" in one["taken"]


def test_operations(found: Any) -> None:
    for size, ranks in found.items():
        assert ranks[0]["operations"]["sum"] == [2.0**-40 * size * (size + 1) / 2] * 3
        for one in (rank["operations"] for rank in ranks):
            assert one["shared"] == ["rank", 0]
            assert one["tensor"] == 5000 * 4999 // 2
            assert one["gathered"] == list(range(size))
            assert one["joined"] == [[k, -k] for k in range(7)]
            assert one["bools"] == [k % 2 == 0 for k in range(7)]
            assert one["error of the first"] == "of the first"
            assert one["error of another"].endswith("of the second")


def test_a_saved_run_goes_on_with_another_number_of_processes(found: Any, folder: Path, tmp_path: Path) -> None:
    whole = outcome(trainer(SAVED, tmp_path / "run"))
    for size, ranks in found.items():
        assert ranks[0]["saved, begun by fewer"] == "TrainingError: as if it were killed"
        rest = outcome(trainer(SAVED, folder / str(size) / "saved, ended"), resume=True)
        for one in (rest, *(rank["saved, resumed"] for rank in ranks)):
            for name in ("models", "epsilon", "history", "scores", "baselines", "stopped"):
                assert one[name] == whole[name]
        finished = outcome(trainer(SAVED, folder / str(size) / "saved"), resume=True)  # by other ranks
        assert finished["models"] == whole["models"]


def test_all_ranks_compute_every_job_of_a_sweep(found: Any, folder: Path, tmp_path: Path) -> None:
    assert cli.main(["-m", *SWEEP, f"hydra.sweep.dir={tmp_path}"]) == 0
    for size, ranks in found.items():
        assert [one["sweep"] for one in ranks] == [one["sweep, resumed"] for one in ranks] == [0] * size
        for job in range(3):
            numbers = [
                json.loads((sweep / str(job) / "private" / "result.json").read_text())
                for sweep in (tmp_path, folder / str(size) / "sweep")
            ]
            assert numbers[0]["epsilon"] == numbers[1]["epsilon"]
            assert numbers[0]["accuracy"] == numbers[1]["accuracy"]


def test_a_job_that_fails_at_one_rank_alone_ends_its_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    job, ranks = Job(1, 3, "seed=2", Path()), Ranks(1, 2)
    with pytest.raises(SystemExit) as ended, Process(ranks=ranks).errors(job):
        raise TrainingError("of this rank")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "fedmtl: error: [2/3] seed=2: rank 1: TrainingError: of this rank\n"
    of_all = TrainingError("of all ranks")
    of_all.agreed = True  # type: ignore[attr-defined]
    for process, printed in ((Process(ranks=ranks), ""), (Process(), "fedmtl: error: [2/3] seed=2: of all ranks\n")):
        with process.errors(job):
            raise of_all
        assert process.codes == [1]
        assert capsys.readouterr().err == printed


@pytest.mark.parametrize("name", FEW)
def test_processes_that_a_run_starts_give_the_same_bits(name: str, tmp_path: Path) -> None:
    own = outcome(trainer(CASES[name] | {"execution": Execution(processes=2)}, tmp_path / "two"))
    assert own == outcome(trainer(CASES[name], tmp_path / "one"))
    assert not dist.is_initialized()


def test_a_run_whose_process_is_lost_goes_on_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, two = outcome(trainer(DYING, tmp_path / "whole")), {"execution": Execution(processes=2)}
    monkeypatch.setattr(ranked, "VICTIM", 1)
    with pytest.raises(TrainingError, match=r"Rank 0 of 2 can no longer reach the others.*resume"):
        trainer(DYING | two, tmp_path / "run").fit()
    monkeypatch.setattr(ranked, "VICTIM", None)
    rest = outcome(trainer(DYING, tmp_path / "run"), resume=True)
    assert (rest["models"], rest["epsilon"]) == (whole["models"], whole["epsilon"])


@pytest.mark.parametrize("ended", [0, 9])
def test_the_processes_that_a_run_started_end_with_it(ended: int, tmp_path: Path) -> None:
    parent = os.fork()
    if parent == 0:
        os.setpgrp()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where the other process says that this one is gone
        torch.set_num_threads(1)
        ranked.VICTIM = 0 if ended else None
        trainer(DYING | {"execution": Execution(processes=2)}, tmp_path / "run").fit()
        os._exit(0)
    _, status = os.waitpid(parent, 0)
    assert os.waitstatus_to_exitcode(status) == ended
    left = time.monotonic() + 30
    while time.monotonic() < left:
        try:
            os.killpg(parent, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process that the run started is still there")


def test_garbage_of_a_run_stops_no_later_copy_of_the_process() -> None:
    gc.disable()
    try:
        with Ranks().forked(2) as ranks:
            ranks.gather(None)
        garbage: list[object] = [ranks]
        garbage.append(garbage)
        del ranks, garbage
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        left, ended = time.monotonic() + 20, (0, 0)
        while ended == (0, 0) and time.monotonic() < left:
            ended = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)
    finally:
        gc.enable()


def test_an_error_of_another_process_is_that_of_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    def run(error: Exception, agreed: bool) -> None:
        with Ranks().forked(2) as ranks, ranks.agree() if agreed else nullcontext():
            if ranks.rank == 1:
                raise error
            if not agreed:
                ranks.gather(None)

    with pytest.raises(TrainingError, match="rank 1: of the second"):
        run(TrainingError("of the second"), True)
    with pytest.raises(TrainingError, match="can no longer reach"):
        run(ValueError("of no operation of all"), False)
    assert "ValueError: of no operation of all" in capfd.readouterr().err


@pytest.mark.parametrize("error", [OSError("no more processes"), KeyboardInterrupt()])
def test_a_fork_that_fails_leaves_no_process(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, made = os.fork, list[int]()

    def failing() -> int:
        if made:
            raise error
        made.append(fork())
        return made[0]

    monkeypatch.setattr(os, "fork", failing)
    with pytest.raises(type(error)), Ranks().forked(3):
        raise AssertionError("the block began")
    with pytest.raises(ChildProcessError):
        os.waitpid(made[0], os.WNOHANG)


def test_a_copy_that_is_interrupted_as_it_begins_does_not_leave_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, this = os.fork, os.getpid()

    def interrupted() -> int:
        child = fork()
        if child == 0:
            raise KeyboardInterrupt
        raise OSError("no more processes")

    monkeypatch.setattr(os, "fork", interrupted)
    with pytest.raises(OSError, match="no more"), Ranks().forked(2):
        raise AssertionError("the block began")
    assert os.getpid() == this


class Unreadable:
    """An object without a pickle."""

    def __reduce__(self) -> Any:
        raise ValueError("it has no pickle")


def test_what_cannot_be_pickled_is_an_error_of_all_ranks() -> None:
    def run() -> None:
        with Ranks().forked(3) as ranks:
            with pytest.raises(ValueError, match="no pickle"):
                ranks.share(Unreadable)
            assert ranks.share(lambda: 5) == 5
            ranks.gather(Unreadable() if ranks.rank == 1 else None)

    with pytest.raises(TrainingError, match="can no longer reach"):
        run()


def test_a_copy_that_never_comes_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, made = os.fork, list[int]()

    def lost() -> int:
        made.append(fork())
        if made[-1] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return made[-1]

    monkeypatch.setattr(os, "fork", lost)
    monkeypatch.setattr(module, "_MEETING", timedelta(seconds=2))
    with pytest.raises(TrainingError, match="can no longer reach the others"), Ranks().forked(2):
        raise AssertionError("the block began")
    with pytest.raises(ChildProcessError):
        os.waitpid(made[0], os.WNOHANG)


def test_an_error_as_the_processes_part_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an interruption by the keyboard would be."""
    fork, made, left = os.fork, list[int](), dist.destroy_process_group

    def forked() -> int:
        made.append(fork())
        return made[-1]

    def parting() -> None:
        left()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", forked)
    monkeypatch.setattr(dist, "destroy_process_group", parting)
    threads, hook, seen = torch.get_num_threads(), sys.excepthook, list[Ranks]()

    def run() -> None:
        with Ranks().forked(3) as ranks:
            seen.append(ranks)
            ranks.gather(None)
            time.sleep(600 if ranks.rank else 0)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert (torch.get_num_threads(), sys.excepthook, seen[0].group) == (threads, hook, None)
    for child in made:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_a_process_that_fails_behind_the_others_fails_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        with Ranks().forked(2) as ranks:
            ranks.gather(None)
            if ranks.rank:
                raise ValueError("in its own files")

    with pytest.raises(TrainingError, match="has failed after its last work"):
        run()
    assert "ValueError: in its own files" in capfd.readouterr().err


def test_what_needs_one_process_says_so() -> None:
    two = {"execution": Execution(processes=2)}
    with pytest.raises(ConfigError, match=r"execution.processes is 2, but a run with 4 replicates needs one; leave"):
        trainer(CASES["mp_mtl"] | {"replicates": 4} | two, Path()).fit()
    with pytest.raises(ConfigError, match=r"execution.processes is 2, but 3 were started by torchrun"):
        processes(trainer(CASES["mp_mtl"] | two, Path()), SimpleNamespace(ranks=Ranks(0, 3)))
    clocks = {"algorithm": PPDMTL(row_norm=1.0), "schedule": PoissonClocks(per_client=3), "privacy": None}
    with pytest.raises(ConfigError, match=r"A run with pp_dmtl, whose clients act one at a time, needs one process"):
        processes(trainer(CASES["mp_mtl"] | clocks, Path()), SimpleNamespace(ranks=Ranks(0, 2)))
    with pytest.raises(ConfigError, match="A run with 4 replicates needs one process, and 3 were started"):
        processes(trainer(CASES["mp_mtl"] | {"replicates": 4}, Path()), SimpleNamespace(ranks=Ranks(0, 3)))
    with pytest.raises(ConfigError, match="ranks is 2; give None"):
        trainer(CASES["mp_mtl"], Path()).fit(ranks=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="There are 7 ranks for the 6 clients"):
        trainer(CASES["mp_mtl"], Path()).problem(ranks=Ranks(0, 7))


@pytest.mark.parametrize(
    ("words", "size", "said"),
    [
        (["rounds=1"], "2", "The environment has WORLD_SIZE=2, as for several processes, but "),
        (["rounds=1"], "two", "The environment has WORLD_SIZE=two, as for several processes, but "),
        (["audit"], "2", "audit runs in one process, and 2 were started"),
    ],
)
def test_an_environment_of_several_processes_without_a_launch_is_said(
    words: list[str], size: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"fedmtl: error: {said}")


def test_a_process_says_whom_it_waits_for_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "_ARRIVAL", timedelta(seconds=1.5))
    monkeypatch.setattr(module, "_NOTICE", 0.1)
    assert cli.main(["rounds=1"]) == 2
    who = f"rank 0 of 2 waits for the other processes, which connect to it at 127.0.0.1:{port} (MASTER_ADDR and "
    assert who in caplog.text
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"fedmtl: error: {who}")
    assert "did not come within 0.025 minutes" in said


def test_clients_are_dealt_out_evenly() -> None:
    work = torch.tensor([5, 100, 7, 7, 1, 60, 60, 2, 3, 90, 11])
    owner = Ranks(1, 3).owners(work)
    loads = [int(work[owner == rank].sum()) for rank in range(3)]
    assert sum(loads) == int(work.sum())
    assert max(loads) - min(loads) <= 60
    assert torch.bincount(owner).tolist() in ([4, 4, 3], [3, 4, 4], [4, 3, 4])
    assert torch.equal(owner, Ranks(2, 3).owners(work))
