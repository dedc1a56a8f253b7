"""What the forward pass of a train step keeps for the backward pass, from shapes alone."""

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh

from ldm_jax.benchmarks.kernels import inner_jaxprs
from ldm_jax.config import Config, with_section
from ldm_jax.training.step import abstract_state, loss_sums, make_model

_ROWS = 3  # no other size is 3, nor are arrays without a batch kept by their millions


_CONSTANT = object()


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
    traced = jax.make_jaxpr(backward)(params, tokens).jaxpr
  kept = dict(zip(_identities(traced), (v.aval for v in traced.outvars), strict=True))
  kept.pop(_CONSTANT, None)
  activations = [x for x in kept.values() if _ROWS in x.shape and length in x.shape]
  return sum(x.size * x.dtype.itemsize for x in activations) / (_ROWS * length)


def _identities(jaxpr, inputs=None):
  """An object for each output, the same for outputs that are the same array.

  Arrays that blocks hand through, or only transpose, are the arrays that they were.  Arrays of one
  number are constants, which are in memory once.
  """
  known = {}
  for place, variable in enumerate((*jaxpr.constvars, *jaxpr.invars)):
    known[variable] = object() if inputs is None else inputs[place]

  def identity(variable):
    return known.get(variable, variable) if isinstance(variable, core.Var) else object()

  for equation in jaxpr.eqns:
    inner = list(inner_jaxprs(equation))
    outputs = [object() for _ in equation.outvars]
    arguments = [identity(v) for v in equation.invars]
    if len(inner) == 1 and len(inner[0].constvars) + len(inner[0].invars) == len(arguments):
      found = _identities(inner[0], arguments)
      outputs = found if len(found) == len(outputs) else outputs
    elif equation.primitive.name == "broadcast_in_dim" and not isinstance(
      equation.invars[0], core.Var
    ):
      outputs = [_CONSTANT]
    elif equation.primitive.name in ("name", "transpose", "sharding_constraint", "copy"):
      outputs = arguments
    known |= dict(zip(equation.outvars, outputs, strict=True))
  return [identity(v) for v in jaxpr.outvars]
