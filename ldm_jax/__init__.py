"""Depth mixing for transformers: Linear Depth Memory and its rivals behind one contract."""

from ldm_jax.config import Config, MixerConfig, ModelConfig, load_config
from ldm_jax.mixers import (
  AttentionResiduals,
  DepthMixer,
  HyperConnections,
  LinearDepthMemory,
  ManifoldHyperConnections,
  PreLN,
)
from ldm_jax.model import TransformerLM

__all__ = [
  "AttentionResiduals",
  "Config",
  "DepthMixer",
  "HyperConnections",
  "LinearDepthMemory",
  "ManifoldHyperConnections",
  "MixerConfig",
  "ModelConfig",
  "PreLN",
  "TransformerLM",
  "load_config",
]
