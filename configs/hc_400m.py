"""The shape of ldm_400m with four dynamic hyper-connected streams.

python train.py --config configs/hc_400m.py --workdir RUN
"""

import ldm_400m

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_400m with another mixer."""
  return with_mixer(ldm_400m.get_config(), kind="hc", streams=4, dynamic=True)
