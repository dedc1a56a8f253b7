"""What the program being traced is for: the choice of a form of an operation is made by it."""

import jax
from jax.sharding import AbstractMesh, AxisType

from ldm_jax.sharding import MESH_AXES


def program_of(x: jax.Array, *, interpret: bool = False) -> tuple[AbstractMesh, str]:
  """The mesh that arrays such as `x` are split over, and the platform the program is compiled for.

  A program can be compiled for a TPU topology on a machine that has none, so the default backend
  counts only where neither the mesh that is set nor that of the array knows its devices.

  Args:
    x: any array of the program.
    interpret: kernels run in Pallas's interpreter, which stands for a TPU on any platform.

  Returns:
    The mesh, empty if there is none, and the platform, such as "tpu".
  """
  context, own = jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.mesh
  mesh = own if context.empty else context
  device = mesh.abstract_device or own.abstract_device
  platform = "tpu" if interpret else device.platform if device else jax.default_backend()
  return mesh, platform


def is_own_mesh(mesh: AbstractMesh) -> bool:
  """Whether a mesh is one of `ldm_jax.sharding.make_mesh`, which XLA splits arrays over."""
  return mesh.axis_names == MESH_AXES and set(mesh.axis_types) == {AxisType.Auto}


def mesh_refusal(mesh: AbstractMesh) -> str | None:
  """Why a kernel cannot run on its part of each device of a mesh, and what to change, or None.

  It can on one device, this project's mesh, and inside a user's own `shard_map` over all axes.
  """
  if mesh.size <= 1 or is_own_mesh(mesh) or set(mesh.axis_types) == {AxisType.Manual}:
    return None
  return (
    f"arrays are split over a mesh of axes {mesh.axis_names} that it knows nothing of; call the "
    "model under jax.set_mesh(ldm_jax.sharding.make_mesh(...)) or inside shard_map"
  )
