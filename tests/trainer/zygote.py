"""Cheap processes to kill: one process imports everything once, and forks a child for every run.

``Zygote`` is what a test holds; ``python -m tests.trainer.zygote`` is the process behind it. A request is one
JSON line: the case, the folder, settings that differ from the case, and how the child shall die: after
``delay`` seconds, by its parent, or at a ``point`` of the first round from ``step`` on, by its own hand. Both
are SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROUNDS = 40
EVERY = 3  # rounds between checkpoints
CLIENTS, COHORT, NOISE, CLIP, DELTA = 12, 4, 1.5, 0.7, 1e-5
CASES = (
    "pmtl-global",
    "pmtl-local",
    "pmtl-fixed",
    "pmtl-plain",
    "pmtl-adaptive",
    "pmtl-records",
    "fedavg",
    "fedavg-adam",
    "local",
)
POINTED = ("pmtl-global", "pmtl-records")  # whose folders hold different files and charges
POINTS = ("begun", "released", "stepped", "appending", "writing", "written", "renamed")


@dataclass
class Zygote:
    """The parent of the children, started by :meth:`start`."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls) -> Zygote:
        single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | single | {"MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": ""},
        )
        return cls(process)

    def run(self, case: str, folder: Path, **request: Any) -> tuple[bool, float]:
        """Run or resume in ``folder``: (whether the child was killed, its seconds); raises what it raised.

        Args:
            case: one of CASES.
            folder: of the run.
            request: ``resume``, ``settings`` (of the trainer), ``privacy`` (of its privacy), ``delay``,
                ``point`` and ``step``.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"case": case, "folder": str(folder), **request}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if answer["error"]:
            raise AssertionError(f"the run failed with status {answer['status']}:\n{answer['error']}")
        return answer["status"] == -signal.SIGKILL, answer["seconds"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def trainer_of(request: dict[str, Any]) -> Any:
    """The trainer of a request; ``settings`` and ``privacy`` of the request override."""
    from fedmtl import (
        PMTL,
        ClientPrivacy,
        FedAvg,
        FixedCohort,
        Local,
        LocalSGD,
        PoissonSampling,
        QuantileClip,
        RecordPrivacy,
        ServerOptimizer,
        Trainer,
        models,
    )
    from tests.helpers import ragged_classification

    case, solver = request["case"], LocalSGD(lr=0.2, steps=2, batch_size=4, momentum=0.5)
    algorithms = {
        "pmtl-local": PMTL(lam=0.5, local=solver, delta="local"),
        "fedavg": FedAvg(local=solver),
        "fedavg-adam": FedAvg(local=solver, server_optimizer=ServerOptimizer(optimizer_name="Adam", lr=0.05)),
        "local": Local(local=solver),
    }
    clip = QuantileClip(initial=CLIP, lr=0.3, count_noise=1.2) if case == "pmtl-adaptive" else CLIP
    unit = RecordPrivacy if case == "pmtl-records" else ClientPrivacy
    privacy = unit(**{"clip_norm": clip, "noise_multiplier": NOISE, "delta": DELTA} | request["privacy"])
    settings = {
        "algorithm": algorithms.get(case, PMTL(lam=0.5, local=solver)),
        "data": ragged_classification(CLIENTS),
        "model": models.mlp(hidden=4, dropout=0.25),
        "schedule": FixedCohort(cohort=COHORT) if case == "pmtl-fixed" else PoissonSampling(cohort=COHORT),
        "privacy": None if case == "pmtl-plain" else privacy,
        "rounds": ROUNDS,
        "folder": request["folder"],
        "baselines": ("local",) if case == "pmtl-global" else (),
        "eval_every": 16,
        "checkpoint_every": EVERY,
        "progress": False,
    }
    return Trainer(**settings | request["settings"])


def arm(point: str, step: int) -> Any:
    """Make this process die at a point of the first round from ``step`` on; returns a callback."""
    from fedmtl import _files
    from fedmtl.privacy import Rounds
    from fedmtl.trainer import Callback
    from tests.trainer.half import Half

    current = -1

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Count(Callback):
        def on_event(self, event: Any, state: Any) -> None:
            nonlocal current
            current = event.step
            if point == "stepped" and current >= step:
                die()

    begin, release = Rounds.begin, Rounds.release

    def begin_and_die(self: Rounds, at: int, ranks: Any) -> None:
        begin(self, at, ranks)
        if at >= step:
            die()

    def release_and_die(self: Rounds, *args: Any) -> Any:
        value = release(self, *args)
        if current + 1 >= step:
            die()
        return value

    def open_half(path: Path, mode: str) -> Any:
        file = open(path, mode)  # noqa: SIM115 - closed by its user
        here = path.parent.name == "clients" if point == "appending" else path.name.startswith("checkpoint")
        return Half(file, die) if current >= step and here else file

    replace = os.replace

    def replace_and_die(source: Any, target: Any) -> None:
        here = current >= step and Path(target).name == "checkpoint.safetensors"
        if point == "written" and here:
            die()
        replace(source, target)
        if here:
            die()

    if point == "begun":
        Rounds.begin = begin_and_die  # type: ignore[method-assign]
    elif point == "released":
        Rounds.release = release_and_die  # type: ignore[method-assign]
    elif point in ("appending", "writing"):
        _files.open = open_half  # type: ignore[attr-defined]
    elif point in ("written", "renamed"):
        os.replace = replace_and_die
    return Count()


def child(request: dict[str, Any], errors: Path) -> None:
    """Run, and leave with status 0; with status 1 after any error, which is written to ``errors``."""
    try:
        if request.get("point"):
            request["settings"]["callbacks"] = (arm(request["point"], request["step"]),)
        trainer_of(request).fit(resume=request.get("resume", False))
        os._exit(0)
    except BaseException:
        errors.write_text(traceback.format_exc())
        os._exit(1)


def serve() -> None:
    """Answer requests until standard input ends."""
    import torch

    torch.set_num_threads(1)
    warm_up()
    for line in sys.stdin:
        request = {"settings": {}, "privacy": {}} | json.loads(line)
        errors = Path(request["folder"]).with_name("error.txt")
        errors.unlink(missing_ok=True)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            child(request, errors)
        if request.get("delay") is not None:
            while time.monotonic() - began < request["delay"] and (done := os.waitpid(pid, os.WNOHANG)) == (
                0,
                0,
            ):
                time.sleep(0.001)
            else:
                done = os.waitpid(pid, os.WNOHANG) if time.monotonic() - began >= request["delay"] else done
            if done == (0, 0):
                os.kill(pid, signal.SIGKILL)  # ours, and not reaped yet: the id cannot be another's
                done = os.waitpid(pid, 0)
        else:
            done = os.waitpid(pid, 0)
        status = os.waitstatus_to_exitcode(done[1])
        error = errors.read_text() if errors.exists() else ""
        if status not in (0, -signal.SIGKILL):
            error = error or "the child died"
        answer = {"status": status, "seconds": time.monotonic() - began, "error": error}
        print(json.dumps(answer), flush=True)


def warm_up() -> None:
    """Import what a run imports, draw figures as one line of text, and remember the epsilons of the plan."""
    import_module("torch._dynamo")  # which torch imports on first use, in seconds
    import pytest

    from fedmtl import ClientPrivacy, PoissonSampling
    from fedmtl.privacy import ReleasePlan, open_channel
    from tests.conftest import quick_figures

    quick_figures(pytest.MonkeyPatch())
    trainer_of({"case": "pmtl-fixed", "folder": None, "settings": {}, "privacy": {}})
    channel = open_channel(
        ClientPrivacy(clip_norm=CLIP, noise_multiplier=NOISE, delta=DELTA),
        (ReleasePlan(name="update", dimension=5, uses=ROUNDS),),
        PoissonSampling(cohort=COHORT).bind(CLIENTS),
        seed=0,
        steps=ROUNDS,
    )
    for uses in (16, 32, ROUNDS):
        channel.epsilon_at(uses)
    channel.close()


if __name__ == "__main__":
    serve()
