"""Runs over several processes: ``python -m tests.trainer.ranked FOLDER 2 3`` starts groups of two and of three.

The processes find one another by RANK, WORLD_SIZE and MASTER_PORT, as under torchrun. What every rank found is in
``FOLDER/SIZE-RANK.json``.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fedmtl import (
    PMTL,
    ClientPrivacy,
    Execution,
    Finetune,
    FullParticipation,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    Trainer,
    cli,
    models,
)
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import FedmtlError, TrainingError
from fedmtl.ranks import Ranks
from fedmtl.trainer import plots
from tests.helpers import ragged_classification
from tests.methods import LINEAR, NETWORKS, SOLVER

PRIVACY = ClientPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5)
BASE: dict[str, Any] = {
    "algorithm": NETWORKS["pmtl"],
    "model": models.mlp(hidden=5),
    "schedule": PoissonSampling(cohort=5),
    "privacy": PRIVACY,
    "rounds": 3,
    "progress": False,
}
TASKS = {"model": models.linear_regression(bias=True), "schedule": FullParticipation(), "data": "tasks"}
RECORDS = {"privacy": RecordPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5)}
CASES: dict[str, dict[str, Any]] = {
    "records": {"folder": True, **RECORDS},
    "records, one by one": {"algorithm": NETWORKS["ditto"], "execution": Execution(chunk=1), **RECORDS},
    "pmtl": {"folder": True, "eval_every": 1},
    "pmtl, running mean": {"algorithm": NETWORKS["pmtl, running mean"], "metrics": ["f1"]},
    "fedavg, no privacy": {"algorithm": NETWORKS["fedavg"], "privacy": None, "baselines": ["local"]},
    "fedavg, finetuned": {"algorithm": NETWORKS["fedavg"], "finetune": Finetune(validation=0.3)},
    "ditto, everybody": {"algorithm": NETWORKS["ditto"], "schedule": FullParticipation()},
    **{name: {"algorithm": NETWORKS[name]} for name in ("fedrep", "ifca", "mp_mtl_layers")},
    "saved every round": {"folder": True, "checkpoint_every": 1},
    "adaptive": {
        "privacy": ClientPrivacy(
            clip_norm=QuantileClip(0.5, count_noise=3.0), noise_multiplier=1.5, epsilon=5.0, delta=1e-5
        ),
        "rounds": 9,
    },
    "mp_mtl": {"algorithm": LINEAR["mp_mtl"], **TASKS},
    "private_prior": {"algorithm": LINEAR["private_prior"], "rounds": 1, **TASKS},
}
FEW = ("records", "pmtl", "fedavg, finetuned", "mp_mtl")  # also in groups of three
SWEEP = ["data.clients=12", "schedule.cohort=4", "rounds=2", "baselines=null", "finetune=none", "privacy.epsilon=1,4,9"]
SECURE = {"privacy": ClientPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5, source="secure")}


@dataclass(frozen=True, kw_only=True)
class Mortal(PMTL):
    """PMTL whose process of rank :data:`VICTIM` ends in a round; or all processes have an error there, or one has."""

    def client(self, c: Any) -> Any:
        if c.round == 2 and c.problem.ranks.rank == VICTIM:
            os._exit(9)
        if c.round == 2 and VICTIM == -1:
            raise TrainingError("as if it were killed")
        return super().client(c)


VICTIM: int | None = None
DYING = {"algorithm": Mortal(lam=0.5, local=SOLVER), "folder": True, "checkpoint_every": 1, "rounds": 5}
SAVED = DYING | {"baselines": ["local"]}


def trainer(case: dict[str, Any], folder: Path) -> Trainer:
    options = BASE | case
    tasks = options.pop("data", None) == "tasks"
    data = load_synthetic_tasks(
        tasks=6, train_examples=9, test_examples=4, features=5, problem="classification", seed=2
    )
    options["data"] = data if tasks else ragged_classification(11)
    if options.pop("folder", False):
        options["folder"] = folder
    return Trainer(**options)


def outcome(run: Trainer, **options: Any) -> dict[str, Any]:
    """What must be the same for any number of processes: bits of models, all numbers, and the lines of the ledger."""
    result = run.fit(**options)
    digest = hashlib.blake2b(result.personal.contiguous().numpy().tobytes(), digest_size=8)
    if result.shared is not None:
        digest.update(result.shared.numpy().tobytes())
    history = [{key: value for key, value in row.items() if key != "time"} for row in result.history]
    lines: list[Any] = []
    if run.folder is not None:
        text = (Path(run.folder) / "private" / "ledger.jsonl").read_text().splitlines()
        lines = [(line["kind"], line.get("first"), line.get("end")) for line in map(json.loads, text)]
    reported = {key: value for key, value in result.privacy.to_dict().items() if key not in ("run", "ledger_head")}
    found = {"models": digest.hexdigest(), "history": history, "ledger": lines, "scores": result.by_client}
    found |= {"epsilon": result.epsilon, "stopped": result.stopped, "report": reported}
    found |= {"off grid": [one.off_grid for one in result.released.values()]}
    found |= {"baselines": {name: one.by_client for name, one in result.baselines.items()}}
    return json.loads(json.dumps(found))


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except FedmtlError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def start(sizes: tuple[int, ...], folder: Path) -> list[list[dict[str, Any]]]:
    """Run groups of processes, all at the same time; return what the ranks of each group found."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    own = os.environ | single | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.trainer.ranked", str(folder), *map(str, sizes)]
    with subprocess.Popen(command, env=own, cwd=Path(__file__).parents[2], start_new_session=True) as process:
        try:
            process.wait(timeout=240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [[json.loads((folder / f"{n}-{rank}.json").read_text()) for rank in range(n)] for n in sizes]


def fork(folder: Path, size: int) -> None:
    """Start the processes of one group, which have imported everything by then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(size):
        if os.fork():
            continue
        place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()})
        try:
            main(folder)
        except BaseException:
            traceback.print_exc()
        os._exit(0)


def main(folder: Path) -> None:
    """Make every run in a group of two, and in a larger group the few whose sums differ in kind."""
    global VICTIM
    torch.set_num_threads(1)
    plots.plot_result = lambda *of: None
    os.fsync = lambda file: None
    ranks = Ranks.of_launch()
    own = folder / str(ranks.size)

    def write(found: dict[str, Any]) -> None:
        (folder / f"{ranks.size}-{ranks.rank}.json").write_text(json.dumps(found))

    found: dict[str, Any] = {"operations": operations(ranks)}
    for number, (name, case) in enumerate(CASES.items()):
        if ranks.size == 2 or name in FEW:
            found[name] = outcome(trainer(case, own / str(number)), ranks=ranks)
    found["secure"] = outcome(trainer(SECURE, own), ranks=ranks)
    found["begun alone"] = outcome(trainer(DYING, own / "begun alone"), ranks=ranks, resume=True)
    found["sweep"] = cli.main(["-m", *SWEEP, f"hydra.sweep.dir={own / 'sweep'}"])
    found["sweep, resumed"] = cli.main(["resume", str(own / "sweep")])
    found |= saved(own / "saved", ranks)
    found["taken"] = error_of(lambda: trainer(CASES["pmtl"], own / str(list(CASES).index("pmtl"))).fit(ranks=ranks))
    write(found)
    VICTIM = -1
    found["saved, ended"] = error_of(lambda: trainer(SAVED, own / "saved, ended").fit(ranks=ranks))
    VICTIM = ranks.size - 1
    found["killed"] = error_of(lambda: trainer(DYING, own / "killed").fit(ranks=ranks))
    write(found)


def saved(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Runs with tensors that clients keep, which one process and all but the last ranks began."""
    global VICTIM
    few, found = dist.new_group(range(ranks.size - 1), backend="gloo"), {}
    if ranks.rank < ranks.size - 1:
        VICTIM = -1
        part = Ranks(ranks.rank, ranks.size - 1, few if ranks.size > 2 else None)
        found["saved, begun by fewer"] = error_of(lambda: trainer(SAVED, folder).fit(ranks=part))
        VICTIM = None
    ranks.gather(None)
    return found | {"saved, resumed": outcome(trainer(SAVED, folder), ranks=ranks, resume=True)}


def operations(ranks: Ranks) -> dict[str, Any]:
    """Every operation of :class:`Ranks`, on small values."""

    def fail() -> None:
        raise ValueError("of the first")

    def disagree() -> None:
        with ranks.agree():
            if ranks.rank == 1:
                raise TrainingError("of the second")

    def share_error() -> str:
        try:
            ranks.share(fail)
        except ValueError as error:
            return str(error)
        return ""

    mine = torch.arange(ranks.rank, 7, ranks.size)
    rows = torch.stack([mine.float(), -mine.float()], 1)
    return {
        "sum": ranks.sum(torch.full((3,), 2.0**-40 * (ranks.rank + 1), dtype=torch.float64)).tolist(),
        "shared": ranks.share(lambda: ("rank", ranks.rank)),
        "tensor": ranks.share(lambda: torch.arange(5000) + ranks.rank).sum().item(),
        "gathered": ranks.gather(ranks.rank),
        "joined": ranks.join(rows, mine, 7).tolist(),
        "bools": ranks.join(mine % 2 == 0, mine, 7).tolist(),
        "error of the first": share_error(),
        "error of another": error_of(disagree),
    }


if __name__ == "__main__":
    for size in sys.argv[2:]:
        fork(Path(sys.argv[1]), int(size))
    with suppress(ChildProcessError):
        while True:
            os.wait()
