"""Streams of activations as planes: when they are, and weights that a plane's whole width shares.

In programs for TPUs hyper-connections and attention residuals keep planes.  Every operation of
theirs then is a weighted sum of planes or a product with few rows: one pass each, with nothing of a
stream's size in between.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float

from ldm_jax.ops.planes.forms import PLANE, planes_refusal, thin_refusal, width_parts
from ldm_jax.ops.program import program_of
from ldm_jax.sharding import constrain
from ldm_jax.typing import ActivationsBTD, Dtype

Plane = Float[Array, "B D T"]


def takes_planes(x: ActivationsBTD) -> bool:
  """Whether streams that start from x are planes: in programs for which their kernels can run."""
  mesh, platform = program_of(x)
  return stream_refusal(x.shape, width_parts(mesh), (x.dtype,), mesh, platform) is None


def stream_refusal(
  shape: tuple[int, int, int],
  groups: int,
  dtypes: Sequence[Dtype],
  mesh: AbstractMesh,
  platform: str,
) -> str | None:
  """As `planes_refusal` and `thin_refusal`, for all kernels that streams of activations need.

  Args:
    shape: of activations, (B, T, D).
    groups: G.
    dtypes: of all planes, in and out.
    mesh: that the program is compiled for.
    platform: likewise.
  """
  batch, tokens, width = shape
  plane, program = (batch, width, tokens), (dtypes, mesh, platform)
  return planes_refusal(plane, groups, *program) or thin_refusal(plane, *program)


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
