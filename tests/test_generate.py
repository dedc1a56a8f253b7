"""Texts from a run: the Python function, the command line and what it refuses."""

import io
import itertools
import json

import numpy as np
import pytest

from ldm_jax import TransformerLM
from ldm_jax.config import to_json
from ldm_jax.data import ByteTokenizer
from ldm_jax.data.prepare import main as prepare
from ldm_jax.decoding import Sampling, decoder, stream_texts, text_decoder
from ldm_jax.errors import InputError
from ldm_jax.generate import generate, main
from tests.rig import random_params, refusal, save_run, tiny_config, with_model, with_section


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  config = with_model(tiny_config("preln"), blocks=1)
  return save_run(tmp_path_factory.mktemp("run"), config)


def printed(capsys, *arguments):
  assert main(list(map(str, arguments))) == 0
  return capsys.readouterr().out


def test_the_command_prints_what_the_function_returns(run, capsys, tmp_path):
  config = with_model(tiny_config("preln"), blocks=1)
  model = TransformerLM(config.model)
  texts = ["def f", "für €"]
  results = generate(
    model, random_params(model), ByteTokenizer(), texts, 8, context=32, top_p=0.9, seed=3
  )
  file = tmp_path / "prompt.txt"
  file.write_text(texts[1])
  options = ["--max-new-tokens", 8, "--temperature", 1, "--top-p", 0.9, "--seed", 3]
  given = ["--workdir", run, "--prompt", texts[0], "--prompt-file", file, *options]
  lines = printed(capsys, *given, "--json").splitlines()
  expected = [{"step": 0, **result._asdict()} for result in results]
  assert [json.loads(line) for line in lines] == expected
  blocks = [f"--- {result.prompt}{result.text}\n" for result in results]
  assert printed(capsys, *given) == "".join(blocks)
  alone = ["--workdir", run, "--prompt", texts[0], *options]
  assert printed(capsys, *alone) == f"{texts[0]}{results[0].text}\n"


def test_a_prompt_comes_from_the_standard_input(run, capsys, monkeypatch):
  stream = io.TextIOWrapper(io.BytesIO(b"import"))
  monkeypatch.setattr("sys.stdin", stream)
  out = printed(capsys, "--workdir", run, "--prompt", "-", "--max-new-tokens", 1, "--json")
  assert json.loads(out)["prompt"] == "import"


def test_what_is_printed_stays_while_characters_come_byte_by_byte(monkeypatch):
  ids = [*"a€b🙂".encode(), 0xFF, *"ü".encode(), 0xE2, 0x82]

  def stream(self, prompts, *_):
    for count in range(1, len(ids) + 1):
      yield decoder.Look([ids[:count]], [False])

  monkeypatch.setattr(decoder.Decoder, "stream", stream)
  model = TransformerLM(tiny_config("preln").model)
  decode = text_decoder(model, {}, ByteTokenizer(), 32)
  looks = stream_texts(decode, ByteTokenizer(), ["x"], len(ids), Sampling())
  texts = [continuation.text for (continuation,) in looks]
  for before, after in itertools.pairwise(texts):
    assert after.startswith(before)
  assert texts[1] == "a"
  assert texts[3] == "a€"
  assert texts[-1] == "a€b🙂�ü�"


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ([], "--prompt is missing"),
    (["--prompt", ""], "--prompt : the prompt is empty"),
    (["--prompt", "a", "--temperature", -1], "--temperature -1"),
    (["--prompt", "a", "--top-p", 0], "--top-p 0"),
    (["--prompt", "a", "--top-k", 0], "--top-k 0"),
    (["--prompt", "a", "--max-new-tokens", 0], "--max-new-tokens 0"),
    (["--prompt", "a", "--seed", -1], "--seed -1"),
    (["--prompt", "a", "--step", 7], "step 7 is not in checkpoints, which holds steps 0"),
    (
      ["--prompt", "abc", "--max-new-tokens", 30],
      r"3 tokens and --max-new-tokens 30.*of 32 tokens",
    ),
    (["--prompt", "a" * 32], "32 tokens and --max-new-tokens 1"),
    (["--prompt", "a\udcff"], "--prompt: character 1 is a byte that is not UTF-8"),
    (["--prompt-file", "nowhere"], "--prompt-file nowhere: No such file"),
    (["--prompt", "a", "--data", "nowhere"], "nowhere is not a prepared data set"),
  ],
  ids=str,
)
def test_what_cannot_be_is_refused_by_its_option(run, options, message):
  with pytest.raises(InputError, match=message):
    main(["--workdir", str(run), *map(str, options)])


def test_a_file_that_is_no_text_is_refused_by_name(run, tmp_path):
  (tmp_path / "bad.txt").write_bytes(b"ab\xff")
  command = ["-m", "ldm_jax.generate", "--workdir", run, "--prompt-file", tmp_path / "bad.txt"]
  line = refusal(*command)
  assert line.endswith("bad.txt: byte 2 is not UTF-8; give a text in that encoding")
  (tmp_path / "empty.txt").write_bytes(b"")
  with pytest.raises(InputError, match=r"empty\.txt: the prompt is empty"):
    main(["--workdir", str(run), "--prompt-file", str(tmp_path / "empty.txt")])


def test_the_tokenizer_is_that_of_the_prepared_data_wherever_they_lie(tmp_path, capsys):
  (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(30)))
  prepare(
    [
      "--input",
      str(tmp_path / "texts.jsonl"),
      "--output",
      str(tmp_path / "data"),
      "--held-out-one-in",
      "5",
    ]
  )
  config = with_model(tiny_config("preln"), blocks=1)
  config = with_section(config, "data", source="prepared", path=str(tmp_path / "data"))
  workdir = save_run(tmp_path / "run", config)
  options = ["--workdir", workdir, "--prompt", "a", "--max-new-tokens", 2, "--json"]
  capsys.readouterr()
  found = printed(capsys, *options)
  assert printed(capsys, *options, "--data", tmp_path / "data") == found
  (tmp_path / "data").rename(tmp_path / "moved")
  with pytest.raises(InputError, match=r"data\.path = .*give it with --data"):
    main(list(map(str, options)))
  with pytest.raises(InputError, match="is not what the run was made with"):
    main([*map(str, options), "--data", str(tmp_path / "moved")])
  synthetic = with_section(config, "data", source="synthetic", path=None)
  (workdir / "config.json").write_text(to_json(synthetic))
  with pytest.raises(InputError, match="stand for no text"):
    main(list(map(str, options)))
  assert np.isfinite(json.loads(found)["ids"]).all()
