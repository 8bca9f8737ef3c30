"""Behaviour shared by all commands: exit codes, option names, output streams, and lazy imports."""

import io
import os
import subprocess
import sys

import pytest

from loco_ext import commands, output
from loco_ext.cli import main

VERSION = """
import sys
sys.argv = ["bin/loco-ext", "--version"]
from loco_ext.cli import main
assert main() == 0
assert "torch" not in sys.modules
"""
PRINTS = """
import sys
from loco_ext import cli, commands
commands.run = lambda argv: print("text") or 0
sys.exit(cli.main())
"""


def test_the_version_is_printed_without_importing_torch():
    done = subprocess.run([sys.executable, "-c", VERSION], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("loco-ext 0.1.0\n", "")


def test_no_summary_of_a_command_is_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert [summary for summary in commands.COMMANDS.values() if summary not in said] == []


def test_a_process_without_an_output_ends_well(monkeypatch):
    monkeypatch.setattr(commands, "run", lambda argv: 0)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info"]) == 0


@pytest.mark.parametrize(
    ("encoding", "told"), [("ascii", b"runs/\\xe9 \\udcff\n"), ("utf-8", b"runs/\xc3\xa9 \\udcff\n")]
)
def test_what_the_outputs_encoding_lacks_is_escaped(monkeypatch, encoding, told):
    monkeypatch.setattr(commands, "run", lambda argv: print("runs/\xe9 \udcff") or 0)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert main(["info"]) == 0
    assert sys.stdout.buffer.getvalue() == told


@pytest.mark.slow
def test_an_output_that_nobody_takes_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    full = "loco-ext: the output cannot be written: No space left on device\n"
    for place, code, said in ((writer, 141, ""), ("/dev/full", 1, full)):
        with open(place, "w") as file:
            done = subprocess.run([sys.executable, "-c", PRINTS], stdout=file, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (code, said)


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "loco-ext: interrupted\n"


def test_progress_is_shown_on_a_terminal_alone(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert output.shows_progress()
    with output.quiet():
        assert not output.shows_progress()
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert not output.shows_progress()
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not output.shows_progress()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("train", "over the training samples. [default: paper: 250; quick: 8] [1<=x<=1000000]"),
        ("train", "effect on a filter's length. [default: on for the penalties rings and kernels, otherwise off]"),
        ("landscapes", "their seeds begin at --seed. [default: paper: 1; short: 3]"),
        ("compact", "[default: yes]"),
        ("info", "--json Print JSON"),
    ],
)
def test_the_help_tells_defaults(capsys, command, told):
    assert main([command, "--help"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
