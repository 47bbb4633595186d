"""benchmarks/speed/gpu.py without a GPU: its contenders do the same work, and its page says what they measured."""

import contextlib
import importlib
import io
import json
import runpy
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn.utils import parameters_to_vector

from tests.simulated_device import NAME, simulated

SPEED = Path(__file__).resolve().parents[2] / "benchmarks/speed"
SMALL = {"clients": 8, "least": 6, "most": 9, "shape": [1, 28, 28], "classes": 4}
SETTINGS = {
    "lr": 0.1, "lam": 0.1, "batch": 4, "clip": 1.0, "noise_multiplier": 1e-6, "cohort": 4, "seed": 0,
    "data": SMALL,
}  # fmt: skip


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports modules of the benchmark, whose names are general: they are gone after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(SPEED), str(SPEED / "contenders"), *sys.path])
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(SPEED.parent)):
            del sys.modules[name]


def in_this_process(
    script: str, python: str, work: Path, threads: int, root: Path, *more: str, limit: float
) -> dict[str, Any]:
    """Runs a contender as the driver's function of processes does, without the start of one."""
    words = ["--work", str(work), "--threads", str(threads), "--root", str(root), *more]
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(said):
        patched.setattr(sys, "argv", [script, *words])
        runpy.run_path(str(SPEED / "contenders" / script), run_name="__main__")
    return json.loads(said.getvalue().splitlines()[-1])


def driven(gpu: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> tuple:
    """Returns the exit status, the lines and the page of the driver."""
    usual = ["--device", "cpu", "--small", "--repetitions", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *usual, "--out", str(folder), *words])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    lines = (folder / "gpu-runs.jsonl").read_text().splitlines()
    return stopped.value.code, [json.loads(line) for line in lines], (folder / "gpu.md").read_text()


def test_the_contenders_agree_and_the_page_has_them_all(load, monkeypatch, tmp_path) -> None:
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "run", in_this_process)
    keys = ["W2-fedprox", "W2", "W5"]
    status, lines, page = driven(gpu, monkeypatch, tmp_path, "--workloads", *keys)
    assert status == 0
    found = {(line["workload"], line["contender"]): line for line in lines}
    for key in keys:
        names = [side.name for side in gpu.sides_of(key, Namespace(**vars(gpu.parsed())))]
        assert {"fedmtl", "plain loop"} <= set(names)
        assert [name for k, name in found if k == key] == [*names, "facts"]
        losses = [found[key, name]["loss"] for name in names]
        assert max(losses) / min(losses) < 1.02
        assert found[key, "facts"]["difference"] == 0.0  # the device is the CPU itself
        assert found[key, "facts"]["moved"] > 1e-3
        assert found[key, "facts"]["operators"] > 100
        for name in names:
            assert f"| {key} | {name} " in page
    assert "no ratio" not in page
    for column in ("against fedmtl", "GPU MiB", "float64", "PyTorch operators a round (CPU)"):
        assert column in page


def test_what_fails_has_a_line_and_the_rest_goes_on(load, monkeypatch, tmp_path) -> None:
    gpu = load("gpu")

    def half_broken(script: str, *given: Any, **more: Any) -> dict[str, Any]:
        if script == "loop.py":
            raise SystemExit("loop.py failed:\nno memory is left")
        if script == "fedmtl_facts.py":
            raise subprocess.TimeoutExpired("facts", 1.0)
        return in_this_process(script, *given, **more)

    monkeypatch.setattr(gpu, "run", half_broken)
    status, lines, page = driven(gpu, monkeypatch, tmp_path, "--workloads", "W2")
    assert status == 1
    assert ["failed" in line for line in lines] == [False, True, True]
    assert "| W2 | fedmtl " in page
    assert "W2, plain loop, failed: no memory is left" in page
    assert "W2, facts, failed: Command 'facts' timed out after 1.0 seconds" in page


def test_the_command_of_a_gpu_is_complete(load, monkeypatch, tmp_path) -> None:
    """The contenders compute on the CPU in its place; the driver believes in a GPU."""
    gpu = load("gpu")
    asked = []

    def on_cpu(script: str, python: str, work: Path, threads: int, *more: Any, **options: Any):
        asked.append((script, threads, *more[1:]))
        return in_this_process(script, python, work, 1, *more, "--device", "cpu", **options)

    monkeypatch.setattr(gpu, "run", on_cpu)
    monkeypatch.setattr(gpu, "tests_said", lambda: "The tests that need a GPU pass.")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imagined GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90000)
    words = ["--device", "cuda", "--tests", "--seconds", "600", "--workloads", "W2-fedprox"]
    status, _, page = driven(gpu, monkeypatch, tmp_path, *words)
    assert status == 0
    assert page.startswith("Imagined GPU, CUDA ")
    assert "The tests that need a GPU pass." in page
    assert ("fedmtl_rounds.py", 1, "--device", "cuda") in asked
    assert ("fedmtl_rounds.py", 2, "--device", "cpu", "--rounds", "3") in asked
    assert ("fedmtl_facts.py", 1, "--device", "cuda") in asked
    assert "| W2-fedprox | fedmtl, CPU " in page
    assert "kernels launched a round" in page
    assert "no ratio" not in page


def test_nothing_begins_after_the_time(load, monkeypatch, tmp_path) -> None:
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "run", None)  # would raise TypeError
    monkeypatch.setattr(gpu, "prepare", None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--seconds", "-1"])
    assert list(gpu.turns(gpu.parsed(), tmp_path)) == []


def test_a_machine_without_a_gpu_is_told_so(load, monkeypatch, capsys) -> None:
    gpu = load("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "PyTorch sees no GPU; --device cpu --small tries it" in capsys.readouterr().err


def test_every_workload_has_its_contenders_on_a_gpu(load) -> None:
    workloads = load("gpu_workloads")
    given = Namespace(device="cuda", jax_python="python", pfl_python=None, root=None, small=True)
    for key in workloads.WORKLOADS:
        names = [side.name for side in workloads.sides_of(key, given)]
        expected = ["fedmtl", "JAX", "plain loop", "fedmtl, CPU"]
        if key in ("W1", "W2"):  # personal models
            expected.remove("JAX")
        assert names == expected
        assert workloads.settings_of(key, given)["data"]["clients"] == 12
    assert set(workloads.ABOUT) == set(workloads.WORKLOADS)


def test_launches_waits_and_copies_are_told_apart(load) -> None:
    # names that the profiler has of the driver's calls and of PyTorch's operators
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC", "cudaGraphLaunch"]
    names += ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"]
    names += ["cudaMemcpyAsync", "cudaMemcpy", "aten::mul", "aten::copy_", "cudaMalloc"]
    names += ["Memcpy HtoD (Pageable -> Device)", "void at::native::elementwise_kernel<...>"]
    names += ["ProfilerStep#1", "cudaEventRecord"]
    assert load("fedmtl_facts").counted(names) == {
        "kernels": 4,
        "waits": 3,
        "copies": 2,
        "operators": 2,
    }


def test_the_events_of_a_round_are_the_host_s_within_its_range(load) -> None:
    def event(name: str, start: int, end: int, device: DeviceType = DeviceType.CPU) -> Namespace:
        return Namespace(name=name, device_type=device, time_range=Namespace(start=start, end=end))

    events = [
        event("a round", 11, 90, DeviceType.CUDA),  # the device's copy of the range
        event("cudaDeviceSynchronize", 1, 9),
        event("a round", 10, 100),
        event("aten::mul", 20, 30),
        event("cudaLaunchKernel", 25, 26),
        event("a kernel", 40, 200, DeviceType.CUDA),
        event("cudaDeviceSynchronize", 101, 200),  # of the profiler
    ]
    found = list(load("fedmtl_facts").within(events, "a round"))
    assert found == ["a round", "aten::mul", "cudaLaunchKernel"]


def test_the_page_of_a_gpu_says_how_far_the_goals_are(load) -> None:
    tables = load("gpu_tables")
    line = {"version": "1", "threads": 1, "peak_mib": 1, "rounds": 3, "gpu_mib": 700, "loss": 4.0}
    line |= {"workload": "W1-fedprox", "cpu": [1.0]}
    found = [
        line | {"contender": "fedmtl", "device": "cuda", "wall": [0.02, 0.01, 0.03]},
        line | {"contender": "fedmtl, CPU", "wall": [0.5], "threads": 2, "loss": 5.0},
        line | {"contender": "JAX", "wall": [0.04]},
        line | {"contender": "plain loop", "wall": [0.2], "loss": 4.2},
        line | {"workload": "W2-fedprox", "contender": "fedmtl", "device": "cuda", "wall": [0.004]},
    ]
    facts = {"workload": "W1-fedprox", "contender": "facts", "difference": 3e-15, "moved": 0.1}
    found.append(facts | {"kernels": 400, "waits": 2, "copies": 9, "operators": 800})
    page = tables.page("a GPU", found, "cuda")
    # the median of three rounds is 0.02 s
    assert (
        "| W1-fedprox | fedmtl, CPU 1 | 0.50000 (0.50000 to 0.50000) | 750.0 s | 25.00 x |" in page
    )
    assert "| W1-fedprox | JAX 1 | 0.04000 (0.04000 to 0.04000) | 60.0 s | 2.00 x | 700 |" in page
    assert "no ratio: another loss" in page
    assert "W1-fedprox: 25.0 times as fast as on 2 cores; the goal is 20." in page
    assert "W2-fedprox: 4.00 ms a round; the goal is 3 ms." in page
    assert "| W1-fedprox | 3.0e-15 | 1.0e-01 | 400 | 2 | 9 |" in page
    assert "kernels launched a round | waits of the host a round" in page


@pytest.mark.parametrize("unit", ["client", "record"])
def test_models_of_a_simulated_device_are_those_of_the_cpu(load, unit: str) -> None:
    facts = load("fedmtl_facts")
    given = SETTINGS | {"model": "logistic", "method": "pmtl", "unit": unit}
    with simulated():
        found = facts.difference(given, 2, "", NAME)
    assert found["difference"] < 1e-12
    assert found["moved"] > 1e-3


def test_a_broken_device_is_seen(load, monkeypatch) -> None:
    facts = load("fedmtl_facts")
    usual = facts.models_after

    def broken(settings: Any, rounds: int, root: str, device: str) -> torch.Tensor:
        return usual(settings, rounds, root, "cpu") + 1e-9 * (device != "cpu")

    monkeypatch.setattr(facts, "models_after", broken)
    given = SETTINGS | {"model": "logistic", "method": "pmtl"}
    assert facts.difference(given, 2, "", "cuda")["difference"] == pytest.approx(1e-9)


def test_rounds_of_single_records_have_no_cap_that_ends_them(load) -> None:
    settings = SETTINGS | {"model": "logistic", "method": "fedprox", "unit": "record"}
    work = load("fedmtl_run").Run.of(settings, 20, "", None).work(settings, 20)
    assert len(work.cohorts) == 20
    most = torch.cat(work.cohorts).bincount().max()
    assert most > 20 * 4 / 8 + 1  # some client takes part more often than a usual cap allows


@pytest.mark.parametrize("model", ["logistic", "cnn"])
def test_the_plain_loop_of_single_records_ends_where_fedmtl_does(load, model: str) -> None:
    settings = SETTINGS | {"model": model, "method": "fedprox", "unit": "record"}
    run_of = load("fedmtl_run").Run.of
    work = run_of(settings, 2, "", None).work(settings, 2)
    one, loop_model = load("loop").of_records(work, "cpu")
    run = run_of(settings, 2, "", None)
    for step, (cohort, after) in enumerate(run.steps(2)):
        one(step)
        assert torch.equal(cohort.sort().values, work.cohorts[step].sort().values)
        state = after
    expected = run.algorithm.shared(state)
    moved = (expected - work.initial).norm()
    found = parameters_to_vector(loop_model(0).parameters())
    assert moved > 0.03
    # the noise of the two is another, and as small
    assert (found - expected).norm() < 1e-3 * moved
