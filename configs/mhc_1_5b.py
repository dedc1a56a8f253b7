"""The shape of ldm_1_5b with four manifold-constrained hyper-connected streams.

python train.py --config configs/mhc_1_5b.py --workdir RUN
"""

import ldm_1_5b

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_1_5b with another mixer."""
  return with_mixer(ldm_1_5b.get_config(), kind="mhc", streams=4)
