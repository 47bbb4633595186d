"""Files of others: an experiment that was received opens no file, no connection and no module, and reads no secret."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

from fedmtl import cli
from fedmtl._yaml import read_yaml
from fedmtl.cli.config import compose
from fedmtl.cli.names import EXTRA
from fedmtl.cli.received import resolvers
from fedmtl.errors import ConfigError, DataError

TINY = [
    "data.clients=10",
    "schedule=full",
    "rounds=1",
    "baselines=[]",
    "progress=false",
    "hydra.run.dir=run",
]
GLOBAL = "# @package _global_\n"
LOGGING = """\
version: 1
handlers:
  evil:
    class: logging.FileHandler
    filename: victim
    mode: w
root:
  handlers: [evil]
"""
IN_HYDRA = "hydra:\n  job_logging:\n" + indent(LOGGING, "    ")
SENT = "class: logging.handlers.SocketHandler\n        host: 127.0.0.1\n        port: PORT\n"
SOCKET = IN_HYDRA.replace(
    "class: logging.FileHandler\n        filename: victim\n        mode: w\n", SENT
)
FORMATTER = "version: 1\nformatters:\n  evil:\n    (): pathlib.Path.touch\n    self: x\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n"
    for last, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CALLED = "hydra:\n  job_logging:\n" + indent(FORMATTER, "    ")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file that nothing may change, a module that nothing may import, and a secret."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "of the environment")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "module").mkdir()
    (tmp_path / "module/hostile.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "module"))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    return tmp_path


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        yield server


def write(files: dict[str, str], port: int = 0) -> None:
    for name, text in files.items():
        path = Path("mine", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("PORT", str(port)))


MLFLOW = "defaults:\n  - override /logger: mlflow\nlogger:\n  tracking_uri: http://127.0.0.1:PORT\n"
PRIMARY = "defaults:\n  - config\n  - _self_\n"
EXPERIMENT = ["experiment=evil"]
ATTACKS = {
    "a log file": ({"experiment/evil.yaml": GLOBAL + IN_HYDRA}, EXPERIMENT, "hydra.job_logging"),
    "a sender of logs": ({"experiment/evil.yaml": GLOBAL + SOCKET}, EXPERIMENT, "hydra.job_logging"),
    "a call": ({"experiment/evil.yaml": GLOBAL + CALLED}, EXPERIMENT, "hydra.job_logging"),
    "logs of Hydra": (
        {"experiment/evil.yaml": GLOBAL + IN_HYDRA.replace("job_", "hydra_")},
        EXPERIMENT,
        "hydra.hydra_logging",
    ),
    "a package": (
        {"experiment/evil.yaml": f"# @package hydra.job_logging\n{LOGGING}"},
        EXPERIMENT,
        "the package hydra.job_logging",
    ),
    "a global package": (
        {"experiment/evil.yaml": f"# @package _global_.hydra.job_logging\n{LOGGING}"},
        EXPERIMENT,
        "the package _global_.hydra.job_logging",
    ),
    "a package of the list": (
        {
            "experiment/evil.yaml": f"{GLOBAL}defaults:\n  - /experiment/more@hydra.job_logging: logs\n",
            "experiment/more/logs.yaml": LOGGING,
        },
        EXPERIMENT,
        "/experiment/more@hydra.job_logging: logs",
    ),
    "a file of the list": (
        {"experiment/evil.yaml": f"{GLOBAL}defaults:\n  - more@_global_.hydra\n", "experiment/more.yaml": LOGGING},
        EXPERIMENT,
        "more@_global_.hydra",
    ),
    "a group of Hydra": (
        {
            "experiment/evil.yaml": f"{GLOBAL}defaults:\n  - override /hydra/job_logging: evil\n",
            "hydra/job_logging/evil.yaml": LOGGING,
        },
        EXPERIMENT,
        "override /hydra/job_logging: evil",
    ),
    "a usual log file": (
        {"experiment/evil.yaml": f"{GLOBAL}defaults:\n  - override /hydra/job_logging: default\n"},
        EXPERIMENT,
        "override /hydra/job_logging: default",
    ),
    "an option that is typed": (
        {"hydra/job_logging/evil.yaml": LOGGING},
        ["hydra/job_logging=evil"],
        "an option of hydra/job_logging",
    ),
    "a few lines of a billion values": (
        {"experiment/evil.yaml": GLOBAL + LAUGHS},
        EXPERIMENT,
        "mine/experiment/evil.yaml cannot be read: it has more than 1,000,000 values",
    ),
    "a value in itself": (
        {"experiment/evil.yaml": f"{GLOBAL}device: &a [*a]\n"},
        EXPERIMENT,
        "mine/experiment/evil.yaml cannot be read: it has more than 1,000,000 values",
    ),
    "thousands of levels": (
        {"experiment/evil.yaml": f"{GLOBAL}device: {'[' * 3000}{']' * 3000}\n"},
        EXPERIMENT,
        "mine/experiment/evil.yaml cannot be read: it has more than 100 levels",
    ),
    "a launcher": (
        {"experiment/evil.yaml": f"{GLOBAL}defaults:\n  - override /hydra/launcher: basic\n"},
        EXPERIMENT,
        "override /hydra/launcher: basic",
    ),
    "callbacks": (
        {"experiment/evil.yaml": f"{GLOBAL}hydra:\n  callbacks:\n    a:\n      _target_: hostile.Callback\n"},
        EXPERIMENT,
        "hydra.callbacks",
    ),
    "a folder": ({"experiment/evil.yaml": f"{GLOBAL}hydra:\n  run:\n    dir: elsewhere\n"}, EXPERIMENT, "hydra.run"),
    "the environment": (
        {"experiment/evil.yaml": f"{GLOBAL}hydra:\n  job:\n    env_set:\n      PATH: x\n"},
        EXPERIMENT,
        "hydra.job",
    ),
    "a copy of the environment": (
        {"experiment/evil.yaml": f"{GLOBAL}hydra:\n  job:\n    env_copy: [SECRET]\n"},
        EXPERIMENT,
        "hydra.job",
    ),
    "files of the settings": (
        {"experiment/evil.yaml": f"{GLOBAL}hydra:\n  output_subdir: ../x\n"},
        EXPERIMENT,
        "hydra.output_subdir",
    ),
    "another place": ({"experiment/evil.yaml": f"{GLOBAL}hydra: ${{data}}\n"}, EXPERIMENT, "hydra,"),
    "the primary file": (
        {"config.yaml": f"defaults:\n  - data: digits\n  - _self_\n{IN_HYDRA}"},
        [],
        "hydra.job_logging",
    ),
    "another primary file": ({"job.yaml": PRIMARY + IN_HYDRA}, ["--config-name", "job"], "hydra.job_logging"),
    "a module": (
        {"job.yaml": f"{PRIMARY}hydra:\n  searchpath: ['pkg://hostile']\n"},
        ["--config-name", "job"],
        "hydra.searchpath",
    ),
    "a value of a sweep": (
        {"job.yaml": f"{PRIMARY}hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      hydra.job.name: x\n"},
        ["--config-name", "job"],
        "hydra.sweeper.params.hydra.job.name",
    ),
    "a value of a sweep, added": (
        {"job.yaml": f"{PRIMARY}hydra:\n  sweeper:\n    params:\n      +experiment@hydra: evil\n"},
        ["--config-name", "job", "-m"],
        "hydra.sweeper.params.+experiment@hydra",
    ),
    "a sweeper": (
        {"job.yaml": f"{PRIMARY}hydra:\n  sweeper:\n    _target_: hostile.Sweeper\n"},
        ["--config-name", "job", "-m"],
        "hydra.sweeper._target_",
    ),
    "a secret": (
        {"experiment/evil.yaml": GLOBAL + "data:\n  seed: ${oc.env:SECRET}\n"},
        EXPERIMENT,
        "not by the resolver oc.env",
    ),
    "a secret in a part": (
        {"experiment/evil.yaml": GLOBAL + "metrics: ['a${oc.env:SECRET,x}']\n"},
        EXPERIMENT,
        "not by the resolver oc.env",
    ),
    "a secret by a name": (
        {"experiment/evil.yaml": GLOBAL + "loss: oc.env\nseed: '${${loss}:SECRET}'\n"},
        EXPERIMENT,
        "not by the resolver ${loss}",
    ),
    "a secret that is put together": (
        {"experiment/evil.yaml": GLOBAL + "loss: '${oc.decode:${seed}}'\n"},
        EXPERIMENT,
        "not by the resolver oc.decode",
    ),
    "an expression": (
        {"experiment/evil.yaml": GLOBAL + "rounds: '${eval:1+\"2\"}'\n"},
        EXPERIMENT,
        "mine/experiment/evil.yaml has a text with '${' that is no reference to a setting, such as",
    ),
    "a mapping that is made": (
        {"data/evil.yaml": "seed: '${oc.create:${seed}}'\n"},
        ["data=evil"],
        "not by the resolver oc.create",
    ),
    "a class": (
        {"experiment/evil.yaml": GLOBAL + "logger:\n  _target_: hostile.Logger\n"},
        EXPERIMENT,
        "logger._target_ is 'hostile.Logger', which a file may not name",
    ),
    "a server": (
        {"experiment/evil.yaml": GLOBAL + MLFLOW},
        EXPERIMENT,
        "logger.tracking_uri is 'http://127.0.0.1:",
    ),
    "a folder of a logger": (
        {"logger/evil.yaml": "_target_: fedmtl.trainer.callbacks.TensorBoard\nfolder: ../elsewhere\n"},
        ["logger=evil"],
        "logger.folder is '../elsewhere' in a file",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "more than 1,000,000 values"),
        (f"a: {'[' * 200}{']' * 200}", "more than 100 levels"),
        ("a: &a {b: *a}", "more than 1,000,000 values"),
    ],
)
def test_stored_settings_have_an_end(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(DataError, match=rf"config\.yaml cannot be read: it has {said}"):
        read_yaml(tmp_path / "config.yaml")


SWEEP = ["-m", "seed=1,2", "hydra.sweep.dir=run"]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, []) for name in ATTACKS),
        *((name, SWEEP) for name in ("a log file", "a package", "a server")),
    ],
)
def test_a_received_file_is_refused_before_anything_happens(
    name: str,
    mode: list[str],
    here: Path,
    listener: socket.socket,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files, words, said = ATTACKS[name]
    write(files, listener.getsockname()[1])
    assert cli.main(["--config-dir", "mine", *TINY, *mode, *words]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown
    assert shown.count("fedmtl: error: ") == 1
    assert (here / "victim").read_text() == "mine"
    assert not (here / "module/ran").exists()
    assert {path.name for path in here.iterdir()} == {"victim", "module", "mine"}
    with pytest.raises(TimeoutError):
        listener.accept()


@pytest.mark.parametrize("command", ["search", "audit", "check"])
def test_every_command_refuses_it(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write({"experiment/evil.yaml": GLOBAL + IN_HYDRA})
    words = ["experiment=evil", *(["seed=1,2"] if command == "search" else [])]
    assert cli.main([command, "--config-dir", "mine", *words]) == 2
    assert (
        "mine/experiment/evil.yaml sets hydra.job_logging, which is Hydra's own"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["hydra.searchpath=[pkg://hostile]"],
            "hydra.searchpath=[pkg://hostile] is not taken; --config-dir DIR is",
        ),
        (
            ["-m", "seed=1,2", "hydra.searchpath=[mine]"],
            "--config-dir DIR is the folder with own groups",
        ),
        (
            ["--config-path", "mine"],
            "unknown option --config-path; own files are found with --config-dir DIR",
        ),
        (
            ["--experimental-rerun", "config.pickle"],
            "unknown option --experimental-rerun; fedmtl resume FOLDER continues a run",
        ),
    ],
)
def test_no_file_comes_from_elsewhere(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*TINY, *words]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "module/ran").exists()


def test_what_is_typed_or_trusted_is_done(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = (
        GLOBAL
        + "device: ${oc.env:NOTHING,cpu}\nhydra:\n  run:\n    dir: chosen\n  job:\n    env_set: {A: b}\n"
    )
    write({"experiment/ours.yaml": experiment})
    words = ["--config-dir", "mine", "experiment=ours", *TINY[:-1]]
    assert cli.main(words) == 2
    assert cli.main(["--trust", "hydra", *words]) == 0, capsys.readouterr().err
    assert (here / "chosen/private/result.json").is_file()
    typed = ["device=${oc.env:NOTHING,cpu}", "+hydra.job.env_set.A=b"]
    assert cli.main([*TINY, *typed]) == 0, capsys.readouterr().err
    assert "device: cpu" in (here / "run/private/config.yaml").read_text()


def test_what_a_file_may_set_of_hydra(here: Path) -> None:
    quiet = "  - override hydra/job_logging: none\n  - override hydra/hydra_logging: disabled\n"
    own = "hydra:\n  output_subdir: null\n  mode: MULTIRUN\n"
    own += "  sweeper:\n    params: {seed: '1,2'}\n    max_batch_size: 2\n"
    write({"job.yaml": f"{PRIMARY}{quiet}rounds: 3\nloss: ${{oc.select:model.loss,auto}}\n{own}"})
    token = EXTRA.set(Path("mine"))
    try:
        assert compose([], "job").rounds == 3
        write({"job.yaml": f"{PRIMARY}hydra:\n  mode: ${{data.mode}}\n"})
        with pytest.raises(ConfigError, match=r"sets hydra\.mode"):
            compose([], "job")
    finally:
        EXTRA.reset(token)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("${a.b}", []),
        ("${.a}", []),
        ("plain oc.env:X", []),
        (r"\${oc.env:X}", []),
        (r"\\${oc.env:X}", ["oc.env"]),
        ("${oc.env:X}", ["oc.env"]),
        ("${a.${oc.env:X}}", ["oc.env"]),
        ("${oc.select:a,${oc.env:X}}", ["oc.env"]),
        ("${oc.select:a,'${oc.env:X}'}", ["oc.env"]),
        ("${now:%Y}", []),
        ("a ${b} ${oc.decode:x} ${oc.create:y}", ["oc.decode", "oc.create"]),
        ("${${a}:X}", ["${a}"]),
        ("${oc.${a}:X}", ["oc.${a}"]),
    ],
)
def test_resolvers_are_found(text: str, names: list[str]) -> None:
    assert sorted(resolvers(text)) == sorted(names)
