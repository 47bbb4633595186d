"""The core runs with its five packages alone; a package of an extra that is missing is one sentence."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from fedmtl import _extras

ROOT = Path(__file__).parents[1]
CORE = ("torch", "numpy", "scipy", "dp-accounting", "safetensors")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# Refuses all packages but those that the named distributions and their requirements install.
ONLY = """
import re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def needed(names):
    found, waiting = set(), list(names)
    while waiting:
        name = re.sub("[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # on other systems
            continue
        waiting += [re.match(r"[\\w.-]+", line)[0] for line in lines if "extra ==" not in line]
    return found

class Only:
    allowed = needed(sys.argv[1].split(","))
    owners = {
        module: {re.sub("[-_.]+", "-", name).lower() for name in names}
        for module, names in packages_distributions().items()
    }

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        owners = self.owners.get(first)
        if first != "fedmtl" and owners is not None and not owners & self.allowed:
            return None  # as where it is not installed
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Only(finder) for finder in sys.meta_path]
"""

RUNS = """
import logging, torch
from fedmtl import *

logging.basicConfig(level="WARNING")
generator = torch.Generator().manual_seed(0)
rows = torch.randn(8, 12, 3, generator=generator) / 4
data = FederatedDataset.from_tensors(
    {f"c{i}": (x, torch.arange(12) % 2) for i, x in enumerate(rows)}, classes=2
)
client = ClientPrivacy(clip_norm=1.0, epsilon=4.0, delta=1e-2)
record = RecordPrivacy(clip_norm=1.0, epsilon=5.0, delta=1e-2)
local = LocalSGD(lr=0.1)
poisson = PoissonSampling(cohort=4)
clocks = PoissonClocks(per_client=3)
runs = {
    "fedavg": (FedAvg(local=local), poisson, client, models.softmax_regression(), 2),
    "pmtl": (PMTL(local=local), poisson, client, models.mlp(hidden=4), 2),
    "async": (AsyncLearner(reg=0.01), clocks, record, models.logistic_regression(), 24),
}
for name, (algorithm, schedule, privacy, model, rounds) in runs.items():
    folder = f"{sys.argv[2]}/{name}"
    finetune = None if name == "async" else Finetune(kind="vanilla", local=local)
    settings = dict(
        data=data, algorithm=algorithm, schedule=schedule, privacy=privacy, model=model,
        finetune=finetune, folder=folder, rounds=rounds,
    )
    result = Trainer(**settings).fit()
    assert 0 < result.epsilon <= 5, result.epsilon
    loaded = Result.load(folder)
    assert loaded.personal_accuracy == result.personal_accuracy
    found = loaded.model_for("c1").state_dict()
    for key, value in result.model_for("c1").state_dict().items():
        assert torch.allclose(found[key].double(), value.double()), (name, key)
"""

# what a user calls, by the extra that it needs
CALLS = {
    "cli": ["import fedmtl.cli"],
    "report": ["fedmtl.report.report([sys.argv[2]])"],
    "data": [
        "fedmtl.load_data('table', path=sys.argv[2] + '/x.csv', client='a', target='b')",
        "fedmtl.FederatedDataset.from_columns({}, client='a', target='b', features='c', classes=2)",
        "from fedmtl.data.readers.pictures import decode; decode(b'', 'x.png')",
        "from fedmtl.graphs import knn_cosine; knn_cosine(np.eye(3), 1, ids=('a', 'b', 'c'))",
        "fedmtl.Result.load(sys.argv[2] + '/fedavg').to_frame()",
        "from fedmtl.data.readers.table_files import _parquet_names; _parquet_names('x.parquet')",
    ],
    "models": [
        "fedmtl.models.fix(torch.nn.Sequential(torch.nn.LSTM(2, 2)))",
        "fedmtl.models.torchvision_model(name='resnet18')(spec)",
    ],
    "h5": ["fedmtl.load_data('femnist', root=sys.argv[2] + '/x.h5')"],
    "export": ["from fedmtl.trainer.export import check_path; check_path(Path('x.onnx'))"],
    "flower": ["import fedmtl.flower"],
    "secure": ["import fedmtl.secure.member"],
    "tensorboard": ["from fedmtl.trainer.callbacks import TensorBoard; TensorBoard(sys.argv[2])"],
    "mlflow": ["from fedmtl.trainer.callbacks import MLflow; MLflow(sys.argv[2])"],
}
REFUSALS = """
import json, traceback, torch, fedmtl, fedmtl.report, numpy as np
from pathlib import Path
from fedmtl.__main__ import main

spec = fedmtl.data.DataSpec((3, 32, 32), 2, 4)
Path(sys.argv[2], "x.h5").touch()
Path(sys.argv[2], "x.csv").write_text("a,b,c\\n" + "1,2,3\\n" * 9)
found = {}
for call in json.loads(sys.argv[3]):
    try:
        exec(call)
        found[call] = "nothing"
    except fedmtl.errors.MissingExtra as error:
        found[call] = str(error)
    except Exception:
        found[call] = traceback.format_exc()
print(json.dumps([found, main()]))
"""


def ran(program: str, *words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", ONLY + program, ",".join(CORE), *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_core_runs_with_its_five_packages_and_the_rest_is_refused_in_a_sentence(
    tmp_path: Path,
) -> None:
    calls = [call for each in CALLS.values() for call in each]
    done = ran(RUNS + REFUSALS, tmp_path, json.dumps(calls))
    assert done.returncode == 0, done.stderr
    found, code = json.loads(done.stdout.splitlines()[-1])
    line = r'.* needs? the package \w+, which is not installed: pip install "fedmtl\[(\w+)\]"\.'
    named_extras = {call: re.sub(line, r"\1", text) for call, text in found.items()}
    assert named_extras == {call: extra for extra, each in CALLS.items() for call in each}
    assert code == 2
    assert done.stderr.splitlines()[-1] == f"error: {found['import fedmtl.cli']}"
    # runs are whole without figures, and say so
    assert done.stderr.count("Figures need the package matplotlib") == 3
    assert sorted(CALLS) == sorted({extra for extra, _ in _extras._NEEDED.values()})


def test_the_core_is_the_five_packages() -> None:
    assert [named(one) for one in PROJECT["dependencies"]] == list(CORE)


def test_every_package_of_an_extra_is_declared_there() -> None:
    owners = packages_distributions() | {"tensorboard": ["tensorboard"]}
    declared = {extra: {named(one) for one in EXTRAS[extra]} for extra in EXTRAS}
    for package, (extra, _) in _extras._NEEDED.items():
        names = {named(one) for one in owners.get(package, [package])}
        assert names & declared[extra], f"{package} is not in the extra {extra}"


def test_a_package_of_an_extra_is_imported_where_its_absence_is_told() -> None:
    """In a block of ``extras()``, by ``fedmtl/_extras.py``, for type checkers, or in a folder that is such a block."""
    owners = packages_distributions()
    core = {package for package, names in owners.items() if {named(n) for n in names} & set(CORE)}
    free = sys.stdlib_module_names | core | {"fedmtl", "attr"}  # attrs comes with dp-accounting
    found = []
    for file in (ROOT / "fedmtl").rglob("*.py"):
        place = file.relative_to(ROOT / "fedmtl")
        if place.parts[0] in ("cli", "flower", "_extras.py"):
            continue
        tree = ast.parse(file.read_text())
        told = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, (ast.With, ast.If))
            and {"extras()", "TYPE_CHECKING"} & {ast.unparse(part) for part in heads(node)}
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if node in told or not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level else [node.module or ""]
            found += [f"{place}: {n}" for n in names if n.partition(".")[0] not in free]
    assert found == []


def heads(node: ast.With | ast.If) -> list[ast.expr]:
    """The expressions that a block begins with."""
    if isinstance(node, ast.If):
        return [node.test]
    return [item.context_expr for item in node.items]


def named(requirement: str) -> str:
    """The normal form of a requirement's name."""
    return re.sub("[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_the_page_of_installation_has_the_declared_packages() -> None:
    page = (ROOT / "docs/pages/install.md").read_text()
    rows = dict(re.findall(r"^\| `?(\w+)`? \| ([^|]+) \|", page, flags=re.MULTILINE))
    assert rows.pop("extra") == "packages"
    declared = {"none": PROJECT["dependencies"], **EXTRAS}
    assert sorted([*rows, "docs", "test"]) == sorted(declared)
    for extra, packages in rows.items():
        assert packages.split(", ") == [named(one) for one in declared[extra]], extra
