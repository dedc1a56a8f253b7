"""The shape of ldm_1_5b with the plain residual stream: the baseline.

python train.py --config configs/preln_1_5b.py --workdir RUN
"""

import dataclasses

import ldm_1_5b

from ldm_jax import Config, MixerConfig


def get_config() -> Config:
  """ldm_1_5b with another mixer."""
  config = ldm_1_5b.get_config()
  model = dataclasses.replace(config.model, mixer=MixerConfig(kind="preln"))
  return dataclasses.replace(config, model=model)
