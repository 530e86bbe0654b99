"""Block-scaled float8 weights come out as what they stand for, or are refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.checkpoints import StrictReader, open_checkpoint

BLOCK = (16, 8)
SHAPE = (40, 20)
GRID = (3, 3)


def _weight():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(SHAPE).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 2.0, GRID).astype(np.float32)
    return weight, scale


@pytest.fixture
def read(tmp_path):
    """Reads `x.weight` from a folder with these tensors and this quantisation."""

    def run(tensors, quantisation):
        save_file(tensors, tmp_path / "model.safetensors")
        config = {} if quantisation is None else {"quantization_config": quantisation}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        reader = StrictReader(open_checkpoint(tmp_path))
        array = reader.take("x.weight", SHAPE)
        reader.finish()
        return array

    return run


def _fp8(**changes):
    return {"quant_method": "fp8", "weight_block_size": list(BLOCK)} | changes


def test_every_entry_times_its_blocks_scale(read):
    weight, scale = _weight()
    got = read({"x.weight": weight, "x.weight_scale_inv": scale}, _fp8())
    assert got.dtype == np.float32
    for row in range(SHAPE[0]):
        for column in range(SHAPE[1]):
            want = np.float32(weight[row, column]) * scale[row // BLOCK[0], column // BLOCK[1]]
            assert got[row, column] == want


def test_blocks_of_128_by_default(read):
    weight, scale = _weight()
    got = read({"x.weight": weight, "x.weight_scale_inv": scale[:1, :1]}, None)
    np.testing.assert_array_equal(got, weight.astype(np.float32) * scale[0, 0])


def test_without_scales_the_weight_is_as_stored(read):
    weight, _ = _weight()
    assert read({"x.weight": weight}, None).dtype == ml_dtypes.float8_e4m3fn


def test_scales_that_do_not_cover_the_weight(read):
    weight, scale = _weight()
    with pytest.raises(
        ValueError, match=r"'x\.weight_scale_inv' has shape \(2, 3\).* asks for \(3, 3\)"
    ):
        read({"x.weight": weight, "x.weight_scale_inv": scale[:2]}, _fp8())


def test_another_quantisation_is_refused(read):
    weight, scale = _weight()
    with pytest.raises(NotImplementedError, match=r"quant_method='awq'.*expected 'fp8'"):
        read({"x.weight": weight, "x.weight_scale_inv": scale}, _fp8(quant_method="awq"))


@pytest.mark.parametrize("block", [[128], [0, 128], ["a", "b"]])
def test_senseless_block_size(read, block):
    weight, scale = _weight()
    with pytest.raises(ValueError, match=r"weight_block_size=.*two positive integers"):
        read({"x.weight": weight, "x.weight_scale_inv": scale}, _fp8(weight_block_size=block))
