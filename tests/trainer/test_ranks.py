"""Several processes give what one gives, to the last bit."""

import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fedmtl import (
    PMTL,
    PPDMTL,
    Buffered,
    ClientPrivacy,
    CyclicCohorts,
    Execution,
    Finetune,
    FullParticipation,
    PoissonClocks,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    SecureAggregation,
    Trainer,
    cli,
    models,
)
from fedmtl import ranks as module
from fedmtl.cli.process import Process
from fedmtl.cli.run import Job
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import ConfigError, ResumeError, TrainingError
from fedmtl.ranks import Ranks
from fedmtl.schedules import RandomLatency
from fedmtl.trainer.processes import processes
from tests.helpers import ragged_classification
from tests.methods import LINEAR, NETWORKS, SOLVER

BASE: dict[str, Any] = {
    "algorithm": NETWORKS["pmtl"],
    "data": ragged_classification(11),
    "model": models.mlp(hidden=5),
    "schedule": PoissonSampling(cohort=5),
    "privacy": ClientPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5),
    "rounds": 3,
    "progress": False,
}
TASKS = {
    "data": load_synthetic_tasks(
        tasks=6, train_examples=9, test_examples=4, features=5, problem="classification", seed=2
    ),
    "model": models.linear_regression(bias=True),
    "schedule": FullParticipation(),
}
RECORDS = {"privacy": RecordPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5)}
CASES: dict[str, dict[str, Any]] = {
    "records": {"folder": True, **RECORDS},
    "records, one by one": {
        "algorithm": NETWORKS["ditto"],
        "execution": Execution(chunk=1),
        **RECORDS,
    },
    "pmtl": {"folder": True, "eval_every": 1},
    "pmtl, running mean": {"algorithm": NETWORKS["pmtl, running mean"], "metrics": ["f1"]},
    "fedavg, no privacy": {
        "algorithm": NETWORKS["fedavg"],
        "privacy": None,
        "baselines": ["local"],
    },
    "fedavg, finetuned": {"algorithm": NETWORKS["fedavg"], "finetune": Finetune(validation=0.3)},
    "ditto, everybody": {"algorithm": NETWORKS["ditto"], "schedule": FullParticipation()},
    **{name: {"algorithm": NETWORKS[name]} for name in ("fedrep", "ifca", "mp_mtl_layers")},
    "buffered": {
        "folder": True,
        "rounds": 8,
        # in some rounds a process has no client
        "schedule": Buffered(latency=RandomLatency("lognorm", {"s": 1.5}), concurrency=8, buffer=2),
    },
    "saved every round": {"folder": True, "checkpoint_every": 1},
    "adaptive": {
        "privacy": ClientPrivacy(
            clip_norm=QuantileClip(0.5, count_noise=3.0),
            noise_multiplier=1.5,
            epsilon=5.0,
            delta=1e-5,
        ),
        "rounds": 9,
    },
    "secure sums": {
        "privacy": ClientPrivacy(
            clip_norm=0.5,
            noise_multiplier=0.8,
            delta=1e-5,
            aggregation=SecureAggregation(colluding=1),
        ),
        "schedule": CyclicCohorts(cohort=5),
    },
    "mp_mtl": {"algorithm": LINEAR["mp_mtl"], **TASKS},
    "private_prior": {"algorithm": LINEAR["private_prior"], "rounds": 1, **TASKS},
}
FEW = ("records", "pmtl", "fedavg, finetuned", "mp_mtl")  # also in groups of three
SWEEP = [
    "data.clients=12",
    "schedule.cohort=4",
    "rounds=2",
    "baselines=null",
    "finetune=none",
    "privacy.epsilon=1,4",
]
SECURE = {
    "privacy": ClientPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5, source="secure")
}
victim: dict[str, int | None] = {"rank": None}


@dataclass(frozen=True, kw_only=True)
class Mortal(PMTL):
    """PMTL whose process of the rank of the victim ends in a round; of the rank -1 all have an error there."""

    def client_update(self, c: Any) -> Any:
        if c.round == 2 and c.problem.ranks.rank == victim["rank"]:
            os._exit(9)
        if c.round == 2 and victim["rank"] == -1:
            raise TrainingError("as if it were killed")
        return super().client_update(c)


DYING = {
    "algorithm": Mortal(lam=0.5, local=SOLVER),
    "folder": True,
    "checkpoint_every": 1,
    "rounds": 5,
}
SAVED = DYING | {"baselines": ["local"]}


def trainer(case: dict[str, Any], folder: Path) -> Trainer:
    options = BASE | case
    return Trainer(**options | {"folder": folder if options.get("folder") else None})


def outcome(run: Trainer, **options: Any) -> dict[str, Any]:
    """What must be the same for any number of processes: bits of models, all numbers, and the lines of the ledger."""
    result = run.fit(**options)
    digest = hashlib.blake2b(result.personal.contiguous().numpy().tobytes(), digest_size=8)
    if result.shared is not None:
        digest.update(result.shared.numpy().tobytes())
    history = [
        {key: value for key, value in row.items() if key != "time"} for row in result.history
    ]
    lines: list[Any] = []
    if run.folder is not None:
        text = (Path(run.folder) / "private" / "ledger.jsonl").read_text().splitlines()
        lines = [
            (line["kind"], line.get("first"), line.get("end")) for line in map(json.loads, text)
        ]
    reported = {
        key: value
        for key, value in result.privacy.to_dict().items()
        if key not in ("run", "ledger_head")
    }
    found = {
        "models": digest.hexdigest(),
        "history": history,
        "ledger": lines,
        "scores": result.by_client,
    }
    found |= {"epsilon": result.epsilon, "stopped": result.stopped, "report": reported}
    found |= {"off grid": [one.off_grid for one in result.released.values()]}
    found |= {"baselines": {name: one.by_client for name, one in result.baselines.items()}}
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of_all(size: int, make: Callable[[Ranks], Any]) -> list[Any]:
    """Return what each rank of a group of processes makes, in their order."""
    with Ranks().forked(size) as ranks:
        return ranks.gather(make(ranks))


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in CASES), *((name, 3) for name in FEW)]
)
def test_any_number_of_processes_gives_the_same_bits(name: str, size: int, tmp_path: Path) -> None:
    alone = outcome(trainer(CASES[name], tmp_path / "one"))
    found = of_all(
        size, lambda ranks: outcome(trainer(CASES[name], tmp_path / "several"), ranks=ranks)
    )
    assert found == [alone] * size


def test_processes_that_a_run_starts_give_the_same_bits(tmp_path: Path) -> None:
    own = outcome(
        trainer(CASES["records"] | {"execution": Execution(processes=2)}, tmp_path / "two")
    )
    assert own == outcome(trainer(CASES["records"], tmp_path / "one"))
    assert not dist.is_initialized()


def test_secure_noise_is_drawn_once(tmp_path: Path) -> None:
    alone = outcome(trainer(SECURE, tmp_path))
    first, *others = of_all(3, lambda ranks: outcome(trainer(SECURE, tmp_path), ranks=ranks))
    assert others == [first] * 2
    assert first["off grid"] == [0]
    assert first["epsilon"] == alone["epsilon"]
    assert first["models"] != alone["models"]


@pytest.mark.parametrize("size", [2, 3])
def test_a_lost_rank_ends_the_run_which_goes_on_in_one_process(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = outcome(trainer(DYING, tmp_path / "whole"))
    monkeypatch.setitem(victim, "rank", size - 1)
    with pytest.raises(
        TrainingError, match=f"Rank 0 of {size} can no longer reach the others.*resume"
    ):
        of_all(size, lambda ranks: trainer(DYING, tmp_path / "run").fit(ranks=ranks))
    monkeypatch.setitem(victim, "rank", None)
    rest = outcome(trainer(DYING, tmp_path / "run"), resume=True)
    assert (rest["models"], rest["epsilon"]) == (whole["models"], whole["epsilon"])


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 3), (3, 1)])
def test_a_saved_run_goes_on_with_another_number_of_processes(
    before: int, now: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = outcome(trainer(SAVED, tmp_path / "whole"))
    monkeypatch.setitem(victim, "rank", -1)
    with pytest.raises(TrainingError, match="as if it were killed"):
        of_all(before, lambda ranks: trainer(SAVED, tmp_path / "run").fit(ranks=ranks))
    monkeypatch.setitem(victim, "rank", None)
    for size in (now, before):  # where it ends, and of the finished run
        for one in of_all(
            size, lambda ranks: outcome(trainer(SAVED, tmp_path / "run"), ranks=ranks, resume=True)
        ):
            for name in ("models", "epsilon", "scores", "baselines", "stopped"):
                assert one[name] == whole[name]


def test_what_one_rank_refuses_all_refuse(tmp_path: Path) -> None:
    trainer(CASES["pmtl"], tmp_path).fit()

    def refused(ranks: Ranks) -> str:
        with pytest.raises(ResumeError) as error:
            trainer(CASES["pmtl"], tmp_path).fit(ranks=ranks)
        return str(error.value)

    for one in of_all(2, refused):
        assert "already holds a run" in one


def test_all_ranks_compute_every_job_of_a_sweep(tmp_path: Path) -> None:
    sweeps = [tmp_path / "one", tmp_path / "two"]
    words = [["-m", *SWEEP, f"hydra.sweep.dir={sweep}"] for sweep in sweeps]
    assert cli.main(words[0]) == 0
    assert (
        of_all(2, lambda _: [cli.main(words[1]), cli.main(["resume", str(sweeps[1])])])
        == [[0, 0]] * 2
    )
    for job in range(2):
        one, two = (
            json.loads((sweep / str(job) / "private" / "result.json").read_text())
            for sweep in sweeps
        )
        assert (one["epsilon"], one["accuracy"]) == (two["epsilon"], two["accuracy"])


def test_a_rank_that_cannot_be_reached_is_said_with_what_to_do() -> None:
    for error in (
        RuntimeError(
            "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29201"
        ),
        RuntimeError(
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3600000ms for recv operation"
        ),
        RuntimeError("[gloo/transport/tcp/pair.cc:454] writev [127.0.0.1]:29201: Broken pipe"),
        dist.DistNetworkError("Failed to recv, got 0 bytes"),
    ):
        with (
            pytest.raises(TrainingError, match=r"Rank 1 of 2 .*reach the others.*resume"),
            Ranks(1, 2)._reached(),
        ):
            raise error
    for error in (
        RuntimeError("[gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 32 vs 24"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ):
        with pytest.raises(type(error)) as caught, Ranks(1, 2)._reached():
            raise error
        assert caught.value is error  # it is this process's own


def test_a_job_that_fails_at_one_rank_alone_ends_its_sweep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, ranks = Job(1, 3, "seed=2", Path()), Ranks(1, 2)
    with pytest.raises(SystemExit) as ended, Process(ranks=ranks).errors(job):
        raise TrainingError("of this rank")
    assert ended.value.code == 1
    assert (
        capsys.readouterr().err
        == "fedmtl: error: [2/3] seed=2: rank 1: TrainingError: of this rank\n"
    )
    of_all = TrainingError("of all ranks")
    of_all.agreed = True  # type: ignore[attr-defined]
    for process, printed in (
        (Process(ranks=ranks), ""),
        (Process(), "fedmtl: error: [2/3] seed=2: of all ranks\n"),
    ):
        with process.errors(job):
            raise of_all
        assert process.codes == [1]
        assert capsys.readouterr().err == printed


def test_the_processes_that_a_run_started_end_with_it(tmp_path: Path) -> None:
    parent = os.fork()
    if parent == 0:
        os.setpgrp()
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 2
        )  # where the other process says that this one is gone
        torch.set_num_threads(1)
        victim["rank"] = 0
        trainer(DYING | {"execution": Execution(processes=2)}, tmp_path / "run").fit()
        os._exit(0)
    _, status = os.waitpid(parent, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    for _ in range(300):
        try:
            os.killpg(parent, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process that the run started is still there")


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


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The copies of this process that a test makes, of which none is left at its end."""
    fork, made = os.fork, list[int]()

    def forked() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(os, "fork", forked)
    yield made
    for child in made:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_a_fork_that_fails_leaves_no_process(
    children: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = os.fork

    def failing() -> int:
        if children:
            raise KeyboardInterrupt
        return fork()

    monkeypatch.setattr(os, "fork", failing)
    with pytest.raises(KeyboardInterrupt), Ranks().forked(3):
        raise AssertionError("the block began")
    assert len(children) == 1


def test_a_copy_that_is_interrupted_as_it_begins_does_not_leave_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork, copies, this = os.fork, list[int](), os.getpid()

    def interrupted() -> int:
        copies.append(fork())
        if copies[0] == 0:
            raise KeyboardInterrupt
        raise OSError("no more processes")

    monkeypatch.setattr(os, "fork", interrupted)
    try:
        with pytest.raises(OSError, match="no more"), Ranks().forked(2):
            raise AssertionError("the block began")
    finally:
        if os.getpid() != this:  # a copy came here
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(copies[0], 0)[1]) == 1


def test_what_cannot_be_pickled_is_an_error_of_all_ranks() -> None:
    def run() -> None:
        with Ranks().forked(3) as ranks:
            with pytest.raises(Exception, match="pickle"):
                ranks.share(lambda: lambda: 5)
            assert ranks.share(lambda: 5) == 5
            ranks.gather((lambda: 5) if ranks.rank == 1 else None)

    with pytest.raises(TrainingError, match="can no longer reach"):
        run()


def test_a_copy_that_never_comes_is_not_waited_for_long(
    children: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = os.fork

    def lost() -> int:
        child = fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return child

    monkeypatch.setattr(os, "fork", lost)
    monkeypatch.setattr(module, "_MEETING", timedelta(seconds=2))
    with pytest.raises(TrainingError, match="can no longer reach the others"), Ranks().forked(2):
        raise AssertionError("the block began")


@pytest.mark.usefixtures("children")
def test_an_error_as_the_processes_part_leaves_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an interruption by the keyboard would be."""
    left = dist.destroy_process_group

    def parting() -> None:
        left()
        raise KeyboardInterrupt

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


def test_a_process_that_fails_behind_the_others_fails_the_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
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
    with pytest.raises(
        ConfigError, match=r"execution.processes is 2, but a run with 4 replicates needs one; leave"
    ):
        trainer(CASES["mp_mtl"] | {"replicates": 4} | two, Path()).fit()
    with pytest.raises(
        ConfigError, match=r"execution.processes is 2, but 3 were started by torchrun"
    ):
        processes(trainer(CASES["mp_mtl"] | two, Path()), SimpleNamespace(ranks=Ranks(0, 3)))
    clocks = {
        "algorithm": PPDMTL(feature_norm=1.0),
        "schedule": PoissonClocks(per_client=3),
        "privacy": None,
    }
    with pytest.raises(
        ConfigError, match=r"A run with pp_dmtl, whose clients act one at a time, needs one process"
    ):
        processes(trainer(CASES["mp_mtl"] | clocks, Path()), SimpleNamespace(ranks=Ranks(0, 2)))
    with pytest.raises(
        ConfigError, match="A run with 4 replicates needs one process, and 3 were started"
    ):
        processes(
            trainer(CASES["mp_mtl"] | {"replicates": 4}, Path()), SimpleNamespace(ranks=Ranks(0, 3))
        )
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
    words: list[str],
    size: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"fedmtl: error: {said}")


def test_a_process_says_whom_it_waits_for_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
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
    owner = Ranks(1, 3).assigned(work)
    loads = [int(work[owner == rank].sum()) for rank in range(3)]
    assert sum(loads) == int(work.sum())
    assert max(loads) - min(loads) <= 60
    assert torch.bincount(owner).tolist() in ([4, 4, 3], [3, 4, 4], [4, 3, 4])
    assert torch.equal(owner, Ranks(2, 3).assigned(work))
