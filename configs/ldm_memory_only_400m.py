"""ldm_400m reading the memory alone, h = M q, with the embedding as its first record.

    python train.py --config configs/ldm_memory_only_400m.py

Keys and queries start alike, so a read starts near the mean of the embedding and the outputs.
"""

import ldm_400m

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_400m with another readout."""
  return with_mixer(
    ldm_400m.get_config(), readout="memory_only", write_embedding=True, key_bias_init=1.0
  )
