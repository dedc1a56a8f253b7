"""compare_tiny with the full forms and the ablations: 19 mixers, 3 seeds and 3 rates, 171 runs.

python -m ldm_jax.compare --config configs/compare_tiny_long.py --out runs/compare_tiny_long

Estimated from the step times of compare_tiny: about a day on two CPU cores.
"""

import dataclasses

import compare_tiny

from ldm_jax import MixerConfig
from ldm_jax.compare import Comparison


def get_comparison() -> Comparison:
  """Every variant of the depth memory differs from `ldm` in one setting."""
  short = compare_tiny.get_comparison()

  def ldm(**changes):
    return dataclasses.replace(short.mixers["ldm"], **changes)

  mixers = {
    "attnres_full": MixerConfig(kind="attnres", block_size=1),
    "hc": MixerConfig(kind="hc", streams=4, dynamic=True),
    "hc_static": MixerConfig(kind="hc", streams=4, dynamic=False),
    "ldm_outer": ldm(rule="outer"),
    "ldm_delta": ldm(rule="delta"),
    "ldm_no_forgetting": ldm(forgetting=False),
    "ldm_no_importance": ldm(importance=False),
    "ldm_one_group": ldm(groups=1),
    "ldm_shared_key": ldm(shared_key=True),
    "ldm_memory_only_without_embedding": ldm(readout="memory_only"),
    "ldm_no_residual": ldm(residual=False),
    "ldm_block_writes": ldm(write_every=2),
    "ldm_k4": ldm(key_dim=4),
    "ldm_k16": ldm(key_dim=16),
  }
  return dataclasses.replace(
    short,
    mixers={**short.mixers, **mixers},
    seeds=(0, 1, 2),
    learning_rates=(2.5e-3, 5e-3, 1e-2),
  )
