"""PreLN: the residual stream every transformer has, and the baseline of every comparison."""

from typing import Any

import flax.struct

from ldm_jax.mixers.base import DepthMixer
from ldm_jax.typing import ActivationsBTD


@flax.struct.dataclass
class PreLNStreams:
  """x [B, T, D]: the running sum of the embedding and all sublayer outputs."""

  x: Any


class PreLN(DepthMixer):
  """Reads x, writes x + v.  No parameters."""

  index: int = 0

  def init_streams(self, x: ActivationsBTD) -> PreLNStreams:
    """Starts the residual stream at the embeddings."""
    return PreLNStreams(x)

  def read(self, streams: PreLNStreams) -> ActivationsBTD:
    """Returns x."""
    return streams.x

  def write(self, streams: PreLNStreams, v: ActivationsBTD) -> PreLNStreams:
    """Returns x + v."""
    return PreLNStreams(streams.x + v)
