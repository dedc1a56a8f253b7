"""The shape of ldm_tiny with block attention residuals.

python train.py --config configs/attnres_tiny.py

Two sublayers to a source make six blocks of the twelve.
"""

import ldm_tiny

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_tiny with another mixer."""
  return with_mixer(ldm_tiny.get_config(), kind="attnres", block_size=2)
