"""The recipe: which rule at which γ for which pair and load, its certificate and its signature. Loads no torch.
recipe.json names the rule with all its numbers, and has the SHA-256 of every file beside it and of itself: who changes
one of them is noticed. What the files say is computed once more (`verify`), so that figures that do not follow from the
evidence are refused. Whoever rewrites the evidence, the attempt, the groups or the names together with all checksums is
found by the signature alone: of Ed25519, with the keys of `ssh-keygen -t ed25519` and the package `cryptography`."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.judge.config import JudgeConfig
from selfjudge.store import read_json, sha256, write_json
from selfjudge.store.schema import Certificate, RecipeFile, RecipeSignature
from selfjudge.tune.verify import CERTIFICATE, ROW, SHARED, check_bet, check_files, check_rules, hash_recipe

if TYPE_CHECKING:
    from selfjudge.models.pair import Pair

RECIPE, JUDGE = "recipe.json", "judge"
SIGNATURE = "signature.json"
KEY_VARIABLE = "SELFJUDGE_RECIPE_KEY"  # names a public key: recipes that it did not sign are then refused
_HOW = "`ssh-keygen -t ed25519 -f key -N ''` makes key and key.pub"
PAGE = "certificate.html"
FORMAT = 3  # version of recipe.json and certificate.json


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


@dataclass(frozen=True)
class Recipe:
    """A recipe in its folder."""

    folder: Path
    content: dict[str, Any]
    certificate: dict[str, Any]

    @classmethod
    def read(cls, folder: str | Path) -> Recipe:
        """The recipe of a folder that `tune` has finished, before it is verified."""
        folder = Path(folder).expanduser()
        if not (folder / RECIPE).is_file():
            unfinished = (folder / "settings.json").is_file()
            hint = "its tuning is not finished: give `resume`" if unfinished else "selfjudge tune makes one"
            raise SelfJudgeError(f"{folder} has no {RECIPE}: {hint}")
        content = read_json(folder / RECIPE)
        if content.get("format_version") != FORMAT:
            raise SelfJudgeError(f"{folder} was made by another version of selfjudge: tune again")
        return cls(folder, read_json(folder / RECIPE, RecipeFile), read_json(folder / CERTIFICATE, Certificate))

    @classmethod
    def load(cls, folder: str | Path) -> Recipe:
        """The recipe of a folder that `tune` has finished; refused if anything in it does not follow from the rest. If
        SELFJUDGE_RECIPE_KEY names a public key, one that it did not sign is refused, too."""
        return cls.read(folder).verified(find_key())

    def verified(self, key: Path | None = None) -> Recipe:
        """This recipe; refused unless all of `verify` holds."""
        for _ in self.verify(key):
            pass
        return self

    def verify(self, key: Path | None = None) -> Iterator[str]:
        """What was checked, a line each; an error of one line where something does not hold."""
        yield check_files(self.folder, self.content, self.certificate)
        name = self.content["judge"]
        judge = None if name is None else JudgeConfig.from_pretrained(self.folder / name)
        yield check_rules(self.folder, self.content, self.certificate, judge)
        yield check_bet(self.folder, self.certificate, judge)
        yield check_signature(self.folder, self.content["digest"], key)

    @property
    def rule(self) -> str:
        """The rule as text, with all its numbers."""
        return str(self.content["resolved"])

    @property
    def gamma(self) -> int:
        return int(self.content["gamma"])

    @property
    def judge(self) -> Path | None:
        """The folder of its judge, if its rule has one."""
        name = self.content["judge"] if RuleRequest(self.rule).needs_judge else None
        return None if name is None else self.folder / name

    @property
    def loads(self) -> list[int]:
        """Requests at a time that it has a rule and γ for: first its own, then the others."""
        return [row["load"] for row in (self.content, *self.content["more_loads"])]

    def at(self, load: int | None) -> Recipe:
        """The recipe for so many requests at a time, or the nearest number by ratio; None: its first."""
        nearest = 0 if load is None else min(range(len(self.loads)), key=lambda i: abs(math.log(self.loads[i] / load)))
        if not nearest:
            return self
        parts = []
        for content in (self.content, self.certificate):
            rows = [{name: content[name] for name in content["more_loads"][0]}, *content["more_loads"]]
            own = rows.pop(nearest)
            parts.append({**content, **own, "more_loads": rows})
        return Recipe(self.folder, *parts)

    @property
    def draft(self) -> str | None:
        """The draft's reference; None if it is the target's own."""
        content = self.content
        return None if content["pair"] == content["target"] else str(content["draft"])

    def check_pair(self, pair: Pair, warn: Callable[[str], None]) -> None:
        """Refuse another target, draft or tokenizer; warn if the certificate was measured with another dtype."""
        self.check_models(target=(pair.target_id, pair.target_sha256), draft=(pair.draft_id, pair.draft_sha256))
        self.check_tokenizer(pair.tokenizer)
        self.check_dtype(pair.dtype, warn)

    def check_dtype(self, dtype: str, warn: Callable[[str], None]) -> None:
        """Warn if the certificate was measured with another dtype."""
        if dtype != self.content["dtype"]:
            warn(f"{self.folder} was certified with {self.content['dtype']}, this is {dtype}: not covered by it")

    def check_models(self, **models: tuple[str, str]) -> None:
        """Refuse another `target` or `draft`, each given by its name and its hash."""
        for role, (name, digest) in models.items():
            known = self.content[f"{role}_sha256"]
            if known != digest if known and digest else self.content[role] != name:
                raise SelfJudgeError(
                    f"{self.folder} is a recipe for the {role} {self.content[role]} (sha256 {known[:12] or 'unknown'}),"
                    f" not for {name} ({digest[:12] or 'unknown'}): tune this pair"
                )

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a tokenizer, or a chat template, that the certificate was not measured with."""
        from selfjudge.models.tokens import hash_tokenizer

        if hash_tokenizer(tokenizer) != self.content["tokenizer_sha256"]:
            raise SelfJudgeError(f"{self.folder} is a recipe for another tokenizer or chat template: tune this pair")


def make_recipe(certificate: Mapping[str, Any], pair: Pair, judge: str | None) -> dict[str, Any]:
    """The content of recipe.json but for its hashes, with the folder's name of the judge, if the rule has one."""
    return {
        "format_version": FORMAT,
        "target": pair.target_id,
        "draft": pair.draft_id,
        "load": certificate["load"],
        **{name: certificate[name] for name in SHARED},
        "more_loads": [{name: row[name] for name in ROW} for row in certificate["more_loads"]],
        "judge": judge,
    }


def seal_recipe(recipe: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe with the SHA-256 of all files that belong to it, and of itself."""
    judge = sorted((folder / recipe["judge"]).iterdir()) if recipe["judge"] else []
    names = [CERTIFICATE, *([PAGE] if (folder / PAGE).is_file() else [])]
    names += [f"{recipe['judge']}/{file.name}" for file in judge if file.is_file() and file.name[0] != "."]
    sealed = {**recipe, "files": {name: sha256(folder / name) for name in names}}
    return {**sealed, "digest": hash_recipe(sealed)}
