"""The benchmark of modelled steps adds up operations and takes the difference of two depths."""

import json
from pathlib import Path

import jax
import pytest

from ldm_jax.benchmarks import modelled
from ldm_jax.benchmarks.residuals import kept_bytes_per_token
from ldm_jax.benchmarks.step_model import Kernel, Rest, StepModel, add_up, as_run, chip_config
from ldm_jax.config import load_config, with_section
from ldm_jax.errors import InputError
from ldm_jax.hlo.program import parse
from ldm_jax.sharding import make_mesh
from ldm_jax.tpu import CHIPS
from tests.rig import ROOT, tiny_config, with_model

PROGRAM = """
%product (a: bf16[256,512], b: bf16[512,128]) -> bf16[256,128] {
  %a = bf16[256,512] parameter(0)
  %b = bf16[512,128] parameter(1)
  ROOT %c = bf16[256,128] convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[256,512], w: bf16[512,128]) -> bf16[256,128] {
  %x = bf16[256,512] parameter(0)
  %w = bf16[512,128] parameter(1)
  %fold.3 = bf16[256,512] custom-call(%x), custom_call_target="tpu_custom_call"
  %start = (bf16[256,512]{1,0:S(1)}, bf16[256,512], u32[]) copy-start(%fold.3)
  %done = bf16[256,512]{1,0:S(1)} copy-done(%start)
  %near = bf16[512,128]{1,0:S(1)} negate(%w), backend_config={"estimated_cycles":"3000"}
  ROOT %far = bf16[256,128]{1,0:S(1)} fusion(%done, %near), calls=%product
}
"""


def test_what_is_no_kernel_takes_its_products_or_its_traffic():
  chip = CHIPS["v5e"]
  rest = add_up(parse(PROGRAM), chip)
  # The copy reads what the kernel wrote, `near` the weights; the product is all on the chip.
  copy, near = 2 * 256 * 512, 2 * 512 * 128
  assert rest.bytes == copy + near
  product = 2 * 256 * 512 * 128 / chip.flops
  assert rest.least == pytest.approx((copy + near) / chip.hbm_rate + product)
  assert rest.estimated == 3000 / chip.clock


def test_kernels_count_as_often_as_the_program_runs_them():
  traced = {"fold": Kernel(2, 4e-3, 100.0), "gone": Kernel(1, 1.0, 1.0)}
  assert as_run(traced, {"fold": 3}) == {"fold": Kernel(3, 6e-3, 150.0)}
  with pytest.raises(ValueError, match="a kernel other"):
    as_run(traced, {"other": 1})


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
  # The outputs of two sublayers, but not x, and numbers by group: keys and weights of both, and P.
  numbers = 2 * (1 + 1) + (1 + 1)
  history = per_block("ldm", groups=1, key_dim=1, latent_dim=8, form="history")
  assert history == pytest.approx(2 + numbers / config.model.width)


def test_a_config_is_cut_to_a_chip():
  config = chip_config(load_config(ROOT / "configs" / "ldm_1_5b.py"), 2)
  assert (config.model.blocks, config.model.width) == (2, 2048)
  assert config.data.batch_size * config.data.sequence_length == 8192
  assert config.train.remat == "full"


def test_the_command_takes_the_difference_of_two_depths(monkeypatch, capsys):
  def model_steps(configs, chip):
    steps = []
    for config in configs:
      blocks, ldm = config.model.blocks, config.model.mixer.kind == "ldm"
      fold = {"fold": Kernel(blocks, 1e-3 * blocks, 1e9 * blocks)} if ldm else {}
      rest = Rest(1.0 + 4e-3 * blocks, 1.0 + 2e-3 * blocks, 1e9 * blocks)
      steps.append(StepModel(fold, rest, 2**20 * blocks, 3.0))
    return steps

  monkeypatch.setattr(modelled, "model_steps", model_steps)
  monkeypatch.setattr(modelled, "chip_mesh", lambda chip: None)
  monkeypatch.setattr(modelled, "kept_bytes_per_token", lambda config, mesh: 4096.0 * 2)
  monkeypatch.setattr(jax.config, "update", lambda *setting: None)
  configs = [str(ROOT / "configs" / f"{kind}_1_5b.py") for kind in ("preln", "ldm")]
  assert modelled.main(["--chip", "v5e", "--config", *configs, "--json"]) == 0
  preln, ldm = json.loads(capsys.readouterr().out)["per_block"]
  assert preln["seconds"] == pytest.approx(2e-3)
  assert ldm["seconds"] == pytest.approx(3e-3)
  assert ldm["seconds_ratio"] == pytest.approx(1.5)
  assert ldm["estimated_seconds_ratio"] == pytest.approx(5 / 4)
  assert (preln["moved_bytes"], ldm["moved_bytes"]) == (1e9, 2e9)
  assert ldm["kernels"]["fold"]["runs"] == 1
  assert ldm["kept_vectors"] == 0  # the same at both depths
  assert modelled.main(["--chip", "v5e", "--config", *configs]) == 0
  assert capsys.readouterr().out.splitlines()[3].split()[:4] == ["v5e", "ldm_1_5b", "3.00", "1.50"]
  for wrong in (["--blocks", "4", "2"], ["--config", configs[0], str(Path(configs[0]))]):
    with pytest.raises(InputError, match=wrong[0]):
      modelled.main(wrong)
