"""The shape of ldm_1_5b with block attention residuals.

python train.py --config configs/attnres_1_5b.py --workdir RUN

Six sublayers to a source make eight blocks of the 48, about as many as the paper finds enough.
"""

import ldm_1_5b

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_1_5b with another mixer."""
  return with_mixer(ldm_1_5b.get_config(), kind="attnres", block_size=6)
