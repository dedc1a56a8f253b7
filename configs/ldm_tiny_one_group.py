"""Ablation of ldm_tiny: one memory for the whole width.

python train.py --config configs/ldm_tiny_one_group.py
"""

import ldm_tiny

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_tiny with one change."""
  return with_mixer(ldm_tiny.get_config(), groups=1)
