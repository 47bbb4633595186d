"""The command line: what it accepts, how it refuses, and what a run leaves behind."""

import contextlib
import csv
import dataclasses
import errno
import fcntl
import inspect
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.types import RunMode
from omegaconf import OmegaConf

from fedmtl import cli
from fedmtl._files import write_bytes
from fedmtl.cli.build import build, settings
from fedmtl.cli.config import combinations, compose, read, resolve
from fedmtl.cli.defaults import load
from fedmtl.cli.names import EXTRA, choices
from fedmtl.cli.process import Process
from fedmtl.cli.run import train_one, unlike
from fedmtl.cli.stored import with_absolute_paths, write_config
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.trainer import callbacks
from fedmtl.trainer.run_settings import Settings
from tests import copies

TINY = ["data.clients=30", "schedule.cohort=6", "rounds=4", "eval_every=2", "progress=false"]


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in another folder, within this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(words))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def process(
    *words: str, cwd: Path, timeout: float = 600.0, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m fedmtl`` in another folder, as a user would, with ``path`` on Python's path."""
    paths = [str(Path(__file__).parents[1]), *([] if path is None else [str(path)])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "fedmtl", *words],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


# --- what is refused, before any work


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["privcy.epsilon=3"], "privcy.epsilon is no setting; did you mean privacy.epsilon?"),
        (["algoritm=3"], "algoritm is no setting; did you mean algorithm? fedmtl --cfg job prints all."),
        (["algorithm=auto", "lr=1"], "did you mean algorithm=fedavg algorithm.local.lr? fedmtl --cfg job prints all."),
        (["algorithm=auto", "fraction=.1"], "did you mean schedule=poisson schedule.cohort? fedmtl --cfg job prints"),
        (["epsilon=3"], "epsilon is no setting; did you mean privacy.epsilon or epsilons?"),
        (["privacy.epsilom=3"], "did you mean privacy.epsilon? accepted: clip_norm, epsilon,"),
        (["algorithm=pmtl", "algorithm.mu=1"], "no setting; did you mean algorithm=fedprox algorithm.mu or "),
        (["algorithm=pmtl", "+algorithm.foo=1"], "algorithm.foo is no setting of PMTL; accepted: local, "),
        (["evaluate_clients=none"], "evaluate_clients is 'none'; it must be a whole number of at least 1"),
        (["model.fix=3"], "model.fix is 3; accepted: true or false."),
        (["model.lora=4"], "model.lora is 4; give a mapping of its settings, such as model.lora.rank=VALUE"),
        (["model.lora.rank=x"], "model.lora.rank is 'x'; it must be a whole number of at least 1."),
        (["execution.chunk=x"], "execution.chunk is 'x'; it must be a whole number of at least 1."),
        (["algorithm.local=5"], "algorithm.local is 5; give a local solver, such as LocalSGD"),
        (["+foo=1"], "foo is no setting of Trainer; accepted: algorithm, data, model, schedule,"),
        (["execution={foo: 1}"], "execution.foo is no setting; accepted: chunk, processes"),
        (["algorithm=pmtl", "model=auto"], "model=auto is a choice of algorithm=auto alone; beside"),
        (["+logger.foo=1"], "logger.foo means nothing here: logger is none; choose another logger=OPTION"),
        (["algorithm=pmtll"], "has no option 'pmtll'; did you mean pmtl? fedmtl --help prints all."),
        (["privacy=none", "privacy.epsilon=1"], "no setting; did you mean privacy=adaptive privacy.epsilon or "),
        (["data.path=x"], "data.path is no setting; did you mean data=leaf data.path or data=table data.path?"),
        (["experiment=pmtl_femnist"], "data.root is required; add data.root=VALUE"),
        (["experiment=pmtl_fem"], "did you mean pmtl_femnist?"),
        (["rounds=[1"], "cannot read 'rounds=[1'"),
        (["data=table", "data.labels=[gr\u00fcn,rot]"], 'a text such as gr\u00fcn is written in quotation marks, "gr\u00fcn".'),
        (["data=table", "data.labels=['a;b',<=50K]"], 'a text such as <=50K is written in quotation marks, "<=50K".'),
        (["check", "visits.txt"], "visits.txt is no file of a table that is read"),
        (["data=table", "data.bounds.days=[0,9]"], "data.bounds.days is no setting, as no bounds are declared yet; accepted: those of all columns, 'data.bounds={days: [LOW, HIGH]}'"),
        (["check", "visits.doc"], "cannot read 'visits.doc'; settings are written KEY=VALUE, such as rounds=200"),
        (["check", "visits.csv"], "visits.csv cannot be read as a table: it does not exist."),
        (["data=vietnam.csv"], "vietnam.csv cannot be read as a table: it does not exist."),
        (["--epsilon", "2"], "unknown option --epsilon; settings are written without dashes: privacy.epsilon=VALUE"),
        (["visits.xlsx", "client=ward", "target=days"], "visits.xlsx is no file of a table that is read; save the table as .csv or .parquet"),
        (["check", "data=visits.json"], "visits.json is no file of a table that is read"),
        (["check", "client=ward", "target=days"], "client=ward is a column of a table, and none is named; accepted: the table before it, as visits.csv client=ward"),
        (["model=resnet18"], "resnet18 is a network of torchvision: model=torchvision model.name=resnet18."),
        (["finetune=true"], "finetune=true is no choice: finetune=auto trains every client's own model further"),
        (["algorithm=pmtl,fedavg"], "accepted: one value, as algorithm=pmtl, or -m (--multirun) for a run with each"),
        (["--rounds", "3"], "unknown option --rounds; settings are written without dashes: rounds=VALUE"),
        (["repot", "x"], "unknown command 'repot'; did you mean report?"),
        (["privacy.epsilon=-1"], "privacy.epsilon is -1; it must be a number above 0, inf for no noise"),
        (["algorithm.local.lr=0"], "algorithm.local.lr is 0"),
        (["finetune=null"], "finetune=null: Config group override must be a string or a list"),
        (["-m", "model=null", "seed=1,2"], "model=null seed=1: Config group override must be a string"),
        (["-m", "privacy.epsilon=interval(1,4)"], "epsilon=interval(1,4)': BasicSweeper does not support sweep type"),
        (["-m", "hydra/launcher=joblb"], "hydra/launcher has no option 'joblb'; accepted: basic"),
        (["--config-name", "nonsense"], "Cannot find primary config 'nonsense'"),
        (["finetune=klx"], "finetune has no option 'klx'; did you mean kl?"),
        (["algorithm=clustered_pmtl"], "algorithm.clusters is required"),
        (["execution=stacked"], "execution is 'stacked'; give Execution(chunk=..., processes=...)."),
        (["device=toaster"], "device is 'toaster'"),
        (["early_stopping.patience=x"], "early_stopping.patience is 'x'; it must be a whole number of"),
        (["algorithm=pmtl", "algorithm/graph=ring"], "algorithm.graph is no setting of PMTL; accepted: local, "),
        (["algorithm=p2p", "algorithm/graph=ratings"], "algorithm.graph.root: Interpolation key 'data.root' not found"),
        (["experiment=p2p_movielens"], "data.root is required; add data.root=VALUE"),
        (["--cfg", "jobb"], "argument --cfg/-c: invalid choice: 'jobb' (choose from"),
        (["--config-dir"], "argument --config-dir: expected one argument; usage: fedmtl --help"),
        (["experiment=p2p_movielens", "algorithm=fedavg"], "data.root is required; add data.root=VALUE"),
        (["-m", "seed=1,2", "privacy.epsilon=1,0"], "privacy.epsilon is 0"),
        (["algorithm=p2p", "algorithm.releases=1"], "did you mean algorithm=peer_averaging algorithm.releases?"),
        (["algorithm=pp_dmtl", "algorithm.refine_across=1"], "did you mean algorithm=shared_directions "),
        (["resume", "nowhere"], "nowhere holds no run of this command"),
        (["resume", "x", "--moved"], "unrecognized arguments: --moved; usage: fedmtl resume [-h] folder"),
        (["hydra.run.dir=/dev/null/run"], "error: the folder of the run cannot be made: [Errno 20] Not a directory"),
        (["-m", "seed=1,2", "hydra.sweep.dir=/dev/null/run"], "error: the folder of the run cannot be made: [Errno"),
        (["resume"], "the following arguments are required: folder; usage: fedmtl resume"),
        (["adapt"], "the following arguments are required: folder; usage: fedmtl adapt"),
        (["verify"], "the following arguments are required: folder; usage: fedmtl verify [-h]"),
        (["report", "nowhere"], "nowhere is not a folder"),
        (["--config-dir", "nowhere", "algorithm=own"], "--config-dir is nowhere, which is no folder; give one with "),
        (["audit", "--config-dir", "nowhere"], "--config-dir is nowhere, which is no folder"),
        (["audit", "privacy.epsilom=1"], "did you mean privacy.epsilon? accepted: clip_norm, epsilon,"),
        (["audit", "--rounds", "0"], "--rounds is 0; it must be a whole number of at least 1"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("fedmtl: error: ")
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=leaf", "data.path=leaf.json"], "data: leaf.json cannot be read as LEAF JSON"),
        (
            [*TINY, "trainable=[1]"],
            "trainable has 1, which is not text (write '1'); the model's parameters are 1.w",
        ),
        (
            [*TINY, "model.lora={rank: 99}"],
            "lora.rank is 99, but the weights it applies to have ranks up to 10; gi",
        ),
    ],
)
def test_what_data_and_model_show_is_refused_in_one_line(
    words: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "leaf.json").write_text('{"users": ["a"]')
    refused = command(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"fedmtl: error: {said}")
    assert refused.stderr.count("\n") == 1


def test_low_rank_adapters_and_names_come_with_every_model(tmp_path: Path) -> None:
    words = (
        "model=mlp",
        "model.hidden=8",
        "model.lora={rank: 2, alpha: 6}",
        "trainable=['*.lora_B']",
        *TINY,
    )
    trainer = build(resolve(compose(words)), tmp_path)
    layers = trainer.model(trainer.data.spec)  # type: ignore[operator]
    assert [tuple(layers[k].lora_B.shape) for k in (1, 3)] == [(8, 2), (10, 2)]
    assert layers[1].scale == 3.0
    assert trainer.trainable == ["*.lora_B"]


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ConfigError):
        cli.main(["--debug", "rounds=0"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm=private_prior", "data=digits"], "digits has 10 classes, and private_prior learns linear models"),
        (["algorithm=async_learner", "data=digits"], "With more, prior_layers and pmtl can be used"),
        (["algorithm=p2p", "schedule=poisson", "schedule.cohort=3"], "(schedule=clocks or latency by name)"),
        (["algorithm=p2p", "algorithm.feature_norm=1", "TABLE"], "the graph of the synthetic agents, not of table.csv"),
        (["algorithm=p2p", "algorithm/graph=ring", "LEAF"], "PeerToPeer.feature_norm is 'auto'"),
    ],
)  # fmt: skip
def test_what_only_the_data_show_is_refused_by_key(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text("who,x,y\n" + "a,1,0\nb,2,1\nc,3,1\n" * 4)
    users = {name: {"x": [[1.0]] * 4, "y": [0, 1] * 2} for name in "abc"}
    Path("leaf.json").write_text(
        json.dumps({"users": list(users), "num_samples": [4] * 3, "user_data": users})
    )
    table = "data=table data.path=table.csv data.client=who data.target=y data.classes=2 data.bounds={x:[0,9]}"
    meant = {"TABLE": table.split(), "LEAF": ["data=leaf", "data.path=leaf.json", "data.classes=2"]}
    overrides = [part for word in words for part in meant.get(word, [word])]
    config = resolve(compose([*overrides, "progress=false", "baselines=null"]))
    with pytest.raises(FedmtlError) as refused:
        build(config, tmp_path / "run").fit()
    assert said in str(refused.value)


# --- what is accepted


def test_the_default_is_the_main_job() -> None:
    import fedmtl

    made = settings(resolve(compose(())))
    assert made.algorithm == fedmtl.FedAvg(local=fedmtl.LocalSGD(lr=0.5, epochs=5, batch_size=10))
    ways = fedmtl.Finetune(
        kind="auto", lam=0.1, local=fedmtl.LocalSGD(lr=0.5, epochs=20, batch_size=10)
    )
    assert made.finetune == ways
    assert made.privacy == fedmtl.ClientPrivacy(clip_norm=1.5, epsilon=4.0)
    assert made.schedule == fedmtl.PoissonSampling()
    assert made.execution == fedmtl.Execution()
    assert (made.rounds, made.baselines, made.seed) == (100, "auto", 0)


def objects(*overrides: str) -> Settings:
    return settings(resolve(compose(overrides)))


def test_groups_make_the_objects_of_a_program() -> None:
    import fedmtl

    local = fedmtl.LocalSGD(lr=0.5, epochs=5, batch_size=10)
    assert objects("algorithm=fedavg").algorithm == fedmtl.FedAvg(local=local)
    assert objects("algorithm=fedprox", "algorithm.mu=2").algorithm == fedmtl.FedProx(
        mu=2, local=local
    )
    assert objects("algorithm=local").algorithm == fedmtl.Local(local=local)
    assert objects("privacy=none").privacy is None
    unlimited = fedmtl.ClientPrivacy(clip_norm=1.5, epsilon=float("inf"))
    assert objects("privacy.epsilon=inf").privacy == unlimited
    assert objects("schedule=fixed", "schedule.cohort=7").schedule == fedmtl.FixedCohort(cohort=7)
    assert objects("schedule=full").schedule == fedmtl.FullParticipation()
    adam = objects("algorithm/solver@algorithm.local=adam").algorithm
    assert adam == fedmtl.FedAvg(
        local=fedmtl.LocalOptimizer(optimizer_name="Adam", lr=0.01, epochs=5, batch_size=10)
    )


@pytest.mark.parametrize("name", sorted(choices()["algorithm"].keys() - {"auto"}))
def test_the_command_has_the_defaults_of_the_class(name: str, tmp_path: Path) -> None:
    """A field that has a default has the same value in the command; the solver is an option of a group of its own."""
    clusters = tmp_path / "clusters.csv"
    clusters.write_text("client,cluster\nclient-0,a\n")
    needed = {"clustered_pmtl": [f"algorithm.clusters={clusters}"]}.get(name, [])
    made = objects(f"algorithm={name}", *needed).algorithm
    fields = dataclasses.fields(made)  # type: ignore[arg-type]
    differ = {}
    for field in (field for field in fields if field.name != "local"):
        default = (
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )
        if default is not dataclasses.MISSING and getattr(made, field.name) != default:
            differ[field.name] = getattr(made, field.name), default
    assert not differ, "of command and class"


def test_graphs_by_name(tmp_path: Path) -> None:
    import fedmtl
    from fedmtl.data.readers.movielens import RatingsGraph
    from fedmtl.data.synthetic.agents import TargetAngles
    from fedmtl.graphs import Complete, EdgesFile, KNNCosine, Ring

    edges = tmp_path / "edges.csv"
    edges.write_text("agent,neighbour\na,b\n")
    for overrides, graph in (
        ((), TargetAngles()),
        (("algorithm/graph=ring", "algorithm.graph.reach=2"), Ring(2)),
        (("algorithm/graph=complete",), Complete()),
        (("algorithm/graph=knn",), KNNCosine(10)),
        (("algorithm/graph=edges", f"algorithm.graph.path={edges}"), EdgesFile(str(edges))),
        (("data=movielens", "data.root=x", "algorithm/graph=ratings"), RatingsGraph("x")),
    ):
        made = objects("algorithm=p2p", *overrides).algorithm
        assert made == fedmtl.PeerToPeer(graph=graph)


def test_the_femnist_experiment_is_the_papers_network() -> None:
    import fedmtl
    from fedmtl.data import DataSpec

    made = objects("experiment=pmtl_femnist", "data.root=x", "rounds=7", "privacy.epsilon=8")
    module = made.model(DataSpec(shape=(1, 28, 28), classes=62, clients=206))  # type: ignore[operator]
    assert sum(parameter.numel() for parameter in module.parameters()) == 115_646
    assert made.rounds == 7
    assert made.privacy.epsilon == 8  # type: ignore[attr-defined]
    assert made.algorithm.local == fedmtl.LocalSGD(lr=0.1, epochs=1, batch_size=10)  # type: ignore[attr-defined]
    paper = objects("experiment=pmtl_femnist_paper", "data.root=x").algorithm
    assert [paper.local.lr_at(r) for r in (0, 199, 200, 400)] == [0.1, 0.1, 0.05, 0.025]  # type: ignore[attr-defined]


def test_replicates_and_rounds_of_an_algorithm_of_its_own_default() -> None:
    made = objects("algorithm=mp_mtl", "replicates=100", "epsilons=[1,3,inf]")
    assert (made.replicates, made.epsilons, made.baselines) == (
        100,
        [1, 3, float("inf")],
        "auto",
    )
    assert objects("algorithm=private_prior").rounds == 1  # its own default
    assert objects("algorithm=mp_mtl").rounds == 10


def test_the_settings_of_a_run_are_checked_by_its_trainer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all runs of a sweep once more, before the first one begins."""
    from fedmtl.trainer import run_settings as module

    calls: list[str] = []
    check_settings = module.check_settings

    def checked(settings: Settings) -> None:
        calls.append(type(settings).__name__)
        check_settings(settings)

    monkeypatch.setattr(module, "check_settings", checked)
    assert command(*TINY, "baselines=[]", cwd=tmp_path).returncode == 0
    # later ones are of copies that replace a setting
    assert set(calls) == {"Trainer"}
    calls.clear()
    words = [*TINY, "baselines=[]", "seed=0,1", "-m"]
    assert command(*words, cwd=tmp_path).returncode == 0
    assert calls[:3] == ["Settings", "Settings", "Trainer"]
    assert set(calls[2:]) == {"Trainer"}


@pytest.mark.parametrize("named", [[], ["experiment=pmtl_femnist", "data.root=x"]])
def test_every_choice_goes_with_every_other(named: list[str]) -> None:
    for choice in (
        "pmtl client poisson",
        "fedavg none fixed",
        "local client full",
        "fedavg client full",
    ):
        algorithm, privacy, schedule = choice.split()
        objects(*named, f"algorithm={algorithm}", f"privacy={privacy}", f"schedule={schedule}")


def test_every_option_of_every_group_composes() -> None:
    """Algorithms do: ``test_the_command_has_the_defaults_of_the_class``."""
    root = ["data.root=x"]
    clocked = ["algorithm=async_learner", "privacy=record", "baselines=null"]
    needed = {"auto": ["algorithm=auto"], "clocks": clocked, "latency": clocked, "synchronous": clocked,
              "trace": [*clocked, "schedule.latency.source=x"],
              **dict.fromkeys(("femnist", "school", "movielens", "celeba", "cifar", "images", "stackoverflow",
                               "adult", "hospital", "lending"), root),
              **dict.fromkeys((f"{name}{size}" for name in ("mp_mtl_school", "p2p_movielens", "pmtl_femnist",
                               "pmtl_celeba", "pmtl_stackoverflow", "cost_of_privacy_lending",
                               "cost_of_privacy_hospital", "cost_of_privacy_svm") for size in ("", "_paper")), root),
              "leaf": ["data.path=x"], "table": ["data.path=x", "data.client=c", "data.target=t"]}  # fmt: skip
    for group, options in choices().items():
        for option, words in options.items():
            assert words, f"{group}/{option}.yaml has no comment to open with"
    for experiment in choices()["experiment"]:
        objects(f"experiment={experiment}", *needed.get(experiment, []))
    # whose clients act one at a time, which goes with fewer options of the other groups
    apart = {"clocks", "latency", "synchronous", "trace"}
    for schedule in apart:
        objects(f"schedule={schedule}", *needed[schedule])
    # one of each other group in each composition, until all have had their turn
    groups = ("data", "finetune", "logger", "model", "privacy", "schedule")
    assert {*groups, "algorithm", "experiment"} == {
        group for group in choices() if "/" not in group
    }
    turns = [sorted(choices()[group].keys() - apart) for group in groups]
    for chosen in itertools.zip_longest(*turns):
        named = {group: one for group, one in zip(groups, chosen, strict=True) if one}
        further = [word for one in named.values() for word in needed.get(one, [])]
        objects(*(f"{group}={one}" for group, one in named.items()), *dict.fromkeys(further))


def test_a_composition_reads_no_source_of_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of twenty callers and a walk over all modules take a tenth of a composition."""

    def stack(context: int = 1) -> list[Any]:
        raise AssertionError("the stack is asked for")

    monkeypatch.setattr(inspect, "stack", stack)
    assert compose(("seed=3",)).seed == 3
    assert combinations(read(["seed=3,4"])) == [["seed=3"], ["seed=4"]]


def test_a_file_of_the_package_is_read_once_and_one_of_the_user_whenever_it_is_loaded(
    tmp_path: Path,
) -> None:
    """What is loaded belongs to the caller, who changes it in place, as Hydra does."""
    before = OmegaConf.to_container(load("schedule", "fixed"))
    load("schedule", "fixed").clear()
    assert OmegaConf.to_container(load("schedule", "fixed")) == before
    token = EXTRA.set(tmp_path)
    (tmp_path / "schedule").mkdir()
    for cohort in (3, 5):
        (tmp_path / "schedule/fixed.yaml").write_text(
            f"_target_: fedmtl.FixedCohort\ncohort: {cohort}\n"
        )
        assert load("schedule", "fixed").cohort == cohort
    EXTRA.reset(token)


def test_data_options_are_those_of_the_readers() -> None:
    from fedmtl.data import LOADERS

    for name, loader in LOADERS.items():
        if not loader.__module__.startswith("fedmtl."):
            continue  # registered by a test of a reader elsewhere
        accepted = set(inspect.signature(loader).parameters)
        given = set(compose((f"data={name}",)).data) - {"_target_"}
        assert given <= accepted, name
        assert accepted - given <= {"transform"}, name


def test_another_option_takes_what_it_has_an_argument_for() -> None:
    """An experiment sets keys of the options that it chooses; the command line may choose others."""
    import fedmtl

    femnist = ["experiment=pmtl_femnist", "data.root=x"]
    assert objects(*femnist, "algorithm=fedavg").algorithm == fedmtl.FedAvg(
        local=fedmtl.LocalSGD(lr=0.1, epochs=1)
    )
    assert objects(*femnist, "schedule=full").schedule == fedmtl.FullParticipation()
    assert objects(*femnist, "algorithm=auto").finetune == fedmtl.Average()
    movielens = ["experiment=p2p_movielens", "data.root=x"]
    assert objects(*movielens, "algorithm=local").algorithm == fedmtl.Local(
        local=fedmtl.LocalSGD(lr=0.5, epochs=5)
    )
    adaptive = fedmtl.ClientPrivacy(clip_norm=fedmtl.QuantileClip(initial=1.5), epsilon=2.0)
    assert objects(*femnist, "privacy=adaptive").privacy == adaptive
    with pytest.raises(ConfigError, match=r"algorithm\.lam is no setting of FedAvg; accepted: "):
        objects(*femnist, "algorithm=fedavg", "algorithm.lam=1")


def test_names_of_parameters_that_are_free() -> None:
    made = objects(
        "algorithm=pp_dmtl", "schedule.latency.law=lognorm", "schedule.latency.parameters={s: 1.5}"
    )
    assert made.schedule.latency.parameters == {"scale": 0.015, "s": 1.5}  # type: ignore[attr-defined]


def test_sweeps_are_expanded() -> None:
    found = list(
        combinations(read(["algorithm=pmtl,local", "privacy.epsilon=1,inf", "seed=range(2)"]))
    )
    assert len(found) == 8
    assert found[1] == ["algorithm=pmtl", "privacy.epsilon=1", "seed=1"]
    assert found[-1] == ["algorithm=local", "privacy.epsilon=inf", "seed=1"]
    twice = list(combinations(read(["seed=3", "rounds=1,2", "seed=4,5"])))
    assert combinations(read(["finetune=glob(*,exclude=[a*,k*,m*,n*])"])) == [
        ["finetune=ewc"],
        ["finetune=vanilla"],
    ]
    assert twice == [
        ["seed=4", "rounds=1"],
        ["seed=4", "rounds=2"],
        ["seed=5", "rounds=1"],
        ["seed=5", "rounds=2"],
    ]


# --- help and start-up


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for options in (options for group, options in choices().items() if "/" not in group):
        for name, words in options.items():
            assert name in shown
            assert words in shown
    for words in (
        "fedmtl report",
        "fedmtl resume",
        "fedmtl audit",
        "fedmtl search KEY=A,B,C",
        "-m",
        "--debug",
    ):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_help_of_a_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("report", "search", "resume", "adapt", "audit", "check", "verify"):
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: fedmtl {name} ")


def test_help_lists_own_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine/algorithm").mkdir(parents=True)
    (tmp_path / "mine/algorithm/own.yaml").write_text("# A method of mine.\n_target_: own.Own\n")
    for words in (
        ["--config-dir", str(tmp_path / "mine"), "--help"],
        ["-h", "-cd", str(tmp_path / "mine")],
    ):
        assert cli.main(words) == 0
        shown = capsys.readouterr().out
        assert f"A method of mine. ({tmp_path / 'mine'})" in shown
        assert "fedavg" in shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "import not_here",
            "--trust is 'own_module', which cannot be imported (No module named 'not_here')",
        ),
        (
            "x = 1",
            "algorithm._target_ is 'own_module.Own', which cannot be imported (module 'own_module' has no ",
        ),
    ],
)
def test_a_class_that_cannot_be_imported_is_said_with_its_reason(
    tmp_path: Path,
    text: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/own.yaml").write_text("_target_: own_module.Own\n")
    (tmp_path / "own_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    assert cli.main(["--config-dir", str(tmp_path), "--trust=own_module", "algorithm=own"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"fedmtl: error: {why}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("annotation", "value", "accepted"),
    [
        ("Positive", "x", "a finite number above 0"),
        ("Positive", "-1", "a finite number above 0"),
        ("float", "x", "a number"),
        ("float", "null", "a number"),
        ("int | None", "0.5", "a whole number"),
    ],
)
def test_a_setting_of_an_own_method_is_refused_by_its_key(
    tmp_path: Path,
    annotation: str,
    value: str,
    accepted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/own.yaml").write_text(
        "defaults: [{solver@local: sgd}]\n_target_: own_module.Own\n"
    )
    (tmp_path / "own_module.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedmtl.algorithms import FedAvg, Positive\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Own(FedAvg):\n"
        f"    alpha: {annotation} = 1\n"
        "    def __post_init__(self):\n"
        "        if self.alpha > 9: raise ValueError\n"  # a check of its own, which comes after that of annotations
        "        super().__post_init__()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    words = [
        "--config-dir",
        str(tmp_path),
        "--trust=own_module",
        "algorithm=own",
        f"algorithm.alpha={value}",
    ]
    assert cli.main(words) == 2
    shown = capsys.readouterr().err
    assert re.fullmatch(
        rf"fedmtl: error: algorithm\.alpha is \S+; it must be {accepted}\.\n", shown
    )


def test_what_a_run_refuses_is_named_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(
            [
                "privacy.bands=3",
                "data.clients=20",
                "schedule.cohort=5",
                "baselines=[]",
                "progress=false",
            ]
        )
        == 2
    )
    assert (
        "fedmtl: error: privacy.bands needs a public schedule in which a client"
        in capsys.readouterr().err
    )


def test_help_does_not_import_torch(tmp_path: Path) -> None:
    script = """
import sys
from fedmtl import cli
print([cli.main(words.split()) for words in ("--help", "--version", "resume nowhere")])
print({"torch", "matplotlib"} & set(sys.modules))
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[0, 0, 2]", "set()"]


def test_cfg_prints_the_settings_and_trains_nothing(tmp_path: Path) -> None:
    done = command("privacy.epsilon=2", "--cfg", "job", "--resolve", cwd=tmp_path)
    assert done.returncode == 0
    shown = yaml.safe_load(done.stdout)
    assert (shown["privacy"]["epsilon"], shown["rounds"], shown["schedule"]["cohort"]) == (
        2,
        100,
        None,
    )
    assert list(tmp_path.iterdir()) == []


def test_cfg_prints_what_would_run(tmp_path: Path) -> None:
    """Also where the command line replaces an option for which an experiment has settings."""
    words = ("experiment=pmtl_femnist", "data.root=x", "algorithm=fedavg")
    shown = yaml.safe_load(command(*words, "--cfg", "job", cwd=tmp_path).stdout)
    assert shown == OmegaConf.to_container(compose(words))
    assert (
        "lam"
        in yaml.safe_load(command(*words[:2], "--cfg", "job", cwd=tmp_path).stdout)["algorithm"]
    )
    assert "lam" not in shown["algorithm"]
    part = command(
        *words, "--cfg=job", "--package=algorithm.local", "--resolve", cwd=tmp_path
    ).stdout
    assert part.startswith("# @package algorithm.local\n_target_: fedmtl.LocalSGD\n")
    assert command("--cfg=job", "--package=rounds", cwd=tmp_path).stdout == "100\n"
    refused = command("--cfg=job", "--package=nothing", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--package is nothing, and no setting is there" in refused.stderr


def test_a_primary_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/job.yaml").write_text("defaults:\n  - config\n  - _self_\nrounds: 3\n")
    done = command("--config-dir", "mine", "--config-name", "job", "--cfg", "job", cwd=tmp_path)
    assert (done.returncode, yaml.safe_load(done.stdout)["rounds"]) == (0, 3)
    refused = command("--config-dir=mine", "--config-name=job", "rouns=3", cwd=tmp_path)
    assert "rouns is no setting; did you mean rounds?" in refused.stderr


@pytest.mark.parametrize(
    ("mode", "words", "lines"),
    [
        ("", ["-m"], ["[1] seed=0", "[2] seed=1"]),
        ("  mode: MULTIRUN\n", [], ["[1] seed=0", "[2] seed=1"]),
        ("  mode: MULTIRUN\n", ["seed=2,3"], ["[1] seed=2", "[2] seed=3"]),
    ],
)
def test_a_primary_file_has_values_and_the_mode_of_a_sweep(
    mode: str, words: list[str], lines: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    values = f"rounds: 1\nhydra:\n{mode}  sweeper:\n    params:\n      seed: 0,1\n"
    (tmp_path / "mine/job.yaml").write_text(f"defaults:\n  - config\n  - _self_\n{values}")
    done = command(
        *words, "--config-dir=mine", "--config-name=job", *TINY[:2], "baselines=[]", cwd=tmp_path
    )
    printed = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in printed[:2]] == lines
    assert printed[2] == ""
    assert printed[3].startswith("not private: choosing among runs")


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ([], [RunMode.RUN]),
        (["hydra.run.dir=here"], [RunMode.RUN]),
        (["hydra.mode=RUN"], [RunMode.MULTIRUN, RunMode.RUN]),
    ],
)
def test_files_of_the_package_are_composed_once(
    words: list[str], modes: list[RunMode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a setting of Hydra's own may choose the mode."""
    composed = []
    compose_config = Hydra.compose_config

    def noted(
        self: Hydra, config_name: str, overrides: list[str], run_mode: RunMode, **options: Any
    ) -> Any:
        composed.append(run_mode)
        return compose_config(self, config_name, overrides, run_mode, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Hydra, "compose_config", noted)
    assert cli.main(["rounds=0", *words]) == 2
    assert composed == modes


SWEEPER = """
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Two(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        setting = {"hydra_context": hydra_context, "task_function": task_function, "config": config}
        self.launcher = Plugins.instance().instantiate_launcher(**setting)

    def sweep(self, arguments):
        plain = [word for word in arguments if "interval" not in word]
        for number, mu in enumerate((0.5, 2.0)):
            (job,) = self.launcher.launch([[*plain, f"algorithm.mu={mu}"]], initial_job_idx=number)
            print("score", job.return_value)

ConfigStore.instance().store(group="hydra/sweeper", name="two", node={"_target_": "hydra_plugins.two.Two"})
"""


def test_a_sweeper_of_a_plugin_has_the_scores(tmp_path: Path) -> None:
    """In a copy of this process, in which Hydra looks for plugins once more, now on another path."""

    def program() -> int:
        sys.path.insert(0, str(tmp_path))
        Singleton._instances.pop(Plugins, None)
        return cli.main([*words, "algorithm.mu=interval(0.1,3)"])

    (tmp_path / "hydra_plugins/two").mkdir(parents=True)
    (tmp_path / "hydra_plugins/two/__init__.py").write_text(SWEEPER)
    words = ["-m", *TINY, "finetune=none", "baselines=[]", "algorithm=fedprox", "hydra/sweeper=two"]
    running = copies.begun(program, tmp_path)
    running.join()
    assert running.exitcode == 0, (tmp_path / copies.ERR).read_text()
    lines = (tmp_path / copies.OUT).read_text().splitlines()
    scores = [float(line.split()[1]) for line in lines if line.startswith("score ")]
    results = sorted(tmp_path.glob("multirun/*/*/*/private/result.json"))
    assert scores == [json.loads(file.read_text())["accuracy"] for file in results]
    assert len(scores) == 2


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (
            "hydra_joblib_launcher",
            ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "algorithm.mu=choice(0.5,2)"],
        ),
        (
            "hydra_optuna_sweeper",
            [
                "hydra/sweeper=optuna",
                "hydra.sweeper.n_trials=2",
                "hydra.sweeper.n_jobs=1",
                "algorithm.mu=interval(1,2)",
            ],
        ),
    ],
)
def test_launchers_and_sweepers_of_hydra_where_they_are_installed(
    plugin: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(pytest.importorskip(f"hydra_plugins.{plugin}").__file__).parents[2]
    single = [
        "-m",
        *TINY,
        "finetune=none",
        "baselines=[]",
        "algorithm=fedprox",
        "hydra.sweep.dir=sweep",
    ]
    done = process(*single, *words, cwd=tmp_path, path=path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("sweep/*/private/result.json"))) == 2
    (tmp_path / "sweep/1/private/result.json").unlink()
    assert cli.main(["resume", str(tmp_path / "sweep")]) == 0
    assert "[2/2] algorithm.mu=" in capsys.readouterr().out
    assert len(list(tmp_path.glob("sweep/*/private/result.json"))) == 2


# --- runs


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A tiny run of the main job and what it printed: one for all workers, whose folders lie in one folder."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    here, told = base / "main job", base / "main job.json"
    with open(base / "main job.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            here.mkdir()
            done = process(*TINY, cwd=here)
            told.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    return here, subprocess.CompletedProcess(TINY, *json.loads(told.read_text()))


def test_a_run_leaves_its_folder(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    here, done = finished
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (folder,) = here.glob("outputs/2*/*")
    assert {file.name for file in folder.iterdir()} == {"public", "private"}
    assert {file.name for file in (folder / "public").iterdir()} == {
        "model.safetensors",
        "privacy.json",
        "manifest.json",
    }
    for name in (
        "accuracy.png",
        "clients.png",
        "result.json",
        "metrics.csv",
        "config.yaml",
        "clients.csv",
    ):
        assert (folder / "private" / name).exists(), name
    result = json.loads((folder / "private" / "result.json").read_text())
    assert set(result["baselines"]) == {"local", "pmtl"}
    assert 0 < result["epsilon"] <= 4
    assert f"Saved in {folder.relative_to(here)}" in done.stdout
    assert len((done.stdout + done.stderr).splitlines()) <= 42
    assert "epsilon" in done.stdout


def test_a_private_run_that_diverges_ends_as_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [*TINY, "rounds=1", "eval_every=1", "finetune=none", "baselines=[]"]
    ends = {}
    for name, words in (("good", []), ("lost", ["algorithm.local.lr=1e38"])):
        code = cli.main([*tiny, *words, f"hydra.run.dir={name}"])
        public = sorted(path.name for path in (tmp_path / name / "public").iterdir())
        ends[name] = code, public
        out = " ".join(capsys.readouterr().out.split())  # lines are wrapped
        assert ("training diverged" in out) == (name == "lost")
        assert "diverged" not in out.partition("a simulation: ")[2]
    assert ends["good"] == ends["lost"]
    assert ends["good"][0] == 0
    assert cli.main([*tiny, "privacy=none", "algorithm.local.lr=1e38", "hydra.run.dir=open"]) == 1


def test_what_is_said_of_public_is_one_story(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is said to be covered by an epsilon that is infinite, or where nothing is released."""
    tiny = [*TINY, "rounds=1", "eval_every=1", "finetune=none", "baselines=[]"]
    stories = {
        "privacy=none": ("not private, to be kept like private/", False),
        "privacy.epsilon=inf": ("not private, to be kept like private/", False),
        "algorithm=local": ("nothing is released", False),
        "privacy.source=seeded": (
            "a simulation, not private; to publish, run with privacy.source=secure",
            True,
        ),
        "privacy.source=secure": ("may be published, at epsilon = 4", True),
    }
    for word, (story, spent) in stories.items():
        train_one(resolve(compose((*tiny, word))), tmp_path / word, Process(), command=[])
        out = capsys.readouterr().out
        assert story in out
        if "not private" in story or not spent:
            assert "may be published" not in out
            assert "covered by the epsilon above" not in out


def test_without_a_terminal_evaluations_are_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One about every ten seconds and the last; and metrics.csv grows during the run."""
    from fedmtl.trainer import evaluator

    monkeypatch.setattr(evaluator, "_WRITE_SECONDS", 0.0)
    monkeypatch.setattr(callbacks, "_LINE_SECONDS", 0.0)
    seen: list[int] = []
    evaluate = evaluator.Evaluator.evaluate

    def keep(self: Any, *args: Any) -> Any:
        found = evaluate(self, *args)
        seen.append(len((tmp_path / "run/private/metrics.csv").read_text().splitlines()) - 1)
        return found

    monkeypatch.setattr(evaluator.Evaluator, "evaluate", keep)
    config = resolve(compose((*TINY[:-1], "finetune=none", "baselines=[]")))
    train_one(config, tmp_path / "run", Process(), command=[])
    shown = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in shown if "/4" in line] == ["fedavg 2/4", "fedavg 4/4"]
    assert all("accuracy 0." in line and "epsilon" in line for line in shown if "/4" in line)
    assert seen == [1, 2]


def test_paths_are_absolute_in_what_a_resume_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "data": {"root": "faces", "images": "there", "cache": None, "size": 84},
        "algorithm": {"clusters": "groups.csv", "graph": {"path": "edges.csv"}},
        "schedule": {"latency": {"source": "times.csv"}},
        "privacy": {"source": "secure"},
    }
    assert with_absolute_paths(config) == {
        "data": {
            "root": f"{tmp_path}/faces",
            "images": f"{tmp_path}/there",
            "cache": None,
            "size": 84,
        },
        "algorithm": {
            "clusters": f"{tmp_path}/groups.csv",
            "graph": {"path": f"{tmp_path}/edges.csv"},
        },
        "schedule": {"latency": {"source": f"{tmp_path}/times.csv"}},
        "privacy": {"source": "secure"},
    }
    several = {"data": {}, "algorithm": {"clusters": 3}}
    assert with_absolute_paths(several) == several


def test_the_seed_is_kept_private(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    (folder,) = finished[0].glob("outputs/2*/*")
    stored = (folder / "private" / "config.yaml").read_text()
    assert stored.startswith("# fedmtl data.clients=30 ")
    assert yaml.safe_load(stored)["seed"] == 0
    public = [
        file.read_text(errors="replace")
        for file in (folder / "public").iterdir()
        if file.suffix != ".png"
    ]
    assert not any('"seed"' in text or "seed:" in text for text in public)


HOSTILE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
def read(path):
    Path(path).touch()
"""


def test_a_folder_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resume and adapt make what the package has, whatever the stored settings name, and what the user trusts."""
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    config = resolve(compose(tuple(TINY)))
    mark = str(tmp_path / "touched")
    path = {"_target_": "pathlib.Path", "_args_": [mark]}
    targets = [
        {"_target_": "pathlib.Path.touch", "self": path},
        {"_target_": "hostile.read", "path": mark},
    ]

    def refused(words: list[str], key: str) -> None:
        code = cli.main(words)
        assert not (tmp_path / "touched").exists()
        assert not (tmp_path / "ran").exists()
        assert code == 2
        assert f"error: {key}._target_ is " in (said := capsys.readouterr().err)
        assert (
            "which a file may not name; accepted: settings, readers, networks and loggers of fedmtl"
            in said
        )

    for number, target in enumerate(targets):
        for group in ("data", "algorithm", "finetune", "logger"):
            private = tmp_path / f"{group}-{number}" / "private"
            private.mkdir(parents=True)
            (private / "result.json").write_text("{}")
            (private / "config.yaml").write_text(yaml.safe_dump(config | {group: target}))
            place = group if number else f"{group}.self"
            refused(["resume", str(private.parent)], place)
            if group in ("data", "algorithm"):
                refused(["adapt", str(private.parent), "--out", str(tmp_path / "new")], place)
    searched = {
        "candidates": {"a": config | {"model": targets[1]}, "b": config},
        "mean": 4.0,
        "shape": 1.0,
    }
    private = tmp_path / "search" / "private"
    private.mkdir(parents=True)
    (private / "config.yaml").write_text(yaml.safe_dump({"search": searched}))
    refused(["resume", str(private.parent)], "model")
    assert cli.main(["resume", str(tmp_path / "data-1"), "--trust", "hostile"]) == 2
    assert (tmp_path / "touched").exists()
    capsys.readouterr()
    assert cli.main(["resume", str(tmp_path / "data-1"), "--trust"]) == 2
    assert "--trust is '', which cannot be imported (Empty module name)" in capsys.readouterr().err


def test_a_sweep_imports_nothing_that_its_folder_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra imports what a search path names; a resume composes nothing."""
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    (tmp_path / "0/private").mkdir(parents=True)
    words = [*TINY, "seed=1", "hydra.searchpath=[pkg://hostile]"]
    stored = yaml.safe_dump(resolve(compose(tuple(TINY))) | {"baselines": [], "finetune": None})
    (tmp_path / "0/private/config.yaml").write_text(f"# fedmtl {' '.join(words)}\n{stored}")
    assert cli.main(["resume", str(tmp_path)]) == 0
    assert not (tmp_path / "ran").exists()


def test_a_finished_run_can_be_reported(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    here, _ = finished
    done = command("report", "outputs", cwd=here)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("PMTL", "Local", "FedAvg", "digits, 30 clients"))
    assert (here / "outputs" / "report" / "privacy_utility.png").stat().st_size > 5_000


def test_a_sweep_runs_every_combination_and_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *TINY,
        "-m",
        "rounds=2",
        "baselines=[]",
        "algorithm=pmtl,local",
        "schedule.cohort=6,31",
    ]
    begun: list[list[str]] = []

    def noted(folder: Path, run: list[str], config: dict) -> None:
        begun.append(list(run))
        write_config(folder, run, config)

    monkeypatch.setattr("fedmtl.cli.run.write_config", noted)
    done = command(*words, "hydra.sweep.dir=multirun/a/b", cwd=tmp_path)
    assert begun
    assert not any("hydra" in word for run in begun for word in run)
    assert done.returncode == 2
    assert done.stderr.count("fedmtl: error: ") == 2  # 31 of 30 clients, for both methods
    assert done.stdout.splitlines()[-1].startswith("not private: choosing among runs")
    assert "Traceback" not in done.stderr
    results = sorted(tmp_path.glob("multirun/*/*/*/private/result.json"))
    found = [json.loads(file.read_text())["algorithm"] for file in results]
    assert found == ["pmtl", "local"]
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:-2]] == [
        "[1/4] schedule.cohort=6 algorithm=pmtl",
        "[2/4] schedule.cohort=6 algorithm=local",
    ]
    assert "error: [3/4] schedule.cohort=31 algorithm=pmtl: schedule.cohort is 31" in done.stderr

    # the last job was interrupted before it began, the second while it trained
    (sweep,) = tmp_path.glob("multirun/*/*")
    for path in sweep.glob("3/*/*"):
        if path.name != "config.yaml":
            path.unlink()
    for name in ("private/result.json", "private/checkpoint.safetensors"):
        (sweep / "1" / name).unlink()
    before = {
        path: path.read_bytes() for path in sorted((sweep / "0").rglob("*")) if path.is_file()
    }
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert cli.main(["report", str(sweep)]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"fedmtl: left out: {sweep}/1: unfinished: continue it with fedmtl resume {sweep}/1",
        f"fedmtl: left out: {sweep}/2: failed: schedule.cohort is 31, but there are only 30 clients; it "
        "must be at most the population.",
        f"fedmtl: left out: {sweep}/3: unfinished: continue it with fedmtl resume {sweep}/3",
    ]
    assert cli.main(["resume", str(sweep), "rounds=3"]) == 2
    assert "rounds=3 is not taken here" in capsys.readouterr().err
    assert cli.main(["resume", str(sweep)]) == 2
    again = capsys.readouterr()
    assert f"[1/4] schedule.cohort=6 algorithm=pmtl: finished before, {sweep}/0" in again.out
    assert "[2/4] schedule.cohort=6 algorithm=local: accuracy " in again.out
    assert again.err.count("fedmtl: error: ") == 2
    assert before == {
        path: path.read_bytes() for path in sorted((sweep / "0").rglob("*")) if path.is_file()
    }
    assert json.loads((sweep / "1/private/result.json").read_text())["algorithm"] == "local"
    assert (sweep / "3/private/error.txt").read_text().startswith("schedule.cohort is 31")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["algorithm=fedavg,pmtl,local"],
            "finetuned after training: FedAvg; not: PMTL. Their scores do not compare",
        ),
        (["algorithm=fedavg,pmtl", "finetune=kl"], ""),
        (["algorithm=fedavg,pmtl", "finetune=none"], ""),
        (["algorithm=pmtl", "finetune=none,kl"], ""),
        (["algorithm=fedavg,local"], ""),
    ],
)
def test_a_sweep_says_which_methods_are_not_finetuned(words: list[str], said: str) -> None:
    text = unlike([settings(resolve(compose(run))) for run in combinations(read(words))])
    assert text.startswith(said)
    assert bool(text) == bool(said)


def test_an_interrupted_run_says_how_to_go_on_and_resumes_to_the_same_result(
    tmp_path: Path,
) -> None:
    words = ["data.clients=30", "schedule.cohort=6", "rounds=60", "baselines=[]", "eval_every=30",
             "finetune=none", "checkpoint_every=1", "progress=false", "hydra.run.dir=run"]  # fmt: skip
    running = copies.begun(partial(cli.main, words), tmp_path)
    checkpoint = tmp_path / "run" / "private" / "checkpoint.safetensors"
    deadline = time.monotonic() + 90
    while not checkpoint.exists() and time.monotonic() < deadline and running.is_alive():
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGINT)
    running.join(60)
    said = (tmp_path / copies.ERR).read_text()
    assert running.exitcode == 130, said
    assert "fedmtl resume run" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "private" / "result.json").exists()
    resumed = command("resume", "run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    whole = command(*words[:-1], "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    shared = [
        (tmp_path / name / "public" / "model.safetensors").read_bytes() for name in ("run", "whole")
    ]
    assert shared[0] == shared[1]


def test_a_full_disk_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, "baselines=[]", "finetune=none", "checkpoint_every=1"]
    checkpoints = iter([True, True, False])

    def full(path: Path, content: bytes) -> None:
        if path.name == "checkpoint.safetensors" and not next(checkpoints):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_bytes(path, content)

    with monkeypatch.context() as patch:
        patch.setattr("fedmtl.trainer.tensor_files.write_bytes", full)
        assert cli.main([*words, f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    shown = capsys.readouterr().err
    assert "No space left on device" in shown
    assert f"fedmtl resume {tmp_path / 'run'}" in shown
    assert cli.main(["resume", str(tmp_path / "run")]) == 0
    assert cli.main([*words, f"hydra.run.dir={tmp_path / 'whole'}"]) == 0
    shared = [
        (tmp_path / name / "public/model.safetensors").read_bytes() for name in ("run", "whole")
    ]
    assert shared[0] == shared[1]


def test_a_folder_is_never_overwritten(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    here, _ = finished
    (folder,) = here.glob("outputs/2*/*")
    before = (folder / "private" / "result.json").read_bytes()
    done = command(*TINY, "seed=1", f"hydra.run.dir={folder.relative_to(here)}", cwd=here)
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert (folder / "private" / "result.json").read_bytes() == before
    assert yaml.safe_load((folder / "private" / "config.yaml").read_text())["seed"] == 0


def test_a_sweep_overwrites_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", *TINY, "baselines=[]", "finetune=none", f"hydra.sweep.dir={tmp_path}"]
    assert cli.main([*words, "seed=0,1"]) == 0
    (tmp_path / "0/private/result.json").unlink()
    before = {path: path.read_bytes() for path in tmp_path.glob("*/private/*")}
    assert cli.main([*words, "seed=2,3"]) == 2
    assert capsys.readouterr().err.count("already holds a run") == 2
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*/private/*")}


def test_a_folder_does_not_say_where_else_a_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers of private data go into the folder of the run, or where the user says on this command line."""
    monkeypatch.chdir(tmp_path)
    made: list[str] = []
    monkeypatch.setattr(callbacks, "TensorBoard", _logger(made, "TensorBoard"))
    monkeypatch.setattr(callbacks, "MLflow", _logger(made, "MLflow"))
    config = resolve(compose((*TINY, "logger=mlflow", "baselines=[]", "finetune=none")))
    folder = tmp_path / "run"
    (folder / "private").mkdir(parents=True)
    (folder / "private" / "elsewhere").symlink_to(tmp_path)
    stored = folder / "private" / "config.yaml"
    board = {"_target_": "fedmtl.trainer.callbacks.TensorBoard"}
    hostile = {
        "tracking_uri": config["logger"] | {"tracking_uri": "http://example.org"},
        "folder": board | {"folder": str(tmp_path / "outside")},
        "folder ": board | {"folder": "../outside"},
        "folder  ": board | {"folder": "private/elsewhere"},
        "folder   ": board | {"folder": ["a", "b"]},
    }
    for key, logger in hostile.items():
        stored.write_text(yaml.safe_dump(config | {"logger": logger}))
        assert cli.main(["resume", str(folder)]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"logger.{key.strip()} of {stored} is" in said
        assert f"fedmtl resume {folder} logger.{key.strip()}=" in said
        assert made == []
    stored.write_text("rounds: 1\n")  # cut off
    for command in ("resume", "adapt"):
        assert cli.main([command, str(folder)]) == 2
        assert "config.yaml has no 'algorithm', and was cut off" in " ".join(
            capsys.readouterr().err.split()
        )
    for group in ("data", "model", "finetune"):  # of which none is a logger
        stored.write_text(
            yaml.safe_dump(config | {"logger": {}, group: board | {"folder": str(tmp_path)}})
        )
        assert cli.main(["resume", str(folder)]) == 2
        assert f"{group}._target_ is" in capsys.readouterr().err
        assert made == []
    stored.write_text(yaml.safe_dump(config | {"logger": hostile["tracking_uri"]}))
    assert cli.main(["resume", str(folder), "rounds=3"]) == 2
    assert (
        "rounds=3 is not taken here: settings stay as they are stored, except logger=..."
        in capsys.readouterr().err
    )
    for words, name in (
        (["logger.tracking_uri=sqlite:///mine.db"], "MLflow"),
        (["logger=tensorboard"], "TensorBoard"),
    ):
        assert cli.main(["resume", str(folder), *words]) == 0
        assert made == [name]
        made.clear()
    assert cli.main(["resume", str(folder), "logger=none"]) == 0
    assert made == []
    searched = {
        "candidates": {"a": config | {"logger": hostile["folder"]}, "b": config},
        "mean": 4.0,
        "shape": 1.0,
    }
    stored.write_text(yaml.safe_dump({"search": searched}))
    cli.main(["resume", str(folder)])
    assert made == []


def _logger(made: list[str], name: str) -> type:
    def init(self: object, **_: object) -> None:
        made.append(name)

    return type(name, (callbacks.Callback,), {"__init__": init, "__module__": callbacks.__name__})


def test_a_baseline_of_a_trusted_module(tmp_path, monkeypatch, capsys):
    source = "from fedmtl import FedAvg\nclass Mine(FedAvg):\n    name = title = 'mine'\n"
    (tmp_path / "trusted_baseline.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    words = [
        "data.clients=5",
        "rounds=1",
        "schedule=full",
        f"hydra.run.dir={tmp_path / 'run'}",
        "baselines=[mine]",
    ]
    assert cli.main(words) == 2
    assert "baselines has 'mine'" in capsys.readouterr().err
    assert cli.main([*words, "--trust", "trusted_baseline"]) == 0
    assert "\n  mine " in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    ["Größe", "Net income (EUR)", "driver's age", "#id", "A & B", "é, ä", "${oc.env:HOME}", "a\\"],
)
def test_files_and_columns_may_have_any_name(name, tmp_path, capsys, monkeypatch) -> None:
    """What Hydra's grammar has no word for is a text as it stands; a file that exists is no reference."""
    monkeypatch.chdir(tmp_path)
    target = name
    if "${" in name or "\\" in name:  # a reference in a setting that is typed is one
        target = "days"
    with open(f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["ward", "age", target])
        table.writerows([f"w{i % 9}", i % 7, (i * 37 % 11) / 2] for i in range(90))
    assert cli.main(["check", f"{name}.csv", "client=ward", f"target={target}"]) == 0
    printed = capsys.readouterr().out
    assert f"{name}.csv: 9 clients" in printed
    assert f"  {target}: 0 to 5\n" in printed


def test_a_table_by_its_path_is_what_its_settings_say(tmp_path, capsys, monkeypatch) -> None:
    rows = [f"w{i % 9},{i % 7},{(i * 37 % 11) / 2}" for i in range(180)]
    (tmp_path / "my visits.csv").write_text("\n".join(["ward,age,days", *rows]))
    monkeypatch.chdir(tmp_path)
    long = [
        "data=table",
        "data.path=my visits.csv",
        "data.client=ward",
        "data.target=days",
        "data.classes=null",
    ]
    printed = []
    for words in (
        long,
        ["my visits.csv", "client=ward", "target=days", "classes=null"],
        ["target=days", "client=ward", "data=my visits.csv", "data.classes=null"],
    ):
        assert cli.main(["check", *words, "privacy.epsilon=3"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[1] == printed[2]
    assert printed[0].splitlines()[-4:] == printed[1].splitlines()[-4:]
    words = [
        "my visits.csv",
        "client=ward",
        "target=days",
        "classes=null",
        "bounds={age: [0, 7], days: [0, 6]}",
    ]
    assert cli.main([*words, "rounds=1", "baselines=[local]", "hydra.run.dir=run"]) == 0
    assert "proximal_point on my visits.csv: 9 clients, 1 round\n" in capsys.readouterr().out
    assert cli.main(["verify", "run/public"]) == 2
    assert "run/public is a part of a run; fedmtl verify run checks it." in capsys.readouterr().err
    assert cli.main(["check", "my visits.csv"]) == 2
    assert "the columns are 'ward', 'age', 'days'" in capsys.readouterr().err
