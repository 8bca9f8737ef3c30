"""The record that an experiment begins with, and which records it goes on with."""

import json

import pytest
import torch

from loco_ext.errors import UserError
from loco_ext.experiments import records
from loco_ext.experiments.records import begin
from loco_ext.experiments.regions import RegionsSettings
from loco_ext.experiments.settings import SettingsError
from tests.experiments.runs import CPU, digits


def test_experiments_go_on_with_other_commits_and_records_without_one(tmp_path, monkeypatch):
    settings, data, path = RegionsSettings(seeds=2), digits(10), tmp_path / "settings.json"
    (tmp_path / "shrink.json").touch()
    with pytest.raises(UserError, match=r"^out: expected a folder without other results, .* has shrink\.json"):
        begin(tmp_path, settings, data, CPU, resume=True)
    (tmp_path / "shrink.json").unlink()
    monkeypatch.setattr(records, "commit", lambda: "1" * 40)
    first = begin(tmp_path, settings, data, CPU, resume=False, fact=float("nan"))
    assert first["commit"] == "1" * 40
    assert first["versions"]["torch"] == torch.__version__
    monkeypatch.setattr(records, "commit", lambda: "2" * 40)
    begin(tmp_path, settings, data, CPU, resume=True, fact=float("nan"))
    record = json.loads(path.read_text())
    assert record == json.loads(json.dumps(first)) | {"commit": "2" * 40, "fact": None}
    del record["commit"]
    path.write_text(json.dumps(record))
    begin(tmp_path, settings, data, CPU, resume=True, fact=float("nan"))
    for content, fact, said in (
        (json.dumps(record), 1.0, "of another experiment"),
        (json.dumps(record | {"versions": {"torch": "1.0"}}), float("nan"), "of another experiment"),
        ("[]", float("nan"), "of another experiment"),
        ("{", float("nan"), "expected JSON"),
    ):
        path.write_text(content)
        with pytest.raises(SettingsError, match=said):
            begin(tmp_path, settings, data, CPU, resume=True, fact=fact)
