"""Models on the Hugging Face Hub, by the name ORG/NAME or ORG/NAME@REVISION."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from protocol.errors import NotFound, Unavailable

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?", re.ASCII)
#: The files that Baton reads; repositories hold the weights in further formats.
_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a name on the Hub."""
    return _NAME.fullmatch(name) is not None


def fetch_from_hub(name: str, folder: Path) -> None:
    """Download the files of a model into `folder`, continuing what an earlier call left there.

    Raises NotFound when the Hub has no such model or revision for this user, Unavailable when the
    download fails. HF_TOKEN and HF_ENDPOINT work as for other programs.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise Unavailable("fetching needs: pip install huggingface_hub", param="model") from error
    repository, _, revision = name.partition("@")
    try:
        snapshot_download(
            repository,
            revision=revision or None,
            local_dir=folder,
            allow_patterns=list(_FILES),
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise NotFound(
            f"the Hub has no model {name!r}, or only for users with access: then set HF_TOKEN",
            param="model",
        ) from error
    except (OSError, ValueError) as error:  # connection, HTTP status, disk
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Unavailable(
            f"fetching {name} failed: {reason[0]}. The same command continues the download",
            param="model",
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's record of the download
