"""Tests that files are never half written, and that JSON has no NaN."""

import json
import os

import pytest

from loco_ext.output import json_text, print_table, remove_leftovers, replacing


def test_a_file_is_replaced_when_all_is_written_and_not_before(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_on_the_disk_before_it_is_renamed_and_the_name_behind(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []

    def fsync(descriptor):
        seen.append((os.path.samestat(os.fstat(descriptor), tmp_path.stat()), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert seen == [(False, False), (True, True)]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_leftovers_of_killed_processes_are_removed_and_other_files_are_not(tmp_path):
    others = [".film.mkv.part", ".hidden", "notes.part"]
    for name in (".checkpoint.pt.123.part", *others):
        (tmp_path / name).write_text("")
    (tmp_path / ".folder.1.part").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".film.mkv.part", ".folder.1.part", ".hidden", "notes.part"]


@pytest.mark.parametrize("width", [80, 40])
def test_no_cell_of_a_table_is_cut(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    headers = ["arm", "test accuracy", *(f"column {number}" for number in range(6))]
    rows = [["plain", *["1.04e-02"] * 7], ["curvature:0.1", *["35.5 ± 0.5"] * 7]]
    print_table(headers, rows, "A title")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    for row in rows:
        found = [cell for line in cells if line[0] == row[0] for cell in line[1:]]
        assert found == row[1:]


def test_what_is_not_finite_is_null_at_any_depth():
    record = {"a": [1.5, float("nan"), {"b": (float("inf"), -float("inf"), 3)}], "c": None, "d": "NaN", "e": True}
    expected = {"a": [1.5, None, {"b": [None, None, 3]}], "c": None, "d": "NaN", "e": True}
    assert json.loads(json_text(record), parse_constant=pytest.fail) == expected
    assert json_text(record, indent=1).count("\n") > 5
