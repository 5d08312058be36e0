"""Ed25519 signatures of recipes, with the keys of `ssh-keygen -t ed25519` and the package `cryptography`."""

import base64
import os
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store import read_json, write_json
from selfjudge.store.schema import RecipeSignature

SIGNATURE = "signature.json"
KEY_VARIABLE = "SELFJUDGE_RECIPE_KEY"
"""The variable that names a public key: recipes that it did not sign are then refused wherever one is loaded."""
_HOW = "`ssh-keygen -t ed25519 -f key -N ''` makes key and key.pub"


def find_key() -> Path | None:
    """The public key that SELFJUDGE_RECIPE_KEY names, if it names one."""
    return Path(key) if (key := os.environ.get(KEY_VARIABLE)) else None


def sign(folder: Path, digest: str, file: Path) -> None:
    """Write the signature of a recipe's digest."""
    key = read_key(file, "private")
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    signature = base64.b64encode(key.sign(_message(digest))).decode()
    write_json(folder / SIGNATURE, {"public_key": public, "signature": signature})


def check_signature(folder: Path, digest: str, file: Path | None) -> str:
    """Who signed the recipe; refused unless it was the public key in `file`. Without one it is not checked."""
    signed = (folder / SIGNATURE).is_file()
    if file is None:
        return "signed; the signature is not checked without a public key" if signed else "no signature (optional)"
    key = read_key(file, "public")
    if not signed:
        raise SelfJudgeError(f"{folder} is not signed: selfjudge tune --sign signs a recipe")
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(read_json(folder / SIGNATURE, RecipeSignature)["signature"]), _message(digest))
    except (InvalidSignature, ValueError):
        raise SelfJudgeError(f"{folder} was not signed with {file}, or was changed since") from None
    return f"signed with {file}"


def read_key(file: Path, kind: str) -> Any:
    """A `public` or `private` key; refused if it is of another kind, or locked by a passphrase."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization as keys
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SelfJudgeError("signatures need cryptography: pip install cryptography") from None
    try:
        raw = file.expanduser().read_bytes()
        key: Any = keys.load_ssh_public_key(raw) if kind == "public" else keys.load_ssh_private_key(raw, None)
        if not isinstance(key, ed25519.Ed25519PublicKey if kind == "public" else ed25519.Ed25519PrivateKey):
            raise ValueError("it is of another kind")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SelfJudgeError(f"{file} is not a {kind} Ed25519 key ({first_line(error)}): {_HOW}") from None
    return key


def _message(digest: str) -> bytes:
    return f"selfjudge recipe {digest}".encode()
