"""The shape of ldm_400m with the plain residual stream: the baseline.

python train.py --config configs/preln_400m.py --workdir RUN
"""

import ldm_400m

from ldm_jax import Config
from ldm_jax.config import with_mixer


def get_config() -> Config:
  """ldm_400m with another mixer."""
  return with_mixer(ldm_400m.get_config(), kind="preln")
