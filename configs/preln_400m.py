"""The shape of ldm_400m with the plain residual stream: the baseline.

python train.py --config configs/preln_400m.py --workdir RUN
"""

import dataclasses

import ldm_400m

from ldm_jax import Config, MixerConfig


def get_config() -> Config:
  """ldm_400m with another mixer."""
  config = ldm_400m.get_config()
  model = dataclasses.replace(config.model, mixer=MixerConfig(kind="preln"))
  return dataclasses.replace(config, model=model)
