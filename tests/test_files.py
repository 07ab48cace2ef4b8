"""Atomic writes leave the old file or the complete new one, with the permissions of a file of that kind."""

from __future__ import annotations

import os

import pytest

from dpgen_bench.utils.files import atomic, write_atomic


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_a_new_file_has_the_permissions_of_all_new_files_and_a_private_one_is_its_owners(tmp_path, umask):
    write_atomic(tmp_path / "public.json", "{}")
    write_atomic(tmp_path / "noise.key", b"secret", private=True)
    assert (tmp_path / "public.json").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "noise.key").stat().st_mode & 0o777 == 0o600


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    write_atomic(tmp_path / "table.md", "old")

    def fails_half_way():
        with atomic(tmp_path / "table.md") as temporary:
            temporary.write_text("half of the new")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        fails_half_way()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"table.md": "old"}
