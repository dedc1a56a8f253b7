"""1.45B parameters (1.44B without the mixers), 24 blocks of width 2048, 100B tokens in all.

    python train.py --config configs/ldm_1_5b.py --workdir RUN

A step is 1,048,576 tokens.
"""

import dataclasses

import ldm_400m

from ldm_jax import Config


def get_config() -> Config:
  """ldm_400m with twice the width and twice the steps."""
  config = ldm_400m.get_config()
  return dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, width=2048, mlp_width=5632),
    train=dataclasses.replace(config.train, steps=94_972),
  )
