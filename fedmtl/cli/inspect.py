"""Commands that look at configurations and at runs: ``fedmtl audit``, ``verify`` and ``report``."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import ConfigError
from ..report import report as make_report
from .config import Config, build, compose, resolve, with_automatic
from .options import add_folder, add_settings, command_parser, say

REFUTED = DOES_NOT_FIT = 1  # exit codes


def audit(words: list[str]) -> int:
    """Check the noise, the clipping, the cohorts and the charges of a configuration by experiment.

    No check proves privacy: a verdict is that the claim could not be refuted at a level, or that it was; then the exit
    code is 1.

    examples
      fedmtl audit                                        the main job
      fedmtl audit algorithm=fedavg schedule=fixed        any other configuration, written as for training
      fedmtl audit privacy.source=secure                  with the coins of the operating system
      fedmtl audit --interval rounds=100                  a lower bound on epsilon, measured in a run with 500 canaries
    """
    parser = command_parser(audit)
    parser.add_argument("--seed", type=int, default=0, help="of the audit (default 0)")
    parser.add_argument(
        "--interval", action="store_true", help="train once with canaries, and print epsilon's interval"
    )
    parser.add_argument("--canaries", type=int, default=500, help="of --interval (default 500)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the transcript check (default 10)")
    add_settings(parser)
    options = parser.parse_intermixed_args(words)
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be a whole number of at least 1.")
    if options.interval:
        options.overrides += [f"audit.canaries={options.canaries}", "baselines=[]", "logger=none"]
    config = resolve(compose(with_automatic(options.overrides)))
    if options.interval:
        return _interval(config)

    from ..privacy.audit import any_refuted, table
    from ..trainer.audit.suite import audit_trainer

    began = time.monotonic()
    with TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        findings = audit_trainer(build(config, Path(folder)), seed=options.seed, rounds=options.rounds)
    print(table(findings))
    refuted, checked = sum(f.refuted for f in findings), sum(not f.skipped for f in findings)
    seconds = time.monotonic() - began
    print(f"\n{refuted} of {checked} checks refuted their claim, in {seconds:.0f} s. The others prove nothing.")
    return REFUTED if any_refuted(findings) else 0


def _interval(config: Config) -> int:
    """Train a configuration with canaries, print the interval of epsilon, and return 1 if it is empty."""
    with TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        trainer, began = build(config, Path(folder)), time.monotonic()
        result = replace(trainer, folder=None, finetune=None).fit()
    seconds = time.monotonic() - began
    interval = result.privacy.interval
    assert interval is not None
    print(f"{result.privacy.text()}\n\nOne run with {interval['canaries']:,} canaries, in {seconds:.0f} s.")
    return REFUTED if interval["measured"] > interval["claimed"] else 0


def verify(words: list[str]) -> int:
    """Check a finished run by its files, line by line; the exit code is 1 if something does not fit.

    The checks: the hashes of all files, the chain of hashes of the ledger and its head in privacy.json and in the
    checkpoint, every charge against the schedule, epsilon by dp-accounting, the last released values on their public
    grid, and the shared model against the checkpoint. What cannot be confirmed is said to be not covered. With --json
    the output can travel with a model as its privacy certificate; it holds nothing private.

    Files that fit prove that nothing was altered by mistake or by someone without the whole folder. Whoever holds the
    whole folder can write it anew, but not under the seal that a secure run prints at its end, if that was published.
    """
    parser = command_parser(verify)
    add_folder(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of lines")
    options = parser.parse_args(words)

    from ..trainer.verify import verify as check_files

    verification = check_files(options.folder)
    print(json.dumps(verification.to_dict(), indent=2) if options.json else verification.text())
    return 0 if verification.fits else DOES_NOT_FIT


def report(words: list[str]) -> int:
    """Collect finished runs into one table (CSV, markdown, LaTeX) and one privacy-utility plot."""
    parser = command_parser(report)
    parser.add_argument("folders", nargs="+", type=Path, help="runs, or folders that hold runs")
    parser.add_argument("--out", type=Path, help="where the files go; default report/ in the first folder")
    parser.add_argument("--html", action="store_true", help="one page as well, for a browser, that needs no other file")
    formats = "of the plots, png by default; those of a single run are drawn, too"
    parser.add_argument("--format", choices=("png", "pdf", "svg"), help=formats)
    paper = "of plots for a paper: 3.3 for a column, 6.8 for a page; their notes then belong into the caption"
    parser.add_argument("--width", type=float, metavar="INCHES", help=paper)
    options = parser.parse_intermixed_args(words)
    drawn = {"format": options.format or "png", "width": options.width}
    made = make_report(options.folders, options.out, html=options.html, **drawn)
    files = list(made.files)
    run, target = options.folders[0], files[0].parent
    if (options.format or options.width) and len(options.folders) == 1 and (run / "private" / "result.json").is_file():
        from ..trainer.plots import plot_result
        from ..trainer.result import Result

        files += plot_result(Result.load(run), target, **drawn)
    for folder, why in made.left_out.items():
        say(f"left out: {folder}: {why}")
    print("\n".join(map(str, files)))
    return 0
