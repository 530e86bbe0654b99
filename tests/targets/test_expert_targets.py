"""DeepSeek-V3 and GLM-4.5: strict loading, float8, and the same greedy text with speculation."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scripted_drafters import KINDS, Scripted, answers_from
from tiny_experts import DEEPSEEK, GLM, PUBLIC, tiny_tensors, write_checkpoint

import jspec
from jspec.targets import config_from_hf, random_target
from jspec.targets.moe import Experts
from pallas_kernels.masks import from_qlen_only

PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
SAMPLING = jspec.SamplingParams(max_new_tokens=24)
GATE = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def load(tmp_path):
    """Writes a checkpoint with the given changes and loads it; None takes something away."""

    def run(public=DEEPSEEK, tensors=None, **config):
        weights = {
            k: v for k, v in (tiny_tensors(public) | (tensors or {})).items() if v is not None
        }
        settings = {k: v for k, v in (public | config).items() if v is not None}
        return jspec.load_target(write_checkpoint(tmp_path, settings, weights), dtype="float32")

    return run


@pytest.mark.parametrize("family", PUBLIC)
def test_modules_beside_the_model_are_not_left_over(load, family):
    target = load(PUBLIC[family])
    assert target.config.family == family
    assert target.config.mtp_layers == 1


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.5.up_proj.weight",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.self_attn.q_a_layernorm.weight",
        GATE,
    ],
)
def test_missing_tensor(load, name):
    with pytest.raises(ValueError, match=rf"no tensor '{name}' of shape \("):
        load(tensors={name: None})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.2.mlp.experts.8.up_proj.weight",
        "model.layers.2.fc.weight",
        "model.layers.3.enorm.weight",
    ],
)
def test_unused_tensor(load, name):
    """Also among the names of a prediction module: only what such a module has is its."""
    with pytest.raises(ValueError, match=rf"has 1 tensors that .* not explain: {name}"):
        load(tensors={name: np.zeros((16,), np.float32)})


def test_modules_that_the_config_does_not_mention(load):
    with pytest.raises(ValueError, match=r"does not explain: model\.layers\.2\.eh_proj\.weight"):
        load(num_nextn_predict_layers=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, r"scoring_func='softmax'.*expected 'sigmoid'"),
        ({"topk_method": "greedy"}, r"topk_method='greedy'.*expected 'noaux_tc'"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq=2.*expected 1"),
    ],
)
def test_another_router_is_refused(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        config_from_hf(DEEPSEEK | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, r"n_routed_experts=8 do not form n_group=3"),
        ({"n_group": 8}, r"n_routed_experts=8 do not form n_group=8 groups of at least two"),
        ({"topk_group": 5}, r"topk_group=5 ask for more"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok=5 and topk_group=2 ask for more"),
        ({"kv_lora_rank": None}, r"'kv_lora_rank' is None; expected a positive integer"),
        ({"n_routed_experts": 0}, r"'n_routed_experts' is 0; expected a positive integer"),
    ],
)
def test_senseless_experts(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(DEEPSEEK | changes)


def test_float8_checkpoint_equals_its_values(load):
    """Projections stored as float8 with block scales, the rest as it is."""
    rng = np.random.default_rng(5)
    stored, plain = {}, {}
    for name, tensor in tiny_tensors(DEEPSEEK).items():
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            small = rng.standard_normal(tensor.shape).astype(ml_dtypes.float8_e4m3fn)
            grid = [-(-size // 8) for size in tensor.shape]
            scale = rng.uniform(0.05, 0.4, grid).astype(np.float32)
            stored |= {name: small, f"{name}_scale_inv": scale}
            wide = np.kron(scale, np.ones((8, 8), np.float32))
            plain[name] = small.astype(np.float32) * wide[: tensor.shape[0], : tensor.shape[1]]
    quantised = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    tokens = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32)
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    first = load(tensors=stored, quantization_config=quantised)
    second = load(tensors=plain)
    got, want = (t.forward(t.params, tokens, positions).hidden for t in (first, second))
    np.testing.assert_array_equal(got, want)


def test_float8_weight_without_scales(load):
    name = "model.layers.0.self_attn.o_proj.weight"
    small = np.zeros((24, 32), ml_dtypes.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"no tensor '{name}_scale_inv'"):
        load(tensors={name: small}, quantization_config={"quant_method": "fp8"})


def test_gathered_and_grouped_products_agree():
    config = config_from_hf(DEEPSEEK)
    experts = Experts(config, dtype=jnp.float32)
    rng = np.random.default_rng(2)
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight[...] = jnp.asarray(rng.standard_normal(weight.shape), jnp.float32)
    tokens = jnp.asarray(rng.standard_normal((13, 24)), jnp.float32)
    # Experts 6 and 7 get nothing, expert 0 a token twice as often as chance.
    chosen = jnp.asarray(rng.integers(0, 6, (13, 2)), jnp.int32).at[::2, 0].set(0)
    got, want = experts._grouped(tokens, chosen), experts._gathered(tokens, chosen)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module")
def plain():
    """Targets and what they write greedily."""
    targets = {
        "deepseek": random_target(config_from_hf(DEEPSEEK)),
        "glm": random_target(config_from_hf(GLM)),
    }
    return {k: (t, jspec.Engine(t).generate(PROMPTS, SAMPLING)) for k, t in targets.items()}


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_ngram_writes_the_same_text(plain, name):
    target, want = plain[name]
    got = jspec.Engine(target, "ngram").generate(PROMPTS, SAMPLING)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert len(set(want[0].token_ids)) > 3


def test_scripted_drafts_write_the_same_text(plain):
    target, want = plain["deepseek"]
    tree = jspec.TreeConfig(num_steps=3, topk=3, num_nodes=9)
    engine = None
    for kind in KINDS:
        drafter = Scripted(kind=kind, answers=answers_from(want, 96), vocab_size=40)
        engine = engine or jspec.Engine(target, drafter, tree=tree)
        engine.params = (target.params, drafter.params)
        got = engine.generate(PROMPTS, SAMPLING)
        assert [o.token_ids for o in got] == [o.token_ids for o in want]
        lengths = got[0].stats.accept_length
        assert lengths == 1.0 if kind == "wrong" else lengths > 1.5


@pytest.mark.parametrize("public", [DEEPSEEK, GLM])
def test_bits_without_a_prefix_hide_other_texts(public):
    """Two texts in one sequence, as training packs them, are what they are alone."""
    target = random_target(config_from_hf(public))
    alone = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 6)), jnp.int32)
    place = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), alone.shape)
    text = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 6)
    seen = (text[:, None] == text[None, :]) & jnp.tril(jnp.ones((12, 12), bool))
    want = target.forward(target.params, alone, place).hidden
    got = target.forward(
        target.params, alone.reshape(1, 12), place.reshape(1, 12), None, from_qlen_only(seen[None])
    ).hidden
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-5)
