"""Ablation of ldm_tiny: reads of the memory alone: h = M q.

python train.py --config configs/ldm_tiny_memory_only.py
"""

import ldm_tiny

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_tiny with one change."""
  return with_mixer(ldm_tiny.get_config(), readout="memory_only")
