"""Pickled weights of drafters: read as weights only, or refused with a command that works."""

import json
import os
import pickle
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.checkpoints import open_checkpoint, open_draft_checkpoint


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    return tmp_path


def refusal(folder: Path, match: str) -> str:
    with pytest.raises(ValueError, match=match) as error:
        open_draft_checkpoint(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def run_command(message: str) -> None:
    command = message.split("python -c ")[1].removeprefix('"').removesuffix('"')
    exec(compile(command, "<the error's command>", "exec"), {})


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "pytorch_model.bin", "head.pth"])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_tensor_is_read_as_stored(torch, folder: Path, file: str, zipped: bool):
    tensors = {
        "f32": torch.linspace(-2, 2, 6).reshape(2, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "bf16": torch.tensor([[1.5, -0.1]], dtype=torch.bfloat16),
        "turned_bf16": torch.arange(6.0).reshape(2, 3).bfloat16().T,
        "f16": torch.tensor(0.25, dtype=torch.float16),
        "map": torch.tensor([0, 2, 2**40]),
        "mask": torch.tensor([True, False]),
    }
    if zipped:  # float8 is younger than the other container
        tensors["f8"] = torch.tensor([0.5, -1.5]).to(torch.float8_e4m3fn)
    torch.save(tensors, folder / file, _use_new_zipfile_serialization=zipped)
    checkpoint = open_draft_checkpoint(str(folder))
    assert checkpoint.config == {"medusa_num_heads": 2}
    assert checkpoint.names() == set(tensors)
    special = {"bf16": ml_dtypes.bfloat16, "turned_bf16": ml_dtypes.bfloat16}
    special["f8"] = ml_dtypes.float8_e4m3fn
    for name, tensor in tensors.items():
        found = checkpoint.read(name)
        assert found.shape == checkpoint.shape(name) == tuple(tensor.shape)
        assert not found.flags.writeable
        if name in special:
            assert found.dtype == special[name]
            np.testing.assert_array_equal(found.astype(np.float32), tensor.float().numpy())
        else:
            assert found.dtype == tensor.numpy().dtype
            np.testing.assert_array_equal(found, tensor.numpy())


def test_shards_join(torch, folder: Path):
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(3)}, folder / "pytorch_model-00002-of-00002.bin")
    refusal(folder, r"holds 2 .bin files .* and no pytorch_model.bin.index.json")
    weight_map = {f: f"pytorch_model-0000{i}-of-00002.bin" for i, f in enumerate("ab", start=1)}
    index = {"weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    checkpoint = open_draft_checkpoint(folder)
    assert checkpoint.names() == {"a", "b"}
    np.testing.assert_array_equal(checkpoint.read("b"), np.zeros(3))


def test_safetensors_win_over_pickles(torch, folder: Path):
    torch.save({"w": torch.ones(2)}, folder / "medusa_lm_head.pt")
    save_file({"w": np.zeros(2, np.float32)}, folder / "medusa_lm_head.safetensors")
    np.testing.assert_array_equal(open_draft_checkpoint(folder).read("w"), np.zeros(2))
    save_file({"model.norm.weight": np.ones(2, np.float32)}, folder / "model.safetensors")
    assert open_draft_checkpoint(folder).names() == {"w"}


def test_heads_beside_a_whole_model_are_the_drafter(torch, folder: Path):
    torch.save({"w": torch.ones(2)}, folder / "medusa_lm_head.pt")
    save_file({"model.norm.weight": np.ones(2, np.float32)}, folder / "model.safetensors")
    assert open_draft_checkpoint(folder).names() == {"w"}
    assert open_checkpoint(folder).names() == {"model.norm.weight"}


def test_what_trainers_leave_is_no_weights(torch, folder: Path):
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        torch.save({"w": torch.ones(2)}, folder / name)
    refusal(folder, "holds no weights")
    torch.save({"v": torch.ones(2)}, folder / "heads.pt")
    assert open_draft_checkpoint(folder).names() == {"v"}


def test_two_pickles_are_ambiguous(torch, folder: Path):
    for name in ("one.pt", "two.pt"):
        torch.save({"w": torch.ones(2)}, folder / name)
    refusal(folder, r"one\.pt, two\.pt")


@pytest.mark.parametrize("missing", [True, False])
def test_without_a_safe_torch_the_command_converts(torch, folder: Path, monkeypatch, missing: bool):
    torch.save({"w": torch.ones(2, dtype=torch.bfloat16)}, folder / "medusa_lm_head.pt")
    if missing:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch", None)
            message = refusal(folder, r"pip install 'jspec\[torch\]'")
        run_command(message)
        assert (folder / "medusa_lm_head.safetensors").is_file()
        assert open_draft_checkpoint(folder).read("w").dtype == ml_dtypes.bfloat16
    else:
        monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
        refusal(folder, r"torch 2.5.1\+cpu cannot read .* safely.*2\.6 or newer")


def test_without_torch_shards_are_converted_at_once(torch, folder: Path, monkeypatch):
    for place, name in enumerate("ab", start=1):
        torch.save({name: torch.ones(2)}, folder / f"pytorch_model-0000{place}-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        message = refusal(folder, "convert them once")
    run_command(message)
    assert open_draft_checkpoint(folder).names() == {"a", "b"}


class Trap:
    """Unpickling it would make a folder."""

    def __reduce__(self):
        return os.mkdir, (Trap.where,)


@pytest.mark.parametrize("inside_zip", [True, False])
def test_nothing_is_unpickled_freely(torch, folder: Path, inside_zip: bool):
    Trap.where = str(folder / "sprung")
    if inside_zip:
        torch.save({"w": torch.ones(2), "trap": Trap()}, folder / "medusa_lm_head.pt")
    else:
        (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps({"trap": Trap()}))
    refusal(folder, "cannot be read as weights only")
    assert not Path(Trap.where).exists()


def test_more_than_a_state_dictionary(torch, folder: Path):
    file = folder / "pytorch_model.bin"
    torch.save({"state_dict": {"w": torch.ones(2)}}, file)
    refusal(folder, "entry 'state_dict' is a dict, expected tensors only")
    torch.save([torch.ones(2)], file)
    refusal(folder, "holds a list, expected a state dictionary")


def test_broken_files(torch, folder: Path):
    file = folder / "pytorch_model.bin"
    torch.save({"w": torch.ones(200)}, file)
    file.write_bytes(file.read_bytes()[:-300])
    refusal(folder, "cannot be read as weights only")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refusal(folder, "git lfs pull")


def test_config_is_needed(torch, tmp_path: Path):
    torch.save({"w": torch.ones(2)}, tmp_path / "medusa_lm_head.pt")
    refusal(tmp_path, r"has no config\.json")
    refusal(tmp_path / "absent", "no drafter at")


def test_targets_refuse_pickles(torch, folder: Path):
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="which can run code when read"):
        open_checkpoint(folder)
