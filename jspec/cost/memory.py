"""Slots and bytes that a round needs beside the committed cache."""

from dataclasses import dataclass

from pallas_kernels.masks import packed_width


def candidates(num_steps: int, topk: int) -> int:
    """Scored candidates of EAGLE-2's expansion: k + (n - 1)·k²; (5, 4) gives 68."""
    return topk + (num_steps - 1) * topk**2


def transient_slots(num_steps: int, topk: int, num_nodes: int) -> int:
    """KV slots a request holds during a round where drafts and verified nodes are written to the
    cache (as SGLang does): n·k of the drafter and T of the target; (5, 4, 8) gives 20 + 8 = 28.

    jspec writes neither: a tree's keys and values live in the pass that made them, and only the
    accepted path is committed.
    """
    return num_steps * topk + num_nodes


@dataclass(frozen=True, kw_only=True)
class MaskBytes:
    """Bytes of the tree masks of a batch, by encoding.

    Attributes:
        full: SGLang's FULL: a bool for every node and every position it could see, Σ T·(S + T).
        qlen_only: its QLEN_ONLY: a bool for every pair of nodes, B·T².
        packed: its QLEN_ONLY_BITPACKING: 8, 16 or 32 bits a node; None for more than 32 nodes,
            which that encoding does not take.
        words: jspec's: ceil(T / 32) words of 32 bits a node.
    """

    full: int
    qlen_only: int
    packed: int | None
    words: int


def mask_bytes(*, nodes: int, context: int, batch: int = 1) -> MaskBytes:
    """What a mask of T nodes takes behind S committed tokens in each of B slots.

    A bool is a byte. T = 8, S = 2,000, B = 1: 16,064, 64, 8 and 32 bytes; with 256 slots of 32,768
    tokens FULL takes 67.1 MB. What is implied by a length alone (the prefix) costs nothing in the
    other three.
    """
    return MaskBytes(
        full=batch * nodes * (context + nodes),
        qlen_only=batch * nodes**2,
        packed=batch * nodes * packed_width(nodes) // 8 if nodes <= 32 else None,
        words=batch * nodes * 4 * -(-nodes // 32),
    )
