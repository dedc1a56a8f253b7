"""The shape of ldm_tiny with the plain residual stream: the baseline.

python train.py --config configs/preln_tiny.py
"""

import dataclasses

import ldm_tiny

from ldm_jax import Config, MixerConfig


def get_config() -> Config:
  """ldm_tiny with another mixer."""
  config = ldm_tiny.get_config()
  model = dataclasses.replace(config.model, mixer=MixerConfig(kind="preln"))
  return dataclasses.replace(config, model=model)
