"""The loss of packed rows is that of each document alone."""

import jax
import numpy as np
import pytest

from ldm_jax.config import MeshConfig
from ldm_jax.data import Batch, ByteTokenizer, PackedRows, lay_end_to_end
from ldm_jax.sharding import make_mesh
from ldm_jax.training.step import init_state, make_eval_step
from tests.rig import with_kind

TEXTS = [b"def f(x):", b"", b"a", b"import numpy", b"\x00\xff\x00", b"return 1"]


def rows_of(texts, length=64):
  tokenizer = ByteTokenizer()
  ids = lay_end_to_end([tokenizer.encode(text) for text in texts], tokenizer.boundary)
  rows = PackedRows(ids, length, tokenizer.boundary)
  assert len(rows) == 1
  return Batch(*(array[None] for array in rows[0]))


@pytest.mark.parametrize("name", ["preln", "rls"])
def test_packed_documents_have_the_loss_they_have_alone(name):
  config = with_kind(name)
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  with jax.set_mesh(mesh):
    params = init_state(config, mesh).params
    step = jax.jit(make_eval_step(config))
    packed = step(params, rows_of(TEXTS))
    alone = [step(params, rows_of([text])) for text in TEXTS]
  assert int(packed.tokens) == sum(len(text) + 1 for text in TEXTS)
  assert [int(sums.tokens) for sums in alone] == [len(text) + 1 for text in TEXTS]
  total = sum(float(sums.cross_entropy) for sums in alone)
  np.testing.assert_allclose(float(packed.cross_entropy), total, rtol=1e-5)
