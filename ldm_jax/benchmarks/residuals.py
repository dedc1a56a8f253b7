"""What the forward pass of a train step keeps for the backward pass, from shapes alone."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ldm_jax.config import Config, with_section
from ldm_jax.training.step import abstract_state, loss_sums, make_model

_ROWS = 3  # no other size is 3, nor are arrays without a batch kept by their millions


def kept_bytes_per_token(config: Config, mesh: Mesh) -> float:
  """Bytes of activations for each token that `jax.vjp` of the loss hands to the backward pass.

  Counted are the arrays with an axis of the batch and one of the sequence, so parameters are not.
  Recomputation inside the backward pass (`train.remat`) needs more for a time, block by block.

  Args:
    config: the model and what it recomputes; `data` gives the sequence length.
    mesh: of one device, whose kind decides which kernels the model takes.
  """
  length = config.data.sequence_length
  config = with_section(config, "data", batch_size=_ROWS)
  model = make_model(config)
  params = abstract_state(config, mesh).params
  tokens = jax.ShapeDtypeStruct((_ROWS, length), jnp.int32)

  def backward(params, tokens):
    def loss(params):
      logits = model.apply({"params": params}, tokens, None, None, None)
      return loss_sums(logits, tokens, tokens >= 0).cross_entropy

    return jax.vjp(loss, params)[1]

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    kept = jax.tree.leaves(jax.eval_shape(backward, params, tokens))
  activations = [x for x in kept if _ROWS in x.shape and length in x.shape]
  return sum(x.size * x.dtype.itemsize for x in activations) / (_ROWS * length)
