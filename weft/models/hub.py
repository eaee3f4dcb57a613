"""Directory of a checkpoint by its path, or by the name of a built-in model or of one in the hub.

weft downloads nothing: it reads the local cache of the Hugging Face hub.
"""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path

from weft.arguments import did_you_mean, quoted
from weft.errors import CheckpointError
from weft.models.builtin import PATHS
from weft.models.families import PUBLISHED
from weft.models.files import as_directory, check_directory

_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:@({_WORD}(?:/{_WORD})*))?")
# Files of a repository that weft reads, where it has them; a cache may lack all other files.
READ = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


def find_checkpoint(name: str | PathLike[str]) -> Path:
    """Directory of a checkpoint: a path, a built-in model's name, or OWNER/NAME or OWNER/NAME@REVISION.

    A path that exists is taken first. Built-in are "adder" and "adder-moe". Another one is read from the hub's cache, which is
    where `huggingface_hub` has it (HF_HUB_CACHE, HF_HOME). CheckpointError with the command that downloads what is missing.
    """
    directory, is_name = as_directory(name), isinstance(name, str) and not os.path.lexists(name)
    if is_name and name in PATHS:
        return PATHS[name]
    named = _NAME.fullmatch(name) if is_name else None
    if named is None or ".." in name:
        if is_name and name.lower() in PUBLISHED:
            raise CheckpointError(
                f"model={quoted(name)} names the sizes of a published model, without its weights: `weft bench model --model "
                f"{name.lower()}` times it, and --dummy-weights gives it random ones; for its answers pass a directory, or a "
                f"name of the Hugging Face hub, such as Qwen/Qwen3-0.6B"
            )
        check_directory(directory, did_you_mean(name, (*PATHS, *PUBLISHED)) if is_name else "")
        return directory
    return _snapshot(name, named[1], named[2])


def revision_of(directory: Path) -> str | None:
    """Commit of a directory in the hub's cache; None for another directory."""
    return directory.name if directory.parent.name == "snapshots" else None


def _snapshot(name: str, repository: str, revision: str | None) -> Path:
    # Not at the top: it takes 0.2 s.
    from huggingface_hub import constants, snapshot_download

    remedy = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
    try:
        snapshot = Path(
            snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=list(READ))
        )
    except (FileNotFoundError, ValueError) as error:  # ValueError: not a name of the hub, such as a--b/c
        part = getattr(error, "snapshot_path", None)
        what = f"no such directory, and no revision {revision or 'main'} of it in {constants.HF_HUB_CACHE}"
        what = f"{part} is not complete" if part else what
        raise CheckpointError(f"model={quoted(name)}: {what}; weft downloads nothing: type `{remedy}`") from None
    if missing := _missing(snapshot):
        raise CheckpointError(f"model={quoted(name)}: {snapshot} lacks {missing}; type `{remedy}`")
    return snapshot


def _missing(snapshot: Path) -> str:
    """First file that a snapshot lacks; "" if it is complete. Its files are links, also to missing blobs."""
    if broken := sorted(path.name for path in snapshot.iterdir() if not path.exists()):
        return broken[0]
    if not (snapshot / "config.json").exists():
        return "config.json"
    from weft.models.checkpoint import Checkpoint  # not at the top: it loads torch

    files = Checkpoint(snapshot).weight_files()
    if not files:
        return "model.safetensors and model.safetensors.index.json (weft reads no other weights)"
    return next((name for name in files if not (snapshot / name).exists()), "")
