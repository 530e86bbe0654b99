"""Targets small enough to compile in a second."""

from jspec.targets import RopeConfig, Target, TargetConfig, random_target


def tiny_config(**changes) -> TargetConfig:
    """Two layers, grouped heads, 40 tokens."""
    settings = {
        "family": "llama",
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=1e4, dim=8),
        "max_context": 256,
    }
    return TargetConfig(**(settings | changes))


def tiny_target(seed: int = 0, **changes) -> Target:
    """Random weights: text without structure, but far from ties."""
    return random_target(tiny_config(**changes), seed=seed)
