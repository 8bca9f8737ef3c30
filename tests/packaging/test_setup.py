"""setup.py reads the CUDA toolkit's folder and GPUs from nvcc; the tests make compilers up."""

import re

import pytest
import torch
from torch.utils import cpp_extension

from tests.setup_script import run_setup

GENERATIONS = [75, 80, 86, 89, 90, 100, 120, 121]


@pytest.mark.parametrize(
    ("wish", "missing", "message"),
    [
        ("1", "torch", "LOCO_CUDA=1 needs a CUDA build of torch"),
        ("1", "toolkit", "LOCO_CUDA=1 needs the CUDA toolkit (it is not in /nowhere"),
        ("", "toolkit", "building without the CUDA library, which needs the CUDA toolkit"),
        ("yes", "nothing", "LOCO_CUDA: expected 0 or 1, got 'yes'"),
    ],
)
def test_what_the_cuda_library_lacks_is_said(monkeypatch, capsys, wish, missing, message):
    monkeypatch.setattr(torch.version, "cuda", None if missing == "torch" else "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/nowhere" if missing == "toolkit" else None)
    if wish:
        with pytest.raises(SystemExit, match=re.escape(message)):
            run_setup(LOCO_CUDA=wish)
    else:
        run_setup(LOCO_CUDA=wish)
        assert message in capsys.readouterr().err


def make_program(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_toolkit_is_where_nvcc_says_and_not_where_its_wrapper_is(monkeypatch, tmp_path):
    toolkit_of_nvcc = run_setup()["toolkit_of_nvcc"]
    toolkit = tmp_path / "cuda"
    make_program(toolkit / "bin" / "nvcc", f"echo '#$ _HERE_={toolkit}/bin' >&2; echo '#$ TOP={toolkit}/bin/..' >&2")
    make_program(tmp_path / "usr" / "bin" / "nvcc", f'exec {toolkit}/bin/nvcc "$@"')
    monkeypatch.setenv("PATH", str(tmp_path / "usr" / "bin"))
    assert toolkit_of_nvcc() == str(toolkit)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolkit_of_nvcc() is None


@pytest.mark.parametrize(
    ("newest", "architectures", "codes"),
    [
        (80, "7.5;8.0+PTX", "75:sm_75 80:sm_80 80:compute_80"),
        (90, "7.5;8.0;9.0+PTX", "75:sm_75 80:sm_80 80:sm_90 80:compute_80"),
        (100, "7.5;8.0;9.0;10.0+PTX", "75:sm_75 80:sm_80 80:sm_90 100:sm_100 100:compute_100"),
        (121, "7.5;8.0;9.0;10.0;12.0+PTX", "75:sm_75 80:sm_80 80:sm_90 100:sm_100 100:sm_120 100:compute_100"),
    ],
)
def test_only_gpus_that_nvcc_knows_are_compiled_for(tmp_path, newest, architectures, codes):
    known = " ".join(f"compute_{name}" for name in GENERATIONS if name <= newest)
    make_program(tmp_path / "bin" / "nvcc", f"for name in {known}; do echo $name; done")
    flags = ["-gencode=arch=compute_{},code={}".format(*code.split(":")) for code in codes.split()]
    assert run_setup()["cuda_targets"](str(tmp_path)) == (architectures, flags)


@pytest.mark.parametrize("gpus", ["", "8.6;9.0a"])
def test_torch_reads_a_given_list_of_gpus_and_adds_none_to_ours(monkeypatch, tmp_path, gpus):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    setup = run_setup()
    flags = ["-gencode=arch=compute_80,code=sm_80"]
    setup["cuda_extension"].__globals__["cuda_targets"] = lambda _: ("8.0+PTX", flags)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", gpus)
    extension = setup["cuda_extension"]()
    asked = extension.extra_compile_args["nvcc"]
    assert asked == setup["NVCC_FLAGS"] + ([] if gpus else flags)
    assert dict(extension.define_macros)["LOCO_CUDA_ARCHITECTURES"] == f'"{gpus or "8.0+PTX"}"'
    assert bool(cpp_extension._get_cuda_arch_flags(asked)) == bool(gpus)
