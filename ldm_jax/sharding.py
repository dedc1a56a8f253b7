"""Where every array lives: logical axis names, one rules table, and the mesh they map to.

Modules name the axes of their parameters (`partitioned`) and activations (`constrain`) by meaning;
`RULES` says which mesh axes each meaning is split over.  To shard differently, change the table.
Flax quietly replicates an axis whose name it does not know; here an unknown name raises.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ldm_jax.config import Config, MeshConfig
from ldm_jax.errors import InputError
from ldm_jax.typing import PyTree

MESH_AXES = ("data", "fsdp", "tensor", "sequence")

_UNNAMED_LIMIT = 0.02  # of all bytes of a tree

# Logical axis -> mesh axes; () is replicated.
RULES: Mapping[str, tuple[str, ...]] = {
  # activations and streams
  "batch": ("data", "fsdp"),
  "sequence": ("sequence",),
  "activation_embed": ("tensor",),  # streams, and the outputs of sublayers
  "sublayer_input": (),  # what the large weights are multiplied with
  "activation_vocab": ("tensor",),
  # parameters (the starred ones also name activation axes)
  "embed": ("fsdp",),
  "stream_embed": ("tensor", "fsdp"),  # of weights that meet "activation_embed"
  "vocab": ("tensor",),
  "mlp": ("tensor",),  # *
  "heads": ("tensor",),  # *
  "kv_heads": ("tensor",),  # *
  "head_dim": (),  # *
  "groups": ("tensor",),  # *
  "group_width": (),  # *
  "key_dim": (),  # *
  "latent": (),  # *
  "norm": (),
}


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
  """Maps logical axis names to a `PartitionSpec` by `RULES`; None is replicated.

  Raises:
    ValueError: for a name that `RULES` does not have, or a mesh axis used twice.
  """
  entries = []
  for axis in axes:
    if axis is not None and axis not in RULES:
      raise ValueError(f"unknown logical axis {axis!r}; known are {', '.join(RULES)}")
    entries.append(RULES[axis] if axis else ())
  used = [mesh_axis for entry in entries for mesh_axis in entry]
  if len(used) != len(set(used)):
    raise ValueError(f"axes {tuple(axes)} use a mesh axis twice: {used}")
  return PartitionSpec(*(entry or None for entry in entries))


class NamedAxes(nn.LogicallyPartitioned):
  """A parameter's box with its logical axis names; `flax.linen.unbox` takes it off.

  Under `nnx.bridge` the names travel as plain metadata.  Flax's own box would become a sharding
  there at once, which fails without a mesh that has axes of these names.
  """

  def to_nnx_metadata(self) -> dict[str, Any]:
    """What an `nnx.Variable` keeps of the box."""
    return {"value": self.value, "logical_axes": self.names}

  @classmethod
  def from_nnx_metadata(cls, metadata: dict[str, Any]) -> "NamedAxes":
    """The inverse of `to_nnx_metadata`."""
    return cls(metadata["value"], names=metadata["logical_axes"])


def partitioned(init: Callable, *axes: str | None) -> Callable:
  """Wraps an initialiser so that its parameter carries logical axis names."""
  partition_spec(axes)  # a misspelt name fails here, not as silent replication

  @functools.wraps(init)
  def boxed(*args, **kwargs):
    return NamedAxes(init(*args, **kwargs), names=axes)

  return boxed


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Pins an activation's sharding by logical axis names.

  Outside a mesh with this project's axes (`jax.set_mesh(make_mesh(...))`) it only checks the names,
  so mixers work unchanged in models that have meshes of their own.

  Raises:
    ValueError: for unknown names, or a number of names that is not the rank of `x`.
  """
  spec = partition_spec(axes)
  if x.ndim != len(axes):
    raise ValueError(f"{len(axes)} axis names {axes} for an array of shape {x.shape}")
  if jax.sharding.get_abstract_mesh().axis_names != MESH_AXES:
    return x
  return jax.lax.with_sharding_constraint(x, spec)


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, ...]:
  """Resolves −1 ("the rest") in the mesh section to sizes whose product is `devices`.

  Raises:
    InputError: if two axes are −1 or the sizes do not multiply to the number of devices.
  """
  sizes = [getattr(config, axis) for axis in MESH_AXES]
  given = " ".join(f"mesh.{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
  fixed = math.prod(size for size in sizes if size != -1)
  if sizes.count(-1) > 1:
    raise InputError(f"only one mesh axis can be -1, the rest of the devices; got {given}")
  if devices % fixed or (-1 not in sizes and fixed != devices):
    raise InputError(
      f"{given} does not use the {devices} devices here exactly; "
      "set one of the axes to -1 to take the rest"
    )
  return tuple(devices // fixed if size == -1 else size for size in sizes)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Builds the (data, fsdp, tensor, sequence) mesh over all devices.

  Raises:
    InputError: see `mesh_shape` and `arrange_devices`.
  """
  devices = jax.devices() if devices is None else devices
  arranged = arrange_devices(mesh_shape(config, len(devices)), devices)
  return Mesh(arranged, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def arrange_devices(shape: Sequence[int], devices: Sequence[jax.Device | Any]) -> np.ndarray:
  """Lays devices out so that neighbours in the mesh are neighbours in the hardware.

  TPU slices (pods that only a data-centre network joins) are laid along the data axis, which they
  cross once a step, and along fsdp if data is not large enough; never along tensor or sequence.

  Args:
    shape: sizes of `MESH_AXES`.
    devices: as many as the product of the sizes.

  Returns:
    Array of devices of that shape.

  Raises:
    InputError: if data x fsdp is not a multiple of the number of slices.
  """
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if slices == 1:
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
  over_data = math.gcd(shape[0], slices)
  across = (over_data, slices // over_data, 1, 1)
  if shape[1] % across[1]:
    raise InputError(
      f"mesh.data = {shape[0]} x mesh.fsdp = {shape[1]} cannot be laid over {slices} slices; make "
      "mesh.data a multiple of their number: tensor and sequence never cross slices"
    )
  within = [size // parts for size, parts in zip(shape, across, strict=True)]
  return mesh_utils.create_hybrid_device_mesh(
    within, across, devices, allow_split_physical_axes=True
  )


def parts_of(mesh: Mesh | AbstractMesh, axis: str) -> int:
  """How many parts a mesh splits a logical axis into."""
  return math.prod(mesh.shape[mesh_axis] for mesh_axis in RULES[axis])


def check_divisible(config: Config, mesh: Mesh) -> None:
  """Refuses sizes that the mesh cannot split evenly.

  Raises:
    InputError: naming the setting, its value and the mesh axes.
  """
  model = config.model
  sizes = {
    "data.batch_size": ("batch", config.data.batch_size // config.train.accumulate),
    "data.sequence_length": ("sequence", config.data.sequence_length),
    "model.width": ("stream_embed", model.width),
    "model.vocab_size (padded)": ("vocab", model.padded_vocab_size),
    "model.heads": ("heads", model.heads),
    "model.kv_heads": ("kv_heads", model.kv_heads or model.heads),
    "model.mlp_width": ("mlp", model.mlp_width),
  }
  if model.mixer.kind == "ldm":
    sizes["model.mixer.groups"] = ("groups", model.mixer.groups)
  for setting, (axis, size) in sizes.items():
    parts = parts_of(mesh, axis)
    if size % parts:
      names = " x ".join(f"mesh.{mesh_axis}" for mesh_axis in RULES[axis])
      per_step = " per accumulation step" if axis == "batch" and config.train.accumulate > 1 else ""
      raise InputError(
        f"{setting}: {size}{per_step} cannot be split over {names} = {parts}; "
        "change one of them so that it divides"
      )


def parameter_shardings(abstract: PyTree, mesh: Mesh) -> PyTree:
  """Shardings for a tree of (boxed) parameters, such as `eval_shape` of `init` gives.

  Args:
    abstract: a tree whose leaves are boxes that carry logical axis names, or plain arrays
      (replicated).
    mesh: from `make_mesh`.

  Returns:
    The same tree without boxes, a `NamedSharding` for each leaf.

  Raises:
    ValueError: if a mesh of several devices would hold more than 2 % of the bytes once on each only
      because their arrays name no axes.
  """

  def sharding(leaf):
    axes = leaf.names if boxed(leaf) else ()
    return NamedSharding(mesh, partition_spec(axes))

  def boxed(leaf):
    return isinstance(leaf, NamedAxes)

  if mesh.size > 1:
    _check_names(jax.tree_util.tree_leaves_with_path(abstract, is_leaf=boxed), boxed)
  return jax.tree.map(sharding, abstract, is_leaf=boxed)


def _check_names(leaves, boxed):
  def size(leaf):
    array = leaf.value if boxed(leaf) else leaf
    return array.size * array.dtype.itemsize

  unnamed = {path: size(leaf) for path, leaf in leaves if not boxed(leaf)}
  total = sum(size(leaf) for _, leaf in leaves)
  if sum(unnamed.values()) > _UNNAMED_LIMIT * total:
    largest = jax.tree_util.keystr(max(unnamed, key=unnamed.get), simple=True, separator="/")
    raise ValueError(
      f"{sum(unnamed.values()) / total:.0%} of the bytes would be whole on every device because "
      f"their arrays name no axes, such as {largest}; wrap their initialisers in "
      "`ldm_jax.sharding.partitioned` with the name of each axis"
    )
