"""Prediction modules on disk: read strictly, written in every format and back to the bit."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from tiny_experts import DEEPSEEK, MTP_KINDS, PUBLIC, tiny_tensors, write_checkpoint
from tiny_models import tiny_target

import jspec
from jspec.checkpoints import open_checkpoint
from jspec.drafters.export import export_head
from jspec.drafters.mtp_export import write_mtp
from jspec.drafters.mtp_formats import WRITABLE, read_mtp

BLOCK = (16, 8)
CORRECTION = "model.layers.2.mlp.gate.e_score_correction_bias"


def bfloat16(tensors):
    """As published: all but the bias that corrects the choice of experts."""
    return {
        name: rows if name.endswith("_bias") else rows.astype(ml_dtypes.bfloat16)
        for name, rows in tensors.items()
    }


@pytest.fixture
def folder(tmp_path):
    """Writes a checkpoint with the given changes; None takes away."""

    def run(kind="deepseek_v3", tensors=None, **config):
        public = MTP_KINDS[kind]
        weights = {
            k: v for k, v in (tiny_tensors(public) | (tensors or {})).items() if v is not None
        }
        (tmp_path / "target").mkdir()
        return write_checkpoint(tmp_path / "target", public | config, weights)

    return run


def load(path, source="mtp"):
    return jspec.load_drafter(source, jspec.load_target(path, dtype="float32"), probe=False)


def modules_of(drafter):
    params = drafter.params
    return [params["module"]] if "module" in params else list(params["modules"].values())


def same_checkpoint(got, want):
    got, want = open_checkpoint(got), open_checkpoint(want)
    assert got.config == want.config
    assert got.names() == want.names()
    for name in want.names():
        one, other = got.read(name), want.read(name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), err_msg=name)


def test_missing_tensors_are_named(folder):
    names = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight"]
    with pytest.raises(ValueError, match=rf"2 tensors .* missing: {names[0]}, {names[1]}"):
        load(folder(tensors=dict.fromkeys(names)))


def test_fewer_modules_than_the_config_says(folder):
    with pytest.raises(ValueError, match=r"missing: model\.layers\.3\.eh_proj\.weight"):
        load(folder(num_nextn_predict_layers=2))


def test_misshapen_tensor(folder):
    name = "model.mtp_layers.0.input_proj.weight"
    with pytest.raises(ValueError, match=rf"'{name}' has shape \(24, 24\), its config asks for"):
        load(folder("mimo", tensors={name: np.zeros((24, 24), np.float32)}))


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_copies_may_be_absent(folder, copy):
    load(folder(tensors={f"model.layers.2.{copy}.weight": None}))


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_copies_may_not_differ(folder, copy):
    name = f"model.layers.2.{copy}.weight"
    with pytest.raises(ValueError, match=rf"'{name}' differs from '.*', which it should repeat"):
        load(folder(tensors={name: np.zeros((40, 24), np.float32)}))


def test_checkpoint_without_modules(folder):
    tensors = {k: None for k in tiny_tensors(DEEPSEEK) if k.startswith("model.layers.2.")}
    path = folder(tensors=tensors, num_nextn_predict_layers=0)
    message = r"no prediction modules.*num_nextn_predict_layers=0"
    with pytest.raises(ValueError, match=message):
        load(path)
    with pytest.raises(ValueError, match=message):
        export_head("mtp", path, path.parent / "new", to="mtp-modules")


def test_families_without_modules_are_refused_by_name():
    message = r"'llama' targets .* deepseek_v3, glm4_moe, mimo \(Qwen3-Next's and Ernie-4\.5's"
    with pytest.raises(NotImplementedError, match=message):
        jspec.load_drafter("mtp", tiny_target(), probe=False)
    with pytest.raises(ValueError, match=r"made in memory.*load the target from a folder"):
        jspec.load_drafter("mtp", tiny_target(family="mimo", mtp_layers=1), probe=False)


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        ("deepseek_v3", "mtp-modules"),
        ("deepseek_v3", "nextn"),
        ("glm4_moe", "nextn"),
        ("mimo", "mtp-modules"),
        ("in-turn", "mtp-modules"),
    ],
)
def test_taken_out_and_put_back(folder, tmp_path, kind, to):
    path = folder(kind, tensors=bfloat16(tiny_tensors(MTP_KINDS[kind])))
    assert export_head("mtp", path, tmp_path / "alone", to=to) == "mtp"
    alone = open_checkpoint(tmp_path / "alone")
    assert not [name for name in alone.names() if "embed_tokens" in name or "head.head" in name]
    got, want = load(path, tmp_path / "alone"), load(path)
    assert str(tmp_path / "alone") in got.description
    for one, other in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_array_equal(one, other)
    assert export_head(tmp_path / "alone", path, tmp_path / "whole", to="mtp") == to
    same_checkpoint(tmp_path / "whole", path)
    export_head(tmp_path / "alone", path, tmp_path / "again", to=to)
    same_checkpoint(tmp_path / "again", tmp_path / "alone")


def test_names_of_a_nextn_folder(folder, tmp_path):
    path = folder()
    export_head("mtp", path, tmp_path / "alone", to="nextn")
    alone = open_checkpoint(tmp_path / "alone")
    assert alone.config["architectures"] == ["DeepseekV3ForCausalLMNextN"]
    assert alone.config["num_hidden_layers"] == 1
    assert "model.layers.0.eh_proj.weight" in alone.names()
    assert all(name.startswith("model.layers.0.") for name in alone.names())


def test_whole_checkpoint_is_rewritten(folder, tmp_path):
    path = folder(tensors=bfloat16(tiny_tensors(DEEPSEEK)))
    (path / "tokenizer.json").write_text("{}")
    export_head("mtp", path, tmp_path / "new", to="mtp")
    same_checkpoint(tmp_path / "new", path)
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"


def test_float8_modules_keep_their_scales(folder, tmp_path):
    """Tensors are moved as they are stored; only loading multiplies them out."""
    tensors, rng = tiny_tensors(DEEPSEEK), np.random.default_rng(0)
    for name in [n for n in tensors if "self_attn" in n and "proj" in n]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
        tensors[f"{name}_scale_inv"] = rng.uniform(0.5, 1.0, grid).astype(np.float32)
    quantised = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    path = folder(tensors=tensors, quantization_config=quantised)
    export_head("mtp", path, tmp_path / "alone", to="nextn")
    for got, want in zip(
        jax.tree.leaves(load(path, tmp_path / "alone").params), jax.tree.leaves(load(path).params)
    ):
        np.testing.assert_array_equal(got, want)
    export_head(tmp_path / "alone", path, tmp_path / "whole", to="mtp")
    same_checkpoint(tmp_path / "whole", path)
    config = json.loads((tmp_path / "alone" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotImplementedError, match=r"quantization_config=None.*to mtp-modules"):
        export_head(tmp_path / "alone", path, tmp_path / "other", to="mtp")
    target = jspec.load_target(path, dtype="float32")
    with pytest.raises(NotImplementedError, match="is quantised"):
        write_mtp(target, modules_of(read_mtp(target)), tmp_path / "other")


def test_what_a_format_has_no_word_for(folder, tmp_path):
    path = folder("in-turn")
    with pytest.raises(NotImplementedError, match=r"holds one module.* not 3 of 'deepseek_v3'"):
        export_head("mtp", path, tmp_path / "new", to="nextn")
    with pytest.raises(ValueError, match=r"prediction modules cannot be written as 'medusa'"):
        export_head("mtp", path, tmp_path / "new", to="medusa")
    assert not (tmp_path / "new").exists()


def test_mimo_has_no_nextn(folder, tmp_path):
    with pytest.raises(NotImplementedError, match=r"not 1 of 'mimo'; expected mtp-modules"):
        export_head("mtp", folder("mimo"), tmp_path / "new", to="nextn")


def test_a_whole_model_is_no_folder_of_modules(folder, tmp_path):
    path = folder()
    with pytest.raises(ValueError, match=r"folder of prediction modules; .* called 'mtp'"):
        export_head(path, path, tmp_path / "new", to="mtp-modules")


@pytest.fixture
def alone(folder, tmp_path):
    """A target, and its modules alone with the given changes."""

    def run(tensors=None, **config):
        path = folder()
        export_head("mtp", path, tmp_path / "good", to="mtp-modules")
        checkpoint = open_checkpoint(tmp_path / "good")
        changed = {name: checkpoint.read(name) for name in checkpoint.names()} | (tensors or {})
        (tmp_path / "alone").mkdir()
        return path, write_checkpoint(
            tmp_path / "alone",
            checkpoint.config | config,
            {name: rows for name, rows in changed.items() if rows is not None},
        )

    return run


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"model.layers.2.enorm.weight": None}, {}, r"missing: model\.layers\.2\.enorm\.weight;"),
        ({"model.layers.2.fc.weight": np.ones(2)}, {}, r"1 tensors .* not of its .*2\.fc\.weight"),
        ({CORRECTION: np.ones(3)}, {}, r"has shape \(3,\), its config asks for \(8,\)"),
        (
            {"model.layers.2.embed_tokens.weight": np.ones((40, 24))},
            {},
            r"differs from 'model\.embed_tokens\.weight'",
        ),
        ({}, {"vocab_size": 41}, r"another target's: vocab_size is 41, the target's 40"),
        ({}, {"rope_theta": 2e4}, r"another target's: rope is .*theta=20000"),
        (
            {},
            {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_nextn_predict_layers": 2},
            r"num_nextn_predict_layers=2; expected 1",
        ),
    ],
)
def test_modules_that_do_not_fit(alone, tmp_path, tensors, config, message):
    path, folder = alone(tensors, **config)
    with pytest.raises(ValueError, match=message):
        load(path, folder)
    with pytest.raises(ValueError, match=message):
        export_head(folder, path, tmp_path / "new", to="mtp")
    assert not (tmp_path / "new").exists()


def test_copies_beside_modules_alone_are_compared(alone, tmp_path):
    table = tiny_tensors(DEEPSEEK)["model.embed_tokens.weight"]
    path, folder = alone({"model.layers.2.embed_tokens.weight": table})
    load(path, folder)
    target = jspec.load_target(path, dtype="float32")
    memory = type(target)(
        name="memory", config=target.config, graphdef=target.graphdef, params=target.params
    )
    with pytest.raises(ValueError, match="cannot be compared: 'memory' was made in memory"):
        jspec.load_drafter(folder, memory, probe=False)


@pytest.mark.parametrize(
    ("kind", "to"),
    [("in-turn", "mtp"), ("mimo", "mtp"), *(("deepseek_v3", to) for to in WRITABLE)],
)
def test_written_from_memory(folder, tmp_path, kind, to):
    path = folder(kind)
    target = jspec.load_target(path, dtype="float32")
    modules = modules_of(read_mtp(target))
    write_mtp(target, modules, tmp_path / "new", to=to)
    if to == "mtp":
        same_checkpoint(tmp_path / "new", path)
    else:
        export_head("mtp", path, tmp_path / "alone", to=to)
        same_checkpoint(tmp_path / "new", tmp_path / "alone")
    with pytest.raises(ValueError, match="exists already"):
        write_mtp(target, modules, tmp_path / "new", to=to)


def test_other_parameters_than_those_on_disk(folder, tmp_path):
    target = jspec.load_target(folder(), dtype="float32")
    modules = modules_of(read_mtp(target))
    doubled = jax.tree.map(lambda x: 2 * x, target.params)
    write_mtp(target, modules, tmp_path / "new", params=doubled, dtype="bfloat16")
    again = open_checkpoint(tmp_path / "new")
    assert again.read(CORRECTION).dtype == np.float32
    assert again.read("model.layers.2.eh_proj.weight").dtype == ml_dtypes.bfloat16
    got = jspec.load_target(tmp_path / "new", dtype="float32")
    np.testing.assert_allclose(got.embedding, 2 * target.embedding, rtol=1e-2)
    load(tmp_path / "new")  # its copies are those of the new parameters


def test_in_memory_target_needs_its_config(folder, tmp_path):
    target = jspec.load_target(folder("mimo"), dtype="float32")
    module = read_mtp(target).params["module"]
    memory = type(target)(
        name="memory", config=target.config, graphdef=target.graphdef, params=target.params
    )
    with pytest.raises(ValueError, match=r"made in memory; give `public`"):
        write_mtp(memory, [module], tmp_path / "new")
    write_mtp(memory, [module], tmp_path / "new", public=PUBLIC["mimo"])
    same_checkpoint(tmp_path / "new", tmp_path / "target")
