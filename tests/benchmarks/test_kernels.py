"""The benchmark of kernels compiles for a TPU and counts what a kernel moves and computes."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from ldm_jax.benchmarks import kernels
from ldm_jax.benchmarks.cases import Case, cases, causal_share
from ldm_jax.errors import InputError
from ldm_jax.hlo.schedule import KernelCost
from ldm_jax.tpu import CHIPS
from tests.rig import ROOT, needs_libtpu


def run(*arguments):
  command = [sys.executable, "-m", "ldm_jax.benchmarks.kernels", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@needs_libtpu
def test_a_kernel_moves_its_operands_and_results():
  done = run("--chip", "v5e", "--only", "thin product D=1024", "--json")
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout)
  assert result["kind"] == "modelled"
  (row,) = result["kernels"]
  # x and w in bfloat16, the product and the squares in float32.
  rows = 4 * 2048
  assert row["floor_bytes"] == 2 * 1024 * (rows + 64) + rows * 4 * (64 + 1)
  assert row["moved_bytes"] == pytest.approx(row["floor_bytes"], rel=0.05)
  assert row["bundles"] > row["static_bundles"] > 0
  assert row["transfer_seconds"] == row["moved_bytes"] / CHIPS["v5e"].hbm_rate
  slower = max(row["transfer_seconds"], row["compute_seconds"])
  assert row["ratio"] == slower / row["floor_seconds"]


def test_the_table_names_what_limits_a_kernel(monkeypatch, capsys):
  cost = KernelCost(10, 3e6, 0, 6e6, 2e6, {"MXU": 0.2, "VALU": 0.8, "VLOAD:FILL": 0.9})

  def measure(case, name, dump):
    sizes = (8e6, 4e6)
    return [
      kernels.Row(case.name, "slow", CHIPS[name], (4, 2), cost, *sizes),
      kernels.Row(case.name, "fast", CHIPS[name], (4, 2), cost._replace(bundles=3e3), *sizes),
    ]

  monkeypatch.setattr(
    kernels, "cases", lambda: iter([Case("one", None, ()), Case("two", None, ())])
  )
  monkeypatch.setattr(kernels, "measure", measure)
  platforms, cache = jax.config.jax_platforms, jax.config.jax_enable_compilation_cache
  try:
    assert kernels.main(["--chip", "v5p", "--only", "two"]) == 0
  finally:
    jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_enable_compilation_cache", cache)
  heading, _, slow, fast, _ = capsys.readouterr().out.splitlines()
  assert heading.startswith("modelled")
  assert slow.split()[:4] == ["v5p", "two", "slow", "4x2"]
  assert slow.endswith("VALU 80%")
  assert fast.split()[-3:] == ["2.00", "HBM", "(VALU)"]
  with pytest.raises(InputError, match="--only three fits no kernel; there are: one, two"):
    kernels.main(["--only", "three"])


def test_grids_are_found_wherever_a_kernel_is_called():
  from jax.experimental import pallas as pl

  def double(x):
    def body(x, y):
      y[...] = 2 * x[...]

    spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    shape = jax.ShapeDtypeStruct((16, 384), jnp.float32)
    return pl.pallas_call(
      body, grid=(2, 3), in_specs=[spec], out_specs=spec, out_shape=shape, name="double"
    )(x)

  traced = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, jax.jit(double), lambda x: x, x))
  jaxpr = traced(jnp.zeros((16, 384)))
  assert kernels.kernel_grids(jaxpr.jaxpr) == {"double": (2, 3)}


def test_cases_have_names_of_their_own_and_shapes_that_trace():
  found = list(cases())
  assert len({case.name for case in found}) == len(found)
  for case in found:
    if "attention" not in case.name:  # splash is for TPUs
      jax.eval_shape(case.function, *case.arguments)


def test_a_causal_mask_leaves_over_half_of_the_blocks():
  assert causal_share(512) == 1
  assert causal_share(2048) == 10 / 16
