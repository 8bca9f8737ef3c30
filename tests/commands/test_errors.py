"""Errors made by the user: one line on stderr that names the option or file, exit code 2, and no files left behind."""

import json
import sys

import pytest
import torch

from loco_ext.checkpoints import save_weights
from loco_ext.cli import main
from loco_ext.experiments import models

DIGITS = ["--model", "small", "--dataset", "digits"]
TRAIN = ["train", *DIGITS, "--preset", "quick", "--epochs", "1", "--out", "out"]
FRONTIER = ["frontier", "--model", "plain8", "--dataset", "digits", "--out", "out"]
EFCN = ["efcn", *DIGITS, "--epochs", "2", "--out", "out"]
LANDSCAPES = ["landscapes", *DIGITS, "--epochs", "1", "--out", "out"]
UNMEASURED = "--arms plain --corrupted-images 0 --ablated-images 0 --resampled-inputs 0"
COMPACT = ["compact", "--out", "out"]
SHRINK = ["shrink", "weights.pt", "--model", "small", "--dataset", "digits", "--out", "out"]
DEMO = ["demo", "--out", "out"]
# From 3.14 on, Python says of a path with too long a name that there is no such file.
UNREADABLE = "expected data_batch_1.bin" if sys.version_info >= (3, 14) else "File name too long"
REGIONS = ["regions", "--out", "out"]
REPRODUCE = ["reproduce", "--out", "out"]

CASES = {
    (): {
        "": "Missing command",
        "train-everything": "No such command 'train-everything'",
        "train": "Missing option '--",
        "info --out x": "No such option: --out",
        "shrink other --dataset cifar10 --macs 0.5": "--dataset: expected digits, as for the training, got cifar10",
    },
    tuple(DEMO): {
        "--speed 9": "No such option: --speed",
        "--epochs 0": "--epochs: expected at least 1, got '0'",
        "--epochs 2.5": "--epochs: expected an integer, got '2.5'",
        f"--seed {2**63}": f"--seed: expected at most {2**63 - 1}, got '{2**63}'",
        "--device abacus": "--device: expected a device that torch can use here, got 'abacus'",
        "--device meta": "--device: expected",
        "--device hpu": "--device: expected",
        "--out file": "--out: expected a folder that can be written to, got 'file': File exists",
        "--out file/below": "--out: expected a folder",
        "--out w": "--out: expected a folder without other results, got w, which has model.safetensors",
    },
    tuple(TRAIN): {
        "--model lenet": "--model: expected one of small, vgg13, mobilenet, resnet18",
        "--dataset imagenet": "--dataset: expected one of digits, cifar10",
        "--preset fast": "--preset: expected one of paper, quick",
        "--optimizer lion": "--optimizer: expected one of sgd, adam, adamw, got 'lion'",
        "--norm l1 --optimizer adamw": "--norm: expected l2 for adamw",
        "--batch-size 1": "--batch-size: expected at least 2",
        "--lr nan": "--lr: expected at least 0, got 'nan'",
        "--lr inf": "--lr: expected a finite number, at least 0, got inf",
        "--momentum x": "--momentum: expected a number, got 'x'",
        "--momentum 1": "--momentum: expected less than 1, got 1.0",
        "--image-size 8": "--image-size: expected none for digits",
        "--weights nowhere.pt": "--weights: nowhere.pt: ",
        "--milestones 3,2": "--milestones: expected ascending epochs",
        "--milestones 0,3": "--milestones: expected ascending epochs from 1 on",
        "--milestones 3": "--milestones: expected none with the cosine schedule",
        "--schedule steps --milestones 1,1 --factor 1e200": "--factor: expected one that leaves",
        "--locality=": "--locality: expected none, GAMMA,ETA or a file",
        "--locality nowhere.json": "--locality: expected none, GAMMA,ETA or a file",
        "--locality 1,2,3,4": "--locality: ",
        "--device cuda:99": "--device: expected a device that torch can use here",
        "--locality layers.json": "--locality: per_layer: expected names of convolutions",
        "--macs 0.5 --round-to 65": "--round-to: expected at most 64, the channels of the widest layer, got 65",
        "--data nowhere": "--data: expected none for digits, or a folder, got 'nowhere'",
        "--weights w/model.safetensors --out w": "--out: expected a folder without other results, got w, which has mod",
        "--out regions": "--out: expected a folder without other results, got regions, which has settings.json",
        "--model vgg13": "vgg13 needs images of at least 32x32",
        "--dataset cifar10": "--data: expected the folder that holds the files of the data set cifar10",
        "--dataset cifar10 --data nowhere": "nowhere: expected data_batch_1.bin",
        f"--dataset cifar10 --data {'x' * 300}": UNREADABLE,
        "--penalty groups": "--penalty: expected one of rings, kernels, complexity",
        "--alpha 10": "--alpha: expected 0 without pilcro",
        "--pilcro target": "--alpha: expected more than 0 with pilcro target",
        "--penalty none --strength 0.1": "--strength: expected 0 without a penalty",
        "--penalty rings": "--strength: expected more than 0 with a penalty, got 0.0",
        "--penalty complexity --folded": "--folded: expected False with the penalty complexity",
        "--folded": "--folded: expected False without a penalty",
        "--macs 1.5": "--macs: expected a share in (0, 1], got 1.5",
        "--macs 0.5 --parameters 0.5": "--macs, --parameters: expected at most one of them",
        "--round-to 8": "--round-to: expected 1 without macs, parameters or latency, got 8",
        "--method penalty": "--method: expected pruning without macs, parameters or latency, got penalty",
        "--granularity filters": "--granularity: expected rings without macs, parameters or latency, got filters",
        "--teacher nowhere.pt": "--teacher: nowhere.pt: ",
        "--teacher empty": "--teacher: empty: expected the folder of a run, found no settings.json in it",
        "--teacher own": "--teacher: model: expected my_networks:make, as for the training",
        "--teacher other": "--teacher: other: expected a network for digits, images of 1x8x8 in 10 classes, got one",
        "--teacher weights.pt --model plain8": "--teacher: weights.pt: weights of another network",
        "--teacher weights.pt --distillation 1.5": "--distillation: expected at most 1",
        "--teacher weights.pt --distillation nan": "--distillation: expected at most 1",
        "--teacher weights.pt --temperature 0": "--temperature: expected a finite number, more than 0, got 0.0",
        "--distillation 0.5": "--distillation: expected a teacher with it, got none",
        "--temperature 2": "--temperature: expected 4 without distillation, got 2.0",
        "--model resnet8 --width 0": "--width: expected 1, or more than 0",
        "--width 0.5": "--width: expected 1, or more than 0 for resnet20",
        "--out file/run": "--out: expected a folder that can be written to",
        "--out a\udcffb": r"--out: expected a path in UTF-8, got 'a\udcffb'",  # the byte 0xff, as Python reads it
        "--optimizer adamw --momentum 0.5": "--momentum: expected it only with --optimizer sgd, got 0.5",
        "--schedule cosine --factor 0.5": "--factor: expected it only with --schedule steps, got 0.5",
        "--weight-decay 0 --locality 0.5,2": "--locality: expected it only with a --weight-decay, got (0.5, 2.0)",
        "--no-augment --no-crop": "--crop: expected it only with --augment, got False",
        "--weighting scaled": "--weighting: expected it only with a --penalty, got scaled",
        "--penalty kernels --strength 1 --kind full": "--kind: expected it only with --penalty rings or complexity",
        "--solver subgradient": "--solver: expected it only with a --penalty, got subgradient",
    },
    tuple(FRONTIER): {
        "--taus 0.1": "--taus: expected it only with --method subgradient, got (0.1,)",
        "--widths 0.5": "--widths: expected it only with --method width, got (0.5,)",
        "--method width --strengths 1": "--strengths: expected it only with --method prox or subgradient",
        "--method width --refit-epochs 0 --lr 0.1": "--lr: expected it only with --method prox or subgradient, or with",
        "--method width --width 0.5": "--width: expected it only with --method prox or subgradient, got 0.5",
        "--strengths 1,2 --points 3": "--points: expected it only with --method prox and without --strengths",
        "--dense-epochs 0 --optimizer adam --momentum 0.5": "--momentum: expected it only with --optimizer sgd or a",
        "--dense-epochs 0 --dense-lr 0.2": "--dense-lr: expected it only with at least 1 in --dense-epochs, got 0.2",
        "--method subgradient": "--strengths: expected numbers with the method subgradient, got none",
        "--method width --penalty rings": "--penalty: expected none with the method width",
        "--method width --widths 0": "--width: expected 1, or more than 0",
        "--span 0": "--span: expected more than 0",
        "--strengths 1;2": "--strengths: expected numbers separated by commas",
        "--taus -1": "--taus: expected finite numbers, at least 0",
    },
    tuple(EFCN): {
        "--preset slow": "--preset: expected one of paper, alexnet, quick, got 'slow'",
        "--relax 0": "--relax: expected lcn, full or a radius of at least 1, got '0'",
        "--relax lcn,lcn": "--relax: expected some, each once",
        "--switch 0,9": "--switch: expected ascending epochs from 0 to 2, got (0, 9)",
        "--switch 2,1": "--switch: expected ascending epochs",
        "--interpolation-points 1": "--interpolation-points: expected 0 or at least 2, got 1",
        "--model vanilla": "--model: vanilla needs images of at least 28x28 pixels",
    },
    tuple(LANDSCAPES): {
        "--arms lasso:1": "--arms: expected plain, or one of target, curvature, noise, decay with a number",
        "--arms plain,plain": "--arms: expected some, each once",
        f"{UNMEASURED} --seeds 2 --seed {2**63 - 1}": f"--seed: expected at most {2**63 - 1}, got {2**63}",
        "--arms target:0": "alpha: expected more than 0 with pilcro target",
        "--model vgg13": "--model: vgg13 needs images of at least 32x32 pixels",
    },
    tuple(COMPACT): {
        "nowhere.pt": "nowhere.pt: expected the folder of a run or a checkpoint, found neither",
        "weights.pt": "--model: expected one of small",
        "weights.pt --model small": "--dataset: expected one of digits",
        "empty": "found no settings.json in it",
        "own": "--model: expected my_networks:make, as for the training",
        "weights.pt --model small --dataset cifar10": "weights of another network",
        "other --dataset cifar10": "--dataset: expected digits, as for the training, got cifar10",
        "other": "--data: expected images of 1x8x8 in 9 classes, as for the training, got images of 1x8x8 in 10",
        "w/model.safetensors --model small --dataset digits --out w": "--out: expected a folder without other results",
        "weights.pt --model small --dataset digits --out regions": "--out: expected a folder without other results",
    },
    tuple(SHRINK): {
        "": "--macs, --parameters, --latency: expected exactly one of them, got none",
        "--macs 0.5 --latency 0.5": "--macs, --latency: expected at most one of them",
        "--macs 0.5 --out regions": "--out: expected a folder without other results, got regions, which has settings",
        "--latency nan": "--latency: expected a share in (0, 1], got nan",
        "--macs 0.5 --lr -1": "--lr: expected at least 0, got '-1'",
    },
    tuple(REGIONS): {
        "--dataset mnist": "--data: expected the folder that holds MNIST's idx files, got none",
        "--percents most": "--percents: expected a number or 'max', got 'most'",
        "--percents 50": "--probes: expected 0 to select 50.0 percent",
        "--strengths -1": "--strengths: expected a finite number of at least 0",
        "--hinges=": "--hinges: expected at least one, got none",
        "--momentum 1": "--momentum: expected less than 1",
        "--preset best": "--preset: expected one of paper, quick, got 'best'",
    },
    tuple(REPRODUCE): {
        "": "Missing argument 'paper'. Choose from: loco-reg, sparsity, efcn, pilcro, linear-regions, all",
        "loco-reg --preset paper": "--data: expected the folder of the data sets with the preset paper",
        "efcn --preset cpu": "--data: expected the folder of CIFAR-10 with the preset cpu of efcn or all",
        "sparsity --stage 3": "--stage: expected at most 2, got 3",
        "loco-reg --job 9": "--job: expected a number from 1 to 8, got 9",
        "loco-reg --job 1 --stage 3": "--job: expected a number of stage 3, got 1",
        "loco": "expected one of loco-reg, sparsity, efcn, pilcro, linear-regions, all",
        "loco-reg --checkpoints nowhere": "--checkpoints: expected a folder, got 'nowhere'",
    },
    ("report",): {
        "": "Missing argument 'RUNS...'",
        "nowhere": "nowhere: expected a folder with runs: No such file or directory",
        "file": "file: expected a folder with runs: Not a directory",
        "empty": "empty: expected a folder with runs in it, or below, found none",
        "own": "own: expected a run that is finished, or a training after its first epoch",
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder of weights, and of folders with what runs leave."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("empty", "own", "other", "regions", "w"):
        (folder / name).mkdir()
    (folder / "file").write_text("kept")
    torch.save(models.small_cnn().state_dict(), folder / "weights.pt")
    save_weights(folder / "w" / "model.safetensors", models.small_cnn().state_dict())
    save_weights(folder / "other" / "model.safetensors", models.small_cnn(classes=9).state_dict())
    for name, settings, images in (
        ("own", {"model": "my_networks:make", "data": "folder"}, {"channels": 3, "size": 8, "classes": 2}),
        ("other", {"model": "small", "data": "digits"}, {"channels": 1, "size": 8, "classes": 9}),
    ):
        (folder / name / "settings.json").write_text(json.dumps({"settings": settings, "dataset": images}))
    (folder / "regions" / "settings.json").write_text('{"settings": {}, "digest": "0123456789ab"}')
    (folder / "layers.json").write_text('{"locality": {"9": [1, 2]}}')
    return folder


@pytest.mark.parametrize(
    ("line", "said"),
    [([*start, *bad.split()], said) for start, cases in CASES.items() for bad, said in cases.items()],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else "",
)
def test_an_error_is_one_line_and_leaves_nothing(place, monkeypatch, capsys, line, said):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    assert main(line) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("loco-ext: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert sorted(place.rglob("*")) == before
    assert (place / "file").read_text() == "kept"
