"""Small DeepSeek-V3, GLM-4.5 and MiMo checkpoints, with multi-token-prediction modules."""

import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jspec.targets import config_from_hf, random_target
from jspec.targets.mtp import FAMILIES, module_prefix, module_shapes, module_sources
from jspec.targets.names import decoder_sources, split

COMMON = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "num_nextn_predict_layers": 1,
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
DEEPSEEK = (
    COMMON
    | EXPERTS
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 4,
        "topk_group": 2,
    }
)
GLM = COMMON | EXPERTS | {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 8}
MIMO = COMMON | {"architectures": ["MiMoForCausalLM"], "head_dim": 8}
PUBLIC = {"deepseek_v3": DEEPSEEK, "glm4_moe": GLM, "mimo": MIMO}
MTP_KINDS = PUBLIC | {"in-turn": DEEPSEEK | {"num_nextn_predict_layers": 3}}
"""A family each with one module, and several modules run in turn."""


def tiny_tensors(public: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint with this config: the model's, its modules' and their copies."""
    config = config_from_hf(public)
    target = random_target(config, seed=seed)
    tensors = split(target.params, partial(decoder_sources, config=config))
    family = FAMILIES.get(config.family)
    if family is None:
        return tensors
    rng = np.random.default_rng(seed + 1)
    for index in range(config.mtp_layers):
        sources = partial(module_sources, config=config, family=family, index=index)
        tensors |= split(random_module(config, family, rng), sources)
        prefix = module_prefix(config, family, index)
        tensors |= {f"{prefix}.{copy}": tensors[name] for copy, name in family.copies}
    return tensors


def random_module(config, family, rng):
    """Parameters of one prediction module."""

    def draw(path, variable):
        noise = rng.standard_normal(variable.shape)
        is_norm = "norm" in str(path[-2:])
        noise = 1.0 + 0.1 * noise if is_norm else noise / np.sqrt(variable.shape[-1])
        return variable.replace(jnp.asarray(noise, variable.dtype))

    _, shapes = module_shapes(config, family)
    return nnx.from_flat_state(
        [(path, draw(path, leaf)) for path, leaf in nnx.to_flat_state(shapes)]
    )


def write_checkpoint(folder: Path, public: dict, tensors: dict[str, np.ndarray]) -> Path:
    """config.json and model.safetensors."""
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(public), encoding="utf-8")
    return folder
