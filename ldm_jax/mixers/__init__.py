"""Depth mixers: one file per mechanism, one contract (`base.py`)."""

import dataclasses

from ldm_jax.config import MixerConfig
from ldm_jax.mixers.base import DepthMixer
from ldm_jax.mixers.linear_depth_memory import DepthMemoryStreams, LinearDepthMemory
from ldm_jax.mixers.preln import PreLN, PreLNStreams
from ldm_jax.typing import Dtype

MIXERS: dict[str, type[DepthMixer]] = {"preln": PreLN, "ldm": LinearDepthMemory}

__all__ = [
  "MIXERS",
  "DepthMemoryStreams",
  "DepthMixer",
  "LinearDepthMemory",
  "PreLN",
  "PreLNStreams",
  "make_mixer",
]


def make_mixer(config: MixerConfig, index: int, dtype: Dtype, name: str | None) -> DepthMixer:
  """Builds the mixer of sublayer `index` that the config names.

  A setting reaches the mixer whose class has a field of that name.
  """
  cls = MIXERS[config.kind]
  fields = {field.name for field in dataclasses.fields(cls)} - {"index", "dtype", "name", "parent"}
  settings = {key: value for key, value in vars(config).items() if key in fields}
  return cls(index=index, dtype=dtype, name=name, **settings)
