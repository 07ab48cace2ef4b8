"""The public log of a run: its length after it went back to a checkpoint."""

from __future__ import annotations

import json

from dpgen_bench.training.log import Log, read_scalar


def test_a_log_that_went_back_has_the_length_of_its_file(tmp_path):
    """A checkpoint stores it, and the next start would fill the file with NUL bytes up to a length beyond its end."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"loss": float(step)}) + "\n" for step in range(10)))
    line = path.stat().st_size // 10
    log = Log(path)
    log.truncate(4 * line)
    assert log.flush() == path.stat().st_size == 4 * line
    log.write({"loss": 9.0})
    assert log.flush() == path.stat().st_size == 5 * line
    assert read_scalar(path, "loss").tolist() == [0.0, 1.0, 2.0, 3.0, 9.0]
