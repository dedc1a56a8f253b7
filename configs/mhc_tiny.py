"""The shape of ldm_tiny with four manifold-constrained hyper-connected streams.

python train.py --config configs/mhc_tiny.py
"""

import ldm_tiny

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_tiny with another mixer."""
  return with_mixer(ldm_tiny.get_config(), kind="mhc", streams=4)
