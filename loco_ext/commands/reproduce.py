"""The command ``loco-ext reproduce``."""

import contextlib
import io
import time
import traceback
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from loco_ext import commands
from loco_ext.commands import Data, Device, Out, Result, command, make_writable, writing_to
from loco_ext.errors import UserError
from loco_ext.experiments.reproduce.jobs import Job, JobPlan, commits
from loco_ext.output import json_text, note

Paper = Literal["loco-reg", "sparsity", "efcn", "pilcro", "linear-regions", "all"]
PAPERS = get_args(Paper)[:-1]
EPILOG = (
    "Jobs that are done are skipped, and jobs that were killed continue. To spread jobs over machines, pass the lines "
    "of --list, stage by stage, to xargs, GNU parallel or Ray, or use --job with the index of a Slurm array. Then run "
    "the command without these options to make the tables."
)


class FailedJobsError(UserError, RuntimeError):
    """Raised after everything else is done, for jobs that have failed; the message names them."""

    exit_code = 1


@command(epilog=EPILOG)
def run(
    paper: Annotated[Paper, typer.Argument(help="The paper, or all of them.")],
    *,
    preset: Annotated[
        Literal["smoke", "cpu", "paper"],
        typer.Option(
            help="Size of the experiments. smoke takes seconds, on digits. cpu is made for some two hours on two cores "
            "for all papers, on CIFAR-10 from --data or, without --data, on digits, which efcn cannot take. paper "
            "follows the authors' protocols."
        ),
    ] = "smoke",
    folder: Data = None,
    out: Out = Path("runs/reproduce"),
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of trained weights for LOCO-REG's Table 4, such as torchvision's or timm's. Files are named "
            "after the table's rows: vgg16-397923af.pth, resnet50.safetensors, densenet121.pth.  [default: none, "
            "without these rows]",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Print the command lines of unfinished jobs, and run none.")
    ] = False,
    stage: Annotated[
        int | None,
        typer.Option(
            min=1, help="Run or list only the jobs of this stage, which need the earlier stages.  [default: all stages]"
        ),
    ] = None,
    job: Annotated[
        int | None, typer.Option(min=1, help="Run or list only the job of this number.  [default: all jobs]")
    ] = None,
    device: Device = "cpu",
) -> Result:
    """Run the experiments behind a paper's tables and figures, and show the results beside the paper's values.

    The tables are printed, and written as JSON and Markdown to a folder for the preset and the paper, with the figures.
    """
    plan = JobPlan(preset, out, folder, device, checkpoints)
    names = [name.replace("-", "_") for name in (PAPERS if paper == "all" else (paper,))]
    modules = [import_module(f"loco_ext.experiments.reproduce.{name}") for name in names]
    jobs = sorted((each for module in modules for each in module.jobs(plan)), key=lambda each: each.stage)
    if stage is not None and stage > (last := jobs[-1].stage):
        raise UserError(f"stage: expected at most {last}, got {stage}")
    chosen = [(number, each) for number, each in enumerate(jobs, 1) if stage in (None, each.stage)]
    if job is not None:
        if job not in dict(chosen):
            which = f"from 1 to {len(jobs)}" if stage is None else f"of stage {stage}"
            raise UserError(f"job: expected a number {which}, got {job}")
        chosen = [(job, jobs[job - 1])]
    if listed:
        return _list(chosen)
    make_writable(out)
    failed = _run([each for _, each in chosen if not each.done])
    if job is not None or stage is not None:
        return _ended(failed, [])
    pages = [replace(module.page(plan), commits=commits(module.jobs(plan))) for module in modules]
    with writing_to(out):
        for module, page in zip(modules, pages, strict=True):
            page.save(plan.folder(module.PAPER))
    return _ended(failed, pages)


def _list(chosen: list[tuple[int, Job]]) -> Result:
    """Return the jobs that are not done, as lines or as records."""
    open_jobs = [(number, each) for number, each in chosen if not each.done]
    records = [
        {"job": number, "stage": each.stage, "minutes": each.minutes, "folder": str(each.folder), "line": each.line()}
        for number, each in open_jobs
    ]

    def show() -> None:
        for _, each in open_jobs:
            print(each.line())

    return Result(lambda: json_text(records), show)


def _run(jobs: list[Job]) -> list[Job]:
    """Run the jobs one after the other, with the time left; return those that have failed."""
    failed: list[Job] = []
    begin, passed, whole = time.monotonic(), 0.0, sum(each.minutes for each in jobs)
    for place, each in enumerate(jobs, 1):
        left = (whole - passed) * ((time.monotonic() - begin) / (60 * passed) if passed else 1)
        note(f"job {place} of {len(jobs)}, {each.name}; about {_duration(left)} left")
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                code = commands.run(each.words)
            except Exception:  # not the user's error, such as memory that is full: another job may do with less
                traceback.print_exc()
                code = 1
        if code != 0:
            failed.append(each)
        passed += each.minutes
    return failed


def _duration(minutes: float) -> str:
    """Return a duration as text.

    >>> _duration(0.4), _duration(75), _duration(6000)
    ('24 s', '75 min', '100 h')
    """
    if minutes < 2:
        return f"{60 * minutes:.0f} s"
    return f"{minutes:.0f} min" if minutes < 180 else f"{minutes / 60:.0f} h"


def _ended(failed: list[Job], pages: list[Any]) -> Result:
    """Return the pages as a result, or raise an error for jobs that have failed."""
    if failed:
        raise FailedJobsError(
            f"these jobs have failed, the tables are without them: {', '.join(j.name for j in failed)}"
        )

    def show() -> None:
        for page in pages:
            page.show()

    return Result(lambda: json_text({page.title: page.to_dict() for page in pages}), show)
