"""Target models: configs, layers, the dense decoder, its cache, and loading."""

from jspec.targets.cache import KVCache
from jspec.targets.config import TargetConfig, config_from_hf
from jspec.targets.decoder import DenseDecoder, Pass, Prefix
from jspec.targets.load import load_target
from jspec.targets.rope import RopeConfig
from jspec.targets.target import Target, random_target

__all__ = [
    "DenseDecoder",
    "KVCache",
    "Pass",
    "Prefix",
    "RopeConfig",
    "Target",
    "TargetConfig",
    "config_from_hf",
    "load_target",
    "random_target",
]
