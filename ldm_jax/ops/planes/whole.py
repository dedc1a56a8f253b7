"""Streams of activations as planes: when they are, and weights that a plane's whole width shares.

In programs for TPUs hyper-connections and attention residuals keep planes.  Every operation of
theirs then is a weighted sum of planes or a product with few rows: one pass each, with nothing of a
stream's size in between.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.ops.planes.forms import PLANE, planes_refusal, thin_refusal, width_parts
from ldm_jax.ops.program import program_of
from ldm_jax.sharding import constrain
from ldm_jax.typing import ActivationsBTD

Plane = Float[Array, "B D T"]


def takes_planes(x: ActivationsBTD) -> bool:
  """Whether streams that start from x are planes: in programs for which their kernels can run."""
  mesh, platform = program_of(x)
  batch, tokens, width = x.shape
  case = ((batch, width, tokens), width_parts(mesh), (x.dtype,), mesh, platform)
  thin_case = ((batch, width, tokens), (x.dtype,), mesh, platform)
  return planes_refusal(*case) is None and thin_refusal(*thin_case) is None


def to_plane(x: ActivationsBTD) -> Plane:
  """The plane of activations."""
  return place_plane(x.swapaxes(1, 2))


def from_plane(plane: Plane) -> ActivationsBTD:
  """Activations from their plane."""
  return constrain(plane.swapaxes(1, 2), "batch", "sequence", "activation_embed")


def place_plane(plane: Plane) -> Plane:
  """Pins the sharding of a plane."""
  return constrain(plane, *PLANE)


def plane_weights(weights: Float[Array, "O P #B #T"], plane: Plane) -> Float[Array, "O P B G T"]:
  """Weights of whole planes like this one: a group for each device that the width is split over."""
  batch, _, tokens = plane.shape
  groups = width_parts(program_of(plane)[0])
  return jnp.broadcast_to(weights[..., None, :], (*weights.shape[:2], batch, groups, tokens))
