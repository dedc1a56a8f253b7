"""Streams as planes, which programs for TPUs keep, give the numbers of the streams as they are."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ldm_jax.config import MeshConfig, MixerConfig
from ldm_jax.mixers import (
  AttentionResidualStreams,
  HyperConnectionStreams,
  make_mixer,
)
from ldm_jax.ops.planes import thin_product
from ldm_jax.ops.planes.handed import thin_products
from ldm_jax.ops.sinkhorn import sinkhorn_leading, sinkhorn_tokenwise
from ldm_jax.sharding import make_mesh
from ldm_jax.tpu import topology_devices
from tests.rig import needs_libtpu

B, T, D, LAST = 1, 7, 16, 5
MHC, HC = MixerConfig(kind="mhc", streams=2), MixerConfig(kind="hc", streams=2)
ATTNRES = MixerConfig(kind="attnres", block_size=2)
# A mixer and which sublayers, of 5; the sixth is the head.
QUICK = {"mhc": (MHC, [1]), "hc": (HC, [1]), "attnres": (ATTNRES, [2, 3])}
ALL = {
  "mhc": (MHC, range(6)),
  "mhc_4": (dataclasses.replace(MHC, streams=4), range(6)),
  "mhc_1": (dataclasses.replace(MHC, streams=1), range(6)),
  "hc": (HC, range(6)),
  "hc_1": (dataclasses.replace(HC, streams=1), range(6)),
  "hc_3": (dataclasses.replace(HC, streams=3), range(6)),
  "hc_static": (dataclasses.replace(HC, dynamic=False), range(6)),
  "attnres": (ATTNRES, range(6)),
  "attnres_full": (dataclasses.replace(ATTNRES, block_size=1), range(6)),
}


class Stack(nn.Module):
  """Some sublayers inside mixers, from streams on; as planes if `interpret` is not None."""

  config: MixerConfig
  sublayers: tuple[int, ...]
  interpret: bool | None = None

  @nn.compact
  def __call__(self, xs):
    streams = AttentionResidualStreams(tuple(xs))
    if self.config.kind != "attnres":
      streams = HyperConnectionStreams(jnp.stack(xs))
    if self.interpret is not None:
      streams = streams.as_planes(self.interpret)
    for l in self.sublayers:
      mixer = make_mixer(self.config, l, LAST, "float32", f"mixer_{l}")
      if l == LAST:
        return mixer.read(streams)
      streams = mixer(streams, lambda h: jnp.tanh(h[..., ::-1]))
    if self.config.kind != "attnres":
      return streams.stacked()
    return [x.swapaxes(1, 2) if streams.planes else x for x in jax.tree.leaves(streams.sources)]


def normal(seed, *shape, dtype="float32"):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def values_and_gradients(stack, variables, xs):
  def loss(variables, xs):
    outs = jax.tree.leaves(stack.apply(variables, xs))
    return sum(jnp.sum(normal(9 + i, *y.shape) * y) for i, y in enumerate(outs)), outs

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, xs)


def assert_planes_change_nothing(config, sublayers, interpret):
  count = config.streams if config.kind != "attnres" else 1 + sublayers[0] // config.block_size
  stack, xs = Stack(config, tuple(sublayers)), [normal(i, B, T, D) for i in range(count)]
  variables = nn.unbox(stack.init(jax.random.key(1), xs))
  in_planes = dataclasses.replace(stack, interpret=interpret)
  shapes = jax.eval_shape(in_planes.init, jax.random.key(1), xs)
  assert jax.tree.map(jnp.shape, nn.unbox(shapes)) == jax.tree.map(jnp.shape, variables)
  # Away from the start, where coefficients are constants.
  variables = jax.tree.map(lambda p: p + 0.1 * normal(p.size, *p.shape), variables)
  expected = values_and_gradients(stack, variables, xs)
  found = values_and_gradients(in_planes, variables, xs)
  pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
  for (path, a), b in pairs:
    name = jax.tree_util.keystr(path)
    # Gradients of what Sinkhorn's iteration takes back are small differences of larger numbers, and
    # so is that of one number that all tokens share.
    allowed = 3e-4 if "'res_" in name else 1e-4 if a.ndim == 0 else 1e-5
    assert jnp.abs(a - b).max() <= allowed * jnp.abs(b).max(), name


@pytest.mark.parametrize("name", QUICK)
def test_kernels_on_planes_change_no_value_and_no_gradient(name):
  assert_planes_change_nothing(*QUICK[name], interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_planes_change_no_value_and_no_gradient(name):
  assert_planes_change_nothing(*ALL[name], interpret=False)


@pytest.mark.parametrize(
  ("size", "iterations"), [(2, 3), pytest.param(4, 20, marks=pytest.mark.slow)]
)
def test_sinkhorn_of_tokens_in_all_rows_is_sinkhorn(size, iterations):
  def weighed(sinkhorn, **how):
    function = lambda logits: jnp.sum(weights * sinkhorn(logits, iterations, **how))
    return jax.jit(jax.value_and_grad(function))(logits)

  logits, weights = 3 * normal(0, size, size, 1, 16), normal(1, size, size, 1, 16)
  found = weighed(sinkhorn_tokenwise, interpret=True)
  expected = weighed(sinkhorn_leading)
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1, 100, 1e4])
def test_sinkhorn_by_products_survives_huge_logits(scale):
  logits = scale * normal(0, 4, 4, 1, 16)
  found, gradient = jax.jit(
    jax.value_and_grad(lambda x: jnp.sum(sinkhorn_tokenwise(x, 20, interpret=True)[0]))
  )(logits)
  np.testing.assert_allclose(found, 16, rtol=1e-5)  # a row of each token sums to 1
  assert jnp.isfinite(gradient).all()


def test_products_with_bfloat16_planes_keep_the_matrix_precise():
  x, w = normal(0, B, D, T, dtype="bfloat16"), normal(1, 1, D)
  exact = jnp.einsum("rd,bdt->brt", w, x.astype(jnp.float32))
  (found,), _, _ = jax.jit(thin_products)([x], [w])
  rounded, _ = jax.jit(thin_product)(x, w)
  assert jnp.abs(found - exact).max() < 1e-2 * jnp.abs(rounded - exact).max()


@needs_libtpu
@pytest.mark.parametrize("config", [MHC, HC, ATTNRES], ids=lambda config: config.kind)
@pytest.mark.parametrize("mesh", [MeshConfig(tensor=2, fsdp=2), MeshConfig(sequence=2, data=2)])
def test_streams_are_planes_in_programs_for_tpus_only(config, mesh):
  x = jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16)

  def planes(devices):
    mixer = make_mixer(config, 0, LAST, "bfloat16", None)
    with jax.set_mesh(make_mesh(mesh, devices)):
      return jax.eval_shape(mixer.init_streams, x).planes

  assert planes(topology_devices("v5e:2x2"))
  assert not planes(jax.devices()[:4])


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("config", [MHC, HC, ATTNRES], ids=lambda config: config.kind)
@pytest.mark.parametrize("mesh", [MeshConfig(tensor=2, fsdp=2), MeshConfig(sequence=2, data=2)])
def test_sublayers_of_planes_compile_for_tpus(config, mesh):
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      mixers = [make_mixer(config, l, 3, "bfloat16", f"mixer_{l}") for l in range(4)]
      streams = mixers[-1].init_streams(x)
      for mixer in mixers[:-1]:
        streams = mixer(streams, jnp.tanh)
      return mixers[-1].read(streams)

  devices = make_mesh(mesh, topology_devices("v5e:2x2"))
  with jax.set_mesh(devices):
    everywhere = NamedSharding(devices, PartitionSpec())
    x = jax.ShapeDtypeStruct((4, 2048, 256), jnp.bfloat16, sharding=everywhere)
    variables = nn.unbox(jax.eval_shape(lambda x: Net().init(jax.random.key(0), x), x))
    variables = jax.tree.map(
      lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=everywhere), variables
    )
    loss = lambda variables, x: jnp.sum(Net().apply(variables, x).astype(jnp.float32))
    text = jax.jit(jax.grad(loss)).lower(variables, x).compile().as_text()
  assert "group_products" in text
