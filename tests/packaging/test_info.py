"""The info page: as text, in machine-readable form, and without the compiled library."""

import json
import subprocess
import sys

import pytest
import torch

import loco_ext
from loco_ext import info
from loco_ext.cli import main
from loco_ext.ops import backends

WITHOUT_LIBRARY = """
import sys
sys.modules["loco_ext._C"] = None
from loco_ext.cli import main
main(["info", "--json"])
main(["info"])
"""


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


def test_facts_are_those_of_this_installation():
    facts = info.collect()
    assert facts["loco_ext"] == loco_ext.__version__
    assert facts["torch"] == torch.__version__
    assert facts["library"]["loaded"]
    assert facts["library"]["cpu_capability"] == backends.library.cpu_capabilities()[0]
    assert facts["backends"]["optim_step"]["cpu"] == "native"
    on_cuda = facts["backends"]["optim_step"]["cuda"]
    assert on_cuda == "native" if facts["cuda_library"]["loaded"] else on_cuda.startswith(("triton (", "reference ("))


def test_command_prints_the_same(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info.collect()
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch                 {torch.__version__}" in text
    assert "optim_step on cpu     native" in text


@pytest.mark.slow
def test_the_module_prints_the_page_and_names_a_missing_library_with_its_reason():
    assert "optim_step on cpu     native" in run("-m", "loco_ext.info")
    printed = run("-c", WITHOUT_LIBRARY)
    facts, end = json.JSONDecoder().raw_decode(printed)
    assert not facts["library"]["loaded"]
    assert "loco_ext._C" in facts["library"]["error"]
    assert "could not be loaded" in facts["backends"]["optim_step"]["cpu"]
    assert "reference" in printed[end:]
