"""Check a finished run by its files: the chain of its ledger, every charge, epsilon by dp-accounting, released
values on their grid, and the hashes of the files.

Nothing is taken from the objects of the run: the lines of the ledger are counted here, the events of the accounting are
put together from the ledger's header, and dp-accounting composes them where it has the law. What is
found is a line each, confirmed, failed or not covered. A confirmed line says that the files agree with one another:
whoever holds the whole folder can write all of it anew, but not under a seal that was published before.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from scipy.stats import chi2
from torch import Tensor

from .. import __version__
from .._files import read_json
from .._rounding import rounded_up
from ..errors import DataError, ResumeError
from ..privacy.accounting.library import TOLERANCE, library_epsilon, set_aside
from ..privacy.chain import Chain, Head, read_chain
from ..privacy.clip import sum_width
from ..privacy.ledger import VERSION
from ..privacy.noise.grid import GridValue, grid_width, whole_width
from ..privacy.price import Price
from ..privacy.report import PrivacyReport
from .checkpoint import Checkpoint, read_tensors
from .folder import MANIFEST, OUTCOME, RunFolder, sha256

CONFIRMED, FAILED, OPEN = "confirmed", "FAILED", "not covered"
_SLACK = 1e-6  # relative, of figures that were computed in two ways
_WHOLE = "discrete_gaussian"
_SEAL = """\
If this seal was published when the run ended, no listed file has changed since: it is the hash of public/manifest.json,
which has the hashes of the public files and of private/manifest.json, and that has those of the private files and of
the ledger. Without a published seal, whoever can write these files can have written all of them anew. With or without
it, this cannot be seen: what was untrue when it was written (other data, other code, noise that was never drawn),
files that no list has (baselines, mapped clients), and a second copy of the run that was continued."""
_BLOCK = 2**16  # steps that one line charges at most without their cohorts; runs write 1
_KINDS = 20  # kinds of clients whose epsilon is computed again


@dataclass(frozen=True)
class Check:
    """One line of a verification.

    Attributes:
        name: what was looked at, such as ``"chain"``.
        verdict: ``"confirmed"``, ``"FAILED"`` or ``"not covered"``.
        detail: what was found; nothing private, so that it may be published.
    """

    name: str
    verdict: str
    detail: str


@dataclass(frozen=True)
class Verification:
    """What could be confirmed of a run.

    Attributes:
        run: identity of the run, the hash of its ledger's first line; None without a ledger.
        seal: hash of ``public/manifest.json``, which stands for every listed file, the ledger included; None without
            that file.
        epsilon, delta: as the run reports them; epsilon is ``"inf"`` where nothing is protected.
        checks: in order.
    """

    run: str | None
    seal: str | None
    epsilon: float | str | None
    delta: float | None
    checks: tuple[Check, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing failed."""
        return all(check.verdict != FAILED for check in self.checks)

    def counts(self) -> dict[str, int]:
        """Return the number of checks by verdict."""
        numbers = Counter(check.verdict for check in self.checks)
        return {verdict: numbers[verdict] for verdict in (CONFIRMED, FAILED, OPEN)}

    def conclusion(self) -> str:
        """Return in sentences what the checks say together, what was not checked, and what no check can see."""
        total = ", ".join(f"{count} {verdict}" for verdict, count in self.counts().items())
        if not self.fits:
            return f"{total}: the run does not fit."
        sentences = [f"{total}: the files that were compared agree with one another."]
        missing = [check.name for check in self.checks if check.verdict == OPEN]
        if missing:
            sentences.append(f"Not checked: {', '.join(missing)}.")
        if not any(check.name == "epsilon" and check.verdict == CONFIRMED for check in self.checks):
            sentences.append(f"Not confirmed: epsilon = {self.epsilon} is what privacy.json says; it was not computed.")
        return " ".join(sentences)

    def text(self) -> str:
        """Return one line a check, the conclusion, and the seal with what it is good for."""
        wide = max(len(check.name) for check in self.checks)
        lines = [f"{check.verdict:<11}  {check.name:<{wide}}  {check.detail}" for check in self.checks]
        return "\n".join([*lines, "", self.conclusion(), "", f"seal {self.seal}", _SEAL])

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate that can travel with a model, JSON-ready."""
        whole = asdict(self) | {"checks": [asdict(check) for check in self.checks]}
        return {"fedmtl": __version__, "fits": self.fits, "conclusion": self.conclusion(), **whole}


def verify(folder: str | Path) -> Verification:
    """Check the finished run in ``folder``; the files are only read.

    Args:
        folder: of the run. Where it holds ``public/`` alone, what needs the private part is not covered.

    Raises:
        DataError: not the folder of a run, a run that has not finished, or a report that cannot be read.
    """
    return _Verifier(RunFolder(Path(folder))).verification()


@dataclass
class _Charges:
    """What the lines of a ledger charge, counted one step at a time: each once in seeded mode, in every session in
    secure mode.

    Attributes:
        steps: (session, step) -> the accounts that are charged, or None where all are.
        remaining: steps to which the charge was raised, or None.
        problems: what does not fit.
    """

    free: bool
    steps: dict[tuple[int, int], tuple[int, ...] | None] = field(default_factory=dict)
    remaining: int | None = None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, lines: list[dict[str, Any]]) -> _Charges:
        charges = cls(bool(lines[0]["replays_free"]))
        session, reached, closed = 0, 0, True
        following: int | None = None  # the next step of this session
        for number, line in enumerate(lines[1:], start=2):
            kind = line["kind"]
            if kind == "open":
                if line["session"] != session + 1:
                    charges.problems.append(f"line {number}: session {line['session']} follows session {session}")
                session, closed, following = line["session"], False, None
            elif kind in ("charge", "remaining", "close") and closed:
                charges.problems.append(f"line {number}: {kind} outside of an open session")
            if kind == "charge":
                first, end, cohorts = line["first"], line["end"], line.get("cohorts")
                if cohorts is None and end - first > _BLOCK:
                    raise ValueError(f"line {number} charges {end - first} steps without cohorts")
                if charges.free:
                    follows = first == reached
                else:
                    follows = first <= reached if following is None else first == following
                if first >= end or not follows:
                    charges.problems.append(f"line {number}: steps {first} to {end - 1} are not the next ones")
                if cohorts is not None and len(cohorts) != end - first:
                    charges.problems.append(f"line {number}: {len(cohorts)} cohorts for {end - first} steps")
                    cohorts = None
                for step in range(first, end):
                    charges.steps[session, step] = None if cohorts is None else tuple(cohorts[step - first])
                following, reached = end, max(reached, end)
            elif kind == "remaining":
                charges.remaining = max(charges.remaining or 0, int(line["uses"]))
            elif kind not in ("open", "close"):
                charges.problems.append(f"line {number}: {kind!r} is no kind of line")
            elif kind == "close":
                closed = True
        return charges

    @cached_property
    def charged(self) -> list[tuple[int, tuple[int, ...] | None]]:
        """Return the charged steps with their ranks."""
        return [(step, ranks) for (_, step), ranks in self.steps.items()]

    def participations(self, n: int) -> np.ndarray:
        """Return (n,) charged participations by account."""
        ranks = [rank for _, cohort in self.charged for rank in cohort or ()]
        return np.bincount(np.array(ranks, dtype=np.int64), minlength=n)


class _Verifier:
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        whole = next((p.parent for p in folder.root.absolute().parents if p.name == "private"), None)
        if whole is not None and RunFolder(whole).started:
            raise DataError(f"{folder.root} is a part of the run in {whole}; fedmtl verify {whole}")
        if folder.started and not (folder.private / "result.json").is_file():
            raise DataError(f"{folder.root} is unfinished; fedmtl resume {folder.root}")
        if not folder.public.is_dir():
            raise DataError(f"{folder.root} is not the folder of a run: it has no public/.")
        self.report = read_json(folder.public / "privacy.json")
        self.private = folder.private.is_dir()
        self.result = read_json(folder.private / "result.json") if self.private else {}
        self.checks: list[Check] = []

    def verification(self) -> Verification:
        for part in (self.folder.public, self.folder.private):
            self._readable(f"files: {part.name}", lambda part=part: self._files(part), MANIFEST)  # type: ignore[misc]
        chain = self._chain()
        if chain is not None:
            self._readable("head", lambda: self._ends(chain))
            self._readable("settings", lambda: self._settings(chain.lines[0]))
            if self.report.get("repetitions") == "secret":
                self._note("charges", OPEN, "a search: its runs have ledgers of their own, which stay private")
                self._note("epsilon", OPEN, "that of a search is not computed again")
            else:
                self._readable("charges", lambda: self._charges(chain.lines))
        elif self.report.get("epsilon") == "inf":
            where = self.report.get("elsewhere")
            self._note(
                "epsilon", CONFIRMED, "infinite: no protection is claimed" + (f" here, {where}" if where else "")
            )
        elif self.report.get("epsilon") == 0 and not self.report.get("names"):
            self._note("epsilon", CONFIRMED, "0: nothing is released")
        else:
            why = "there is no ledger whose chain holds"
            if self.result.get("replicates"):
                why = "repetitions are simulations, whose charges are not kept"
            self._note("epsilon", OPEN, f"{why}, so there is nothing to compute it from")
        self._readable("headline", self._headline)
        self._report()
        self._readable(
            "grid", lambda: self._grid(None if chain is None else chain.lines[0]), "releases.safetensors or the ledger"
        )
        self._readable("model", self._model, "model.safetensors or the checkpoint")
        report = self.report
        seal = self.folder.seal if (self.folder.public / MANIFEST).is_file() else None
        return Verification(report.get("run"), seal, report.get("epsilon"), report.get("delta"), tuple(self.checks))

    def _note(self, name: str, verdict: str, detail: str) -> None:
        self.checks.append(Check(name, verdict, detail))

    def _say(self, name: str, wrong: list[str], detail: str) -> None:
        text = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        self._note(name, FAILED if wrong else CONFIRMED, text or detail)

    def _readable(self, name: str, check: Callable[[], None], what: str = "the ledger or the report") -> None:
        """Make a check whose line fails where a file lacks what it reads."""
        try:
            check()
        except Exception as error:  # whatever a file holds, it is the file that fails
            self._note(name, FAILED, f"{what} cannot be read: {error!r}")

    # The files

    def _files(self, part: Path) -> None:
        name = f"files: {part.name}"
        if not part.is_dir():
            self._note(name, OPEN, "the private part is not here")
            return
        manifest = read_json(part / MANIFEST)
        files, wrong = manifest["files"], []
        for file, digest in files.items():
            path = part / file
            if path.name != file or not path.is_file():
                wrong.append(f"{file} is missing")
            elif sha256(path) != digest:
                wrong.append(f"{file} is not the file that was listed")
        if part == self.folder.public:
            extra = {path.name for path in part.iterdir()} - set(files) - {MANIFEST}
            wrong += [f"{file} was added" for file in sorted(extra)]
        elif read_json(self.folder.public / MANIFEST).get("private") != sha256(part / MANIFEST):
            wrong.append(f"{MANIFEST} is not the one of which public/{MANIFEST} has the hash")
        if manifest.get("run") != self.report.get("run") and self.report.get("repetitions") != "secret":
            wrong.append(f"{MANIFEST} and privacy.json are of different runs")
        self._say(name, wrong, f"{len(files)} files have the hashes of {part.name}/{MANIFEST}")

    # The ledger

    def _chain(self) -> Chain | None:
        path = self.folder.ledger
        if not path.is_file():
            if self.report.get("run") is None:
                claimed = self.report.get("names") and self.report.get("epsilon") != "inf"
                absent = self.private and claimed and not self.result.get("replicates")
                text = (
                    "a finite epsilon is reported, and there is no ledger"
                    if absent
                    else "no ledger: nothing was charged"
                )
                self._note("chain", FAILED if absent else OPEN, text)
            else:
                missing = FAILED if self.private else OPEN
                self._note("chain", missing, "the ledger is not here")
            return None
        try:
            chain = read_chain(path, version=VERSION)
        except ResumeError as error:
            reason = str(error).replace(str(path), path.name)
            self._note("chain", FAILED, reason.split(". ")[0])  # without what a resume would do about it
            return None
        if chain.size < path.stat().st_size:
            self._note("chain", FAILED, "the last line is torn; fedmtl resume drops it")
            return None
        self._note("chain", CONFIRMED, f"{len(chain.lines)} lines of the ledger, each with the hash of the one before")
        return chain

    def _ends(self, chain: Chain) -> None:
        wrong = []
        if self.report.get("repetitions") == "secret":
            self._note("head", OPEN, "a search does not publish the end of its ledger")
        else:
            head = Head(int(self.report.get("ledger_lines") or 0), str(self.report.get("ledger_head")))
            if self.report.get("run") != chain.digests[0]:
                wrong.append("privacy.json has the identity of another run")
            if not chain.has(head) or not head.lines:
                wrong.append(f"line {head.lines} of the ledger is not the head in privacy.json")
            elif chain.head != head:
                wrong.append(f"the ledger goes on after line {head.lines}, the head in privacy.json")
            self._say("head", wrong, f"line {head.lines}, the last one, is the head in privacy.json")
        stored = Checkpoint.ledger_of(self.folder.checkpoint) if self.folder.checkpoint.is_file() else None
        if stored is not None:
            text = f"line {stored.lines} is the head in the checkpoint"
            self._say("checkpoint", [] if chain.has(stored) else [f"not so: {text}"], text)

    def _settings(self, header: Mapping[str, Any]) -> None:
        privacy = header.get("privacy")
        if privacy is None:
            return
        z = header.get("noise_multiplier")
        if "kinds" in header:
            z = max(kind["multiplier"] for kind in header["kinds"])
        adaptive = isinstance(privacy["clip_norm"], dict)
        pairs = {
            "refuted": header["refuted"],
            "noise_multiplier": z,
            "delta": header["delta"],
            "source": privacy["source"],
            **({} if adaptive else {"clip_norm": privacy["clip_norm"]}),
        }
        if "max_uses" in header:
            pairs["observer"] = "clients"
        if "schedule" in header:
            pairs["relation"] = header["schedule"]["relation"]
        if "records" in header:
            pairs["records"] = header["records"]
        if "releases" in header:
            pairs["names"] = [name for name, *_ in header["releases"]]
        scale = _noise_scale(header)
        if scale is not None:
            pairs["noise_std"] = _growth(header) * scale / _denominator(header["schedule"])
        if isinstance(privacy["epsilon"], (int, float)):
            pairs["budget"] = privacy["epsilon"]
        wrong = [
            f"{key} is {self.report.get(key)!r} in privacy.json and {value!r} in the ledger"
            for key, value in pairs.items()
            if not _same(self.report.get(key), value)
        ]
        kinds = header.get("kinds", [header])
        wrong += [text for kind in kinds for text in _price_problems(header, Price.from_dict(kind["price"]))]
        sampler = str(self.report.get("sampler"))
        if not sampler.startswith(header.get("sampler", "")):
            wrong.append(f"sampler is {sampler!r} in privacy.json and {header['sampler']!r} in the ledger")
        if header["replays_free"] == (privacy["source"] == "secure"):
            wrong.append(f"source is {privacy['source']!r} and replays_free {header['replays_free']} in the ledger")
        if not _can_amplify(header):
            wrong.append("the schedule in the ledger says that cohorts amplify, and such cohorts do not")
        wrong += self._population(header)
        mechanism = str(self.report.get("mechanism"))
        if not mechanism.startswith(privacy["mechanism"]):
            wrong.append(f"mechanism is {mechanism!r} in privacy.json and {privacy['mechanism']!r} in the ledger")
        self._say("settings", wrong, f"{', '.join(pairs)} and mechanism are the same in privacy.json and in the ledger")

    def _population(self, header: Mapping[str, Any]) -> list[str]:
        """Return the numbers of clients and of their records that are not those of the results."""
        path = self.folder.private / "clients.csv"
        if not path.is_file():
            return []
        with open(path, newline="", encoding="utf-8") as file:
            counts = [int(row["train_examples"]) for row in csv.DictReader(file)]
        n = header["schedule"]["n"] if "schedule" in header else header["clients"]
        if len(counts) != n:
            return [f"the ledger is that of {n:,} clients, clients.csv has {len(counts):,}"]
        if "kinds" not in header or "schedule" not in header:
            return []
        pairs = [
            (header["kinds"][of]["price"]["sampled"], count)
            for of, count in zip(_kind_of(header, n), counts, strict=True)
        ]
        batch = max((rate * count for rate, count in pairs if rate < 1), default=math.inf)
        if not all(_same(rate, min(1.0, batch / count)) for rate, count in pairs):
            return ["the sampling rates in the ledger are not those of one batch size and the records in clients.csv"]
        return []

    # Charges and what they cost

    def _charges(self, lines: list[dict[str, Any]]) -> None:
        header = lines[0]
        charges = _Charges.of(lines)
        costs = (_of_gradients if "kinds" in header else _of_rows)(header, charges)
        wrong = charges.problems + costs.problems
        done, stored = int(self.result["rounds"]), _step(self.folder.checkpoint)
        known = {step for step, _ in charges.charged}
        if not set(range(done)) <= known:
            wrong.append(f"{done} steps are done, and not all of them are charged")
        if stored is not None and stored != done:
            wrong.append(f"result.json has {done} rounds, the checkpoint {stored}")
        if self.result.get("stopped") == "early" and charges.remaining is None:
            wrong.append("the run stopped early, and the steps that were planned are not charged")
        planned = self.result.get("planned_rounds")
        if planned is not None and known and max(known) >= planned:
            wrong.append(f"step {max(known)} is charged, and {planned} were planned")
        if self.report.get("releases") != costs.releases:
            wrong.append(
                f"privacy.json has {self.report.get('releases')} releases, the ledger charges {costs.releases}"
            )
        if bool(self.report.get("remaining_charged")) != (charges.remaining is not None):
            wrong.append("privacy.json and the ledger differ in whether the rest was charged after an early stop")
        self._say("charges", wrong, f"{len(charges.charged):,} steps, in order and each once; {costs.detail}")
        self._epsilon(header, costs)
        for key in header:
            if key.startswith("row noise of "):
                self._note("row noise", OPEN, f"the account of the noise on rows of {key[13:]!r} is not computed again")

    def _epsilon(self, header: Mapping[str, Any], costs: _Costs) -> None:
        claim = self.report.get("epsilon")
        if header["refuted"] is not None:
            wrong = [] if claim == "inf" or not costs.parts else [f"epsilon is {claim}, and the accounting is refuted"]
            self._say("epsilon", wrong, "infinite: the published accounting does not hold")
            return
        if not isinstance(claim, (int, float)):
            self._note("epsilon", FAILED, f"epsilon is {claim!r} in privacy.json; a ledger charges a finite one")
            return
        delta, least, open_kinds = float(header["delta"]), 0.0, 0
        tested = costs.parts[:: max(1, math.ceil(len(costs.parts) / _KINDS))]
        for part in tested:
            bound = library_epsilon(part, delta, float(claim))
            open_kinds += bound is None
            least = max(least, bound or 0.0)
        among = "" if len(tested) == len(costs.parts) else f" (the largest of {len(tested):,} of {len(costs.parts):,})"
        if tested and open_kinds == len(tested):
            self._note("epsilon", OPEN, "dp-accounting does not have this law of noise, so it is not computed again")
        else:
            text = f"{least:.6g}{among} by dp-accounting, {rounded_up(claim, 6)} in privacy.json"
            if header["privacy"]["mechanism"] == _WHOLE:
                aside = max(set_aside(part, float(claim)) for part in tested) if tested else 0.0
                text += f"; of delta {rounded_up(aside, 3)} is set aside for noise in whole numbers"
            low = claim < least * (1 - TOLERANCE) - 1e-9
            self._note("epsilon", FAILED if low else CONFIRMED, text)
        budget = self.report.get("budget")
        if isinstance(budget, (int, float)):
            over = claim > budget * (1 + _SLACK)
            text = f"epsilon {rounded_up(claim, 6)} of a budget of {rounded_up(budget, 6)}"
            self._note("budget", FAILED if over else CONFIRMED, text)

    def _headline(self) -> None:
        text, claim = str(self.report.get("headline")), self.report.get("epsilon")
        figures = re.search(r"epsilon = (\S+?)(?: at delta = (\S+))?(?:,|$)", text)
        wrong = []
        opening = "simulated: " if self.report.get("source") == "seeded" else "private: epsilon = "
        if not self.report.get("names"):
            opening = "nothing is released: epsilon = 0"
        elif claim == "inf":
            opening = "no account here: " if self.report.get("elsewhere") else "not private: epsilon = inf"
        if not text.startswith(opening):
            wrong.append(f"the headline is {text!r}, and must begin with {opening!r}")
        if figures is not None and isinstance(claim, (int, float)) and _number(figures[1]) < claim:
            wrong.append(f"the headline shows epsilon = {figures[1]}, the report has {claim!r}")
        delta = self.report.get("delta")
        if figures is not None and figures[2] and isinstance(delta, float) and _number(figures[2]) < delta:
            wrong.append(f"the headline shows delta = {figures[2]}, the report has {delta!r}")
        result = self.result.get("epsilon", claim)
        if result != claim:
            wrong.append(f"epsilon is {claim!r} in privacy.json and {result!r} in result.json")
        self._say("headline", wrong, "no figure that is shown is below the one of the report")

    def _report(self) -> None:
        """Compare the report in its two files."""
        if not self.private:
            self._note("report", OPEN, "private/result.json is not here")
            return
        wrong = [
            f"{key} is {value!r} in privacy.json and {self.result.get(key)!r} in result.json"
            for key, value in self.report.items()
            if self.result.get(key) != value
        ]
        wrong += [
            f"{one.name} is missing in privacy.json"
            for one in fields(PrivacyReport)
            if one.name in self.result and one.name not in self.report
        ]
        self._say("report", wrong, "every field of privacy.json is the one in result.json")

    # What was released

    def _grid(self, header: Mapping[str, Any] | None) -> None:
        if self.report.get("source") != "secure":
            self._note("grid", OPEN, "noise is not rounded to a grid in seeded mode")
            return
        path = self.folder.public / "releases.safetensors"
        if not path.is_file():
            self._note("grid", OPEN, "no released values are kept")
            return
        values, wrong = _grid_values(path), []
        for name, one in values.items():
            if math.frexp(one.width)[0] != 0.5:
                wrong.append(f"the grid of {name} has a width of {one.width!r}, which is no power of two")
            elif one.off_grid:
                wrong.append(f"{one.off_grid} of {one.value.numel()} coordinates of {name} are not on its grid")
            if self.private and one.step >= self.result["rounds"]:
                wrong.append(f"{name} is of step {one.step}, and {self.result['rounds']} were made")
        if header is not None and (scale := _noise_scale(header)) is not None:
            wrong += _too_quiet(header, scale, values)
        steps = ", ".join(
            f"{name} of step {one.step} ({one.value.numel()} coordinates)" for name, one in values.items()
        )
        self._say("grid", wrong, f"whole multiples of a public power of two: {steps}; earlier releases are not kept")

    def _model(self) -> None:
        path = self.folder.public / "model.safetensors"
        if not path.is_file():
            return
        if not self.folder.checkpoint.is_file():
            self._note("model", OPEN, "the checkpoint is not here")
            return
        tensors, metadata = read_tensors(path)
        names = read_json(self.folder.private / OUTCOME)["network"]["names"]  # as they follow in a flat model
        tied = json.loads(metadata.get("tied", "{}"))
        loose = [name for name, first in tied.items() if not torch.equal(tensors[name], tensors[first])]
        if loose:
            self._note("model", FAILED, f"{loose[0]} is said to be tied to {tied[loose[0]]}, but has other numbers")
            return
        model = torch.cat([tensors[name].flatten() for name in names])
        state = read_tensors(self.folder.checkpoint)[0]
        rows = [row for name, one in state.items() if name.startswith("public.") for row in _rows(one, model)]
        frozen = len(tensors) - len({*names, *tied})
        text = "model.safetensors has the numbers of the shared model in the checkpoint"
        text += f"; its {frozen} frozen tensors are public and in no other file" if frozen else ""
        if not rows:
            self._note("model", OPEN, "the checkpoint has no vector of its length")
        else:
            same = any(torch.equal(row, model) for row in rows)
            self._note("model", CONFIRMED if same else FAILED, text if same else f"not so: {text}")


def _rows(tensor: Tensor, model: Tensor) -> Iterator[Tensor]:
    """Yield the vectors of a checkpoint that may be the model."""
    if tensor.numel() == model.numel() and tensor.dtype == model.dtype:
        yield tensor.flatten()
    elif tensor.ndim == 2 and tensor.shape[1] == model.numel() and tensor.dtype == model.dtype:
        yield tensor[0]


def _noise_scale(header: Mapping[str, Any]) -> float | None:
    """Return the standard deviation of one coordinate of a noised sum; None where it is not the same for all of a run,
    or the law is not Gaussian."""
    privacy = header["privacy"]
    several = "price" in header and header["price"]["weights"] is not None
    if "releases" not in header or privacy["mechanism"] not in ("gaussian", _WHOLE) or several:
        return None
    if isinstance(privacy["clip_norm"], dict) or any(form != "vector" for _, form, *_ in header["releases"]):
        return None
    moved = 2.0 if header["schedule"]["relation"] == "replace" else 1.0
    return float(header["noise_multiplier"] * moved * privacy["clip_norm"])


def _growth(header: Mapping[str, Any]) -> float:
    """Return the deviation that correlated noise approaches over that of the independent noise it is made of."""
    bands = np.array(header.get("bands") or [1.0])
    response = np.zeros(64 * len(bands))
    for step in range(len(response)):  # w of a single unit of noise
        before = response[max(0, step - len(bands) + 1) : step][::-1]
        response[step] = (float(step == 0) - bands[1 : len(before) + 1] @ before) / bands[0]
    return float(np.sqrt(response @ response))


def _denominator(schedule: Mapping[str, Any]) -> float:
    return float(schedule.get("cohort", schedule["n"]))


def _too_quiet(header: Mapping[str, Any], scale: float, values: Mapping[str, GridValue]) -> list[str]:
    """Return what is wrong with releases that have less noise than the ledger says.

    A sum with Gaussian noise is stochastically at least as long as the noise alone, whatever the clients sent, so a
    length below the quantile of the noise is seen by chance once in a million values.
    """
    clip, m, wrong = header["privacy"]["clip_norm"], _denominator(header["schedule"]), []
    for name, one in values.items():
        if name not in {declared for declared, *_ in header["releases"]}:
            continue
        size = one.value.numel()
        width = grid_width(clip, "l2", size, scale)
        if header["privacy"]["mechanism"] == _WHOLE:
            width = whole_width(sum_width(clip, header["schedule"]["n"]), scale)
        if one.width != width or one.divisor != m:
            wrong.append(f"the grid of {name} is not that of the noise and the divisor in the ledger")
        if float((one.value * one.divisor / scale).square().sum()) < chi2.ppf(1e-6, size):
            wrong.append(f"{name} has less noise than the multiplier in the ledger gives")
    return wrong


def _can_amplify(header: Mapping[str, Any]) -> bool:
    """Return whether the cohorts in the header may be accounted for as the header says."""
    schedule = header.get("schedule")
    if schedule is None or not schedule["amplified"]:
        return True
    return bool(schedule["class"] == "BoundPoisson" and schedule["relation"] == "add_remove")


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, numbers up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


@dataclass(frozen=True)
class _Costs:
    """What the charges of a ledger are.

    Attributes:
        parts: one composition for each kind of account: events with their numbers of uses.
        releases: number of releases that are charged.
        detail: in words.
        problems: what does not fit the schedule.
    """

    parts: list[list[tuple[Any, int]]]
    releases: int
    detail: str
    problems: list[str]


def _of_rows(header: Mapping[str, Any], charges: _Charges) -> _Costs:
    """Return the cost of steps that are charged to all clients, or of participations under one cap."""
    schedule = header["schedule"]
    steps, names = len(charges.charged), len(header["releases"])
    uses, problems = steps, []
    if schedule["per_participation"]:
        problems = _cohort_problems(schedule, charges) + _band_problems(header, charges)
        taken = charges.participations(schedule["n"])
        uses, cap = int(taken.max(initial=0)), header["max_uses"]
        if cap is not None and uses > cap:
            problems.append(f"a client is charged {uses} times, above its cap of {cap}")
        if charges.remaining is not None and cap is not None:
            uses = cap
    elif charges.remaining is not None:
        steps = uses = max(steps, charges.remaining)
    price, z = Price.from_dict(header["price"]), header["noise_multiplier"]
    most = f"; at most {uses} of one client" if schedule["per_participation"] else ""
    if header.get("bands"):
        most += f", {len(header['bands'])} rounds apart at least, over which noise is correlated"
    rest = ", the rest after an early stop included" if charges.remaining is not None else ""
    detail = f"{schedule['class'].removeprefix('Bound')} cohorts{most}{rest}"
    parts = [_composition(price, z, uses)] if uses else []
    return _Costs(parts, steps * names, detail, problems)


def _composition(price: Price, multiplier: float, uses: int) -> list[tuple[Any, int]]:
    """Return the events of ``uses`` uses, and how often each happens."""
    if price.weights is None:
        return [(price.event(multiplier), uses * price.sums)]
    counts = Counter(price.weights[:uses])
    return [(price.event(multiplier, price.weights.index(w)), count * price.sums) for w, count in counts.items()]


def _price_problems(header: Mapping[str, Any], price: Price) -> list[str]:
    """Return what a price in the ledger is not that the settings, the releases and the schedule there ask for."""
    mechanism, schedule, cell = header["privacy"]["mechanism"], header.get("schedule"), None
    if "releases" in header:
        assert schedule is not None
        n, m, moved = schedule["n"], _denominator(schedule), 2.0 if schedule["relation"] == "replace" else 1.0
        sizes = tuple(d * (d + 1) // 2 if form == "symmetric" else d for _, form, d, *_ in header["releases"])
        sampled, replaced = m / n if schedule["amplified"] and m < n else 1.0, False
        if mechanism == _WHOLE:  # sums of n rows are exact in cells of 2^(log2(n) - 52) of the clip norm
            cell = 2.0 ** (math.ceil(math.log2(n)) - 52) / moved
    else:
        sizes, sampled, replaced = (header["dimension"],), price.sampled, schedule is None
    of_settings = {"mechanism": mechanism, "sizes": sizes, "delta": header["delta"], "sampled": sampled}
    of_settings |= {"replaced": replaced, "cell": cell}
    if "releases" in header or schedule is None:  # elsewhere the number of local steps
        of_settings["sums"] = 1
    asked = replace(price, **of_settings)
    wrong = [
        f"{key} of the price is {value!r} in the ledger, its settings and schedule make {asked.to_dict()[key]!r}"
        for key, value in price.to_dict().items()
        if not _same(asked.to_dict()[key], value)
    ]
    weights = price.weights or (1.0,)
    if not math.isclose(math.fsum(weights) / len(weights), 1.0, rel_tol=1e-6):
        wrong.append("the weights of the uses have not mean 1")
    return wrong


def _kind_of(header: Mapping[str, Any], n: int) -> list[int]:
    """Return the kind of each of ``n`` clients."""
    found: list[int] = header.get("kind_of", [0] * n)
    return found


def _of_gradients(header: Mapping[str, Any], charges: _Charges) -> _Costs:
    """Return the cost of the uses of clients: activations, or participations in rounds with their local steps."""
    n, kinds, rounds = header["clients"], header["kinds"], "schedule" in header
    of = np.array(_kind_of(header, n), dtype=np.int64)
    prices = [Price.from_dict(kind["price"]) for kind in kinds]
    uses, caps = charges.participations(n), np.array([kind["cap"] for kind in kinds])[of]
    problems = _cohort_problems(header["schedule"], charges, clients=True, caps=caps) if rounds else []
    if len(uses) != n:
        problems.append("a client is charged that the run does not have")
    elif (uses > caps).any():
        problems.append(f"{int((uses > caps).sum())} clients are charged above their caps")
    if not rounds and any(len(cohort or ()) > 1 for _, cohort in charges.charged):
        problems.append("an activation is charged to several clients")
    uses = caps if charges.remaining is not None else uses[:n]
    asked = sorted({(int(k), int(u)) for k, u in zip(of, uses, strict=True)}, reverse=True)
    parts = [_composition(prices[k], kinds[k]["multiplier"], u) for k, u in asked if u]
    releases = int((uses * np.array([price.sums for price in prices])[of]).sum())
    detail = f"at most {int(uses.max(initial=0))} {'participations' if rounds else 'activations'} of one client"
    return _Costs(parts, releases, detail, problems)


def _band_problems(header: Mapping[str, Any], charges: _Charges) -> list[str]:
    """Return what the cost of correlated noise does not cover: bands whose squares add up to more than 1, turns of a
    client that follow each other within the bands in one session."""
    bands, last = header.get("bands"), dict[tuple[int, int], int]()
    if header["privacy"].get("bands") is not None and not bands:
        return ["the settings have bands of noise, and the ledger has none"]
    if not bands:
        return []
    problems = [] if math.fsum(c * c for c in bands) <= 1 + 1e-12 else ["the bands of the noise are longer than 1"]
    steps = {(0, step): ranks for step, ranks in charges.charged} if charges.free else charges.steps
    for (session, step), ranks in sorted(steps.items()):  # seeded sessions go on with the same noise
        for rank in ranks or ():
            if step - last.get((session, rank), -len(bands)) < len(bands):
                problems.append(f"step {step} follows another turn of client {rank} within {len(bands)} rounds")
            last[session, rank] = step
    return problems


def _cohort_problems(
    schedule: Mapping[str, Any], charges: _Charges, *, clients: bool = False, caps: np.ndarray | None = None
) -> list[str]:
    """Return the cohorts that the sampler does not draw, of ranks or of ``clients``, whose order is not known; from
    full participation those are missing who have reached their ``caps`` (n,)."""
    n, problems, taken = schedule["n"], [], np.zeros(schedule["n"], dtype=np.int64)

    def everybody(step: int, ranks: tuple[int, ...]) -> bool:
        missing = np.setdiff1d(np.arange(n), ranks)
        return not len(missing) or (caps is not None and bool((taken >= caps)[missing].all()))

    fits: dict[str, Callable[[int, tuple[int, ...]], bool]] = {
        "BoundFull": everybody,
        "BoundCyclic": lambda step, ranks: (
            len(ranks) <= schedule["cohort"]
            if clients
            else set(ranks) <= {(step * schedule["cohort"] + k) % n for k in range(schedule["cohort"])}
        ),
        "BoundFixed": lambda step, ranks: len(ranks) <= schedule["cohort"],
    }
    fit = fits.get(schedule["class"], lambda step, ranks: True)
    for step, ranks in charges.charged:
        if ranks is None or len(set(ranks)) < len(ranks) or not all(0 <= rank < n for rank in ranks):
            problems.append(f"step {step} has no cohort of distinct clients")
            continue
        if not fit(step, ranks):
            problems.append(f"step {step} has a cohort that {schedule['class'].removeprefix('Bound')} does not draw")
        taken[list(ranks)] += 1
    return problems


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _step(checkpoint: Path) -> int | None:
    """Return the number of steps done, of the checkpoint; None without one."""
    if not checkpoint.is_file():
        return None
    with safe_open(checkpoint, framework="pt") as file:
        return int(file.get_tensor("step"))


def _grid_values(path: Path) -> dict[str, GridValue]:
    values, grids = read_tensors(path)
    return {name: GridValue(value=value, **json.loads(grids[name])) for name, value in values.items()}
