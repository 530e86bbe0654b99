"""Random checkpoints written by transformers give the same numbers in jspec, layer by layer."""

import itertools
import json
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.targets import KVCache, Prefix
from jspec.targets.masks import causal_bits

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers")

LAYERS = 3
VOCAB = 70
LENGTH = 40
TOLERANCE = 5e-5
"""On values up to about 20; float32 rounding alone gives 1e-6 to 3e-5, a mistake 1e-2 and more."""


@dataclass(frozen=True)
class Case:
    """A model class of transformers and what differs from `COMMON` in its config."""

    family: str
    changes: dict = field(default_factory=dict)
    shard: str | None = None  # largest shard, as save_pretrained wants it


COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(**parameters):
    """A small base, so that 40 positions turn even the slow dimensions."""
    return {"rope_parameters": {"rope_theta": 500.0, **parameters}}


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
ROPES = {
    "theta": _rope(rope_type="default"),
    "linear": _rope(rope_type="linear", factor=3.0),
    "llama3": _rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "yarn": _rope(**YARN),
    "yarn-mscale": _rope(**YARN, mscale=1.4, mscale_all_dim=0.6),
    "yarn-attention-factor": _rope(**YARN, attention_factor=1.7),
    "yarn-betas": _rope(**YARN, beta_fast=4.0, beta_slow=0.5, truncate=False),
}
# Biases and groups decide which experts are chosen; whole passes group by expert, single tokens
# gather (3 of 8 experts, batch 2).
EXPERTS = {
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
DEEPSEEK = EXPERTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_mtp_layers": 0,
    **_rope(rope_type="default"),
}
GLM = EXPERTS | {"n_group": 1, "topk_group": 1, "head_dim": 16, "num_mtp_layers": 0}


def _deepseek(**changes):
    return Case("DeepseekV3", DEEPSEEK | changes)


def _yarn(mscale, mscale_all_dim):
    return _rope(**YARN, mscale=mscale, mscale_all_dim=mscale_all_dim)


EXPERT_CASES = {
    "deepseek": _deepseek(),
    "deepseek-direct-queries": _deepseek(q_lora_rank=None),
    "deepseek-one-group": _deepseek(n_group=1, topk_group=1),
    "deepseek-weights-as-scored": _deepseek(norm_topk_prob=False, n_shared_experts=2),
    "deepseek-biases": _deepseek(attention_bias=True),
    "deepseek-halves": _deepseek(rope_interleave=False),
    "deepseek-wide-values": _deepseek(v_head_dim=28),
    "deepseek-yarn": _deepseek(**_yarn(1.0, 1.0)),
    "deepseek-yarn-mscale": _deepseek(**_yarn(1.4, 0.6), q_lora_rank=None),
    "glm": Case("Glm4Moe", GLM | {"use_qk_norm": True, "attention_bias": True}),
    "glm-rotated-quarter": Case(
        "Glm4Moe", GLM | _rope(rope_type="default", partial_rotary_factor=0.25)
    ),
}
FAMILIES = {"DeepseekV3": "deepseek_v3", "Glm4Moe": "glm4_moe"}
CASES = (
    EXPERT_CASES
    | {
        "llama": Case("Llama"),
        "llama-tied": Case("Llama", {"tie_word_embeddings": True}),
        "llama-biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}),
        "llama-head-dim": Case("Llama", {"head_dim": 16}),
        "llama-multi-head": Case("Llama", {"num_key_value_heads": 4}),
        "llama-sharded": Case("Llama", shard="20KB"),
        "mistral": Case("Mistral", {"sliding_window": None}),
        "mistral-head-dim": Case("Mistral", {"sliding_window": None, "head_dim": 8}),
        "qwen2": Case("Qwen2"),
        "qwen2-tied": Case("Qwen2", {"tie_word_embeddings": True}),
        "qwen3": Case("Qwen3", {"head_dim": 16}),
        "qwen3-biases": Case("Qwen3", {"head_dim": 16, "attention_bias": True}),
    }
    | {f"rope-{name}": Case("Llama", changes) for name, changes in ROPES.items()}
)


@dataclass(frozen=True)
class Recorded:
    """A saved model and what transformers computed with it on `tokens`, batch 2."""

    folder: object
    tokens: np.ndarray
    logits: np.ndarray
    layers: list[np.ndarray]  # output of every layer, before the final norm
    final: np.ndarray  # after it


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Makes the checkpoint of a case, once."""
    made = {}

    def get(name: str) -> Recorded:
        if name not in made:
            made[name] = _record(CASES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


def _record(case: Case, folder) -> Recorded:
    model = _random_model(case)
    kwargs = {} if case.shard is None else {"max_shard_size": case.shard}
    model.save_pretrained(folder, **kwargs)
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, LENGTH), dtype=np.int32)
    before_norm = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.inference_mode():
        out = model(torch.from_numpy(tokens).long(), output_hidden_states=True, use_cache=False)
    hook.remove()
    # transformers' state k is the output of layer k - 1, but the last one is already normalised.
    states = [*out.hidden_states[1:LAYERS], before_norm[0]]
    return Recorded(
        folder=folder,
        tokens=tokens,
        logits=out.logits.numpy(),
        layers=[state.numpy() for state in states],
        final=out.hidden_states[LAYERS].numpy(),
    )


def _random_model(case: Case):
    config_class = getattr(transformers, f"{case.family}Config")
    model_class = getattr(transformers, f"{case.family}ForCausalLM")
    model = model_class(config_class(**(COMMON | case.changes))).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias") or "embed" in name:
                weight.copy_(0.5 * noise)
            else:
                # Sharp attention: scores of order 2 make a wrong rotation visible.
                gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def _run(target, tokens):
    """Logits, every layer's output and the final hidden states of one causal pass."""

    @jax.jit
    def run(params, tokens, positions):
        out = target.forward(params, tokens, positions, feature_layers=tuple(range(LAYERS)))
        return target.logits(params, out.hidden), out

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return run(target.params, jnp.asarray(tokens), positions)


def _assert_equal(target, recorded: Recorded):
    logits, out = _run(target, recorded.tokens)
    for layer, (got, want) in enumerate(zip(out.features, recorded.layers, strict=True)):
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0, err_msg=f"layer {layer}")
    np.testing.assert_allclose(out.hidden, recorded.final, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits, recorded.logits, atol=TOLERANCE, rtol=0)


def _edit_config(folder, tmp_path, edit):
    """A folder with the same weights and another config.json."""
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit(config)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_every_layer(record, name):
    recorded = record(name)
    target = jspec.load_target(recorded.folder, dtype="float32")
    family = CASES[name].family
    assert target.config.family == FAMILIES.get(family, family.lower())
    assert target.eos_token_ids == {2}
    _assert_equal(target, recorded)


def test_shards_are_several(record):
    assert len(list(record("llama-sharded").folder.glob("*.safetensors"))) > 3


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_older_rope_spelling(record, tmp_path, name, type_key):
    """`rope_theta` and `rope_scaling` instead of `rope_parameters`."""
    recorded = record(f"rope-{name}")

    def respell(config):
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        kind = scaling.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {type_key: kind, **scaling}

    older = jspec.load_target(_edit_config(recorded.folder, tmp_path, respell), dtype="float32")
    assert older.config == jspec.load_target(recorded.folder, dtype="float32").config
    _assert_equal(older, recorded)


def test_latent_cache_is_narrow(record):
    """One row a token and layer: the latent and the shared rotated key, no values."""
    target = jspec.load_target(record("deepseek").folder, dtype="float32")
    cache = target.empty_cache(2, 16)
    row = DEEPSEEK["kv_lora_rank"] + DEEPSEEK["qk_rope_head_dim"]
    assert [leaf.shape for leaf in jax.tree.leaves(cache)] == [(2, 16, 1, row)] * LAYERS


def test_routing_stays_float32(record):
    target = jspec.load_target(record("deepseek").folder, dtype="bfloat16")
    assert target.dtype == jnp.bfloat16
    wide = [leaf.shape for leaf in jax.tree.leaves(target.params) if leaf.dtype == jnp.float32]
    assert sorted(wide) == [(8,), (8,), (8, 48), (8, 48)]


@pytest.mark.parametrize("name", [name for name in ROPES if name != "theta"])
def test_rope_scaling_is_visible(record, tmp_path, name):
    """The comparison above would notice a scaling that was ignored."""
    recorded = record(f"rope-{name}")

    def unscale(config):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}

    plain = jspec.load_target(_edit_config(recorded.folder, tmp_path, unscale), dtype="float32")
    logits, _ = _run(plain, recorded.tokens)
    assert np.abs(logits - recorded.logits).max() > 0.05


def test_yarn_original_context_from_position_limit(record, tmp_path):
    """Older configs leave the trained length to `max_position_embeddings`."""
    recorded = record("rope-yarn")

    def drop(config):
        del config["rope_parameters"]["original_max_position_embeddings"]
        config["max_position_embeddings"] = 16

    target = jspec.load_target(_edit_config(recorded.folder, tmp_path, drop), dtype="float32")
    _assert_equal(target, recorded)


def test_keys_that_may_be_absent(record, tmp_path):
    """Configs from before grouped heads: no KV head count, no head_dim, no switches."""
    recorded = record("llama-multi-head")

    def drop(config):
        for key in ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"):
            del config[key]

    target = jspec.load_target(_edit_config(recorded.folder, tmp_path, drop), dtype="float32")
    _assert_equal(target, recorded)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_sliding_window_limits_context(tmp_path, family):
    """Equal up to `max_context` = the window, and different right after: the limit is exact."""
    window = 24
    changes = {"sliding_window": window, "head_dim": 12}
    if family != "Mistral":
        changes |= {"use_sliding_window": True, "max_window_layers": 1}
    recorded = _record(Case(family, changes), tmp_path)
    target = jspec.load_target(tmp_path, dtype="float32")
    assert target.config.max_context == window
    logits, _ = _run(target, recorded.tokens)
    error = np.abs(logits - recorded.logits).max(axis=(0, 2))
    assert error[:window].max() < TOLERANCE
    assert error[window:].min() > 1e-3


CACHED = [
    "llama",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "rope-llama3",
    "rope-yarn-mscale",
    "deepseek",
    "glm",
]


def _garbage_cache(target, capacity):
    """Rows that were not committed hold what must never be read."""
    empty = target.empty_cache(2, capacity)
    return KVCache(
        tuple(jnp.full_like(keys, 50.0) for keys in empty.keys),
        tuple(jnp.full_like(values, -300.0) for values in empty.values),
    )


class Decoding:
    """A target, its cache and what is committed: passes on top of it, chunk after chunk."""

    def __init__(self, target, capacity=64):
        self.target = target
        self.prefix = Prefix(_garbage_cache(target, capacity), jnp.zeros((2,), jnp.int32))
        self._forward = jax.jit(
            lambda params, *args: target.forward(params, *args, feature_layers=tuple(range(LAYERS)))
        )

    def run(self, tokens, depths, ancestors):
        positions = self.prefix.lengths[:, None] + jnp.asarray(depths, jnp.int32)[None, :]
        ancestors = jnp.broadcast_to(ancestors, (2, *ancestors.shape[-2:]))
        tokens = jnp.asarray(tokens)
        return self._forward(self.target.params, tokens, positions, self.prefix, ancestors)

    def commit(self, new, path, count):
        count = jnp.asarray(count, jnp.int32)
        cache, lengths = self.prefix.cache, self.prefix.lengths
        cache = cache.commit(new, jnp.asarray(path, jnp.int32), count, lengths)
        self.prefix = Prefix(cache, lengths + count)

    def chunk(self, tokens, count):
        """A causal chunk, of which each slot commits its first `count` tokens."""
        width = tokens.shape[1]
        out = self.run(tokens, np.arange(width), causal_bits(width))
        self.commit(out.new, np.broadcast_to(np.arange(width), (2, width)), count)
        return out


def _rows(tokens, start, width):
    """`width` tokens of each slot from its own `start`."""
    return np.stack([row[at : at + width] for row, at in zip(tokens, start)])


@pytest.mark.parametrize("name", CACHED)
def test_chunks_equal_one_pass(record, name):
    """A prefix committed in two chunks of other lengths a slot, then a third and single tokens."""
    recorded = record(name)
    decoding = Decoding(jspec.load_target(recorded.folder, dtype="float32"))
    start = np.zeros(2, int)
    for width, count in [(17, (17, 11)), (16, (12, 16)), (9, (9, 9)), (1, (1, 1)), (1, (1, 1))]:
        out = decoding.chunk(_rows(recorded.tokens, start, width), count)
        for slot, at in enumerate(start):
            want = slice(at, at + width)
            pairs = zip((out.hidden, *out.features), (recorded.final, *recorded.layers))
            for got, whole in pairs:
                np.testing.assert_allclose(got[slot], whole[slot, want], atol=TOLERANCE, rtol=0)
        start = start + count
    assert decoding.prefix.lengths.tolist() == start.tolist() == [40, 38]


def _branches(length):
    """A root with two chains of `length` below it, interleaved: parents, depths, ancestor bits."""
    parents = [-1, 0, 0, *range(1, 2 * length - 1)]
    depths, seen = [0], [{0}]
    for node, parent in enumerate(parents[1:], start=1):
        depths.append(depths[parent] + 1)
        seen.append(seen[parent] | {node})
    words = -(-len(parents) // 32)
    bits = np.zeros((len(parents), words), np.uint32)
    for node, above in enumerate(seen):
        for other in above:
            bits[node, other // 32] |= np.uint32(1 << other % 32)
    return depths, jnp.asarray(bits)[None]


@pytest.mark.parametrize(
    ("name", "length"),
    [*itertools.product(["llama", "qwen3", "rope-yarn-mscale"], [1, 4, 20]), ("deepseek", 4)],
)
def test_tree_equals_two_sequences(record, name, length):
    """Both branches in one pass (41 nodes take two mask words), each as if it were alone."""
    recorded = record(name)
    target = jspec.load_target(recorded.folder, dtype="float32")
    decoding = Decoding(target)
    committed = np.array([13, 7])
    decoding.chunk(recorded.tokens[:, :16], committed)

    depths, ancestors = _branches(length)
    nodes = np.random.default_rng(length).integers(0, VOCAB, (2, len(depths)), dtype=np.int32)
    out = decoding.run(nodes, depths, ancestors)
    for first in (1, 2):
        branch = [0, *range(first, len(depths), 2)]
        for slot, at in enumerate(committed):
            alone = np.concatenate([recorded.tokens[slot, :at], nodes[slot, branch]])
            _, want = _run(target, np.stack([alone, alone]))
            for got, whole in zip((out.hidden, *out.features), (want.hidden, *want.features)):
                np.testing.assert_allclose(
                    got[slot, jnp.asarray(branch)], whole[0, at:], atol=TOLERANCE, rtol=0
                )

    # Committing the second branch leaves a cache that continues it.
    path = np.array([0, *range(2, len(depths), 2)])
    decoding.commit(out.new, np.stack([path, path]), [len(path)] * 2)
    after = np.array([[3], [4]], np.int32)
    out = decoding.run(after, [0], causal_bits(1))
    for slot, at in enumerate(committed):
        alone = np.concatenate([recorded.tokens[slot, :at], nodes[slot, path], after[slot]])
        _, want = _run(target, np.stack([alone, alone]))
        np.testing.assert_allclose(out.hidden[slot, 0], want.hidden[0, -1], atol=TOLERANCE, rtol=0)
