"""EAGLE heads through every format: to the bit, and what is wrong is named."""

import json
from pathlib import Path

import golden
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from eagle_heads import FEATURES, eagle3_head, eagle_head, save, wide_target
from flax import nnx

import jspec
from jspec.checkpoints.source import open_draft_checkpoint
from jspec.drafters.eagle_build import build_drafter
from jspec.drafters.eagle_config import default_feature_layers
from jspec.drafters.eagle_formats import WRITABLE, read_head, recognise, write_head
from jspec.drafters.heads import target_ids

HEADS = golden.folders_with("config.json", "model.safetensors")
HEADS = [path for path in HEADS if path.name in ("draft_model",) or "speculators" in path.name]
TARGET = wide_target()


def reread(path, target=TARGET):
    checkpoint = open_draft_checkpoint(path)
    return read_head(checkpoint, recognise(checkpoint), target.config)


def same_bits(got, want):
    assert set(got) == set(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_array_equal(
            got[name].view(np.uint8) if array.ndim else got[name],
            array.view(np.uint8) if array.ndim else array,
            err_msg=name,
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("to", WRITABLE)
def test_eagle3_comes_back_to_the_bit(tmp_path, to, dtype):
    head = eagle3_head(TARGET, dtype=dtype)
    write_head(head, tmp_path / "out", to)
    back = reread(tmp_path / "out")
    assert back.format == to
    assert back.config == head.config
    same_bits(back.tensors, head.tensors)
    assert back.tensors["d2t"].dtype == np.int64
    assert back.tensors["t2d"].dtype == np.bool_


def test_all_formats_in_a_row(tmp_path):
    head = eagle3_head(TARGET, dtype=ml_dtypes.bfloat16)
    for step, to in enumerate(("speculators", "safeailab", "specforge", "speculators")):
        write_head(head, tmp_path / f"{step}", to)
        after = reread(tmp_path / f"{step}")
        same_bits(after.tensors, head.tensors)
        assert after.config == head.config
        head = after


@pytest.mark.parametrize("layers", [1, 2])
def test_eagle1_comes_back_to_the_bit(tmp_path, layers):
    head = eagle_head(TARGET, num_layers=layers, fc_bias=layers == 1, qkv_bias=layers == 2)
    write_head(head, tmp_path / "out", "safeailab")
    back = reread(tmp_path / "out")
    assert back.config == head.config
    same_bits(back.tensors, head.tensors)


@pytest.mark.parametrize(
    "switch", ["norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"]
)
def test_switches_survive_or_are_refused(tmp_path, switch):
    head = eagle3_head(TARGET, **{switch: True})
    write_head(head, tmp_path / "speculators", "speculators")
    assert getattr(reread(tmp_path / "speculators").config, switch)
    for to in ("safeailab", "specforge"):
        if to == "specforge" and switch == "fc_norm":
            write_head(head, tmp_path / to, to)
            assert reread(tmp_path / to).config == head.config
            continue
        with pytest.raises(NotImplementedError, match=switch):
            write_head(head, tmp_path / to, to)
        assert not (tmp_path / to).exists()


def test_switches_change_what_is_drafted():
    """The same tensors, another switch: pitfalls nobody sees in the shapes."""
    ids = jnp.asarray([[3, 4, 5]], jnp.int32)
    carried = {}
    for switch in (None, "norm_before_residual", "norm_output"):
        head = eagle3_head(TARGET, **({switch: True} if switch else {}))
        drafter = build_drafter(head, TARGET)
        model = nnx.merge(drafter.graphdef, drafter.params)
        hidden = jnp.ones((1, 3, TARGET.config.hidden_size))
        positions = jnp.arange(3, dtype=jnp.int32)[None]
        carried[switch] = np.asarray(model(ids, hidden, positions, None, None)[0])
    assert not np.allclose(carried[None], carried["norm_before_residual"], atol=1e-3)
    assert not np.allclose(carried[None], carried["norm_output"], atol=1e-3)


class TestFeatureLayers:
    def test_both_conventions_name_the_same_layers(self, tmp_path):
        head = eagle3_head(TARGET, feature_layers=(0, 3, 5))
        for to in ("specforge", "speculators"):
            write_head(head, tmp_path / to, to)
            assert reread(tmp_path / to).config.feature_layers == (0, 3, 5)
        ids = "eagle_aux_hidden_state_layer_ids"
        outputs = json.loads((tmp_path / "specforge/config.json").read_text())["eagle_config"][ids]
        inputs = json.loads((tmp_path / "speculators/config.json").read_text())[ids]
        assert outputs == [0, 3, 5]
        assert inputs == [1, 4, 6]

    def test_default(self):
        assert default_feature_layers(32) == (1, 15, 28)
        assert default_feature_layers(30) == (1, 14, 26)
        with pytest.raises(ValueError, match="no three distinct"):
            default_feature_layers(6)

    def test_safeailab_has_only_the_default(self, tmp_path):
        with pytest.raises(NotImplementedError, match="always reads the default ones"):
            write_head(eagle3_head(TARGET, feature_layers=(0, 3, 5)), tmp_path / "out", "safeailab")

    def test_outside_the_target(self, tmp_path):
        save(eagle3_head(TARGET), tmp_path / "h", "speculators", config={FEATURES: [2, 4, 99]})
        with pytest.raises(ValueError, match=r"99.*counts inputs of layers"):
            reread(tmp_path / "h")


class TestWrong:
    def refused(self, tmp_path, match, to="speculators", error=ValueError, **changes):
        save(eagle3_head(TARGET), tmp_path / "h", to, **changes)
        with pytest.raises(error, match=match):
            build_drafter(reread(tmp_path / "h"), TARGET)

    def test_missing_tensor(self, tmp_path):
        self.refused(tmp_path, "norm.weight", drop=["norm.weight"])

    def test_unused_tensor(self, tmp_path):
        self.refused(tmp_path, "extra.weight", add={"extra.weight": np.ones(3, np.float32)})

    def test_misshapen_tensor(self, tmp_path):
        wrong = np.ones((4, 4), np.float32)
        self.refused(tmp_path, r"fc.weight.*\(4, 4\)", add={"fc.weight": wrong})

    def test_unnamed_residual(self, tmp_path):
        self.refused(tmp_path, "norm_before_residual", config={"norm_before_residual": None})

    def test_zero_map(self, tmp_path):
        zero = np.zeros(24, np.int64)
        self.refused(tmp_path, "t2d and d2t disagree", add={"d2t": zero})

    def test_map_outside(self, tmp_path):
        self.refused(tmp_path, "distinct ids below", add={"d2t": np.full(24, 1000, np.int64)})

    def test_no_map(self, tmp_path):
        self.refused(tmp_path, "no d2t", drop=["d2t", "t2d"])

    def test_map_from_t2d_alone(self, tmp_path):
        head = eagle3_head(TARGET)
        save(head, tmp_path / "h", "speculators", drop=["d2t"])
        np.testing.assert_array_equal(target_ids(reread(tmp_path / "h")), target_ids(head))

    def test_other_vocabulary(self, tmp_path):
        head = eagle3_head(wide_target(vocab_size=50))
        write_head(head, tmp_path / "h", "specforge")
        with pytest.raises(ValueError, match="vocabulary of 50"):
            jspec.load_drafter(tmp_path / "h", TARGET)

    def test_other_width(self, tmp_path):
        head = eagle3_head(wide_target(hidden_size=32))
        write_head(head, tmp_path / "h", "specforge")
        with pytest.raises(ValueError, match=r"embedding of shape .* cannot stand in"):
            jspec.load_drafter(tmp_path / "h", TARGET)
        head = eagle_head(wide_target(hidden_size=32))
        write_head(head, tmp_path / "e", "safeailab")
        with pytest.raises(ValueError, match="hidden size 32"):
            jspec.load_drafter(tmp_path / "e", TARGET)

    def test_other_method(self, tmp_path):
        self.refused(
            tmp_path,
            "dflash",
            error=NotImplementedError,
            config={"speculators_model_type": "dflash"},
        )

    def test_no_head_at_all(self, tmp_path):
        save(
            eagle3_head(TARGET),
            tmp_path / "h",
            "specforge",
            only={"a": np.ones(2, np.float32)},
            config={"architectures": None},
        )
        with pytest.raises(ValueError, match="no draft head"):
            jspec.load_drafter(tmp_path / "h", TARGET)

    def test_existing_folder_is_left_alone(self, tmp_path):
        (tmp_path / "there").mkdir()
        with pytest.raises(ValueError, match="exists already"):
            write_head(eagle3_head(TARGET), tmp_path / "there", "specforge")
        assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_modelopt_layout(tmp_path):
    """`layers.0`, no t2d, outputs counted: the same head."""
    head = eagle3_head(TARGET)
    save(head, tmp_path / "m", "specforge", rename={"midlayer.": "layers.0."}, drop=["t2d"])
    back = reread(tmp_path / "m")
    assert back.format == "modelopt"
    assert back.config == head.config
    np.testing.assert_array_equal(target_ids(back), target_ids(head))


def test_serving_prefix(tmp_path):
    head = eagle_head(TARGET)
    save(head, tmp_path / "v", "safeailab", prefix="model.")
    same_bits(reread(tmp_path / "v").tensors, head.tensors)


def test_pickled_head_where_torch_is(tmp_path):
    torch = pytest.importorskip("torch")
    head = eagle_head(TARGET)
    save(head, tmp_path / "p", "safeailab")
    file = tmp_path / "p" / "model.safetensors"
    file.unlink()
    named = {name: torch.from_numpy(np.array(array)) for name, array in head.tensors.items()}
    torch.save(named, tmp_path / "p" / "pytorch_model.bin")
    same_bits(reread(tmp_path / "p").tensors, head.tensors)


def test_shared_matrices_are_held_once():
    drafter = build_drafter(eagle_head(TARGET), TARGET)
    embedding = dict(nnx.to_flat_state(TARGET.params))[("embedding",)][...]
    mine = dict(nnx.to_flat_state(drafter.params))
    assert mine[("embedding",)][...] is embedding


@golden.parametrize("folder", HEADS, "EAGLE head", ids=golden.label)
def test_recorded_heads_come_back_to_the_bit(folder, tmp_path):
    target = (
        jspec.load_target(golden.target_folder(folder.parent))
        if (folder.name == "draft_model" and "train" not in folder.parent.name)
        else jspec.load_target(golden.ROOT / "eagle3/target")
    )
    head = reread(folder, target)
    build_drafter(head, target)
    to = head.format if head.format in WRITABLE else "specforge"
    write_head(head, Path(tmp_path) / "out", to)
    back = reread(tmp_path / "out", target)
    same_bits(back.tensors, head.tensors)
    assert back.config == head.config
