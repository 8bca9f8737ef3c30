"""From convolution to full connection on CIFAR-10: the eFCN paper's experiment, shortened, and networks in between.

    python -m studies.efcn_cifar10 --data DIR      takes some hours on one core; writes studies/results/

The VanillaCNN is trained for 30 epochs of the paper's 150, lifted networks for 10 of its 100, on all 50,000 training
images. The studies are "lcn", from epochs 0, 3, 10 and 30; "grown", by two pixels, and "full", both from 0 and 10,
where a curvature takes a few Hessian-vector products; "full" also has the fully connected network from scratch. The
study "paths" is the paper's figure 12: it goes from the trained CNN to what is trained on from epoch 10, the CNN itself
and one without weight sharing, and has a report of its own. All start from the same training of the CNN, that of the
first study.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.functional import cross_entropy

from bench import harness
from loco_ext.experiments import efcn, efcn_figures, figures
from loco_ext.experiments.data import Dataset, load
from loco_ext.experiments.efcn_settings import CNN, EfcnSettings, efcn_preset
from loco_ext.experiments.loader import Normalization
from loco_ext.experiments.train import make_model, make_optimizer
from loco_ext.nn import to_efcn
from loco_ext.threads import num_threads
from studies import summaries, tables
from studies.options import Data, Device, Out, Runs

EPOCHS, BRANCH_EPOCHS = 30, 10
SWITCH_TIMES, FEW_SWITCH_TIMES = (0, 3, 10, 30), (0, 10)
LANDSCAPE_SAMPLES, POWER_ITERATIONS = 1000, 50
FEW_POWER_ITERATIONS = 10
PATHS, PATHS_SWITCH_TIMES, POINTS, STRING_STEPS = "paths", (10,), 11, 100
RADIUS = "2"
RELAXATIONS: dict[str, str | int] = {"lcn": "sharing", RADIUS: int(RADIUS), "full": "all"}
EFFORT = harness.Effort(min_rounds=8, min_seconds=0.0, warmup=1, builds=2)
FIGURES = ("dynamics", "landscape", "deviations")


def studies() -> dict[str, EfcnSettings]:
    """Return the settings by name; the switch times of the first one include those of all others."""

    def study(relax: str, **options: Any) -> EfcnSettings:
        values = {"switch_times": SWITCH_TIMES, "branch_epochs": BRANCH_EPOCHS, "fcn_epochs": 0, "epochs": EPOCHS}
        values |= {"landscape_samples": LANDSCAPE_SAMPLES, "power_iterations": POWER_ITERATIONS}
        values |= {"interpolation_points": 0}
        return efcn_preset("paper", relaxations=(relax,), **values | options)

    on_path = {"switch_times": PATHS_SWITCH_TIMES, "interpolation_points": POINTS, "string_steps": STRING_STEPS}
    few = {"switch_times": FEW_SWITCH_TIMES, "power_iterations": FEW_POWER_ITERATIONS}
    return {
        "lcn": study("lcn"),
        "grown": study(RADIUS, **few),
        "full": study("full", fcn_epochs=BRANCH_EPOCHS, **few),
        PATHS: study("lcn", power_iterations=0, **on_path),
    }


def share_cnn(first: Path, out: Path) -> None:
    """Copy the first study's training of the CNN to where another study looks for its own."""
    if not (first / "efcn.json").exists() or (out / CNN).exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    unfinished = out / f".{CNN}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(first / CNN, unfinished)
    unfinished.rename(out / CNN)


def step_seconds(settings: EfcnSettings, dataset: Dataset) -> dict[str, float]:
    """Return the seconds of a training step of each kind of network, on one thread, all timed in one run."""
    training = settings.training
    images, labels = dataset.train.first(training.batch_size)
    images = Normalization(dataset.train)(images)

    def build() -> dict[str, Callable[[], object]]:
        model = make_model(training, dataset)
        models = {CNN: model} | {name: to_efcn(model, images[:1], how) for name, how in RELAXATIONS.items()}
        return {name: step_of(model, make_optimizer(training, model, dataset)) for name, model in models.items()}

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    with num_threads(1):
        timings = harness.compare(build, EFFORT, "training steps")
    return {name: timing.median for name, timing in timings.items()}


def merged(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge the networks of all studies into one record; the CNN trained on is that of the first study."""
    first, *others = records.values()
    branches = [branch for record in others for branch in record["branches"] if branch["relax"] != CNN]
    fcns = [record["fcn"] for record in records.values() if record["fcn"]]
    return {"cnn": first["cnn"], "branches": first["branches"] + branches, "fcn": fcns[0] if fcns else None}


def save(records: dict[str, dict[str, Any]], steps: dict[str, float], runs: Path, out: Path) -> None:
    """Write the report, print its tables; draw some figures beside it, and all in a folder beside the runs."""
    networks = merged(records)
    first = next(iter(records.values()))
    tables.publish(
        "efcn_cifar10",
        out,
        settings={name: record["settings"] for name, record in records.items()},
        training_samples=first["training_samples"],
        test_samples=first["test_samples"],
        step_seconds=steps,
        networks=summaries.efcn(networks),
    )
    drawn = runs / "figures"
    drawn.mkdir(parents=True, exist_ok=True)
    figures.save(efcn_figures.draw(networks), drawn)
    for name in FIGURES:
        shutil.copy(drawn / f"{name}.png", out.with_name(f"{out.stem}-{name}.png"))


def main(
    data: Data,
    runs: Runs = Path("runs/efcn_cifar10"),
    out: Out = tables.RESULTS / "efcn_cifar10-vanilla.json",
    only: Annotated[str | None, typer.Option(help="Run only this study; only paths has a report then.")] = None,
    device: Device = "cpu",
) -> None:
    """Run the studies, write their JSON files and figures beside them, print the tables."""
    dataset, records = load("cifar10", data), {}
    for name, settings in studies().items():
        if only in (None, name):
            share_cnn(runs / next(iter(studies())), runs / name)
            records[name] = efcn.measure(settings, dataset, runs / name, device, resume=True)
    if (record := records.pop(PATHS, None)) is not None:
        networks = [summaries.paths(branch) for branch in record["branches"]]
        report = out.with_name(out.name.replace("efcn_cifar10", "efcn_paths"))
        tables.publish("efcn_paths", report, settings=record["settings"], networks=networks)
    if only is None:
        save(records, step_seconds(studies()["lcn"], dataset), runs, out)


if __name__ == "__main__":
    typer.run(main)
