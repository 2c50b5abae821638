"""The paper's training costs: every row is a run that can be made, and a probe of it has a place in the table."""

from __future__ import annotations

import pytest

from gls_lirpa.bench.costs import cost_rows, cost_table, epoch_minutes, measured_costs
from gls_lirpa.training.job import make_config


def test_every_row_is_a_run() -> None:
    for row in cost_rows():
        config = make_config(row.options)
        assert (config.dataset, config.net) == (row.dataset, row.net)
        assert (config.estimator == "grad") == row.whole
        assert config.preset is not None and config.preset.startswith("paper-")


def test_probe_and_table() -> None:
    rows = [row for row in cost_rows() if row.net == "cnn3-tiny" or (row.net, row.method) == ("cnn3", "ibp-pgpe")][:3]
    found = measured_costs(rows, sizes=(1, 2), progress=lambda done, total: None)
    assert all(entry["minutes"] > 0 for entry in found)
    table = cost_table(found)
    crown = [entry.text for entry in table.rows[0]]
    assert crown[:5] == ["mnist", "cnn3-tiny", "crown-pgpe", "4xL4", "25"]
    whole = next(row for row in cost_rows() if row.whole and row.method == "ibp" and row.dataset == "mnist")
    shown = cost_table([{"index": cost_rows().index(whole), "minutes": 1.0, "epochs": 70}]).rows[0]
    assert shown[4].text == f"{10 / 70:.2g}" and shown[6].text == "7.0"


def test_minutes_are_for_the_whole_training_set() -> None:
    row = next(row for row in cost_rows() if (row.dataset, row.net, row.method) == ("mnist", "cnn3", "ibp-pgpe"))
    minutes, epochs = epoch_minutes(row, sizes=(2, 4))
    assert epochs == 150
    # 118 steps of 256 networks: none takes less than ten microseconds.
    assert minutes > 118 * 256 * 1e-5 / 60


@pytest.mark.parametrize("dataset", ["mnist", "cifar10", "tinyimagenet"])
def test_rows_of_every_dataset(dataset: str) -> None:
    assert any(row.dataset == dataset for row in cost_rows())
