"""Target models: configs, layers, the decoder, its cache, and loading."""

from jspec.targets.cache import KVCache, Prefix
from jspec.targets.config import TargetConfig, config_from_hf
from jspec.targets.decoder import Decoder, Pass
from jspec.targets.deepseek_config import ExpertsConfig, LatentConfig
from jspec.targets.load import load_target
from jspec.targets.rope import RopeConfig
from jspec.targets.target import Target, random_target

__all__ = [
    "Decoder",
    "ExpertsConfig",
    "KVCache",
    "LatentConfig",
    "Pass",
    "Prefix",
    "RopeConfig",
    "Target",
    "TargetConfig",
    "config_from_hf",
    "load_target",
    "random_target",
]
