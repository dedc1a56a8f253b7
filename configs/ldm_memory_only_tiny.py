"""ldm_tiny reading the memory alone, h = M q, with the embedding as its first record.

    python train.py --config configs/ldm_memory_only_tiny.py

Keys and queries start alike, so a read starts near the mean of the embedding and the outputs.
"""

import ldm_tiny

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_tiny with another readout."""
  return with_mixer(
    ldm_tiny.get_config(), readout="memory_only", write_embedding=True, key_bias_init=1.0
  )
