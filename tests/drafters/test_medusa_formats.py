"""Medusa heads in every public layout: recognised, read strictly, and written back to the bit."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_medusa import random_heads
from tiny_models import tiny_target

import jspec
from jspec.checkpoints import open_draft_checkpoint
from jspec.drafters.medusa_build import build_medusa, target_head
from jspec.drafters.medusa_formats import StoredHeads, read_heads, recognise, write_heads


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def reference_tensors(heads, prefix=""):
    """The layout of FasterDecoding and ModelOpt."""
    named = {}
    for name, array in heads.tensors.items():
        kind, head, *inside = name.split(".")
        if kind == "lm_heads":
            named[f"{prefix}{head}.{heads.config.num_layers}.weight"] = array
        else:
            named[f"{prefix}{head}.{inside[1]}.linear.{inside[2]}"] = array
    return named


def store(folder, config, tensors, file="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, folder / file)
    return folder


def medusa_folder(folder, heads, **config):
    said = {
        "medusa_num_heads": heads.config.num_heads,
        "medusa_num_layers": heads.config.num_layers,
    }
    return store(folder, said | config, reference_tensors(heads), "medusa_lm_head.safetensors")


def vllm_folder(folder, heads, prefix="", **config):
    facts = heads.config
    said = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "vocab_size": facts.vocab_size,
        "num_heads": facts.num_heads,
        "num_hidden_layers": facts.num_layers,
        "medusa_fc_bias": facts.bias,
        "truncated_vocab_size": facts.draft_vocab_size,
    }
    tensors = {prefix + name: array for name, array in heads.tensors.items()}
    return store(folder, said | config, tensors)


def read(folder, target) -> StoredHeads:
    checkpoint = open_draft_checkpoint(folder)
    form = recognise(checkpoint)
    assert form is not None
    return read_heads(checkpoint, form, target.config)


def assert_same(ours, theirs):
    assert ours.config == theirs.config
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, array in theirs.tensors.items():
        assert ours.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(
            ours.tensors[name].view(np.uint8), np.ascontiguousarray(array).view(np.uint8)
        )


FORMS = {
    "medusa": lambda folder, heads: medusa_folder(folder, heads),
    "vllm-medusa": lambda folder, heads: vllm_folder(folder, heads),
    "vllm-prefixed": lambda folder, heads: vllm_folder(folder, heads, "medusa_heads."),
    "modelopt": lambda folder, heads: store(
        folder,
        {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 2}},
        reference_tensors(heads, "medusa_heads."),
    ),
    "medusa-2": lambda folder, heads: store(
        folder,
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 9, "medusa_num_heads": 3},
        reference_tensors(heads, "medusa_head.")
        | {"model.layers.0.mlp.up_proj.weight": np.ones((2, 2), np.float32)},
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_layout_holds_the_same(target, tmp_path, form, dtype):
    heads = random_heads(target.config, num_layers=2, dtype=dtype)
    found = read(FORMS[form](tmp_path / "x", heads), target)
    assert found.format == ("vllm-medusa" if form.startswith("vllm") else form)
    assert_same(found, heads)
    assert not found.remarks


@pytest.mark.parametrize("to", ["medusa", "vllm-medusa"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_reads_back_to_the_bit(target, tmp_path, form, to):
    heads = random_heads(target.config, num_layers=2, dtype=ml_dtypes.bfloat16)
    found = read(FORMS[form](tmp_path / "x", heads), target)
    write_heads(found, tmp_path / "y", to)
    again = read(tmp_path / "y", target)
    assert again.format == to
    assert_same(again, heads)
    if form == to:
        first, second = tmp_path / "x", tmp_path / "y"
        assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir())
        said = [json.loads((p / "config.json").read_text()) for p in (first, second)]
        assert said[0].items() <= said[1].items()
        write_heads(again, tmp_path / "z", to)
        for file in second.iterdir():
            assert file.read_bytes() == (tmp_path / "z" / file.name).read_bytes()


@pytest.mark.parametrize("whole", [False, True])
def test_truncated_vocabulary(target, tmp_path, whole):
    """The map is int64 and absolute; vLLM also takes whole projections and cuts them itself."""
    heads = random_heads(target.config, draft_vocab_size=11)
    tensors = dict(heads.tensors)
    ids = tensors["token_map"]
    if whole:
        rng = np.random.default_rng(4)
        for head in range(heads.config.num_heads):
            full = rng.standard_normal((target.config.vocab_size, 24)).astype(np.float32)
            full[ids] = heads.tensors[f"lm_heads.{head}.weight"]
            tensors[f"lm_heads.{head}.weight"] = full
    stored = StoredHeads(name="x", format="vllm-medusa", config=heads.config, tensors=tensors)
    found = read(vllm_folder(tmp_path / "x", stored), target)
    assert_same(found, stored)
    drafter, expected = build_medusa(found, target), build_medusa(heads, target)
    np.testing.assert_array_equal(drafter.token_map, ids)
    for ours, theirs in zip(*map(leaves, (drafter, expected))):
        np.testing.assert_array_equal(ours, theirs)
    write_heads(found, tmp_path / "y", "vllm-medusa")
    assert_same(read(tmp_path / "y", target), stored)
    assert load_file(tmp_path / "y" / "model.safetensors")["token_map"].dtype == np.int64
    with pytest.raises(NotImplementedError, match=r"vocabulary of 11 tokens, .*'vllm-medusa'"):
        write_heads(found, tmp_path / "z", "medusa")


def leaves(drafter):
    import jax

    return jax.tree.leaves(drafter.params)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_projection_for_all(target, tmp_path, name):
    heads = random_heads(target.config, projection="one")
    tensors = dict(heads.tensors)
    tensors[name] = tensors.pop("lm_head.weight")
    stored = StoredHeads(name="x", format="vllm-medusa", config=heads.config, tensors=tensors)
    found = read(vllm_folder(tmp_path / "x", stored, original_lm_head=True), target)
    assert_same(found, heads)
    write_heads(found, tmp_path / "y", "vllm-medusa")
    assert_same(read(tmp_path / "y", target), heads)
    with pytest.raises(NotImplementedError, match="one projection for all heads"):
        write_heads(found, tmp_path / "z", "medusa")


def test_heads_without_a_projection_use_the_target_s(target, tmp_path):
    """FasterDecoding's version 2, and what text-generation-inference calls v2."""
    heads = random_heads(target.config, projection="target")
    folder = medusa_folder(tmp_path / "x", heads, version="2")
    found = read(folder, target)
    assert_same(found, heads)
    drafter = jspec.load_drafter(folder, target, probe=False)
    assert any(leaf is target_head(target) for leaf in leaves(drafter))
    assert "the target's projection" in drafter.description
    write_heads(found, tmp_path / "y", "medusa")
    assert_same(read(tmp_path / "y", target), heads)
    with pytest.raises(ValueError, match="give the target's head as `projection`"):
        write_heads(found, tmp_path / "z", "vllm-medusa")
    assert not (tmp_path / "z").exists()
    write_heads(found, tmp_path / "z", "vllm-medusa", projection=np.asarray(target_head(target)))
    again = jspec.load_drafter(tmp_path / "z", target, probe=False)
    assert any(leaf is target_head(target) for leaf in leaves(again))
    for ours, theirs in zip(leaves(again), leaves(drafter)):
        np.testing.assert_array_equal(ours, theirs)


def test_a_config_that_lies_about_the_number_of_heads(target, tmp_path, caplog):
    heads = random_heads(target.config, num_heads=5)
    folder = medusa_folder(tmp_path / "x", heads, medusa_num_heads=2)
    with caplog.at_level(logging.INFO, "jspec"):
        drafter = jspec.load_drafter(folder, target, probe=False)
    assert drafter.config.num_heads == 5
    assert "its config says 2 heads, the file holds 5" in caplog.text
    write_heads(drafter.heads, tmp_path / "y", "medusa")
    assert not read(tmp_path / "y", target).remarks


def test_a_bias_that_the_config_denies_is_used(target, tmp_path):
    heads = random_heads(target.config)
    found = read(vllm_folder(tmp_path / "x", heads, medusa_fc_bias=False), target)
    assert found.config.bias
    assert found.remarks == (
        "its config says medusa_fc_bias=false, but the file holds biases: used",
    )
    write_heads(found, tmp_path / "y", "vllm-medusa")
    assert not read(tmp_path / "y", target).remarks


def test_blocks_without_a_bias(target, tmp_path):
    heads = random_heads(target.config, bias=False)
    found = read(vllm_folder(tmp_path / "x", heads), target)
    assert_same(found, heads)
    with pytest.raises(NotImplementedError, match="residual blocks without a bias"):
        write_heads(found, tmp_path / "y", "medusa")


def test_tied_layers_load_as_they_are(target, tmp_path):
    heads = random_heads(target.config, num_layers=2)
    tensors = dict(heads.tensors)
    for head in range(3):
        for leaf in ("weight", "bias"):
            tensors[f"blocks.{head}.layers.1.{leaf}"] = tensors[f"blocks.{head}.layers.0.{leaf}"]
    tied = StoredHeads(name="x", format="medusa", config=heads.config, tensors=tensors)
    assert_same(read(medusa_folder(tmp_path / "x", tied), target), tied)


def test_a_pickle_reads_the_same(target, tmp_path):
    torch = pytest.importorskip("torch")
    heads = random_heads(target.config)
    medusa_folder(tmp_path / "x", heads)
    (tmp_path / "x" / "medusa_lm_head.safetensors").unlink()
    tensors = {n: torch.from_numpy(a.copy()) for n, a in reference_tensors(heads).items()}
    torch.save(tensors, tmp_path / "x" / "medusa_lm_head.pt")
    assert_same(read(tmp_path / "x", target), heads)


def broken(heads, *, drop=None, **extra):
    tensors = {name: array for name, array in heads.tensors.items() if name != drop}
    tensors |= {name.replace("__", "."): array for name, array in extra.items()}
    return StoredHeads(name="x", format="vllm-medusa", config=heads.config, tensors=tensors)


REFUSED = {
    "missing": (
        lambda h: broken(h, drop="blocks.1.layers.0.bias"),
        r"3 Medusa heads of 1 blocks misses blocks\.1\.layers\.0\.bias",
    ),
    "left-over": (
        lambda h: broken(h, blocks__0__layers__0__scale=np.ones(1, np.float32)),
        r"cannot use blocks\.0\.layers\.0\.scale",
    ),
    "a-head-less": (lambda h: broken(h, drop="lm_heads.2.weight"), r"misses lm_heads\.2\.weight"),
    "width": (
        lambda h: broken(h, blocks__0__layers__0__weight=np.ones((32, 32), np.float32)),
        r"'blocks\.0\.layers\.0\.weight' has shape \(32, 32\), a target of hidden size 24",
    ),
    "vocabulary": (
        lambda h: broken(h, lm_heads__0__weight=np.ones((41, 24), np.float32)),
        r"'lm_heads\.0\.weight' has shape \(41, 24\), .*another target",
    ),
    "two-projections": (
        lambda h: broken(h, lm_head__weight=np.ones((40, 24), np.float32)),
        r"lm_head\.weight beside 3 lm_heads",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_contradict_themselves(target, tmp_path, case):
    make, message = REFUSED[case]
    folder = vllm_folder(tmp_path / "x", make(random_heads(target.config)))
    with pytest.raises(ValueError, match=message):
        jspec.load_drafter(folder, target, probe=False)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([0, 3, 3]), "2 distinct ones of 3"),
        (np.array([0, 3, 40]), "ids 0 to 40"),
        (np.array([-1, 3, 4]), "ids -1 to 4"),
        (np.array([0.0, 3.0, 4.0]), "token_map is float64"),
    ],
)
def test_maps_that_lead_nowhere(target, tmp_path, ids, message):
    heads = random_heads(target.config, draft_vocab_size=3)
    stored = broken(heads, token_map=ids)
    with pytest.raises(ValueError, match=message):
        read(vllm_folder(tmp_path / "x", stored), target)


def test_configs_that_contradict_the_file(target, tmp_path):
    heads = random_heads(target.config, draft_vocab_size=3)
    with pytest.raises(ValueError, match="no token_map says which tokens"):
        read(vllm_folder(tmp_path / "a", broken(heads, drop="token_map")), target)
    with pytest.raises(ValueError, match="truncated_vocab_size=5, but token_map holds 3 ids"):
        read(vllm_folder(tmp_path / "b", heads, truncated_vocab_size=5), target)
    with pytest.raises(ValueError, match="vocabulary of 50 tokens, the target has 40"):
        read(vllm_folder(tmp_path / "c", heads, vocab_size=50), target)
    with pytest.raises(NotImplementedError, match=r"logit_scale=0\.5"):
        read(vllm_folder(tmp_path / "d", heads, logit_scale=0.5), target)
    bare = random_heads(target.config, projection="target")
    with pytest.raises(ValueError, match="does not say original_lm_head"):
        read(vllm_folder(tmp_path / "e", bare), target)
    assert read(vllm_folder(tmp_path / "f", bare, original_lm_head=True), target).config.projection


def test_a_projection_out_of_place(target, tmp_path):
    heads = random_heads(target.config)
    tensors = reference_tensors(heads)
    tensors["1.2.weight"] = tensors.pop("1.1.weight")
    with pytest.raises(
        ValueError, match=r"heads of 1 residual blocks and a projection: 1\.2\.weight"
    ):
        read(store(tmp_path / "x", {}, tensors, "medusa_lm_head.safetensors"), target)


def test_nothing_is_overwritten(target, tmp_path):
    heads = random_heads(target.config)
    write_heads(heads, tmp_path / "x", "medusa")
    with pytest.raises(ValueError, match="exists already"):
        write_heads(heads, tmp_path / "x", "medusa")
    with pytest.raises(ValueError, match="format 'modelopt' is not known; expected one of medusa"):
        write_heads(heads, tmp_path / "y", "modelopt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


def test_other_files_are_no_medusa_heads(tmp_path):
    for names in (["model.norm.weight"], ["fc.weight", "layers.0.self_attn.q_proj.weight"]):
        tensors = dict.fromkeys(names, np.ones(2, np.float32))
        folder = store(tmp_path / names[0], {}, tensors)
        assert recognise(open_draft_checkpoint(folder)) is None


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "tie_word_embeddings": True,
}


class TestWholeModel:
    """Medusa-2 folders hold the model that was trained with the heads."""

    @pytest.fixture
    def folder(self, target, tmp_path):
        rng = np.random.default_rng(0)
        layer = "model.layers.0"
        shapes = {
            "model.embed_tokens": (40, 24),
            f"{layer}.self_attn.q_proj": (32, 24),
            f"{layer}.self_attn.k_proj": (16, 24),
            f"{layer}.self_attn.v_proj": (16, 24),
            f"{layer}.self_attn.o_proj": (24, 32),
            f"{layer}.mlp.gate_proj": (40, 24),
            f"{layer}.mlp.up_proj": (40, 24),
            f"{layer}.mlp.down_proj": (24, 40),
            f"{layer}.input_layernorm": (24,),
            f"{layer}.post_attention_layernorm": (24,),
            "model.norm": (24,),
        }
        tensors = {
            f"{name}.weight": rng.standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        heads = random_heads(target.config, projection="target")
        return store(tmp_path / "x", CONFIG, tensors | reference_tensors(heads, "medusa_head."))

    def test_both_halves_load_from_it(self, folder):
        whole = jspec.load_target(folder)
        drafter = jspec.load_drafter(folder, whole, probe=False)
        assert drafter.heads.format == "medusa-2"
        assert any(leaf is target_head(whole) for leaf in leaves(drafter))

    def test_another_target_is_warned_about(self, folder, target):
        with pytest.warns(
            UserWarning, match="the model beside the Medusa heads in .* is not random"
        ):
            jspec.load_drafter(folder, target, probe=False)
