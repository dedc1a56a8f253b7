"""The forms of the operations on planes, what each needs, and kernels on a mesh."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from ldm_jax.errors import InputError
from ldm_jax.ops.planes.blocks import row_unit
from ldm_jax.ops.program import is_own_mesh, mesh_refusal, program_of
from ldm_jax.sharding import RULES, partition_spec, parts_of
from ldm_jax.typing import Dtype

FORMS = ("auto", "plain", "kernel")
PLANE = ("batch", "activation_embed", "sequence")  # logical axes of [B, D, T]
COEFFICIENT = ("batch", "groups", "sequence")  # of [B, G, T], behind any leading axes


class Choice(NamedTuple):
  """The form of an operation that was chosen for it: the kernel or not, interpreted or not."""

  kernel: bool
  interpret: bool


def planes_refusal(
  shape: tuple[int, int, int],
  groups: int,
  dtypes: Sequence[Dtype],
  mesh: AbstractMesh,
  platform: str,
) -> str | None:
  """Why the kernels on planes cannot run, with what to change, or None if they can.

  They run on TPUs, for float32 and bfloat16, where a group has a multiple of 8 rows (float32 only)
  or 16 and the mesh splits batch, groups and sequence evenly.  The mesh is this project's
  (`ldm_jax.sharding.make_mesh`), a single device, or one inside a user's own `shard_map`
  (with check_vma=False).

  Args:
    shape: of a plane, (B, D, T).
    groups: G.
    dtypes: of all planes, in and out.
    mesh: that the program is compiled for; empty if there is none.
    platform: that the program is compiled for, such as "tpu".
  """
  refusal = _refusal({"batch": shape[0], "groups": groups, "sequence": shape[2]}, mesh, platform)
  refusal = refusal or _dtype_refusal(dtypes)
  if refusal is not None:
    return refusal
  unit = row_unit(dtypes)
  if shape[1] % groups or shape[1] // groups % unit:
    return (
      f"the width {shape[1]} is not groups = {groups} times a multiple of {unit}, the rows of a "
      "register tile; change one of them"
    )
  return None


def thin_refusal(
  shape: tuple[int, int, int], dtypes: Sequence[Dtype], mesh: AbstractMesh, platform: str
) -> str | None:
  """As `planes_refusal` for `thin_product`, which knows no groups.

  The width that a device has must be a multiple of 8 (float32 only) or 16.
  """
  refusal = _refusal({"batch": shape[0], "sequence": shape[2]}, mesh, platform)
  refusal = refusal or _dtype_refusal(dtypes)
  if refusal is not None:
    return refusal
  parts = width_parts(mesh)
  if shape[1] % (parts * row_unit(dtypes)):
    return (
      f"the width {shape[1]} on {parts} devices is not a multiple of {row_unit(dtypes)}, the rows "
      "of a register tile, on each; change the width or mesh.tensor"
    )
  return None


def tokenwise_refusal(shape: tuple[int, int, int], mesh: AbstractMesh, platform: str) -> str | None:
  """As `planes_refusal` for `tokenwise`, whose arrays are [..., B, G, T]; `shape` is (B, G, T).

  Any number of groups will do that the mesh splits evenly.
  """
  sizes = {"batch": shape[0], "groups": shape[1], "sequence": shape[2]}
  return _refusal(sizes, mesh, platform)


def width_parts(mesh: AbstractMesh) -> int:
  """Devices that a mesh splits the width of a plane over: the least number of groups there."""
  return _parts("activation_embed", mesh)


def _refusal(sizes, mesh, platform):
  if platform != "tpu":
    return f"it needs a TPU and the program is for {platform}; use a TPU"
  refusal = mesh_refusal(mesh)
  if refusal is not None:
    return refusal
  for axis, size in sizes.items():
    if size % _parts(axis, mesh):
      names = " x ".join(f"mesh.{name}" for name in RULES[axis])
      return f"{axis} = {size} is not a multiple of {names}; change one of them"
  return None


def _parts(axis, mesh):
  """Devices that a mesh splits a logical axis over; inside `shard_map` it is split already."""
  return parts_of(mesh, axis) if is_own_mesh(mesh) else 1


def _dtype_refusal(dtypes):
  names = {jnp.dtype(dtype).name for dtype in dtypes}
  if names <= {"float32", "bfloat16"}:
    return None
  return f"planes are {', '.join(sorted(names))}; make them float32 or bfloat16"


def takes_kernel(form: str, refuse: Callable, x: jax.Array, interpret: bool) -> bool:
  """Whether the kernel runs: as `form` says, and where that is "auto", if nothing is against it.

  Args:
    form: one of `FORMS`.
    refuse: takes mesh and platform.
    x: any array of the program.
    interpret: see `program_of`.

  Raises:
    InputError: if the kernel is asked for and cannot run.
    ValueError: for another form.
  """
  if form not in FORMS:
    raise ValueError(f"unknown form {form!r} of an operation on planes; known are {FORMS}")
  if form == "plain":
    return False
  refusal = refuse(*program_of(x, interpret=interpret))
  if refusal is not None and form == "kernel":
    raise InputError(f"form = kernel cannot run: {refusal}, or set it to auto or plain")
  return refusal is None


def on_each_device(
  kernel: Callable,
  operands: Sequence[jax.Array],
  axes: Sequence[tuple[str | None, ...]],
  out_axes: Any,
  summed: Sequence[tuple[str, ...]] | None = None,
) -> Any:
  """Calls `kernel(*operands)` on each device's part of the arrays.

  Args:
    kernel: of arrays to an array or a tuple of them.
    operands: any number of arrays.
    axes: logical axes of each operand.
    out_axes: of each output: one tuple of names, or a list of them.
    summed: logical axes of operands over whose parts each output, of a list, is a sum; of none by
      default.

  Returns:
    What the kernel returns.
  """
  mesh, _ = program_of(operands[0])
  if mesh.size <= 1 or AxisType.Auto not in mesh.axis_types:
    return kernel(*operands)
  several = isinstance(out_axes, list)

  def local(*parts):
    results = kernel(*parts)
    if summed is None:
      return results
    meshes = [tuple(name for axis in axes for name in RULES[axis]) for axes in summed]
    pairs = zip(results, meshes, strict=True)
    return tuple(jax.lax.psum(x, names) if names else x for x, names in pairs)

  out_specs = tuple(map(partition_spec, out_axes)) if several else partition_spec(out_axes)
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=tuple(map(partition_spec, axes)),
    out_specs=out_specs,
    check_vma=False,  # the kernels' outputs do not say over which axes they vary
  )(*operands)
