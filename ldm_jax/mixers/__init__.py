"""Depth mixers: one file per mechanism, one contract (`base.py`)."""

import dataclasses

from ldm_jax.config import MixerConfig
from ldm_jax.errors import InputError
from ldm_jax.mixers.attention_residuals import AttentionResiduals, AttentionResidualStreams
from ldm_jax.mixers.base import DepthMixer
from ldm_jax.mixers.depth_memory_streams import DeferredMemoryStreams, DepthMemoryStreams
from ldm_jax.mixers.hyper_connections import HyperConnections, HyperConnectionStreams
from ldm_jax.mixers.linear_depth_memory import LinearDepthMemory
from ldm_jax.mixers.manifold_hyper_connections import ManifoldHyperConnections
from ldm_jax.mixers.preln import PreLN, PreLNStreams
from ldm_jax.typing import Dtype

MIXERS: dict[str, type[DepthMixer]] = {
  "preln": PreLN,
  "ldm": LinearDepthMemory,
  "attnres": AttentionResiduals,
  "hc": HyperConnections,
  "mhc": ManifoldHyperConnections,
}

__all__ = [
  "MIXERS",
  "AttentionResidualStreams",
  "AttentionResiduals",
  "DeferredMemoryStreams",
  "DepthMemoryStreams",
  "DepthMixer",
  "HyperConnectionStreams",
  "HyperConnections",
  "LinearDepthMemory",
  "ManifoldHyperConnections",
  "PreLN",
  "PreLNStreams",
  "make_mixer",
]


def make_mixer(
  config: MixerConfig, index: int, sublayers: int | None, dtype: Dtype, name: str | None
) -> DepthMixer:
  """Builds the mixer of sublayer `index` of `sublayers` that the config names.

  A setting reaches the mixer whose class has a field of that name.

  Raises:
    InputError: for an unknown kind or a setting that the mixer refuses.
  """
  if config.kind not in MIXERS:
    raise InputError(f"mixer kind {config.kind!r} is not one of {', '.join(MIXERS)}")
  settings = {name: getattr(config, name) for name in settings_of(config.kind)}
  return MIXERS[config.kind](index=index, sublayers=sublayers, dtype=dtype, name=name, **settings)


def settings_of(kind: str) -> set[str]:
  """Which settings of `MixerConfig` the mechanism `kind` has; the others mean nothing to it."""
  fields = {field.name for field in dataclasses.fields(MIXERS[kind])}
  return fields & {field.name for field in dataclasses.fields(MixerConfig)}
