"""A JSON file of trained networks, to which a study adds them one by one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from bench import generated, harness, machine
from loco_ext.experiments.records import Record
from studies import tables


class ResultFile:
    """The results of a study that may be stopped at any time, go on elsewhere, and be shared by several processes.

    ``summarise`` maps the records of all networks to further entries of the file; ``facts`` are the others.
    """

    def __init__(self, name: str, path: Path, summarise: Callable[[list[Record]], Record], **facts: Any) -> None:
        self.path, self.summarise = path, summarise
        self.facts = {"benchmark": name, "machine": machine.describe()} | facts

    def networks(self) -> list[Record]:
        return json.loads(self.path.read_text())["networks"] if self.path.exists() else []

    def once(self, key: Record, measure: Callable[[], Record]) -> None:
        """Add the record of a network, its key, what is measured and the commit, unless the key is there already."""
        if _has(self.networks(), key):
            return
        record = key | measure() | {"commit": self.facts["machine"]["commit"]}
        self._rewrite(lambda networks: networks if _has(networks, key) else [*networks, record])

    def extend(self, key: Record, more: Record) -> None:
        """Update the record of a network with what has been measured later."""
        self._rewrite(lambda networks: [n | more if key.items() <= n.items() else n for n in networks])

    def _rewrite(self, change: Callable[[list[Record]], list[Record]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            networks = change(self.networks())
            harness.write_json(self.path, self.facts | self.summarise(networks) | {"networks": networks})

    def show(self) -> None:
        """Print the study's tables."""
        generated.publish(json.loads(self.path.read_text()), None, tables.RENDERERS)


def _has(networks: list[Record], key: Record) -> bool:
    """Return whether a network with this key is there, which another process may have added meanwhile."""
    return any(key.items() <= network.items() for network in networks)
