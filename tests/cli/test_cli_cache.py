"""The folder of compiled programs: within bounds, and never a reason to fail."""

import os

import jax
import pytest

from jspec.cache_dirs import _prune, enable_compilation_cache

NAME = "jax_compilation_cache_dir"


@pytest.fixture
def unset():
    """No folder is set, whatever other tests use."""
    before = jax.config.values[NAME]
    jax.config.update(NAME, None)
    yield
    jax.config.update(NAME, before)


def test_the_oldest_programs_go_first(tmp_path):
    for age in range(8):
        (tmp_path / str(age)).write_bytes(bytes(100))
        os.utime(tmp_path / str(age), (1000 - age, 1000 - age))
    _prune(tmp_path, 800)
    assert len(list(tmp_path.iterdir())) == 8
    _prune(tmp_path, 700)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}


def test_the_environment_moves_it(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "new"))
    assert enable_compilation_cache() == tmp_path / "new" / "compilation"
    assert jax.config.values[NAME] == str(tmp_path / "new" / "compilation")


def test_a_folder_given_to_jax_stays(unset, tmp_path):
    jax.config.update(NAME, str(tmp_path))
    assert enable_compilation_cache() == tmp_path


def test_a_folder_that_cannot_be_written_is_said_and_no_more(unset, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file"))
    assert enable_compilation_cache() is None
    assert jax.config.values[NAME] is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "set JSPEC_CACHE to a folder you can write to, or say --no-compilation-cache" in said
