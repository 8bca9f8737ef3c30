"""Jobs: commands of ``loco-ext``, independent of each other within a stage, each with a folder of its own."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loco_ext.errors import UserError
from loco_ext.experiments.data import DIGITS_TRAIN_SIZE
from loco_ext.experiments.records import Record, read
from loco_ext.experiments.settings import SettingsError

WITHOUT_DATA = ("analyze",)  # commands that read no data set and compute nothing on a device
WITHOUT_RESUMING = ("analyze", "compact")  # commands that take seconds
# The file that a command writes when it has finished; that of an experiment has its name.
RESULTS = {"train": "model.safetensors", "analyze": "analysis.json", "compact": "report.json"}


@dataclass(frozen=True)
class Job:
    """One training or measurement.

    Attributes:
        name: folder below the preset's, with the paper first.
        words: the command and its options, without the name of the program.
        result: the file that the command writes when it has finished.
        minutes: about how long it takes on two cores; the time left is computed from it. Those of the preset cpu are
            extrapolated from the studies: 15 trainings of the small CNN in half an hour, a regions network in under
            two minutes, a step of a fully connected VanillaCNN in less than half a second.
        stage: a job reads what jobs of earlier stages have written.
        data: data set that a result must be of to count as done; None for jobs that always take the same one.
    """

    name: str
    words: tuple[str, ...]
    result: Path
    minutes: float
    stage: int
    data: str | None = None

    @property
    def folder(self) -> Path:
        return self.result.parent

    @property
    def done(self) -> bool:
        return self.result.is_file() and (self.data is None or self.data == self._recorded_data())

    def _recorded_data(self) -> Any:
        """Return the data set that the job has run on."""
        path = self.folder / "settings.json"
        path = path if path.is_file() else self.result
        found = read_record(path)
        for name in ("settings", "training"):
            found = found.get(name, found)
            if not isinstance(found, dict):
                kind = type(found).__name__
                raise SettingsError(f"{path}, {name}: expected dict, got {kind}; remove it to measure anew")
        return found.get("data")

    def line(self) -> str:
        """Return the job as a command line."""
        return shlex.join(("loco-ext", *self.words))


@dataclass(frozen=True)
class JobPlan:
    """The options that all jobs of one call share."""

    preset: str  # smoke, cpu or paper
    out: Path  # folder of all presets' results
    data: Path | None = None  # folder of the data sets; "smoke" needs none
    device: str = "cpu"
    checkpoints: Path | None = None  # folder of trained networks for LOCO-REG's Table 4

    def __post_init__(self) -> None:
        if self.preset == "paper" and self.data is None:
            raise UserError("folder: expected the folder of the data sets with the preset paper, got none")
        if self.checkpoints is not None and not self.checkpoints.is_dir():
            raise UserError(f"checkpoints: expected a folder, got {str(self.checkpoints)!r}")

    @property
    def images(self) -> str:
        """Name of the small presets' data set: CIFAR-10 where cpu has a folder of it, handwritten digits elsewhere."""
        return "digits" if self.preset == "smoke" or self.data is None else "cifar10"

    def training_images(self, samples: int) -> str:
        """Return how many training images of the small presets' data set the first ``samples`` are, as text."""
        if self.images == "digits":
            return f"{min(samples, DIGITS_TRAIN_SIZE):,} handwritten digits"
        return f"{samples:,} images of CIFAR-10"

    def folder(self, name: str) -> Path:
        return self.out / self.preset / name

    def job(
        self,
        name: str,
        command: str,
        *options: str | Path | float,
        minutes: float,
        stage: int = 1,
        data: str | None = None,
    ) -> Job:
        """Return the job of a command whose folder is ``name``; --out and what jobs have in common is added."""
        words = [command, *map(str, options), "--out", str(self.folder(name))]
        if command not in WITHOUT_RESUMING:
            words.append("--resume")
        if command not in WITHOUT_DATA:
            words += ["--device", self.device]
            words += [] if self.data is None else ["--data", str(self.data)]
        result = self.folder(name) / RESULTS.get(command, f"{command}.json")
        return Job(name, tuple(words), result, minutes, stage, data)


def read_record(path: Path, *names: str) -> Record:
    """Return the content of a file that a job has written; raise SettingsError if it has not these entries."""
    return read(path, dict.fromkeys(names, object))


def read_records(jobs: list[Job], prefix: str, *names: str) -> list[Record]:
    """Return the results of the jobs that are done and whose names begin with the prefix; see :func:`read_record`."""
    return [read_record(job.result, *names) for job in jobs if job.done and job.name.startswith(prefix)]


def commits(jobs: list[Job]) -> list[str]:
    """Return the commits of the code that the jobs that are done have run with, as far as they are recorded."""
    records = [path for job in jobs if job.done for path in (job.folder / "settings.json", job.result)]
    found = (read_record(path).get("commit") for path in records if path.suffix == ".json" and path.is_file())
    return sorted({commit for commit in found if commit is not None})
