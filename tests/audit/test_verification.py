"""``fedmtl verify``: good runs of every method fit, and each alteration fails with the line that is meant for it."""

import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedmtl import (
    PMTL,
    ClientPrivacy,
    CyclicCohorts,
    EarlyStopping,
    FedAvg,
    FedSGD,
    Finetune,
    FixedCohort,
    FullParticipation,
    PeerAveraging,
    PoissonClocks,
    QuantileClip,
    RecordPrivacy,
    SecureAggregation,
    models,
)
from fedmtl.audit.verification import CONFIRMED, FAILED, OPEN, Verification, verify
from fedmtl.cli.build import build
from fedmtl.cli.config import compose, resolve
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import DataError
from fedmtl.graphs import Ring
from fedmtl.trainer import Callback
from fedmtl.trainer.folder import RunFolder

from ..golden.transcripts import RUNS
from ..privacy.test_ledger import chained
from ..small import Ended, Ends
from ..trainer.settings import COHORT, DELTA, NOISE, SOLVER, epsilon, trainer
from ..trainer.test_folder import interrupted


def run(folder: Path, *, resume: bool = False, **settings: Any) -> Path:
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source="secure")
    trainer(
        folder=folder, **{"algorithm": FedAvg(local=SOLVER), "privacy": privacy} | settings
    ).fit(resume=resume)
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("good") / "run")


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "run")
    return tmp_path / "run"


def verdicts(found: Verification) -> dict[str, str]:
    return {check.name: check.verdict for check in found.checks}


def failed(folder: Path) -> dict[str, str]:
    """What failed, by line."""
    return {check.name: check.detail for check in verify(folder).checks if check.verdict == FAILED}


# Good runs


def test_everything_is_confirmed_of_a_good_run(good: Path) -> None:
    found = verify(good)
    names = [
        "files: public",
        "files: private",
        "chain",
        "head",
        "checkpoint",
        "settings",
        "fields",
        "charges",
    ]
    assert verdicts(found) == dict.fromkeys(
        [*names, "epsilon", "headline", "report", "grid", "model"], CONFIRMED
    )
    assert found.fits
    assert found.epsilon == pytest.approx(epsilon(6), rel=1e-3)
    told = next(check.detail for check in found.checks if check.name == "epsilon")
    assert float(told.split()[0]) == pytest.approx(found.epsilon, rel=1e-3)


SECURE = (  # seeded ones: tests/golden
    *(
        "fedavg, secure sums",
        "pmtl, running mean, fixed cohorts",
        "pmtl, adaptive clip",
        "fedprox, records",
        "mp_mtl",
    ),
    *("pp_dmtl, subsamples, L2,1 norm", "async_learner", "p2p"),
)


@pytest.mark.parametrize("name", SECURE)
def test_secure_runs_of_every_method_fit(name: str, tmp_path: Path) -> None:
    words = (
        *RUNS[name].split(),
        "dtype=float64",
        "baselines=[]",
        "progress=false",
        "privacy.source=secure",
    )
    build(resolve(compose(words)), tmp_path / "run").fit()
    assert failed(tmp_path / "run") == {}
    said = verdicts(verify(tmp_path / "run"))
    assert said["chain"] == said["head"] == said["charges"] == said["grid"] == CONFIRMED
    assert said["epsilon"] in (CONFIRMED, OPEN)


def test_runs_that_were_interrupted_or_stopped_early_fit(tmp_path: Path) -> None:
    interrupted(tmp_path / "crashed", after=5)
    interrupted(tmp_path / "crashed", resume=True)
    assert failed(tmp_path / "crashed") == {}
    records = RecordPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source="secure")
    for place, settings in enumerate(
        ({}, {"schedule": FixedCohort(cohort=COHORT)}, {"privacy": records})
    ):
        stopping = EarlyStopping(patience=1, min_delta=1e6)
        folder = run(
            tmp_path / f"stopped-{place}", early_stopping=stopping, eval_every=1, **settings
        )
        assert json.loads((folder / "private/result.json").read_text())["stopped"] == "early"
        assert failed(folder) == {}


def test_a_crash_under_full_participation_uses_up_the_last_rounds(tmp_path: Path) -> None:
    """Rounds that were charged twice leave no charge for the last ones, in which nobody takes part."""
    folder = tmp_path / "run"
    settings = {
        "privacy": RecordPrivacy(clip_norm=0.7, epsilon=4.0, delta=DELTA, source="secure"),
        "schedule": FullParticipation(),
        "rounds": 8,
        "checkpoint_every": 4,
    }
    with pytest.raises(Ended):
        run(folder, **settings, callbacks=(Ends(5),))
    trainer(folder=folder, algorithm=FedAvg(local=SOLVER), **settings).fit(resume=True)
    assert [
        line["cohorts"] for line in map(json.loads, ledger(folder)) if line.get("first") in (6, 7)
    ] == [[[]], [[]]]
    assert failed(folder) == {}
    # steps 4 and 5 were lost by the crash
    assert "8 steps, in order, in 10 charges: lost ones were charged anew" in str(verify(folder))

    def without_one(
        lines: list[dict],
    ) -> list[dict]:  # a client that could still take part is not charged
        return [
            line | {"cohorts": [line["cohorts"][0][1:]]} if line.get("first") == 2 else line
            for line in lines
        ]

    rewrite(folder, without_one)
    assert "step 2 has a cohort that Full does not draw" in failed(folder)["charges"]


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_an_interrupted_run_whose_agents_are_silent_past_their_caps_fits(
    source: str, tmp_path: Path
) -> None:
    """Activations of agents at their caps are charged to nobody."""
    settings = {
        "algorithm": PeerAveraging(feature_norm=1.0, graph=Ring()),
        "data": load_synthetic_tasks(tasks=4, train_examples=5, test_examples=3, features=3),
        "model": models.linear_regression(bias=False),
        "loss": "auto",
        "schedule": PoissonClocks(per_client=6),
        "privacy": RecordPrivacy(clip_norm=1.0, epsilon=3.0, delta=1e-3, source=source),  # type: ignore[arg-type]
        "rounds": 24,
        "checkpoint_every": 4,
    }
    with pytest.raises(Ended):
        run(tmp_path / "run", **settings, callbacks=(Ends(7),))
    trainer(folder=tmp_path / "run", **settings).fit(resume=True)
    lines = [json.loads(line) for line in ledger(tmp_path / "run")]
    assert not all(who for line in lines for who in line.get("cohorts", ()))
    assert failed(tmp_path / "run") == {}


def test_the_public_part_alone(copy: Path) -> None:
    """The last words say that epsilon was not computed."""
    shutil.rmtree(copy / "private")
    found = verify(copy)
    said = verdicts(found)
    assert said["files: public"] == said["headline"] == said["grid"] == CONFIRMED
    assert said["files: private"] == said["chain"] == said["epsilon"] == said["model"] == OPEN
    assert found.seal in found.text()
    assert found.fits
    assert (
        "Not checked: files: private, chain, fields, epsilon, report, model. Not confirmed: eps"
        in found.conclusion()
    )


# Altered runs


def ledger(folder: Path) -> list[bytes]:
    return (folder / "private/ledger.jsonl").read_bytes().splitlines(keepends=True)


def write(folder: Path, lines: list[bytes]) -> None:
    (folder / "private/ledger.jsonl").write_bytes(b"".join(lines))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2))


def both(folder: Path, **values: Any) -> None:
    """Change the report in both files that have it."""
    for name in ("public/privacy.json", "private/result.json"):
        change(folder / name, **values)


def rewrite(folder: Path, edit: Callable[[list[dict]], list[dict]] = lambda lines: lines) -> None:
    """All that somebody can do who holds the folder: a new chain, head, report and lists of files."""
    made = chained(
        [json.dumps(line).encode() for line in edit([json.loads(line) for line in ledger(folder)])]
    )
    write(folder, made)
    run_id, head = (hashlib.sha256(line).hexdigest() for line in (made[0], made[-1]))
    both(folder, run=run_id, ledger_lines=len(made), ledger_head=head)
    lists(folder)


def lists(folder: Path) -> None:
    """Write the lists of files anew."""
    for part in ("private", "public"):
        place = folder / part / "manifest.json"
        found = json.loads(place.read_text())
        found["files"] = {
            name: hashlib.sha256((folder / part / name).read_bytes()).hexdigest()
            for name in found["files"]
            if (folder / part / name).is_file()
        }
        found["run"] = json.loads((folder / "public/privacy.json").read_text())["run"]
        if part == "public":
            found["private"] = hashlib.sha256(
                (folder / "private/manifest.json").read_bytes()
            ).hexdigest()
        place.write_text(json.dumps(found))


def flipped(folder: Path) -> None:
    """The same numbers in other places."""
    place = folder / "public/model.safetensors"
    save_file(
        {name: tensor.flip(0).contiguous() for name, tensor in load_file(place).items()}, place
    )


def with_releases(folder: Path, value: Callable[[torch.Tensor], torch.Tensor], **grid: Any) -> None:
    place = folder / "public/releases.safetensors"
    with safe_open(place, framework="pt") as file:
        grids, values = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    grids = {name: json.dumps(json.loads(text) | grid) for name, text in grids.items()}
    save_file({name: value(one) for name, one in values.items()}, place, grids)


def shifted(value: torch.Tensor) -> torch.Tensor:
    value[3] += 1e-12
    return value


def with_rounds(folder: Path, rounds: int) -> None:
    """A result of fewer rounds than the checkpoint has."""
    change(folder / "private/result.json", rounds=rounds)


def without_unit(folder: Path) -> None:
    """What a certificate leaves unsaid could be read as something else."""
    path = folder / "public/privacy.json"
    path.write_text(
        json.dumps({key: one for key, one in json.loads(path.read_text()).items() if key != "unit"})
    )


def without_ledger(folder: Path) -> None:
    both(folder, run=None, ledger_lines=None, ledger_head=None)
    (folder / "private/ledger.jsonl").unlink()


def budget_below_epsilon(run: Path) -> None:
    """By a hundred-thousandth."""
    stated = json.loads((run / "public/privacy.json").read_text())
    both(run, budget=stated["epsilon"] * (1 - 1e-5))


FILES: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "no ledger": ("chain", "there is no ledger", without_ledger),
    "sampler": (
        "settings",
        "sampler is",
        lambda run: both(run, sampler="Poisson, expected cohort 1 of 2000 clients"),
    ),
    "observer": ("settings", "observer is", lambda run: both(run, observer="server")),
    "names": ("settings", "names is", lambda run: both(run, names=["nothing"])),
    "another run": ("head", "the identity of another run", lambda run: both(run, run="0" * 64)),
    "fewer releases": ("fields", "releases is 5", lambda run: both(run, releases=5)),
    "a rest that was charged": (
        "fields",
        "remaining_charged is True",
        lambda run: both(run, remaining_charged=True),
    ),
    "noise in words": ("settings", "noise_std is", lambda run: both(run, noise_std=9.0)),
    "a lower epsilon": ("epsilon", "by dp-accounting", lambda run: both(run, epsilon=1.0)),
    "beyond the budget": ("budget", "of a budget of", budget_below_epsilon),
    "headline": ("headline", "the figures of", lambda run: both(run, headline="private: eps 0.01")),
    "one of two reports": (
        "report",
        "outside is",
        lambda run: change(run / "public/privacy.json", outside=[]),
    ),
    "an unsaid fact": ("report", "unit is missing in privacy.json", without_unit),
    "model": ("model", "not so", flipped),
    "a later release": ("grid", "of step 77", lambda run: with_releases(run, torch.clone, step=77)),
    "off the grid": (
        "grid",
        "1 of 39 coordinates of update are not on",
        lambda run: with_releases(run, shifted),
    ),
    "no noise": ("grid", "less noise than", lambda run: with_releases(run, torch.zeros_like)),
    "more rounds in the checkpoint": (
        "charges",
        "has 5 rounds, the checkpoint 6",
        lambda run: with_rounds(run, 5),
    ),
    "another delta": ("settings", "delta is 0.0001", lambda run: both(run, delta=1e-4)),
    "no grid": ("grid", "no power of two", lambda run: with_releases(run, torch.clone, width=1e-9)),
    "a finer grid": (
        "grid",
        "not that of the noise",
        lambda run: with_releases(run, torch.clone, width=2**-90),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_do_not_fit_though_all_hashes_do(name: str, copy: Path) -> None:
    line, told, edit = FILES[name]
    edit(copy)
    lists(copy)
    found = failed(copy)
    assert told in found[line]
    assert "files: public" not in found


Lines = list[dict[str, Any]]


def header(**changes: Any) -> Callable[[Lines], Lines]:
    """Lines of which the first has other values."""
    return lambda lines: [lines[0] | changes, *lines[1:]]


def kind(**changes: Any) -> Callable[[Lines], Lines]:
    """Lines whose only kind of accounts has other values."""
    return lambda lines: [lines[0] | {"kinds": [lines[0]["kinds"][0] | changes]}, *lines[1:]]


def costing(**changes: Any) -> Callable[[Lines], Lines]:
    """Another cost than the settings make."""
    return lambda lines: kind(cost=lines[0]["kinds"][0]["cost"] | changes)(lines)


def schedule(**changes: Any) -> Callable[[Lines], Lines]:
    return lambda lines: header(schedule=lines[0]["schedule"] | changes)(lines)


COSTS = {
    "law": "laplace",
    "sampled": 0.01,
    "delta": 0.1,
    "replaced": True,
    "sums": 0,
    "sizes": [1],
}
LEDGERS: dict[str, tuple[str, str, Callable[[Lines], Lines]]] = {
    "more clients": ("settings", "is that of 2,000 clients", schedule(n=2000)),
    "smaller cohorts": ("settings", "noise_std is", schedule(cohort=1)),
    "amplified": (
        "settings",
        "amplified of the schedule is True",
        schedule(**{"class": "BoundFixed"}),
    ),
    "replays for nothing": ("settings", "replays_free True", header(replays_free=True)),
    "no noise": ("settings", "noise_multiplier is", kind(multiplier=0)),
    "no schedule": ("settings", "cannot be read", header(schedule={})),
    "less noise on its grid": ("grid", "is not that of the noise", kind(multiplier=1.0)),
    "less noise than at the checkpoint": ("checkpoint", "not so", kind(multiplier=1.0)),
    "less noise than was charged": ("epsilon", "by dp-accounting", kind(multiplier=1.0)),
    "no noise by dp-accounting": ("epsilon", "inf by dp-accounting", kind(multiplier=0)),
    "a charge is missing": ("charges", "6 steps are done", lambda lines: [*lines[:4], *lines[5:]]),
    "a charge is there twice": (
        "charges",
        "are not the next ones",
        lambda lines: [*lines[:3], *lines[2:]],
    ),
    "a charge before any session": (
        "charges",
        "outside of an open",
        lambda lines: [lines[0], *lines[2:]],
    ),
    "steps without end": (
        "charges",
        "cannot",
        lambda lines: [*lines[:2], lines[2] | {"end": 10**18}, *lines[3:]],
    ),
    "a line of no kind": (
        "charges",
        "no kind",
        lambda lines: [*lines, {"kind": "refund", "session": 1}],
    ),
    **{
        f"cost, {key}": ("settings", f"{key} of the cost", costing(**{key: one}))
        for key, one in COSTS.items()
    },
}


@pytest.mark.parametrize("name", LEDGERS)
def test_ledgers_that_do_not_fit_though_their_chain_holds(name: str, copy: Path) -> None:
    line, told, edit = LEDGERS[name]
    rewrite(copy, edit)
    found = failed(copy)
    assert told in found[line]
    assert not {"chain", "head", "files: public"} & found.keys()


QUIET: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "laplace": {"mechanism": "laplace"},
    "l2_laplace": {"mechanism": "l2_laplace"},
    "correlated": {"bands": 2},
    "an adaptive clip": {"clip_norm": QuantileClip(initial=0.7, count_noise=4.0)},
}


@pytest.mark.parametrize("name", QUIET)
def test_a_release_with_half_of_the_noise_is_found(name: str, tmp_path: Path) -> None:
    """All of a release of a large model is halved on its grid, which is as if its noise were; it fits as it was."""
    settings = {
        "clip_norm": 0.7,
        "noise_multiplier": 6.0,
        "delta": DELTA,
        "source": "secure",
    } | QUIET[name]
    options: dict[str, Any] = {
        "privacy": ClientPrivacy(**settings),
        "model": models.mlp(hidden=60),
        "rounds": 2,
    }
    if name != "gaussian":
        options["schedule"] = CyclicCohorts(COHORT)
    folder = run(tmp_path / "run", **options)
    assert failed(folder) == {}

    def halved(value: torch.Tensor) -> torch.Tensor:
        with safe_open(folder / "public/releases.safetensors", framework="pt") as file:
            grid = json.loads(file.metadata()["update"])
        return (
            torch.round(value / 2 * grid["divisor"] / grid["width"])
            * grid["width"]
            / grid["divisor"]
        )

    with_releases(folder, halved)
    lists(folder)
    assert failed(folder) == {
        "grid": "update has less noise than the multiplier in the ledger gives"
    }


def test_rewriting_without_a_change_shows_nowhere(copy: Path) -> None:
    rewrite(copy)
    assert failed(copy) == {}


def of_version_1(lines: list[bytes]) -> list[bytes]:
    return [json.dumps(json.loads(line) | {"version": 1}).encode() + b"\n" for line in lines]


SEAL = json.dumps({"kind": "seal", "session": 2, "place": {}}).encode()
CHAINS: dict[str, tuple[str, str, Callable[[list[bytes]], list[bytes]]]] = {
    "a line is removed": (
        "chain",
        "line 3: it does not follow the line before",
        lambda lines: lines[:2] + lines[3:],
    ),
    "rolled back": ("head", "not the head in privacy.json", lambda lines: lines[:3]),
    "continued": ("head", "continues after line", lambda lines: chained([*lines, SEAL])),
    "an older one": ("chain", "version 1", of_version_1),
}


@pytest.mark.parametrize("name", CHAINS)
def test_ledgers_that_are_not_the_one_of_the_report(name: str, copy: Path) -> None:
    line, told, edit = CHAINS[name]
    write(copy, edit(ledger(copy)))
    lists(copy)
    assert told in failed(copy)[line]


@pytest.mark.parametrize("part", ["public", "private"])
def test_no_listed_file_is_another_under_one_seal(copy: Path, part: str) -> None:
    lists(copy)
    published = verify(copy).seal
    names = json.loads((copy / part / "manifest.json").read_text())["files"]
    assert (
        set(names)
        >= {"public": {"model.safetensors", "privacy.json"}, "private": {"ledger.jsonl"}}[part]
    )
    for name in names:
        place = copy / part / name
        before = place.read_bytes()
        place.write_bytes(before + b" ")
        found = verify(copy)
        assert f"{name} is not the file that was listed" in failed(copy)[f"files: {part}"]
        assert found.seal == published
        lists(copy)
        assert verify(copy).seal != published
        place.write_bytes(before)
        lists(copy)
        assert verify(copy).seal == published  # it depends on nothing else


def test_the_hash_of_private_files_tells_nothing_of_them(copy: Path) -> None:
    """It is published: the same private files are listed under another hash each time."""
    found = set()
    for _ in range(3):
        RunFolder(copy).write_lists()
        found.add(json.loads((copy / "public/manifest.json").read_text())["private"])
        assert verify(copy).fits
    assert len(found) == 3


@pytest.mark.parametrize("when", ["on_start", "on_end"])
def test_a_finished_run_whose_resume_is_cut_off_fits_or_is_unfinished(
    copy: Path, when: str
) -> None:
    """As by a closed pipe: never does it fail to fit. Once it is resumed, its seal is another one."""

    class Cut(Callback):
        pass

    def cut(*_: Any) -> None:
        raise BrokenPipeError

    setattr(Cut, when, cut)
    before = verify(copy).seal
    with pytest.raises(BrokenPipeError):
        run(copy, resume=True, callbacks=(Cut(),))
    if when == "on_start":
        assert verify(copy).fits
    else:
        with pytest.raises(DataError, match="is unfinished; fedmtl resume"):
            verify(copy)
    run(copy, resume=True)
    assert verify(copy).fits
    assert verify(copy).seal != before


def test_bands_of_noise_and_the_turns_that_they_need(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    privacy = ClientPrivacy(
        clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source="secure", bands=3
    )
    run(folder, schedule=CyclicCohorts(COHORT), privacy=privacy)
    assert failed(folder) == {}
    charges = next(check.detail for check in verify(folder).checks if check.name == "charges")
    assert "3 rounds between them at least, over which noise is correlated" in charges
    for bands, told in (
        ([0.8, 0.5, 0.4], "the bands of the noise are longer than 1"),
        (None, "the ledger has none"),
        ([0.5] * 4, "correlated over 4 rounds, and a client may act again after 3"),
    ):
        rewrite(folder, header(bands=bands))
        assert told in failed(folder)["charges"]


SUMS = SecureAggregation(colluding=1)
SUMMED: dict[str, dict[str, Any]] = {
    "clients": {
        "privacy": ClientPrivacy(
            clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, aggregation=SUMS
        )
    },
    "records": {
        "algorithm": FedSGD(rate=0.5),
        "privacy": RecordPrivacy(
            clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, aggregation=SUMS
        ),
    },
}


@pytest.mark.parametrize("unit", SUMMED)
def test_costs_that_assume_a_finer_grid_than_that_of_the_sums(unit: str, tmp_path: Path) -> None:
    """The slack of the discrete law, and so epsilon, would be less than it is."""
    folder = run(tmp_path / "run", schedule=FullParticipation(), **SUMMED[unit])
    assert failed(folder) == {}

    def finer(lines: Lines) -> Lines:
        kinds = [
            one | {"cost": one["cost"] | {"cells": one["cost"]["cells"] + 1}}
            for one in lines[0]["kinds"]
        ]
        return header(kinds=kinds)(lines)

    rewrite(folder, finer)
    assert "cells in the deviation of the noise, the grid has" in failed(folder)["settings"]


def test_rates_of_records_that_are_not_those_of_a_batch_size(tmp_path: Path) -> None:
    records = RecordPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA)
    folder = run(tmp_path / "run", privacy=records)
    assert failed(folder) == {}
    withheld = Finetune(kind="vanilla", local=SOLVER, validation=0.3)
    assert failed(run(tmp_path / "withheld", privacy=records, finetune=withheld)) == {}

    def halved(lines: Lines) -> Lines:
        kinds = [
            one | {"cost": one["cost"] | {"sampled": one["cost"]["sampled"] / 2}}
            for one in lines[0]["kinds"]
        ]
        return header(kinds=kinds)(lines)

    rewrite(folder, halved)
    assert "one batch size" in failed(folder)["settings"]


def test_files_that_are_missing_or_were_added(copy: Path) -> None:
    (copy / "public/extra.txt").write_text("x")
    for name in ("clients.csv", "checkpoint.safetensors"):
        (copy / "private" / name).unlink()
    found = failed(copy)
    assert found.keys() == {"files: public", "files: private"}
    assert found["files: public"] == "extra.txt was added"
    assert "clients.csv is missing" in found["files: private"]
    assert "checkpoint.safetensors is missing" in found["files: private"]


def test_a_private_list_that_was_written_again_is_not_the_one_that_was_published(
    copy: Path,
) -> None:
    """Though every file in it has the hash that it says."""
    place = copy / "private/manifest.json"
    place.write_text(place.read_text() + "\n")
    found = failed(copy)
    assert found == {
        "files: private": "manifest.json is not the one of which public/manifest.json has the hash"
    }


# Folders that are not finished runs


def test_other_folders_are_refused_in_one_line(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(DataError, match=r"is not the folder of a run: it has no public"):
        verify(tmp_path / "nothing")
    (copy / "private/result.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        verify(copy)


def test_an_unfinished_run_is_named_with_the_command_that_finishes_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, after=3)
    with pytest.raises(DataError, match=f"^{folder} is unfinished; fedmtl resume {folder}$"):
        verify(folder)
    interrupted(folder, resume=True)
    assert verify(folder).fits
    (folder / "private/result.json").unlink()  # as before its last files were written
    with pytest.raises(DataError, match="is unfinished"):
        verify(folder)


def test_a_baseline_is_named_as_a_part_of_its_run(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", baselines=("fedavg",), algorithm=PMTL(lam=0.5, local=SOLVER))
    with pytest.raises(DataError, match=f"part of the run in {folder}"):
        verify(folder / "private/baselines/fedavg")


HOSTILE = (None, "x", [], {}, True, -1, 0, 0.5, 1e-300, 1e308, 10**9, 10**30, math.nan, math.inf)


def altered(value: Any, rng: random.Random) -> Any:
    """The same JSON with one field of another type or size, or missing."""
    place, at = json.loads(json.dumps(value)), []
    at.append(place)
    while isinstance(at[-1], (dict, list)) and at[-1] and (len(at) == 1 or rng.random() < 0.8):
        key = rng.choice(list(at[-1])) if isinstance(at[-1], dict) else rng.randrange(len(at[-1]))
        holder = at[-1]
        at.append(holder[key])
    if rng.random() < 0.1:
        del holder[key]
    else:
        holder[key] = rng.choice(HOSTILE)
    return place


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "which", ["ledger", "public/privacy.json", "private/result.json", "public/manifest.json"]
)
def test_hostile_files_fail_with_a_reason(copy: Path, which: str, seed: int) -> None:
    """Whatever a file holds, a verification ends in its lines, or is refused in one."""
    rng = random.Random(seed)
    lines = [json.loads(line) for line in ledger(copy)]
    before = lines if which == "ledger" else json.loads((copy / which).read_text())
    for _ in range(15):
        new = altered(before, rng)
        if which == "ledger":
            made = chained([json.dumps(line).encode() for line in new if isinstance(line, dict)])
            if made == chained([json.dumps(line).encode() for line in lines]):
                continue  # what was altered is the chain, which is made anew
            write(copy, made)
        else:
            (copy / which).write_text(json.dumps(new))
        try:
            found = verify(copy)
        except DataError:
            continue
        assert not found.fits  # the lists of files are as they were
        assert "the run does not fit" in found.text()
        json.dumps(found.to_dict())


def test_files_of_other_bytes_fail_with_a_reason(copy: Path) -> None:
    for name in ("public/releases.safetensors", "public/model.safetensors", "private/checkpoint.safetensors",
                 "private/clients.csv", "private/outcome.json"):  # fmt: skip
        for content in (b"", b"\xff" * 100, b"[" * 100_000):
            (copy / name).write_bytes(content)
            assert f"files: {name.split('/')[0]}" in failed(copy), (name, content[:9])


def test_nothing_private_is_in_the_certificate(good: Path) -> None:
    text = json.dumps(verify(good).to_dict())
    assert str(good) not in text
    result = json.loads((good / "private/result.json").read_text())
    measured = [
        result[name] for name in ("accuracy", "loss", "worst_tenth", "spread", "global_accuracy")
    ]
    assert not [number for number in measured if len(repr(number)) > 6 and repr(number)[:6] in text]
    assert "clients.csv" not in text
