"""A process killed at any moment resumes to the same bits, and the ledger never goes back."""

import csv
import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedmtl.trainer.folder import Checkpoint

from .killed import CASES, EVERY, POINTED, POINTS, ROUNDS, run
from .ledgers import charges, participations, read_lines
from .settings import COHORT, epsilon

KILLS = 3  # of each case
NO_LEDGER = ("pmtl-plain", "local")
BY_PARTICIPATION = ("pmtl-fixed", "pmtl-records")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """case -> (folder, seconds) of a run that nobody disturbed."""
    done: dict[str, tuple[Path, float]] = {}

    def get(case: str) -> tuple[Path, float]:
        if case not in done:
            folder = tmp_path_factory.mktemp("reference") / case
            killed, seconds = run(case, folder)
            assert not killed
            done[case] = folder, seconds
        return done[case]

    return get


def contents(folder: Path) -> dict[str, object]:
    """Everything in a finished run folder but times, and the random identity and the sessions of the ledger."""
    found: dict[str, object] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.name == "checkpoint.safetensors":
            saved = Checkpoint.read(path)
            found[name + " history"] = [{k: repr(v) for k, v in row.items() if k != "time"} for row in saved.history]
            found[name + " done"] = saved.step, saved.tally
            found |= {f"{name} {key}": bits(value) for key, value in load_file(path).items()}
        elif path.name == "metrics.csv":
            with open(path, newline="") as table:
                found[name] = [{k: v for k, v in row.items() if k != "time"} for row in csv.DictReader(table)]
        elif path.name == "ledger.jsonl":
            header = {k: v for k, v in read_lines(path)[0].items() if k != "run"}
            found[name] = (header, charges(path), participations(path))
        elif path.name in ("privacy.json", "result.json", "outcome.json"):
            found[name] = anonymous(json.loads(path.read_text()))
        elif path.suffix != ".head" and path.name != "manifest.json":  # both follow the identity of the run
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def anonymous(value: object) -> object:
    """Without what is random in every run."""
    if isinstance(value, dict):
        return {k: anonymous(v) for k, v in value.items() if k not in ("run", "ledger_lines", "ledger_head", "time")}
    return [anonymous(item) for item in value] if isinstance(value, list) else value


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()


def assert_same(folder: Path, expected: Path) -> None:
    found, wanted = contents(folder), contents(expected)
    assert [k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k)] == []


def result(folder: Path) -> dict:
    return json.loads((folder / "private/result.json").read_text())


def ledger(folder: Path) -> Path:
    return folder / "private/ledger.jsonl"


def checkpointed(folder: Path) -> int:
    """Rounds in the checkpoint; it must be readable after every kill."""
    path = folder / "private/checkpoint.safetensors"
    return Checkpoint.read(path).step if path.exists() else 0


def model_rows(folder: Path) -> tuple[int, int]:
    """How many rows of clients' models the checkpoint names, and how many bytes their files have."""
    named = Checkpoint.read(folder / "private/checkpoint.safetensors").clients
    sizes = [path.stat().st_size for path in (folder / "private/clients").iterdir()]
    return sum(named.values()), sum(sizes)


class Watch:
    """What the ledger said after each kill."""

    def __init__(self, case: str, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.before: set[int] = set()

    def look(self) -> None:
        now = set(charges(ledger(self.folder)))
        assert self.before <= now, "a charge has gone"
        if self.case in NO_LEDGER:
            assert not ledger(self.folder).exists()
        else:
            assert set(range(checkpointed(self.folder))) <= now, "the checkpoint holds a release without a charge"
        self.before = now


@pytest.mark.parametrize("case", CASES)
def test_random_times(case, reference, tmp_path):
    expected, seconds = reference(case)
    clock = random.Random(f"times of {case}")
    kills, chains = 0, 0
    while kills < KILLS:
        folder = tmp_path / str(chains)
        watch, killed = Watch(case, folder), True
        while killed:
            delay = clock.uniform(0, 0.4 * seconds) if kills < KILLS else None
            killed, _ = run(case, folder, resume=True, delay=delay)
            kills += killed
            watch.look()
        assert_same(folder, expected)
        chains += 1
    assert charged_uses(case, folder) == (0 if case in NO_LEDGER else ROUNDS)


def charged_uses(case: str, folder: Path) -> int:
    once = charges(ledger(folder))
    assert set(once.values()) <= {1}
    if case == "pmtl-fixed":
        assert participations(ledger(folder)).total() == ROUNDS * COHORT
    return once.total()


@pytest.mark.parametrize("case", POINTED)
def test_exact_points(case, reference, tmp_path):
    """Between reserve, release, update and checkpoint, and within the writing of clients' rows and of a checkpoint."""
    expected, _ = reference(case)
    folder = tmp_path / "run"
    watch, step = Watch(case, folder), 4
    for point in POINTS:
        killed, _ = run(case, folder, resume=True, point=point, step=step)
        assert killed, f"{point} was never reached"
        watch.look()
        assert step in watch.before, "the noise was drawn before its charge was on the disk"
        done = checkpointed(folder)
        if point in ("begun", "released", "stepped"):
            assert done == step // EVERY * EVERY
        elif point == "renamed":
            assert step < done <= step + EVERY
        else:
            assert done <= step, "an unfinished checkpoint has replaced the old one"
        if point == "appending":
            rows, size = model_rows(folder)
            all_rows, all_bytes = model_rows(expected)
            assert size > rows * all_bytes // all_rows, "no row is behind those that the checkpoint names"
        elif point in ("writing", "written"):
            assert (folder / "private/checkpoint.safetensors.tmp").exists()
        step += 4
    assert not run(case, folder, resume=True)[0]
    assert_same(folder, expected)
    assert charged_uses(case, folder) == ROUNDS


def test_comparison_sees_a_different_run(reference, tmp_path):
    expected, _ = reference("pmtl-global")
    for name, settings in {
        "seed": {"seed": 1},
        "rounds": {"rounds": ROUNDS - 1},
        "evaluated": {"eval_every": 15},
    }.items():
        run("pmtl-global", tmp_path / name, **settings)
        with pytest.raises(AssertionError):
            assert_same(tmp_path / name, expected)


def test_finished_run_resumed_and_killed_keeps_its_files(reference, tmp_path):
    expected, seconds = reference("pmtl-global")
    folder = tmp_path / "run"
    run("pmtl-global", folder)
    clock = random.Random("finished")
    names = ("clients.csv", "models.safetensors")
    for _ in range(KILLS):
        run("pmtl-global", folder, resume=True, delay=clock.uniform(0, 0.4 * seconds))
        for name in names:
            assert (folder / "private" / name).read_bytes() == (expected / "private" / name).read_bytes()
        if (folder / "private" / "result.json").exists():  # else the mark of a finished run is to be written again
            assert anonymous(result(folder)) == anonymous(result(expected))
    assert not run("pmtl-global", folder, resume=True)[0]
    assert_same(folder, expected)


# Secure mode: noise is fresh in every process, so a replay is a new release.


def budget_of(uses: int) -> float:
    """A budget that ``uses`` steps fit and one more does not."""
    return (epsilon(uses) + epsilon(uses + 1)) / 2


def test_secure_replays_are_charged_again(tmp_path):
    folder = tmp_path / "run"
    assert run("fedavg", folder, privacy={"source": "secure"}, point="stepped", step=10)[0]
    lost = charges(ledger(folder))
    assert lost == dict.fromkeys(range(lost.total()), 1)
    assert lost.total() > 10
    assert not run("fedavg", folder, privacy={"source": "secure"}, resume=True)[0]
    twice = range(9, lost.total())  # the checkpoint holds 9 rounds
    assert charges(ledger(folder)) == {step: 1 + (step in twice) for step in range(ROUNDS)}
    assert result(folder)["releases"] == ROUNDS + len(twice)
    assert result(folder)["epsilon"] == pytest.approx(epsilon(ROUNDS + len(twice)), rel=1e-3)


def test_secure_budget_pays_for_a_crash(tmp_path):
    folder = tmp_path / "run"
    privacy = {"source": "secure", "epsilon": budget_of(ROUNDS)}
    assert run("pmtl-global", folder, privacy=privacy, point="stepped", step=10)[0]
    lost = charges(ledger(folder)).total()
    assert not run("pmtl-global", folder, privacy=privacy, resume=True)[0]
    found = result(folder)
    assert found["stopped"] == "budget"
    assert found["rounds"] == 9 + ROUNDS - lost  # 9 rounds are kept
    assert charges(ledger(folder)).total() == ROUNDS
    assert found["epsilon"] == pytest.approx(epsilon(ROUNDS), rel=1e-3)
    assert found["epsilon"] <= privacy["epsilon"]


@pytest.mark.parametrize("case", ["pmtl-local", "pmtl-records"])
def test_secure_random_times(case, reference, tmp_path):
    _, seconds = reference(case)
    clock = random.Random(f"secure {case}")
    capacity = ROUNDS + 20
    privacy = {"source": "secure", "epsilon": 1e3 if case in BY_PARTICIPATION else budget_of(capacity)}
    kills, chains = 0, 0
    while kills < KILLS:
        folder, before, killed = tmp_path / str(chains), 0, True
        while killed:
            delay = clock.uniform(0, 0.4 * seconds) if kills < KILLS else None
            killed, _ = run(case, folder, privacy=privacy, resume=True, delay=delay)
            spent = charges(ledger(folder)).total()
            assert spent >= before, "spend has gone back"
            assert spent >= checkpointed(folder)
            before, kills = spent, kills + killed
        chains += 1
        found = result(folder)
        assert found["epsilon"] <= privacy["epsilon"]
        if case in BY_PARTICIPATION:  # charged by participation: the cap of one client may end the run
            continue
        assert spent <= capacity
        assert (found["stopped"], found["rounds"]) == ("rounds", ROUNDS) or (
            found["stopped"] == "budget" and found["rounds"] < ROUNDS and spent == capacity
        )
        assert found["epsilon"] == pytest.approx(epsilon(spent), rel=1e-3)
