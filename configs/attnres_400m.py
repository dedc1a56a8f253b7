"""The shape of ldm_400m with block attention residuals.

python train.py --config configs/attnres_400m.py --workdir RUN

Six sublayers to a source make eight blocks of the 48, about as many as the paper finds enough.

Rate 2e-3 is the one published as selected for this mechanism at this size.
"""

import dataclasses

import ldm_400m

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_400m with another mixer and learning rate."""
  config = with_mixer(ldm_400m.get_config(), kind="attnres", block_size=6)
  return dataclasses.replace(
    config, optimizer=dataclasses.replace(config.optimizer, learning_rate=2e-3)
  )
