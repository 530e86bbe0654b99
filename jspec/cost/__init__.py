"""What speculation costs and gains, on paper: shapes, hardware, rooflines, acceptance, plans.

Everything here is arithmetic on the host; nothing is compiled (but for `measure_hardware`). Figures
are in SI units: bytes, seconds, operations; a multiply-add is two operations.
"""

from jspec.cost.acceptance import (
    Acceptance,
    accept_length_by_depth,
    chain_accept_length,
    expand,
)
from jspec.cost.drafting import (
    KINDS,
    DrafterShape,
    eagle,
    eagle3,
    find_drafter,
    medusa,
    mtp,
    ngram,
    relative_cost,
    standalone,
)
from jspec.cost.hardware import HARDWARE, Hardware, find_hardware, measure_hardware
from jspec.cost.memory import MaskBytes, candidates, mask_bytes, transient_slots
from jspec.cost.passes import Network, PassCost, memory_needed, network, target_pass
from jspec.cost.planner import (
    Option,
    Plan,
    Roofline,
    make_plan,
    plan_paying_batches,
    tree_grid,
)
from jspec.cost.shapes import PRESETS, ModelShape, find_shape
from jspec.cost.speedup import (
    RoundTime,
    VerifyTimes,
    break_even_batch,
    constant_cost_speedup,
    lost_to_drafting,
    paying_batches,
)

__all__ = [
    "HARDWARE",
    "KINDS",
    "PRESETS",
    "Acceptance",
    "DrafterShape",
    "Hardware",
    "MaskBytes",
    "ModelShape",
    "Network",
    "Option",
    "PassCost",
    "Plan",
    "Roofline",
    "RoundTime",
    "VerifyTimes",
    "accept_length_by_depth",
    "break_even_batch",
    "candidates",
    "chain_accept_length",
    "constant_cost_speedup",
    "eagle",
    "eagle3",
    "expand",
    "find_drafter",
    "find_hardware",
    "find_shape",
    "lost_to_drafting",
    "make_plan",
    "mask_bytes",
    "measure_hardware",
    "medusa",
    "memory_needed",
    "mtp",
    "network",
    "ngram",
    "paying_batches",
    "plan_paying_batches",
    "relative_cost",
    "standalone",
    "target_pass",
    "transient_slots",
    "tree_grid",
]
