"""The run folder: ``public/`` holds what the epsilon covers, ``private/`` what it does not, with
the checkpoint.

Everything is written to a temporary name, synced and renamed. Nothing is pickled. A run holds its
folder while it writes there (:meth:`RunFolder.claimed`).
"""

from __future__ import annotations

import copy
import csv
import hashlib
import io
import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from .._files import (
    CLAIM,
    claimed,
    parse_json,
    read_json,
    remove_empty,
    remove_temporary,
    write_bytes,
)
from .._fingerprint import differing
from .._imports import uncollected
from .._text import cell
from ..algorithms.problem import Problem, Tally
from ..data import FederatedDataset, RowBound
from ..errors import ConfigError, DataError, FedmtlError, ModelError, ResumeError, first_line
from ..local import Layout, prepare_module
from ..models import ModelFactory
from ..models.build import build_module
from ..models.networks import NamedFactory
from ..privacy import PrivacyReport
from ..privacy.chain import Head, read_chain
from ..privacy.noise.grid import GridValue
from ..report._names import METHODS
from .coding import Coding
from .inputs import as_model
from .metrics import REGISTRY, Metric
from .problem import describe
from .scored import Finetuned, Scored
from .targets import restored

if TYPE_CHECKING:
    from pandas import DataFrame

    from .result import Result


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write ``value`` as JSON, by :func:`write_bytes`: with ``indent=None``, for many numbers, in
    one line and in a tenth of the time."""
    write_bytes(path, (json.dumps(value, indent=indent) + "\n").encode())


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as safetensors, by :func:`write_bytes`: equal arguments give equal bytes."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, _in_order(save(ready, metadata=dict(metadata or {}))))


def _in_order(content: bytes) -> bytes:
    """Return a safetensors file with its metadata in the order of their keys.

    The library keeps metadata in a hash map of Rust, whose order is drawn anew in every call.
    """
    header, start = split_header(content)
    metadata = header.pop("__metadata__", {})
    if len(metadata) < 2:
        return content
    ordered = {"__metadata__": dict(sorted(metadata.items())), **header}
    text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[start:]


def split_header(content: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its tensors begin."""
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    return header, start


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata.

    Raises:
        OSError, SafetensorError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no mapping


def write_parts(
    path: Path, parts: Mapping[str, Mapping[str, Tensor]], notes: Mapping[str, Any]
) -> None:
    """Write tensors by part and name, with notes of plain values and dataclasses of them, as one
    safetensors file."""
    tensors = {
        f"{part}.{name}": row.clone()
        for part, named in parts.items()
        for name, row in named.items()
    }
    write_tensors(path, tensors, {"notes": json.dumps(notes, default=asdict)})


def read_parts(path: Path, *names: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the tensors of the parts ``names`` and the notes that :func:`write_parts` wrote.

    Raises:
        OSError, SafetensorError, KeyError, ValueError: it cannot be read, or is another file.
    """
    return parts_of(*read_tensors(path), *names)


def parts_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *names: str
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Returns the parts, as :func:`read_parts` does, of a file with these tensors and metadata.

    Raises:
        KeyError, ValueError: those of another file.
    """
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, row in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = row
    return parts, parse_json(metadata["notes"], finite=False)


@dataclass(frozen=True)
class Checkpoint:
    """The state after ``step`` events, and the history so far.

    Attributes:
        step: number of events done.
        public: the state's tensors.
        clients: the files of the clients' own tensors, with their numbers of rows.
        history: evaluated rounds.
        fingerprint: of the data, settings and execution the state belongs to.
        channel: what the channel carries from one step to the next: public tensors.
        ledger: end of the ledger's chain when this was written; None without a ledger.
        tally: local trainings so far, and those that diverged.
    """

    step: int
    public: dict[str, Tensor]
    clients: dict[str, int]
    history: list[dict[str, Any]]
    fingerprint: str
    channel: dict[str, Tensor] = field(default_factory=dict)
    ledger: Head | None = None
    tally: Tally = field(default_factory=Tally)

    def write(self, path: Path) -> None:
        """Write one atomic safetensors file."""
        parts = {"public": self.public, "channel": self.channel}
        write_parts(
            path, parts, {name: value for name, value in vars(self).items() if name not in parts}
        )

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Return the checkpoint at ``path``.

        Raises:
            ResumeError: unreadable.
        """
        try:
            return cls.made_of(*read_tensors(path))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise ResumeError(f"{path} cannot be read as a checkpoint: {error}") from error

    @classmethod
    def made_of(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Checkpoint:
        """Return the checkpoint of a file with these tensors and metadata.

        Raises:
            KeyError, ValueError, TypeError: they are not those of a checkpoint.
        """
        parts, notes = parts_of(tensors, metadata, "public", "channel")
        notes["tally"] = Tally(**notes["tally"])
        if notes["ledger"]:
            notes["ledger"] = Head(**notes["ledger"])
        return cls(public=parts["public"], channel=parts["channel"], **notes)

    def check(self, path: Path, fingerprint: str) -> None:
        """Refuse to continue another run from the checkpoint at ``path``.

        Raises:
            ResumeError: it was written by a run with other data, settings or execution.
        """
        if self.fingerprint != fingerprint:
            names = (
                ", ".join(differing(self.fingerprint, fingerprint))
                or "data, settings, seed, device or execution"
            )
            raise ResumeError(
                f"{path} was written with other {names} than this run has; resume with the same "
                "ones, or start in another folder."
            )


MANIFEST = "manifest.json"
OUTCOME = "outcome.json"
COLUMNS = "columns.json"
MODEL = "model.safetensors"
_ELSEWHERE = (
    "personal",
    "shared",
    "parts",
    "released",
    "privacy",
    "module",
    "factory",
    "folder",
    "baselines",
    "coding",
)
"""Fields of a result that are not in its outcome: in files of their own, or known without a
file."""


class RunFolder:
    """Paths of one run, and how they are written.

    ``public/`` holds the shared model, privacy.json, plots of public quantities, in secure mode the
    last value of every release, and a list of these files with their hashes. ``private/`` holds the
    personal models, metrics, per-client plots, checkpoint, ledger, configuration with the seed,
    what :meth:`Result.load <fedmtl.Result.load>` reads beside these (``outcome.json``), and the
    baselines' runs.

    Models are safetensors files: ``public/model.safetensors`` has the model's state by name, as
    ``load_state_dict`` takes it, with the names of what is frozen in the metadata under ``frozen``,
    and under ``tied`` every further name of a tied weight with its first one;
    ``private/models.safetensors`` has the tensor ``models`` (n, D) of what is trained, with the ids
    in the metadata under ``ids``: of all clients, or of those that were drawn for evaluation;
    ``private/parts.safetensors`` has the :attr:`~fedmtl.Result.parts` of the methods that have
    some. Of a table, ``columns.json`` says how raw rows become inputs of the models and outputs
    predictions, and how the network is built. It is in ``public/`` if names and categories of its
    columns were settings of the run, and in ``private/`` if some were read off the table. Where the
    algorithm bounds features, the metadata have ``bound``, such as
    ``{"bound": 1.0, "norm": "l2"}``, and a model predicts on records that
    :class:`fedmtl.data.RowBound` has scaled down to it (:class:`fedmtl.models.BoundedInputs` does
    so).

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.public = root / "public"
        self.private = root / "private"
        self.ledger = self.private / "ledger.jsonl"
        self.checkpoint = self.private / "checkpoint.safetensors"
        # files of the clients' own tensors, which the checkpoint names
        self.clients = self.private / "clients"

    @classmethod
    def of(cls, folder: str | Path | None) -> RunFolder | None:
        """Return the folder of a run; None where it is saved nowhere."""
        if folder is None:
            return None
        return cls(Path(folder))

    @property
    def started(self) -> bool:
        """Whether a run has begun here."""
        return self.ledger.exists() or self.checkpoint.exists()

    def make(self) -> None:
        """Make the folder of a run.

        Raises:
            ConfigError: no file can be written there, or it would be in the public part of another
                run.
        """
        root = self.root.absolute()
        runs = (place.parent for place in (root, *root.parents) if place.name == "public")
        if other := next((run for run in runs if RunFolder(run).started), None):
            raise ConfigError(
                f"folder is {str(self.root)!r}, in the public part of the run in {other}, and a "
                "run has a private part; choose another folder."
            )
        try:
            self.private.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.private):
                pass
        except OSError as error:
            raise ConfigError(
                f"folder is {str(self.root)!r}, where no file can be written ({error}); choose "
                "another folder."
            ) from error

    @contextmanager
    def claimed(self, *, resume: bool) -> Iterator[None]:
        """Hold the folder for this block alone. A run writes nothing in a folder that it does not
        hold.

        The claim is that of :func:`fedmtl._files.claimed` on ``private/``; what killed processes
        have left of files is removed.

        Args:
            resume: whether a run that has begun here is continued.

        Raises:
            ConfigError: another run holds the folder; or see :meth:`make`.
            ResumeError: a run has begun here, and ``resume`` is false.
        """
        self._refuse_started(resume)
        existed = self.root.exists()
        self.make()
        with ExitStack() as stack:
            if not existed:
                stack.callback(remove_empty, self.root)
            try:
                stack.enter_context(claimed(self.private))
            except BlockingIOError as error:
                raise ConfigError(
                    f"folder is {str(self.root)!r}, in which another process is running; choose "
                    "another folder, or wait until it has ended."
                ) from error
            self._refuse_started(resume)  # in the meantime
            for part in (self.public, self.private):
                remove_temporary(part)
            yield

    def _refuse_started(self, resume: bool) -> None:
        if self.started and not resume:
            raise ResumeError(
                f"{self.root} already holds a run; give another folder, or fit(resume=True)."
            )

    def reopen(self) -> None:
        """Remove the mark of a finished run, before a file of it changes: until they are all
        written, it has not."""
        (self.private / "result.json").unlink(missing_ok=True)

    def read_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint of the run; None before the first.

        Raises:
            ResumeError: it cannot be read; or the ledger does not hold what it was written with,
                being missing, rolled back behind it, or that of another run.
        """
        if not self.checkpoint.exists():
            return None
        checkpoint = Checkpoint.read(self.checkpoint)
        head = checkpoint.ledger
        if head is not None and not read_chain(self.ledger).has(head):
            raise ResumeError(
                f"{self.ledger} does not have line {head.lines} with which {self.checkpoint.name} "
                "was written: the ledger is missing, was rolled back or belongs to another run, "
                "and charges of releases that were made are missing. Restore the ledger, or start "
                "a new run in another folder."
            )
        return checkpoint

    def baseline(self, name: str) -> RunFolder:
        """Return the folder of a comparison run; private, because it is not released."""
        return RunFolder(self.private / "baselines" / name)

    def write_run(self, result: Result, problem: Problem) -> None:
        """Write models, metrics and the privacy report of one run, and how its network is built."""
        write_json(self.public / "privacy.json", result.privacy.to_dict())
        bound = bound_note(result.bound)
        if result.shared is not None:
            write_model(self.public / MODEL, problem, result.shared, bound)
        if result.released:
            grids = {
                name: json.dumps(
                    {"step": release.step, "width": release.width, "divisor": release.divisor}
                )
                for name, release in result.released.items()
            }
            values = {name: release.value for name, release in result.released.items()}
            write_tensors(self.public / "releases.safetensors", values, grids)
        if result.personal.stride(0) != 0:  # a model of their own, not the shared one repeated
            ids = json.dumps(result.owners)
            write_tensors(
                self.private / "models.safetensors",
                {"models": result.personal},
                {"ids": ids} | bound,
            )
        if result.parts:
            write_tensors(self.private / "parts.safetensors", result.parts)
        self.write_history(result.history)
        if result.replicates is not None:
            write_bytes(self.private / "replicates.csv", csv_bytes(result.replicates))
        write_json(self.private / OUTCOME, _outcome(result, problem), indent=None)
        if result.coding is not None:
            if result.coding.schema.declared:
                part = self.public
            else:
                part = self.private
            write_json(
                part / COLUMNS,
                result.coding.to_dict() | {"network": _public_network(result, problem)},
            )

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Write metrics.csv: the evaluations so far."""
        write_bytes(self.private / "metrics.csv", csv_bytes(history))

    def write_result(
        self, result: Result, settings: dict[str, Any], data: FederatedDataset
    ) -> None:
        """Write the plots, the clients with the baselines, and result.json, the mark of a finished
        run."""
        with uncollected():
            from .plots import plot_result

        plot_result(result, self.private)
        frame = clients_frame(result, data.ids)
        frame.insert(0, "train_examples", data.train.counts.numpy())
        frame.insert(1, "test_examples", data.test.counts.numpy())
        if result.than_local:
            frame.insert(2, "than local", frame.index.map(result.than_local.get))
        frame = frame.rename(index=cell, columns=cell)
        if "chosen" in frame:
            frame["chosen"] = frame["chosen"].map(cell)
        write_bytes(
            self.private / "clients.csv",
            frame.to_csv(index_label="client", lineterminator="\n").encode(),
        )
        report = result.privacy.to_dict()
        summary = settings | {"clients": len(result.ids)} | report | result.numbers()
        summary["rounds"] = result.final["round"]
        local = result.baselines.get("local")
        summary["baselines"] = {
            name: run.privacy.to_dict() | run.numbers(None if run is local else local)
            for name, run in result.baselines.items()
        }
        names = [name for name in (result.algorithm, *result.baselines) if name in METHODS]
        summary["methods"] = {name: list(METHODS[name]) for name in names}
        write_json(self.private / "result.json", plain(summary))

    def read_run(
        self,
        kind: type[Result],
        model: nn.Module | ModelFactory | None = None,
        trust: Sequence[str] = (),
    ) -> Result:
        """Return the result of a finished run, with its baselines.

        Args:
            kind: its class.
            model: of the run, where its files do not say how it is built.
            trust: modules of which its files may name classes.

        Raises:
            ConfigError: no finished run, or one of an earlier version.
            ModelError: ``model`` does not have the parameters of the run's.
            DataError: a file that cannot be read.
        """
        is_baseline = self.root.parent.name == "baselines"
        for path in (self.private / name for name in ("result.json", OUTCOME)[is_baseline:]):
            if not path.is_file():
                raise ConfigError(
                    f"{self.root} holds no finished run that can be loaded: {path} is missing; "
                    f"fedmtl resume {self.root} continues a run that has not finished, and writes "
                    "the files of one of an earlier version."
                )
        try:
            values = self._fields(kind, read_json(self.private / OUTCOME), model, trust)
        except FedmtlError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{self.private / OUTCOME} is no outcome of a run: {error!r}."
            ) from error
        names: Any = ()
        if not is_baseline:
            names = read_json(self.private / "result.json").get("baselines", ())
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\\" in name:
                raise DataError(
                    f"{self.private / 'result.json'}: {name!r} is no name of a baseline."
                )
        return kind(
            **values,
            baselines={name: self.baseline(name).read_run(kind, model, trust) for name in names},
        )

    def _fields(
        self,
        kind: type[Result],
        outcome: dict[str, Any],
        model: nn.Module | ModelFactory | None,
        trust: Sequence[str],
    ) -> dict[str, Any]:
        """Return the fields of a result from its files, without the baselines."""
        network = outcome.pop("network")
        finetuned = outcome["finetuned"]
        for each in fields(kind):
            if isinstance(outcome.get(each.name), list) and str(each.type).startswith("tuple"):
                outcome[each.name] = tuple(outcome[each.name])
        if finetuned is not None:
            settings = restored(finetuned["settings"], trust)
            diverged = tuple(finetuned["diverged"])
            outcome["finetuned"] = Finetuned(
                **finetuned | {"settings": settings, "diverged": diverged}
            )
        try:
            outcome["terms"] = restored(outcome["terms"], trust)
        except ConfigError:  # objects of the caller's own
            outcome["terms"] = None
        state = _tensors(self.public / MODEL)[0]
        module, factory = _network_of(network, state, model)
        shared = None
        if state:
            shared = torch.cat([state[name].reshape(-1) for name in network["names"]])
        personal = _tensors(self.private / "models.safetensors")[0].get("models")
        if personal is None and shared is not None:
            personal = shared.expand(len(outcome["evaluated"] or outcome["ids"]), -1)
        released, grids = _tensors(self.public / "releases.safetensors")
        return outcome | {
            "privacy": PrivacyReport.from_dict(read_json(self.public / "privacy.json")),
            "personal": personal,
            "shared": shared,
            "module": module,
            "factory": factory,
            "coding": self._coding(),
            "folder": self.root,
            "released": {
                name: GridValue(value=x, **json.loads(grids[name])) for name, x in released.items()
            },
            "bound": restored(outcome["bound"]),
            "asked": tuple(
                REGISTRY.get(metric["name"]) or Metric(metric["name"], None, metric["up"], own=True)
                for metric in outcome["asked"]
            ),
            "parts": _tensors(self.private / "parts.safetensors")[0],
        }

    def _coding(self) -> Coding | None:
        """Returns the coding of raw rows of a table for the models; None for other data and for
        runs of earlier versions.

        Raises:
            DataError: a file that says something else.
        """
        for part in (self.private, self.public):
            path = part / COLUMNS
            if path.is_file():
                try:
                    return Coding.from_dict(read_json(path))
                except DataError as error:
                    raise DataError(
                        f"{path} does not say how columns are coded: {error}"
                    ) from error
        return None

    def write_lists(self) -> None:
        """List every file of the finished run with its hash: those of ``private/``, the ledger
        included, in ``private/manifest.json``, and those of ``public/`` with the hash of that list
        in ``public/manifest.json``, so that the hash of the latter, :attr:`seal`, stands for all of
        them.

        The private list has a random number of its own: its hash is published, and must not tell
        one guess at the private files from another.
        """
        chain = read_chain(self.ledger)
        run = None
        if chain.digests:
            run = chain.digests[0]
        for part in (self.private, self.public):
            # not itself, nor what changes
            unlisted = {part / MANIFEST, part / CLAIM, *part.glob("*.head")}
            names = sorted(
                path.name for path in part.iterdir() if path.is_file() and path not in unlisted
            )
            files = {name: sha256(part / name) for name in names}
            private = part == self.private
            if private:
                more = {"salt": secrets.token_hex(32)}
            else:
                more = {"private": sha256(self.private / MANIFEST)}
            write_json(part / MANIFEST, {"run": run, **more, "files": files})

    @property
    def seal(self) -> str:
        """Return the hash of ``public/manifest.json``, 64 hexadecimal digits, to be published when
        a run has ended."""
        return sha256(self.public / MANIFEST)


def _outcome(result: Result, problem: Problem) -> dict[str, Any]:
    """Returns the fields of a result beside its tensors and privacy report, ready for JSON."""
    values = {
        each.name: getattr(result, each.name)
        for each in fields(result)
        if each.name not in _ELSEWHERE
    }
    finetuned = result.finetuned
    terms = result.terms
    if terms is not None and not all(
        isinstance(value, str) for value in (terms["loss"], *terms["metrics"])
    ):
        terms = None  # functions of the caller's own
    return values | {
        "finetuned": None
        if finetuned is None
        else vars(finetuned) | {"settings": describe(finetuned.settings)},
        "bound": describe(result.bound),
        "asked": [{"name": metric.name, "up": metric.higher_is_better} for metric in result.asked],
        "terms": describe(terms),
        "network": {
            "made": describe(result.factory),
            "spec": describe(problem.data.spec),
            "seed": problem.seed,
            "dtype": str(problem.initial.dtype).removeprefix("torch."),
            "names": list(problem.layout.names),
            "shapes": [list(shape) for shape in problem.layout.shapes],
        },
    }


def _public_network(result: Result, problem: Problem) -> dict[str, Any]:
    """Returns the description of the network of a run without its seed and its number of
    clients."""
    dtype = str(problem.initial.dtype).removeprefix("torch.")
    return {"made": describe(result.factory), "dtype": dtype}


def _network_of(
    network: dict[str, Any], state: Mapping[str, Tensor], model: nn.Module | ModelFactory | None
) -> tuple[nn.Module | None, NamedFactory | None]:
    """Return the network of a run as it was trained, None if nothing says how it is built, and the
    factory of :mod:`fedmtl.models` that built it, None for another one.

    Args:
        network: its description.
        state: of the shared model, with the frozen parameters that all models have; empty without
            one.
        model: of the caller's; None for that of the description.

    Raises:
        ModelError: ``model`` has other parameters.
    """
    if model is None:
        try:
            model = restored(network["made"])
        except ConfigError:  # it has parts of the caller's own
            model = None
        if model is None:
            return None, None
    factory = None
    if isinstance(model, NamedFactory):
        factory = model
    spec = restored(network["spec"])
    kind = getattr(torch, network["dtype"])
    module = build_module(as_model(model), spec, network["seed"])
    module = prepare_module(
        module, spec.sample(2, kind), seed=network["seed"], dtype=kind, trainable=network["names"]
    )
    layout = Layout.of(module)
    shapes = dict(zip(network["names"], map(tuple, network["shapes"]), strict=True))
    built = dict(zip(layout.names, layout.shapes, strict=True))
    if built != shapes:
        raise ModelError(f"model has the parameters {built}, but those of the run are {shapes}.")
    try:
        module.load_state_dict(dict(state), strict=False)
    except RuntimeError as error:
        raise ModelError(
            f"model has other frozen parameters than that of the run: {first_line(error)}."
        ) from error
    return module, factory


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata; none of either where there is no such
    file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if path.is_file():
            return read_tensors(path)
        return ({}, {})
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as a model: {error}") from error


def bound_note(bound: RowBound | None) -> dict[str, str]:
    """Return the metadata of the models of an algorithm that bounds features; none where it does
    not."""
    if bound is None:
        return {}
    return {"bound": json.dumps(asdict(bound))}


def write_model(path: Path, problem: Problem, row: Tensor, metadata: Mapping[str, str]) -> None:
    """Write the complete state of the model ``row`` (D,), with ``metadata`` and those of
    :func:`model_state`."""
    state, names = model_state(problem, row)
    write_tensors(path, state, {**metadata, **names})


def model_state(problem: Problem, row: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the complete state of the model ``row`` (D,), as ``load_state_dict`` takes it, and
    metadata that name the tensors of it that are frozen and the further names of tied ones; none
    where none are."""
    module = problem.layout.load(copy.deepcopy(problem.module).to(dtype=row.dtype), row)
    # with what get_extra_state returns, which is the same for all and stays in the code
    whole = module.state_dict()
    state = {name: value.clone() for name, value in whole.items() if isinstance(value, Tensor)}
    frozen = list(problem.layout.frozen(module))
    tied = {
        name: first
        for first, *others in problem.layout.all_names
        for name in others
        if name in state
    }
    return state, {
        key: json.dumps(value) for key, value in (("frozen", frozen), ("tied", tied)) if value
    }


def sha256(path: Path) -> str:
    """Return the hash of a file, 64 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def clients_frame(scored: Scored, ids: tuple[str, ...]) -> DataFrame:
    """Return a row for each client: its scores as :meth:`Scored.to_frame` has them, and the model
    that it chose."""
    frame = scored.to_frame().reindex(ids)
    if scored.finetuned is not None and scored.finetuned.chosen:
        frame["chosen"] = frame.index.map(scored.finetuned.chosen.get)
    return frame


def csv_bytes(rows: list[dict[str, Any]]) -> bytes:
    """Return rows as CSV under the names of all their keys, as :func:`cell` writes texts; a cell
    that a row lacks is empty."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for cells in (names, *([row.get(name, "") for name in names] for row in rows)):
        writer.writerow(map(cell, cells))
    return text.getvalue().encode()


def plain(value: Any) -> Any:
    """JSON without Infinity and NaN: they become the strings ``"inf"`` and ``"nan"``."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= {str, int, bool}:
            return list(value)
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
