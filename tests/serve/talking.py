"""The built-in model with a tokenizer of all ASCII characters and marks of calls and reasoning, and longer sequences.

It adds as before, and under a grammar it writes what the grammar leaves open at random. So agents can run against it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from weft.models.builtin import PATH

LENGTH = 4096
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Of the template: a conversation's last text alone, so that it adds; a prompt's end opens or closes reasoning if asked to.
TEMPLATE = (
    "{% if tools and false %}{{ tools | tojson }}{% endif %}"
    "{% if messages[-1].content %}{{ messages[-1].content }}{% else %}1+1={% endif %}"
    "{% if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% if false %}<tool_call></tool_call></think>{% endif %}"
)


def write(directory: Path, template: str = TEMPLATE) -> Path:
    """Write its checkpoint to a new directory."""
    shutil.copytree(PATH, directory)
    known = json.loads((PATH / "tokenizer.json").read_text())["model"]["vocab"]
    letters = {letter: known[letter] for letter in "0123456789+="}
    of_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    further = [of_byte.pre_tokenize_str(chr(code))[0][0] for code in (10, *range(32, 127))]
    ids = iter(range(len(known), 128))
    vocabulary = {**letters, **{letter: next(ids) for letter in further if letter not in letters}}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<pad>": 0, "<eos>": 1, "<unk>": 2}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = of_byte, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<eos>", "<unk>")])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LENGTH}))
    (directory / "chat_template.jinja").write_text(template)
    return directory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="new")
    print(write(parser.parse_args().directory))
