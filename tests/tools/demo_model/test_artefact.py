"""Tests of the shipped demo model: size of its directory, tokenizer, chat template, weights, and
model card."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from tools.demo_model.card import card
from tools.demo_model.corpus import conversations
from tools.demo_model.evaluate import measure
from tools.demo_model.export import config_json, tokenizer_config_json
from tools.demo_model.generate import Speaker, greedy
from tools.demo_model.model import Cache, Llama, ModelConfig
from tools.demo_model.packing import batches
from tools.demo_model.tokenizer import CHAT_TEMPLATE, SPECIALS, encode_conversation

DEMO = Path(__file__).parents[3] / "triolet" / "demo"
TEXTS = (
    "Tell me a story about a dragon named Mia.",
    "  two  spaces\tand\n\nlines \n",
    "17 + 26 = 43, 1234567890",
    "h-e-l-l-o it's don't 'quoted' \"double\"",
    "naïve façade — “quotes” … ½",
    "日本語 العربية Привет 😀👩‍👩‍👧 \u200b\ufeff",
    "\x00\x01\x7f\x80 control",
    "<|user|> is only text until the server says so"[8:],
    "",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer of the shipped model."""
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    """The shipped model."""
    return Speaker(DEMO)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_every_code_point_of_two_planes_survives(tokenizer: Tokenizer) -> None:
    for start in range(0x20, 0x1F9FF, 997):
        text = "".join(chr(c) for c in range(start, start + 40) if not 0xD800 <= c < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_digits_stand_alone_and_specials_come_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("123", add_special_tokens=False).tokens == ["1", "2", "3"]
    assert [tokenizer.id_to_token(i) for i in range(len(SPECIALS))] == list(SPECIALS)
    assert tokenizer.encode("hello").ids[0] == 0


def test_spelled_letters_are_one_token_each(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("w-x-y-z", add_special_tokens=False).tokens == ["w", "-x", "-y", "-z"]


def test_the_template_renders_what_training_read(tokenizer: Tokenizer) -> None:
    template = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    for talk in islice(conversations(21), 60):
        messages = [{"role": "system", "content": talk.system}] if talk.system else []
        for exchange in talk.exchanges:
            messages.append({"role": "user", "content": exchange.user})
            messages.append({"role": "assistant", "content": exchange.reply})
        text = template.render(messages=messages, add_generation_prompt=False)
        assert (
            tokenizer.encode(text, add_special_tokens=False).ids
            == (encode_conversation(tokenizer, talk)[0])
        )


def test_the_template_takes_text_parts_and_ends_with_the_assistant() -> None:
    template = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    parts = [{"type": "text", "text": " Hi "}, {"type": "image_url", "image_url": {}}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|bos|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
    )


def test_the_directory_is_small_enough_to_ship() -> None:
    total = sum(path.stat().st_size for path in DEMO.iterdir() if path.is_file())
    assert total <= 12_000_000


def test_the_configs_are_those_that_export_writes() -> None:
    assert json.loads((DEMO / "config.json").read_text()) == config_json(ModelConfig())
    saved = json.loads((DEMO / "tokenizer_config.json").read_text())
    assert saved == tokenizer_config_json(ModelConfig())


def test_the_weights_are_bfloat16_under_llamas_names() -> None:
    expected = {name: list(w.shape) for name, w in Llama(ModelConfig()).state_dict().items()}
    with safe_open(DEMO / "model.safetensors", "pt") as weights:
        found = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert found == expected
    assert kinds == {"BF16"}


def test_the_card_states_the_measured_accuracy() -> None:
    assert (DEMO / "README.md").read_text() == card(DEMO)


@pytest.mark.slow
def test_it_answers(speaker: Speaker) -> None:
    asked = ["Hello!", "What is 3 + 4?", "What is the capital of France?", "Spell cat."]
    replies = speaker.replies([[{"role": "user", "content": text}] for text in asked], 60)
    assert "Hello" in replies[0] or "Hi" in replies[0]
    assert "3 + 4 = 7" in replies[1]
    assert "Paris" in replies[2]
    assert "c-a-t" in replies[3]


@pytest.mark.slow
@pytest.mark.parametrize("skill", ["stories", "facts", "spelling", "reversing", "counting"])
def test_it_does_what_its_card_names(skill: str) -> None:
    assert measure(DEMO, 20, only=skill)[skill]["right"] >= 16


@pytest.mark.slow
def test_the_cache_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Llama(ModelConfig(num_hidden_layers=2)).eval()
    ids = torch.randint(0, 2048, (1, 12))
    with torch.inference_mode():
        whole = model.hidden(ids)
        cache = Cache()
        model.hidden(ids[:, :11], cache=cache)
        mask = torch.ones(1, 1, 1, 12, dtype=torch.bool)
        last = model.hidden(ids[:, 11:], mask, torch.tensor([[11]]), cache)
    torch.testing.assert_close(whole[:, 11:], last, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Llama(ModelConfig(num_hidden_layers=2)).eval()
    prompts = [[0, 9, 10, 11], [0, 300, 12, 13, 900, 7, 8]]
    together = greedy(model, prompts, 5)
    assert together == [greedy(model, [prompt], 5)[0] for prompt in prompts]


def test_batches_hold_whole_rows_and_learn_replies_only(tokenizer: Tokenizer) -> None:
    ids, targets, learned = next(batches(tokenizer, 1, 256, 4))
    assert ids.shape == targets.shape == learned.shape == (4, 256)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert 0.3 < learned.float().mean() < 0.95
    assert not (learned & (targets == 0)).any()
