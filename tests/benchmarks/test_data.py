"""The benchmark of the input pipeline measures loading, and training with and without it."""

import json
import sys

import pytest

from ldm_jax.benchmarks import data
from ldm_jax.errors import InputError
from tests.rig import tiny_config, with_model, write_config


@pytest.mark.slow
def test_the_data_command_reports_every_source(monkeypatch, capsys, tmp_path):
  config = with_model(tiny_config("preln"), blocks=1)
  write_config(tmp_path, config)
  command = ["data", "--config", str(tmp_path / "config.py"), "--seconds", "0.05", "--json"]
  monkeypatch.setattr(sys, "argv", [*command, "--rounds", "1"])
  assert data.main() == 0
  result = json.loads(capsys.readouterr().out)
  labels = {"stdlib, 0 workers", "synthetic, 0 workers"}
  for numbers in (result["tokens_per_second"], result["training_ratio"]):
    assert numbers.keys() == labels
    assert all(number > 0 for number in numbers.values())
  for option, value in (("--rounds", "-1"), ("--seconds", "0")):
    monkeypatch.setattr(sys, "argv", [*command, option, value])
    with pytest.raises(InputError, match=option):
      data.main()
