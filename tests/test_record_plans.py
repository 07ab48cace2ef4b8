"""What a check of a record compares with the plan of its config, where files of this machine are needed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from dpgen_bench.data.records import MissingData
from dpgen_bench.outcomes import record_checks
from dpgen_bench.store.records import Record, read_record, record_paths

ROOT = Path(__file__).parent.parent


def test_a_check_reads_public_files_below_the_folder_of_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the fonts on this machine a plan cannot be made, as without the data set."""
    record = read_record(next(iter(record_paths(ROOT / "results").values())))
    asked: list[str] = []

    def build(config: DictConfig, **_: Any) -> Any:
        asked.append(config.method.fonts)
        raise MissingData("no data set here")

    monkeypatch.setattr(record_checks, "build_spec", build)
    content = copy.deepcopy(record.content)
    content["config"]["method"]["fonts"] = "data/fonts/handwriting"
    with_fonts = Record(record.path, content)
    assert list(record_checks._planned(with_fonts, str(tmp_path))) == []
    assert asked == []
    (tmp_path / "fonts" / "handwriting").mkdir(parents=True)
    assert list(record_checks._planned(with_fonts, str(tmp_path))) == []
    assert asked == [f"{tmp_path}/fonts/handwriting"]
