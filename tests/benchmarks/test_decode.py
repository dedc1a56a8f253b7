"""The benchmark of decoding takes configs, mixers and forms against one baseline."""

import json

import pytest

from ldm_jax.benchmarks import decode
from ldm_jax.errors import InputError
from tests.rig import tiny_config, with_model, write_config


class Timer:
  """Six tokens a second for PreLN, else three."""

  def __init__(self, config, rows, tokens):
    assert (rows, tokens) == (2, 9)
    self.median = 6.0 if config.model.mixer.kind == "preln" else 3.0

  def measure(self):
    return self.median


def test_the_decode_command_compares_mixers_and_forms(monkeypatch, capsys):
  monkeypatch.setattr(decode, "DecodeTimer", Timer)
  options = ["--json", "--rows", "2", "--tokens", "9", "--rounds", "1"]
  assert decode.main([*options, "--mixers", "hc", "ldm", "--forms", "auto", "history"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["ratios"] == {"preln_tiny": 1.0, "hc": 0.5, "ldm": 0.5, "ldm history": 0.5}
  assert found["tokens_per_second"]["preln_tiny"] == 6.0
  with pytest.raises(InputError, match="--rows must be at least 1"):
    decode.main(["--rows", "0"])


@pytest.mark.slow
def test_the_decode_benchmark_measures_tokens_of_all_rows(tmp_path, capsys):
  path = write_config(tmp_path, with_model(tiny_config("preln"), blocks=1))
  options = ["--baseline", str(path), "--mixers", "preln", "--rounds", "2", "--rows", "2"]
  with pytest.raises(InputError, match="--max-new-tokens 40"):
    decode.main([*options, "--tokens", "40"])
  assert decode.main([*options, "--tokens", "4"]) == 0
  out = capsys.readouterr().out
  assert "2 rows of 4 tokens, median of 2" in out
  assert out.count("tokens/s") == 2
