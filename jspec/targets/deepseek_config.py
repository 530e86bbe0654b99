"""What sets DeepSeek-V3 apart from a dense decoder: latent attention and experts.

References:
    DeepSeek-AI 2024, DeepSeek-V2 (https://arxiv.org/abs/2405.04434), section 2.1 for multi-head
    latent attention.
    DeepSeek-AI 2024, DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.1.2 for the router.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jspec.targets.keys import only, positive_int
from jspec.targets.rope import RopeConfig, yarn_temperature


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: keys and values of all heads from one narrow row a token.

    Attributes:
        q_rank: width queries are squeezed through, None where they are projected directly.
        kv_rank: width of the latent that keys and values are made of.
        nope_dim: width of a query and key head that is not rotated.
        rope_dim: width of the rotated part; its key is shared by all heads.
        value_dim: width of a value head.
        scale: factor on the attention logits.
        interleaved: rotated dimensions lie in pairs (0, 1), (2, 3), …, not in halves.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool

    @property
    def row_dim(self) -> int:
        """What a cached row holds: the latent, then the rotated key."""
        return self.kv_rank + self.rope_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], rope: RopeConfig) -> "LatentConfig":
        """Read a `config.json` dictionary.

        Raises:
            ValueError: a required key is missing.
        """
        nope_dim = positive_int(config, "qk_nope_head_dim")
        scale = (nope_dim + rope.dim) ** -0.5
        scaling = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        weight = scaling.get("mscale_all_dim")
        if weight and rope.kind != "default":
            # The temperature of the stretched context, once for the query and once for the key.
            scale *= yarn_temperature(rope.factor, float(weight)) ** 2
        squeezed = config.get("q_lora_rank") is not None
        return cls(
            q_rank=positive_int(config, "q_lora_rank") if squeezed else None,
            kv_rank=positive_int(config, "kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope.dim,
            value_dim=positive_int(config, "v_head_dim"),
            scale=scale,
            interleaved=bool(config.get("rope_interleave", True)),
        )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts with sigmoid scores, chosen within the best groups.

    Attributes:
        num_experts: X, routed ones.
        per_token: experts a token uses.
        intermediate_size: width of one expert.
        num_shared: experts every token uses; they are one MLP of that many widths.
        num_groups: groups the experts are counted off into.
        groups_per_token: groups a token may choose from.
        scale: factor on the routed output.
        normalise: divide a token's weights by their sum.
        first_layer: layers before this one are dense.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    num_shared: int
    num_groups: int
    groups_per_token: int
    scale: float
    normalise: bool
    first_layer: int

    def __post_init__(self):
        groups, experts = self.num_groups, self.num_experts
        if experts % groups or (groups > 1 and experts // groups < 2):
            raise ValueError(
                f"n_routed_experts={experts} do not form n_group={groups} groups of at least two."
            )
        available = experts // groups * self.groups_per_token
        if self.groups_per_token > groups or self.per_token > available:
            raise ValueError(
                f"num_experts_per_tok={self.per_token} and topk_group={self.groups_per_token} ask "
                f"for more than n_routed_experts={experts} in n_group={groups} groups have."
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ExpertsConfig":
        """Read a `config.json` dictionary.

        Raises:
            NotImplementedError: another router than DeepSeek-V3's.
            ValueError: a required key is missing, or the groups do not work out.
        """
        only(config, "scoring_func", "sigmoid")
        only(config, "topk_method", "noaux_tc")
        only(config, "moe_layer_freq", 1)
        return cls(
            num_experts=positive_int(config, "n_routed_experts"),
            per_token=positive_int(config, "num_experts_per_tok"),
            intermediate_size=positive_int(config, "moe_intermediate_size"),
            num_shared=int(config.get("n_shared_experts") or 0),
            num_groups=int(config.get("n_group") or 1),
            groups_per_token=int(config.get("topk_group") or 1),
            scale=float(config.get("routed_scaling_factor", 1.0)),
            normalise=bool(config.get("norm_topk_prob", True)),
            first_layer=int(config.get("first_k_dense_replace") or 0),
        )
