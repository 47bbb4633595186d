"""Check a finished run by its files: the hashes of the files, the chain of its ledger, every
charge, epsilon by dp-accounting, and released values on their grid.

Nothing is computed from data. The lines of the ledger are counted by code of the audit; the price
of a use is made anew from the settings, the schedule and the releases in the ledger's header, and
dp-accounting composes it where it has the law of the noise. A check is a line: confirmed, failed or
not covered. A confirmed line says that the files agree with one another: with the whole folder at
hand all of it can be written anew, but not under a seal published before.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2, gamma
from torch import Tensor

from .. import __version__
from .._rounding import rounded_down, rounded_up
from .._text import shown
from ..errors import DataError, FedmtlError
from ..privacy.accounting.library import TOLERANCE
from ..privacy.chain import Chain, Head, parse
from ..privacy.ledger_file import VERSION
from ..privacy.noise.grid import GridValue
from ..privacy.price import Price, normalized
from ..privacy.record_terms import OF_RECORDS
from ..privacy.report import PrivacyReport
from ..trainer.checkpoint import Checkpoint
from ..trainer.folder import MANIFEST, MODEL, OUTCOME, RunFolder
from ..trainer.received import Received
from .lines import Reading, differences, spread
from .lower_bound import with_bounds
from .restated import Beside, Restated, claimed, near, restated
from .setup import Claim

CONFIRMED = "confirmed"
FAILED = "FAILED"
OPEN = "not covered"
_SLACK = 1e-6  # relative, of figures that were computed in two ways
_SEAL = "\n".join(
    (
        "If this seal was published when the run ended, no listed file has changed "
        "since: it is the hash of public/manifest.json,",
        "which has the hashes of the public files and of private/manifest.json, and that "
        "has those of the private files and of",
        "the ledger. Without a published seal, who can write these files can have "
        "written all of them anew. With or without",
        "it, this cannot be seen: what was untrue when it was written (other data, other "
        "code, noise that was never drawn),",
        "files that no list has (baselines, files of clients), and a second copy of the "
        "run that was continued.",
    )
)
_ROWS = "row noise of "
_LONGEST = 2000  # letters of the reason in a line
_BY_CHANCE = 1e-6  # probability that the noise of a release is taken for too quiet
_KINDS = 20  # kinds of clients whose epsilon is computed again
_SETTINGS = (
    *(
        "noise_multiplier",
        "budget",
        "source",
        "clip_norm",
        "mechanism",
        "refuted",
        "delta",
        "sampler",
        "records",
    ),
    *("observer", "names", "noise_std", "relation"),
)
_OF_ACCOUNTANTS = ("epsilon", "by_client", "claimed")  # compared up to what a finer grid changes
_OF_SEARCH = ("search", "run", "ledger_lines", "ledger_head", "accountant", "observer")
_GUESSED = (
    "interval.confidence",
    "interval.account",
    "interval.added",
    "interval.dependence",
    "interval.observers",
)


@dataclass(frozen=True)
class Check:
    """One line of a verification.

    Attributes:
        name: of what was compared, such as ``"chain"``.
        verdict: ``"confirmed"``, ``"FAILED"`` or ``"not covered"``.
        detail: the reason; nothing private, so that it may be published.
    """

    name: str
    verdict: str
    detail: str


@dataclass(frozen=True)
class Verification:
    """What could be confirmed of a run.

    Attributes:
        run: identity of the run, the hash of its ledger's first line; None without a ledger.
        seal: hash of ``public/manifest.json``, which stands for every listed file, the ledger
            included; None without that file.
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

    def conclusion(self) -> str:
        """Return in sentences what the checks say in total, what was not checked, and what no check
        can see."""
        counts = Counter(check.verdict for check in self.checks)
        total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (CONFIRMED, FAILED, OPEN))
        if not self.fits:
            return f"{total}: the run does not fit."
        sentences = [f"{total}: the files that were compared agree with one another."]
        missing = [check.name for check in self.checks if check.verdict == OPEN]
        if missing:
            sentences.append(f"Not checked: {', '.join(missing)}.")
        if not any(check.name == "epsilon" and check.verdict == CONFIRMED for check in self.checks):
            sentences.append(
                f"Not confirmed: epsilon = {self.epsilon} is what privacy.json says; "
                "it was not computed."
            )
        return " ".join(sentences)

    def text(self) -> str:
        """Return one line a check, the conclusion, and the seal with what it is good for."""
        wide = max(len(check.name) for check in self.checks)
        lines = [
            f"{check.verdict:<11}  {check.name:<{wide}}  {check.detail}" for check in self.checks
        ]
        return "\n".join([*lines, "", self.conclusion(), "", f"seal {self.seal}", _SEAL])

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate that can travel with a model, JSON-ready."""
        return {
            "fedmtl": __version__,
            "fits": self.fits,
            "conclusion": self.conclusion(),
            **asdict(self),
        }


def verify(folder: str | Path) -> Verification:
    """Check the finished run in ``folder``; the files are only read.

    Args:
        folder: of the run. Where it holds ``public/`` and nothing else, what needs the private part
            is not covered.

    Raises:
        DataError: not the folder of a run, a run that has not finished, or a report that cannot be
            read.
    """
    checks: list[Check] = []
    try:
        run = _Run(RunFolder(Path(folder)))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from error
    for name, files, check in _CHECKS:
        try:
            answer = check(run)
        except _NotCovered as reason:
            checks.append(Check(name, OPEN, _line(str(reason))))
        except Exception as error:  # whatever a file holds, it is the file that fails
            if isinstance(error, FedmtlError):
                text = str(error)
            else:
                text = f"{files} cannot be read: {error!r}"
            checks.append(Check(name, FAILED, _line(text)))
        else:
            if answer is not None:
                wrong, detail = answer
                text = "; ".join(wrong[:3]) + (
                    f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
                )
                checks.append(Check(name, FAILED if wrong else CONFIRMED, _line(text or detail)))
    figures = {name: run.report.get(name) for name in ("epsilon", "delta")}
    known = {name: value for name, value in figures.items() if _is_number(value) or value == "inf"}
    identity = run.report.get("run")
    if not isinstance(identity, str):
        identity = None
    return Verification(
        run=None if identity is None else _line(identity),
        seal=run.seal,
        epsilon=known.get("epsilon"),
        delta=known.get("delta"),
        checks=tuple(checks),
    )


def _line(text: str) -> str:
    """Return a text as a part of one line, whatever it quotes of the files: without control
    characters, and cut off after some sentences."""
    if len(text) <= _LONGEST:
        return shown(text)
    return f"{shown(text[:_LONGEST])} ..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _NotCovered(Exception):
    """The folder lacks what a check needs; the message is the detail of its line."""


_Answer = tuple[list[str], str] | None
"""What is wrong, and what holds if nothing is; None where the check does not apply to the run."""


class _Run:
    """The files of a finished run.

    Attributes:
        folder: of the run.
        report: of ``public/privacy.json``.
        result: of ``private/result.json``; empty without the private part.
        files: what is read of it.
        chain: the lines of the ledger; None where it is missing or does not hold, with the reason
            in ``broken``.

    Raises:
        DataError: see :func:`verify`.
    """

    def __init__(self, folder: RunFolder) -> None:
        whole = next(
            (p.parent for p in folder.root.absolute().parents if p.name == "private"), None
        )
        if whole is not None and RunFolder(whole).started:
            raise DataError(f"{folder.root} is a part of the run in {whole}; fedmtl verify {whole}")
        if folder.started and not (folder.private / "result.json").is_file():
            raise DataError(f"{folder.root} is unfinished; fedmtl resume {folder.root}")
        if not folder.public.is_dir():
            raise DataError(f"{folder.root} is not the folder of a run: it has no public/.")
        self.folder = folder
        self.files = Received(folder.root)
        self.report = self.files.json(folder.public / "privacy.json")
        self.private = folder.private.is_dir()
        if self.private:
            self.result = self.files.json(folder.private / "result.json")
        else:
            self.result = {}
        self.chain: Chain | None = None
        self.broken = ""
        if folder.ledger.exists():
            self._read_ledger(folder.ledger)

    def _read_ledger(self, path: Path) -> None:
        """Read the chain, or why there is none."""
        try:
            content = self.files.content(path)
            chain = parse(content, path, VERSION)
        except Exception as error:  # without what a resume would do about it
            self.broken = str(error).replace(str(path), path.name).split(". ")[0]
            return
        if chain.size < len(content):
            self.broken = "the last line is torn; fedmtl resume drops it"
        elif not chain.lines:
            self.broken = "the ledger has no line"
        else:
            self.chain = chain

    @cached_property
    def seal(self) -> str | None:
        """Return the hash of the list of public files; None where it cannot be read."""
        try:
            return self.files.digest(self.folder.public / MANIFEST)
        except DataError:
            return None

    @property
    def header(self) -> Mapping[str, Any] | None:
        """Return the first line of the ledger; None without a chain."""
        if self.chain is None:
            return None
        return self.chain.lines[0]

    @property
    def account(self) -> Mapping[str, Any] | None:
        """Return the header of a ledger that has the settings of the run; None of a search, and
        without one."""
        if self.header is None or self.header.get("privacy") is None:
            return None
        return self.header

    @cached_property
    def ledger(self) -> Reading:
        """Returns the contents of the ledger."""
        assert self.chain is not None
        return Reading(self.chain.lines)

    @property
    def secret(self) -> bool:
        """Returns True for a search, whose runs have ledgers of their own."""
        return self.report.get("search") is not None

    @cached_property
    def restated(self) -> Restated:
        """Returns the report derived from the ledger."""
        interval = self.report.get("interval")
        finetuned = None
        if self.private:
            finetuned = self.result.get("configuration", {}).get("finetune") is not None
        counts = self.counts
        if counts is not None and interval is not None and interval["unit"] == "client":
            counts = None
        beside = Beside(
            self.folder.ledger.name, self.norms, counts, finetuned, interval is not None
        )
        return restated(self.ledger, beside)

    @property
    def adaptive(self) -> bool:
        """Returns True if clip norms follow a quantile."""
        return self.header is not None and isinstance(self.header["privacy"]["clip_norm"], dict)

    @cached_property
    def norms(self) -> dict[str, float]:
        """Return the clip norms of the last round by release, where these adapt and there is a
        checkpoint."""
        if not self.adaptive or self.checkpoint is None:
            return {}
        return {name: float(norms[0]) for name, norms in self.checkpoint.channel.items()}

    @cached_property
    def counts(self) -> np.ndarray | None:
        """Return the numbers of records of the clients, int64 (n,); None without
        ``clients.csv``."""
        path = self.folder.private / "clients.csv"
        if not path.exists():
            return None
        table = csv.DictReader(io.StringIO(self.files.text(path), newline=""))
        return np.array([int(row["train_examples"]) for row in table], dtype=np.int64)

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint; None without one."""
        if not self.folder.checkpoint.exists():
            return None
        return Checkpoint.made_of(*self.files.tensors(self.folder.checkpoint))


# The files


def _files(run: _Run, *, private: bool) -> _Answer:
    part = run.folder.private if private else run.folder.public
    if not part.is_dir():
        raise _NotCovered("the private part is not here")
    manifest = run.files.json(part / MANIFEST)
    files = manifest["files"]
    wrong = []
    for file, digest in files.items():
        path = part / file
        if path.name != file or not path.exists():
            wrong.append(f"{file} is missing")
        elif run.files.digest(path) != digest:
            wrong.append(f"{file} is not the file that was listed")
    if not private:
        extra = {path.name for path in part.iterdir()} - set(files) - {MANIFEST}
        wrong += [f"{file} was added" for file in sorted(extra)]
    elif run.files.json(run.folder.public / MANIFEST).get("private") != run.files.digest(
        part / MANIFEST
    ):
        wrong.append(f"{MANIFEST} is not the one of which public/{MANIFEST} has the hash")
    if manifest.get("run") != run.report.get("run") and not run.secret:
        wrong.append(f"{MANIFEST} and privacy.json are of different runs")
    return wrong, f"{len(files)} files have the hashes of {part.name}/{MANIFEST}"


def _chain(run: _Run) -> _Answer:
    if run.chain is not None:
        return (
            [],
            f"{len(run.chain.lines)} lines of the ledger, each with the hash of the one before",
        )
    if run.broken:
        return [run.broken], ""
    claimed = (
        run.report.get("names")
        and run.report.get("epsilon") != "inf"
        and not run.result.get("replicates")
    )
    if run.private and run.report.get("run") is not None:
        return ["the ledger is not here"], ""
    if run.private and claimed:
        return ["a finite epsilon is reported, and there is no ledger"], ""
    raise _NotCovered(
        "no ledger: nothing was charged"
        if run.report.get("run") is None
        else "the ledger is not here"
    )


def _head(run: _Run) -> _Answer:
    if run.chain is None:
        return None
    if run.secret:
        raise _NotCovered("a search does not publish the end of its ledger")
    head = Head(int(run.report.get("ledger_lines") or 0), str(run.report.get("ledger_head")))
    wrong = []
    if run.report.get("run") != run.chain.digests[0]:
        wrong.append("privacy.json has the identity of another run")
    if not run.chain.has(head) or not head.lines:
        wrong.append(f"line {head.lines} of the ledger is not the head in privacy.json")
    elif run.chain.head != head:
        wrong.append(f"the ledger continues after line {head.lines}, the head in privacy.json")
    return wrong, f"line {head.lines}, the last one, is the head in privacy.json"


def _checkpoint(run: _Run) -> _Answer:
    stored = None if run.checkpoint is None else run.checkpoint.ledger
    if run.chain is None or stored is None:
        return None
    text = f"line {stored.lines} is the head in the checkpoint"
    return [] if run.chain.has(stored) else [f"not so: {text}"], text


# The settings


def _settings(run: _Run) -> _Answer:
    """Compare the report with what the header of the ledger makes of the settings."""
    header = run.account
    if header is None:
        return None
    privacy = header["privacy"]
    schedule = header.get("schedule")
    assumed = OF_RECORDS
    facts = {"mechanism": privacy["mechanism"], "delta": header["delta"]}
    if "releases" in header:
        setup, claims = claimed(header)
        assumed = setup.sampler.facts
        facts = claims.facts() | facts
        facts["delta"] = setup.delta
    else:
        facts["sizes"] = (header["dimension"],)
        facts["replaced"] = schedule is None
        if schedule is None:
            facts["sums"] = 1
    made = {name: run.restated.made[name] for name in _SETTINGS if name in run.restated.made}
    if "releases" in header:
        del made["records"]  # None, among the other fields
    wrong = []
    if schedule is not None:
        wrong += differences(
            schedule, assumed, "{} of the schedule is {!r} in the ledger, its sampler makes {!r}"
        )
    text = "{} of the price is {!r} in the ledger, its settings and schedule make {!r}"
    for kind in run.ledger.kinds:
        weights = kind["price"]["weights"]
        if weights is None or "releases" in header:
            own = {}
        else:
            own = {"weights": normalized(weights)}
        wrong += differences(kind["price"], facts | own, text)
    wrong += differences(run.report, made, "{} is {!r} in privacy.json and {!r} in the ledger")
    wrong += _population(run)
    if header["replays_free"] == (privacy["source"] == "secure"):
        wrong.append(
            f"source is {privacy['source']!r} and replays_free {header['replays_free']} "
            "in the ledger"
        )
    return wrong, f"{', '.join(made)} are the same in privacy.json and in the ledger"


def _population(run: _Run) -> list[str]:
    """Return the numbers of clients and of their records in the ledger that are not those of the
    results."""
    header = run.header
    if header is None or run.counts is None:
        return []
    counts = run.counts.tolist()
    if "schedule" in header:
        n = header["schedule"]["n"]
    else:
        n = header["accounts"]
    interval = run.report.get("interval") or {"unit": None}
    if interval["unit"] == "client":
        n -= interval["canaries"]
    if interval["unit"] == "record":
        counts = [
            count + interval["added"]["each"] * (count == interval["added"]["to"])
            for count in counts
        ]
    if len(counts) != n:
        return [f"the ledger is that of {n:,} clients, clients.csv has {len(counts):,}"]
    if "releases" in header or "schedule" not in header:
        return []
    pairs = [
        (run.ledger.kinds[k]["price"]["sampled"], count)
        for k, count in zip(run.ledger.kind_of, counts, strict=True)
    ]
    batch = max((rate * count for rate, count in pairs if rate < 1), default=math.inf)
    if not all(math.isclose(rate, min(1.0, batch / count), rel_tol=1e-9) for rate, count in pairs):
        return [
            "the sampling rates in the ledger are not those of one batch size and the records "
            "in clients.csv"
        ]
    return []


def _fields(run: _Run) -> _Answer:
    """Compare the other fields of the report with those of the ledger, and name the ones that
    nothing derives."""
    known = {"headline", *(part.name for part in fields(PrivacyReport))}
    strange = sorted(str(name) for name in run.report if name not in known)
    if strange:
        return [f"{name} is no field of a report" for name in strange], ""
    made: dict[str, Any] = {}
    if run.account is not None:
        told = [name for name in _SETTINGS if name != "records" or "releases" not in run.account]
        made = {name: value for name, value in run.restated.made.items() if name not in told}
    for name in _OF_ACCOUNTANTS:
        if name in made and near(run.report.get(name), made[name]):
            made[name] = run.report.get(name)
    wrong = differences(run.report, made, "{} is {!r} in privacy.json, and the ledger makes {!r}")
    unknown = _underived(run)
    if wrong or not unknown:
        return wrong, f"{', '.join(made)} are what the ledger makes of them"
    raise _NotCovered("; ".join(f"{name}: {why}" for name, why in unknown.items()))


def _underived(run: _Run) -> dict[str, str]:
    """Return the fields of the report that are compared with nothing but its copy in result.json,
    and why."""
    stated = [part.name for part in fields(PrivacyReport)]
    if run.secret:
        why = "a search publishes nothing of the ledgers of its runs"
        return {", ".join(name for name in stated if name not in _OF_SEARCH): why}
    if run.account is None:
        return {", ".join(stated): "there is no ledger to derive them from"}
    unknown = dict(run.restated.unknown)
    if run.report.get("interval") is not None:
        unknown[", ".join(_GUESSED)] = (
            "the attack is counted with the noise known, and noise is in no file"
        )
    return unknown


def _search(run: _Run) -> _Answer:
    """Compare what the report of a private search says of it with the header of its ledger."""
    if not run.secret or run.header is None:
        return None
    header = run.header
    search = run.report["search"]
    bound = header["score_bound"]
    score = "test accuracy"
    if bound is not None:
        score = f"1 - min(mse, {bound:g}) / bound"
    made = {
        "candidates": list(header["candidates"]),
        "mean": header["mean"],
        "shape": float(header["shape"]),
        "score": f"mean over all clients of the {score} of their own models",
        "score_noise": header["score_noise"],
    }
    stated = dict(search)
    stated["shape"] = float(stated["shape"])
    wrong = differences(
        stated, made, "{} of the search is {!r} in privacy.json and {!r} in the ledger"
    )
    wrong += [f"{name} is no fact of a search" for name in sorted(set(search) - set(made))]
    fixed = dict.fromkeys(("run", "ledger_lines", "ledger_head")) | {
        "accountant": "rdp",
        "observer": "public",
    }
    wrong += differences(run.report, fixed, "{} is {!r} in privacy.json, and {!r} of every search")
    return wrong, f"{', '.join(made)} are the same in privacy.json and in the ledger"


# Charges and their cost


def _charges(run: _Run) -> _Answer:
    header = run.header
    result = run.result
    if header is None:
        return None
    if run.secret:
        raise _NotCovered("a search: its runs have ledgers of their own, which stay private")
    steps = run.ledger.by_step
    remaining = run.ledger.remaining
    wrong = run.ledger.problems()
    done = int(result["rounds"])
    if sum(0 <= step < done for step in steps) < done:
        wrong.append(f"{done} steps are done, and not all of them are charged")
    if run.checkpoint is not None and run.checkpoint.step != done:
        wrong.append(f"result.json has {done} rounds, the checkpoint {run.checkpoint.step}")
    if result.get("stopped") == "early" and remaining is None:
        wrong.append("the run stopped early, and the steps that were planned are not charged")
    planned = result.get("planned_rounds")
    if planned is not None and steps and max(steps) >= planned:
        wrong.append(f"step {max(steps)} is charged, and {planned} were planned")
    stated = run.report.get("releases")
    releases = run.ledger.releases
    if stated != releases:
        wrong.append(f"privacy.json has {stated} releases, the ledger charges {releases}")
    if bool(run.report.get("remaining_charged")) != (remaining is not None):
        wrong.append(
            "privacy.json and the ledger differ in whether the rest was charged after an early stop"
        )
    text = f"{len(run.ledger.steps):,} steps, in order and each once"
    if run.ledger.by_client:
        what = "participations" if "schedule" in header else "activations"
        text += f"; at most {int(run.ledger.uses.max(initial=0))} {what} of one client"
    if header.get("bands"):
        text += (
            f", {len(header['bands'])} rounds between them at least, over which noise is correlated"
        )
    return wrong, text + (
        ", the rest after an early stop included" if remaining is not None else ""
    )


def _epsilon(run: _Run) -> _Answer:
    """Compose the price of all charged uses of each kind of account by dp-accounting."""
    claim = run.report.get("epsilon")
    header = run.header
    if header is None:
        where = run.report.get("elsewhere")
        if claim == "inf":
            return [], "infinite: no protection is claimed" + (f" here, {where}" if where else "")
        if claim == 0 and not run.report.get("names"):
            return [], "0: nothing is released"
        why = "there is no ledger whose chain holds"
        if run.result.get("replicates"):
            why = "repetitions are simulations, whose charges are not kept"
        raise _NotCovered(f"{why}, so there is nothing to compute it from")
    if run.secret:
        raise _NotCovered("that of a search is not computed again")
    if header["refuted"] is not None:
        if claim != "inf" and run.ledger.uses.any():
            wrong = [f"epsilon is {claim}, and the accounting is refuted"]
        else:
            wrong = []
        return wrong, "infinite: the published accounting does not hold"
    if not isinstance(claim, (int, float)):
        return [f"epsilon is {claim!r} in privacy.json; a ledger charges a finite one"], ""
    charged = run.ledger.most_charged
    tested = spread(charged, _KINDS)
    bounds = [run.ledger.library_epsilon(account, float(claim)) for account in tested]
    least = max((bound for bound in bounds if bound is not None), default=None if bounds else 0.0)
    if least is None:
        raise _NotCovered(
            "dp-accounting does not have this law of noise, so it is not computed again"
        )
    among = ""
    if len(tested) != len(charged):
        among = f" (the largest of {len(tested):,} of {len(charged):,} kinds)"
    text = f"{least:.6g}{among} by dp-accounting, {rounded_up(claim, 6)} in privacy.json"
    return [text] if claim < least * (1 - TOLERANCE) - 1e-9 else [], text


def _budget(run: _Run) -> _Answer:
    claim = run.report.get("epsilon")
    budget = run.report.get("budget")
    if run.chain is None or run.secret:
        return None
    if not isinstance(claim, (int, float)) or not isinstance(budget, (int, float)):
        return None
    text = f"epsilon {rounded_up(claim, 6)} of a budget of {rounded_up(budget, 6)}"
    return [text] if claim > budget * (1 + _SLACK) else [], text


def _interval(run: _Run) -> _Answer:
    """Compute the lower bounds again from the guesses in the report, and the price and the uses in
    the ledger."""
    interval = run.report.get("interval")
    header = run.header
    if interval is None:
        return None
    if header is None:
        raise _NotCovered(
            "the price and the uses that bounds are made of are in the ledger, which is not here"
        )
    account = interval["account"]
    uses = {
        "uses": int(run.ledger.uses[account]),
        "delta": header["delta"],
        "claimed": run.report.get("epsilon"),
    }
    wrong = differences(
        interval, uses, "{} of the interval is {!r}, and {!r} in the ledger or the report"
    )
    again = with_bounds(
        interval | uses, Price.from_dict(run.ledger.kinds[run.ledger.kind_of[account]]["price"])
    )
    pairs = [(interval["measured"], again["measured"])]
    for stated, made in zip(interval["observers"], again["observers"], strict=True):
        bounds = zip(stated["bounds"], made["bounds"], strict=True)
        pairs += [(bound["epsilon"], other["epsilon"]) for bound, other in bounds]
    if not all(math.isclose(stated, made, rel_tol=_SLACK) for stated, made in pairs):
        wrong.append("the bounds are not those of the guesses")
    least = rounded_down(interval["measured"])
    text = f"epsilon is at least {least} by the guesses on {interval['canaries']:,} canaries"
    return wrong, f"{text}, at {100 * interval['confidence']:.4g}%"


def _row_noise(run: _Run) -> _Answer:
    names = [key.removeprefix(_ROWS) for key in run.header or () if key.startswith(_ROWS)]
    if names:
        raise _NotCovered(
            f"the account of the noise on rows of {', '.join(names)} is not computed again"
        )
    return None


# The report


def _headline(run: _Run) -> _Answer:
    text = run.report.get("headline")
    made = PrivacyReport.from_dict(run.report).headline
    if text != made:
        wrong = [f"the headline is {text!r}, and the figures of the report make {made!r}"]
    else:
        wrong = []
    return wrong, "it states the figures of the report"


def _report(run: _Run) -> _Answer:
    """Compare the report in its two files."""
    if not run.private:
        raise _NotCovered("private/result.json is not here")
    wrong = differences(
        run.result, run.report, "{0} is {2!r} in privacy.json and {1!r} in result.json"
    )
    names = [part.name for part in fields(PrivacyReport) if part.name in run.result]
    wrong += [f"{name} is missing in privacy.json" for name in names if name not in run.report]
    return wrong, "every field of privacy.json is the one in result.json"


# What was released


def _grid(run: _Run) -> _Answer:
    if run.report.get("source") != "secure":
        raise _NotCovered("noise is not rounded to a grid in seeded mode")
    path = run.folder.public / "releases.safetensors"
    if not path.exists():
        raise _NotCovered("no released values are kept")
    tensors, grids = run.files.tensors(path)
    values = {
        name: GridValue(value=value, **json.loads(grids[name])) for name, value in tensors.items()
    }
    wrong = []
    for name, last in values.items():
        if math.frexp(last.width)[0] != 0.5:
            wrong.append(
                f"the grid of {name} has a width of {last.width!r}, which is no power of two"
            )
        elif last.off_grid:
            wrong.append(
                f"{last.off_grid} of {last.value.numel()} coordinates of {name} are not on its grid"
            )
        if run.private and last.step >= run.result["rounds"]:
            wrong.append(f"{name} is of step {last.step}, and {run.result['rounds']} were made")
    if run.header is not None and "releases" in run.header:
        _, claims = claimed(run.header)
        for name in claims.names:
            claim = claims.of(name, use=len(run.ledger.steps) - 1)
            bound = run.norms.get(name, claim.bound)
            if name in values and claim.law in _LENGTHS and (name in run.norms or not run.adaptive):
                wrong += _too_quiet(name, replace(claim, bound=bound), values[name])
    steps = ", ".join(
        f"{name} of step {last.step} ({last.value.numel()} coordinates)"
        for name, last in values.items()
    )
    return (
        wrong,
        f"whole multiples of a public power of two: {steps}; earlier releases are not kept",
    )


def _too_quiet(name: str, claim: Claim, last: GridValue) -> list[str]:
    """Returns the complaint about a release with less noise than the ledger states.

    Such a sum is stochastically at least as long as the noise in it, whatever the clients sent and
    whatever other noise it is correlated with (Anderson, "The integral of a symmetric unimodal
    function over a symmetric convex set", 1955), so a length below the quantile of the noise occurs
    by chance once in a million releases. Noise of half the scale is found with certainty from about
    100 coordinates on.
    """
    wrong = []
    if last.width != claim.width or last.divisor != claim.denominator:
        wrong.append(f"the grid of {name} is not that of the noise and the divisor in the ledger")
    first = 1.0
    if claim.bands:
        first = claim.bands[0]
    length, least = _LENGTHS[claim.law](last.value.double() / claim.scale * first)
    if length < least:
        wrong.append(f"{name} has less noise than the multiplier in the ledger gives")
    return wrong


def _gaussian_length(noise: Tensor) -> tuple[float, float]:
    """Return the length of Gaussian noise of scale 1 in its own norm, squared, and what it hardly
    ever is below."""
    return float(noise.square().sum()), float(chi2.ppf(_BY_CHANCE, noise.numel()))


def _laplace_length(noise: Tensor) -> tuple[float, float]:
    """Return the length as :func:`_gaussian_length`, of independent Laplace coordinates."""
    return float(noise.abs().sum()), float(gamma.ppf(_BY_CHANCE, noise.numel()))


def _l2_laplace_length(noise: Tensor) -> tuple[float, float]:
    """Return the length as :func:`_gaussian_length`, of a density that falls with the L2 norm."""
    return float(noise.norm()), float(gamma.ppf(_BY_CHANCE, noise.numel()))


_LENGTHS = {
    "gaussian": _gaussian_length,
    "laplace": _laplace_length,
    "l2_laplace": _l2_laplace_length,
}


def _model(run: _Run) -> _Answer:
    path = run.folder.public / MODEL
    if not path.exists():
        return None
    if run.checkpoint is None:
        raise _NotCovered("the checkpoint is not here")
    tensors, metadata = run.files.tensors(path)
    outcome = run.files.json(run.folder.private / OUTCOME, finite=False)
    names = outcome["network"]["names"]  # as they follow in a flat model
    tied = json.loads(metadata.get("tied", "{}"))
    loose = [name for name, first in tied.items() if not torch.equal(tensors[name], tensors[first])]
    if loose:
        return [f"{loose[0]} is said to be tied to {tied[loose[0]]}, but has other numbers"], ""
    model = torch.cat([tensors[name].flatten() for name in names])
    public = list(run.checkpoint.public.values())
    rows = [value.flatten() for value in public if value.numel() == model.numel()]
    rows += [
        value[0]
        for value in public
        if value.ndim == 2 and value.shape[1] == model.numel() < value.numel()
    ]
    rows = [row for row in rows if row.dtype == model.dtype]
    if not rows:
        raise _NotCovered("the checkpoint has no vector of its length")
    frozen = len(tensors) - len({*names, *tied})
    text = "model.safetensors has the numbers of the shared model in the checkpoint"
    if frozen:
        text += f"; its {frozen} frozen tensors are public and in no other file"
    return [] if any(torch.equal(row, model) for row in rows) else [f"not so: {text}"], text


_LEDGER = "the ledger or the report"
_CHECKS: tuple[tuple[str, str, Callable[[_Run], _Answer]], ...] = (
    ("files: public", MANIFEST, partial(_files, private=False)),
    ("files: private", MANIFEST, partial(_files, private=True)),
    ("chain", "the ledger", _chain),
    ("head", _LEDGER, _head),
    ("checkpoint", "the checkpoint", _checkpoint),
    ("settings", _LEDGER, _settings),
    ("search", _LEDGER, _search),
    ("fields", _LEDGER, _fields),
    ("charges", _LEDGER, _charges),
    ("epsilon", _LEDGER, _epsilon),
    ("budget", "the report", _budget),
    ("interval", _LEDGER, _interval),
    ("row noise", "the ledger", _row_noise),
    ("headline", "the report", _headline),
    ("report", "the report", _report),
    ("grid", "releases.safetensors or the ledger", _grid),
    ("model", "model.safetensors or the checkpoint", _model),
)
"""Name, files that it reads, and function of every check, in the order of the lines."""
