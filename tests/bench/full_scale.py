"""What a run at full scale must take: floating-point operations of whole presets, and the least hours for them.

A step's operations grow linearly with the batch. They are counted in fits to as many made-up records as the batch has,
at two small batches (BATCHES) and the preset's networks, as means over one period of the steps: n_D discriminator steps
and one of the generator for DPGAN, the updates and the training of the classifier for PSG. The line through both gives
a step at the preset's batch. Hours are these of all steps on an H200 at its peak for float32 without TF32 (67 TFLOP/s),
and on one core of this machine at the rate that a matrix product reaches here. Both are lower bounds: no program
reaches the peak, and bytes and the start of kernels are not counted.
"""

from __future__ import annotations

BATCHES = (4, 8)
PRESETS = {  # the setting with the number of steps of a period, and the factors of the number of releases
    "dpgan/eps10": ("n_d", ("steps",)),
    "dpgan/large_batch_eps10": ("n_d", ("steps",)),
    "dpgan/dpimagebench_mnist": ("n_d", ("steps",)),
    "dpdm/mnist": (None, ("steps",)),
    "dpdm/medium_mnist": (None, ("steps",)),
    "psg/mnist": ("updates", ("networks", "rounds", "updates")),
}
