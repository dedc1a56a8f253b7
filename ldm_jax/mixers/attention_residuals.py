"""Attention residuals: every sublayer attends over the outputs of those before it.

There is no running sum: a read is a softmax over sources, the embedding and the sublayer outputs,
with one learned query per sublayer (arXiv 2603.15031).  In the block form the outputs of
`block_size` consecutive sublayers are summed into one source.  The first sublayer of a block reads
the finished sources, the later ones also the sum so far of their own block.
"""

from typing import Any

import flax.linen as nn
import flax.struct
from jaxtyping import Array, Float

from ldm_jax.mixers.base import DepthMixer
from ldm_jax.ops.attention_residuals import finish_read, prepare_reads
from ldm_jax.sharding import constrain, partitioned
from ldm_jax.typing import ActivationsBTD


@flax.struct.dataclass
class AttentionResidualStreams:
  """What later reads draw on; it grows by one source per finished block.

  sources: the embedding and the sum of each finished block, arrays [B, T, D].
  partial: sum of the current block's outputs so far [B, T, D]; None between blocks.
  reads: for each remaining sublayer of the current block, what the finished sources contribute to
    its read (`ops.attention_residuals.PreparedRead`).
  """

  sources: tuple[Any, ...]
  partial: Any = None
  reads: tuple[Any, ...] = ()


class AttentionResiduals(DepthMixer):
  """Attention residuals as a depth mixer.

  If `sublayers` is given, the mixer of a block's first sublayer holds the queries of the whole
  block and computes the finished sources' part of all its reads in one pass.  Otherwise each mixer
  holds its own query and computes its own read; the results are the same.

  Queries are zero at initialisation, so every read starts as the mean of its sources.  The first
  sublayer, which can only see the embedding, has no query.

  Attributes:
    block_size: sublayers per source, at least 1; the last block may be short; 1 is the full form.
  """

  block_size: int = 6

  def __post_init__(self):
    self.require("block_size", self.block_size >= 1, "at least 1")
    super().__post_init__()

  def setup(self):
    """Declares the queries of this mixer's reads; they appear only where they are used."""
    self.queries = DepthQueries(self._own_reads())

  def init_streams(self, x: ActivationsBTD) -> AttentionResidualStreams:
    """The embedding as the only source."""
    return AttentionResidualStreams((x,))

  def read(self, streams: AttentionResidualStreams) -> ActivationsBTD:
    """Softmax over the finished sources and the partial sum; x where there is nothing else."""
    if self.index == 0:
      return streams.sources[0]
    # The first sublayer of a block makes the same call in its write; compilers merge the two, in
    # the forward pass at least.
    prepared = (streams.reads or self._prepare(streams))[0]
    if streams.partial is None:
      return prepared.mean
    return finish_read(prepared, streams.partial)

  def write(self, streams: AttentionResidualStreams, v: ActivationsBTD) -> AttentionResidualStreams:
    """Adds v to the partial sum, which becomes a source when the block is complete."""
    reads, sources, partial = streams.reads, streams.sources, streams.partial
    if not reads and self._own_reads():
      reads = self._prepare(streams)
    reads = reads if self.index == 0 else reads[1:]
    partial = constrain(v if partial is None else partial + v, *_TOKEN, "activation_embed")
    if (self.index + 1) % self.block_size == 0:
      sources, partial = (*sources, partial), None
    return AttentionResidualStreams(sources, partial, reads)

  def _prepare(self, streams):
    reads = prepare_reads(streams.sources, *self.queries(streams.sources[0]))
    return tuple(
      read.replace(mean=constrain(read.mean, *_TOKEN, "activation_embed")) for read in reads
    )

  def _own_reads(self):
    """How many queries this mixer holds, its own first."""
    start = self.index % self.block_size == 0
    if self.sublayers is None or self.index >= self.sublayers:
      return int(self.index > 0)
    if not start:
      return 0
    return min(self.block_size, self.sublayers - self.index) - (self.index == 0)


_TOKEN = ("batch", "sequence")


class DepthQueries(nn.Module):
  """Queries and key-norm scales of `reads` reads; called with an array that has the width."""

  reads: int

  @nn.compact
  def __call__(self, x: ActivationsBTD) -> tuple[Float[Array, "reads D"], Float[Array, "reads D"]]:
    """Returns queries, zero at initialisation, and scales, one at initialisation; float32."""
    shape = (self.reads, x.shape[-1])
    query = self.param("query", partitioned(nn.initializers.zeros, None, "norm"), shape)
    scale = self.param("norm_scale", partitioned(nn.initializers.ones, None, "norm"), shape)
    return query, scale
