"""The shape of ldm_400m with four manifold-constrained hyper-connected streams.

python train.py --config configs/mhc_400m.py --workdir RUN

Rate 2e-3 is the one published as selected for this mechanism at this size.
"""

import dataclasses

import ldm_400m

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_400m with another mixer and learning rate."""
  config = with_mixer(ldm_400m.get_config(), kind="mhc", streams=4)
  return dataclasses.replace(
    config, optimizer=dataclasses.replace(config.optimizer, learning_rate=2e-3)
  )
