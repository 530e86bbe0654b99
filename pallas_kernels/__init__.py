"""Tree attention, tree building, the accept walk and the path commit, each behind one function.

Every op takes `implementation=None | "xla" | "triton" | "interpret"`; `dispatch` explains them:
XLA runs everywhere, the Pallas kernels run on CUDA GPUs through Triton, and "interpret" runs the
same kernels on a CPU for tests.

Shape letters: `B` slots, `T` nodes (`Tq` queries, `Tk` tree columns), `P` path width, `S` cache
capacity, `H` query heads, `K` KV heads, `G = H/K`, `D` head dim, `U` value dim where it is another,
`V` vocabulary, `W = ceil(T/32)`.
"""

from pallas_kernels import masks
from pallas_kernels.commit_path.api import commit_path
from pallas_kernels.commit_path.config import CommitPathConfig
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.config import TreeAttentionConfig
from pallas_kernels.tree_build.api import build_tree, build_tree_from_selection, select_links
from pallas_kernels.tree_build.config import TreeBuildConfig
from pallas_kernels.tree_build.links import TreeLinks
from pallas_kernels.tree_walk.api import Walk, greedy_walk, sampling_walk
from pallas_kernels.tree_walk.config import TreeWalkConfig

__all__ = [
    "CommitPathConfig",
    "TreeAttentionConfig",
    "TreeBuildConfig",
    "TreeLinks",
    "TreeWalkConfig",
    "Walk",
    "build_tree",
    "build_tree_from_selection",
    "commit_path",
    "greedy_walk",
    "masks",
    "sampling_walk",
    "select_links",
    "tree_attention",
]
