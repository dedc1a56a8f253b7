"""The depth-mixing contract.

Depth mixing is how information crosses layers.  A mechanism is a set of *streams* (a pytree), a
*read* that forms the next sublayer's input from them, and a *write* that puts the sublayer's output
into them:

    streams = mixer.init_streams(x0)          # x0: token embeddings [B, T, D]
    for mixer_l, f_l in sublayers:
        h = mixer_l.read(streams)             # [B, T, D], what f_l sees
        v = f_l(h)                            # attention or MLP, its own pre-norm included
        streams = mixer_l.write(streams, v)
    y = output_mixer.read(streams)            # one more read for the head

It is per token: no mixer ever looks at another position.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from ldm_jax.errors import InputError
from ldm_jax.typing import ActivationsBTD, Dtype, PyTree, Sublayer

# What a mixer calls a sublayer's output inside `write` (`jax.ad_checkpoint.checkpoint_name`) if the
# gradient of the write depends on it.  Rematerialisation keeps it: computing it again costs two
# weight products in a block.
KEPT = "sublayer_output"


class DepthMixer(nn.Module):
  """One sublayer's read and write.  `mixer(streams, f)` stands where `x + f(x)` stood.

  A network has one instance per sublayer, numbered 0 … L−1, and a last one, number L, that is only
  read.  All of them share the streams, so they must be of the same kind and settings.

  Attributes:
    index: which sublayer this is, from 0.  Sublayer 0 reads streams that nothing has written to.
    dtype: dtype of the control matrix products of the depth memory; everything numerically
      delicate, here and in the other mixers, is float32.
    sublayers: L, if known.  Hyper-connections need it, attention residuals and the depth memory are
      faster with it.
  """

  index: int
  dtype: Dtype = jnp.float32
  sublayers: int | None = None

  def require(self, setting: str, holds: bool, words: str) -> None:
    """Refuses a bad setting when the module is made: `require("groups", groups >= 1, "…")`.

    Raises:
      InputError: naming the class, the setting and its value, unless `holds`.
    """
    if not holds:
      value = getattr(self, setting)
      raise InputError(f"{type(self).__name__}: {setting} must be {words}, got {value!r}")

  def init_streams(self, x: ActivationsBTD) -> PyTree:
    """The streams before the first sublayer, from token embeddings [B, T, D]."""
    raise NotImplementedError(f"{type(self).__name__} must define init_streams")

  def read(self, streams: Any) -> ActivationsBTD:
    """What the sublayer sees, [B, T, D] in the dtype of the embeddings."""
    raise NotImplementedError(f"{type(self).__name__} must define read")

  def write(self, streams: Any, v: ActivationsBTD) -> Any:
    """The streams after the sublayer's output v [B, T, D] is in them.

    Every array keeps its shape and dtype; a mechanism that keeps outputs adds arrays.
    """
    raise NotImplementedError(f"{type(self).__name__} must define write")

  def pack(self, streams: Any) -> Any:
    """The streams without what `unpack` can make again, for the border of a rematerialised block.

    What is carried over such a border is kept from the forward to the backward pass.
    """
    return streams

  def unpack(self, streams: Any) -> Any:
    """The inverse of `pack`, to the bit."""
    return streams

  def __call__(self, streams: Any, f: Sublayer) -> Any:
    """One sublayer: `write(streams, f(read(streams)))`."""
    return self.write(streams, f(self.read(streams)))
