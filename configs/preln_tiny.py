"""The shape of ldm_tiny with the plain residual stream: the baseline.

python train.py --config configs/preln_tiny.py
"""

import ldm_tiny

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_tiny with another mixer."""
  return with_mixer(ldm_tiny.get_config(), kind="preln")
