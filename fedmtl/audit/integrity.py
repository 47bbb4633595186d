"""Checks of the files of a run against one another: the lists of hashes, the chain of the ledger,
its head, the checkpoint and the shared model."""

from __future__ import annotations

import json

import torch

from ..privacy.chain import Head
from ..trainer.folder import MANIFEST, MODEL, OUTCOME
from .finished_run import Answer, FinishedRun, NotCovered


def check_files(run: FinishedRun, *, private: bool) -> Answer:
    part = run.folder.private if private else run.folder.public
    if not part.is_dir():
        raise NotCovered("the private part is not here")
    manifest = run.files.json(part / MANIFEST)
    files = manifest["files"]
    wrong = []
    for file, digest in files.items():
        path = part / file
        # a name with a folder in it would lead out of the run
        if path.name != file or not path.exists():
            wrong.append(f"{file} is missing")
        elif run.files.digest(path) != digest:
            wrong.append(f"{file} is not the file that was listed")
    if not private:
        # the published files are exactly the listed ones; the private part may hold more
        extra = {path.name for path in part.iterdir()} - set(files) - {MANIFEST}
        wrong += [f"{file} was added" for file in sorted(extra)]
    elif run.files.json(run.folder.public / MANIFEST).get("private") != run.files.digest(
        part / MANIFEST
    ):
        wrong.append(f"{MANIFEST} is not the one of which public/{MANIFEST} has the hash")
    if manifest.get("run") != run.report.get("run") and not run.secret:
        wrong.append(f"{MANIFEST} and privacy.json are of different runs")
    return wrong, f"{len(files)} files have the hashes of {part.name}/{MANIFEST}"


def check_chain(run: FinishedRun) -> Answer:
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
    raise NotCovered(
        "no ledger: nothing was charged"
        if run.report.get("run") is None
        else "the ledger is not here"
    )


def check_head(run: FinishedRun) -> Answer:
    if run.chain is None:
        return None
    if run.secret:
        raise NotCovered("a search does not publish the end of its ledger")
    head = Head(int(run.report.get("ledger_lines") or 0), str(run.report.get("ledger_head")))
    wrong = []
    if run.report.get("run") != run.chain.digests[0]:
        wrong.append("privacy.json has the identity of another run")
    # a head of no line is that of every ledger
    if not run.chain.has(head) or not head.lines:
        wrong.append(f"line {head.lines} of the ledger is not the head in privacy.json")
    elif run.chain.head != head:
        wrong.append(f"the ledger continues after line {head.lines}, the head in privacy.json")
    return wrong, f"line {head.lines}, the last one, is the head in privacy.json"


def check_checkpoint(run: FinishedRun) -> Answer:
    stored = None if run.checkpoint is None else run.checkpoint.ledger
    if run.chain is None or stored is None:
        return None
    text = f"line {stored.lines} is the head in the checkpoint"
    return [] if run.chain.has(stored) else [f"not so: {text}"], text


def check_model(run: FinishedRun) -> Answer:
    path = run.folder.public / MODEL
    if not path.exists():
        return None
    if run.checkpoint is None:
        raise NotCovered("the checkpoint is not here")
    tensors, metadata = run.files.tensors(path)
    outcome = run.files.json(run.folder.private / OUTCOME, finite=False)
    names = outcome["network"]["names"]  # as they follow in a flat model
    tied = json.loads(metadata.get("tied", "{}"))
    # weights that are tied are one parameter in the flat model, and a tensor each in the file
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
        raise NotCovered("the checkpoint has no vector of its length")
    # no release moves them, so no checkpoint has them
    frozen = len(tensors) - len({*names, *tied})
    text = "model.safetensors has the numbers of the shared model in the checkpoint"
    if frozen:
        text += f"; its {frozen} frozen tensors are public and in no other file"
    return [] if any(torch.equal(row, model) for row in rows) else [f"not so: {text}"], text
