"""Folders of safetensors, and the strict reader on top of them."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.checkpoints import StrictReader, open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def _tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "b.weight": rng.normal(size=(4, 2)).astype(ml_dtypes.bfloat16),
        "c": np.arange(7),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 3), np.float32),
        "mask": np.array([True, False]),
    }


def _shard(folder: Path, assignment: dict[str, str]) -> None:
    tensors = _tensors()
    for file in set(assignment.values()):
        names = [name for name in assignment if assignment[name] == file]
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": assignment}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _message(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("file", ["model.safetensors", "head.safetensors"])
def test_single_file_gives_the_stored_tensors(folder: Path, file: str):
    save_file(_tensors(), folder / file)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.path == folder
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.names() == frozenset(_tensors())
    for name, expected in _tensors().items():
        found = checkpoint.read(name)
        assert found.dtype == expected.dtype
        assert checkpoint.shape(name) == found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


def test_float8_is_read(folder: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    values = torch.tensor([[0.5, -1.5, 448.0]]).to(torch.float8_e4m3fn)
    save_torch({"w": values}, folder / "model.safetensors")
    found = open_checkpoint(folder).read("w")
    assert found.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(found.astype(np.float32), [[0.5, -1.5, 448.0]])


def test_reading_copies_nothing(folder: Path):
    save_file(_tensors(), folder / "model.safetensors")
    values = open_checkpoint(folder).read("a.weight")
    assert not values.flags.owndata
    assert not values.flags.writeable


def test_shards_join(folder: Path):
    _shard(folder, {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.names() == {"a.weight", "b.weight"}
    assert checkpoint.generation_config == {}
    np.testing.assert_array_equal(checkpoint.read("b.weight"), _tensors()["b.weight"])


def test_tensor_the_index_forgot_is_still_there(folder: Path):
    _shard(folder, {"a.weight": "one.safetensors", "c": "one.safetensors"})
    index = {"weight_map": {"a.weight": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(folder).names() == {"a.weight", "c"}


def test_absent_shard(folder: Path):
    _shard(folder, {"a.weight": "one.safetensors", "c": "two.safetensors"})
    (folder / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names the shard two.safetensors, which is not in") as e:
        open_checkpoint(folder)
    _message(e)


def test_index_places_tensor_where_it_is_not(folder: Path):
    _shard(folder, {"a.weight": "one.safetensors", "c": "two.safetensors"})
    index = {"weight_map": {"a.weight": "two.safetensors", "c": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"places tensor 'a.weight' in two.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {"a": "../x.safetensors"}}, []])
def test_unusable_index(folder: Path, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"no usable \"weight_map\"|expected an object"):
        open_checkpoint(folder)


@pytest.mark.parametrize("cut", [4, 30, -1])
def test_truncated_file(folder: Path, cut: int):
    file = folder / "model.safetensors"
    save_file(_tensors(), file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"model.safetensors (is truncated|is not)") as error:
        open_checkpoint(folder)
    assert "again" in _message(error)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{not json at all", "broken safetensors header"),
        (b"\xff\xff\xff\xff\xff\x00\x00\x00{}", "is not a safetensors file"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", "broken safetensors header"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{}junk", "bytes that belong to no tensor"),
    ],
)
def test_broken_file(folder: Path, content: bytes, reason: str):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        open_checkpoint(folder)
    _message(error)


def test_shape_that_contradicts_the_bytes(folder: Path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"tensor 'w' of shape \(3,\) .* has 8 bytes, expected 12"):
        open_checkpoint(folder)


def test_dtype_without_numpy_counterpart(folder: Path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(2)
    (folder / "model.safetensors").write_bytes(content)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(NotImplementedError, match="stored as F4, expected one of F64"):
        checkpoint.read("w")


def test_pickles_are_refused_with_a_command_that_works(folder: Path):
    torch = pytest.importorskip("torch")
    tied = torch.ones(2, 3)
    torch.save({"w": tied.T, "v": tied}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="which can run code when read") as error:
        open_checkpoint(folder)
    command = _message(error).split("python -c ")[1].removeprefix('"').removesuffix('"')
    exec(compile(command, "<the error's command>", "exec"), {})
    np.testing.assert_array_equal(open_checkpoint(folder).read("w"), np.ones((3, 2)))


def test_sharded_pickles_command_takes_all_of_them(folder: Path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model-00001-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    torch.save({"v": torch.zeros(2)}, folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(ValueError, match="which can run code when read") as error:
        open_checkpoint(folder)
    command = _message(error).split("python -c ")[1].removeprefix('"').removesuffix('"')
    exec(compile(command, "<the error's command>", "exec"), {})
    assert open_checkpoint(folder).names() == {"w", "v"}


def test_folders_without_a_checkpoint(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no weights: expected model.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="pass the GGUF file itself"):
        open_checkpoint(tmp_path)
    save_file(_tensors(), tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"has no config.json"):
        open_checkpoint(tmp_path)
    save_file(_tensors(), tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match=r"holds 2 \.safetensors files"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"neither a folder nor a .gguf file"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_broken_config(folder: Path):
    save_file(_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        open_checkpoint(folder)


def test_strict_reader(folder: Path):
    save_file(_tensors(), folder / "model.safetensors")
    reader = StrictReader(open_checkpoint(folder))
    assert "a.weight" in reader
    assert "d.weight" not in reader
    np.testing.assert_array_equal(reader.take("a.weight", (3, 5)), _tensors()["a.weight"])
    with pytest.raises(ValueError, match=r"no tensor 'b.weights' of shape \(1,\).*b.weight") as e:
        reader.take("b.weights", (1,))
    _message(e)
    with pytest.raises(ValueError, match=r"'b.weight' has shape \(4, 2\), .* \(2, 4\)"):
        reader.take("b.weight", (2, 4))
    reader.take("b.weight", (4, 2))
    with pytest.raises(ValueError, match=r"has 4 tensors .*: c, empty, mask, scalar;") as e:
        reader.finish()
    _message(e)
    with pytest.raises(ValueError, match=r"has 1 tensors .*: c;"):
        reader.finish(ignore=["m*k", "empty", "scal??"])
    reader.finish(ignore=["*"])


def test_unknown_tensor_of_a_checkpoint(folder: Path):
    save_file(_tensors(), folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ValueError, match=r"no tensor 'b.weights'; similar: b.weight"):
        checkpoint.shape("b.weights")
    with pytest.raises(ValueError, match=r"no tensor 'qqqqqq'; no name is similar"):
        checkpoint.read("qqqqqq")
