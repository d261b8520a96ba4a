"""Small tokenizers and the text half of a model folder, made on the spot."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away from the hound",
    "user assistant system helpful answer question hello world how are you today",
    "DEFGHIJ stop User: Assistant: 0123456789 {} [] ()\n\t",
    "été naïve Straße 你好世界 こんにちは 안녕하세요 🙂 👩‍👩‍👧‍👦 🇩🇪 ﷽ ते",
]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
#: Like CHATML, but requires alternating roles and begins with BOS.
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(*, bos: bool = False, vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE like GPT-2's. With `bos`, `<|im_start|>` is put before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """A BPE with spaces as characters and bytes as fallback, like Llama 2's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = sorted(set("".join(CORPUS[:2])) - {" "})
    vocab = {piece: i for i, piece in enumerate([*pieces, *letters, "▁t", "▁th", "▁the"])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_model_text(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    template: str | None = CHATML,
    template_in_config: bool = False,
    eos: dict[str, object] | None = None,
    context: int = 512,
    vocab_size: int = 512,
) -> Path:
    """The files a router reads. `eos` may set tokenizer, config and generation to different ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    eos = eos or {"tokenizer": "<|im_end|>", "config": 2, "generation": 2}
    config = {"vocab_size": vocab_size, "max_position_embeddings": context}
    settings: dict[str, object] = {"bos_token": "<|im_start|>", "eos_token": eos["tokenizer"]}
    if template is not None and template_in_config:
        settings["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name, content in (
        ("config.json", config | {"eos_token_id": eos["config"]}),
        ("generation_config.json", {"eos_token_id": eos["generation"]}),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def smollm2_folder() -> Path | None:
    """The real small model, if `baton models get smollm2-135m` has been run."""
    home = Path(os.environ.get("BATON_HOME", "~/.cache/baton")).expanduser()
    folder = home / "models" / "smollm2-135m"
    return folder if (folder / "tokenizer.json").is_file() else None
