"""Make the files of the tiny model that ships in the package: tokenizer, chat template, model
config.

Run `python scripts/make_tokenizer.py [FOLDER]`; the same files come out each time, byte for byte.
Everything that the tokenizer learns from is written below. No weights are made here: training makes
those.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512
PAD, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant", "tool")
TARGET = Path(__file__).resolve().parent.parent / "src" / "fledge" / "models" / "tiny"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PROSE = """
A young bird that has just grown the feathers it needs for flight is called a fledgling. It does not
fly well on the first day. It jumps from the edge of the nest, falls a little, beats its wings, and
lands in the grass. Then it tries again. Nobody tells the bird how to move each feather. The air
answers every attempt: this one kept you up, this one did not. After many attempts the good
movements stay and the others go away.

A small language model can learn in the same way. It reads a question, writes an answer, and gets a
number back. The number is called the reward. When the answer is right the reward is one, and when
the answer is wrong the reward is zero. The model writes several answers to the same question, and
those that did better than the others become more likely. That is all there is to it, but each part
has to be exact. If the numbers are wrong, or if the model that writes is not the model that learns,
then nothing is learned, and nobody will notice for a long time.

What is the sum of these numbers? Please give the answer only. Add the first number to the second
number. The result is what you get when you count them together. How many are there? Let us think
about it step by step. First we add the ones, then we carry, then we add the tens. If there is
nothing to carry we write the digits and stop.

You are a helpful assistant. You read what the user says and you reply in a few words. When you do
not know, say that you do not know. When you are done, stop. A tool can look something up for you;
the system tells you which tools there are.

Today we go to the shop. There are eight apples on the table and six more in the box. My sister
takes three of them, and her friend brings two from his own garden. How many do we have now? We
could count them all again, but it is faster to start from what we knew before and change only what
has changed. Is it higher or lower than you thought? Yes, it is higher. No, it is lower. That was
right.

The old man who lives by the river has seen many years come and go. He says that people used to work
through the night and rest during the day, because the water was too cold for them in the morning.
Some of his stories are true and some may be false, and even he cannot always say which is which.
Still, children come from all over the town to hear how the world was made, where the wind sleeps,
and why the moon follows you home. "Thank you," they say when it gets dark, "we will be back!"

A good test is short. It says what should happen, makes it happen, and fails when something else
did. Between two ways to write the same thing, take the one that another person will understand
without help. Most of the time the simple way is also the one that works. If you must choose between
being fast and being right, be right first; then make it fast, and check that it is still right.

Hello! How are you today? I am fine, thank you. Could you tell me the name of this bird? I think it
is an owl, but I would like to know what you think about it. Look at its eyes: they are very large,
so it can see well at night. Please write one word, or a number, or just say: I don't know.
"""


def corpus() -> Iterator[str]:
    """The prose, sums in several wordings, and chat headers often enough that each role is one
    token.
    """
    for paragraph in PROSE.strip().split("\n\n"):
        yield " ".join(paragraph.split())
    for a, b in ((3, 4), (12, 30), (7, 58), (41, 9), (66, 25), (90, 80)):
        yield f"{a}+{b}={a + b}"
        yield f"What is {a} plus {b}? The answer is {a + b}."
        yield f"Add {a} and {b}. The sum is {a + b}.\n"
    for _ in range(100):
        for role in ROLES:
            yield f"{role}\n"


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text survives the round trip, and each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "pad_token": PAD,
        "eos_token": TURN_END,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "dtype": "float32",
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    for name, content in (
        ("tokenizer.json", json.loads(tokenizer.to_str())),
        ("tokenizer_config.json", tokenizer_config()),
        ("config.json", model_config(tokenizer)),
    ):
        text = json.dumps(content, indent=1, ensure_ascii=True) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
