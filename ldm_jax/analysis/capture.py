"""What every sublayer reads and puts out, at some tokens, from the model as it is.

Each mixer's call is observed, so the network that is looked at is the one that trained, in
whatever form and on whatever mesh.  Only the chosen tokens leave it.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ldm_jax.data.packing import Batch
from ldm_jax.mixers.observation import COLLECTION, note, noted, observer
from ldm_jax.model import TransformerLM
from ldm_jax.sharding import constrain
from ldm_jax.training.step import LossSums, loss_sums
from ldm_jax.typing import PyTree


class Captured(NamedTuple):
  """Reads and outputs at n tokens, in the dtype of the model.

  reads: what each sublayer sees, and last the head [L + 1, n, D].  The first is the embedding.
  outputs: of each sublayer [L, n, D].
  """

  reads: Float[Array, "R n D"]
  outputs: Float[Array, "L n D"]

  @property
  def sources(self) -> Float[Array, "S n D"]:
    """All that a read can draw on, S = L + 1: the embedding, then the outputs."""
    return jnp.concatenate([self.reads[:1], self.outputs])


@flax.struct.dataclass
class _Seen:
  """At one mixer; `output` is None for the head."""

  index: int = flax.struct.field(pytree_node=False)
  read: Any
  output: Any = None


def capture(
  model: TransformerLM, params: PyTree, batch: Batch, tokens: Int[Array, " n"]
) -> tuple[Captured, LossSums]:
  """Runs the model without dropout; a pure function to compile.

  Args:
    model: the network.
    params: its parameters.
    batch: arrays [B, T].
    tokens: which ones to look at, numbers in 0 … B · T − 1 row by row.

  Returns:
    What was seen there, and the loss sums over all of the batch.
  """
  batch = jax.tree.map(lambda x: constrain(x, "batch", "sequence"), batch)
  with nn.intercept_methods(_observer(model.config.sublayers, tokens)):
    logits, collections = model.apply(
      {"params": params},
      batch.tokens,
      batch.positions,
      batch.segment_ids,
      mutable=[COLLECTION],
    )
  seen = noted(collections, _Seen)
  reads = jnp.stack([one.read for one in seen])
  outputs = jnp.stack([one.output for one in seen[:-1]])
  return Captured(reads, outputs), loss_sums(logits, batch.targets, batch.loss_mask)


def _observer(sublayers, tokens):
  """A method interceptor that keeps what goes into each sublayer and comes out of it."""

  def at_tokens(x):
    return x.reshape(-1, x.shape[-1])[tokens]

  def at_sublayer(mixer, streams, sublayer):
    del streams

    def observed(h):
      v = sublayer(h)
      note(mixer, _Seen(mixer.index, at_tokens(h), at_tokens(v)))
      return v

    return observed

  def at_head(mixer, streams, h):
    del streams
    note(mixer, _Seen(mixer.index, at_tokens(h)))

  return observer(sublayers, at_sublayer, at_head)
