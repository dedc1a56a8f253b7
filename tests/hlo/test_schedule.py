"""Schedules of kernels, run against counts by hand."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ldm_jax.hlo.bundles import parse_schedule
from ldm_jax.hlo.scalar import follow
from ldm_jax.hlo.schedule import ScheduleDump, Schedules, kernel_cost, parse_utilization
from ldm_jax.tpu import CHIPS
from tests.rig import ROOT, needs_libtpu

# y[i] = fold of 5 times a * x + 1, for 7 tiles of a block, blocks of 56 x 128 of float32 on a grid
# of 4 x 3; compiled for a v5e, whose pipeline takes two more turns for the first and last transfer.
BUNDLES, UTILIZATION = (
  (Path(__file__).parent / "schedules" / f"nested_loops_{part}.txt").read_text()
  for part in ("bundles", "utilization")
)


def test_every_bundle_runs_as_often_as_its_loops():
  schedule = parse_schedule(BUNDLES)
  counts = follow(schedule)
  # The loop over the grid, its body where there is a block, tiles, the fold; the parts by address.
  addresses = {0x7: 14, 0x25: 12, 0x44: 14, 0x27: 12 * 7, 0x33: 12 * 7, 0x2B: 12 * 7 * 5, 0x52: 1}
  assert {address: counts.bundles[address] for address in addresses} == addresses
  turns, bodies = 0x25 - 0x7 + 0x52 - 0x44, 0x27 - 0x25 + 0x44 - 0x38
  assert sum(counts.bundles) == 7 + 14 * turns + 12 * bodies + 84 * (4 + 5) + 420 * 8 + 4
  assert not any(counts.conditional)


def test_transfers_count_only_what_a_turn_starts():
  counts = follow(parse_schedule(BUNDLES))
  assert counts.bytes_read == counts.bytes_written == 224 * 384 * 4
  assert counts.conditional_read == counts.conditional_written == 0


def test_the_cost_of_a_kernel_names_the_busiest_unit():
  cost = kernel_cost(BUNDLES, UTILIZATION)
  slots, used = parse_utilization(UTILIZATION)
  assert cost.static_bundles == len(used) == 0x56
  assert slots["VALU"] == 4
  # In the fold a multiplication, an addition and a copy: 3 of 4 x 8 slots.
  assert cost.busy["VALU"] == pytest.approx((420 * 3 + 84) / (cost.bundles * 4))
  assert cost.limit == "SALU"
  chip = CHIPS["v5e"]
  assert chip.clock == pytest.approx(1.5e9, rel=0.01)
  assert cost.seconds(chip) == cost.bundles / chip.clock > cost.bytes / chip.hbm_rate


def test_what_hangs_on_data_counts_by_its_share():
  # The branch that skips the body of a turn, and the store's transfer, now ask memory.
  text = BUNDLES.replace("%p126_p3 = pnand %p306_p1, %p125_p2", "%p126_p3 = punknown %p306_p1")
  assert text != BUNDLES
  counts = follow(parse_schedule(text))
  assert counts.bundles[0x25] == 0
  assert counts.conditional[0x25] == 14
  assert counts.bundles[0x7] == counts.bundles[0x44] == 14
  whole, half = (kernel_cost(text, UTILIZATION, conditional_share=share) for share in (1, 0.5))
  assert whole.conditional == 2 * half.conditional > 0
  assert whole.bundles - half.bundles == half.conditional


@pytest.mark.parametrize(
  ("line", "instead", "message"),
  [
    ("%s162_s17, 7 /*", "%s999_s17, %s998_s18 /*", "how often the loop at bundle 0x27 runs"),
    ("/*size_in_granules=*/896, /*vmem", "/*size_in_granules=*/%s998_s1, /*vmem", "how much"),
    ("dma.hbm_to_vmem [", "dma.strange [", "dma.strange"),
    ("  0x2f   :  {}\n", "", "no bundle 0x2f"),
  ],
)
def test_what_cannot_be_read_is_an_error(line, instead, message):
  text = re.sub(re.escape(line), instead, BUNDLES)
  assert text != BUNDLES
  with pytest.raises(ValueError, match=message):
    kernel_cost(text, UTILIZATION)


def test_other_texts_are_refused():
  with pytest.raises(ValueError, match="no bundles"):
    parse_schedule("HloModule main")
  with pytest.raises(ValueError, match="utilization"):
    parse_utilization("HloModule main")
  with pytest.raises(ValueError, match="the utilization of 1"):
    kernel_cost(BUNDLES, UTILIZATION[: UTILIZATION.index("UTILIZATION:\n") + 33])
  with pytest.raises(ValueError, match="no schedule of other"):
    Schedules({"one": (BUNDLES, UTILIZATION)}).cost("other", CHIPS["v5e"])


def test_a_dump_that_comes_too_late_is_an_error(monkeypatch):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--before=1")
  with ScheduleDump() as dump:
    assert os.environ["LIBTPU_INIT_ARGS"].startswith("--before=1 --xla_jf_dump_to=")
    with pytest.raises(RuntimeError, match="loaded before"):
      dump.read()
  assert os.environ["LIBTPU_INIT_ARGS"] == "--before=1"


COMPILE = """
  import functools
  import jax, jax.numpy as jnp
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu
  from jax.sharding import SingleDeviceSharding
  from ldm_jax.hlo.schedule import ScheduleDump
  from ldm_jax.tpu import CHIPS, topology_devices

  def kernel(shared, x, out, scratch):
    @pl.when(pl.program_id(1) == 0)
    def _():
      scratch[...] = jnp.zeros_like(scratch)
    scratch[...] += shared[...] * x[...]
    @pl.when(pl.program_id(1) == 5)
    def _():
      out[...] = scratch[...]

  def reduce(semantics, shared, x):  # blocks of 64 x 128; `shared` stays for six turns
    return pl.pallas_call(
      kernel, grid=(4, 6), name="kernel",
      in_specs=[pl.BlockSpec((64, 128), lambda i, j: (i, 0)),
                pl.BlockSpec((64, 128), lambda i, j: (i, j))],
      out_specs=pl.BlockSpec((64, 128), lambda i, j: (i, 0)),
      out_shape=jax.ShapeDtypeStruct((256, 128), jnp.float32),
      scratch_shapes=[pltpu.VMEM((64, 128), jnp.float32)],
      compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics, "arbitrary")),
    )(shared, x)

  with ScheduleDump() as dump:
    for chip, slice_ in (("v5e", "1x1"), ("v5p", "2x2x1")):
      where = SingleDeviceSharding(topology_devices(f"{chip}:{slice_}")[0])
      arrays = [jax.ShapeDtypeStruct((256, n), jnp.float32, sharding=where) for n in (128, 768)]
      for semantics in ("parallel", "arbitrary"):
        jax.jit(functools.partial(reduce, semantics)).lower(*arrays).compile()
        cost = dump.read().cost("kernel.1", CHIPS[chip])
        print(chip, semantics, cost.read_bytes, cost.written_bytes, cost.bundles, cost.conditional)
"""


@needs_libtpu
def test_schedules_that_libtpu_makes_here():
  result = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(COMPILE)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=True,
  )
  bundles = {}
  for line in result.stdout.splitlines():
    chip, semantics, read, written, count, conditional = line.split()
    assert float(read) == 256 * (128 + 768) * 4
    assert float(written) == 256 * 128 * 4
    assert float(conditional) == 0
    bundles[chip, semantics] = float(count)
  # The two cores of a v5p share parallel axes.
  assert bundles["v5p", "parallel"] < 0.7 * bundles["v5p", "arbitrary"]
  assert bundles["v5e", "parallel"] == bundles["v5e", "arbitrary"]
