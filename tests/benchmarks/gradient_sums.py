"""Sums of gradients in the traces of all held-out models beside those of real steps.

``python -m tests.benchmarks.gradient_sums``
"""

import sys
import tempfile
from pathlib import Path

from perfmodel.trace.sources import SampleSize, find_source
from tests.perfmodel.trace.gradient_sums import traced_and_real
from validate.held_out_models import HELD_OUT, write_configs


def main() -> None:
    """Print how many are in place and how many are not, traced and real."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_configs(folder)
        for model in HELD_OUT:
            model_spec = model.model_spec("sgd", folder)
            source = find_source(model_spec.model, SampleSize(image_size=model_spec.image_size))
            traced, real = (
                f"{sums['aten::add_']:3d} in place, {sums['aten::add']:3d} not"
                for sums in traced_and_real(source)
            )
            sys.stdout.write(f"{model.model:32} traced {traced}; real {real}\n")


if __name__ == "__main__":
    main()
