"""What a policy process on a CPU holds otherwise than one on a GPU, in bytes of its resident memory.

What a step frees stays with the process: the C library keeps it, and new sizes do not fit all of it. So the
parts of a step add up, also those that do not exist at the same time. Measured with SmolLM2-135M in float32
(docs/results/README.md).
"""

from nemorl.config.experiment import Experiment

# Of the activations, that lies free between them: the median of ten runs, in which it was 0 to 66%.
_UNUSED_SHARE = 0.18
# Of a buffer for weights on their way, in shared memory of a machine: `weights.shared_memory`.
MAX_BUCKET_BYTES = 8 * 2**20


def with_unused(activations: int) -> int:
    """Activations and the free memory between them."""
    return round(activations * (1 + _UNUSED_SHARE))


def head_parts(
    logits: int, head_gradient: int, embedding_gradient: int, *, is_one_chunk: bool, is_tied: bool
) -> tuple[int, int]:
    """Logits, and gradients of the tables; of the output weight or the embedding 0 where a rank has none.

    `logits` are two chunks. A single one becomes its gradient in place, next to that of the output weight. A
    tied weight keeps that until the embedding's is there, at the end of the backward pass.
    """
    in_head = max(logits, logits // 2 + head_gradient) if is_one_chunk else logits + head_gradient
    in_embedding = embedding_gradient + (head_gradient if is_tied else 0)
    most = max(in_head, in_embedding)
    return min(logits, most), most - min(logits, most)


def summed_gradients(gradients: int, *, copies: int, is_sharded: bool) -> int:
    """Gradients, and what gloo sums over copies of the model: a copy, where each copy keeps a part."""
    return gradients * (2 if copies > 1 and is_sharded else 1)


def most_of_bucket(experiment: Experiment) -> int | None:
    """Bytes that a bucket of weights on their way to generation has at most; None if nothing limits it."""
    transport = experiment.generation.transport
    is_near = transport == "auto" and experiment.cluster.num_nodes == 1
    return MAX_BUCKET_BYTES if is_near or transport == "shared_memory" else None
