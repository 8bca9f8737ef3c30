"""Tests of a training run's event files, read back by TensorBoard's own reader."""

import pytest

from loco_ext.experiments.tensorboard import SCALARS, TensorBoard
from loco_ext.experiments.train import Epoch


def test_figures_are_written_by_epoch_and_replaced_by_a_run_that_goes_on(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    epochs = [Epoch(number, 0.1, 2.0 / number, 0.5, 3.0 / number, 0.25, 1.0, 100.0) for number in (1, 2, 3)]
    for part in (epochs[:2], epochs[1:]):  # as if killed before the second epoch's checkpoint
        board = TensorBoard(tmp_path)
        for epoch in part:
            board.write(epoch)
        board.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    for tag, name in SCALARS.items():
        found = {event.step: event.value for event in events.Scalars(tag)}
        assert found == pytest.approx({epoch.epoch: getattr(epoch, name) for epoch in epochs})
        assert len(events.Scalars(tag)) == 3
