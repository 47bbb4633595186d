"""The wheel runs elsewhere: built, installed into a fresh environment, started from another folder."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*words: str | Path, cwd: Path, **env: str) -> str:
    """Run a command without this process's import path, but with its compiled modules; returns what it printed."""
    cache = "PYTHONPYCACHEPREFIX"
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HYDRA"))
    }
    inherited |= {cache: os.environ[cache]} if cache in os.environ else {}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd, env=inherited | env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("fedmtl-*.whl")
    return built


def test_the_wheel_holds_the_package_and_its_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fedmtl").rglob("*.py")}
    configs = {
        f"fedmtl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert modules <= names
    assert configs <= names
    assert "fedmtl/configs/config.yaml" in configs
    assert {"fedmtl/py.typed", "fedmtl/__init__.pyi", "fedmtl/cli/arguments.json"} <= names
    assert {name.split("/")[0] for name in names} == {
        "fedmtl",
        f"{wheel.name.rsplit('-py3', 1)[0]}.dist-info",
    }


def test_an_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    # The first environment's libraries without its .pth files: an editable install there stays invisible.
    (site / "libraries.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    install = ["install", "--no-deps", "--no-index", "--force-reinstall"]
    run(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = run(
        python,
        "-c",
        "import fedmtl, fedmtl.cli.names as c; print(fedmtl.__file__, c.config_folder())",
        cwd=elsewhere,
    )
    assert [Path(path).is_relative_to(site) for path in found.split()] == [True, True]
    tiny = [
        "data.clients=20",
        "schedule.cohort=5",
        "rounds=2",
        "baselines=[local]",
        "progress=false",
    ]
    printed = run(tmp_path / "env" / "bin" / "fedmtl", *tiny, cwd=elsewhere, OMP_NUM_THREADS="1")
    (result,) = elsewhere.glob("outputs/*/*/private/result.json")
    assert json.loads(result.read_text())["algorithm"] == "fedavg"
    assert "Saved in outputs" in printed
    assert (result.parent / "clients.png").stat().st_size > 5_000
