"""One rules table: unknown names, double use and sizes that do not divide raise."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ldm_jax.config import MeshConfig
from ldm_jax.errors import InputError
from ldm_jax.sharding import (
  arrange_devices,
  check_divisible,
  constrain,
  make_mesh,
  mesh_shape,
  parameter_shardings,
  partition_spec,
  partitioned,
)
from ldm_jax.sharding_report import bytes_per_device, parameter_rows, sharding_lines
from ldm_jax.tpu import topology_devices
from ldm_jax.training.step import abstract_state, init_state
from tests.rig import needs_libtpu, tiny_config, with_mixer, with_model


def test_names_map_to_mesh_axes():
  assert partition_spec(("batch", "sequence", None)) == PartitionSpec(
    ("data", "fsdp"), ("sequence",), None
  )


def test_unknown_and_doubly_used_axes_raise():
  with pytest.raises(ValueError, match="unknown logical axis 'embde'"):
    partition_spec(("embde",))
  with pytest.raises(ValueError, match="unknown logical axis"):
    partitioned(jax.nn.initializers.zeros, "embde")
  with pytest.raises(ValueError, match="unknown logical axis"):
    constrain(jnp.zeros(3), "bacth")
  with pytest.raises(ValueError, match="twice"):
    partition_spec(("heads", "mlp"))
  with pytest.raises(ValueError, match="2 axis names"):
    constrain(jnp.zeros(3), "batch", None)


def test_mesh_sizes_resolve_or_are_refused():
  assert mesh_shape(MeshConfig(), 8) == (8, 1, 1, 1)
  assert mesh_shape(MeshConfig(data=2, fsdp=-1, tensor=2), 8) == (2, 2, 2, 1)
  with pytest.raises(InputError, match="only one mesh axis can be -1"):
    mesh_shape(MeshConfig(fsdp=-1), 8)
  for bad in (MeshConfig(data=4), MeshConfig(fsdp=3)):
    with pytest.raises(InputError, match="does not use the 8 devices"):
      mesh_shape(bad, 8)


@needs_libtpu
@pytest.mark.parametrize(
  ("topology", "shape"),
  [("v5e:4x4", (16, 1, 1, 1)), ("v5e:4x4", (1, 4, 4, 1)), ("v5p:4x4x4", (1, 16, 4, 1))],
)
def test_neighbours_in_the_mesh_are_neighbours_in_the_slice(topology, shape):
  arranged = arrange_devices(shape, topology_devices(topology))
  assert len({device.id for device in arranged.flat}) == arranged.size
  coordinates = np.array([device.coords for device in arranged.flat]).reshape(*shape, 3)
  for axis, size in enumerate(shape):
    steps = np.abs(np.diff(coordinates, axis=axis)).sum(-1)
    if size != 16 or axis == 0:  # 16 on a cube are a plane, not a line
      assert (steps == 1).all()


def slices(count, size):
  """Devices as several TPU slices show them."""
  return [
    types.SimpleNamespace(platform="cpu", device_kind="cpu", slice_index=number, id=device)
    for number in range(count)
    for device in range(size)
  ]


@pytest.mark.parametrize(
  ("shape", "axis"),
  [((8, 1, 1, 1), 0), ((2, 2, 2, 1), 0), ((1, 8, 1, 1), 1), ((1, 2, 2, 2), 1), ((2, 1, 1, 4), 0)],
)
def test_slices_lie_along_data_or_else_fsdp(shape, axis):
  arranged = arrange_devices(shape, slices(2, 4))
  assert arranged.shape == shape
  numbers = np.vectorize(lambda device: device.slice_index)(arranged)
  halves = np.split(numbers, 2, axis)
  assert [set(half.flat) for half in halves] == [{0}, {1}]


def test_four_slices_lie_along_data_and_fsdp_together():
  arranged = arrange_devices((2, 2, 4, 1), slices(4, 4))
  numbers = np.vectorize(lambda device: device.slice_index)(arranged)
  assert (numbers == numbers[:, :, :1]).all()
  assert set(numbers[:, :, 0, 0].flat) == {0, 1, 2, 3}


def test_tensor_and_sequence_never_cross_slices():
  for shape in ((1, 1, 8, 1), (1, 1, 2, 4)):
    with pytest.raises(InputError, match=r"mesh.fsdp = 1 cannot be laid over 2 slices"):
      arrange_devices(shape, slices(2, 4))


@pytest.mark.parametrize(
  ("mesh", "config", "message"),
  [
    ({"data": 8}, dataclasses.replace(tiny_config(accumulate=2)), "data.batch_size: 4 per accum"),
    ({"data": 1, "tensor": 8}, with_mixer(tiny_config(), groups=8), "model.heads: 4"),
    (
      {"data": 1, "tensor": 8},
      with_model(tiny_config("preln"), heads=8, kv_heads=4),
      "kv_heads: 4",
    ),
    ({"data": 1, "tensor": 8}, with_model(tiny_config(), heads=8), "model.mixer.groups: 4"),
    ({"data": 1, "fsdp": 8}, with_model(tiny_config(), width=36), "model.width: 36"),
    (
      {"data": 1, "fsdp": 2, "tensor": 4},
      with_model(tiny_config("preln"), width=36),
      "model.width: 36 cannot be split over mesh.tensor x mesh.fsdp = 8",
    ),
    ({"data": 1, "sequence": 8}, tiny_config(), None),
  ],
)
def test_sizes_that_a_mesh_cannot_split_are_refused_by_name(mesh, config, message):
  mesh = make_mesh(MeshConfig(**mesh))
  if message is None:
    check_divisible(config, mesh)
    return
  with pytest.raises(InputError, match=message):
    check_divisible(config, mesh)


def test_arrays_without_axis_names_are_refused_where_they_would_be_replicated():
  mesh = make_mesh(MeshConfig(data=1, fsdp=8))
  named = partitioned(jax.nn.initializers.zeros, "embed", None)(jax.random.key(0), (64, 100))
  tree = {"named": named, "scalar": jnp.zeros(100)}
  assert parameter_shardings(tree, mesh)["named"].spec == PartitionSpec(("fsdp",), None)
  tree["forgotten"] = jnp.zeros((64, 3))
  with pytest.raises(ValueError, match=r"4% of the bytes .* such as forgotten; wrap"):
    parameter_shardings(tree, mesh)
  parameter_shardings(tree, make_mesh(MeshConfig(), jax.devices()[:1]))


def test_the_table_names_what_lies_on_a_device():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  state = abstract_state(tiny_config(), mesh)
  rows = {row.name: row for row in parameter_rows(state.params)}
  up = rows["block_*/mlp/up/kernel"]
  assert up[1:] == (2, (32, 64), "fsdp, tensor", 2 * 32 * 64 * 4 // 4)
  assert rows["final_norm/scale"].spec == "-"
  whole = parameter_rows(abstract_state(tiny_config(), make_mesh(MeshConfig(data=8))).params)
  assert {axis for row in whole for axis in row.spec.split(", ")} == {"-"}
  assert sum(row.count for row in rows.values()) == len(jax.tree.leaves(state.params))
  on_device = sum(row.bytes_per_device for row in rows.values())
  assert on_device == bytes_per_device(state.params)
  with jax.set_mesh(mesh):
    real = init_state(tiny_config(), mesh).params
  held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(real))
  assert on_device == held
  *table, total = sharding_lines(state.params, state.optimizer_state)
  assert any(
    line.split()[:5] == ["2", "x", "block_*/mlp/up/kernel", "[32,", "64]"] for line in table
  )
  assert f"parameters {held / 2**20:,.1f} MiB" in total


def test_outside_our_mesh_a_constraint_changes_nothing():
  x = jnp.ones((2, 3))
  assert constrain(x, "batch", None) is x
  foreign = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  with jax.set_mesh(foreign):
    assert constrain(x, "batch", None) is x
