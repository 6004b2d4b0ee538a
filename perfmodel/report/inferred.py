"""What runs of others told about a device, as lines."""

import math

from perfmodel.documents.inferred import InferredDocument
from perfmodel.statistics.normal import DEVIATE_90


def latent_lines(document: InferredDocument) -> list[str]:
    """Every latent with the factor of its 90 % interval, and whether the runs determine it; memory."""
    lines = [f"{'latent':20} {'value':>10}  x/ of 90 %"]
    lines += [
        f"{latent.name:20} {latent.value:10.4g}  x/ {math.exp(DEVIATE_90 * latent.log_sigma):.2f}  "
        f"{'determined' if latent.determined else 'prior kept, the runs do not tell'}: {latent.meaning}"
        for latent in document.latents
    ]
    if document.memory is not None:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in document.memory.factors.items())
        lines.append(
            f"memory, from {len(document.memory.runs)} peaks, factors on its parts: {parts}"
        )
    return lines
