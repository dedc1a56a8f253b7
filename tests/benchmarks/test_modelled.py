"""The benchmark of modelled steps adds up schedules, and takes the difference of two depths."""

import json
from pathlib import Path

import jax
import pytest

from ldm_jax.benchmarks import modelled
from ldm_jax.benchmarks.residuals import kept_bytes_per_token
from ldm_jax.benchmarks.step_model import StepModel, add_up, chip_config
from ldm_jax.config import load_config, with_section
from ldm_jax.errors import InputError
from ldm_jax.hlo.program import parse
from ldm_jax.hlo.schedule import Schedules, kernel_cost
from ldm_jax.sharding import make_mesh
from ldm_jax.tpu import CHIPS
from tests.rig import ROOT, tiny_config, with_model

FOLDER = ROOT / "tests" / "hlo" / "schedules"
TEXTS = tuple(
  (FOLDER / f"nested_loops_{part}.txt").read_text() for part in ("bundles", "utilization")
)
PROGRAM = """
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128] parameter(0)
  %fold.3 = f32[8,128] custom-call(%x), custom_call_target="tpu_custom_call"
  %start = (f32[8,128], f32[8,128], u32[]) copy-start(%fold.3), "estimated_cycles":"70000"
  %done = f32[8,128] copy-done(%start)
  %fusion.1 = f32[8,128] negate(%done), backend_config={"estimated_cycles":"3000"}
  ROOT %copy.2 = f32[8,128] copy(%fusion.1), backend_config={"estimated_cycles":"500"}
}
"""


def test_kernels_and_fusions_are_read_alike_and_the_rest_is_estimated():
  chip = CHIPS["v5e"]
  schedules = Schedules({"fold.3": TEXTS, "fusion.1": TEXTS})
  kernels, scheduled, estimated, unread = add_up(parse(PROGRAM), schedules, chip)
  one = kernel_cost(*TEXTS).seconds(chip)
  assert kernels == {"fold": one}
  assert unread == 500 / chip.clock
  assert scheduled == pytest.approx(one + unread)
  assert estimated == pytest.approx(3500 / chip.clock)
  with pytest.raises(ValueError, match="no schedule of fold"):
    add_up(parse(PROGRAM), Schedules({"fusion.1": TEXTS}), chip)


def test_what_a_block_keeps_for_the_backward_pass():
  config = with_section(tiny_config("preln", remat="full"), "data", sequence_length=24)
  mesh = make_mesh(config.mesh, jax.devices()[:1])

  def per_block(kind, **mixer):
    changed = with_model(config, mixer=config.model.mixer.__class__(kind=kind, **mixer))
    kept = [kept_bytes_per_token(with_model(changed, blocks=n), mesh) for n in (1, 2)]
    return (kept[1] - kept[0]) / (4 * config.model.width)

  assert per_block("preln") == 1  # what enters the block
  # Streams, and the outputs of two sublayers, that the gradients of the writes need.
  assert per_block("mhc", streams=4) == 4 + 2


def test_a_config_is_cut_to_a_chip():
  config = chip_config(load_config(ROOT / "configs" / "ldm_1_5b.py"), 2)
  assert (config.model.blocks, config.model.width) == (2, 2048)
  assert config.data.batch_size * config.data.sequence_length == 8192
  assert config.train.remat == "full"


def test_the_command_takes_the_difference_of_two_depths(monkeypatch, capsys):
  def model_step(config, chip, dump):
    blocks, ldm = config.model.blocks, config.model.mixer.kind == "ldm"
    fold = {"fold": 1e-3 * blocks} if ldm else {}
    sizes = dict(flops=1e9 * blocks, hbm_bytes=819e6 * blocks, temporary_bytes=2**20 * blocks)
    return StepModel(
      fold, 1.0 + 2e-3 * blocks, 1.0 + 4e-3 * blocks, 0.0, **sizes, compile_seconds=3
    )

  monkeypatch.setattr(modelled, "model_step", model_step)
  monkeypatch.setattr(modelled, "kept_bytes_per_token", lambda config, mesh: 4096.0 * 2)
  monkeypatch.setattr(modelled, "topology_devices", lambda name: jax.devices())
  monkeypatch.setattr(jax.config, "update", lambda *setting: None)
  configs = [str(ROOT / "configs" / f"{kind}_1_5b.py") for kind in ("preln", "ldm")]
  assert modelled.main(["--chip", "v5e", "--config", *configs, "--json"]) == 0
  preln, ldm = json.loads(capsys.readouterr().out)["per_block"]
  assert preln["seconds"] == pytest.approx(2e-3)
  assert ldm["seconds"] == pytest.approx(3e-3)
  assert ldm["seconds_ratio"] == pytest.approx(1.5)
  assert ldm["estimated_seconds_ratio"] == pytest.approx(5 / 4)
  assert ldm["least_seconds"] == pytest.approx(1e-3)
  assert ldm["kept_vectors"] == 0  # the same at both depths
  assert modelled.main(["--chip", "v5e", "--config", *configs]) == 0
  assert capsys.readouterr().out.splitlines()[3].split()[:4] == ["v5e", "ldm_1_5b", "3.00", "1.50"]
  for wrong in (["--blocks", "4", "2"], ["--config", configs[0], str(Path(configs[0]))]):
    with pytest.raises(InputError, match=wrong[0]):
      modelled.main(wrong)
