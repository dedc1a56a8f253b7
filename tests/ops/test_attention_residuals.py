"""The two-part read equals the direct softmax, and does the first part once per block."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.mixers import AttentionResiduals
from ldm_jax.ops.attention_residuals import depth_softmax, finish_read, prepare_reads

B, T, D = 2, 64, 64


def random(seed, *shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_depth_softmax_by_hand():
  e1, e2 = np.eye(4, dtype=np.float32)[:2]
  h = depth_softmax([jnp.array(e1), jnp.array(e2)], jnp.array([2.0, 0, 0, 0]), jnp.ones(4))
  # Scaled to length √4, e1 scores 4 and e2 scores 0: 1 / (1 + e⁻⁴).
  np.testing.assert_allclose(h, [0.9820138, 0.0179862, 0, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2**-7)])
@pytest.mark.parametrize("scale", [0.1, 10.0, 1000.0])
def test_prepared_and_finished_reads_equal_the_direct_softmax(dtype, tolerance, scale):
  sources = list(random(0, 5, 2, 3, 8, dtype=dtype))
  # Scores of up to hundreds: an exponential without care would overflow.
  queries, scales = scale * random(1, 4, 8), 1 + random(2, 4, 8)
  prepared = prepare_reads(sources[:-1], queries, scales)
  assert len(prepared) == 4
  for read, query, norm_scale in zip(prepared, queries, scales, strict=True):
    closed = depth_softmax(sources[:-1], query, norm_scale)
    np.testing.assert_allclose(
      np.float32(read.mean), np.float32(closed), rtol=tolerance, atol=4 * tolerance
    )
    h = finish_read(read, sources[-1])
    assert h.dtype == read.mean.dtype == dtype
    direct = depth_softmax(sources, query, norm_scale)
    np.testing.assert_allclose(
      np.float32(h), np.float32(direct), rtol=tolerance, atol=4 * tolerance
    )


def test_gradients_of_the_two_forms_are_the_same():
  sources, query, scale, c = random(0, 4, 2, 8), random(1, 8), 1 + random(2, 8), random(3, 2, 8)

  def two_parts(sources, query, scale):
    (read,) = prepare_reads(sources[:-1], query[None], scale[None])
    return finish_read(read, sources[-1])

  def gradient(form):
    loss = lambda *arguments: jnp.sum(c * form(*arguments))
    return jax.grad(loss, argnums=(0, 1, 2))(list(sources), query, scale)

  for a, b in zip(
    jax.tree.leaves(gradient(two_parts)), jax.tree.leaves(gradient(depth_softmax)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_without_a_source_there_is_nothing_to_read():
  with pytest.raises(ValueError, match="at least one source"):
    depth_softmax([], jnp.ones(3), jnp.ones(3))


def scored_sources(block_size, sublayers, told):
  """How many times a compiled stack scores a source: products of a [B, T, D] array with queries."""

  def run(variables, x):
    mixers = [
      AttentionResiduals(l, sublayers=sublayers if told else None, block_size=block_size)
      for l in range(sublayers + 1)
    ]
    streams = mixers[-1].init_streams(x)
    for l, mixer in enumerate(mixers[:-1]):
      h = mixer.apply(variables[l], streams, method="read")
      streams = mixer.apply(variables[l], streams, jnp.sin(h), method="write")
    return mixers[-1].apply(variables[-1], streams, method="read")

  rows = [
    AttentionResiduals(l, sublayers=sublayers if told else None, block_size=block_size)._own_reads()
    for l in range(sublayers + 1)
  ]
  variables = [
    {"params": {"queries": {name: jnp.ones((n, D)) for name in ("query", "norm_scale")}}}
    if n
    else {}
    for n in rows
  ]
  compiled = jax.jit(run).lower(variables, random(0, B, T, D)).compile()
  return len(re.findall(r"\bdot\(", compiled.as_text()))


def test_finished_sources_are_scored_once_per_block():
  # 6 sublayers in 2 blocks.  Block 0 scores the embedding once, and the partial sum in 2 reads;
  # block 1 scores 2 sources once, and the partial sum in 2 reads; the head scores 3 sources.
  assert scored_sources(3, 6, told=True) == (1 + 2) + (2 + 2) + 3
  # Alone, reads 1 to 5 and the head score 2, 2, 2, 3, 3 and 3 sources.
  assert scored_sources(3, 6, told=False) == 2 + 2 + 2 + 3 + 3 + 3
