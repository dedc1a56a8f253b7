"""The planner: what it refuses, what it adds up, when it fits, and what it suggests."""

import dataclasses
import json
import math

import jax
import pytest

from ldm_jax.config import Config, MeshConfig
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.hlo.costs import PaddedArray
from ldm_jax.hlo.program import parse_arrays
from ldm_jax.plan import main
from ldm_jax.planning import measure as measuring
from ldm_jax.planning import plans
from ldm_jax.planning.measure import Exchanges, Measure, StepCost, extrapolate
from ldm_jax.planning.plans import RESERVE, Plan, plan, state_bytes
from ldm_jax.planning.search import changed_settings, cheapest_fit
from ldm_jax.sharding import MESH_AXES, make_mesh, mesh_shape
from ldm_jax.tpu import CHIPS, topology_devices
from tests.rig import needs_libtpu, refusal, tiny_config, with_model, write_config

pytestmark = needs_libtpu

GIB = 2**30
USABLE = CHIPS["v5e"].usable_bytes
REMAT = {"none": 8.0, "dots": 4.0, "full": 2.0}


def cost(**changes) -> StepCost:
  numbers = dict(
    temporary_bytes=0,
    state_bytes=0,
    code_bytes=0,
    flops=0,
    hbm_bytes=0,
    cycles=0,
    exchanges={},
    arrays=[],
    kernels={},
  )
  return StepCost(**{**numbers, **changes})


class FakeCompiler:
  """Temporaries in GiB: those of a block by remat and accumulate, and fixed ones."""

  def __init__(self, block=1.0, fixed=0.0):
    self.block, self.fixed, self.compiled = block, fixed, []

  def __call__(self, config: Config, mesh) -> Measure:
    train, blocks = config.train, config.model.blocks
    self.compiled.append((blocks, train.remat, train.accumulate, *mesh.devices.shape))
    size = self.fixed + blocks * self.block * REMAT[train.remat] / train.accumulate
    if size * GIB > USABLE:
      return Measure(size * GIB, None)
    (array,) = parse_arrays("bf16[9,200]{1,0:T(8,128)(2,1)}")
    found = cost(
      temporary_bytes=size * GIB,
      flops=blocks * 197e12,
      hbm_bytes=blocks * 819e9 / 2,
      cycles=blocks,
      exchanges={"all-gather": Exchanges(2 * blocks, blocks * 8e9, blocks * 100e9)},
      arrays=[PaddedArray(array, 7)],
    )
    return Measure(size * GIB, found)


@pytest.fixture
def compiler(monkeypatch):
  fake = FakeCompiler()
  monkeypatch.setattr(plans, "measure", fake)
  return fake


def config(blocks=6, batch=64, mesh=MeshConfig(), heads=4, **train) -> Config:  # noqa: B008
  changed = with_model(tiny_config("preln", **train), blocks=blocks, heads=heads)
  data = dataclasses.replace(changed.data, batch_size=batch)
  return dataclasses.replace(changed, data=data, mesh=mesh)


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ("", "--topology is missing: the chip and slice shape, such as v5e:4x4"),
    ("--topology", "expected one argument; python -m ldm_jax.plan --help lists the options"),
    ("--topology v9:2x2", "unknown chip 'v9'; known are v4, v5e"),
    ("--topology v5e:2x3", "there is no such slice; v5e has 1x1, 2x2, 2x4"),
    ("--topology v5e:2x4 --blocks 4,2", "--blocks 4,2: give two or three rising depths"),
    ("--topology v5e:2x4 --blocks 2", "give two or three rising depths, such as 2,4, or --full"),
    ("--topology v5e:2x4 --blocks two,4", "--blocks two,4: give depths such as 2,4"),
    ("--topology v5e:2x4 --blocks 2,4 --full", "--full compiles the real depth, so --blocks has"),
    ("--topology v5e:2x4 --compare gru", "--compare gru: known mixers are preln, ldm, attnres"),
    ("--topology v5e:2x4 --topologie x", "unknown setting --topologie; did you mean --topology"),
    ("--topology v5e:2x4 --model.widht 8", "did you mean --model.width"),
    ("--topology v5e:2x4 --workdir x", "unknown setting --workdir"),
    ("--topology v5e:2x4 --mesh.data 3", "mesh.data=3 .* does not use the 8 devices"),
    ("--topology v5e:2x4 --mesh.tensor 8", "model.heads: 4 cannot be split over mesh.tensor = 8"),
    ("--topology v5e:2x4 --data.batch-size 12", "data.batch_size: 12 cannot be split"),
  ],
)
def test_bad_arguments(arguments, words, compiler):
  with pytest.raises(InputError, match=words):
    main(arguments.split())
  assert compiler.compiled == []


def test_a_bad_topology_ends_the_command_in_one_line():
  assert refusal("-m", "ldm_jax.plan", "--topology", "v5e:9x9").startswith(
    "error: --topology v5e:9x9: there is no such slice; v5e has 1x1"
  )


def test_two_depths_are_compiled_and_the_real_one_follows_from_them(compiler):
  compiler.block, compiler.fixed = 0.1, 1.0
  found = plan(config(remat="full"), "v5e:2x4")
  assert [blocks for blocks, *_ in compiler.compiled] == [2, 4]
  assert found.compiled_blocks == (2, 4)
  assert found.needed_bytes == pytest.approx((1.0 + 6 * 0.2) * GIB)
  assert found.cost.flops == pytest.approx(6 * 197e12)
  assert found.cost.exchanges["all-gather"].count == pytest.approx(12)
  assert found.seconds == pytest.approx({"products": 6.0, "HBM": 3.0, "exchanges": 3.0})
  assert found.most_tokens_per_second == pytest.approx(64 * 32 / 6.0)


@pytest.mark.parametrize(
  ("blocks", "depth", "compiled"),
  [(None, 6, [6]), ((2, 4), 4, [4]), ((2, 4), 3, [3]), ((1, 2, 4), 6, [1, 2, 4])],
)
def test_which_depths_are_compiled(blocks, depth, compiled, compiler):
  found = plan(config(depth, remat="full"), "v5e:2x4", blocks)
  assert [blocks for blocks, *_ in compiler.compiled] == compiled
  assert found.cost.flops == pytest.approx(depth * 197e12)


def test_three_depths_follow_a_parabola_and_two_a_line():
  measures = [Measure(b * b + 5, cost(flops=b * b, kernels={"splash": b})) for b in (1, 2, 3)]
  needed, found = extrapolate((1, 2, 3), measures, 10)
  assert (needed, found.flops, found.kernels["splash"]) == pytest.approx((105, 100, 10))
  needed, found = extrapolate((1, 3), measures[::2], 10)
  assert (needed, found.flops) == pytest.approx((6 + 4 * 9, 1 + 4 * 9))


def test_parameters_and_optimizer_state_are_those_of_the_real_depth(compiler):
  small, large = (plan(config(b, remat="full"), "v5e:2x4", None) for b in (2, 6))
  block = 4 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 64)  # two norms, attention, MLP; float32
  assert large.parameter_bytes - small.parameter_bytes == 4 * block
  assert large.optimizer_bytes - small.optimizer_bytes == 2 * 4 * block
  assert state_bytes(config(), "v5e:2x4") == large.parameter_bytes + large.optimizer_bytes


def test_the_reserve_decides_what_fits(compiler):
  compiler.block = 0.0
  for share, fits in ((0.999, True), (1.001, False)):
    compiler.fixed = share * (1 - RESERVE) * USABLE / GIB
    assert plan(config(), "v5e:2x4").fits == fits


def test_a_device_of_tpu7x_is_half_a_chip(compiler):
  compiler.block = 0.1
  found = plan(config(), "tpu7x:2x2x1")
  assert (found.chips, math.prod(found.mesh_shape.values())) == (4, 8)
  assert found.usable_bytes == 94.75 * GIB
  assert found.seconds["products"] == pytest.approx(6 * 197e12 / (2307e12 / 2))


def test_depths_too_large_to_compile_still_give_the_memory(compiler):
  compiler.block = 1.0
  found = plan(config(remat="dots"), "v5e:2x4")
  assert found.cost is None
  assert not found.fits
  assert found.needed_bytes == pytest.approx(6 * 4 * GIB)
  assert found.seconds == {}


def test_the_compilers_own_refusal_is_read(monkeypatch):
  def refuse(message):
    def compile_train_step_for(config, mesh):
      raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(measuring, "compile_train_step_for", compile_train_step_for)
    return measuring.measure(config(), None)

  text = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
  found = refuse(text + "temporaries (18.72G) exceeds available HBM (15.75G).")
  assert found == Measure(18.72 * GIB, None)
  text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
  assert refuse(text + "hbm. Used 20.50G of 15.75G hbm.") == Measure(20.5 * GIB, None)
  with pytest.raises(TrainingError, match=r"cannot compile this step: RESOURCE_.*space vmem"):
    refuse(text + "vmem. Used 20.50M of 16.00M vmem.")
  with pytest.raises(TrainingError, match="libtpu cannot compile this step: INTERNAL: broken"):
    refuse("INTERNAL: broken\nmore")


class FakePlans:
  """Plans by a formula in GiB, on 8 chips; keeps what it was asked for."""

  def __init__(self, block, fixed=0.0, state=0.0):
    self.block, self.fixed, self.state, self.asked = block, fixed, state, []

  def sizes(self, run):
    sizes = dict(zip(MESH_AXES, mesh_shape(run.mesh, 8), strict=True))
    if run.model.heads % sizes["tensor"]:
      raise InputError("heads")
    return sizes

  def state_bytes(self, run):
    sizes = self.sizes(run)
    return self.state * GIB / (sizes["fsdp"] * sizes["tensor"])

  def __call__(self, run):
    sizes, train = self.sizes(run), run.train
    self.asked.append(changed_settings(config(), run))
    moving = run.model.blocks * self.block * REMAT[train.remat] / train.accumulate
    temporary = (moving + self.fixed) / sizes["tensor"]
    return Plan(
      config=run,
      topology="v5e:2x4",
      chip=CHIPS["v5e"],
      mesh_shape=sizes,
      parameter_bytes=self.state_bytes(run),
      optimizer_bytes=0,
      needed_bytes=self.state_bytes(run) + temporary * GIB,
      usable_bytes=USABLE,
      cost=None,
      compiled_blocks=(2, 4),
    )

  def suggestion(self, run):
    first = self(run)
    assert not first.fits
    fitting = cheapest_fit(first, self, self.state_bytes)
    return fitting and changed_settings(run, fitting.config)


@pytest.mark.parametrize(
  ("block", "settings"),
  [
    (0.5, {"train.remat": "dots"}),
    (1.0, {"train.remat": "full"}),
    (2.0, {"train.remat": "full", "train.accumulate": 2}),
    (9.0, {"train.remat": "full", "train.accumulate": 8}),
  ],
)
def test_remat_goes_first_and_then_parts(block, settings):
  plans = FakePlans(block)
  assert plans.suggestion(config()) == settings
  parts = [asked["train.accumulate"] for asked in plans.asked if "train.accumulate" in asked]
  assert set(parts) <= {settings.get("train.accumulate")}  # 2 and 4 could not be enough for 8


def test_parts_go_on_from_those_given_while_the_batch_divides():
  assert FakePlans(4.0).suggestion(config(remat="full", accumulate=2)) == {"train.accumulate": 4}
  assert FakePlans(9.0).suggestion(config(remat="full", batch=32, heads=1)) is None


def test_the_mesh_changes_when_the_state_is_too_large():
  plans = FakePlans(2.0, state=15.0)
  settings = {"train.remat": "full", "train.accumulate": 4, "mesh.data": 4, "mesh.fsdp": 2}
  assert plans.suggestion(config(blocks=4)) == settings
  assert all("mesh.fsdp" in asked for asked in plans.asked[1:])  # nothing else can shrink a state
  plans.fixed = 3.5  # 4 parts are then too few, and 32 rows on 8 chips are not 8 parts
  assert plans.suggestion(config(blocks=4, batch=32)) == settings | {
    "mesh.data": 2,
    "mesh.fsdp": 4,
  }


def test_tensor_follows_when_fsdp_does_not_help_unless_the_model_cannot_be_split():
  run = config(batch=8, mesh=MeshConfig(data=1, fsdp=-1))
  plans = FakePlans(0.0, fixed=48.0)
  assert plans.suggestion(run) == {"mesh.fsdp": 2, "mesh.tensor": 4}
  assert plans.suggestion(with_model(run, heads=1)) is None


def test_the_command_prints_a_table_and_a_verdict(compiler, tmp_path, capsys):
  compiler.block = 0.1
  path = write_config(tmp_path, config())
  code = main(["--config", str(path), "--topology", "v5e:2x4", "--compare", "hc"])
  captured = capsys.readouterr()
  assert code == 0
  assert "compiled 2 blocks in" in captured.err
  lines = captured.out.splitlines()
  assert lines[0].startswith("preln, 6 blocks of width 32, on v5e:2x4: 8 chips, mesh data 8")
  assert "| per chip and step | config | hc | ratio |" in lines
  assert "| matrix products, TFLOP | 1,182 | 1,182 | 1.00 |" in lines
  assert "  bf16[9,200]" in captured.out
  assert lines[-1].startswith("fits: needs 4.80 GiB, 14.96 GiB a step may use on a v5e (15.75 less")


def test_the_command_prints_settings_to_add(compiler, tmp_path, capsys):
  compiler.block = 1.0
  path = write_config(tmp_path, config())
  assert main(["--config", str(path), "--topology", "v5e:2x4"]) == 1
  out = capsys.readouterr().out
  assert "does not fit: needs at least 48.00 GiB" in out
  assert "the cheapest change that fits: --train.remat full\n" in out
  assert out.splitlines()[-1].startswith("fits: needs 12.00 GiB")


def test_json_is_one_object(compiler, tmp_path, capsys):
  compiler.block = 1.0
  path = write_config(tmp_path, config())
  arguments = ["--config", str(path), "--topology", "v5e:2x4", "--json", "--compare", "hc"]
  assert main(arguments) == 1
  result = json.loads(capsys.readouterr().out)
  assert (result["fits"], result["cost"], result["seconds"]) == (False, None, {})
  assert result["needed_bytes"] == 48 * GIB
  assert result["compare"]["config"]["model"]["mixer"]["kind"] == "hc"
  assert result["suggestion"]["settings"] == {"train.remat": "full"}
  fitting = result["suggestion"]["plan"]
  assert fitting["fits"]
  assert fitting["config"]["train"]["remat"] == "full"
  assert fitting["cost"]["collectives"]["all-gather"]["count"] == 12
  assert fitting["cost"]["arrays"] == [
    {"array": "bf16[9,200]", "count": 7, "bytes": 3600, "padded_bytes": 8192}
  ]
  assert fitting["seconds"]["products"] == pytest.approx(6)


def compiled_config(blocks, mixer="preln", **train):
  run = with_model(tiny_config(mixer, compute_dtype="bfloat16", **train), width=128, heads=1)
  return with_model(run, blocks=blocks, mlp_width=256)


def measured(run, fsdp):
  mesh = make_mesh(MeshConfig(data=8 // fsdp, fsdp=fsdp), topology_devices("v5e:2x4"))
  return measuring.measure(run, mesh).cost


def test_the_real_compiler_agrees_with_shapes_and_products():
  run = compiled_config(1)
  found = measured(run, 8)
  halves = [
    state_bytes(dataclasses.replace(run, mesh=MeshConfig(data=8 // n, fsdp=n)), "v5e:2x4")
    for n in (4, 8)
  ]
  assert halves[0] == pytest.approx(2 * halves[1], rel=0.02)  # norms are on every chip
  assert found.state_bytes == pytest.approx(halves[1], rel=0.03)  # a batch and tiles more
  weights = 4 * 128 * 128 + 3 * 128 * 256 + 384 * 128
  assert found.flops == 6 * 32 * (weights + 2 * 128 * 32)  # 32 tokens on a chip
  assert {"all-gather", "reduce-scatter"} <= set(found.exchanges)
  assert found.temporary_bytes < 2**25  # nothing of this size needs main memory for long
  assert found.hbm_bytes > 0
  assert found.cycles > 0


@pytest.mark.slow
def test_the_compiled_state_halves_and_the_depth_follows_a_line():
  state = {fsdp: measured(compiled_config(1), fsdp).state_bytes for fsdp in (2, 4, 8)}
  assert state[2] == pytest.approx(2 * state[4], rel=0.03)
  assert state[4] == pytest.approx(2 * state[8], rel=0.03)
  costs = {b: measured(compiled_config(b, "ldm"), 8) for b in (1, 2, 3)}
  whole = {b: Measure(0, found) for b, found in costs.items()}
  _, expected = extrapolate((1, 2), [whole[1], whole[2]], 3)
  assert expected.flops == pytest.approx(costs[3].flops, rel=0.01)
  assert expected.state_bytes == pytest.approx(costs[3].state_bytes, rel=0.01)


@pytest.mark.slow
def test_parts_cost_the_same_products():
  flops = [measured(with_batch(compiled_config(1, accumulate=n), 32), 8).flops for n in (1, 4)]
  assert flops[0] == flops[1]


def with_batch(run, rows):
  return dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=rows))
