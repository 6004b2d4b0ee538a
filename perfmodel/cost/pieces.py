"""What a step of a large model is made of, before a program puts it together."""

from dataclasses import dataclass

from perfmodel.cost.jobs import Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPieces:
    """Pieces of the step of every job; see ``layout_time.step_parts``. [s]"""

    forward_s: Column
    """Layers of the fullest device, one micro-batch."""
    backward_s: Column
    """The same backward, recomputation included."""
    tensor_s: Column
    """Collectives of the same, both passes."""
    micro_step_s: Column
    head_s: Column
    embedding_s: Column
    hop_s: Column
    gather_s: Column
    """Sharded parameters of the same, once."""
    scatter_s: Column
    """Their gradients, once."""
    reduce_s: Column
    """Gradients of the same between groups of shards, once."""
    data_s: Column
    """Gradients of one step, hidden or not."""
    contention_s: Column
    """Beyond perfect overlap: per step for gradients, per micro-batch for sharded parameters."""
    optimizer_s: Column
    offload_s: Column
    sites_s: Column
    """Share of one step in an exchange between sites."""
    replicate_s: Column
    """Parameters of one process to its devices, or gradients back."""
    outputs_s: Column
    """Logits of one process to the device with the loss."""
    slower: Column
    """Factor of slower devices among many."""
